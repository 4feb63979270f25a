"""Named ranges for torch's profiler and Nsight Systems: one for every action, such as `F s2 m5`, and its messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from stageline.runtime._torch_private import emits_nvtx, profiler_is_on, profiles_this_thread

Mark = Callable[[str], AbstractContextManager[Any]]
"""Makes a context that shows as a range with this name."""


class NvtxRange:
    """A range that Nsight shows; costs well below a microsecond where no tool is attached."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class _RecordedNvtxRange:
    """A range for torch's profiler and for Nsight."""

    def __init__(self, name: str) -> None:
        self._recorded: AbstractContextManager[Any] = record_function(name)
        self._nvtx = NvtxRange(name)

    def __enter__(self) -> None:
        self._nvtx.__enter__()
        self._recorded.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorded.__exit__(*error)
        self._nvtx.__exit__()


def warn_about_threads() -> None:
    """Warn if torch's profiler records the calling thread alone, while ranks run on threads of their own."""
    if profiler_is_on() and profiles_this_thread():
        warnings.warn(
            "torch's profiler records only the thread that starts it, but the ranks of this pipeline are threads; to "
            "record them, pass experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True) to "
            "torch.profiler.profile, or start one process per rank",
            stacklevel=2,
        )


def range_marker(on_gpu: bool) -> Mark:
    """What marks ranges in this step: nothing if no profiler is on, except for NVTX ranges on a GPU.

    >>> with range_marker(on_gpu=False)("F s2 m5"):
    ...     torch.ones(2)
    tensor([1., 1.])
    """
    if not profiler_is_on():
        return NvtxRange if on_gpu else nullcontext
    # Under `torch.autograd.profiler.emit_nvtx`, a recorded range is an NVTX range already.
    return _RecordedNvtxRange if on_gpu and not emits_nvtx() else record_function

"""The context of the thread that calls `step`, applied in the threads of the ranks.

Autocast, hooks for saved tensors, context variables and, in part, the number of threads belong to a thread. A new
thread has none of them, and a step in it would silently compute something else.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from stageline.tensors._torch_private import any_autocast_enabled, saved_tensors_hooks

autocast_enabled = any_autocast_enabled
"""Whether autocast is on in this thread, for any type of device."""


def autocasts() -> list[Any]:
    """Contexts that restore the current autocast settings later."""
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        for kind in _kinds()
    ]


def _kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]  # type: ignore[no-untyped-call]


def plain_precision() -> AbstractContextManager[Any]:
    """Disable autocast, for a backward: its products have the types that the forward chose."""
    on = [kind for kind in _kinds() if torch.is_autocast_enabled(kind)]
    if not on:
        return _NOTHING
    stack = ExitStack()
    for kind in on:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


_NOTHING: AbstractContextManager[Any] = nullcontext()


class ThreadContext:
    """The context of the thread that creates this."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._threads = torch.get_num_threads()
        self._autocast = {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _kinds()}
        self._hooks = saved_tensors_hooks()

    def run(self, call: Callable[[], Any]) -> Any:
        """Call a function in another thread, with the context of the first."""
        return self._context.copy().run(self._run, call)

    def _run(self, call: Callable[[], Any]) -> Any:
        # Some libraries read their own count of the thread before torch gets to set it.
        torch.set_num_threads(self._threads)
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self._hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            return call()

"""The `compile` option: from what a user passes to the keyword arguments of torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from stageline.common.errors import StagelineError, shorten

Compile = bool | str | Mapping[str, Any]
"""Whether to compile, the name of a backend, or keyword arguments of torch.compile."""

GRAPHS = "graphs"
"""The backend that runs captured graphs operator by operator."""

SPLIT_BACKENDS = (GRAPHS, "inductor")
"""The backends whose backward runs in two halves where the schedule splits it."""


def compile_options(option: Compile, *, split: bool) -> dict[str, Any] | None:
    """The keyword arguments of torch.compile; None if nothing is compiled.

    If the schedule splits the backward (`split`), inductor compiles its two halves separately. Backends other than
    `SPLIT_BACKENDS` compile a backward as a whole: then weight gradients are computed in I, not in W.

    >>> compile_options("aot_eager", split=True)
    {'backend': 'aot_eager'}
    >>> compile_options(False, split=True) is None
    True
    """
    if not isinstance(option, bool | str | Mapping):
        raise StagelineError(
            f"compile is True, the name of a backend or a dict of torch.compile's keyword arguments, "
            f"got {shorten(option)}"
        )
    if option is False:
        return None
    options: dict[str, Any] = {} if option is True else {"backend": option} if isinstance(option, str) else dict(option)
    backend = options.get("backend", "inductor")
    if backend in SPLIT_BACKENDS and (split or backend == GRAPHS):
        options["backend"] = _split_backend(backend)
    return options


@cache
def _split_backend(compiler: Any) -> Any:
    """The backend of this process: units share their compiled graphs if their backends are the same object."""
    from stageline.autograd.graphs.backend import GraphBackend  # imports torch's compiler, which takes seconds

    return GraphBackend(compiler, warnings.warn)

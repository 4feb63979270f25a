"""The `compile` option: torch.compile for the layers of every stage."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.units import layers_of

Compile = bool | str | Mapping[str, Any]
"""Whether to compile, the name of a backend, or keyword arguments of torch.compile."""

GRAPHS = "graphs"
"""The backend that runs captured graphs operator by operator."""

SPLIT_BACKENDS = (GRAPHS, "inductor")
"""The backends whose backward runs in two halves where the schedule splits it."""


def compile_units(parts: Iterable[nn.Sequential], option: Compile, *, split: bool = False) -> None:
    """Compile each layer of the stages, or each unit of a model with its own forward, separately.

    The code between the units, and names, hooks and state dicts, do not change. If the schedule splits the backward
    (`split`), inductor compiles the two halves of a unit's backward separately. Backends other than "inductor" and
    "graphs" compile a backward as a whole: then the weight gradients of a unit are computed in I, not in W.

    >>> import torch
    >>> part = nn.Sequential(nn.Linear(2, 2))
    >>> compile_units([part], {"backend": "eager"})
    >>> part(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    if not isinstance(option, bool | str | Mapping):
        raise StagelineError(
            f"compile is True, the name of a backend or a dict of torch.compile's keyword arguments, "
            f"got {shorten(option)}"
        )
    if option is False:
        return
    options: dict[str, Any] = {} if option is True else {"backend": option} if isinstance(option, str) else dict(option)
    backend = options.get("backend", "inductor")
    if backend in SPLIT_BACKENDS and (split or backend == GRAPHS):
        options["backend"] = _split_backend(backend)
    for part in parts:
        for _, module in part.own_units() if isinstance(part, StagePart) else layers_of(part):
            if any(True for _ in module.parameters()):
                module.compile(**options)


@cache
def _split_backend(compiler: Any) -> Any:
    """The backend of this process: units share their compiled graphs if their backends are the same object."""
    from stageline.autograd.graphs.backend import GraphBackend  # imports torch's compiler, which takes seconds

    return GraphBackend(compiler, warnings.warn)

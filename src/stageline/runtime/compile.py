"""torch.compile of the parts of every stage, as an option of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.units import layers_of

Compile = bool | str | Mapping[str, Any]
"""Whether to compile; the name of a backend; or the keywords of torch.compile."""


def compile_units(parts: Iterable[nn.Sequential], asked: Compile) -> None:
    """Compile the layers of stages, or the units of a model with its own forward: each by itself, and like ones once.

    What is between the units stays as it is, and so do names, hooks and states. Gradients of weights in a compiled unit
    come with I, not with W: a compiled backward is one piece.

    >>> part = nn.Sequential(nn.Linear(2, 2))
    >>> compile_units([part], {"backend": "eager"})
    >>> part[0]._compiled_call_impl is not None
    True
    """
    if not isinstance(asked, bool | str | Mapping):
        raise StagelineError(
            f"compile is True, the name of a backend or a dict of torch.compile's keywords, got {shorten(asked)}"
        )
    if asked is False:
        return
    options: dict[str, Any] = {} if asked is True else {"backend": asked} if isinstance(asked, str) else dict(asked)
    for part in parts:
        if isinstance(part, StagePart):
            modules = [part.replay.modules[name].module for name, _ in part.drawn() if name in part.replay.modules]
        else:
            modules = [module for _, module in layers_of(part)]
        for module in modules:
            if any(True for _ in module.parameters()):
                module.compile(**options)

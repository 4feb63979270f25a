"""What the forward of a layer accepts, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of a module's forward."""

    single: bool
    """Whether it takes its whole input as one argument, as nn.Sequential does, rather than one per part."""
    names: frozenset[str] = frozenset()
    any_keyword: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> ForwardSignature:
        """Inspect a module.

        >>> ForwardSignature.of(nn.Linear(2, 2)).single
        True
        """
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):
            return cls(single=True)
        kinds = inspect.Parameter
        any_keyword = any(parameter.kind == kinds.VAR_KEYWORD for parameter in parameters)
        several = any_keyword or any(parameter.kind == kinds.VAR_POSITIONAL for parameter in parameters)
        named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        names = frozenset(parameter.name for parameter in parameters if parameter.kind in named)
        return cls(single=not several and len(parameters) == 1, names=names, any_keyword=any_keyword)

    def accepted(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword inputs that the module accepts."""
        return {name: value for name, value in keywords.items() if self.any_keyword or name in self.names}


def refuse_unknown_keywords(stage: int, names: Iterable[str], signatures: Collection[ForwardSignature]) -> None:
    """Refuse keyword inputs that no layer of a stage accepts."""
    for name in names:
        if not any(signature.accepted({name: None}) for signature in signatures):
            known = sorted({known for signature in signatures for known in signature.names})
            raise StagelineError(
                f"stage_kwargs has {name!r} for stage {stage}, but no layer of that stage accepts it; its layers "
                f"accept {', '.join(known)}"
            )

"""What a layer's forward takes, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Takes:
    """What a module's forward takes."""

    one: bool
    """Its whole input as one argument, as nn.Sequential does, rather than one per part."""
    names: frozenset[str] = frozenset()
    anything: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Takes:
        """Look at a module.

        >>> Takes.of(nn.Linear(2, 2)).one
        True
        """
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):
            return cls(one=True)
        kinds = inspect.Parameter
        anything = any(parameter.kind == kinds.VAR_KEYWORD for parameter in parameters)
        several = anything or any(parameter.kind == kinds.VAR_POSITIONAL for parameter in parameters)
        names = frozenset(
            each.name for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        )
        return cls(one=not several and len(parameters) == 1, names=names, anything=anything)

    def chosen(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the keyword inputs that the module takes."""
        return {name: value for name, value in keywords.items() if self.anything or name in self.names}

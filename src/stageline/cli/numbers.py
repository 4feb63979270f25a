"""Numbers on the command line: their limits in the help, and one error for a wrong number with any version of typer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from stageline.common.errors import shorten


@dataclass(frozen=True)
class NumberParser:
    """Parse a number and check its limits.

    >>> NumberParser(int, 1)("4"), NumberParser(float)("1e3")
    (4, 1000.0)
    """

    kind: type[int] | type[float]
    min: float | None = None
    max: float | None = None

    __name__ = "number"  # typer reads it from every parser

    def __call__(self, text: Any) -> int | float:
        """Return the number, or raise an error with the text and what was expected."""
        try:
            number = self.kind(text)
        except (ValueError, OverflowError):
            number = math.nan
        low = -math.inf if self.min is None else self.min
        high = math.inf if self.max is None else self.max
        if low <= number <= high:
            return number
        raise typer.BadParameter(f"must be {self.expected()}, got {shorten(str(text))}")

    def expected(self) -> str:
        """Describe the numbers that are accepted.

        >>> NumberParser(int, 1).expected(), NumberParser(float).expected(), NumberParser(int, 0, 9).expected()
        ('an integer >= 1', 'a number', 'an integer between 0 and 9')
        """
        kind = "an integer" if self.kind is int else "a number"
        if self.min is not None and self.max is not None:
            return f"{kind} between {self.min} and {self.max}"
        return kind if self.min is None else f"{kind} >= {self.min}"

    def metavar(self, name: str | None) -> str:
        """Return the placeholder of the help, with the limits.

        >>> NumberParser(int, 1).metavar(None), NumberParser(float).metavar("S"), NumberParser(int, 0, 9).metavar("N")
        ('N>=1', 'S', '0<=N<=9')
        """
        name = name or ("N" if self.kind is int else "X")
        if self.min is not None and self.max is not None:
            return f"{self.min}<={name}<={self.max}"
        return name if self.min is None else f"{name}>={self.min}"


def check_numbers(verb: Callable[..., None]) -> Callable[..., None]:
    """Give each option of a verb that takes a number a parser of ours: the errors of typer differ between versions."""
    hints = get_type_hints(verb, include_extras=True)
    parameters = [
        parameter.replace(annotation=_checked(hints[parameter.name]))
        for parameter in inspect.signature(verb).parameters.values()
    ]

    def call(**arguments: Any) -> None:
        verb(**arguments)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _checked(hint: Any) -> Any:
    """Return the annotation of an option with a parser, if it takes a number; flags get no placeholder in the help."""
    option = get_args(hint)[1] if get_origin(hint) is Annotated else None
    if not isinstance(option, OptionInfo):
        return hint
    base = get_args(hint)[0]
    kinds = {kind for kind in get_args(base) or (base,) if kind in (int, float, bool)}
    option = copy(option)
    if bool in kinds:
        option.metavar = ""
    elif kinds:
        parser = NumberParser(kinds.pop(), option.min, option.max)
        option.parser, option.metavar = parser, parser.metavar(option.metavar)
        option.min = option.max = None
    return Annotated[base, option]

"""Sizes in bytes as people write them: 24GiB, 10G, 636 KiB. The same for commands and for Python."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from stageline.common.errors import StagelineError, shorten

Size: TypeAlias = float | str
"""A number of bytes, or text such as "24GiB"."""

_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(i?)b?\s*")
_UNITS = ("TiB", "GiB", "MiB", "KiB")

Other = TypeVar("Other")


def read_size(text: str, name: str = "memory") -> float:
    """Read one size; K, M, G and T are powers of 1024 with an i, and of 1000 without.

    >>> read_size("24GiB") / 2**30, read_size("10G"), read_size("512"), read_size("636 KiB")
    (24.0, 10000000000.0, 512.0, 651264.0)
    """
    found = _SIZE.fullmatch(text.lower())
    try:
        assert found is not None
        value = float(found[1]) * (1024.0 if found[3] else 1000.0) ** " kmgt".index(found[2] or " ")
        if value < math.inf:
            return value
    except (AssertionError, ValueError):
        pass
    raise StagelineError(f"{name} takes a size, like 24GiB or 10G; got {shorten(text)}")


def read_sizes(value: Size | Sequence[Size] | Other, name: str = "memory") -> float | list[float] | Other:
    """Read one size, or several in a sequence or with commas between; what is neither is left as it is.

    >>> read_sizes("24GiB,12GiB"), read_sizes(["1K", 2000.0]), read_sizes(7.0)
    ([25769803776.0, 12884901888.0], [1000.0, 2000.0], 7.0)
    """
    if isinstance(value, str):
        values = [read_size(part, name) for part in value.split(",")]
        return values[0] if len(values) == 1 else values
    if isinstance(value, list | tuple) and any(isinstance(each, str) for each in value):
        return [read_size(each, name) if isinstance(each, str) else each for each in value]
    return value  # type: ignore[return-value]


def enough(value: float) -> str:
    """The shortest text, of three figures at most, of a size that is no smaller.

    >>> enough(651000.0), enough(2.0**30), enough(9.7701e9), enough(17.2)
    ('636KiB', '1GiB', '9.1GiB', '18')
    """
    for power, unit in zip((40, 30, 20, 10), _UNITS, strict=True):
        if value >= 2**power:
            scaled = value / 2**power
            places = 10 ** max(0, 2 - int(math.log10(scaled)))
            return f"{math.ceil(scaled * places - 1e-9) / places:g}{unit}"
    return str(math.ceil(value))

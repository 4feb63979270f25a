"""Quantities as people read and write them: 24GiB, 15.2k, 2.48 ms, 2:31."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import TypeAlias, TypeVar

from stageline.common.errors import StagelineError, shorten

Size: TypeAlias = float | str
"""A number of bytes, or text such as "24GiB"."""

Other = TypeVar("Other")

_SIZE = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(i?)b?\s*")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str, name: str = "memory") -> float:
    """Parse a size; K, M, G and T are powers of 1024 with an i, and of 1000 without. Errors call it `name`.

    >>> parse_size("24GiB") / 2**30, parse_size("10G"), parse_size("512"), parse_size("636 KiB")
    (24.0, 10000000000.0, 512.0, 651264.0)
    """
    match = _SIZE.fullmatch(text.lower())
    if match is not None:
        value = float(match[1]) * (1024.0 if match[3] else 1000.0) ** " kmgt".index(match[2] or " ")
        if value < math.inf:
            return value
    raise StagelineError(f"{name} must be a size, like 24GiB or 10G; got {shorten(text)}")


def parse_sizes(value: Size | Sequence[Size] | Other) -> float | list[float] | Other:
    """Parse one size, or several in a sequence or separated by commas; return anything else unchanged.

    >>> parse_sizes("24GiB,12GiB"), parse_sizes(["1K", 2000.0]), parse_sizes(7.0)
    ([25769803776.0, 12884901888.0], [1000.0, 2000.0], 7.0)
    """
    if isinstance(value, str):
        sizes = [parse_size(part) for part in value.split(",")]
        return sizes[0] if len(sizes) == 1 else sizes
    if isinstance(value, list | tuple) and any(isinstance(size, str) for size in value):
        return [parse_size(size) if isinstance(size, str) else size for size in value]
    return value  # type: ignore[return-value]


def format_size(value: float, *, fixed: bool = False) -> str:
    """Format a number of bytes with three significant digits; `fixed` keeps one decimal place, for live displays.

    >>> format_size(0), format_size(1500), format_size(123456789), format_size(3 * 2**30)
    ('0 B', '1.46 KiB', '118 MiB', '3 GiB')
    >>> format_size(3 * 2**30, fixed=True)
    '3.0 GiB'
    """
    if not math.isfinite(value):
        return f"{value:g} B"
    shown = ""
    for unit in _UNITS:
        digits = ".0f" if value >= 99.95 or unit == "B" else ".1f" if fixed else ".3g"
        shown = f"{value:{digits}}"
        if float(shown) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{shown} {unit}"


def round_up_size(value: float) -> str:
    """Return the shortest size, with at most three digits, that is not smaller; `parse_size` reads it.

    >>> round_up_size(651000.0), round_up_size(2.0**30), round_up_size(9.7701e9), round_up_size(17.2)
    ('636KiB', '1GiB', '9.1GiB', '18')
    """
    for power, unit in reversed(list(enumerate(_UNITS[1:5], start=1))):
        if value >= 1024**power:
            scaled = value / 1024**power
            places = 10 ** max(0, 2 - int(math.log10(scaled)))
            return f"{math.ceil(scaled * places - 1e-9) / places:g}{unit}"
    return str(math.ceil(value))


def format_count(value: float) -> str:
    """Format a count with three digits.

    >>> format_count(15234.0), format_count(870.4), format_count(2.5e6), format_count(3.14159), format_count(0)
    ('15.2k', '870', '2.5M', '3.14', '0')
    """
    if not math.isfinite(value):
        return f"{value:g}"
    sign, value = ("-", -value) if value < 0 else ("", value)
    for unit in ("", "k", "M", "G", "T", "P"):
        shown = f"{value:.3g}" if value < 99.95 else f"{value:.0f}"
        if float(shown) < 1000:
            return f"{sign}{value:.1f}{unit}" if unit and value < 99.95 else f"{sign}{shown}{unit}"
        value /= 1000
    return f"{sign}{value:.3g}E"


def format_seconds(seconds: float) -> str:
    """Format a time with three significant digits.

    >>> format_seconds(0.0000739), format_seconds(0.00123), format_seconds(2.5), format_seconds(0.0)
    ('73.9 µs', '1.23 ms', '2.5 s', '0')
    """
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0"


def format_makespan(seconds: float) -> str:
    """Format the time of a step with four digits, in milliseconds below 10 seconds: the same wherever it is shown.

    >>> format_makespan(0.27412), format_makespan(1.438), format_makespan(12.3456)
    ('274.1 ms', '1438 ms', '12.35 s')
    """
    return f"{seconds:.4g} s" if seconds >= 10 else f"{1e3 * seconds:.4g} ms"


def format_range(low: float, high: float) -> str:
    """Format a range of times, both in the unit of the longer one.

    >>> format_range(0.213, 0.816), format_range(0.0004, 0.0123)
    ('213–816 ms', '0.4–12.3 ms')
    """
    unit, length = next(((name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if high >= size), ("µs", 1e-6))
    return f"{low / length:.3g}–{high / length:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Format a time with a steady number of digits: milliseconds, seconds, or as a clock from a minute upwards.

    >>> format_duration(0.0123), format_duration(0.4), format_duration(12.34), format_duration(75)
    ('12 ms', '0.40 s', '12.3 s', '1:15')
    """
    if not math.isfinite(seconds) or seconds >= 60:
        return format_clock(seconds)
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.00095 or seconds == 0 else f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def format_clock(seconds: float) -> str:
    """Format a time as a clock does.

    >>> format_clock(39.4), format_clock(151), format_clock(3723), format_clock(300_000), format_clock(float("inf"))
    ('0:39', '2:31', '1:02:03', '3d 11:20', '?')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_loss(value: float) -> str:
    """Format a loss with a steady number of digits.

    >>> format_loss(2.3145678), format_loss(0.00002), format_loss(123456.0), format_loss(float("nan"))
    ('2.3146', '2.00e-05', '1.23e+05', 'nan')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-2 <= abs(value) < 1e4 else f"{value:.2e}"


def format_percent(value: float, places: int = 0) -> str:
    """Format a share in percent.

    >>> format_percent(0.2134), format_percent(0.2134, 1)
    ('21%', '21.3%')
    """
    return f"{value:.{places}%}" if math.isfinite(value) else f"{value:g}"


def format_uncertainty(value: float) -> str:
    """Return a relative uncertainty, which means nothing above 1.

    >>> format_uncertainty(0.3), format_uncertainty(148.8)
    ('30%', 'more than 100%')
    """
    return "more than 100%" if value > 1 else f"{value:.0%}"


def format_table(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Align the columns of a table: those in `left` to the left, the others to the right.

    >>> format_table([["a", "bubble"], ["ccc", "5%"]], left={0})
    ['a    bubble', 'ccc      5%']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> pluralize(1, "rank"), pluralize(4, "microbatch")
    ('1 rank', '4 microbatches')
    """
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def format_sizes(ranks: int, stages: int, microbatches: int) -> str:
    """Return the sizes of a schedule.

    >>> format_sizes(1, 2, 8)
    '1 rank, 2 stages, 8 microbatches'
    """
    return ", ".join(
        pluralize(number, noun) for number, noun in ((ranks, "rank"), (stages, "stage"), (microbatches, "microbatch"))
    )

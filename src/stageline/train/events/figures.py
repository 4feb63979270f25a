"""Numbers as people read them: 15.2k, 1.2 GiB, 2:31."""

from __future__ import annotations

import math
from typing import Any


def number_of(value: Any) -> float | None:
    """Give a value as a number, or None if it is none; what is not finite is a number here.

    >>> number_of(3), number_of("3"), number_of(True)
    (3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def count(value: float) -> str:
    """Write a count in three figures.

    >>> count(15234.0), count(870.4), count(2.5e6), count(3.14159), count(0)
    ('15.2k', '870', '2.5M', '3.14', '0')
    """
    if not math.isfinite(value):
        return f"{value:g}"
    sign, value = ("-", -value) if value < 0 else ("", value)
    for unit in ("", "k", "M", "G", "T", "P"):
        shown = f"{value:.3g}" if value < 99.95 else f"{value:.0f}"
        if float(shown) < 1000:
            return f"{sign}{_short(value) if unit else shown}{unit}"
        value /= 1000
    return f"{sign}{value:.3g}E"


def _short(value: float) -> str:
    """One place after the point below 100: figures that stand still while they change."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def size(value: float) -> str:
    """Write a number of bytes.

    >>> size(0), size(1500), size(123456789), size(3 * 2**30)
    ('0 B', '1.5 KiB', '118 MiB', '3.0 GiB')
    """
    if not math.isfinite(value):
        return f"{value:g} B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        shown = f"{value:.0f}" if unit == "B" else _short(value)
        if float(shown) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{shown} {unit}"


def time(seconds: float) -> str:
    """Write a length of time as a clock shows it.

    >>> time(39.4), time(151), time(3723), time(300_000), time(float("inf"))
    ('0:39', '2:31', '1:02:03', '3d 11:20', '?')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def moment(seconds: float) -> str:
    """Write a short length of time with its unit.

    >>> moment(0.0123), moment(0.4), moment(12.34), moment(75)
    ('12 ms', '0.40 s', '12.3 s', '1:15')
    """
    if not math.isfinite(seconds) or seconds >= 60:
        return time(seconds)
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.00095 or seconds == 0 else f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def loss(value: float) -> str:
    """Write a loss in figures that stand still.

    >>> loss(2.3145678), loss(0.00002), loss(123456.0), loss(float("nan"))
    ('2.3146', '2.00e-05', '1.23e+05', 'nan')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-2 <= abs(value) < 1e4 else f"{value:.2e}"


def share(value: float, places: int = 0) -> str:
    """Write a share in percent.

    >>> share(0.2134), share(0.2134, 1)
    ('21%', '21.3%')
    """
    return f"{value:.{places}%}" if math.isfinite(value) else f"{value:g}"

"""What a job prints: a progress line that updates on a terminal, plain lines in a pipe."""

from __future__ import annotations

import atexit
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from stageline.common.checked_json import number_or_none
from stageline.common.units import format_clock, format_count, format_loss, format_makespan, format_percent, format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


PIPE = 80
"""Columns of a line in a pipe."""
REFRESH = 0.1


def clean(text: str) -> str:
    """Replace control characters and line breaks of a text.

    >>> clean("out of memory\\n\\x1b[2Jrank 3")
    'out of memory �[2Jrank 3'
    """
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def put(line: str, file: IO[str] | None = None) -> bool:
    """Print a line; return whether that worked, because a closed pipe must not end a training job."""
    to = file or sys.stdout
    try:
        try:
            print(line, file=to, flush=True)
        except UnicodeEncodeError:
            print(line.encode("ascii", "replace").decode(), file=to, flush=True)
    except OSError:  # the reader closed the pipe, or the disk is full
        if to is sys.stdout:
            with suppress(OSError, ValueError):  # discard what is still in the buffer
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, to.fileno())
                os.close(nowhere)
        return False
    return True


class Lines:
    """Plain lines, for a pipe or a file."""

    updates = False
    """Whether the progress line replaces the previous one, so that every step can be shown."""

    def __init__(self, file: IO[str] | None = None) -> None:
        """Print to this file, or to standard output."""
        self._file = file
        self._gone = False

    def show(self, parts: list[Part], share: float, *, now: bool = False) -> None:
        """Print the line of a step; `share` is the fraction that is done."""
        self._print(fit(parts, PIPE))

    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._print(clean(text))

    def close(self) -> None:
        """Do nothing."""

    def _print(self, line: str) -> None:
        self._gone = self._gone or not put(line, self._file)


class Terminal:
    """A progress line at the bottom that updates; other lines are printed above it."""

    updates = True

    def __init__(self, console: Console) -> None:
        """The progress line appears with the first step."""
        self._console = console
        self._live: Any = None
        self._shown = 0.0

    def show(self, parts: list[Part], share: float, *, now: bool = False) -> None:
        """Update the line, a few times a second at most."""
        with suppress(OSError):  # the terminal was closed
            self._update(parts, share, now)

    def _update(self, parts: list[Part], share: float, now: bool) -> None:
        from rich.live import Live

        text = self._text(parts, share)
        if self._live is None:
            # Refreshed by the steps, not by a thread.
            self._live = Live(text, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
            atexit.register(self.close)  # restores the cursor
        clock = time.monotonic()
        due = now or clock - self._shown >= REFRESH
        self._live.update(text, refresh=due)
        self._shown = clock if due else self._shown

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the progress line."""
        from rich.text import Text

        with suppress(OSError):  # a style given to print would also apply to the progress line
            self._console.print(Text(clean(text), style=style), highlight=False)

    def close(self) -> None:
        """Stop updating; the last line stays."""
        if self._live is not None:
            atexit.unregister(self.close)
            with suppress(OSError):
                self._live.refresh()
                self._live.stop()
            self._live = None

    def _text(self, parts: list[Part], share: float) -> Text:
        from rich.text import Text

        # Leave the last column free: some terminals wrap when it is written.
        width = self._console.width - 1
        kept = choose(parts, width)
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for gap, part in zip(gaps(kept), kept, strict=True):
            text.append(gap)
            text.append(part.text, style=part.style)
        room = width - len(text.plain) - 2
        if kept == parts and room >= 10:
            bar = min(room, 40)
            done = round(bar * min(max(share, 0.0), 1.0))
            text = Text.assemble(("━" * done, "green"), ("━" * (bar - done), "bright_black"), "  ", text)
            text.no_wrap, text.overflow = True, "ellipsis"
        return text


Screen = Lines | Terminal


def open_screen(console: Console | None, *, colour: bool) -> Screen:
    """Return a terminal if stdout is one, else plain lines."""
    if console is None:
        if not sys.stdout.isatty():
            return Lines()
        from rich.console import Console

        console = Console(highlight=False, no_color=None if colour else True)
    if not console.is_terminal or console.is_dumb_terminal:
        return Lines(console.file)
    return Terminal(console)


WARM_UP, RECENT = 2, 40
BETWEEN = "  "


class Part(NamedTuple):
    """One thing on the line."""

    text: str
    weight: int
    """If there is no room, the part with the smallest weight is dropped first; the heaviest stays."""
    style: str = ""


class Pace:
    """How long a step takes: the median of the recent ones, without the first steps after a start."""

    def __init__(self) -> None:
        """Starts empty."""
        self._taken: deque[float] = deque(maxlen=RECENT)
        self._steps = 0
        self._before: tuple[int, float] | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a step; the time between two steps includes what a step's own time does not, such as data loading."""
        step, now, own = row["step"], number_or_none(row.get("time")), number_or_none(row.get("seconds"))
        taken = own
        if self._before is not None and now is not None and step == self._before[0] + 1:
            taken = max(now - self._before[1], own or 0.0)
        self._before = None if now is None else (step, now)
        self._steps += 1
        if self._steps == WARM_UP + 1:
            self._taken.clear()  # forget the slow first steps
        if taken is not None and math.isfinite(taken) and taken >= 0:
            self._taken.append(taken)

    @property
    def seconds(self) -> float | None:
        """The median time of a step; None before it is known."""
        return statistics.median(self._taken) if self._taken else None

    def left(self, step: int, total: int) -> float | None:
        """Return the estimated time of the remaining steps."""
        return None if self.seconds is None else self.seconds * max(0, total - step)


def parts_of(row: Mapping[str, Any], total: int, left: float | None, taken: float | None = None) -> list[Part]:
    """Return the parts of the progress line; `left` is the remaining time, `taken` the time of a finished run.

    >>> row = {"event": "step", "step": 12, "loss": 2.31, "tokens_per_s": 15234.0, "bubble": 0.21,
    ...        "planned_bubble": 0.18, "memory": 1288490189, "makespan": 0.363, "planned_makespan": 0.34}
    >>> fit(parts_of(row, total=300, left=151.0), 80)
    ' 12/300  loss 2.3100  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  2:31 left'
    >>> fit(parts_of(row, total=300, left=151.0), 120)[22:87]
    '15.2k tok/s  makespan 363 ms (plan 340 ms)  bubble 21% (plan 18%)'
    >>> fit(parts_of(row, total=300, left=151.0), 40)
    ' 12/300  loss 2.3100  2:31 left'
    """
    parts = [Part(f"{row['step']:>{len(str(total))}}/{total}", 9, "bold")]
    names = ("loss", "tokens_per_s", "mfu", "makespan", "planned_makespan", "bubble", "planned_bubble", "memory")
    values = {name: number_or_none(row.get(name)) for name in names}
    if values["loss"] is not None:
        finite = math.isfinite(values["loss"])
        parts.append(Part(f"loss {format_loss(values['loss'])}", 8, "" if finite else "bold red"))
    if row.get("skipped") is True:
        parts.append(Part("skipped", 6, "yellow"))
    if values["tokens_per_s"] is not None:
        parts.append(Part(f"{format_count(values['tokens_per_s'])} tok/s", 4))
    if values["mfu"] is not None:
        parts.append(Part(f"MFU {format_percent(values['mfu'])}", 4))
    if values["makespan"] is not None:
        parts.append(Part(f"makespan {format_makespan(values['makespan'])}", 1))
        if values["planned_makespan"] is not None:
            parts.append(Part(f"(plan {format_makespan(values['planned_makespan'])})", 0, "dim"))
    if values["bubble"] is not None:
        parts.append(Part(f"bubble {format_percent(values['bubble'])}", 5))
    if values["planned_bubble"] is not None:
        plan = f"plan {format_percent(values['planned_bubble'])}"
        parts.append(Part(f"({plan})" if values["bubble"] is not None else f"bubble {plan}", 3, "dim"))
    if values["memory"] is not None:
        parts.append(Part(format_size(values["memory"], fixed=True), 2))
    if taken is not None:
        parts.append(Part(f"took {format_clock(taken)}", 7))
    elif left is not None:
        parts.append(Part(f"{format_clock(left)} left", 7, "cyan"))
    return parts


def choose(parts: list[Part], width: int) -> list[Part]:
    """Return the parts that fit into the width, in order; those with the smallest weight are left out first."""
    kept = list(parts)
    while len(kept) > 1 and len(joined(kept)) > width:
        kept.remove(min(kept, key=lambda part: part.weight))
    return kept


def joined(parts: list[Part]) -> str:
    """Return the parts as one line."""
    return "".join(gap + part.text for gap, part in zip(gaps(parts), parts, strict=True))


def gaps(parts: list[Part]) -> list[str]:
    """Return the space before each part; a part in brackets follows the previous one closely."""
    return ["" if not at else " " if part.text.startswith("(") else BETWEEN for at, part in enumerate(parts)]


def fit(parts: list[Part], width: int) -> str:
    """Return a line of at most this width."""
    return joined(choose(parts, width))[:width]

"""Where the lines for people go: one that updates on a terminal, plain ones into a pipe."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Protocol

from stageline.train.events.progress_line import Part, choose, fit, gaps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPE = 80
"""Columns of a line where nobody says how wide the output is."""
REFRESH = 0.1


class Screen(Protocol):
    """What lines are shown on."""

    updates: bool
    """Whether each line of a step takes the place of the one before, so that every step can be shown."""

    def show(self, parts: list[Part], share: float, *, now: bool = False) -> None:
        """Show where the job stands, and which share of it is done; `now` is not to be left out."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def clean(text: str) -> str:
    """What came from elsewhere must not steer a terminal, nor break a line.

    >>> clean("out of memory\\n\\x1b[2Jrank 3")
    'out of memory �[2Jrank 3'
    """
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def put(line: str, file: IO[str] | None = None) -> bool:
    """Print a line, and give back whether it could be: that nobody reads along is no reason to end a training job.

    >>> put("one line")
    one line
    True
    """
    to = file or sys.stdout
    try:
        try:
            print(line, file=to, flush=True)
        except UnicodeEncodeError:
            print(line.encode("ascii", "replace").decode(), file=to, flush=True)
    except OSError:  # whoever read along went away, or the disk of the output is full
        if to is sys.stdout:
            with suppress(OSError, ValueError):  # what is still in the buffer goes nowhere, also at the very end
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, to.fileno())
                os.close(nowhere)
        return False
    return True


class Lines:
    """Plain lines, for a pipe, a file, or where rich is not installed."""

    updates = False

    def __init__(self, file: IO[str] | None = None) -> None:
        """Print to this file, or to standard output."""
        self._file = file
        self._gone = False

    def show(self, parts: list[Part], share: float, *, now: bool = False) -> None:
        """Print the line of a step."""
        self._print(fit(parts, PIPE))

    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._print(clean(text))

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, line: str) -> None:
        self._gone = self._gone or not put(line, self._file)


class Terminal:
    """One line at the bottom that updates; all else is printed above it."""

    updates = True

    def __init__(self, console: Console) -> None:
        """Take the terminal; the line appears with the first step."""
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
            # No thread of its own refreshes it: the steps do.
            self._live = Live(text, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
            atexit.register(self.close)  # whatever ends the process, the cursor comes back
        clock = time.monotonic()
        due = now or clock - self._shown >= REFRESH
        self._live.update(text, refresh=due)
        self._shown = clock if due else self._shown

    def say(self, text: str, style: str = "") -> None:
        """Print a line above."""
        from rich.text import Text

        with suppress(OSError):  # a style of print's own would be that of the line below, too
            self._console.print(Text(clean(text), style=style), highlight=False)

    def close(self) -> None:
        """Leave the last line where it is, below all others."""
        if self._live is not None:
            atexit.unregister(self.close)
            with suppress(OSError):
                self._live.refresh()
                self._live.stop()
            self._live = None

    def _text(self, parts: list[Part], share: float) -> Text:
        from rich.text import Text

        # The last column stays free: some terminals begin a new line as soon as it is written.
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


def open_screen(console: Console | None, *, colour: bool) -> Screen:
    """The terminal where there is one, and rich; else plain lines."""
    if console is None:
        if not sys.stdout.isatty():
            return Lines()
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return Lines()
        console = Console(highlight=False, no_color=None if colour else True)
    if not console.is_terminal or console.is_dumb_terminal:
        return Lines(console.file)
    return Terminal(console)

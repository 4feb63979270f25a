"""How verbs print: coloured lines on a terminal, plain ones into a pipe, JSON for machines, files on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stageline.common.errors import StagelineError
from stageline.timeline.draw.palette import LOOKS
from stageline.timeline.draw.terminal import Segment


def console(width: int | None = None) -> Console:
    """The terminal, or the pipe, as wide as it is or as asked."""
    found = Console(highlight=False, soft_wrap=True, width=width)
    if width is None and not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 100
    return found


def print_segments(out: Console, lines: Iterable[list[Segment]]) -> None:
    """Print the lines of a chart in the colours of their kinds."""
    for line in lines:
        text = Text()
        for segment in line:
            look = LOOKS.get(segment.letter)
            style = "" if look is None else f"{'#000000' if segment.pale else look.ink} on {_shade(segment)}"
            text.append(segment.text, style=style)
        out.print(text)


def _shade(segment: Segment) -> str:
    look = LOOKS[segment.letter]
    return look.pale if segment.pale else look.fill


def print_json(data: Any) -> None:
    """Print plain data."""
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def save(path: Path | None, text: str, what: str) -> None:
    """Write a file that was asked for, and say so on stderr."""
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StagelineError(f"cannot write {what} to {path}: {error.strerror or error}") from None
    print(f"wrote {what} to {path}", file=sys.stderr)

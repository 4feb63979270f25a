"""The help of `stageline train`, made from the options of a config: examples, then a panel for each section."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stageline.cli.words import SWITCHES
from stageline.train.config.io import argument
from stageline.train.config.options import Option, options, sections

WIDE = 110
"""Columns from which on flags and sentences stand beside each other."""
FLAG, TYPE, DIM = "bold cyan", "bold yellow", "dim"

EXAMPLES = (
    ("stageline train", "the built-in job, on this machine"),
    ("stageline train job.toml", "a job of your own"),
    ("stageline train job.toml --training.steps 1000 --no-validation.enable", ""),
    ("stageline train job.toml --set optimizer.lr=3e-4 --set model.dropout=0.1", ""),
    ("stageline train --print-config > job.toml", "all options, to begin with"),
    ("torchrun --nproc-per-node 4 -m stageline train job.toml", "a rank each"),
)


def manual(said: str, width: int) -> Iterator[RenderableType]:
    """The parts of the help, one below the other."""
    usage = Text("Usage: ", style="yellow").append("stageline train [CONFIG.toml] [OPTIONS]", style="bold white")
    yield Padding(usage, 1)
    for paragraph in said.split("\n\n"):
        yield Padding(Text(" ".join(paragraph.split())), (0, 1, 1, 1))
    yield Padding(Group(*_examples(width - 2)), (0, 1, 1, 1))
    own = [_entry("CONFIG.toml", "", "The file of the job.", "")]
    own.append(_entry("--set", "SECTION.KEY=VALUE", "Set any option; the value is TOML, or a bare text.", ""))
    own += [_entry(name, "", help, "") for name, help in SWITCHES.items()]
    own.append(_entry("--help, -h", "", "Show this message and exit.", ""))
    yield _panel("The job", own, width)
    for section, holder in sections().items():
        entries = [_option(option) for option in options().values() if option.section == section]
        yield _panel(f"{section}: {(holder.__doc__ or '').rstrip('.')}", entries, width)


def _examples(width: int) -> Iterator[Text]:
    for line, what in EXAMPLES:
        said = f"  # {what}" if what and len(line) + len(what) + 6 <= width else ""
        yield Text("  " + line).append(said, style=DIM)


Entry = tuple[Text, Text]


def _entry(flag: str, takes: str, help: str, note: str) -> Entry:
    left = Text(flag, style=FLAG)
    if takes:
        left.append(" " + takes, style=TYPE)
    return left, Text(help).append(note and f" [{note}]", style=DIM)


def _option(option: Option) -> Entry:
    if option.type is bool:
        return _entry(f"--[no-]{option.key}", "", option.help, f"default: {argument(option.default)}")
    kind = "<choice>" if option.choices else f"<{option.type.__name__}>" + (",…" if option.many else "")
    allowed = ", ".join(option.choices) or option.bounds
    shown = argument(option.default)
    default = f"default: {shown if shown == shown.strip() else repr(shown)}" if shown else "default: empty"
    return _entry(f"--{option.key}", kind, option.help, f"{allowed}; {default}" if allowed else default)


def _panel(title: str, entries: list[Entry], width: int) -> Panel:
    """A section: flags and sentences beside each other, or below where there is no room."""
    body: RenderableType
    if width >= WIDE:
        longest = max(_option(option)[0].cell_len for option in options().values())
        body = table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=longest)
        table.add_column(ratio=1)
        for left, right in entries:
            table.add_row(left, right)
    else:
        body = Group(*(part for left, right in entries for part in (left, Padding(right, (0, 0, 0, 4)))))
    return Panel(body, title=Text(title), title_align="left", border_style=DIM)

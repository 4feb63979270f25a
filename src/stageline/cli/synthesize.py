"""`stageline synthesize`: a schedule made for given costs, under a cap on memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageline.cli.options import Html, Json, Prices, Svg, Width, takes
from stageline.cli.output import console, print_json, print_segments, save
from stageline.common import interrupts
from stageline.timeline import draw
from stageline.timeline.draw.palette import number
from stageline.timeline.draw.terminal import chart, figures, legend

if TYPE_CHECKING:
    from stageline.synthesis.search import Progress
    from stageline.synthesis.synthesize import Synthesis


Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE[,…]", help="The most memory of a rank, or one per rank. Default: no cap."),
]
Split = Annotated[
    bool | None, typer.Option("--split/--no-split", help="Split every backward, or none. Default: where it helps.")
]


@takes(prices=Prices)
def command(
    prices: Prices,
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="How many ranks.")],
    microbatches: Annotated[int, typer.Option("-m", "--microbatches", help="How many microbatches.")],
    memory: Memory = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Stages that a rank holds.")] = 1,
    placement: Annotated[
        str, typer.Option("--placement", help="Several chunks round the ranks (loop), or down and up again (v).")
    ] = "loop",
    objective: Annotated[str, typer.Option("--objective", help="What to make short: makespan or span.")] = "makespan",
    split: Split = None,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds to search; Ctrl-C ends it too.")] = 2.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed finds the same schedule, if time allows.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the schedule, as .json or .csv.")
    ] = None,
    svg: Svg = None,
    html: Html = None,
    width: Width = None,
    json: Json = False,
) -> None:
    """Make a schedule for these costs, as short as can be found, and prove how much shorter another could be at most.

    It is never worse than a named family that fits the memory. Costs are those of one stage; with --chunks a rank has
    several.

    \b
    stageline synthesize -p 4 -m 8 --forward 10 --backward-input 11 --backward-weight 7 --transfer 1 --memory 4
    stageline synthesize -p 8 -m 32 --costs measured.json --memory 8,7,6,5,4,3,2,1 -o mine.json
    """
    from stageline.synthesis.synthesize import synthesize

    with _progress() as tell, interrupts.raised():  # the search keeps its best so far
        found = synthesize(
            prices.make(),
            ranks,
            microbatches,
            memory=memory,
            chunks=chunks,
            placement="v" if placement == "vee" else placement,  # vee: the name of version 0.1.0
            objective=objective,
            split=split,
            time_limit=time_limit,
            seed=seed,
            progress=tell,
        )
    if output is not None:
        found.schedule.write(output)
        print(f"wrote the schedule to {output}", file=sys.stderr)
    save(svg, draw.svg(found.timeline) if svg else "", "the picture")
    save(html, draw.html(found.timeline) if html else "", "the page")
    if json:
        programs = [[str(entry) for entry in program] for program in found.schedule.programs]
        print_json({**found.to_json(), "programs": programs})
        return
    _print(found, width)


def _print(found: Synthesis, width: int | None) -> None:
    out = console(width)
    made = found.schedule
    out.print(f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches")
    print_segments(out, chart(found.timeline, out.width))
    out.print()
    print_segments(out, legend([found.timeline], out.width))
    for line in figures(found.timeline):
        out.print(line)
    out.print()
    for words, value in _rows(found):
        out.print(f"{words:<12} {value}")


def _rows(found: Synthesis) -> Iterator[tuple[str, str]]:
    """What was achieved, what is needed at least, and what the families take."""
    yield "achieved", f"{found.objective} {number(found.achieved)}, found by {found.how} in {found.seconds:.1f} s"
    yield "lower bound", f"{number(found.lower_bound)}: no schedule here takes less"
    gap = "0%: this is the best there is" if found.gap == 0 else f"{found.gap:.2%} of the bound, at most"
    yield "gap", gap
    name = found.best_named
    if name is None:
        yield "best family", "none fits this placement and memory"
    else:
        more = found.named[name] / found.achieved - 1 if found.achieved > 0 else 0.0
        longer = f" ({more:.1%} longer)" if more > 1e-9 else " (the same)"
        yield "best family", f"{name}: {number(found.named[name])}{longer}"
    if found.was_cut:
        yield "cut short", "by time or interrupt; a longer --time-limit may find better"


@contextmanager
def _progress() -> Iterator[Any]:
    """A line that says where the search stands, on a terminal."""
    from rich.console import Console

    out = Console(stderr=True, highlight=False)
    if not out.is_terminal:
        yield None
        return
    with out.status("looking at the families …") as status:

        def tell(at: Progress) -> None:
            gap = f", gap {at.achieved / at.lower_bound - 1:.2%}" if at.lower_bound > 0 else ""
            status.update(f"{at.seconds:.1f} s  {number(at.achieved)} by {at.step}{gap}  (Ctrl-C keeps the best)")

        yield tell

"""`stageline show`: draw a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.options import Html, Json, Prices, Sizes, Svg, Target, Width, takes
from stageline.cli.output import console, print_json, print_segments, save
from stageline.timeline import draw
from stageline.timeline.draw.terminal import chart, figures, legend
from stageline.timeline.simulate import simulate


@takes(sizes=Sizes, prices=Prices)
def command(
    schedule: Target,
    sizes: Sizes,
    prices: Prices,
    svg: Svg = None,
    html: Html = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the schedule itself, as .json or .csv.")
    ] = None,
    width: Width = None,
    json: Json = False,
) -> None:
    """Draw a schedule: who does what, when, with its bubble and its memory.

    \b
    stageline show zb-v -p 4 -m 8
    stageline show 1f1b -p 4 -m 8 --forward 10 --backward-input 11 --backward-weight 7 --transfer 1 --html a.html
    """
    made = sizes.make(schedule)
    timeline = simulate(made, prices.make())
    if write is not None:
        made.write(write)
    save(svg, draw.svg(timeline) if svg else "", "the picture")
    save(html, draw.html(timeline) if html else "", "the page")
    save(trace, draw.trace(timeline) if trace else "", "the trace")
    if json:
        programs = [[str(entry) for entry in program] for program in made.programs]
        print_json({**timeline.figures(), "programs": programs})
        return
    out = console(width)
    out.print(f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches")
    print_segments(out, chart(timeline, out.width))
    out.print()
    print_segments(out, legend([timeline], out.width))
    for line in figures(timeline):
        out.print(line)

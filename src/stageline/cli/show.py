"""`stageline show`: draw a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stageline.cli.options import (
    CostOptions,
    DrawingOptions,
    ScheduleName,
    ScheduleOptions,
    expand,
    output_option,
)
from stageline.cli.output import console, print_chart, print_figures, print_json, save
from stageline.timeline import draw
from stageline.timeline.simulate import simulate


@expand
def command(
    schedule: ScheduleName,
    sizes: ScheduleOptions,
    costs: CostOptions,
    trace: Annotated[
        Path | None, output_option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    write: Annotated[Path | None, output_option(metavar="FILE", help="Write the schedule as .json or .csv.")] = None,
    *,
    drawing: DrawingOptions,
) -> None:
    """Draw a schedule with its bubble and its memory.

    Examples:
      stageline show zb-v -p 4 -m 8
      stageline show 1f1b -p 4 -m 8 --forward 10 --backward 18 --html a.html
      stageline show interleaved -p 4 -m 8 --shard default --gather 0.5 --reduce 1
    """
    timeline = simulate(sizes.make(schedule), costs.make())
    if write is not None:
        timeline.schedule.write(write)
    drawing.save(timeline)
    save(trace, lambda: draw.trace(timeline), "the trace")
    if drawing.json:
        ranks = range(timeline.schedule.ranks)
        programs = [[str(entry) for entry in timeline.schedule.lowered_program(rank)] for rank in ranks]
        print_json({**timeline.figures(), "programs": programs})
        return
    out = console(drawing.width)
    print_chart(out, timeline)
    print_figures(out, timeline)

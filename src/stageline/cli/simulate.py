"""`stageline simulate`: what a step costs, and where the time goes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stageline.cli.options import CostOptions, Json, ScheduleName, ScheduleOptions, expand
from stageline.cli.output import add_ranks, console, print_figures, print_json, schedule_title, table
from stageline.common.units import format_size
from stageline.timeline.draw.palette import OWN_UNIT, memory_unit, number, shown_time, time_scale
from stageline.timeline.idle import Idle
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table


@expand
def command(schedule: ScheduleName, sizes: ScheduleOptions, costs: CostOptions, json: Json = False) -> None:
    """Compute when every action runs: bubble, idle time of each rank by its cause, memory, critical path.

    Examples:
      stageline simulate interleaved -p 4 -m 8 --chunks 2 --transfer 0.1
      stageline simulate zb-h1 -p 4 -m 8 --costs measured.json --json
    """
    timeline = simulate(sizes.make(schedule), costs.make())
    if json:
        print_json(timeline.to_json())
        return
    out = console()
    out.print(schedule_title(timeline.schedule))
    print_figures(out, timeline)
    out.print()
    out.print(_rank_table(timeline))
    out.print()
    out.print(_critical_path(timeline))


def _rank_table(timeline: Timeline) -> Table:
    scale, unit = time_scale([timeline])
    in_bytes, kind = memory_unit(timeline) == "bytes", memory_unit(timeline) or OWN_UNIT
    memory_title = "peak memory" if in_bytes else f"peak memory, {kind}"
    causes = [cause.replace("warmup", "warm-up") for cause in Idle._fields]
    grid = table("rank", "busy", *causes, memory_title, title=f"time of each rank, in {unit or OWN_UNIT}")
    rows = zip(timeline.busy, timeline.idle, timeline.peak_memory, strict=True)
    add_ranks(
        grid,
        [
            [
                str(rank),
                *(number(round(scale * value, 9)) for value in (busy, *idle)),
                (format_size if in_bytes else number)(round(memory, 9)),
            ]
            for rank, (busy, idle, memory) in enumerate(rows)
        ],
    )
    return grid


def _critical_path(timeline: Timeline) -> str:
    path = timeline.critical_path
    by_kind: dict[str, float] = {}
    for step in path:
        by_kind[step.action.kind] = by_kind.get(step.action.kind, 0.0) + step.end - step.start
    parts = [f"{kind} {shown_time(timeline, time)}" for kind, time in sorted(by_kind.items())]
    waiting = round(timeline.makespan - sum(by_kind.values()), 9)
    hops = sum(first.rank != second.rank for first, second in pairwise(path))
    return (
        f"critical path: {len(path)} actions over {hops} hops between ranks: {', '.join(parts)}, "
        f"and {shown_time(timeline, waiting)} in transfers{' and gathers' if timeline.shards is not None else ''}"
    )

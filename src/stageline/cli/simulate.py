"""`stageline simulate`: what a step costs, and where the time goes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stageline.cli.options import CostOptions, Json, ScheduleName, ScheduleOptions, expand
from stageline.cli.output import add_ranks, console, print_figures, print_json, schedule_title, table
from stageline.timeline.draw.palette import number
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
    causes = [cause.replace("warmup", "warm-up") for cause in Idle._fields]
    grid = table("rank", "busy", *causes, "peak memory", title="time of each rank")
    rows = zip(timeline.busy, timeline.idle, timeline.peak_memory, strict=True)
    add_ranks(
        grid,
        [
            [str(rank), *(number(round(value, 9)) for value in (busy, *idle, memory))]
            for rank, (busy, idle, memory) in enumerate(rows)
        ],
    )
    return grid


def _critical_path(timeline: Timeline) -> str:
    path = timeline.critical_path
    by_kind: dict[str, float] = {}
    for step in path:
        by_kind[step.action.kind] = by_kind.get(step.action.kind, 0.0) + step.end - step.start
    parts = [f"{kind} {number(round(time, 9))}" for kind, time in sorted(by_kind.items())]
    waiting = round(timeline.makespan - sum(by_kind.values()), 9)
    hops = sum(first.rank != second.rank for first, second in pairwise(path))
    return (
        f"critical path: {len(path)} actions over {hops} hops between ranks: {', '.join(parts)}, "
        f"and {number(waiting)} in transfers{' and gathers' if timeline.shards is not None else ''}"
    )

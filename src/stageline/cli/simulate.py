"""`stageline simulate`: what a step costs, and where the time goes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stageline.cli.options import Json, Prices, Sizes, Target, takes
from stageline.cli.output import console, print_json
from stageline.timeline.draw.palette import number
from stageline.timeline.draw.terminal import figures
from stageline.timeline.idle import Idle
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table

MOST_RANKS = 64


@takes(sizes=Sizes, prices=Prices)
def command(schedule: Target, sizes: Sizes, prices: Prices, json: Json = False) -> None:
    """Compute when every action runs: the bubble, each rank's idle time by its cause, memory, the critical path.

    \b
    stageline simulate interleaved -p 4 -m 8 --chunks 2 --transfer 0.1
    stageline simulate zb-h1 -p 4 -m 8 --costs measured.json --json
    """
    timeline = simulate(sizes.make(schedule), prices.make())
    if json:
        print_json(timeline.to_json())
        return
    out = console()
    made = timeline.schedule
    out.print(f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches")
    for line in figures(timeline):
        out.print(line)
    out.print()
    out.print(_table(timeline))
    out.print()
    out.print(_critical(timeline))


def _table(timeline: Timeline) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title="time of each rank", title_justify="left")
    for column in ("rank", "busy", *Idle._fields, "peak memory"):
        table.add_column(column.replace("warmup", "warm-up"), justify="right")
    ranks = timeline.schedule.ranks
    for rank in range(ranks):
        if MOST_RANKS // 2 <= rank < ranks - MOST_RANKS // 2:
            if rank == MOST_RANKS // 2:
                table.add_row("…")
            continue
        values = (timeline.busy[rank], *timeline.idle[rank], timeline.peak_memory[rank])
        table.add_row(str(rank), *(number(round(value, 9)) for value in values))
    return table


def _critical(timeline: Timeline) -> str:
    """How the critical path is made up."""
    path = timeline.critical_path
    by_kind: dict[str, float] = {}
    for step in path:
        by_kind[step.action.kind] = by_kind.get(step.action.kind, 0.0) + step.end - step.start
    busy = sum(by_kind.values())
    parts = [f"{kind} {number(round(time, 9))}" for kind, time in sorted(by_kind.items())]
    waiting = round(timeline.makespan - busy, 9)
    hops = sum(first.rank != second.rank for first, second in pairwise(path))
    return (
        f"critical path: {len(path)} actions over {hops} hops between ranks: {', '.join(parts)}, "
        f"and {number(waiting)} in transfers"
    )

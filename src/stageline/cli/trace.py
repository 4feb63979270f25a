"""`stageline trace`: a measured step compared with its plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from stageline.cli.options import CostOptions, DrawingOptions, expand, output_option
from stageline.cli.output import MAX_RANKS, add_ranks, console, print_charts, print_json, save, table
from stageline.timeline import draw
from stageline.timeline.draw.palette import number
from stageline.timeline.draw.terminal import shown_utilisation
from stageline.timeline.explain import MEANINGS, Explanation, Parts, explain, slowest_transfers, typical_costs
from stageline.timeline.io import read_timeline
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import NOT_ALIGNED, Timeline, shown_bubble

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_SLOW = 5
"""Slow kinds of action that are listed."""


@expand
def command(
    run: Annotated[Path, Argument(metavar="RUN", help="A file written by pipe.timeline.write(…).", show_default=False)],
    prices: CostOptions,
    chrome: Annotated[
        Path | None, output_option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    *,
    drawing: DrawingOptions,
) -> None:
    """Explain a measured step: where each rank's time went compared with the plan, both drawn on one time axis.

    The plan is simulated with the typical times of actions and transfers in the step itself. Cost options, in the unit
    of the file (seconds for a measured step), override them.

    Examples:
      stageline trace run.json
      stageline trace run.json --forward 0.010 --transfer 0 --html run.html
    """
    measured = read_timeline(run)
    if not measured.is_aligned:
        _own_times(measured, drawing)
        return
    planned = simulate(measured.schedule, prices.make(typical_costs(measured)))
    explanation = explain(planned, measured)
    both = [planned, measured]
    names = [f"{measured.schedule.name}, {what}" for what in ("planned", "measured")]
    # A measured step is in seconds, and traces count in microseconds; costs have a unit of their own.
    unit = 1e6 if measured.costs is None else 1e3
    title = f"{measured.schedule.name}, planned and measured"
    drawing.save(both, title, names=names)
    save(chrome, lambda: draw.trace(both, unit, names=names), "the trace")
    if drawing.json:
        print_json({**explanation.to_json(), "costs": planned.costs.to_json() if planned.costs else None})
        return
    out = console(drawing.width)
    print_charts(out, both, names)
    out.print()
    _explain(out, explanation)


def _own_times(measured: Timeline, drawing: DrawingOptions) -> None:
    """Print what is known if the clocks of the ranks were not aligned."""
    if drawing.json:
        print_json(measured.figures())
        return
    out = console(drawing.width)
    out.print(f"{measured.schedule.name}, measured: {NOT_ALIGNED}")
    out.print("the ranks cannot be drawn on one time axis; the times of each rank by itself:")
    for rank, busy in enumerate(measured.busy[:MAX_RANKS]):
        out.print(f"rank {rank}: computes {_shown(measured, busy)}")
    out.print(f"span: {_shown(measured, measured.span)}, the longest of all ranks")


def _explain(out: Console, explanation: Explanation) -> None:
    planned, measured, slow = explanation.planned, explanation.measured, explanation.slow
    shown = partial(_shown, measured)
    ratio = f" ({measured.makespan / planned.makespan:.3f} times)" if planned.makespan > 0 else ""
    out.print(f"makespan: planned {shown(planned.makespan)}, measured {shown(measured.makespan)}{ratio}")
    out.print(f"utilisation: planned {shown_utilisation(planned)}, measured {shown_utilisation(measured)}")
    if measured.uncertainty:
        off, bubble = shown(measured.uncertainty), shown_bubble(measured)
        out.print(f"clocks: times of different ranks are aligned to ± {off}; measured bubble {bubble}")
    transfers = slowest_transfers(measured, shown)
    if transfers:
        out.print(f"messages: {transfers}")
    out.print()
    out.print(_rank_table(explanation))
    out.print()
    for name, meaning in MEANINGS.items():
        out.print(f"{name:9} {meaning}")
    if slow:
        out.print()
    for entry in slow[:MAX_SLOW]:
        out.print(
            f"slow: {entry.kind} of stage {entry.stage} on rank {entry.rank}: {shown(entry.measured)} instead of "
            f"{shown(entry.planned)}, {entry.actions} times: {shown(entry.extra)} in all"
        )
    if len(slow) > MAX_SLOW:
        out.print(f"slow: and {len(slow) - MAX_SLOW} more kinds of action, each less; --json lists all")


def _rank_table(explanation: Explanation) -> Table:
    measured = explanation.measured
    in_seconds = measured.costs is None
    title = f"where the time of each rank went{', ms' if in_seconds else ''}"
    grid = table("rank", *Parts._fields, "step", title=title)

    def row(name: str, parts: Parts) -> list[str]:
        # Milliseconds with two decimal places line up; the unit of costs may have any size.
        values = (*parts, parts.total)
        return [name, *(f"{1e3 * value:.2f}" if in_seconds else _shown(measured, value) for value in values)]

    add_ranks(grid, [row(str(rank), parts) for rank, parts in enumerate(explanation.ranks)])
    grid.add_row(*row("mean", explanation.mean))
    grid.add_row(*row("plan", explanation.planned_mean))
    return grid


def _shown(timeline: Timeline, time: float) -> str:
    """Few digits, without rounding errors: in milliseconds if it was measured, and else in the unit of the costs."""
    return f"{number(round(1e3 * time, 9))} ms" if timeline.costs is None else number(round(time, 9))

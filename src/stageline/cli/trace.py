"""`stageline trace`: a measured step compared with its plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stageline.cli.options import CostOptions, DrawingOptions, expand, output_option
from stageline.cli.output import MAX_RANKS, add_ranks, console, print_charts, print_json, save, table
from stageline.common.errors import StagelineError
from stageline.common.files import read_text
from stageline.common.units import pluralize
from stageline.timeline import draw
from stageline.timeline.draw.palette import OWN_UNIT, number, shown_time
from stageline.timeline.draw.terminal import shown_share
from stageline.timeline.explain import MEANINGS, Explanation, Parts, explain, slowest_transfers, typical_costs
from stageline.timeline.io import PLANNED, read_timeline
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import NOT_ALIGNED, Timeline, shown_bubble
from stageline.train.run_folder import TIMELINES, timeline_step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_SLOW = 5
"""Slow kinds of action that are listed."""


@expand
def command(
    run: Annotated[
        Path,
        Argument(
            metavar="RUN",
            help="A file written by pipe.timeline.write(…); or the folder of a run, for its newest measured step.",
            show_default=False,
        ),
    ],
    prices: CostOptions,
    plan: Annotated[
        Path | None,
        Option(metavar="FILE", help="Planned timeline, or a plan, as JSON. Default: planned.json next to RUN."),
    ] = None,
    chrome: Annotated[
        Path | None, output_option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    *,
    drawing: DrawingOptions,
) -> None:
    """Explain a measured step: where each rank's time went compared with the plan, both drawn on one time axis.

    The plan is planned.json next to RUN, where training jobs write it, or the file passed as --plan. Without a plan,
    the step is compared with one in which every action and transfer takes its typical time. Cost options replace these
    times, in the unit of the file (seconds for a measured step); the defaults shown below do not apply.

    Examples:
      stageline trace outputs
      stageline trace outputs/timeline/step-00000200.json
      stageline trace run.json --plan plan.json
      stageline trace run.json --forward 0.010 --transfer 0 --html run.html
    """
    run = _measured_file(run)
    measured = read_timeline(run)
    if not measured.is_aligned:
        _own_times(measured, drawing)
        return
    typical = typical_costs(measured)
    planned, source = _plan_of(run, plan, measured) if prices == CostOptions() else (None, "")
    if prices != CostOptions():
        planned, source = simulate(measured.schedule, prices.make(typical)), "the costs of the options"
    explanation = explain(planned, measured)
    both = [explanation.planned, measured]
    what = "planned" if explanation.has_plan else "typical"
    names = [f"{measured.schedule.name}, {name}" for name in (what, "measured")]
    # A measured step is in seconds, and traces count in microseconds; costs have a unit of their own.
    unit = 1e6 if measured.in_seconds else 1e3
    title = f"{measured.schedule.name}, {what} and measured"
    drawing.save(both, title, names=names)
    save(chrome, lambda: draw.trace(both, unit, names=names), "the trace")
    if drawing.json:
        print_json({**explanation.to_json(), "costs": typical.to_json() if planned is None else _costs_of(planned)})
        return
    out = console(drawing.width)
    print_charts(out, both, names)
    out.print()
    _explain(out, explanation, source)


def _measured_file(run: Path) -> Path:
    """Return the file itself, or that of the newest measured step in the folder of a run."""
    if not run.is_dir():
        return run
    folder = run / TIMELINES if (run / TIMELINES).is_dir() else run
    steps = {step: path for path in folder.iterdir() if (step := timeline_step(path)) is not None}
    if not steps:
        raise StagelineError(
            f"{run} has no measured step: no file in {folder} is named like step-00000050.json; a training job writes "
            "one every metrics.timeline_freq steps, and after the last"
        )
    return steps[max(steps)]


def _plan_of(run: Path, plan: Path | None, measured: Timeline) -> tuple[Timeline | None, str]:
    """Return the plan of a step and where it is from; None if there is none for the schedule that ran."""
    file = run.with_name(PLANNED) if plan is None else plan
    if plan is None and (run.name == PLANNED or not file.is_file()):
        return None, ""
    if plan is not None and '"stageline-plan"' in read_text(plan, "plan")[:200]:
        from stageline.planning.plan import read_plan

        planned = read_plan(plan).timeline
    else:
        planned = read_timeline(file)
    if plan is None and planned.schedule != measured.schedule:
        return None, f"{file} is for another schedule, {planned.schedule.name}"
    return planned, str(file)


def _costs_of(timeline: Timeline) -> dict[str, Any] | None:
    return None if timeline.costs is None else timeline.costs.to_json()


def _own_times(measured: Timeline, drawing: DrawingOptions) -> None:
    """Print what is known if the clocks of the ranks were not aligned."""
    if drawing.json:
        print_json(measured.figures())
        return
    out = console(drawing.width)
    out.print(f"{measured.schedule.name}, measured: {NOT_ALIGNED}")
    out.print("the ranks cannot be drawn on one time axis; times per rank:")
    for rank, busy in enumerate(measured.busy[:MAX_RANKS]):
        out.print(f"rank {rank}: computes {shown_time(measured, busy)}")
    out.print(f"span: {shown_time(measured, measured.span)}, the longest of all ranks")


def _explain(out: Console, explanation: Explanation, source: str) -> None:
    planned, measured, slow = explanation.planned, explanation.measured, explanation.slow
    shown = partial(shown_time, measured)
    ratio = f" ({measured.makespan / planned.makespan:.3f} times)" if planned.makespan > 0 else ""
    plan = "planned" if explanation.has_plan else "with typical times"
    out.print(f"makespan: {plan} {shown(planned.makespan)}, measured {shown(measured.makespan)}{ratio}")
    for name in ("utilisation", "imbalance"):
        shares = [shown_share(getattr(timeline, name)) for timeline in (planned, measured)]
        out.print(f"{name}: {plan} {shares[0]}, measured {shares[1]}")
    if source or not explanation.has_plan:
        none = "none; every action is compared with its typical time in this step"
        out.print(f"plan: {source if explanation.has_plan else '; '.join(filter(None, [source, none]))}")
    if not measured.in_seconds:
        out.print(f"times are in {OWN_UNIT}")
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
        others = pluralize(len(slow) - MAX_SLOW, "more kind")
        out.print(f"slow: and {others} of action with smaller delays; --json lists all")


def _rank_table(explanation: Explanation) -> Table:
    measured = explanation.measured
    in_seconds = measured.in_seconds
    title = f"where the time of each rank went, {'ms' if in_seconds else OWN_UNIT}"
    grid = table("rank", *Parts._fields, "step", title=title)

    def row(name: str, parts: Parts) -> list[str]:
        # Milliseconds with two decimal places line up; the unit of costs may have any size.
        values = (*parts, parts.total)
        return [name, *(f"{1e3 * value:.2f}" if in_seconds else number(round(value, 9)) for value in values)]

    add_ranks(grid, [row(str(rank), parts) for rank, parts in enumerate(explanation.ranks)])
    grid.add_row(*row("mean", explanation.mean))
    grid.add_row(*row("plan" if explanation.has_plan else "typical", explanation.planned_mean))
    return grid

"""`stageline compare`: all families with the same costs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from stageline.cli.options import CostOptions, DrawingOptions, ScheduleOptions, expand, load_families
from stageline.cli.output import console, print_charts, print_json, progress, table
from stageline.common.errors import ScheduleError
from stageline.common.units import format_size, pluralize
from stageline.schedules.registry import families, schedule, whole
from stageline.timeline.costs import Costs
from stageline.timeline.draw.palette import OWN_UNIT, memory_unit, number, shown_time
from stageline.timeline.draw.terminal import strip
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline, shown_bubble

if TYPE_CHECKING:
    from rich.table import Table


@expand
def command(
    sizes: ScheduleOptions,
    prices: CostOptions,
    memory: Annotated[
        float | None, Option(min=0, metavar="SIZE", help="Omit families that need more memory on a rank.")
    ] = None,
    charts: Annotated[bool, Option("--charts", help="Draw the Gantt chart of each family.")] = False,
    *,
    drawing: DrawingOptions,
) -> None:
    """Compare all families at the same costs: a table sorted by makespan, and a chart of all on one time axis.

    Times and memory are per rank; families with several stages per rank divide them among these stages.

    Examples:
      stageline compare -p 8 -m 32
      stageline compare -p 8 -m 32 --forward 10 --backward 18 --transfer 1
    """
    load_families(sizes.load)
    if sizes.ranks is None or sizes.microbatches is None:
        raise ScheduleError("compare needs -p RANKS and -m MICROBATCHES, for example stageline compare -p 8 -m 32")
    for key, size in (("ranks", sizes.ranks), ("microbatches", sizes.microbatches)):
        whole("compare", key, size)
    for key in sizes.family_options():
        if not any(key in family.options for family in families().values()):
            raise ScheduleError(f"no family has an option {key!r}")
    if memory is not None and not memory >= 0:
        raise ScheduleError(f"--memory must be a number >= 0, got {memory}")
    costs = prices.make()
    left_out: dict[str, str] = {}
    with progress("simulating the families …") as update:
        candidates = list(_candidates(sizes, costs, memory, left_out, update or (lambda text: None)))
    timelines = sorted(candidates, key=lambda timeline: (timeline.makespan, max(timeline.peak_memory)))
    title = f"{pluralize(sizes.ranks, 'rank')}, {pluralize(sizes.microbatches, 'microbatch')}"
    drawing.save(timelines, title)
    if drawing.json:
        print_json({"families": [_row(timeline) for timeline in timelines], "left_out": left_out})
        return
    if not timelines:
        raise ScheduleError("no family fits: " + "; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    out = console(drawing.width)
    out.print(_table(timelines))
    out.print()
    _draw(timelines, out.width, charts)
    for name, reason in left_out.items():
        out.print(f"left out: {name}: {reason}")


def _candidates(
    sizes: ScheduleOptions, costs: Costs, memory: float | None, left_out: dict[str, str], tell: Callable[[str], None]
) -> Iterator[Timeline]:
    ranks, microbatches = sizes.ranks or 1, sizes.microbatches or 1
    options = sizes.family_options()
    for name, family in families().items():
        if name == "forward-only":
            continue
        try:
            tell(f"{name} …")
            accepted = {key: value for key, value in options.items() if key in family.options}
            candidate = schedule(name, ranks, microbatches, **accepted)
            timeline = simulate(candidate, costs.refined(candidate.stages // ranks))
        except ScheduleError as error:
            left_out[name] = str(error)
            continue
        if memory is not None and max(timeline.peak_memory) > memory:
            left_out[name] = f"needs {number(max(timeline.peak_memory))} of memory; the limit is {number(memory)}"
            continue
        yield timeline


def _row(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "family": schedule.name,
        "options": dict(schedule.options),
        "stages": schedule.stages,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span": timeline.span,
        "span_bubble": timeline.span_bubble,
        "utilisation": timeline.utilisation,
        "imbalance": timeline.imbalance,
        "peak_memory": list(timeline.peak_memory),
        "weight_copies": schedule.placement.directions,
    }


def _table(timelines: list[Timeline]) -> Table:
    figures = ("makespan", "bubble", "span", "bubble", "utilisation", "imbalance", "peak memory")
    unit = memory_unit(timelines[0]) or OWN_UNIT
    units = [] if timelines[0].in_seconds else [f"times in {OWN_UNIT}"]
    units += [] if unit == "bytes" else [f"memory in {unit}"]
    title = ", ".join(units) or None
    grid = table("family", *figures, "stages", "weights", left=("family",), title=title)
    for column in grid.columns:
        column.no_wrap = True
    for timeline in timelines:
        placement = timeline.schedule.placement
        grid.add_row(
            timeline.schedule.name,
            shown_time(timeline, timeline.makespan),
            shown_bubble(timeline),
            shown_time(timeline, timeline.span),
            f"{timeline.span_bubble:.1%}",
            f"{timeline.utilisation or 0:.1%}",
            f"{timeline.imbalance or 0:.1%}",
            (format_size if unit == "bytes" else number)(max(timeline.peak_memory)),
            str(timeline.schedule.stages),
            f"{placement.directions}×",
        )
    return grid


def _draw(timelines: list[Timeline], width: int, charts: bool) -> None:
    """Draw all on one time axis: whole charts, or the share of ranks that compute at each moment."""
    out = console(width)
    until = max(timeline.makespan for timeline in timelines)
    if charts:
        print_charts(out, timelines, [timeline.schedule.name for timeline in timelines])
        return
    margin = max(len(timeline.schedule.name) for timeline in timelines) + 2
    columns = width - margin
    out.print("share of ranks that compute, on one time axis")
    for timeline in timelines:
        out.print(timeline.schedule.name.ljust(margin) + strip(timeline, columns, until))
    out.print(" " * margin + "0" + shown_time(timelines[0], until).rjust(columns - 1))

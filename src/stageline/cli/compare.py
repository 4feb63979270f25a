"""`stageline compare`: all families at the same costs, side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageline.cli.options import Html, Json, Prices, Sizes, Svg, Width, takes
from stageline.cli.output import console, print_json, print_segments, save
from stageline.common.errors import ScheduleError
from stageline.schedules.registry import Family, families, schedule, whole
from stageline.timeline import draw
from stageline.timeline.costs import Costs
from stageline.timeline.draw.palette import number
from stageline.timeline.draw.terminal import chart, legend, strip
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline, shown_bubble

if TYPE_CHECKING:
    from rich.table import Table


@takes(sizes=Sizes, prices=Prices)
def command(
    sizes: Sizes,
    prices: Prices,
    memory: Annotated[
        float | None, typer.Option("--memory", help="Leave out what needs more memory than this on a rank.", min=0)
    ] = None,
    charts: Annotated[bool, typer.Option("--charts", help="Draw the whole Gantt chart of each family.")] = False,
    svg: Svg = None,
    html: Html = None,
    width: Width = None,
    json: Json = False,
) -> None:
    """Compare all families at the same costs: a table sorted by makespan, and all of them on one time axis.

    Times and memory are those of one rank's share of the model; a family that cuts it into chunks divides them.

    \b
    stageline compare -p 8 -m 32 --forward 10 --backward-input 11 --backward-weight 7 --transfer 1
    """
    sizes.load_families()
    if sizes.ranks is None or sizes.microbatches is None:
        raise ScheduleError("compare needs -p RANKS and -m MICROBATCHES, like: stageline compare -p 8 -m 32")
    for key, size in (("ranks", sizes.ranks), ("microbatches", sizes.microbatches)):
        whole("compare", key, size)
    for key in sizes.of_family():
        if not any(key in family.options for family in families().values()):
            raise ScheduleError(f"no family has an option {key!r}")
    if memory is not None and not memory >= 0:
        raise ScheduleError(f"--memory must be a number from 0 upwards, got {memory}")
    costs = prices.make()
    left_out: dict[str, str] = {}
    found = sorted(
        _candidates(sizes, costs, memory, left_out), key=lambda timeline: (timeline.makespan, max(timeline.peak_memory))
    )
    save(svg, draw.svg(found) if svg else "", "the picture")
    title = f"{sizes.ranks} ranks, {sizes.microbatches} microbatches"
    save(html, draw.html(found, title) if html else "", "the page")
    if json:
        print_json({"families": [_row(timeline) for timeline in found], "left_out": left_out})
        return
    if not found:
        raise ScheduleError("no family fits: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    out = console(width)
    out.print(_table(found))
    out.print()
    _draw(found, out.width, charts)
    for name, why in left_out.items():
        out.print(f"left out: {name}: {why}")


def _candidates(sizes: Sizes, costs: Costs, memory: float | None, left_out: dict[str, str]) -> Iterator[Timeline]:
    ranks, microbatches = sizes.ranks or 1, sizes.microbatches or 1
    given = sizes.of_family()
    for name, family in families().items():
        if name == "forward-only":
            continue
        try:
            if sys.stderr.isatty():
                print(f"\r\x1b[K{name} …", end="", file=sys.stderr, flush=True)
            made = schedule(name, ranks, microbatches, **_fitting(family, given))
            timeline = simulate(made, costs.refined(made.stages // ranks))
        except ScheduleError as error:
            left_out[name] = str(error)
            continue
        if memory is not None and max(timeline.peak_memory) > memory:
            left_out[name] = f"needs {number(max(timeline.peak_memory))} memory, and {number(memory)} is there"
            continue
        yield timeline
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _fitting(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """Each family takes the options it knows; which ones others take is not its business here."""
    return {key: value for key, value in given.items() if key in family.options}


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
        "peak_memory": list(timeline.peak_memory),
        "weight_copies": schedule.placement.directions,
    }


def _table(found: list[Timeline]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("family", "makespan", "bubble", "span", "bubble", "peak memory", "stages", "weights"):
        table.add_column(column, justify="left" if column == "family" else "right", no_wrap=True)
    for timeline in found:
        schedule = timeline.schedule
        table.add_row(
            schedule.name,
            number(timeline.makespan),
            shown_bubble(timeline),
            number(timeline.span),
            f"{timeline.span_bubble:.1%}",
            number(max(timeline.peak_memory)),
            str(schedule.stages),
            f"{schedule.placement.directions}×",
        )
    return table


def _draw(found: list[Timeline], width: int, charts: bool) -> None:
    """All on one time axis: the share of ranks that compute at each moment, or whole charts."""
    out = console(width)
    until = max(timeline.makespan for timeline in found)
    if charts:
        for timeline in found:
            out.print(timeline.schedule.name)
            print_segments(out, chart(timeline, width, most_ranks=16, until=until))
        print_segments(out, legend(found, width))
        return
    margin = max(len(timeline.schedule.name) for timeline in found) + 2
    columns = width - margin
    out.print("the share of ranks that compute, all on one time axis")
    for timeline in found:
        out.print(timeline.schedule.name.ljust(margin) + strip(timeline, columns, until))
    out.print(" " * margin + "0" + number(until).rjust(columns - 1))

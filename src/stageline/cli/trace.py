"""`stageline trace`: a measured step against its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stageline.cli.options import Html, Json, Prices, Svg, Width, takes
from stageline.cli.output import console, print_json, print_segments, save
from stageline.timeline import draw
from stageline.timeline.draw.palette import number
from stageline.timeline.draw.terminal import chart, legend
from stageline.timeline.explain import MEANINGS, Explanation, Parts, explain, typical_costs
from stageline.timeline.io import read_timeline
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import NOT_ALIGNED, Timeline, shown_bubble

if TYPE_CHECKING:
    from rich.table import Table

MOST_RANKS, MOST_SLOW = 64, 5


@takes(prices=Prices)
def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A file that pipe.timeline.write(…) wrote.")],
    prices: Prices,
    svg: Svg = None,
    html: Html = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    width: Width = None,
    json: Json = False,
) -> None:
    """Explain a measured step: where every rank's time went against the plan, both drawn on one time axis.

    The plan is simulated with the times that actions and transfers typically took in the step itself; costs given here,
    in the unit of the file (seconds for a measured step), take their place.

    \b
    stageline trace run.json
    stageline trace run.json --forward 0.010 --transfer 0 --html run.html
    """
    measured = read_timeline(run)
    if not measured.is_aligned:
        _own_times(measured, json, width)
        return
    planned = simulate(measured.schedule, prices.make(typical_costs(measured)))
    found = explain(planned, measured)
    both = [planned, measured]
    names = [f"{measured.schedule.name}, {what}" for what in ("planned", "measured")]
    # A measured step is in seconds, and traces count in microseconds; costs have a unit of their own.
    unit = 1e6 if measured.costs is None else 1e3
    save(svg, draw.svg(both, names=names) if svg else "", "the picture")
    title = f"{measured.schedule.name}, planned and measured"
    save(html, draw.html(both, title, names=names) if html else "", "the page")
    save(chrome, draw.trace(both, unit, names=names) if chrome else "", "the trace")
    if json:
        print_json({**found.to_json(), "costs": planned.costs.to_json() if planned.costs else None})
        return
    out = console(width)
    until = max(timeline.makespan for timeline in both)
    for timeline, name in zip(both, names, strict=True):
        out.print(name)
        print_segments(out, chart(timeline, out.width, most_ranks=16, until=until))
    print_segments(out, legend([measured], out.width))
    out.print()
    _explain(found, out.width)


def _own_times(measured: Timeline, json: bool, width: int | None) -> None:
    """What can be said of ranks whose clocks have nothing in common."""
    if json:
        print_json(measured.figures())
        return
    out = console(width)
    scale, unit = (1e3, " ms") if measured.costs is None else (1.0, "")
    out.print(f"{measured.schedule.name}, measured: {NOT_ALIGNED}")
    out.print("the ranks cannot be drawn on one time axis; what each of them knows by itself:")
    for rank, busy in enumerate(measured.busy[:MOST_RANKS]):
        out.print(f"rank {rank}: computes {_short(busy * scale)}{unit}")
    out.print(f"span: {_short(measured.span * scale)}{unit}, the longest of any one rank")


def _explain(found: Explanation, width: int) -> None:
    """The figures, the table, and what was slow."""
    out = console(width)
    measured = found.measured
    scale, unit = (1e3, " ms") if measured.costs is None else (1.0, "")
    plan, real = found.planned.makespan * scale, measured.makespan * scale
    times = f" ({real / plan:.3f} times)" if plan > 0 else ""
    out.print(f"makespan: planned {_short(plan)}{unit}, measured {_short(real)}{unit}{times}")
    if measured.uncertainty:
        off = f"{_short(measured.uncertainty * scale)}{unit}"
        out.print(f"clocks: times of different ranks are aligned to ± {off}; measured bubble {shown_bubble(measured)}")
    out.print()
    out.print(_table(found, scale, unit))
    out.print()
    for name, meaning in MEANINGS.items():
        out.print(f"{name:9} {meaning}")
    if found.slow:
        out.print()
    for each in found.slow[:MOST_SLOW]:
        out.print(
            f"slow: {each.kind} of stage {each.stage} on rank {each.rank}: {_short(each.measured * scale)}{unit} each "
            f"where {_short(each.planned * scale)}{unit} was planned, {each.actions} times: "
            f"{_short(each.extra * scale)}{unit}"
        )
    if len(found.slow) > MOST_SLOW:
        out.print(f"slow: and {len(found.slow) - MOST_SLOW} more kinds of action, each less; --json has them all")


def _table(found: Explanation, scale: float, unit: str) -> Table:
    from rich.table import Table

    title = f"where the time of each rank went{',' + unit if unit else ''}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for column in ("rank", *Parts._fields, "step"):
        table.add_column(column, justify="right")

    def add(name: str, parts: Parts) -> None:
        # Milliseconds with two places stand below each other; a unit of one's own may be of any size.
        shown = [value * scale for value in (*parts, parts.total)]
        table.add_row(name, *(f"{value:.2f}" if unit else _short(value) for value in shown))

    ranks = len(found.ranks)
    for rank, parts in enumerate(found.ranks):
        if MOST_RANKS // 2 <= rank < ranks - MOST_RANKS // 2:
            if rank == MOST_RANKS // 2:
                table.add_row("…")
            continue
        add(str(rank), parts)
    add("mean", found.mean)
    add("plan", found.planned_mean)
    return table


def _short(value: float) -> str:
    """A few figures, and nothing for what only rounding left."""
    return number(round(value, 9))

"""`stageline synthesize`: a schedule for given costs, within a memory limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from stageline.cli.options import CostOptions, DrawingOptions, expand, output_option
from stageline.cli.output import console, print_chart, print_figures, print_json, progress, save, table
from stageline.common import interrupts
from stageline.common.errors import StagelineError
from stageline.common.units import pluralize
from stageline.timeline.draw.palette import number, shown_time

if TYPE_CHECKING:
    from stageline.synthesis.search import SearchProgress
    from stageline.synthesis.synthesize import Synthesis

_search = partial(Option, rich_help_panel="Search")


@dataclass(frozen=True)
class SearchOptions:
    """The options of the search, under the names of the arguments of `synthesize`."""

    memory: Annotated[
        str | None, Option(metavar="SIZE[,…]", help="Memory limit of a rank, or one per rank. Default: none.")
    ] = None
    chunks: Annotated[int, Option(metavar="N", help="Stages per rank.")] = 1
    placement: Annotated[
        str,
        Option(
            metavar="NAME", help="Placement of several chunks: loop (around the ranks) or v (down and up the ranks)."
        ),
    ] = "loop"
    objective: Annotated[str, _search(metavar="NAME", help="What to minimize: makespan or span.")] = "makespan"
    split: Annotated[
        bool | None,
        _search("--split/--no-split", help="Split every backward, or none. Default: split where it helps."),
    ] = None
    time_limit: Annotated[float, _search(metavar="S", help="Seconds to search; Ctrl-C stops early.")] = 2.0
    tolerance: Annotated[
        float, _search(metavar="X", help="Stop at this gap to the lower bound: 0.01 means 1%, 0 means optimal.")
    ] = 0.0
    seed: Annotated[int, _search(metavar="N", help="Random seed of the search.")] = 0


_curve = partial(Option, rich_help_panel="Memory against time")


@dataclass(frozen=True)
class CurveOptions:
    """The options of the curve of memory against time."""

    pareto: Annotated[
        bool, _curve("--pareto", help="Search at several memory caps, and show all families beside the curve.")
    ] = False
    caps: Annotated[
        str | None,
        _curve(metavar="SIZE,…", help="Memory caps to search. Default: chosen, starting with the smallest that works."),
    ] = None
    points: Annotated[int, _curve(metavar="N", min=1, max=100, help="Approximate number of caps without --caps.")] = 8


@expand
def command(
    ranks: Annotated[int, Option("-p", "--ranks", metavar="N", help="Number of ranks.")],
    microbatches: Annotated[int, Option("-m", "--microbatches", metavar="N", help="Number of microbatches.")],
    prices: CostOptions,
    search: SearchOptions,
    curve: CurveOptions,
    output: Annotated[
        Path | None, output_option("-o", "--output", metavar="FILE", help="Write the schedule as .json or .csv.")
    ] = None,
    *,
    drawing: DrawingOptions,
) -> None:
    """Search for the shortest schedule for these costs, and prove a bound on its distance from the optimum.

    The result is never worse than any family that fits in memory. Costs are per stage; with --chunks, each rank has
    several stages. With --pareto, --time-limit applies to each memory cap.

    Examples:
      stageline synthesize -p 4 -m 8 --forward 10 --backward 18 --memory 4
      stageline synthesize -p 8 -m 32 --costs measured.json -o mine.json
      stageline synthesize -p 8 -m 32 --pareto --svg curve.svg
    """
    if curve.pareto:
        if search.memory is not None or output is not None:
            raise StagelineError("--pareto searches at several caps; leave out -o, and pass --caps instead of --memory")
        _show_curve(prices, ranks, microbatches, search, curve, drawing)
        return
    from stageline.synthesis.synthesize import synthesize

    with progress("simulating the families …") as update, interrupts.raised():  # the search keeps its best result

        def tell(state: SearchProgress) -> None:
            if update is not None:
                update(_status(state))

        arguments = _arguments(search) | {"progress": tell if update is not None else None}
        result = synthesize(prices.make(), ranks, microbatches, **arguments)
    if output is not None:
        result.schedule.write(output)
        print(f"wrote the schedule to {output}", file=sys.stderr)
    drawing.save(result.timeline)
    if drawing.json:
        programs = [[str(entry) for entry in program] for program in result.schedule.programs]
        print_json({**result.to_json(), "programs": programs})
        return
    out = console(drawing.width)
    print_chart(out, result.timeline)
    print_figures(out, result.timeline)
    out.print()
    for label, value in _summary(result):
        out.print(f"{label:<12} {value}")


def _arguments(search: SearchOptions) -> dict[str, Any]:
    placement = "v" if search.placement == "vee" else search.placement  # vee: the name in version 0.1.0
    return vars(search) | {"placement": placement}


def _status(state: SearchProgress) -> str:
    gap = f", gap {state.achieved / state.lower_bound - 1:.2%}" if state.lower_bound > 0 else ""
    return f"{state.seconds:.1f} s  {number(state.achieved)} by {state.step}{gap}  (Ctrl-C keeps the best)"


def _show_curve(
    prices: CostOptions,
    ranks: int,
    microbatches: int,
    search: SearchOptions,
    options: CurveOptions,
    drawing: DrawingOptions,
) -> None:
    """Search for many caps; print the curve and the families as a table or as JSON, and draw them."""
    from stageline.synthesis.pareto import pareto

    arguments = {key: value for key, value in _arguments(search).items() if key != "memory"}
    caps = None if options.caps is None else options.caps.split(",")
    with progress("simulating the families …") as update, interrupts.raised():

        def tell(cap: float, state: SearchProgress) -> None:
            if update is not None:
                update(f"cap {number(cap)}: {_status(state)}")

        curve = pareto(prices.make(), ranks, microbatches, caps=caps, points=options.points, progress=tell, **arguments)
    save(drawing.svg, curve.svg, "the drawing")
    sizes = f"{pluralize(ranks, 'rank')}, {pluralize(microbatches, 'microbatch')}"
    save(drawing.html, lambda: curve.html(f"Memory against {curve.objective}: {sizes}"), "the page")
    if drawing.json:
        print_json(curve.to_json())
        return
    grid = table("memory", curve.objective, "lower bound", "gap", "schedule", "against the curve", left=("schedule",))
    rows = [
        (point.cap, 0, number(point.synthesis.achieved), number(point.synthesis.lower_bound),
         f"{point.synthesis.gap:.2%}", f"synthesized ({point.synthesis.how})", "")
        for point in curve.points
    ]  # fmt: skip
    for family in curve.families:
        value = curve.value_at(family.memory)
        beside = "" if not value else f"{family.value / value - 1:+.1%}"
        name = family.name if family.in_placement else f"{family.name}, another placement"
        name += f", weights {family.weight_copies}×" * (family.weight_copies > 1)
        rows.append((family.memory, 1, number(family.value), "", "", name, beside))
    for memory, _, *cells in sorted(rows):
        grid.add_row(number(memory), *cells)
    console(drawing.width).print(grid)


def _summary(result: Synthesis) -> Iterator[tuple[str, str]]:
    shown = partial(shown_time, result.timeline)
    yield "achieved", f"{result.objective} {shown(result.achieved)}, found by {result.how} in {result.seconds:.1f} s"
    yield "lower bound", f"{shown(result.lower_bound)}: no schedule here takes less"
    yield "gap", "0%: this is optimal" if result.gap == 0 else f"at most {result.gap:.2%} of the bound"
    name = result.best_named
    if name is None:
        yield "best family", "none fits this placement and memory"
    else:
        ratio = result.named[name] / result.achieved - 1 if result.achieved > 0 else 0.0
        comparison = f"{ratio:.1%} longer" if ratio > 1e-9 else "the same"
        yield "best family", f"{name}: {shown(result.named[name])} ({comparison})"
    if result.was_cut:
        yield "cut short", "by the time limit or an interrupt; a longer --time-limit may find a shorter schedule"

"""Why this plan: its figures, and a table of the alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stageline.common.units import format_seconds, format_size
from stageline.planning.advice import what_again

if TYPE_CHECKING:
    from stageline.planning.plan import Plan

HEAD = ("schedule", "stages", "microbatches", "computed again", "step", "bubble", "fullest rank", "")


def explain(plan: Plan, rows: int) -> str:
    """The figures, then the table."""
    return "\n".join([*_figures(plan), "", *_table(plan, rows), *(f"note: {note}" for note in plan.notes)])


def _figures(plan: Plan) -> Iterator[str]:
    made = plan.schedule
    again = what_again(plan.recompute)
    where = f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches"
    yield (
        f"{where} of {plan.samples} samples, {again} computed once more"
        if plan.samples > 1
        else (f"{where}, {again} computed once more")
    )
    yield f"step        {format_seconds(plan.step_seconds)}, bubble {plan.bubble:.1%}"
    if plan.gap is not None:
        known = "no order of this cut is faster" if plan.gap == 0 else f"at most {plan.gap:.1%} above the best order"
        yield f"bound       {format_seconds(plan.bound or 0.0)}: {known}"
    totals = [rank.total for rank in plan.memory]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    parts = ", ".join(f"{name} {format_size(value)}" for name, value in plan.memory[fullest]._asdict().items() if value)
    cap = f" of {format_size(plan.caps[fullest])}" if plan.caps is not None else ""
    yield f"memory      {format_size(totals[fullest])}{cap} on rank {fullest}, the fullest: {parts}"
    yield f"cut         {_counts(plan.layers_per_stage)} units"


def _counts(counts: tuple[int, ...]) -> str:
    shown = " ".join(map(str, counts[:32]))
    return shown if len(counts) <= 32 else f"{shown} … ({len(counts)} stages)"


def _table(plan: Plan, rows: int) -> Iterator[str]:
    totals = [rank.total for rank in plan.memory]
    made = plan.schedule
    table = [
        list(HEAD),
        [
            made.name, str(made.stages), str(made.microbatches), what_again(plan.recompute),
            format_seconds(plan.step_seconds), f"{plan.bubble:.1%}", format_size(max(totals)), "chosen",
        ],
    ]  # fmt: skip
    fitting = [each for each in plan.alternatives if each.fits]
    tight = [each for each in plan.alternatives if not each.fits]
    faster = [each for each in tight if each.seconds < plan.step_seconds]  # these one would have liked to have
    chosen = [*fitting[: max(1, rows - min(3, len(faster)))], *faster[:3]] if faster else fitting[:rows]
    for each in chosen:
        more = each.seconds / plan.step_seconds - 1 if plan.step_seconds > 0 else 0.0
        why = f"{more:.1%} longer" if more >= 5e-4 else "as fast, more memory"
        if abs(more) < 5e-4 and each.memory <= max(totals):
            why = "as fast"
        elif more <= -5e-4:
            why = f"{-more:.1%} faster, but gradients are not in order"
        if not each.fits:
            cap = 0.0 if plan.caps is None else plan.caps[each.rank]
            why = f"does not fit: {format_size(each.memory - cap)} too much on rank {each.rank}"
        table.append(
            [
                each.schedule, str(len(each.layers_per_stage)), str(each.microbatches), what_again(each.recompute),
                format_seconds(each.seconds), f"{each.bubble:.1%}", format_size(each.memory), why,
            ]
        )  # fmt: skip
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    for row in table:
        cells = [
            cell.rjust(width) if 1 <= column <= 6 and column != 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    left = len(plan.alternatives) - len(chosen)
    if left > 0:
        yield f"and {left} more that were simulated"

"""Explain a plan: its figures, and a table of the alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stageline.common.units import format_seconds, format_size, format_table
from stageline.planning.memory import RankMemory
from stageline.planning.stage_costs import Recompute

if TYPE_CHECKING:
    from stageline.planning.plan import Alternative, Plan

COLUMNS = ("schedule", "stages", "microbatches", "recomputed", "step", "bubble", "fullest rank", "")
SAME_TIME = 5e-4
"""Differences below this fraction are not shown."""


def describe_recompute(recompute: Recompute) -> str:
    """Say what is recomputed.

    >>> describe_recompute("none"), describe_recompute(("a", "b"))
    ('nothing', '2 units')
    """
    if isinstance(recompute, str):
        return {"none": "nothing", "stage": "whole stages"}.get(recompute, recompute)
    return f"{len(recompute)} unit{'s' if len(recompute) != 1 else ''}"


def describe_memory(memory: RankMemory) -> str:
    """Return the parts of a rank's memory that are not empty."""
    return ", ".join(f"{name} {format_size(value)}" for name, value in memory._asdict().items() if value)


def explain(plan: Plan, rows: int) -> str:
    """Return the figures, then the table."""
    return "\n".join([*_figures(plan), "", *_table(plan, rows), *(f"note: {note}" for note in plan.notes)])


def _figures(plan: Plan) -> Iterator[str]:
    schedule = plan.schedule
    samples = f" of {plan.samples} samples" if plan.samples > 1 else ""
    yield (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        f"{samples}, {describe_recompute(plan.recompute)} recomputed"
    )
    yield f"step        {format_seconds(plan.step_seconds)}, bubble {plan.bubble:.1%}"
    if plan.gap is not None:
        quality = "no order of this cut is faster" if plan.gap == 0 else f"at most {plan.gap:.1%} above the best order"
        yield f"bound       {format_seconds(plan.bound or 0.0)}: {quality}"
    totals = [rank.total for rank in plan.memory]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    cap = f" of {format_size(plan.caps[fullest])}" if plan.caps is not None else ""
    yield (
        f"memory      {format_size(totals[fullest])}{cap} on rank {fullest}, the fullest: "
        f"{describe_memory(plan.memory[fullest])}"
    )
    counts = plan.layers_per_stage
    shown = " ".join(map(str, counts[:32]))
    yield f"cut         {shown if len(counts) <= 32 else f'{shown} … ({len(counts)} stages)'} units"


def _table(plan: Plan, rows: int) -> Iterator[str]:
    peak = max(rank.total for rank in plan.memory)
    schedule = plan.schedule
    table = [
        list(COLUMNS),
        [
            schedule.name, str(schedule.stages), str(schedule.microbatches), describe_recompute(plan.recompute),
            format_seconds(plan.step_seconds), f"{plan.bubble:.1%}", format_size(peak), "chosen",
        ],
    ]  # fmt: skip
    fitting = [alternative for alternative in plan.alternatives if alternative.fits]
    faster = [
        alternative
        for alternative in plan.alternatives
        if not alternative.fits and alternative.seconds < plan.step_seconds
    ]
    shown = [*fitting[: max(1, rows - min(3, len(faster)))], *faster[:3]] if faster else fitting[:rows]
    table += [
        [
            alternative.schedule, str(len(alternative.layers_per_stage)), str(alternative.microbatches),
            describe_recompute(alternative.recompute), format_seconds(alternative.seconds), f"{alternative.bubble:.1%}",
            format_size(alternative.memory), _why_not(alternative, plan, peak),
        ]
        for alternative in shown
    ]  # fmt: skip
    yield from format_table(table, left={0, 3, 7})
    remaining = len(plan.alternatives) - len(shown)
    if remaining > 0:
        yield f"and {remaining} more that were simulated"


def _why_not(alternative: Alternative, plan: Plan, peak: float) -> str:
    if not alternative.fits:
        cap = 0.0 if plan.caps is None else plan.caps[alternative.rank]
        return f"does not fit: {format_size(alternative.memory - cap)} too much on rank {alternative.rank}"
    longer = alternative.seconds / plan.step_seconds - 1 if plan.step_seconds > 0 else 0.0
    if abs(longer) < SAME_TIME:
        return "as fast" if alternative.memory <= peak else "as fast, more memory"
    return f"{longer:.1%} longer" if longer > 0 else f"{-longer:.1%} faster, but gradients are not in order"

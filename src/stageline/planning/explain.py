"""Explain a plan: its figures and the alternatives; or why nothing fits, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stageline.common.errors import NothingFits, StagelineError
from stageline.common.units import (
    format_seconds,
    format_size,
    format_sizes,
    format_table,
    format_uncertainty,
    round_up_size,
)
from stageline.planning.candidates import Trial
from stageline.planning.costs import RankMemory, Recompute
from stageline.planning.mesh import describe_mesh
from stageline.planning.request import PlanRequest
from stageline.planning.search import PlanSearch

if TYPE_CHECKING:
    from stageline.planning.plan import Alternative, MeshAlternative, Plan

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


def describe_gap(plan: Plan) -> str:
    """Return how far the step can be from the best order of the cut, as far as the measured times allow to say."""
    if plan.is_noisy:
        return f"the measured times are noisy, so the step time may be off by {format_uncertainty(plan.uncertainty)}"
    return f"the step is at most {plan.gap:.1%} above the best order" if plan.gap else "no order of this cut is faster"


def explain(plan: Plan, rows: int) -> str:
    """Return the figures, then the table."""
    meshes = ["", *_mesh_table(plan, rows)] if plan.meshes else []
    notes = (f"note: {note}" for note in plan.notes)
    return "\n".join([*_figures(plan), *meshes, "", *_table(plan, rows), *notes])


def _figures(plan: Plan) -> Iterator[str]:
    schedule = plan.schedule
    samples = f" of {plan.samples} samples" if plan.samples > 1 else ""
    yield (
        f"{schedule.name}: {format_sizes(schedule.ranks, schedule.stages, schedule.microbatches)}"
        f"{samples}, {describe_recompute(plan.recompute)} recomputed"
    )
    yield f"step        {format_seconds(plan.step_seconds)}, bubble {plan.bubble:.1%}"
    if plan.gap is not None:
        yield f"bound       {format_seconds(plan.bound or 0.0)}: {describe_gap(plan)}"
    totals = [rank.total for rank in plan.memory]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    cap = f" of {format_size(plan.caps[fullest])}" if plan.caps is not None else ""
    yield (
        f"memory      {format_size(totals[fullest])}{cap} on rank {fullest}, the fullest: "
        f"{describe_memory(plan.memory[fullest])}"
    )
    for share in plan.costs.shares:
        if len(share.ranks) > share.capacity:
            yield f"shared      {len(share.ranks)} ranks compute at most {share.capacity:g} at a time"
        if share.speeds and len(share.ranks) > 1:
            count = min(len(share.ranks), len(share.speeds))
            speed = f"{share.speeds[count - 1]:.0%} of their speed alone"
            yield f"shared      {count} ranks that compute at once run at {speed}"
    if plan.mesh:
        yield f"mesh        {describe_mesh(plan.mesh, plan.reshard_after_forward)}"
    if plan.collectives.total:
        parts = zip(("tensor parallel", "gathers", "reductions"), plan.collectives, strict=True)
        yield f"collectives {', '.join(f'{name} {format_seconds(value)}' for name, value in parts if value)} of a rank"
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
            format_size(alternative.memory), why_not(alternative, plan, peak),
        ]
        for alternative in shown
    ]  # fmt: skip
    yield from format_table(table, left={0, 3, 7})
    remaining = len(plan.alternatives) - len(shown)
    if remaining > 0:
        yield f"and {remaining} more that were simulated"


def mesh_rows(plan: Plan) -> list[list[str]]:
    """Return the figures of the chosen mesh, then those of the others, and why they were not chosen."""
    peak = max(rank.total for rank in plan.memory)
    table = [
        [
            mesh_name(plan.mesh), plan.schedule.name, f"{plan.microbatches} × {plan.samples}",
            format_seconds(plan.step_seconds), f"{plan.bubble:.1%}", format_seconds(plan.collectives.total),
            format_size(peak), "chosen",
        ],
    ]  # fmt: skip
    for other in plan.meshes:
        figures = [
            other.schedule, f"{other.microbatches} × {other.samples}", format_seconds(other.seconds),
            f"{other.bubble:.1%}", format_seconds(other.collectives), format_size(other.memory),
        ]  # fmt: skip
        bound = ["", "", f"≥ {format_seconds(other.seconds)}", "", "", ""]
        table.append([mesh_name(other.mesh), *(figures if other.simulated else bound), why_not_mesh(other, plan)])
    return table


def _mesh_table(plan: Plan, rows: int) -> Iterator[str]:
    """Yield the meshes, the best first, and why the others were not chosen."""
    head = ["mesh", "schedule", "microbatches", "step", "bubble", "collectives", "fullest rank", ""]
    table = [head, *mesh_rows(plan)[: rows + 1]]
    yield from format_table(table, left={0, 1, 7})
    if len(plan.meshes) > rows:
        yield f"and {len(plan.meshes) - rows} more meshes"


def mesh_name(mesh: Mapping[str, int]) -> str:
    """Return the sizes of a mesh in one line.

    >>> mesh_name({"pp": 4, "dp_shard": 2})
    'pp 4 × dp_shard 2'
    """
    return " × ".join(f"{name} {size}" for name, size in mesh.items())


def why_not_mesh(other: MeshAlternative, plan: Plan) -> str:
    """Say why another mesh was not chosen."""
    if not other.fits:
        cap = min(plan.caps) if plan.caps else 0.0
        return f"does not fit: {format_size(max(0.0, other.memory - cap))} too much on rank {other.rank}"
    longer = other.seconds / plan.step_seconds - 1 if plan.step_seconds > 0 else 0.0
    if not other.simulated:
        return f"at least {longer:.1%} longer" if longer > 0 else "not tried: the time limit was reached"
    if longer < SAME_TIME:
        peak = max(rank.total for rank in plan.memory)
        return "as fast, more memory" if other.memory > peak else "as fast"
    return f"{longer:.1%} longer" if other.complete else f"{longer:.1%} longer; search incomplete"


def why_not(alternative: Alternative, plan: Plan, peak: float) -> str:
    """Say why another plan was not chosen; `peak` is the memory of the chosen plan's fullest rank."""
    if not alternative.fits:
        cap = 0.0 if plan.caps is None else plan.caps[alternative.rank]
        return f"does not fit: {format_size(alternative.memory - cap)} too much on rank {alternative.rank}"
    longer = alternative.seconds / plan.step_seconds - 1 if plan.step_seconds > 0 else 0.0
    if abs(longer) < SAME_TIME:
        return "as fast" if alternative.memory <= peak else "as fast, more memory"
    return f"{longer:.1%} longer" if longer > 0 else f"{-longer:.1%} faster, but gradients are not in order"


# If nothing fits

TIME_PER_CHANGE = 1.0
"""Seconds for which each change is tried."""


def nothing_fits(search: PlanSearch, progress: Callable[[str], None], devices: bool = False) -> StagelineError:
    """Return the error for a search without a result, with suggestions; with `devices`, for the closest mesh."""
    request, closest = search.request, search.closest
    if closest is None:
        names = f" of {', '.join(request.names)}" if request.names else ""
        return StagelineError(
            f"no schedule{names} is possible for {search.units} units on {request.ranks} ranks with "
            f"{' or '.join(str(count) for count, _ in request.splits[-3:])} microbatches"
            f"{f' and {request.chunks} chunks' if request.chunks else ''}; try schedule='auto', or other sizes"
        )
    if request.caps is None:
        return StagelineError(
            f"{closest.name} does not sum gradients in the order of the microbatches, so their bits would depend on "
            "the schedule; try schedule='auto'"
        )
    excess = [rank.total - cap for rank, cap in zip(closest.memory, request.caps, strict=True)]
    worst = max(range(len(excess)), key=excess.__getitem__)
    needed, candidate = closest.memory[worst].total, closest.candidate
    message = (
        f"nothing fits{' any mesh' if devices else ''}: the closest plan, {closest.name}"
        f"{f' on {mesh_name(request.mesh)}' if devices else ''} with {candidate.microbatches} microbatches and "
        f"{describe_recompute(candidate.recompute)} recomputed, needs {format_size(needed)} on rank {worst} "
        f"({describe_memory(closest.memory[worst])}); the limit is {format_size(request.caps[worst])}"
    )
    changes, suggestions = [], []
    for change, trial in _changes(search, progress):
        if devices and ("mesh" in change or "batch" in change):
            continue  # another number of devices, or the batch of one pipeline
        changes.append(dict(change))
        shown = {name: round_up_size(value) if name == "memory" else value for name, value in change.items()}
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        suggestions.append(words if "memory" in change else f"{words} needs {format_size(trial.peak)} ({trial.name})")
    smaller = "use a smaller model, or an optimizer that needs less memory"
    advice = f"this would fit: {'; '.join(suggestions)}" if changes else smaller
    return NothingFits(f"{message}; {advice}", rank=worst, needs=needed, changes=changes)


def _changes(search: PlanSearch, progress: Callable[[str], None]) -> Iterator[tuple[Mapping[str, Any], Trial]]:
    """Yield arguments of `plan` with which something fits, and what does."""
    request = replace(search.request, time_limit=TIME_PER_CHANGE, synthesis=False)

    def best(changed: PlanRequest) -> Trial | None:
        changed_search = PlanSearch(changed, progress)
        changed_search.run()
        return changed_search.best

    if request.recompute != "auto":
        trial = best(replace(request, recompute="auto"))
        if trial is not None:
            recompute = trial.candidate.recompute
            yield {"recompute": "auto" if isinstance(recompute, tuple) else recompute}, trial
    if request.names is not None and request.schedule is None:
        trial = best(replace(request, names=None))
        if trial is not None:
            yield {"schedule": "auto"}, trial
    if request.states.shards > 1 and not request.states.by_block:
        trial = best(replace(request, states=replace(request.states, by_block=True)))
        if trial is not None:
            yield {"reshard_after_forward": "always"}, trial
    (count, samples), *others = request.splits
    if not others and len(request.profiles.profiles) + samples > 2 and samples > 1 and request.schedule is None:
        for parts in (parts for parts in range(2, samples + 1) if samples % parts == 0):
            trial = best(replace(request, splits=((count * parts, samples // parts),)))
            if trial is not None:
                yield {"batch": count * samples, "microbatches": count * parts}, trial
                break
    is_free = request.schedule is None and request.counts is None and request.time.is_uniform
    if is_free and len(set(request.caps or ())) == 1:
        most = search.units // (request.chunks or 1)
        for ranks in dict.fromkeys([2 * request.ranks, 4 * request.ranks, most]):
            if request.ranks < ranks <= most:
                mesh = {**request.mesh, "pp": ranks} if request.mesh else {}
                caps = (request.caps or (0.0,))[:1] * ranks
                trial = best(replace(request, ranks=ranks, caps=caps, mesh=mesh))
                if trial is not None:
                    yield {"mesh": mesh} if mesh else {"ranks": ranks}, trial
                    break
    smallest = min(search.trials, key=lambda trial: trial.peak)
    yield {"memory": math.ceil(smallest.peak)}, smallest

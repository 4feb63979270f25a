"""What to change if no plan fits; every suggestion was tried and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stageline.common.errors import NothingFits, StagelineError
from stageline.common.units import format_size, round_up_size
from stageline.planning.candidates import Trial
from stageline.planning.explain import describe_memory, describe_recompute
from stageline.planning.request import PlanRequest
from stageline.planning.search import PlanSearch

TIME_PER_CHANGE = 1.0
"""Seconds for which each change is tried."""


def nothing_fits(search: PlanSearch, progress: Callable[[str], None]) -> StagelineError:
    """Return the error for a search without a result, with suggestions."""
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
            f"{closest.name} does not add gradients up in the order of the microbatches, so their bits would depend on "
            "the schedule; try schedule='auto'"
        )
    excess = [rank.total - cap for rank, cap in zip(closest.memory, request.caps, strict=True)]
    worst = max(range(len(excess)), key=excess.__getitem__)
    needed, candidate = closest.memory[worst].total, closest.candidate
    message = (
        f"nothing fits: the closest plan, {closest.name} with {candidate.microbatches} microbatches and "
        f"{describe_recompute(candidate.recompute)} recomputed, needs {format_size(needed)} on rank {worst} "
        f"({describe_memory(closest.memory[worst])}); the limit is {format_size(request.caps[worst])}"
    )
    changes, suggestions = [], []
    for change, trial in _changes(search, progress):
        changes.append(dict(change))
        shown = {name: round_up_size(value) if name == "memory" else value for name, value in change.items()}
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        suggestions.append(words if "memory" in change else f"{words} needs {format_size(trial.peak)} ({trial.name})")
    advice = f"what would fit: {'; '.join(suggestions)}" if changes else "use a smaller model or a leaner optimizer"
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
    (count, samples), *others = request.splits
    if not others and len(request.profiles.profiles) + samples > 2 and samples > 1 and request.schedule is None:
        for parts in (parts for parts in range(2, samples + 1) if samples % parts == 0):
            trial = best(replace(request, splits=((count * parts, samples // parts),)))
            if trial is not None:
                yield {"batch": count * samples, "microbatches": count * parts}, trial
                break
    if request.schedule is None and request.counts is None and len(set(request.caps or ())) == 1:
        most = search.units // (request.chunks or 1)
        for ranks in dict.fromkeys([2 * request.ranks, 4 * request.ranks, most]):
            if request.ranks < ranks <= most:
                trial = best(replace(request, ranks=ranks, caps=(request.caps or (0.0,))[:1] * ranks))
                if trial is not None:
                    yield {"ranks": ranks}, trial
                    break
    smallest = min(search.trials, key=lambda trial: trial.peak)
    yield {"memory": math.ceil(smallest.peak)}, smallest

"""The mesh for a number of devices: all factorisations into pp × dp_replicate × dp_shard × tp, planned and compared.

The batch is that of the whole step, so more pipelines have fewer microbatches each. Meshes are searched in the order of
a lower bound: a mesh whose bound is above the best plan so far is listed with its bound, and not simulated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.model.tp_plan import plan_of
from stageline.planning import request as arguments
from stageline.planning.candidates import Trial
from stageline.planning.plan import MeshAlternative
from stageline.planning.profiles import SizedProfiles
from stageline.planning.request import PlanRequest
from stageline.planning.search import PlanSearch
from stageline.planning.tensor_parallel import dividends, refuse_degree
from stageline.schedules.registry import whole
from stageline.synthesis.problem import SLACK

FIRST = ("1f1b",)
"""The family that every mesh is tried with first; all are tried with those that could be the best."""
MAX_FULL = 4
"""The number of meshes among which the time left is divided; more are tried if these do not need it."""
MIN_SECONDS = 0.02
"""The least time for a mesh."""


@dataclass(frozen=True)
class DeviceRequest:
    """The meshes that are possible for a number of devices, and why others are not."""

    requests: tuple[PlanRequest, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(
        cls,
        devices: Any,
        tp: Any,
        model: nn.Module | None,
        profiles: SizedProfiles,
        sizes: Mapping[str, Any],
        lists: Mapping[str, Any],
        request_for: Callable[[Mapping[str, int], int, int], PlanRequest],
    ) -> DeviceRequest:
        """Return a request for every mesh; `sizes` must be divided among the pipelines, `lists` have one per device."""
        devices = whole("plan", "devices", devices)
        if lists["bandwidth"] is None:
            raise StagelineError(
                f"devices={devices} needs bandwidth=, the bytes per second between processes; without it, "
                "collectives would take no time, and the choice of mesh would be arbitrary"
            )
        for name, value in lists.items():
            if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and len(value) != devices:
                raise StagelineError(
                    f"{name} must be one value, or one for each of the {devices} devices; got {len(value)}"
                )
        degrees, note = tensor_parallel_degrees(devices, tp, model)
        requests, reasons = [], Counter[str]()
        for mesh in factorisations(devices, degrees):
            pipelines = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
            uneven = [name for name, size in sizes.items() if isinstance(size, int) and size % pipelines]
            if uneven:
                reasons[f"{uneven[0]}={sizes[uneven[0]]} cannot be divided equally among the pipelines"] += 1
                continue
            if mesh["pp"] > len(profiles.names):
                reasons[f"pp exceeds the {len(profiles.names)} units of the model"] += 1
                continue
            request = request_for(mesh, mesh["pp"], pipelines)
            try:
                arguments.check_sizes(request)
            except StagelineError as error:
                reasons[str(error)] += 1
                continue
            requests.append(request)
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        if not requests:
            raise StagelineError(
                f"no mesh of {devices} devices is possible: {listed}; use a different number of devices"
            )
        notes = [note, f"meshes that are not possible: {listed}" if listed else ""]
        return cls(tuple(requests), tuple(text for text in notes if text))


def factorisations(devices: int, degrees: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield all meshes, the dimensions from the outermost to the innermost; those of size 1 are left out, except pp.

    >>> list(factorisations(2, [1, 2]))
    [{'pp': 1, 'dp_replicate': 2}, {'pp': 1, 'dp_shard': 2}, {'pp': 2}, {'pp': 1, 'tp': 2}]
    """
    for tp in degrees:
        rest = devices // tp
        for pp in _divisors(rest):
            for shards in _divisors(rest // pp):
                sizes = {"dp_replicate": rest // pp // shards, "dp_shard": shards, "tp": tp}
                yield {"pp": pp, **{name: size for name, size in sizes.items() if size > 1}}


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def tensor_parallel_degrees(devices: int, tp: Any, model: nn.Module | None) -> tuple[list[int], str]:
    """Return the sizes of tensor parallel to try, and a note that says why these.

    >>> tensor_parallel_degrees(8, [1, 4], None)[0], tensor_parallel_degrees(8, None, None)[0]
    ([1, 4], [1])
    """
    if tp is not None:
        degrees = list(tp) if isinstance(tp, Sequence) and not isinstance(tp, str) else [tp]
        wrong = [size for size in degrees if type(size) is not int or size < 1 or devices % size]
        if wrong or not degrees:
            raise StagelineError(
                f"tp must be a list of tensor-parallel sizes that divide {devices} devices, got {shorten(tp)}"
            )
        if model is not None:
            for size in degrees:
                refuse_degree(model, size)
        return degrees, ""
    if model is None:
        return [1], "tp is 1: a profile does not say how layers can be divided; pass tp=[1, 2, 4] to try others"
    counts = dividends(model)
    if not counts and not plan_of(model):
        return [1], "tp is 1: the model has no tp_plan, and no attribute for its heads; pass tp=[1, 2] to try others"
    degrees = [size for size in _divisors(devices) if all(count % size == 0 for count in counts.values())]
    heads = ", ".join(f"{name} {count}" for name, count in list(dict.fromkeys(counts.items()))[:4])
    return degrees, f"tp divides {heads}" if heads and len(degrees) < len(_divisors(devices)) else ""


class MeshSearch:
    """Plans all meshes, the most promising first."""

    def __init__(self, devices: DeviceRequest, limit: float, progress: Callable[[str], None]) -> None:
        self._requests, self._limit, self._progress = devices.requests, limit, progress
        self._start_time = time.monotonic()
        self.was_cut_short = False
        """Whether the time was up before all meshes were tried that could be the best."""
        self._searches: dict[int, PlanSearch] = {}
        """The best search of every mesh that was tried."""
        self._whole: set[int] = set()
        """The meshes with which everything was tried that the request asks for."""
        self._bounds = [PlanSearch(request).least_seconds for request in self._requests]

    def run(self) -> None:
        """Try one family with every mesh; then all families with those that could be the best, then synthesis too."""
        is_free = self._requests[0].names is None and self._requests[0].schedule is None
        self._screen(sorted(range(len(self._requests)), key=self._bounds.__getitem__), is_free)
        for synthesis in (False, True) if is_free else (self._requests[0].synthesis,):
            in_order = sorted(self._searches, key=self._potential)
            for place, number in enumerate(in_order):
                if self._can_win(number) and (is_free or self._searches[number].was_cut_short):
                    left = (1.0 if synthesis or not is_free else 0.7) * self._limit - self._elapsed
                    request = self._requests[number]
                    request = replace(request, synthesis=synthesis and request.synthesis)
                    self._try(request, number, left / min(MAX_FULL, len(in_order) - place), beat=self._best_seconds)

    def _screen(self, in_order: Sequence[int], is_free: bool) -> None:
        """Try every mesh quickly, so that each has a figure."""
        for place, number in enumerate(in_order):
            if not self._can_win(number):
                continue
            request = self._requests[number]
            quick = replace(request, names=FIRST, synthesis=False) if is_free else request
            share = (0.3 * self._limit - self._elapsed) / (len(in_order) - place)
            self._try(quick, number, share)
            if self._searches[number].best is None:  # the smallest microbatches need the least memory
                smallest = min(request.splits, key=lambda split: split[1])
                self._try(replace(quick, splits=(smallest,)), number, share)

    @property
    def best(self) -> PlanSearch | None:
        """The search of the best mesh; None if nothing fits any."""
        number = min(self._searches, key=self._rating, default=None)
        return None if number is None or self._searches[number].best is None else self._searches[number]

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start_time

    def _rating(self, number: int) -> tuple[float, float, int]:
        trial = self._searches[number].best
        # Rounded, so that of equally fast meshes the one with the least memory is chosen.
        if trial is not None:
            return float(f"{trial.seconds:.9g}"), trial.peak, number
        return inf, _excess(self._searches[number]), number

    def _can_win(self, number: int) -> bool:
        if self.best is None:
            return True
        if not self._is_below(number, self.best):
            return False
        self.was_cut_short = self.was_cut_short or self._elapsed > self._limit
        return self._elapsed <= self._limit

    def _is_below(self, number: int, best: PlanSearch) -> bool:
        """Whether the bound of a mesh is below the best plan."""
        return best.best is None or self._bounds[number] < best.best.seconds * (1 - SLACK)

    def _potential(self, number: int) -> tuple[float, float]:
        """Return the work of the busiest rank, which a better order may approach, and the memory above the limit."""
        trial = self._searches[number].best
        return (inf, _excess(self._searches[number])) if trial is None else (trial.seconds * (1 - trial.bubble), 0.0)

    @property
    def _best_seconds(self) -> float:
        best = self.best
        return inf if best is None or best.best is None else best.best.seconds

    def _try(self, request: PlanRequest, number: int, seconds: float, beat: float = inf) -> None:
        """Plan a mesh for some seconds; plans that cannot `beat` another one are left out."""
        self._progress(f"planning {' × '.join(f'{name} {size}' for name, size in request.mesh.items())}")
        before = self._searches.get(number)
        self._searches[number] = search = PlanSearch(replace(request, time_limit=max(seconds, MIN_SECONDS)), beat=beat)
        search.run()
        if (request.names, request.splits) == (self._requests[number].names, self._requests[number].splits):
            self._whole.add(number)
        after = self._rating(number)
        if before is not None:
            self._searches[number] = before
            if after < self._rating(number):
                self._searches[number] = search

    @property
    def closest(self) -> PlanSearch:
        """The search whose best trial exceeds the memory the least."""
        return min(self._searches.values(), key=_excess)

    def alternatives(self) -> tuple[MeshAlternative, ...]:
        """Return all meshes but the best: those that fit, fastest first; those that do not fit; those with a bound."""
        rows, best = [], self.best
        for number, request in enumerate(self._requests):
            search = self._searches.get(number)
            if search is None:
                rows.append(MeshAlternative(dict(request.mesh), self._bounds[number], simulated=False, fits=True))
            elif search is not best:
                trial = search.best or search.closest
                if trial is not None:
                    needless = best is not None and not self._is_below(number, best)
                    complete = needless or (number in self._whole and not search.was_cut_short)
                    rows.append(replace(_summary(search, trial), complete=complete))
        return tuple(sorted(rows, key=lambda row: (not row.simulated, not row.fits, row.seconds)))


def _excess(search: PlanSearch) -> float:
    """Return how far the closest trial of a search is above the memory."""
    trial, caps = search.closest, search.request.caps
    if trial is None or caps is None:
        return inf
    return max(rank.total - cap for rank, cap in zip(trial.memory, caps, strict=True))


def _summary(search: PlanSearch, trial: Trial) -> MeshAlternative:
    totals = [rank.total for rank in trial.memory]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    candidate = trial.candidate
    return MeshAlternative(
        dict(search.request.mesh), trial.seconds, True, trial.fits, trial.name, candidate.microbatches,
        candidate.samples, trial.bubble, search.evaluator.collectives(candidate).total, totals[fullest], fullest,
    )  # fmt: skip

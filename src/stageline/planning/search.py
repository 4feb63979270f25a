"""Search for the fastest plan that fits: simulate all families, then synthesize schedules for the best few cuts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from stageline.common.errors import StagelineError
from stageline.planning.candidates import (
    Candidate,
    Cuts,
    Evaluator,
    FamilyVariant,
    Shape,
    Trial,
    family_variants,
    one_by_one,
    shape_of,
)
from stageline.planning.request import SYNTHESIZED, PlanRequest
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.synthesis.problem import SLACK
from stageline.synthesis.synthesize import synthesize
from stageline.timeline.memory import peaks_of
from stageline.timeline.timeline import Timeline, share_above

MIN_GAIN = 0.005
"""A synthesized order must be this fraction faster than a family: a well-known name is worth something, too."""
MAX_SYNTHESES = 4
"""The number of candidates for which a schedule is synthesized."""
MAX_MICROBATCHES_PER_RANK = 16
"""More microbatches are tried only if nothing fits: the bubble is negligible by then."""
MAX_MOVES = 6
"""The number of cuts that move units away from full ranks; finding them is slow."""
ACTIONS_PER_SECOND = 12_000
"""The approximate speed of synthesis."""
MAX_QUICK_ACTIONS = 20_000
"""Schedules up to this size are simulated regardless of the time limit, for the first number of microbatches."""
MAX_SCHEDULES = 64
"""The number of schedules that are kept for reuse."""


class PlanSearch:
    """Tries candidates, the most promising first, until all are tried or the time is up."""

    def __init__(
        self, request: PlanRequest, progress: Callable[[str], None] = lambda text: None, beat: float = np.inf
    ) -> None:
        """`progress` receives messages about the search; candidates that cannot beat a time in seconds are left out."""
        self.request, self._progress, self._beat = request, progress, beat
        self.evaluator = Evaluator(request)
        self.cuts = Cuts(request.profiles.largest, request.by, request.counts, request.time)
        self.units = len(request.profiles.names)
        self.trials: list[Trial] = []
        self.bounds: dict[Candidate, float] = {}
        """Lower bounds from synthesis."""
        self.best: Trial | None = None
        self.was_cut_short = False
        """Whether the time was up before everything was tried."""
        self._start_time = time.monotonic()
        self._make = lru_cache(MAX_SCHEDULES)(FamilyVariant.make)
        self._moves = 0
        self._has_screened = False

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_time

    def run(self) -> None:
        """Simulate the families, save memory where they do not fit, then synthesize."""
        request = self.request
        synthesizes = request.synthesis and request.schedule is None
        until = (0.6 if synthesizes else 1.0) * request.time_limit
        most = max(MAX_MICROBATCHES_PER_RANK * request.ranks, request.splits[0][0])
        likely = [split for split in request.splits if split[0] <= most]
        for splits in (likely, [split for split in request.splits if split not in likely]):
            for split in self._by_bound(splits if self.best is None else []):
                self._screen(split, until)
                self._save_memory(split, until)
        if synthesizes:
            self._synthesize()
        if self.best is None and request.schedule is None and request.names is None:
            self._try_one_by_one()
        if self._only_synthesized and self.best is not None:
            self.trials = [trial for trial in self.trials if trial.name == SYNTHESIZED]
        self.trials.sort(key=lambda trial: (not trial.fits, *trial.rating))

    def _time_is_up(self, until: float) -> bool:
        """Whether to stop; while nothing fits, the whole time limit applies."""
        has_plan = self.best is not None or self._only_synthesized or self._beat < np.inf
        if self.elapsed <= (until if has_plan else max(until, self.request.time_limit)):
            return False
        self.was_cut_short = True
        return True

    @property
    def _only_synthesized(self) -> bool:
        """Whether no family is requested by name: they then only show which cuts to synthesize a schedule for."""
        return self.request.names == ()

    # Families

    def _screen(self, split: tuple[int, int], until: float) -> None:
        """Simulate all families with every cut for their shape."""
        is_first = not self._has_screened and self._beat == np.inf  # else there is a plan already
        self._has_screened = True
        for variant in self._variants:
            is_quick = is_first and 3 * variant.shape.stages * split[0] <= MAX_QUICK_ACTIONS
            if not is_quick and self._time_is_up(until):
                return
            candidates = self._promising_cuts(variant.shape, *split)
            schedule = self._schedule(variant, split[0]) if candidates else None
            if schedule is not None:
                for candidate in candidates:
                    if not is_quick and self._time_is_up(until):
                        return
                    self._simulate(schedule, candidate)
        best = "" if self.best is None else f", best {self.best.name} {1e3 * self.best.seconds:.4g} ms"
        self._progress(f"{len(self.trials)} plans simulated{best}")

    @cached_property
    def _variants(self) -> list[FamilyVariant]:
        request = self.request
        if request.schedule is None:
            variants = family_variants(request.ranks, self.units, request.names or None, request.chunks)
            # Unless all ranks are alike, costs depend on the placement, which a small schedule does not show.
            return [v for v in variants if v.shape.placement is not None or request.time.is_uniform]
        schedule = request.schedule
        return [FamilyVariant(schedule.name, tuple(schedule.options.items()), shape_of(schedule))]

    def _by_bound(self, splits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the numbers of microbatches, lowest bound first."""
        shape = Shape(self.request.ranks, self.request.ranks, "loop")

        def bound(split: tuple[int, int]) -> float:
            candidates = [Candidate(shape, *split, cut, "none") for cut in self.cuts.of(shape)]
            return min(map(self.evaluator.bound, candidates), default=0.0)

        return sorted(splits, key=lambda split: (bound(split), split))

    def _promising_cuts(self, shape: Shape, microbatches: int, samples: int) -> list[Candidate]:
        """Return the cuts that could be faster than the best trial."""
        recompute = "none" if self.request.recompute == "auto" else self.request.recompute
        candidates = [Candidate(shape, microbatches, samples, counts, recompute) for counts in self.cuts.of(shape)]
        return [candidate for candidate in candidates if not self._is_hopeless(candidate)]

    def _schedule(self, variant: FamilyVariant, microbatches: int) -> Schedule | None:
        if self.request.schedule is not None:
            return self.request.schedule
        return self._make(variant, microbatches)

    # Saving memory

    def _save_memory(self, split: tuple[int, int], until: float) -> None:
        """Change trials that do not fit, the most promising first, if they are faster than the best."""
        too_large = [
            trial
            for trial in self.trials
            if not trial.fits and (trial.candidate.microbatches, trial.candidate.samples) == split
        ]
        for trial in sorted(too_large, key=self._estimated_seconds):
            if self._time_is_up(until):
                return
            if self.best is not None and trial.seconds >= self.best.seconds:
                continue
            variant = FamilyVariant(trial.name, tuple(trial.options.items()), trial.candidate.shape)
            schedule = self._schedule(variant, trial.candidate.microbatches)
            if schedule is None or self.request.caps is None:
                continue
            if self.request.recompute == "auto":
                self._recompute(schedule, trial.candidate)
            if self._moves < MAX_MOVES:
                self._moves += 1
                self._move_units(schedule, trial)

    def _estimated_seconds(self, trial: Trial) -> float:
        """Estimate the time once it fits: the excess share of activations is recomputed, for a third of the time."""
        caps = self.request.caps or [rank.total for rank in trial.memory]
        excess = [
            min(1.0, max(0.0, rank.total - cap) / rank.activations) if rank.activations else 0.0
            for rank, cap in zip(trial.memory, caps, strict=True)
        ]
        return trial.seconds * (1 + max(excess) / 3)

    def _is_hopeless(self, candidate: Candidate) -> bool:
        fastest = min(self._beat, np.inf if self.best is None else self.best.seconds)
        return fastest < np.inf and self.evaluator.bound(candidate) >= fastest * (1 - SLACK)

    def _move_units(self, schedule: Schedule, trial: Trial) -> None:
        """Try a cut that moves units away from ranks above their cap."""
        counts = self._roomier_cut(trial)
        if counts is not None:
            candidate = replace(trial.candidate, counts=counts)
            if not self._is_hopeless(candidate):
                self._simulate(schedule, candidate)

    def _roomier_cut(self, trial: Trial) -> tuple[int, ...] | None:
        request, candidate = self.request, trial.candidate
        if request.caps is None or trial.fits:
            return None
        totals = [rank.total for rank in trial.memory]
        state_factor, recompute = sum(request.states.factors), candidate.recompute != "none"
        cut = self.cuts.roomier(candidate.shape, candidate.counts, totals, request.caps, state_factor, recompute)
        return None if cut == candidate.counts else cut

    def _recompute(self, schedule: Schedule, candidate: Candidate) -> None:
        """Recompute units on the ranks above their cap, as few as possible; or whole stages."""
        units = self._fewest_units(schedule, candidate)
        if units and self._simulate(schedule, replace(candidate, recompute=units)):
            return
        for counts in dict.fromkeys([candidate.counts, *self.cuts.of(candidate.shape, recompute=True)]):
            stages = replace(candidate, counts=counts, recompute="stage")
            if self._is_hopeless(stages) or not self._simulate(schedule, stages):
                return

    def _fewest_units(self, schedule: Schedule, candidate: Candidate) -> tuple[str, ...]:
        """Return for every rank the units that save most per time, until it fits; () if it cannot fit.

        Bisects over the number of units per rank. Message buffers are taken from a step without recomputation.
        """
        queues = self.evaluator.recompute_queues(candidate, schedule.placement.table[0].tolist())
        plain_timeline = self.evaluator.simulate(schedule, replace(candidate, recompute="none"))
        plain = self.evaluator.memory(plain_timeline, candidate)

        def fits(counts: Sequence[int]) -> list[bool]:
            costs = self.evaluator.costs(replace(candidate, recompute=_first(queues, counts)))
            peaks = peaks_of(schedule, costs)
            return self.evaluator.fits(
                [rank._replace(activations=peak) for rank, peak in zip(plain, peaks, strict=True)]
            )

        low, high = [0] * len(queues), [len(queue) for queue in queues]
        if not all(fits(high)):
            return ()
        while low != high:
            middle = [(least + most) // 2 for least, most in zip(low, high, strict=True)]
            for rank, is_enough in enumerate(fits(middle)):
                if low[rank] < high[rank]:
                    low[rank], high[rank] = (low[rank], middle[rank]) if is_enough else (middle[rank] + 1, high[rank])
        return _first(queues, high)

    def _try_one_by_one(self) -> None:
        """Try the order with the least memory, one microbatch after the other: if it does not fit, nothing does."""
        request = self.request
        shape = Shape(request.ranks, request.ranks, "loop")
        if request.caps is None or (request.chunks or 1) != 1:
            return
        units = tuple(sorted(set(request.profiles.names)))
        choices = ("none", units, "stage") if request.recompute == "auto" else (request.recompute,)
        for split in sorted(request.splits, key=lambda split: split[1])[:3]:
            for recompute in choices:
                for counts in self.cuts.of(shape):
                    self._simulate_one_by_one(Candidate(shape, *split, counts, recompute))
                    roomier = None if self.best is not None else self._roomier_cut(self.trials[-1])
                    if roomier is not None:
                        self._simulate_one_by_one(Candidate(shape, *split, roomier, recompute))
                    if self.best is not None:
                        return

    def _simulate_one_by_one(self, candidate: Candidate) -> None:
        """Simulate one microbatch and two, and extrapolate: thousands in a row would take long."""
        ranks, count = candidate.shape.ranks, candidate.microbatches
        first, timeline = (self.evaluator.simulate(one_by_one(ranks, few), candidate) for few in (1, min(count, 2)))
        seconds = first.makespan + (count - 1) * (timeline.makespan - first.makespan)
        self._add(candidate, one_by_one(ranks, count), timeline, seconds, keep_schedule=True)

    # Trials

    def _simulate(self, schedule: Schedule, candidate: Candidate, keep_schedule: bool = False) -> bool:
        """Simulate a candidate, and return whether it fits."""
        timeline = self.evaluator.simulate(schedule, candidate)
        keep_schedule = keep_schedule or self.request.schedule is not None
        return self._add(candidate, schedule, timeline, timeline.makespan, keep_schedule)

    def _add(
        self, candidate: Candidate, schedule: Schedule, timeline: Timeline, seconds: float, keep_schedule: bool
    ) -> bool:
        memory = self.evaluator.memory(timeline, candidate)
        trial = Trial(
            candidate,
            schedule.name,
            dict(schedule.options),
            seconds,
            share_above(timeline.makespan, timeline.ideal),
            memory,
            all(self.evaluator.fits(memory)),
            schedule if keep_schedule else None,
        )
        self.trials.append(trial)
        is_better = trial.fits and (self.best is None or trial.rating < self.best.rating)
        is_requested = not self._only_synthesized or schedule.name == SYNTHESIZED
        # Gradients must add up in the order of the microbatches, so that their bits do not depend on the schedule.
        if is_better and is_requested and (self.request.schedule is not None or verify(schedule).in_order):
            self.best = trial
        return trial.fits

    # Synthesis

    def _synthesize(self) -> None:
        request = self.request
        candidates = self._promising_candidates()
        for index, candidate in enumerate(candidates):
            if self.elapsed > request.time_limit and self.best is not None:
                self.was_cut_short = True
                return
            shape, microbatches = candidate.shape, candidate.microbatches
            self._progress(f"synthesizing a schedule for {microbatches} microbatches in {shape.stages} stages")
            time_left = max(0.2, (request.time_limit - self.elapsed) / (len(candidates) - index))
            is_large = 3 * shape.stages * microbatches > ACTIONS_PER_SECOND * time_left
            room = self.evaluator.room(candidate)
            if (is_large and not self._only_synthesized) or (room is not None and min(room) < 0):
                continue
            try:
                synthesized = synthesize(
                    replace(self.evaluator.costs(candidate), shares=(), links=()),  # it knows full speed
                    request.ranks,
                    microbatches,
                    memory=room,
                    chunks=shape.chunks,
                    placement=shape.placement or "loop",
                    time_limit=time_left,
                    tolerance=MIN_GAIN,
                    seed=request.seed,
                )
            except StagelineError:
                continue  # nothing fits here, or it is too large
            if synthesized.was_interrupted:
                raise KeyboardInterrupt  # meant for the whole search
            self.bounds[candidate] = synthesized.lower_bound
            if self.best is None or synthesized.achieved < self.best.seconds * (1 - MIN_GAIN):
                self._simulate(synthesized.schedule, candidate, keep_schedule=True)

    def _promising_candidates(self) -> list[Candidate]:
        """Return the candidates for which a synthesized order could be better than all families."""
        best = self.best
        trials = [trial for trial in self.trials if trial.candidate.shape.placement]
        by_rating = sorted(trials, key=lambda trial: (not trial.fits, trial.rating))
        if best is not None:
            candidates = dict.fromkeys(trial.candidate for trial in by_rating)
            could_win = [
                candidate for candidate in candidates if self.evaluator.bound(candidate) < best.seconds * (1 - MIN_GAIN)
            ]
            first = [best.candidate] if best.candidate in could_win else []
            return list(dict.fromkeys([*first, *could_win]))[:MAX_SYNTHESES]
        if not (by_rating and by_rating[0].fits):
            by_rating = sorted(trials, key=self._excess)
        return list(dict.fromkeys(trial.candidate for trial in by_rating))[:MAX_SYNTHESES]

    def _excess(self, trial: Trial) -> float:
        """Return how far the fullest rank is above its cap."""
        caps = self.request.caps or tuple(np.inf for _ in trial.memory)
        return max(rank.total - cap for rank, cap in zip(trial.memory, caps, strict=True))

    @property
    def least_seconds(self) -> float:
        """A lower bound on the step of any plan for the request."""
        return min(self.evaluator.least_seconds(*split) for split in self.request.splits)

    def lower_bound(self, trial: Trial) -> float:
        """Return a lower bound on the step for this candidate, over all orders."""
        bound = max(self.evaluator.bound(trial.candidate), self.bounds.get(trial.candidate, 0.0))
        return min(trial.seconds, bound)

    @cached_property
    def closest(self) -> Trial | None:
        """The trial that exceeds its cap the least."""
        return min(self.trials, key=self._excess, default=None)


def _first(queues: Sequence[Sequence[str]], counts: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({name for queue, count in zip(queues, counts, strict=True) for name in queue[:count]}))

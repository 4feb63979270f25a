"""Looking for the fastest plan that fits: all families simulated, schedules synthesized for the best few cuts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from stageline.common.errors import StagelineError
from stageline.planning.candidates import Cuts, Kind, Shape, kinds_of, shape_of
from stageline.planning.evaluate import SLACK, Prices
from stageline.planning.memory import RankMemory
from stageline.planning.request import SYNTHESIZED
from stageline.planning.trial import Asked, Found, Place, one_by_one, place_of
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.synthesis.synthesize import synthesize
from stageline.timeline.memory import peaks_of
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import share_above

BETTER = 0.005
"""A synthesized order must be this share faster than a family to be taken: a name is worth something too."""
FEW = 4
"""For how many cuts a schedule is synthesized."""
MOST = 16
"""More microbatches than so many for a rank are tried only where nothing fits: their bubble is next to nothing."""
TRIES = 6
"""How many cuts are looked for that take units from full ranks: that takes longer than all else."""
SPEED = 12_000
"""About how many actions an order is made for in a second."""
SMALL = 20_000
"""Schedules of so many actions are simulated in no time: of the first number of microbatches all of them are."""
KEPT = 64
"""How many schedules are kept to be used again."""


class Search:
    """Tries what was asked for, the most promising first, until all is tried or the time is over."""

    def __init__(self, asked: Asked, tell: Callable[[str], None] = lambda text: None) -> None:
        """`tell` is told in words what is being done."""
        self.asked, self._tell = asked, tell
        self.prices = Prices(asked)
        self.cuts = Cuts(asked.sizes.any, asked.by, asked.pinned)
        self.units = len(asked.sizes.any.layers)
        self.found: list[Found] = []
        self.bounds: dict[Place, float] = {}
        """For every place that a schedule was synthesized for: no order takes less."""
        self.best: Found | None = None
        self.was_cut = False
        """Whether the time was over before all was tried."""
        self._began = time.monotonic()
        self._schedules: dict[Any, Schedule | None] = {}
        self._tries = 0
        self._screened = False

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Simulate the families, make those fit that do not, then synthesize."""
        asked = self.asked
        synthesizes = asked.synthesis and asked.given is None
        until = (0.6 if synthesizes else 1.0) * asked.time_limit
        likely = [split for split in asked.splits if split[0] <= max(MOST * asked.ranks, asked.splits[0][0])]
        for splits in (likely, [split for split in asked.splits if split not in likely]):
            for split in self._in_order(splits if self.best is None else []):
                self._screen(split, until)
                self._squeeze(split, until)
        if synthesizes:
            self._synthesize()
        if self.best is None and asked.given is None and asked.names is None:
            self._leanest()
        if self._only_made and self.best is not None:
            self.found = [each for each in self.found if each.name == SYNTHESIZED]
        self.found.sort(key=lambda each: (not each.fits, *each.order))

    def _over(self, until: float) -> bool:
        """Whether it is time to stop; later while nothing fits."""
        sure = self.best is not None or self._only_made
        if self.elapsed <= (until if sure else max(until, self.asked.time_limit)):
            return False
        self.was_cut = True
        return True

    @property
    def _only_made(self) -> bool:
        """Whether no family is asked for by name: then they only show which cuts an order is made for."""
        return self.asked.names == ()

    # Families.

    def _screen(self, split: tuple[int, int], until: float) -> None:
        """All families with every cut for their shape."""
        first = not self._screened
        self._screened = True
        for kind in self._kinds:
            small = first and 3 * kind.shape.stages * split[0] <= SMALL
            if not small and self._over(until):
                return
            places = self._hopeful(kind.shape, *split)
            made = self._made(kind, split[0]) if places else None
            if made is not None:
                for place in places:
                    self._add(made, place)
        best = "" if self.best is None else f", best {self.best.name} {1e3 * self.best.seconds:.4g} ms"
        self._tell(f"{len(self.found)} plans simulated{best}")

    @cached_property
    def _kinds(self) -> list[Kind]:
        asked = self.asked
        if asked.given is None:
            return kinds_of(asked.ranks, self.units, asked.names or None, asked.chunks)
        return [Kind(asked.given.name, tuple(asked.given.options.items()), shape_of(asked.given))]

    def _in_order(self, splits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The numbers of microbatches, those with the lowest bound first."""
        shape = Shape(self.asked.ranks, self.asked.ranks, "loop")

        def bound(split: tuple[int, int]) -> float:
            return min(
                (self.prices.bound(Place(shape, *split, cut, "none")) for cut in self.cuts.of(shape)), default=0.0
            )

        return sorted(splits, key=lambda split: (bound(split), split))

    def _hopeful(self, shape: Shape, microbatches: int, samples: int) -> list[Place]:
        """The cuts that could be faster than what was found."""
        again = "none" if self.asked.again == "auto" else self.asked.again
        places = [Place(shape, microbatches, samples, counts, again) for counts in self.cuts.of(shape)]
        return [place for place in places if not self._hopeless(place)]

    def _made(self, kind: Kind, microbatches: int) -> Schedule | None:
        """A schedule, and the last ones again without making them anew."""
        if self.asked.given is not None:
            return self.asked.given
        key = (kind.name, kind.options, microbatches)
        if key not in self._schedules:
            if len(self._schedules) >= KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = kind.make(microbatches)
        return self._schedules[key]

    # Where memory is short.

    def _squeeze(self, split: tuple[int, int], until: float) -> None:
        """Make what does not fit fit, the most promising first; what is slower than the best before need not try."""
        mine = [each for each in self.found if not each.fits and (each.microbatches, each.samples) == split]
        for each in sorted(mine, key=self._squeezed):
            if self._over(until):
                return
            if self.best is not None and each.seconds >= self.best.seconds:
                continue
            made = self._made(Kind(each.name, tuple(each.options.items()), each.shape), each.microbatches)
            if made is None or self.asked.caps is None:
                continue
            if self.asked.again == "auto":
                self._compute_again(made, place_of(each))
            if self._tries < TRIES:
                self._tries += 1
                self._move_units(made, each)

    def _leanest(self) -> None:
        """One microbatch after the other, in as little memory as there is: where this does not fit, nothing does."""
        shape = Shape(self.asked.ranks, self.asked.ranks, "loop")
        if self.asked.caps is None or (self.asked.chunks or 1) != 1:
            return
        units = tuple(sorted({layer.name for layer in self.asked.sizes.any.layers}))
        again = ("none", units, "stage") if self.asked.again == "auto" else (self.asked.again,)
        for split in sorted(self.asked.splits, key=lambda split: split[1])[:3]:
            for each in again:
                for counts in self.cuts.of(shape):
                    self._alone(Place(shape, *split, counts, each))
                    cut = None if self.best is not None else self._roomier(self.found[-1])
                    if cut is not None:
                        self._alone(Place(shape, *split, cut, each))
                    if self.best is not None:
                        return

    def _alone(self, place: Place) -> None:
        """One microbatch after the other: the first tells of all, and simulating thousands in a row takes long."""
        count = place.microbatches
        timeline = simulate(one_by_one(place.shape.ranks, 1), self.prices.costs(place))
        memory = self.prices.memory(timeline, place)
        bubble = share_above(timeline.makespan, timeline.ideal)
        made = one_by_one(place.shape.ranks, count)
        self._note(place, made, count * timeline.makespan, bubble, memory, keep=True)

    def _squeezed(self, each: Found) -> float:
        """About what it will take: the share of activations that must go is computed once more, a third of the time."""
        caps = self.asked.caps or [rank.total for rank in each.memory]
        over = [
            min(1.0, max(0.0, rank.total - cap) / rank.activations) if rank.activations else 0.0
            for rank, cap in zip(each.memory, caps, strict=True)
        ]
        return each.seconds * (1 + max(over) / 3)

    def _hopeless(self, place: Place) -> bool:
        return self.best is not None and self.prices.bound(place) >= self.best.seconds * (1 - SLACK)

    def _move_units(self, made: Schedule, each: Found) -> None:
        """Try a cut that takes units from the ranks that hold too much."""
        place, cut = place_of(each), self._roomier(each)
        if cut is not None and not self._hopeless(replace(place, counts=cut)):
            self._add(made, replace(place, counts=cut))

    def _roomier(self, each: Found) -> tuple[int, ...] | None:
        asked, held = self.asked, [rank.total for rank in each.memory]
        if asked.caps is None or each.fits:
            return None
        weight, again = sum(asked.states.factors), each.again != "none"
        cut = self.cuts.roomier(each.shape, each.counts, held, asked.caps, weight, again)
        return None if cut == each.counts else cut

    def _compute_again(self, made: Schedule, place: Place) -> None:
        """Compute units once more on the ranks that hold too much, as few as will do; or whole stages."""
        names = self._fewest(made, place)
        if names and self._add(made, replace(place, again=names)):
            return
        for counts in dict.fromkeys([place.counts, *self.cuts.of(place.shape, again=True)]):
            stages = replace(place, counts=counts, again="stage")
            if self._hopeless(stages) or not self._add(made, stages):
                return

    def _fewest(self, made: Schedule, place: Place) -> tuple[str, ...]:
        """For every rank the units that save most for their time, until it fits; none where it cannot.

        Only what is kept is counted here, and messages as they are when nothing is computed once more.
        """
        queues = self.prices.queues(place, made.placement.table[0].tolist())
        plain = self.prices.memory(simulate(made, self.prices.costs(replace(place, again="none"))), place)

        def fits(counts: Sequence[int]) -> list[bool]:
            costs = self.prices.costs(replace(place, again=_first(queues, counts)))
            peaks = peaks_of(made, costs)
            return self.prices.fitting(
                [rank._replace(activations=peak) for rank, peak in zip(plain, peaks, strict=True)]
            )

        low, high = [0] * len(queues), [len(queue) for queue in queues]
        if not all(fits(high)):
            return ()
        while any(one < two for one, two in zip(low, high, strict=True)):
            middle = [(one + two) // 2 for one, two in zip(low, high, strict=True)]
            for rank, enough in enumerate(fits(middle)):
                if low[rank] < high[rank]:
                    low[rank], high[rank] = (low[rank], middle[rank]) if enough else (middle[rank] + 1, high[rank])
        return _first(queues, high)

    def _add(self, made: Schedule, place: Place, keep: bool = False) -> bool:
        """Simulate; say whether it fits."""
        timeline = simulate(made, self.prices.costs(place))
        memory = self.prices.memory(timeline, place)
        bubble = share_above(timeline.makespan, timeline.ideal)
        return self._note(place, made, timeline.makespan, bubble, memory, keep or self.asked.given is not None)

    def _note(
        self, place: Place, made: Schedule, seconds: float, bubble: float, memory: tuple[RankMemory, ...], keep: bool
    ) -> bool:
        """Keep what was found; say whether it fits."""
        each = Found(
            made.name, dict(made.options), place.shape, place.microbatches, place.samples, place.counts, place.again,
            seconds, bubble, memory, all(self.prices.fitting(memory)), made if keep else None,
        )  # fmt: skip
        self.found.append(each)
        better = each.fits and (self.best is None or each.order < self.best.order)
        wanted = not self._only_made or made.name == SYNTHESIZED
        if better and wanted and (self.asked.given is not None or _keeps_order(made)):
            self.best = each
        return each.fits

    # Schedules made for their costs.

    def _synthesize(self) -> None:
        asked = self.asked
        places = self._promising()
        for number, place in enumerate(places):
            if self.elapsed > asked.time_limit and self.best is not None:
                self.was_cut = True
                return
            self._tell(f"making an order for {place.microbatches} microbatches in {place.shape.stages} stages")
            left = max(0.2, (asked.time_limit - self.elapsed) / (len(places) - number))
            if 3 * place.shape.stages * place.microbatches > SPEED * left and not self._only_made:
                continue
            room = self.prices.room(place)
            if room is not None and min(room) < 0:
                continue
            try:
                made = synthesize(
                    self.prices.costs(place),
                    asked.ranks,
                    place.microbatches,
                    memory=room,
                    chunks=place.shape.chunks,
                    placement="vee" if place.shape.place == "v" else "loop",
                    time_limit=left,
                    seed=asked.seed,
                )
            except StagelineError:
                continue  # nothing fits here, or it is too large
            if made.was_interrupted:
                raise KeyboardInterrupt  # it is for the whole search, not for one order
            self.bounds[place] = made.lower_bound
            if self.best is None or made.achieved < self.best.seconds * (1 - BETTER):
                self._add(made.schedule, place, keep=True)

    def _promising(self) -> list[Place]:
        """Where an order of its own could be better than all families: where the best families are, and around."""
        best = self.best
        around = sorted((each for each in self.found if each.shape.place), key=lambda each: (not each.fits, each.order))
        if best is None and around and around[0].fits:
            return list(dict.fromkeys(place_of(each) for each in around))[:FEW]
        if best is not None:
            places = list(dict.fromkeys(place_of(each) for each in around))
            could = [place for place in places if self.prices.bound(place) < best.seconds * (1 - BETTER)]
            return list(dict.fromkeys([*([place_of(best)] if place_of(best) in could else []), *could]))[:FEW]
        tightest = sorted((each for each in self.found if each.shape.place), key=self._excess)
        return list(dict.fromkeys(place_of(each) for each in tightest))[:FEW]

    def _excess(self, each: Found) -> float:
        """How far above its cap the fullest rank is."""
        caps = self.asked.caps or tuple(np.inf for _ in each.memory)
        return max(rank.total - cap for rank, cap in zip(each.memory, caps, strict=True))

    def floor(self, each: Found) -> float:
        """What no order of this cut takes less than."""
        place = place_of(each)
        return min(each.seconds, max(self.prices.bound(place), self.bounds.get(place, 0.0)))

    @cached_property
    def closest(self) -> Found | None:
        """Of those that do not fit, the one with the least above its cap."""
        return min(self.found, key=self._excess, default=None)


def _keeps_order(made: Schedule) -> bool:
    """Whether gradients add up in the order of the microbatches, so that bits do not depend on the schedule."""
    return verify(made).in_order


def _first(queues: Sequence[Sequence[str]], counts: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({name for queue, count in zip(queues, counts, strict=True) for name in queue[:count]}))

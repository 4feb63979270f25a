"""Cut a chain of layers into stages so that the slowest rank is as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stageline.errors import StagelineError
from stageline.model.balance import chart
from stageline.model.cuts import Chain, Ints, Problem, bound_of, cut_chain, improve
from stageline.model.request import Numbers, Request, Span
from stageline.model.vee import cut_rounds, cut_vee


@dataclass(frozen=True)
class Partition:
    """A cut of layers into stages, and how evenly it loads the ranks.

    >>> found = partition([1, 2, 3, 4, 5], ranks=2)
    >>> found.stages, found.loads, found.optimal
    ([(0, 3), (3, 5)], (6.0, 9.0), True)
    """

    stages: list[Span]
    """The first layer of every stage, and the one after its last."""
    rank_of: tuple[int, ...]
    """The rank of every stage."""
    loads: tuple[float, ...]
    """The time of every rank: what its layers cost, over its speed."""
    memory: tuple[float, ...] | None
    """The bytes of every rank, where those of layers were given."""
    caps: tuple[float, ...] | None
    """The bytes that every rank may hold."""
    bound: float
    """No cut makes the slowest rank faster than this."""
    names: tuple[str, ...] | None = None
    """The names of the layers, where they were given."""
    also_on: tuple[int, ...] | None = None
    """The second rank of every stage, for a schedule of two directions."""

    @property
    def slowest(self) -> float:
        """The time of the slowest rank: a step takes at least that long for every microbatch."""
        return max(self.loads)

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no cut is better."""
        return self.slowest <= self.bound

    @property
    def gap(self) -> float:
        """How far the slowest rank is above the bound, as a share of it; 0.0 where no cut is better."""
        if self.optimal:
            return 0.0
        return (self.slowest - self.bound) / self.bound if self.bound else math.inf

    @property
    def layers_per_stage(self) -> list[int]:
        """How many layers every stage holds.

        >>> partition([1, 2, 3, 4, 5], ranks=2).layers_per_stage
        [3, 2]
        """
        return [stop - start for start, stop in self.stages]

    def chart(self, before: Partition | None = None, width: int = 80) -> str:
        """Draw the balance: a bar for every rank; with `before`, another cut for as many ranks, both.

        >>> print(partition([1, 2, 3, 4, 5], ranks=2).chart(width=60))
        5 layers, 2 stages, 2 ranks
        slowest 9 (rank 1): no cut is better
        rank 0  0-2  █████████████████████████████               │ 6
        rank 1  3-4  ████████████████████████████████████████████│ 9
        """
        if before is not None and (len(before.loads), before.layers) != (len(self.loads), self.layers):
            raise StagelineError(
                f"before is a cut of {before.layers} layers for {len(before.loads)} ranks, and this one of "
                f"{self.layers} for {len(self.loads)}; give a cut of the same layers for the same ranks"
            )
        return chart(self, before, width)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.stages[-1][1]


def uniform(layers: int, stages: int) -> list[Span]:
    """Cut into parts of even counts, the larger ones first.

    >>> uniform(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    if stages < 1 or layers < stages:
        raise StagelineError(
            f"{layers} layers cannot be cut into {stages} stages; every stage needs a layer: "
            f"give at most {layers} stages (ranks times chunks), and at least 1"
        )
    size, larger = divmod(layers, stages)
    starts = [part * size + min(part, larger) for part in range(stages + 1)]
    return list(pairwise(starts))


def partition(
    costs: Numbers,
    ranks: int,
    chunks: int = 1,
    placement: str = "loop",
    *,
    memory: Numbers | None = None,
    caps: float | Numbers | None = None,
    pinned: Mapping[int | str, int] | None = None,
    speed: Numbers | None = None,
    names: Sequence[str] | None = None,
    slack: float = 0.0,
) -> Partition:
    """Cut layers into `ranks` times `chunks` stages, none empty, so that the slowest rank is as fast as it can be.

    `costs` are the times of the layers, in order: a forward and its whole backward. With several chunks, `placement`
    says where stages are: "loop" goes round the ranks (0 1 2 0 1 2), "v" down and up again (0 1 2 2 1 0). `memory` has
    the bytes of each layer and `caps` what a rank may hold, one number or one per rank. `pinned` says of a layer, by
    number or name, in which stage it must be. `speed` is that of each rank: 2.0 is twice as fast.

    One chunk, and two in a V, are cut as well as can be, and so are two in a loop if layers are no more than some
    hundred; for all else a search finds a cut that is mostly close to `bound`, and `gap` says how close. With two
    chunks the best cut may have a long and a short stage on a rank; with `slack`, a share, a cut with more even
    stages is taken if its slowest rank is no more than that above the best.

    >>> partition([4, 1, 1, 1, 1, 8], ranks=2, chunks=2, placement="v").stages
    [(0, 1), (1, 3), (3, 5), (5, 6)]
    >>> partition([4, 1, 1, 1, 1, 8], ranks=2, speed=[2, 1]).stages
    [(0, 5), (5, 6)]
    >>> partition([1, 1, 1, 1], ranks=2, memory=[3, 3, 3, 3], caps=[8, 5])
    Traceback (most recent call last):
    stageline.errors.StagelineError: no cut fits the memory of the ranks: the closest gives ...
    """
    request = Request.of(costs, ranks, chunks, placement, memory, caps, speed, names)
    problem = request.problem(pinned or {})
    if not 0 <= slack < math.inf:
        raise StagelineError(f"slack is {slack!r}; give a share from 0, such as 0.05 for 5%")
    cut, exact, bound = _solve(problem, slack)
    if cut is None:
        raise _no_room(request, problem, exact)
    return _partition(request, problem, cut, bound)


def evaluate(
    stages: Sequence[Span] | Sequence[int],
    costs: Numbers,
    ranks: int,
    chunks: int = 1,
    placement: str = "loop",
    *,
    memory: Numbers | None = None,
    caps: float | Numbers | None = None,
    speed: Numbers | None = None,
    names: Sequence[str] | None = None,
) -> Partition:
    """Say how evenly a given cut loads the ranks: the first and last layer of stages, or how many each holds.

    >>> found = evaluate([3, 2], [1, 2, 3, 4, 5], ranks=2)
    >>> found.loads, found.bound, round(found.gap, 2)
    ((6.0, 9.0), 7.5, 0.2)
    >>> evaluate([(0, 4), (4, 5)], [1, 2, 3, 4, 5], ranks=2).slowest
    10.0
    """
    request = Request.of(costs, ranks, chunks, placement, memory, caps, speed, names)
    problem = request.problem({})
    return _partition(request, problem, request.cut_of(stages), bound_of(problem))


def _partition(request: Request, problem: Problem, cut: Ints, bound: float) -> Partition:
    """The figures of a cut, in the units that were given."""
    loads = tuple(
        load / speed for load, speed in zip(request.sums(request.costs, cut), request.speed.tolist(), strict=True)
    )
    bound = math.ldexp(bound, -request.power)
    # What is known of a bound is known up to rounding.
    if max(loads) <= bound * (1 + 1e-12):
        bound = max(loads)
    return Partition(
        stages=[(int(start), int(stop)) for start, stop in pairwise(cut)],
        rank_of=tuple(problem.rank_of.tolist()),
        loads=loads,
        memory=None if request.memory is None else request.sums(request.memory, cut),
        caps=None if request.caps is None else tuple(request.caps.tolist()),
        bound=bound,
        names=request.names,
    )


def _solve(problem: Problem, slack: float = 0.0) -> tuple[Ints | None, bool, float]:
    """The cut that is found, None if there is none; whether that is proven; and the time that no cut is faster than."""
    ranks, down, low = len(problem.speed), np.arange(len(problem.speed)), bound_of(problem)
    if len(problem.rank_of) == ranks:
        cut, exact = _as_chain(problem), True
        return cut, exact, low if cut is None else problem.rating(cut)[0]
    vee = np.array_equal(problem.rank_of, np.concatenate((down, down[::-1])))
    even = _search(problem, quick=vee)
    if len(problem.rank_of) > 2 * ranks:
        return even, False, low
    if vee:
        best, exact = cut_vee(problem, low), True
    else:
        best, exact = cut_rounds(problem, low, even)
    if best is None:
        return None, exact, low
    if exact:
        low = problem.rating(best)[0]
    if even is not None and problem.rating(even)[0] <= problem.rating(best)[0] * (1 + slack):
        return even, exact, low
    return improve(problem, best), exact, low


def _search(problem: Problem, quick: bool) -> Ints | None:
    """A good cut that starts from stages that are all as even as they can be; None if none of them fits."""
    starts = [_as_chain(problem)]
    if np.isfinite(problem.caps).any() and not (quick and starts[0] is not None and problem.fits(starts[0])):
        by_memory = problem.by_memory()
        cut = _as_chain(by_memory)
        starts.append(cut if cut is None or quick else improve(by_memory, cut))
    found = [improve(problem, cut) for cut in starts if cut is not None and problem.fits(cut)]
    return min(found, key=problem.rating, default=None)


def _as_chain(problem: Problem) -> Ints | None:
    """The best cut if every stage were on a rank of its own."""
    speed, caps = problem.speed[problem.rank_of], problem.caps[problem.rank_of]
    base = np.zeros(len(speed))
    return cut_chain(Chain(problem.time, problem.held, speed, base, caps, problem.low, problem.high))


def _no_room(request: Request, problem: Problem, exact: bool) -> StagelineError:
    """Say which layer or rank has no room, and what cap would do."""
    assert request.memory is not None
    assert request.caps is not None
    largest = int(np.argmax(request.memory))
    roomy = int(np.argmax(request.caps))
    least, *_ = _solve(problem.by_memory(np.ones(len(problem.speed))))
    assert least is not None  # without caps there is always a cut
    enough = max(request.sums(request.memory, least))
    if request.memory[largest] > request.caps[roomy]:
        why = (
            f"{request.name(largest)} alone has {request.memory[largest]:.16g} bytes, "
            f"and no rank may hold more than {request.caps[roomy]:.16g}"
        )
    elif request.memory.sum() > request.caps.sum():
        why = f"the layers have {request.memory.sum():.16g} bytes, and all ranks may hold {request.caps.sum():.16g}"
    else:
        closest, *_ = _solve(problem.by_memory())
        assert closest is not None
        held = np.array(request.sums(request.memory, closest))
        worst = int(np.argmax(held - request.caps))
        why = f"the closest gives rank {worst} {held[worst]:.16g} bytes, and it may hold {request.caps[worst]:.16g}"
    return StagelineError(
        f"no cut {'' if exact else 'was found that '}fits the memory of the ranks: {why}; "
        f"the {'smallest cap' if exact else 'smallest cap known'} that works, equal for all ranks, is {enough:.16g}: "
        "give ranks that much, use more of them, or pin fewer layers"
    )

"""Cut a chain of layers into stages such that the slowest rank is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from stageline.common.errors import StagelineError
from stageline.model.partition.cuts import Chain, CutProblem, Ints, cut_chain, improve, time_bound
from stageline.model.partition.request import Numbers, PartitionRequest, Span
from stageline.model.partition.v_cuts import cut_loop, cut_v


@dataclass(frozen=True)
class Partition:
    """A cut of layers into stages, and how evenly it loads the ranks.

    >>> cut = partition([1, 2, 3, 4, 5], ranks=2)
    >>> cut.stages, cut.loads, cut.optimal
    ([(0, 3), (3, 5)], (6.0, 9.0), True)
    """

    stages: list[Span]
    """The first layer of every stage, and the one after its last."""
    rank_of: tuple[int, ...]
    """The rank of every stage."""
    loads: tuple[float, ...]
    """The time of every rank: the cost of its layers divided by its speed."""
    memory: tuple[float, ...] | None
    """The bytes of every rank, if those of the layers are known."""
    caps: tuple[float, ...] | None
    """The memory cap of every rank."""
    bound: float
    """A lower bound on the time of the slowest rank."""
    names: tuple[str, ...] | None = None
    """The names of the layers, if known."""
    also_on: tuple[int, ...] | None = None
    """The second rank of every stage, for bidirectional schedules."""

    @property
    def slowest(self) -> float:
        """The time of the slowest rank: every microbatch takes at least that long."""
        return max(self.loads)

    @property
    def optimal(self) -> bool:
        """Whether the cut is proven optimal."""
        return self.slowest <= self.bound

    @property
    def gap(self) -> float:
        """How far the slowest rank is above the bound, as a fraction of it; 0.0 if the cut is optimal."""
        if self.optimal:
            return 0.0
        return (self.slowest - self.bound) / self.bound if self.bound else math.inf

    @property
    def layers_per_stage(self) -> list[int]:
        """Number of layers of every stage."""
        return [stop - start for start, stop in self.stages]

    def chart(self, before: Partition | None = None, width: int = 80) -> str:
        """Return a text chart with one bar per rank; with `before`, another cut for the same ranks, show both.

        >>> print(partition([1, 2, 3, 4, 5], ranks=2).chart(width=60))
        5 layers, 2 stages, 2 ranks
        slowest 9 (rank 1): no cut is better
        rank 0  0-2  █████████████████████████████               │ 6
        rank 1  3-4  ████████████████████████████████████████████│ 9
        """
        if before is not None and (len(before.loads), before.layers) != (len(self.loads), self.layers):
            raise StagelineError(
                f"before is a cut of {before.layers} layers for {len(before.loads)} ranks, but this one is for "
                f"{self.layers} layers and {len(self.loads)} ranks; pass a cut of the same layers for the same ranks"
            )
        return _chart(self, before, width)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stages[-1][1]


def even_sizes(count: int, parts: int) -> list[int]:
    """Return the sizes of parts that are as equal as possible, the larger ones first.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    return [count // parts + (part < count % parts) for part in range(parts)]


def spans_of(counts: Sequence[int]) -> list[Span]:
    """Return the first layer of every stage and the one after its last, from the number of layers of each."""
    return list(pairwise(accumulate(counts, initial=0)))


def uniform(layers: int, stages: int) -> list[Span]:
    """Cut into stages of equal layer counts, the larger ones first.

    >>> uniform(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    if stages < 1 or layers < stages:
        raise StagelineError(
            f"{layers} layers cannot be cut into {stages} stages; every stage needs a layer: "
            f"pass at most {layers} stages (ranks times chunks), and at least 1"
        )
    return spans_of(even_sizes(layers, stages))


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
    """Cut layers into `ranks` times `chunks` non-empty stages such that the slowest rank is as fast as possible.

    `costs` are the times of the layers, in order: a forward and its whole backward. With several chunks, `placement`
    sets the ranks of the stages: "loop" goes round the ranks (0 1 2 0 1 2), "v" down and up again (0 1 2 2 1 0).
    `memory` is the bytes of each layer, and `caps` the limit of a rank, one number or one per rank. `pinned` maps a
    layer, by number or name, to the stage it must be in. `speed` is the relative speed of each rank: 2.0 is twice as
    fast.

    The cut is optimal for one chunk, for two chunks in a V, and for two in a loop with up to a few hundred layers. In
    all other cases a search finds a cut that is usually close to `bound`; `gap` says how close. With several chunks,
    the best cut may give a rank a long and a short stage. With `slack`, a fraction, a cut with more even stages is
    preferred if its slowest rank is no more than that above the best.

    Raises `StagelineError` if an argument is invalid or no cut fits the memory.

    >>> partition([4, 1, 1, 1, 1, 8], ranks=2, chunks=2, placement="v").stages
    [(0, 1), (1, 3), (3, 5), (5, 6)]
    >>> partition([4, 1, 1, 1, 1, 8], ranks=2, speed=[2, 1]).stages
    [(0, 5), (5, 6)]
    >>> partition([1, 1, 1, 1], ranks=2, memory=[3, 3, 3, 3], caps=[8, 5])
    Traceback (most recent call last):
    stageline.StagelineError: no cut fits the memory of the ranks: the closest gives ...
    """
    request = PartitionRequest(costs, ranks, chunks, placement, memory, caps, speed, names)
    problem = request.problem(pinned or {})
    if not 0 <= slack < math.inf:
        raise StagelineError(f"slack must be a fraction >= 0, such as 0.05 for 5%, got {slack!r}")
    cut, exact, bound = _solve(problem, slack)
    if cut is None:
        raise _memory_error(request, problem, exact)
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
    """Return how evenly a cut loads the ranks; `stages` are (first, stop) layers, or the number of layers of each.

    >>> cut = evaluate([3, 2], [1, 2, 3, 4, 5], ranks=2)
    >>> cut.loads, cut.bound, round(cut.gap, 2)
    ((6.0, 9.0), 7.5, 0.2)
    >>> evaluate([(0, 4), (4, 5)], [1, 2, 3, 4, 5], ranks=2).slowest
    10.0
    """
    request = PartitionRequest(costs, ranks, chunks, placement, memory, caps, speed, names)
    problem = request.problem({})
    return _partition(request, problem, request.cut_of(stages), time_bound(problem))


def _partition(request: PartitionRequest, problem: CutProblem, cut: Ints, bound: float) -> Partition:
    """Return the figures of a cut, in the units of the caller."""
    loads = tuple(
        load / speed for load, speed in zip(request.sums(request.costs, cut), request.speed.tolist(), strict=True)
    )
    bound = math.ldexp(bound, -request.power)
    # The bound is exact up to rounding.
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


def _solve(problem: CutProblem, slack: float = 0.0) -> tuple[Ints | None, bool, float]:
    """Return the cut found (None if there is none), whether that is proven, and a lower bound on the time."""
    ranks, down, low = len(problem.speed), np.arange(len(problem.speed)), time_bound(problem)
    if len(problem.rank_of) == ranks:
        cut, exact = _as_chain(problem), True
        return cut, exact, low if cut is None else problem.rating(cut)[0]
    is_v = np.array_equal(problem.rank_of, np.concatenate((down, down[::-1])))
    even = _search(problem, is_quick=is_v)
    if len(problem.rank_of) > 2 * ranks:
        return even, False, low
    if is_v:
        best, exact = cut_v(problem, low), True
    else:
        best, exact = cut_loop(problem, low, even)
    if best is None:
        return None, exact, low
    if exact:
        low = problem.rating(best)[0]
    if even is not None and problem.rating(even)[0] <= problem.rating(best)[0] * (1 + slack):
        return even, exact, low
    return improve(problem, best), exact, low


def _search(problem: CutProblem, is_quick: bool) -> Ints | None:
    """Return a good cut, starting from stages that are as even as possible; None if none of them fits."""
    starts = [_as_chain(problem)]
    if np.isfinite(problem.caps).any() and not (is_quick and starts[0] is not None and problem.fits(starts[0])):
        by_memory = problem.by_memory()
        cut = _as_chain(by_memory)
        starts.append(cut if cut is None or is_quick else improve(by_memory, cut))
    cuts = [improve(problem, cut) for cut in starts if cut is not None and problem.fits(cut)]
    return min(cuts, key=problem.rating, default=None)


def _as_chain(problem: CutProblem) -> Ints | None:
    """Return the best cut if every stage had its own rank."""
    speed, caps = problem.speed[problem.rank_of], problem.caps[problem.rank_of]
    base = np.zeros(len(speed))
    return cut_chain(Chain(problem.time, problem.memory, speed, base, caps, problem.low, problem.high))


def _memory_error(request: PartitionRequest, problem: CutProblem, exact: bool) -> StagelineError:
    """Return an error that names the layer or rank without room, and the smallest cap that works."""
    assert request.memory is not None
    assert request.caps is not None
    largest = int(np.argmax(request.memory))
    roomiest = int(np.argmax(request.caps))
    least, *_ = _solve(problem.by_memory(np.ones(len(problem.speed))))
    assert least is not None  # without caps there is always a cut
    sufficient = max(request.sums(request.memory, least))
    if request.memory[largest] > request.caps[roomiest]:
        why = (
            f"{request.name(largest)} alone has {request.memory[largest]:.16g} bytes; "
            f"the largest cap of a rank is {request.caps[roomiest]:.16g}"
        )
    elif request.memory.sum() > request.caps.sum():
        total, room = request.memory.sum(), request.caps.sum()
        why = f"the layers have {total:.16g} bytes; the caps of all ranks add up to {room:.16g}"
    else:
        closest, *_ = _solve(problem.by_memory())
        assert closest is not None
        rank_memory = np.array(request.sums(request.memory, closest))
        worst = int(np.argmax(rank_memory - request.caps))
        why = f"the closest gives rank {worst} {rank_memory[worst]:.16g} bytes; its cap is {request.caps[worst]:.16g}"
    return StagelineError(
        f"no cut {'' if exact else 'was found that '}fits the memory of the ranks: {why}; "
        f"the smallest {'cap' if exact else 'known cap'} that works, equal for all ranks, is {sufficient:.16g}: "
        "raise the caps, use more ranks, or pin fewer layers"
    )


# The chart

BAR, PALE, MARK = "█", "░", "│"
MAX_RANKS = 64
MIN_BAR = 10


def _chart(partition: Partition, before: Partition | None, width: int) -> str:
    """Return one bar per rank, with a mark at the bound; with `before`, also the bars of that partition."""
    cuts = [(partition, BAR)] if before is None else [(before, PALE), (partition, BAR)]
    longest = max(cut.slowest for cut, _ in cuts) or 1.0
    ranks, half = len(partition.loads), MAX_RANKS // 2
    visible = [rank for rank in range(ranks) if ranks <= MAX_RANKS or not half <= rank <= ranks - half]
    layers = {(letter, rank): _layers(cut, rank) for cut, letter in cuts for rank in visible}
    tails = {(letter, rank): _tail(cut, rank) for cut, letter in cuts for rank in visible}
    head_width, column = len(f"rank {ranks - 1}"), max(map(len, layers.values()))
    bar = max(MIN_BAR, width - head_width - column - max(map(len, tails.values())) - 6)
    mark = round(bar * partition.bound / longest)
    lines = _title(partition, before)
    for rank in visible:
        head = f"rank {rank}"
        for cut, letter in cuts:
            filled = (letter * round(bar * cut.loads[rank] / longest)).ljust(bar + 1)
            if filled[mark : mark + 1] == " ":
                filled = filled[:mark] + MARK + filled[mark + 1 :]
            cells = head.ljust(head_width), layers[letter, rank].ljust(column), f"{filled} {tails[letter, rank]}"
            lines.append("  ".join(cells).rstrip())
            head = ""
        if len(visible) < ranks and rank == half - 1:
            lines.append(f"{'…'.rjust(head_width)}  ({ranks - len(visible)} ranks not shown)")
    return "\n".join(lines)


def _title(partition: Partition, before: Partition | None) -> list[str]:
    sizes = f"{partition.layers} layers, {len(partition.stages)} stages, {len(partition.loads)} ranks"
    quality = "no cut is better"
    if not partition.optimal:
        quality = f"at most {100 * partition.gap:.2g}% above the best ({MARK} {partition.bound:.4g})"
    slowest = f"slowest {partition.slowest:.4g} (rank {partition.loads.index(partition.slowest)}): {quality}"
    if before is None:
        return [sizes, slowest]
    ratio = f", {before.slowest / partition.slowest:.3g} times as fast" if partition.slowest else ""
    return [
        sizes,
        f"{PALE} before: slowest {before.slowest:.4g} (rank {before.loads.index(before.slowest)})",
        f"{BAR} after: {slowest}{ratio}",
    ]


def _layers(partition: Partition, rank: int) -> str:
    """Return the layers of a rank, stage by stage: 0-3 12-15."""
    others = partition.also_on or partition.rank_of
    spans = [
        span for span, *holders in zip(partition.stages, partition.rank_of, others, strict=True) if rank in holders
    ]
    return " ".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in spans)


def _tail(partition: Partition, rank: int) -> str:
    """Return the time and memory of a rank."""
    text = f"{partition.loads[rank]:.4g}"
    if partition.memory is not None:
        text += f"  {partition.memory[rank]:.4g} bytes"
        if partition.caps is not None:
            excess = " (too much)" if partition.memory[rank] > partition.caps[rank] else ""
            text += f" of {partition.caps[rank]:.4g}{excess}"
    return text

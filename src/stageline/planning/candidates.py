"""What a plan is chosen from: the families at all their sizes, and the cuts that go with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stageline.common.errors import ScheduleError, StagelineError
from stageline.model.partition.partition import partition
from stageline.model.profile.profile import Profile
from stageline.model.split import even_sizes
from stageline.planning.stage_costs import spans_of
from stageline.schedules.placement import Placement
from stageline.schedules.registry import families, schedule
from stageline.schedules.schedule import Schedule

Place: TypeAlias = Literal["loop", "v"]
By: TypeAlias = Literal["time", "parameters", "layers"]
CHUNKS = (2, 3, 4, 6, 8)
"""How many stages of a rank are tried, where a family leaves it open."""
EXACT = 300
"""Up to how many layers times ranks two chunks in a loop are cut as well as can be: that takes long."""


@dataclass(frozen=True)
class Shape:
    """How stages lie on ranks: how many there are, round the ranks or down and up."""

    ranks: int
    stages: int
    place: Place | None
    """None where it is another way, which only an even cut is made for."""

    @property
    def chunks(self) -> int:
        """How many a rank has."""
        return -(-self.stages // self.ranks)


@dataclass(frozen=True)
class Kind:
    """A family with options, and the shape that it has: what is known of a schedule before it is made."""

    name: str
    options: tuple[tuple[str, Any], ...]
    shape: Shape

    def make(self, microbatches: int) -> Schedule | None:
        """The schedule; None where the family does not allow these sizes, or makes something else of them."""
        try:
            made = schedule(self.name, self.shape.ranks, microbatches, **dict(self.options))
        except ScheduleError:
            return None
        fine = made.training and made.placement.directions == 1
        return made if fine and shape_of(made) == self.shape else None


def shape_of(made: Schedule) -> Shape:
    """The shape of a schedule."""
    chunks, rest = divmod(made.stages, made.ranks)
    table = made.placement.table[0].tolist()
    places: dict[Place, Placement] = {
        "loop": Placement.loop(made.ranks, max(1, chunks)),
        "v": Placement.snake(made.ranks, max(1, chunks)),
    }
    place = next((name for name, placed in places.items() if placed.table[0].tolist() == table), None)
    return Shape(made.ranks, made.stages, None if rest else place)


def kinds_of(ranks: int, units: int, names: Sequence[str] | None, chunks: int | None) -> list[Kind]:
    """Every training family, or those named, at all its chunks, with one direction and no more stages than units.

    What shape a family has shows on two ranks as well as on many, and faster.
    """
    known = families()
    found = []
    for name in known if names is None else names:
        if not known[name].training:
            continue
        for options in _options(known[name].options, ranks, units, chunks):
            shape = _small_shape(name, options, ranks)
            if shape is not None and shape.stages <= units and (chunks is None or shape.chunks == chunks):
                found.append(Kind(name, tuple(options.items()), shape))
    return found


def _small_shape(name: str, options: dict[str, Any], ranks: int) -> Shape | None:
    for few, microbatches in ((1, 1), (1, 2)) if ranks == 1 else ((2, 1), (2, 4), (3, 6), (4, 8), (ranks, 2 * ranks)):
        try:
            made = schedule(name, few, microbatches, **options)
        except ScheduleError:
            continue
        if not made.training or made.placement.directions > 1 or made.stages % few:
            return None
        return Shape(ranks, made.stages // few * ranks, shape_of(made).place)
    return None


def _options(known: dict[str, Any], ranks: int, units: int, chunks: int | None) -> Iterator[dict[str, Any]]:
    """The numbers of stages on a rank that a family can have here."""
    most = units // ranks
    if "chunks" in known:
        yield from ({"chunks": each} for each in ((chunks,) if chunks else CHUNKS) if each <= most)
    elif "waves" in known:
        yield from ({"waves": each} for each in (1, 2, 3, 4) if 2 * each <= most)
    else:
        yield {}


@dataclass
class Cuts:
    """Where the units are cut, for every shape: found once, for units of one size, as they hardly depend on it."""

    profile: Profile
    by: By = "time"
    pinned: tuple[int, ...] | None = None
    """How many units every stage has, where that is given."""
    _found: dict[tuple[Shape, bool], list[tuple[int, ...]]] = field(default_factory=dict)

    def of(self, shape: Shape, again: bool = False) -> list[tuple[int, ...]]:
        """How many units each stage has, in one or two ways: balanced, and even.

        With `again` every forward counts twice.
        """
        if self.pinned is not None:
            return [self.pinned] if len(self.pinned) == shape.stages else []
        key = (shape, again)
        if key not in self._found:
            even = tuple(even_sizes(len(self.profile.layers), shape.stages))
            balanced = None if shape.place is None or self.by == "layers" else self._balanced(shape, again)
            cuts = [even] if balanced is None else [balanced] if self.by == "parameters" else [balanced, even]
            self._found[key] = list(dict.fromkeys(cuts))
        return self._found[key]

    def _balanced(self, shape: Shape, again: bool) -> tuple[int, ...]:
        assert shape.place is not None
        costs = self._costs(again)
        if self._slow(shape):  # stages that are all even make even ranks
            return tuple(partition(costs, shape.stages).layers_per_stage)
        return tuple(partition(costs, shape.ranks, shape.chunks, shape.place).layers_per_stage)

    def _slow(self, shape: Shape) -> bool:
        large = len(self.profile.layers) * shape.ranks > EXACT
        return shape.chunks > 2 or (shape.chunks == 2 and shape.place == "loop" and large)

    def _costs(self, again: bool) -> list[float]:
        if self.by == "parameters":
            return [float(layer.parameters) for layer in self.profile.layers]
        return [layer.seconds + again * layer.forward for layer in self.profile.layers]

    def roomier(
        self,
        shape: Shape,
        counts: Sequence[int],
        held: Sequence[float],
        caps: Sequence[float],
        weight: float,
        again: bool,
    ) -> tuple[int, ...] | None:
        """A cut that moves units away from the ranks that hold too much, as fast as that allows; None if there is none.

        `held` is what the ranks hold with `counts`. What a unit takes is not known before the order is, so that of all
        units of a rank is taken to grow with their parameters (times `weight`) and activations.
        """
        if self.pinned is not None or shape.place is None or self.by != "time":
            return None
        if self._slow(shape):
            return None
        size = [layer.parameters * weight + layer.activation for layer in self.profile.layers]
        rank_of = ranks_of(shape)
        own = [0.0] * shape.ranks
        for (start, stop), rank in zip(spans_of(counts), rank_of, strict=True):
            own[rank] += sum(size[start:stop])
        room = [cap * (mine / total) if total else cap for mine, total, cap in zip(own, held, caps, strict=True)]
        try:
            found = partition(self._costs(again), shape.ranks, shape.chunks, shape.place, memory=size, caps=room)
        except StagelineError:
            return None
        return tuple(found.layers_per_stage)


def ranks_of(shape: Shape) -> list[int]:
    """The rank of every stage of a shape that has a name."""
    placed = Placement.snake if shape.place == "v" else Placement.loop
    return [int(rank) for rank in placed(shape.ranks, shape.chunks).table[0]]

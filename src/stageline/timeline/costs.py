"""Costs: the time and memory of every action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.common.checked_json import parse_json
from stageline.common.errors import CostError, JsonError, nearest, shorten
from stageline.common.files import read_text
from stageline.schedules.action import KINDS

Floats: TypeAlias = NDArray[np.float64]
PerStage: TypeAlias = float | Sequence[float]
PerPair: TypeAlias = float | Sequence[Sequence[float]]

SHARD_COSTS = ("gather", "gather_block", "reduce", "gathered", "gathered_block", "unreduced")
"""The costs of sharded stages."""

LARGEST_COST = 1e100
"""Maximum of a single cost; sums of larger ones could overflow."""
LARGEST_SUM = 1e200
"""Maximum of a sum of costs, such as a time in a file."""


@dataclass(frozen=True)
class Share:
    """Ranks that share something they compute with: the cores of a machine, or a GPU.

    >>> Share(ranks=(0, 1, 2, 3), capacity=2).capacity     # four ranks on two cores
    2
    """

    ranks: Sequence[int]
    capacity: float
    """How many of them can compute at once; if more do, they take turns, and all are slowed down equally."""
    speeds: Sequence[float] = ()
    """The speed of each while 1, 2, … of them compute, relative to one that computes alone; by default always 1.

    They share more than what they take turns on: memory, caches, and as threads Python's interpreter lock.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks("ranks of a share", self.ranks))
        _check_capacity("share", self.capacity)
        speeds = self.speeds
        if not isinstance(speeds, Sequence) or not all(_is_number(speed) and 0 < speed <= 1 for speed in speeds):
            raise CostError(f"speeds of a share must be numbers above 0 and at most 1, got {shorten(speeds)}")
        object.__setattr__(self, "speeds", tuple(speeds))

    def speed(self, running: int) -> float:
        """Return the speed of each while so many of them compute.

        >>> [Share(range(4), 2, speeds=[1.0, 0.9]).speed(running) for running in (1, 2, 4)]
        [1.0, 0.9, 0.45]
        """
        beside = self.speeds[min(running, len(self.speeds)) - 1] if self.speeds else 1.0
        return beside * min(1.0, self.capacity / running)

    @property
    def throughput(self) -> float:
        """How much all of them compute at most, relative to one that computes alone."""
        return max(running * self.speed(running) for running in range(1, len(self.ranks) + 1))


@dataclass(frozen=True)
class SharedLink:
    """Transfers that share a link: those from one of the `sources` to one of the `targets`, such as a network card.

    >>> SharedLink(sources=(0, 1), targets=(2, 3)).capacity     # a host with two ranks sends to another one
    1.0
    """

    sources: Sequence[int]
    targets: Sequence[int]
    capacity: float = 1.0
    """How many transfers run at full speed at once; if more do, all are slowed down equally."""

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            object.__setattr__(self, name, _ranks(f"{name} of a shared link", getattr(self, name)))
        _check_capacity("shared link", self.capacity)

    @classmethod
    def of_hosts(cls, hosts: Sequence[Sequence[int]], capacity: float = 1.0) -> tuple[SharedLink, ...]:
        """Return the network cards of hosts, given by their ranks: each sends and receives at the same time.

        >>> [link.targets for link in SharedLink.of_hosts([[0, 1], [2, 3]])]
        [(2, 3), (0, 1), (0, 1), (2, 3)]
        """
        links = []
        for host in hosts:
            others = [rank for other in hosts if other is not host for rank in other]
            links += [cls(host, others, capacity), cls(others, host, capacity)] if others else []
        return tuple(links)


@dataclass(frozen=True)
class Costs:
    """Time and memory of every action: one number for all stages, or one number per stage.

    Units are arbitrary but must agree: seconds and bytes, or F = 1 and activations.

    >>> Costs(forward=10, backward_input=11, backward_weight=7, transfer=1).of("B", stage=0)
    18.0
    >>> Costs(forward=[10, 12], backward=20).of("I", stage=1)
    10.0
    """

    forward: PerStage = 1.0
    """Time of F."""
    backward_input: PerStage | None = None
    """Time of I; defaults to `backward` minus W (half of it if W is not given either), or 1."""
    backward_weight: PerStage | None = None
    """Time of W; defaults to `backward` minus I (half of it if I is not given either), or 1."""
    backward: PerStage | None = None
    """Time of B; defaults to I plus W."""
    overlap: PerStage | None = None
    """Time of an overlapped pair, by the stage of its forward; defaults to F plus B."""
    transfer: PerPair = 0.0
    """Latency of a message between two ranks, or one per pair: `transfer[source][target]`."""
    bandwidth: PerPair | None = None
    """Bytes per unit of time between two ranks, or one per pair; by default, only the latency counts."""
    message: PerStage = 0.0
    """Bytes of the output of a stage; the gradient that returns to it is as large."""
    activation: PerStage = 1.0
    """Memory held from the start of F to the end of B or I."""
    residue: PerStage = 1.0
    """Saved-for-W memory, held from the end of I to the end of W; with recompute it may exceed the activation."""
    transient: PerStage | Mapping[str, PerStage] = 0.0
    """Memory that an action needs only while it runs; or one per kind of action."""
    gather: PerStage = 0.0
    """Time of UNSHARD: gathering the parameters of a sharded stage, beside compute."""
    gather_block: PerStage | None = None
    """The part of `gather` for the first block of a stage that is gathered for a single action, block by block: the
    action starts when it has its first block, and gathers the others while it runs; defaults to `gather`."""
    reduce: PerStage = 0.0
    """Time of REDUCE_GRAD: reducing the gradients of a sharded stage, beside compute."""
    gathered: PerStage = 0.0
    """Memory of the gathered parameters of a sharded stage, held from UNSHARD to RESHARD."""
    gathered_block: PerStage | None = None
    """The same for a stage that is gathered for a single action, block by block: its two largest neighbouring blocks;
    defaults to `gathered`."""
    unreduced: PerStage = 0.0
    """Memory of the gradients of a sharded stage before they are reduced, held from its first B or W to REDUCE_GRAD."""
    scale: Sequence[float] | None = None
    """One factor per microbatch for times, memory and bytes, for microbatches of different lengths."""
    shares: Sequence[Share] = ()
    """What ranks share; by default nothing. The times of actions are those of ranks that compute alone."""
    links: Sequence[SharedLink] = ()
    """Links that transfers share; by default none. Only the time for bytes is shared, or without `bandwidth` all."""
    in_seconds: bool = False
    """Whether times are in seconds and sizes in bytes, as those of a profile, so that they are shown with units."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name == "in_seconds":
                if not isinstance(value, bool):
                    raise CostError(f"in_seconds must be True or False, got {shorten(value)}")
                continue
            if shared := _SHARED.get(field.name):
                if not isinstance(value, Sequence) or not all(isinstance(part, shared) for part in value):
                    raise CostError(f"{field.name} must be a list of sl.{shared.__name__}, got {shorten(value)}")
                continue
            if field.name == "transient" and isinstance(value, Mapping):
                for kind, part in value.items():
                    if kind not in KINDS:
                        raise CostError(f"transient has an entry for {kind!r}; actions are F, B, I and W")
                    _check(f"transient[{kind!r}]", part, depth=1)
            else:
                _check(field.name, value, depth=2 if field.name in ("transfer", "bandwidth") else 1)
        if self.bandwidth is not None:
            rates = np.asarray(self.bandwidth, dtype=np.float64)
            between_ranks = rates if rates.ndim == 0 else rates[~np.eye(len(rates), dtype=bool)]
            if (between_ranks <= 0).any():
                raise CostError(f"bandwidth must be above 0 between any two ranks, got {shorten(self.bandwidth)}")
        if self.scale is not None and not isinstance(self.scale, Sequence | np.ndarray):
            raise CostError(f"scale must have one factor per microbatch, got {shorten(self.scale)}")

    @property
    def memory_unit(self) -> str:
        """The unit of memory: microbatches by default, else bytes if times are in seconds, and else "" (unknown).

        >>> Costs().memory_unit, Costs(activation=[2e6, 1e6], in_seconds=True).memory_unit
        ('microbatches', 'bytes')
        """
        if all(isinstance(size, int | float) and size <= 1 for size in (self.activation, self.residue)):
            return "microbatches"
        return "bytes" if self.in_seconds else ""

    def of(self, kind: str, stage: int = 0) -> float:
        """Return the time of an action of a stage, without the factor of its microbatch."""
        times = (self.forward, self.backward_input, self.backward_weight, self.backward)
        stages = max(np.size(value) for value in times if value is not None)
        return float(self.times(max(stage + 1, stages))[KINDS.index(kind)][stage])

    def times(self, stages: int) -> list[Floats]:
        """Return one row of times per kind, in the order F, B, I, W, with one time per stage."""
        forward = per_stage("forward", self.forward, stages)
        parts = [
            None if value is None else per_stage(name, value, stages)
            for name, value in (("backward_input", self.backward_input), ("backward_weight", self.backward_weight))
        ]
        if self.backward is None:
            inputs, weights = (np.ones(stages) if part is None else part for part in parts)
            return [forward, inputs + weights, inputs, weights]
        whole = per_stage("backward", self.backward, stages)
        first, second = parts
        if first is None:
            first = whole / 2 if second is None else _rest("backward_input", whole, second)
        return [forward, whole, first, _rest("backward_weight", whole, first) if second is None else second]

    def check_lengths(self, stages: int, microbatches: int) -> None:
        """Raise `CostError` if a list does not have one value per stage or microbatch, even if it is not used."""
        self.times(stages)
        self.transients(stages)
        self.scales(microbatches)
        for name in ("overlap", "message", "activation", "residue", *SHARD_COSTS):
            if getattr(self, name) is not None:
                per_stage(name, getattr(self, name), stages)

    def transients(self, stages: int) -> list[Floats]:
        """Return one row of transient memory per kind, in the order F, B, I, W, with one value per stage."""
        if isinstance(self.transient, Mapping):
            return [per_stage(f"transient[{k!r}]", self.transient.get(k, 0.0), stages) for k in KINDS]
        return [per_stage("transient", self.transient, stages)] * len(KINDS)

    def scales(self, microbatches: int) -> Floats:
        """Return one factor per microbatch."""
        if self.scale is None:
            return np.ones(microbatches)
        factors = np.asarray(self.scale, dtype=np.float64)
        if len(factors) != microbatches:
            raise CostError(f"scale has {len(factors)} factors for {microbatches} microbatches; pass one for each")
        return factors

    def hops(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], size: Floats | None, ranks: int
    ) -> Floats | float:
        """Return the time of messages of these sizes between these ranks."""
        latency = _between("transfer", self.transfer, sources, targets, ranks)
        return latency + self.byte_times(sources, targets, size, ranks)

    def byte_times(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], size: Floats | None, ranks: int
    ) -> Floats | float:
        """Return the time of messages beyond their latency."""
        if self.bandwidth is None or size is None:
            return 0.0
        rate = _between("bandwidth", self.bandwidth, sources, targets, ranks)
        return size / np.where(sources == targets, 1.0, rate)  # within a rank nothing is sent

    def refined(self, parts: int) -> Costs:
        """Return the costs with every stage cut into equal parts; messages and transfers stay the same.

        >>> Costs(forward=[4, 6]).refined(2).forward
        [2.0, 2.0, 3.0, 3.0]
        """
        if not isinstance(parts, int) or not 1 <= parts <= 2**20:
            raise CostError(f"parts must be an integer from 1 to {2**20}, got {shorten(parts)}")
        if parts == 1:
            return self

        def cut(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {kind: cut(part) for kind, part in value.items()}
            if isinstance(value, Sequence | np.ndarray):
                return [float(part) / parts for part in value for _ in range(parts)]
            return value / parts

        divided = ("forward", "backward", "overlap", "activation", "residue", "transient", *SHARD_COSTS)
        changed = {name: cut(getattr(self, name)) for name in divided if getattr(self, name) is not None}
        for name in ("backward_input", "backward_weight"):
            time = getattr(self, name)
            if time is not None or self.backward is None:
                changed[name] = cut(1.0 if time is None else time)
        if isinstance(self.message, Sequence | np.ndarray):
            changed["message"] = [float(size) for size in self.message for _ in range(parts)]
        return replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without options that are None, costs of shards that are 0, and empty shares and links."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and (name, value) not in _NOTHING}

    @classmethod
    def from_json(cls, data: object) -> Costs:
        """Create costs from plain data.

        >>> Costs.from_json({"forward": [1, 2], "transfer": 0.1}).forward
        [1, 2]
        """
        if not isinstance(data, Mapping):
            raise CostError(f"costs must be an object like {{'forward': 10, 'transfer': 1}}, got {shorten(data)}")
        known = [field.name for field in fields(cls)]
        for name in data:
            if name not in known:
                raise CostError(
                    f"costs have no {shorten(name)}{nearest(str(name), known)}; they have: {', '.join(known)}"
                )
        values = {str(name): value for name, value in data.items()}
        for name, shared in _SHARED.items():
            if name in values:
                try:
                    values[name] = tuple(shared(**part) for part in values[name])
                except TypeError:
                    raise CostError(
                        f"{name} must be a list of objects like {_EXAMPLES[name]}, got {shorten(values[name])}"
                    ) from None
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> Costs:
        """Read costs from a JSON file."""
        text = read_text(Path(path), "file of costs", CostError)
        try:
            return cls.from_json(parse_json(text))
        except (CostError, JsonError) as error:
            raise CostError(f"{path}: {error}") from None


_SHARED: dict[str, type[Share] | type[SharedLink]] = {"shares": Share, "links": SharedLink}
_EXAMPLES = {
    "shares": "{'ranks': [0, 1], 'capacity': 1}",
    "links": "{'sources': [0], 'targets': [1], 'capacity': 1}",
}
_NOTHING = [*((name, 0.0) for name in SHARD_COSTS), ("shares", []), ("links", []), ("in_seconds", False)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _ranks(name: str, ranks: object) -> tuple[int, ...]:
    """Return different ranks as a tuple; refuse everything else."""
    is_list = isinstance(ranks, Sequence) and len(set(ranks)) == len(ranks) > 0
    if not is_list or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in ranks):  # type: ignore[attr-defined]
        raise CostError(f"{name} must be different integers >= 0, got {shorten(ranks)}")
    return tuple(ranks)  # type: ignore[arg-type]


def _check_capacity(what: str, capacity: object) -> None:
    if not _is_number(capacity) or not 0 < capacity <= LARGEST_COST:  # type: ignore[operator]
        raise CostError(f"capacity of a {what} must be a number above 0, got {shorten(capacity)}")


def _rest(name: str, whole: Floats, other: Floats) -> Floats:
    """Return what the whole backward leaves for one half of it."""
    rest = whole - other
    if (rest < 0).any():
        stage = int(np.argmax(rest < 0))
        raise CostError(
            f"{name} of stage {stage} would be {rest[stage]:g}, because the other half takes longer than backward"
        )
    return rest


def per_stage(name: str, value: PerStage, stages: int) -> Floats:
    """Return one value per stage, given one number or one per stage."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        return np.full(stages, float(array))
    if len(array) != stages:
        raise CostError(
            f"{name} has {len(array)} values, but the schedule has {stages} stages; pass one number, or one per stage"
        )
    return array


def _between(
    name: str, value: PerPair, sources: NDArray[np.int32], targets: NDArray[np.int32], ranks: int
) -> Floats | float:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        return float(array)
    if len(array) != ranks:
        raise CostError(
            f"{name} has {len(array)} rows and columns, but the schedule has {ranks} ranks; "
            "pass one number, or a square matrix with one row per rank"
        )
    return np.asarray(array[sources, targets])


def _check(name: str, value: object, depth: int) -> None:
    """Raise `CostError` unless the value is a finite number >= 0, a list of them, or (depth 2) a square of them."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        if not 0 <= value <= LARGEST_COST:
            raise CostError(f"{name} must be a number >= 0, got {shorten(value)}")
        return
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    shapes = "one number, or a square matrix with one row per rank" if depth == 2 else "one number, or one per stage"
    shapes = "one factor per microbatch" if name == "scale" else shapes
    if array.dtype.kind not in "iuf" or array.ndim != depth or array.size == 0 or len(set(array.shape)) != 1:
        raise CostError(f"{name} must be {shapes}; got {shorten(value)}")
    wrong = np.argwhere(~((array >= 0) & (array <= LARGEST_COST)))
    if len(wrong):
        place = "".join(f"[{index}]" for index in wrong[0])
        raise CostError(f"{name}{place} must be a number >= 0, got {array[tuple(wrong[0])]}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Share | SharedLink):
        data = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {name: part for name, part in data.items() if name != "speeds" or part}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value

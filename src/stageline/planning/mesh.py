"""The mesh of a plan: its dimensions, and what messages and collectives along each of them cost.

Collectives go around a ring of n processes, each of which sends to the next one:

    all-gather, reduce-scatter    n − 1 hops, (n − 1) / n of the bytes
    all-reduce                    both, one after the other: 2 (n − 1) hops, 2 (n − 1) / n of the bytes

A collective takes the bytes that a process sends divided by the bandwidth, plus a latency for each hop.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from stageline.common.checked_json import parse_json
from stageline.common.errors import JsonError, StagelineError, nearest, shorten
from stageline.common.files import read_text
from stageline.common.units import parse_size
from stageline.planning.costs import Links
from stageline.schedules.registry import whole
from stageline.schedules.sharding import RESHARD_AFTER_FORWARD
from stageline.timeline.costs import Floats, PerPair, SharedLink

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
"""Pipeline ranks, replicas, shards of FSDP2, and parts of tensor parallel."""
ALIASES = {"dp": "dp_replicate"}
INSTEAD = {
    "cp": "; keep whole sequences on a rank, and use tp or more stages",
    "ep": "; keep all experts of a layer on a rank, and shard them with dp_shard",
}
"""What to use instead of dimensions that no pipeline supports."""
RESHARD = RESHARD_AFTER_FORWARD
"""When a stage frees the parameters that it has gathered."""
PerLink: TypeAlias = PerPair | str | Path | Mapping[str, Any] | None
"""One number for all links, one per pair of processes, a file of them, or one per dimension of the mesh."""
Number = TypeVar("Number", float, Floats)


def check_one_size(ranks: Any, mesh: Any, devices: Any) -> None:
    """Refuse anything but one of the three.

    >>> check_one_size(4, {"pp": 4, "tp": 2}, None)
    Traceback (most recent call last):
    stageline.StagelineError: plan needs exactly one of ranks=, mesh= and devices=, got ranks and mesh; ...
    """
    sizes = {"ranks": ranks, "mesh": mesh, "devices": devices}
    names = [name for name, value in sizes.items() if value is not None]
    if len(names) != 1:
        raise StagelineError(
            f"plan needs exactly one of ranks=, mesh= and devices=, got {' and '.join(names) or 'none of them'}; pass "
            "the number of pipeline ranks, the sizes of a mesh such as {'pp': 4, 'tp': 2}, or the number of processes, "
            "for which the mesh is chosen"
        )


def read_mesh(mesh: Any, ranks: Any) -> tuple[dict[str, int], int]:
    """Return the dimensions of a mesh, in its order, and the number of pipeline ranks; refuse a mesh that has others.

    >>> read_mesh({"dp": 2, "pp": 4}, None), read_mesh(None, 4)
    (({'dp_replicate': 2, 'pp': 4}, 4), ({}, 4))
    """
    if mesh is None:
        return {}, whole("plan", "ranks", ranks)
    sizes = _sizes_of(mesh)
    degrees: dict[str, int] = {}
    for name, size in sizes.items():
        known = ALIASES.get(name, name)
        if known not in DIMENSIONS:
            hint = "" if name in INSTEAD else nearest(str(name), [*DIMENSIONS, *ALIASES])
            raise StagelineError(
                f"the mesh has an unknown dimension {shorten(name)}{hint}; a plan supports pp, dp_replicate (or dp), "
                f"dp_shard and tp{INSTEAD.get(name, '')}"
            )
        if known in degrees:
            raise StagelineError("the mesh has both dp and dp_replicate, which mean the same; keep one")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise StagelineError(f"dimension {name} of the mesh must be an integer >= 1, got {shorten(size)}")
        degrees[known] = size
    pipeline_ranks = whole("plan", "the mesh's pp", degrees.get("pp", 1))
    if ranks is not None and whole("plan", "ranks", ranks) != pipeline_ranks:
        raise StagelineError(f"the mesh has pp {pipeline_ranks}, but the schedule has {ranks} ranks")
    return degrees, pipeline_ranks


def _sizes_of(mesh: Any) -> dict[Any, Any]:
    """Return the sizes of a mapping's or a DeviceMesh's dimensions by name."""
    if isinstance(mesh, Mapping):
        return dict(mesh)
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise StagelineError(
            f"mesh= must map dimensions to sizes, such as {{'pp': 4, 'dp_shard': 2}}, or be a DeviceMesh with "
            f"mesh_dim_names; got {shorten(mesh)}"
        )
    sizes = zip(names, mesh.shape, strict=True)
    return {name: size for name, size in sizes if size != 1 or name in (*DIMENSIONS, *ALIASES)}


def describe_mesh(mesh: Mapping[str, int], reshard: str) -> str:
    """Describe a mesh in words.

    >>> describe_mesh({"pp": 4, "dp_shard": 2, "tp": 2}, "always")
    'pp 4 × dp_shard 2 × tp 2 = 16 processes, parameters gathered for every action, block by block'
    """
    sizes = " × ".join(f"{name} {size}" for name, size in mesh.items())
    count = prod(mesh.values())
    if mesh.get("dp_shard", 1) == 1:
        how = ""
    elif reshard == "always":
        how = ", parameters gathered for every action, block by block"
    else:
        how = ", parameters gathered once a step"
    return f"{sizes} = {count} process{'es' if count != 1 else ''}{how}"


def all_gather(size: Number, parts: int) -> tuple[Number, int]:
    """Return what a process sends to gather, or to reduce and scatter: bytes, and hops.

    >>> all_gather(100, 4), all_reduce(100, 4), all_reduce(100, 1)
    ((75.0, 3), (150.0, 6), (0.0, 0))
    """
    return size * (parts - 1) / parts, parts - 1


def all_reduce(size: Number, parts: int) -> tuple[Number, int]:
    """Return what a process sends to add up: bytes, and hops."""
    sent, hops = all_gather(size, parts)
    return 2 * sent, 2 * hops


@dataclass(frozen=True)
class Network:
    """The cost of messages between pipeline ranks, and of collectives along the other dimensions."""

    links: Links = field(default_factory=Links)
    latency: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """Seconds of a hop along each dimension; one number, or one per pipeline rank."""
    rate: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """Bytes per second of a process along each dimension; a missing one takes no time."""

    def seconds(self, dimension: str, sent: Any, hops: Any, ranks: Sequence[int]) -> Floats:
        """Return the time of collectives along a dimension, on some pipeline ranks."""
        rate, latency = (
            np.asarray(values.get(dimension, default), dtype=np.float64)
            for values, default in ((self.rate, inf), (self.latency, 0.0))
        )
        at = np.asarray(ranks)
        rate, latency = (value if value.ndim == 0 else value[at] for value in (rate, latency))
        return np.asarray(np.asarray(sent, dtype=np.float64) / rate + np.asarray(hops) * latency)

    @property
    def is_uniform(self) -> bool:
        """Whether it fits any number of pipeline ranks."""
        values = (self.links.transfer, self.links.bandwidth or 0.0, *self.latency.values(), *self.rate.values())
        return not self.links.shared and all(np.ndim(value) == 0 for value in values)


def load_links(name: str, value: PerLink) -> PerLink:
    """Read a file of values, JSON or CSV; return anything else unchanged."""
    if isinstance(value, Path) or (isinstance(value, str) and value.lower().endswith((".json", ".csv"))):
        loaded: PerLink = _read_file(name, Path(value))
        try:
            if not isinstance(loaded, Mapping):
                _numbers(name, loaded)
        except StagelineError as error:
            raise StagelineError(f"{value}: {error}") from None
        return loaded
    return value


def read_network(
    transfer: PerLink, bandwidth: PerLink, mesh: Mapping[str, int], ranks: int, shared: Sequence[SharedLink] = ()
) -> Network:
    """Return the network of a mesh, or of a pipeline alone: the bandwidth of every dimension is known, or of none.

    >>> read_network(0.0, {"pp": "10G", "dp_shard": "5G"}, {"pp": 2, "dp_shard": 4}, 2).rate
    {'dp_shard': 5000000000.0}
    >>> read_network(0.0, {"pp": "10G"}, {"pp": 2, "dp_shard": 4}, 2)
    Traceback (most recent call last):
    stageline.StagelineError: bandwidth has no value for dp_shard, a dimension of the mesh of size 4; add it
    """
    degrees = mesh or {"pp": ranks}
    rates = _by_dimension("bandwidth", bandwidth, degrees, ranks)
    latencies = _by_dimension("transfer", transfer, degrees, ranks)
    if rates:
        for name, size in degrees.items():
            if size > 1 and name not in rates:
                raise StagelineError(
                    f"bandwidth has no value for {name}, a dimension of the mesh of size {size}; add it"
                )
    others = [name for name, size in degrees.items() if name != "pp" and size > 1]
    return Network(
        Links(latencies.get("pp", 0.0), rates.get("pp"), tuple(shared)),
        {name: latencies[name] for name in others if name in latencies},
        {name: rates[name] for name in others if name in rates},
    )


def _by_dimension(name: str, value: PerLink, mesh: Mapping[str, int], ranks: int) -> dict[str, Any]:
    """Return one value per dimension: a number, one per pipeline rank, or for pp one per pair of pipeline ranks."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        values: dict[str, Any] = {}
        for key, part in value.items():
            known = ALIASES.get(key, key)
            if known not in DIMENSIONS or known in values:
                raise StagelineError(
                    f"{name} must name each dimension of the mesh once ({', '.join(DIMENSIONS)}), got {shorten(key)}"
                    f"{nearest(str(key), DIMENSIONS)}"
                )
            values[known] = _numbers(name, part)
            if np.ndim(values[known]) and known != "pp":
                raise StagelineError(f"{name} of {known} must be one number, got {shorten(part)}")
        return values
    numbers = _numbers(name, value)
    if np.ndim(numbers) == 0:
        return dict.fromkeys(DIMENSIONS, numbers)
    matrix = np.asarray(numbers)
    if len(matrix) == prod(mesh.values()):
        return _of_matrix(matrix, mesh, np.minimum if name == "bandwidth" else np.maximum)
    if len(matrix) != ranks:
        processes = f", or one for each of the {prod(mesh.values())} processes of the mesh" if len(mesh) > 1 else ""
        raise StagelineError(
            f"{name} has {len(matrix)} rows and columns; pass one number, or a square matrix with one row for each "
            f"of the {ranks} pipeline ranks{processes}"
        )
    return {"pp": matrix.tolist()}


def _of_matrix(matrix: Floats, mesh: Mapping[str, int], worst: np.ufunc) -> dict[str, Any]:
    """Return the worst link of every ring along each dimension; processes are numbered with the last one fastest."""
    names = [*mesh]
    numbers = np.arange(len(matrix)).reshape([*mesh.values()])
    if "pp" not in mesh:
        names, numbers = ["pp", *names], numbers[None]
    numbers = np.moveaxis(numbers, names.index("pp"), 0)
    others = [name for name in names if name != "pp"]
    ranks = len(numbers)
    columns = numbers.reshape(ranks, -1)
    values: dict[str, Any] = {"pp": worst.reduce(matrix[columns[:, None], columns[None]], axis=2).tolist()}
    for axis, name in enumerate(others, start=1):
        if mesh[name] > 1:
            links = matrix[numbers, np.roll(numbers, -1, axis)]
            values[name] = worst.reduce(links.reshape(ranks, -1), axis=1).tolist()
    return values


def _numbers(name: str, value: Any) -> Any:
    """Return a number or a square of numbers, above 0 for a bandwidth; sizes may be text such as 10G."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        rows = [[_numbers(name, part) for part in row] if _is_row(row) else row for row in value]
        if not rows or any(not _is_row(row) or len(row) != len(rows) for row in rows):
            raise StagelineError(
                f"{name} must be one number, or a square matrix with one row per rank; got {shorten(value)}"
            )
        if name == "bandwidth" and any(row[at] <= 0 for i, row in enumerate(rows) for at in range(len(row)) if at != i):
            raise StagelineError(f"{name} must be above 0 between any two ranks, got {shorten(value)}")
        return rows
    number = _number(name, value)
    if not 0 <= number < inf:
        raise StagelineError(f"{name} must be a number >= 0, got {shorten(value)}")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            if name == "bandwidth":
                return parse_size(value, name)
            raise StagelineError(f"{name} must be a number of seconds, got {shorten(value)}") from None
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise StagelineError(
            f"{name} must be one number, or a square matrix with one row per rank; got {shorten(value)}"
        )
    return float(value)


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def _read_file(name: str, path: Path) -> Any:
    """Read a square of numbers as JSON or CSV; JSON may also have one value per dimension."""
    text = read_text(path, f"file of {name}")
    if path.suffix.lower() == ".csv":
        return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    try:
        return parse_json(text)
    except JsonError as error:
        raise StagelineError(f"{path}: {error}") from None


def per_rank(name: str, value: Any, mesh: Mapping[str, int], ranks: int) -> tuple[float, ...] | None:
    """Return one number above 0 per pipeline rank: the smallest of its processes, if there is one for each of these.

    >>> per_rank("speed", [1, 1, 1, 0.5], {"pp": 2, "dp_shard": 2}, 2), per_rank("speed", [1, 0.5], {}, 2)
    ((1.0, 0.5), (1.0, 0.5))
    """
    if value is None:
        return None
    values = list(value) if _is_row(value) else [value] * ranks
    processes = prod(mesh.values()) if mesh else ranks
    numbers = [part for part in values if isinstance(part, int | float) and not isinstance(part, bool)]
    if len(values) not in (ranks, processes) or len(numbers) < len(values) or not all(0 < n < inf for n in numbers):
        counted = f"{ranks} pipeline ranks" + (f" or {processes} processes" if processes != ranks else "")
        raise StagelineError(f"{name} must be a number above 0, or one for each of the {counted}; got {shorten(value)}")
    if len(values) == ranks:
        return tuple(map(float, numbers))
    grid = np.asarray(numbers, dtype=np.float64).reshape([*mesh.values()])
    axis = [*mesh].index("pp") if "pp" in mesh else None
    rows = np.moveaxis(grid, axis, 0).reshape(ranks, -1) if axis is not None else grid.reshape(1, -1)
    return tuple(rows.min(axis=1).tolist())

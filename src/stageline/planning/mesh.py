"""The mesh of a plan: its dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.schedules.registry import whole
from stageline.schedules.sharding import RESHARD_AFTER_FORWARD

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
"""Pipeline ranks, replicas, shards of FSDP2, and parts of tensor parallel."""
ALIASES = {"dp": "dp_replicate"}
RESHARD = RESHARD_AFTER_FORWARD
"""When a stage frees the parameters that it has gathered."""


def check_one_size(ranks: Any, mesh: Any, devices: Any) -> None:
    """Refuse anything but one of the three.

    >>> check_one_size(4, {"pp": 4, "tp": 2}, None)
    Traceback (most recent call last):
    stageline.StagelineError: plan takes one of ranks=, mesh= and devices=, got ranks and mesh; ...
    """
    sizes = {"ranks": ranks, "mesh": mesh, "devices": devices}
    names = [name for name, value in sizes.items() if value is not None]
    if len(names) != 1:
        raise StagelineError(
            f"plan takes one of ranks=, mesh= and devices=, got {' and '.join(names) or 'none of them'}; pass the "
            "number of pipeline ranks, the sizes of a mesh such as {'pp': 4, 'tp': 2}, or the number of processes, to "
            "choose the mesh"
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
            hint = "" if name in ("cp", "ep") else nearest(str(name), [*DIMENSIONS, *ALIASES])
            raise StagelineError(
                f"the mesh has a dimension {shorten(name)}{hint}; a plan counts pp, dp_replicate (or dp), dp_shard and "
                "tp"
            )
        if known in degrees:
            raise StagelineError("the mesh has the dimensions dp and dp_replicate, which are the same; keep one")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise StagelineError(f"dimension {name} of the mesh must be a whole number from 1, got {shorten(size)}")
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
            f"mesh= maps dimensions to their sizes, such as {{'pp': 4, 'dp_shard': 2}}, or is a DeviceMesh with "
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

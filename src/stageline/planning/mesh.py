"""The mesh of a plan: its dimensions, and how they divide the parameters of a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.model.profile import Layer, Profile
from stageline.planning.costs import SizedProfiles
from stageline.schedules.registry import whole
from stageline.schedules.sharding import RESHARD_AFTER_FORWARD

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
"""Pipeline ranks, replicas, shards of FSDP2, and parts of tensor parallel."""
ALIASES = {"dp": "dp_replicate"}
RESHARD = RESHARD_AFTER_FORWARD
"""When a stage frees the parameters that it has gathered."""


def read_mesh(mesh: Any, ranks: Any) -> tuple[dict[str, int], int]:
    """Return the dimensions of a mesh, in its order, and the number of pipeline ranks; refuse a mesh that has others.

    >>> read_mesh({"dp": 2, "pp": 4}, None), read_mesh(None, 4)
    (({'dp_replicate': 2, 'pp': 4}, 4), ({}, 4))
    >>> read_mesh({"pp": 4, "tp": 2}, 2)
    Traceback (most recent call last):
    stageline.StagelineError: ranks=2, but the mesh has pp 4; ranks= is the number of pipeline ranks, so make them agree
    """
    if mesh is None:
        if ranks is None:
            raise StagelineError(
                "plan needs ranks=, the number of pipeline ranks, or mesh=, such as {'pp': 4, 'tp': 2}"
            )
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
        has = f"pp {pipeline_ranks}" if "pp" in degrees else "no dimension pp, which counts as 1"
        raise StagelineError(
            f"ranks={ranks}, but the mesh has {has}; ranks= is the number of pipeline ranks, so make them agree"
        )
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
    if mesh.get("dp_shard", 1) == 1:
        how = ""
    elif reshard == "always":
        how = ", parameters gathered for every action, block by block"
    else:
        how = ", parameters gathered once a step"
    return f"{sizes} = {prod(mesh.values())} processes{how}"


def divide_by_tp(profiles: SizedProfiles, parts: int, model: nn.Module | None) -> SizedProfiles:
    """Return profiles whose layers have the parameters of one rank of tensor parallel.

    For a Hugging Face model with a plan for tensor parallel, these are the parameters that its plan splits, divided,
    and the others whole. For other models, all are divided.
    """
    if parts == 1:
        return profiles
    shares = {} if model is None else split_bytes(model, profiles.names)

    def divided(layer: Layer) -> Layer:
        split, total = shares.get(layer.name, (1, 1))
        splits = layer.parameters * split // total
        parameters = layer.parameters - splits + -(-splits // parts)
        tied = layer.tied * parameters // layer.parameters if layer.parameters else 0
        return replace(layer, parameters=parameters, tied=tied)

    def divided_profile(profile: Profile) -> Profile:
        return replace(profile, layers=tuple(map(divided, profile.layers)))

    return SizedProfiles.of({size: divided_profile(profile) for size, profile in profiles.profiles.items()})


def split_bytes(model: nn.Module, units: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return for each unit the bytes of the parameters that the model's own `tp_plan` splits, and of all.

    Empty if the model has no such plan.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        return {}
    sizes: dict[str, tuple[int, int]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for unit in units:
        own = [(name, parameter) for name, parameter in parameters if name.startswith(f"{unit}.")]
        split = sum(parameter.nbytes for name, parameter in own if _is_split(name, parameter.dim(), plan))
        total = sum(parameter.nbytes for _, parameter in own)
        if total:
            sizes[unit] = split, total
    return sizes


def _is_split(name: str, dimensions: int, plan: Mapping[str, Any]) -> bool:
    """Whether a plan splits a parameter: it names the parameter or its module, with * for numbers."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    style = str(plan.get(pattern, plan.get(pattern.rpartition(".")[0], "")))
    return "colwise" in style or ("rowwise" in style and dimensions > 1)  # a row-wise bias is whole on every rank

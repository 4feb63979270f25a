"""What a plan is for, and the checks of single arguments of `plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from stageline.common.errors import ScheduleError, StagelineError, nearest, shorten
from stageline.common.machine import cores as machine_cores
from stageline.common.units import parse_sizes
from stageline.planning.costs import Recompute, StateBytes
from stageline.planning.mesh import per_rank
from stageline.planning.mesh_costs import NO_OVERHEAD, HostOverhead, MeshTime
from stageline.planning.profiles import SizedProfiles
from stageline.schedules.registry import families, find_family, schedule, whole
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import LARGEST_COST, Share

By: TypeAlias = Literal["time", "parameters", "layers"]
SYNTHESIZED = "synthesized"
MAX_NEIGHBOURS = 7
"""The most ranks that compute beside one while it is measured; each needs the memory of the model."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is for."""

    profiles: SizedProfiles
    ranks: int
    splits: tuple[tuple[int, int], ...]
    """The numbers of microbatches that are tried, each with the samples in a microbatch."""
    caps: tuple[float, ...] | None = None
    """The memory limit of every rank; None for no limit."""
    states: StateBytes = field(default_factory=StateBytes)
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The dimensions of the mesh, if there is one."""
    reshard: str = "default"
    """When parameters that shards have gathered are freed."""
    time: MeshTime = field(default_factory=MeshTime)
    """What the mesh and its network cost, and the speed of the ranks."""
    overhead: HostOverhead = NO_OVERHEAD
    """What ranks spend beside the layers."""
    shares: tuple[Share, ...] = ()
    """The cores or GPUs that ranks share."""
    recompute: Recompute = "auto"
    """What is recomputed; "auto" to choose."""
    names: tuple[str, ...] | None = None
    """The families that are tried; None for all."""
    schedule: Schedule | None = None
    """The schedule, if only its cut is to be found."""
    chunks: int | None = None
    by: By = "time"
    counts: tuple[int, ...] | None = None
    """The number of units of every stage, if the cut is fixed."""
    synthesis: bool = True
    """Whether schedules are synthesized."""
    time_limit: float = 5.0
    seed: int = 0


def read_splits(
    profiles: SizedProfiles, batch: int | None, microbatches: int | None, pipelines: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of microbatches that a pipeline may have in a step, and the samples in each.

    Several pipelines share the batch, and the microbatches, equally: their number divides both.
    """
    if batch is None:
        if microbatches is None:
            raise StagelineError(
                "plan needs microbatches=, their number per step; or batch=, the samples per step, and plan chooses "
                "the number of microbatches"
            )
        return ((whole("plan", "microbatches", microbatches) // pipelines, max(profiles.profiles)),)
    batch = whole("plan", "batch", batch) // pipelines
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    if microbatches is None:
        return tuple((count, batch // count) for count in divisors)
    count = whole("plan", "microbatches", microbatches) // pipelines
    if batch % count:
        near = sorted(divisors, key=lambda divisor: abs(divisor - count))
        raise StagelineError(f"microbatches={count} does not divide batch={batch}; the nearest divisors are {near[:2]}")
    return ((count, batch // count),)


def read_caps(
    memory: Any, ranks: int, model: nn.Module | None, mesh: Mapping[str, int] | None = None
) -> tuple[float, ...] | None:
    """Return the memory limit of each rank: as given, or that of the model's GPU; of its processes, the smallest."""
    if memory is None:
        room = device_memory(model)
        return None if room is None else (room,) * ranks
    sizes = parse_sizes(memory)
    caps = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else [sizes] * ranks
    if mesh and len(caps) == prod(mesh.values()) and all(isinstance(cap, int | float) for cap in caps):
        caps = list(per_rank("memory", caps, mesh, ranks) or ())
    is_valid = all(isinstance(cap, int | float) and not isinstance(cap, bool) and cap > 0 for cap in caps)
    if len(caps) != ranks or not is_valid:
        raise StagelineError(
            f"memory must be a number of bytes above 0 or a size like 24GiB, or one for each of the {ranks} ranks, got "
            f"{shorten(memory)}"
        )
    if all(cap == float("inf") for cap in caps):
        return None
    return tuple(min(float(cap), LARGEST_COST) for cap in caps)  # JSON has no infinity


def device_memory(model: nn.Module | None) -> float | None:
    """Return the bytes of the model's GPU that this process has or can allocate, less 5% for fragmentation.

    None if the model is not on a GPU.
    """
    devices = {parameter.device for parameter in model.parameters()} if model is not None else set()
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return 0.95 * (free + torch.cuda.memory_reserved(device))


def read_ranks(ranks: Any, cores: Any, profiles: SizedProfiles) -> list[Any]:
    """Return the numbers of ranks to try: with "auto", all that find a core for each of their threads."""
    if ranks != "auto":
        return [ranks]
    if not isinstance(cores, int | float):
        raise StagelineError(
            "ranks='auto' chooses how many ranks share the cores of a machine; pass the number of cores as cores="
        )
    return list(range(1, max(1, min(int(cores // profiles.largest.threads), len(profiles.names))) + 1))


def read_neighbours(cores: Any, ranks: int, model: nn.Module | None) -> int:
    """Return how many other ranks compute on this machine beside one, each with a core for every thread of its own.

    Without `cores`, few ranks run on this machine if each of them finds its cores there and the model is not on a GPU.
    """
    devices = {parameter.device.type for parameter in model.parameters()} if isinstance(model, nn.Module) else {"none"}
    if devices - {"cpu"}:
        return 0
    threads = torch.get_num_threads()
    if isinstance(cores, Sequence):
        at_once = max((min(len(share.ranks), int(share.capacity)) for share in cores), default=1)
    elif cores is None:
        at_once = ranks if ranks <= min(machine_cores() // threads, MAX_NEIGHBOURS + 1) else 1
    else:
        at_once = min(ranks, int(cores) // threads)
    return max(0, min(at_once, machine_cores() // threads, MAX_NEIGHBOURS + 1) - 1)


def read_shares(
    cores: Any, ranks: int, threads: int, speeds: tuple[float, ...] = (), here: bool = False
) -> tuple[Share, ...]:
    """Return what ranks share: `cores` is a number for all ranks, each with so many threads, or the shares themselves.

    `speeds` are those of ranks that compute at once, `here` if they were measured for these ranks.

    >>> read_shares(4, ranks=8, threads=2)
    (Share(ranks=(0, 1, 2, 3, 4, 5, 6, 7), capacity=2.0, speeds=()),)
    """
    if cores is None:
        return (Share(range(ranks), ranks, speeds),) if here and speeds else ()
    if isinstance(cores, Sequence) and all(isinstance(share, Share) for share in cores):
        return tuple(share if share.speeds else replace(share, speeds=speeds) for share in cores)
    if not isinstance(cores, int | float) or isinstance(cores, bool) or not 0 < cores < LARGEST_COST:
        raise StagelineError(f"cores must be a number above 0, or a list of sl.Share, got {shorten(cores)}")
    return (Share(range(ranks), cores / threads, speeds),)


def bytes_per_parameter(model: nn.Module | None) -> float:
    """Return the average number of bytes of a parameter; 4 without a model."""
    parameters = [] if model is None else list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    return sum(parameter.nbytes for parameter in parameters) / count if count else 4.0


def read_recompute(value: Any, profiles: SizedProfiles) -> Recompute:
    """Check what is recomputed."""
    if isinstance(value, str) and value in ("auto", "none", "stage"):
        return value
    units = value if isinstance(value, list | tuple | set | frozenset) else [value]
    for unit in units:
        if unit not in profiles.names:
            raise StagelineError(
                f"recompute must be 'auto', 'none', 'stage' or names of units, got {shorten(unit)}"
                f"{nearest(str(unit), ['auto', 'none', 'stage', *profiles.names])}"
            )
    return tuple(sorted(units)) or "none"


def read_families(value: Any) -> tuple[str, ...] | None:
    """Return the names of the requested families; None for all."""
    if isinstance(value, Schedule) or value == "auto":
        return None
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    family_names = []
    for name in names:
        if name != SYNTHESIZED:
            family_names.append(find_family(name).name)
            if not _trains(family_names[-1]):
                raise StagelineError(f"schedule={name!r} is for inference only; use one that trains, or 'auto'")
    return tuple(family_names)


def _trains(name: str) -> bool:
    """Whether a family has backwards, judged by its smallest schedule."""
    try:
        return families()[name].training and schedule(name, 1, 1).training
    except ScheduleError:
        return True


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise StagelineError(
            f"{name} must be one of {', '.join(choices)}, got {shorten(value)}{nearest(str(value), choices)}"
        )
    return value


def seconds(name: str, value: Any) -> float:
    """Refuse anything but a finite number that is not negative."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise StagelineError(f"{name} must be a number of seconds, at least 0, got {shorten(value)}")
    return float(value)


def positive_seconds(name: str, value: Any) -> float:
    """Refuse anything but a positive, finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise StagelineError(f"{name} must be a number of seconds above 0, got {shorten(value)}")
    return float(value)


def check_sizes(request: PlanRequest) -> None:
    """Refuse a request that no cut satisfies, or that cannot be simulated."""
    if (request.shares or request.time.network.links.shared) and request.time.reduces:
        raise StagelineError(
            "gathers and reductions of a mesh cannot be simulated with shared cores= or links=; leave out these, or "
            "leave out bandwidth= and transfer="
        )
    units = len(request.profiles.names)
    stages = request.ranks * (request.chunks or 1)
    if stages > units:
        raise StagelineError(
            f"the model has {units} units, but {request.ranks} ranks need at least {stages} stages; use fewer "
            f"ranks{' or chunks' if request.chunks else ''}, at most {max(1, units // (request.chunks or 1))} ranks"
        )
    if request.counts is not None and (sum(request.counts) != units or min(request.counts, default=0) < 1):
        raise StagelineError(
            f"layers_per_stage is {shorten(list(request.counts))}; every stage needs a unit, and they must add up to "
            f"{units}"
        )
    schedule, microbatches = request.schedule, request.splits[0][0]
    if schedule is None:
        return
    if schedule.stages > units:
        raise StagelineError(
            f"{schedule.name} has {schedule.stages} stages, but the model has only {units} units; use fewer ranks or "
            "chunks, or another schedule"
        )
    if not schedule.training:
        raise StagelineError(f"{schedule.name} is for inference only; pass a schedule that trains")
    if (schedule.ranks, schedule.microbatches) != (request.ranks, microbatches):
        raise StagelineError(
            f"the schedule has {schedule.ranks} ranks and {schedule.microbatches} microbatches, but the plan is for "
            f"{request.ranks} and {microbatches}"
        )

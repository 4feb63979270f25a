"""What a plan is asked for: checked, measured where that is needed, and as the search takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.common.errors import ScheduleError, StagelineError, nearest, shorten
from stageline.common.units import parse_sizes
from stageline.planning.batch_sizes import Sizes, measure
from stageline.planning.memory import States
from stageline.planning.stage_costs import Again
from stageline.planning.trial import Asked
from stageline.schedules.registry import families, find_family, schedule, whole
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import LARGEST_COST

SYNTHESIZED = "synthesized"


def sizes_of(
    model: Any, example: Any, profile: Any, samples: Any, several: bool, microbatches: Any, repeats: int, tell: Any
) -> Sizes:
    """The profiles that are given, or measured now."""
    if profile is None:
        if model is None or example is None:
            raise StagelineError("plan needs a model and an example, one microbatch to run it on, or profile=")
        if not isinstance(model, nn.Module):
            raise StagelineError(f"plan takes a model, an nn.Module, got {shorten(model)}")
        return measure(model, example, several=several, repeats=repeats, tell=tell)
    if isinstance(profile, Mapping):
        return Sizes.of(profile)
    if several and samples is None:
        raise StagelineError(
            "batch= asks for other sizes of a microbatch than the profile's: give samples=, how many samples it was "
            "measured with, or microbatches= in place of batch="
        )
    return Sizes.of({1 if samples is None else whole("plan", "samples", samples): profile})


def splits_of(sizes: Sizes, batch: int | None, microbatches: int | None) -> tuple[tuple[int, int], ...]:
    """The numbers of microbatches that a step may have, and the samples in each."""
    if batch is None:
        if microbatches is None:
            raise StagelineError(
                "plan needs microbatches=, how many a step has, or batch=, how many samples, to choose that by itself"
            )
        return ((whole("plan", "microbatches", microbatches), max(sizes.profiles)),)
    batch = whole("plan", "batch", batch)
    if microbatches is None:
        return tuple((count, batch // count) for count in range(1, batch + 1) if batch % count == 0)
    count = whole("plan", "microbatches", microbatches)
    if batch % count:
        near = sorted((each for each in range(1, batch + 1) if batch % each == 0), key=lambda each: abs(each - count))
        raise StagelineError(f"microbatches={count} do not divide batch={batch}; the nearest that do are {near[:2]}")
    return ((count, batch // count),)


def caps_of(memory: Any, ranks: int, model: nn.Module | None) -> tuple[float, ...] | None:
    """What each rank may hold: as given, or what the model's GPU has."""
    if memory is None:
        room = device_memory(model)
        return None if room is None else (room,) * ranks
    read = parse_sizes(memory)
    given = list(read) if isinstance(read, Sequence | np.ndarray) else [read] * ranks
    wrong = [each for each in given if not isinstance(each, int | float) or isinstance(each, bool) or not each > 0]
    if len(given) != ranks or wrong:
        raise StagelineError(
            f"memory is a number of bytes above 0 or a size like 24GiB, or one for each of the {ranks} ranks, got "
            f"{shorten(memory)}"
        )
    if all(each == float("inf") for each in given):
        return None
    return tuple(min(float(each), LARGEST_COST) for each in given)  # infinity is no JSON


def device_memory(model: nn.Module | None) -> float | None:
    """Bytes of the GPU that a model is on, as far as this process has or can have them, less 5% that is lost between
    tensors; None where it is on none."""
    devices = {parameter.device for parameter in model.parameters()} if model is not None else set()
    device = next((each for each in devices if each.type == "cuda"), None)
    if device is None:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return 0.95 * (free + torch.cuda.memory_reserved(device))


def bytes_of(model: nn.Module) -> float:
    """Of one parameter, on average."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return sum(parameter.nbytes for parameter in model.parameters()) / count if count else 4.0


def states_of(parameter: Any, gradient: Any, optimizer: Any, interlock: Any) -> States:
    """What is held for every parameter."""
    for name, value, least in (
        ("parameter_bytes", parameter, 0.1),
        ("gradient_bytes_per_parameter", 0.0 if gradient is None else gradient, 0.0),
        ("optimizer_bytes_per_parameter", optimizer, 0.0),
    ):
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1e6:
            raise StagelineError(f"{name} is a number of bytes from {least:g} upwards, got {shorten(value)}")
    if not isinstance(interlock, bool):
        raise StagelineError(f"interlock is True where steps interlock (pipe.run), or False, got {shorten(interlock)}")
    return States(float(parameter), None if gradient is None else float(gradient), float(optimizer), interlock)


def again_of(given: Any, sizes: Sizes) -> Again:
    """What is computed once more."""
    if isinstance(given, str) and given in ("auto", "none", "stage"):
        return given
    known = [layer.name for layer in sizes.any.layers]
    chosen = given if isinstance(given, list | tuple | set | frozenset) else [given]
    for name in chosen:
        if name not in known:
            raise StagelineError(
                f"recompute is 'auto', 'none', 'stage' or names of units, got {shorten(name)}"
                f"{nearest(str(name), ['auto', 'none', 'stage', *known])}"
            )
    return tuple(sorted(chosen)) or "none"


def names_of(given: Any) -> tuple[str, ...] | None:
    """The families that are asked for; None for all."""
    if isinstance(given, Schedule) or given == "auto":
        return None
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    found = []
    for name in names:
        if name != SYNTHESIZED:
            found.append(find_family(name).name)
            if not _trains(found[-1]):
                raise StagelineError(f"schedule={name!r} is for inference; take one that trains, or 'auto'")
    return tuple(found)


def _trains(name: str) -> bool:
    """Whether a family has backwards, where the smallest schedule of it says so."""
    try:
        return families()[name].training and schedule(name, 1, 1).training
    except ScheduleError:
        return True


def one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """A word that must be one of these."""
    if value not in known:
        raise StagelineError(f"{name} is one of {', '.join(known)}, got {shorten(value)}{nearest(str(value), known)}")
    return value


def positive(name: str, value: Any) -> float:
    """Seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise StagelineError(f"{name} is a number of seconds above 0, got {shorten(value)}")
    return float(value)


def check_sizes(asked: Asked) -> None:
    """Refuse what no cut can be made for."""
    units = len(asked.sizes.any.layers)
    stages = asked.ranks * (asked.chunks or 1)
    if stages > units:
        raise StagelineError(
            f"the model has {units} units, and {asked.ranks} ranks need at least {stages} stages, each of a unit; use "
            f"fewer ranks{' or chunks' if asked.chunks else ''}, {max(1, units // (asked.chunks or 1))} ranks at most"
        )
    if asked.given is not None and asked.given.stages > units:
        raise StagelineError(
            f"{asked.given.name} has {asked.given.stages} stages, and the model only {units} units; use fewer ranks or "
            "chunks, or another schedule"
        )
    if asked.pinned is not None and (sum(asked.pinned) != units or min(asked.pinned, default=0) < 1):
        raise StagelineError(
            f"layers_per_stage is {shorten(list(asked.pinned))}; every stage needs a unit, and they must add up to "
            f"{units}"
        )
    if asked.given is not None and not asked.given.training:
        raise StagelineError(f"{asked.given.name} is for inference; give a schedule that trains")
    if asked.given is not None and (asked.given.ranks, asked.given.microbatches) != (asked.ranks, asked.splits[0][0]):
        raise StagelineError(
            f"the schedule has {asked.given.ranks} ranks and {asked.given.microbatches} microbatches, and the plan is "
            f"for {asked.ranks} and {asked.splits[0][0]}"
        )

"""`schedule="auto"`: rank 0 measures the model and plans, and all ranks follow its plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageline.autograd.recompute import Choice, parse_recompute
from stageline.common.errors import StagelineError, shorten
from stageline.distributed.bootstrap import several_processes
from stageline.distributed.process_host import find_host
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.model.build.build import Description, build
from stageline.model.split import Staged, split
from stageline.model.units import NoStack, find_units
from stageline.runtime._torch_private import pytree
from stageline.runtime.setup.options import PipelineOptions
from stageline.tensors.pytree import batch_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.planning.plan import Plan

TIME_LIMIT = 2.0
"""Time limit of the search, in seconds."""


def ranks_for(ranks: int | None, replicas: int | None, deadline: float, devices: Collection[torch.device] = ()) -> int:
    """The number of ranks: the option, or as many as there are processes; one for a model on one GPU.

    >>> ranks_for(None, None, 1.0, {torch.device("cuda", 0)})
    1
    """
    if ranks is not None:
        return ranks
    if several_processes(deadline):
        return max(1, dist.get_world_size() // (replicas or 1))
    if len(devices) == 1 and all(device.type == "cuda" for device in devices):
        return 1
    raise StagelineError("schedule='auto' needs ranks=, how many ranks the pipeline has")


def _devices(source: Any, built: bool, device: torch.device | str) -> set[torch.device]:
    """Where the parameters are, or will be built."""
    if built or not isinstance(source, nn.Module):
        return {torch.device(device)}
    return {parameter.device for parameter in source.parameters()}


@dataclass(frozen=True)
class Automatic:
    """A planned pipeline."""

    host: RankHost
    plan: Plan
    staged: Staged
    recompute: Choice


def automatic(
    stages: Any,
    source: Any,
    recipe: Description[Any] | None,
    options: PipelineOptions,
    *,
    ranks: int | None,
    replicas: int | None,
    mesh: DeviceMesh | None,
    microbatches: int | None,
    chunks: Any,
) -> Automatic:
    """Plan together with all ranks, and cut the model as planned."""
    if options.chunk_specs:
        raise StagelineError(
            "schedule='auto' measures microbatches that are cut along the first dimension, and chunk specs were "
            "passed; name a schedule, or plan with sl.plan and pass its schedule"
        )
    ranks = ranks_for(ranks, replicas, options.seconds, _devices(source, recipe is not None, options.device))
    host = find_host(ranks, options.seconds, replicas, mesh)
    factory = None if recipe is None else factory_of(stages)
    plan = plan_together(host, source, factory, options, ranks=ranks, microbatches=microbatches, chunks=chunks)
    by_plan = isinstance(options.recompute, str) and options.recompute == "auto"
    recompute = plan.recompute if by_plan else options.recompute
    return Automatic(host, plan, staged_as(plan, source, recipe, options.example), recompute)


def factory_of(stages: Any) -> Callable[[], nn.Module] | None:
    """The function that builds the model, or the functions that build its layers, if the user passed them."""
    if isinstance(stages, nn.Module | Staged):
        return None
    if callable(stages):
        factory: Callable[[], nn.Module] = stages
        return factory
    if isinstance(stages, Sequence) and stages and all(map(callable, stages)):
        return lambda: nn.Sequential(*(make() for make in stages))
    return None


def plan_together(
    host: RankHost,
    source: Any,
    factory: Callable[[], nn.Module] | None,
    options: PipelineOptions,
    *,
    ranks: int,
    microbatches: int | None,
    chunks: Any,
) -> Plan:
    """The plan of rank 0, on all processes; if it fails there, it fails everywhere."""
    from stageline.planning.io import parse_plan, to_text

    example, recompute = options.example, options.recompute
    _check(source, example)

    def choose() -> str:
        model = source if factory is None else build(factory, device=options.device, otherwise="construct")
        sharing = len(host.here)  # ranks that are threads of one process share its GPU
        return to_text(_plan(model, ranks, microbatches, example, recompute, sharing, chunks))

    return parse_plan(decide_together(host, choose), "the plan of rank 0")


def _check(source: Any, example: Any) -> None:
    if not isinstance(source, nn.Module):
        raise StagelineError(
            "schedule='auto' cuts the model itself: pass the model, or a function that builds it, not its stages; or "
            "name a schedule"
        )
    if example is None:
        raise StagelineError(
            "schedule='auto' measures the model, and needs example=, a batch of inputs such as step receives; or "
            "name a schedule"
        )


def _plan(
    model: nn.Module, ranks: int, microbatches: int | None, example: Any, recompute: Choice, shared: int, chunks: Any
) -> Plan:
    """Profile the model on a part of the batch that is as large as a microbatch, and plan."""
    from stageline.planning.plan import plan
    from stageline.planning.request import device_memory
    from stageline.tensors.pytree import first_samples

    whole = batch_size(example, "the example")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise StagelineError(f"microbatches is a whole number from 1, got {shorten(microbatches)}")
    size = max(1, -(-whole // (microbatches or ranks)))
    room = device_memory(model)
    return plan(
        model,
        _beside(first_samples(example, size), model),
        ranks=ranks,
        batch=whole if microbatches is None else None,
        microbatches=microbatches,
        memory=None if room is None else room / shared,
        recompute=_units(model, recompute),
        chunks=chunks,
        time_limit=TIME_LIMIT,
    )


def _beside(example: Any, model: nn.Module) -> Any:
    """The example on the device of the model."""
    here = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return pytree.tree_map(lambda leaf: leaf.to(here) if isinstance(leaf, Tensor) else leaf, example)


def _units(model: nn.Module, recompute: Choice) -> Any:
    """What is recomputed, in the form that a plan supports: whole units."""
    if isinstance(recompute, str) and recompute in ("auto", "none", "stage"):
        return recompute
    chosen = parse_recompute(recompute, None).chosen
    try:
        units = find_units(model) if not isinstance(model, nn.Sequential) else split(model, 1).units
    except NoStack:
        return "none"
    return tuple(unit.name for unit in units if chosen is not None and chosen(unit.name, unit.module)) or "none"


def staged_as(plan: Plan, model: nn.Module, recipe: Description[Any] | None, example: Any) -> Staged:
    """The model cut as planned; a model without memory cannot always run on the example."""
    for shown in (example, None) if recipe is not None else (example,):
        try:
            staged = plan.split(model, shown)
        except StagelineError:
            if shown is None or recipe is None:
                raise
            continue
        return replace(staged, recipe=recipe)
    raise AssertionError("the last one returns or raises")

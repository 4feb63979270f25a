"""`schedule="auto"`: rank 0 measures the model and plans, and all ranks follow its plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stageline.autograd.recompute import Choice, parse_recompute
from stageline.common.errors import StagelineError, shorten
from stageline.common.machine import cores
from stageline.distributed.bootstrap import find_host
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.model.build.build import Description, build
from stageline.model.split import Staged, split
from stageline.model.units import NoStack, find_units
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.setup.stages import beside, default_ranks, on_one_gpu
from stageline.tensors.pytree import batch_size, first_samples

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.planning.plan import Plan

TIME_LIMIT = 2.0
"""Time limit of the search, in seconds."""


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
) -> tuple[RankHost, Plan, Staged]:
    """Plan on rank 0, and cut the model as planned on all ranks; if the plan fails there, it fails everywhere."""
    from stageline.planning.plan import parse_plan

    if not options.chunk_specs.default:
        raise StagelineError(
            "schedule='auto' measures microbatches that are cut along the first dimension, so it does not support "
            "chunk specs; name a schedule, or pass the schedule of sl.plan"
        )
    if ranks is None:
        ranks = default_ranks(replicas, options.seconds, on_one_gpu(source, recipe is not None, options.device))
    if ranks is None:
        raise StagelineError("schedule='auto' needs ranks=, the number of ranks of the pipeline")
    host = find_host(ranks, options.seconds, replicas, mesh)
    if not isinstance(source, nn.Module):
        raise StagelineError(
            "schedule='auto' cuts the model itself; pass the model, or a function that builds it, instead of stages; "
            "or name a schedule"
        )
    if options.example is None:
        raise StagelineError(
            "schedule='auto' measures the model and needs example=, a batch of inputs as for step; pass it, or name "
            "a schedule"
        )
    factory = None if recipe is None else _factory_of(stages)

    def choose() -> str:
        model = source if factory is None else build(factory, device=options.device, otherwise="construct")
        sharing = len(host.here)  # ranks that are threads of one process share its GPU
        sizes = {"pp": ranks, "dp_replicate": host.layout.replicas}
        counted = sizes if mesh is None and options.shard_optimizer else mesh
        return _plan(model, ranks, counted, microbatches, options, sharing, chunks).to_text()

    plan = parse_plan(decide_together(host, choose), "the plan of rank 0")
    try:
        staged = plan.split(source, options.example)
    except StagelineError:
        if recipe is None:
            raise
        staged = plan.split(source, None)  # a model without memory cannot always run on the example
    return host, plan, replace(staged, recipe=recipe)


def _factory_of(stages: Any) -> Callable[[], nn.Module] | None:
    """The function that builds the model, or the functions that build its layers, if the user passed them."""
    if isinstance(stages, nn.Module | Staged):
        return None
    if callable(stages):
        factory: Callable[[], nn.Module] = stages
        return factory
    if isinstance(stages, Sequence) and stages and all(map(callable, stages)):
        return lambda: nn.Sequential(*(make() for make in stages))
    return None


def _plan(
    model: nn.Module,
    ranks: int,
    mesh: DeviceMesh | dict[str, int] | None,
    microbatches: int | None,
    options: PipelineOptions,
    shared: int,
    chunks: Any,
) -> Plan:
    from stageline.planning.planner import plan
    from stageline.planning.request import device_memory
    from stageline.timeline.costs import Share

    example = options.example
    whole = batch_size(example, "the example")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise StagelineError(f"microbatches must be an integer >= 1, got {shorten(microbatches)}")
    size = max(1, -(-whole // (microbatches or ranks)))
    room = device_memory(model)
    as_threads = shared == ranks
    here = ranks if as_threads else min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    capacity = max(1.0, cores() / torch.get_num_threads()) if room is None else 1.0
    hosts = [range(first, min(first + here, ranks)) for first in range(0, ranks, here)]
    return plan(
        model,
        beside(model, first_samples(example, size)),
        ranks=ranks if mesh is None else None,
        cores=[Share(host, capacity) for host in hosts] if room is None or as_threads else None,
        launcher="threads" if as_threads else "processes",
        mesh=mesh,
        batch=whole if microbatches is None else None,
        microbatches=microbatches,
        memory=None if room is None else room / shared,
        recompute=_units(model, options.recompute),
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
        shard_optimizer=options.shard_optimizer,
        chunks=chunks,
        time_limit=TIME_LIMIT,
    )


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

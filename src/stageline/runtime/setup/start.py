"""The start of a pipeline: join the other processes, build and place the stages, and prepare for the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stageline.autograd.recompute import Recompute
from stageline.distributed.bootstrap import find_host
from stageline.distributed.collectives import ProcessCollectives
from stageline.distributed.layout import inner_mesh
from stageline.distributed.rank_host import RankHost
from stageline.runtime.executor import device_of
from stageline.runtime.guards.foreign_reads import NamedTensors
from stageline.runtime.rank_executors import ExecutorCache
from stageline.runtime.replan import StepWatch, watch_for
from stageline.runtime.replicas import join_replicas, replica_seed
from stageline.runtime.setup.handshake import agree_on_shards, common_seed, compare_ties, facts_of
from stageline.runtime.setup.model_stages import ModelStages, named_tensors
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.setup.parallelize import find_parallelize, groups_of
from stageline.runtime.sharding import lower, refuse_apart, sharded_stages
from stageline.runtime.stage import StageOptions
from stageline.runtime.step import StepRunner
from stageline.schedules.schedule import Schedule
from stageline.timeline.drift import Stragglers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.model.build.build import Description
    from stageline.planning.plan import Plan


@dataclass(frozen=True)
class Blueprint:
    """What a pipeline starts from, apart from its options; after the loss of a process it starts from this again."""

    schedule: Schedule
    stages: ModelStages
    plan: Plan | None
    """How it was planned, with `schedule="auto"`."""
    recomputation: Recompute
    recomputed: Sequence[str]
    """The names of the modules that are recomputed."""
    replicas: int | None
    mesh: DeviceMesh | None
    """As the user passed them."""


def start(
    options: PipelineOptions,
    blueprint: Blueprint,
    recipe: Description[Any] | None = None,
    host: RankHost | None = None,
    *,
    built: bool = False,
) -> StepRunner:
    """Return what runs the steps. `built` says that the stages of this process are built and placed already."""
    schedule, stages, model = blueprint.schedule, blueprint.stages, blueprint.stages.model
    plan_watch = watch_for(options.replan, options.replan_every, options.planned, blueprint.plan, schedule)
    host = host or find_host(schedule.ranks, options.seconds, blueprint.replicas, blueprint.mesh)
    parallelize = find_parallelize(options, host.layout, model)
    stages.join(host, schedule.placement, parallelized=parallelize is not None)
    host.check_same(
        {
            **facts_of(model, schedule, options),
            "recompute": "\n".join([f"stages {blueprint.recomputation.stages}", *blueprint.recomputed]),
            "replicas and mesh": repr(host.layout),
        }
    )
    seed = common_seed(host, options.seed)
    before = named_tensors(model)
    inner = inner_mesh(blueprint.mesh)
    if parallelize is not None and isinstance(host, ProcessCollectives):
        groups = groups_of([], inner)  # the function may broadcast weights
        host.limit_collectives(groups)
        host.watch_peers(groups)
    if not built:
        with agree_on_shards(host, stages, parallelize is not None):
            stages.build(recipe, seed, options.device, parallelize, inner)
        stages.place(options.compile, split=schedule.splits_backward)
    compare_ties(host, stages)
    if isinstance(host, ProcessCollectives):
        gpu = device_of(stages.local_parts())
        if parallelize is not None:
            groups = groups_of(stages.local_parts(), inner)
            host.limit_collectives(groups)
            host.watch_peers(groups if gpu is None else [])
            refuse_apart(host, inner, (), "processes create a pipeline while they are")
        host.connect_gpus(schedule.channels, None if gpu is None else torch.device("cuda", gpu))
    sharded = () if parallelize is None else sharded_stages(host, stages.own_parts(), schedule.stages)
    lowered = partial(lower, stages=sharded, reshard_after_forward=options.reshard_after_forward)
    stage_options = StageOptions(
        options.loss_fn, replica_seed(seed, host.layout.data_row(host.replica)), blueprint.recomputation
    )
    penalties = len(list(model.named_parameters())) if options.penalty is not None else 0
    executors = ExecutorCache(
        host,
        stages,
        stage_options,
        NamedTensors(named_tensors(model), before),
        penalties,
        planned=blueprint.plan if options.planned is None else options.planned,
        cuda_graphs=options.cuda_graphs,
        lowered=lowered,
    )
    joined_replicas = join_replicas(host, schedule, stages, options)
    looks = options.stragglers and schedule.training and 0 in host.here
    watch = StepWatch(Stragglers(schedule) if looks else None, plan_watch)
    return StepRunner(options, schedule, host, stages, executors, joined_replicas, watch)

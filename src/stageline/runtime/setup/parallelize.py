"""The `parallelize` option: the user's own tensor parallelism and sharding, applied to the stages of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.model.build.build import Description
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.tp_plan import plan_of
from stageline.model.units import layers_of
from stageline.runtime._torch_private import attributes_of, parameters_of
from stageline.runtime.guards.cut_layers import refuse_mixed_optimizers, watch_cut_layers
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.setup.tensor_parallel import (
    cut_by_plan,
    dimension_to_shard,
    head_counts,
    kept_whole,
    refuse_uneven,
)
from stageline.runtime.setup.ties import tied_names
from stageline.tensors.sharded import is_sharded, part_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.distributed.layout import Layout

Parallelize: TypeAlias = "Callable[[Any, Any], Any]"
"""A function of a stage and of the mesh without "pp", which is None with "pp" alone."""


def shard_blocks(part: nn.Module, mesh: DeviceMesh | None) -> None:
    """Apply FSDP2 to every layer or unit of a stage, over dp_shard: what a mesh with dp_shard does by default."""
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    assert isinstance(part, nn.Sequential)
    names = [name for name, _ in part.own_units()] if isinstance(part, StagePart) else [n for n, _ in layers_of(part)]
    for name in names:
        module = part.get_submodule(name)
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh["dp_shard"], shard_placement_fn=dimension_to_shard)


def find_parallelize(options: PipelineOptions, layout: Layout, model: nn.Module) -> Parallelize | None:
    """The function that is applied to every stage: the option, or the default of the mesh; None if there is nothing.

    Refuses what does not go together with it yet.
    """
    function = options.parallelize
    if layout.tensors > 1:
        function = _default_of(model, layout) if function is None else _evenly(function, layout.tensors)
        function = _compared(function) if options.compare_weights else function
    elif function is None and layout.shards > 1:
        function = shard_blocks
    if function is not None and layout.in_mesh:
        _refuse_float8(model)
        if options.cuda_graphs:
            raise StagelineError(
                "cuda_graphs=True does not go together with stages whose parameters are sharded (dp_shard or tp in the "
                "mesh): a captured action reads its parameters where they were gathered, and runs no collective; leave "
                "it out, or use a mesh of pp and dp_replicate"
            )
        if options.compile is not False and layout.tensors > 1:
            raise StagelineError(
                f"compile= does not go together with layers that tensor parallel cuts (the mesh has tp "
                f"{layout.tensors}): what it computes with DTensors is not checked; leave it out, or use dp_shard"
            )
    return function


def _default_of(model: nn.Module, layout: Layout) -> Parallelize:
    """Cut the layers of a stage by the model's own plan, and shard its blocks if the mesh has dp_shard."""
    plan = plan_of(model)
    if not plan:
        raise StagelineError(
            f"the mesh has tp {layout.tensors}, and nothing says which layers are cut: {type(model).__name__} has no "
            "tp_plan; pass parallelize=, a function of a stage and the mesh that calls torch's parallelize_module"
        )
    names = kept_whole(plan, tied_names(model))

    def cut_and_shard(part: nn.Module, mesh: DeviceMesh) -> None:
        parameters = part.named_parameters(remove_duplicate=False)
        cut_by_plan(part, mesh, plan, {id(parameter) for name, parameter in parameters if name in names})
        refuse_uneven(part, layout.tensors)
        if layout.shards > 1:
            shard_blocks(part, mesh)

    return cut_and_shard


def _evenly(function: Parallelize, degree: int) -> Parallelize:
    """A user's function, and the check that tp divides what it cuts."""

    def apply_evenly(part: nn.Module, mesh: DeviceMesh | None) -> Any:
        heads = head_counts(part)  # the function may divide them
        answer = function(part, mesh)
        refuse_uneven(part, degree, heads)
        return answer

    return apply_evenly


def _compared(function: Parallelize) -> Parallelize:
    """A function, and the comparison of what it cuts with the whole when it first runs."""

    def apply_compared(part: nn.Module, mesh: DeviceMesh | None) -> Any:
        before = attributes_of(part)
        answer = function(part, mesh)
        watch_cut_layers(part, before)
        return answer

    return apply_compared


def _refuse_float8(model: nn.Module) -> None:
    """Refuse torchao's linear layers in float8: their parts would have scales of their own."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Float8Linear":
            raise StagelineError(
                f"{name} is a Float8Linear, and float8 does not go together with stages whose parameters are sharded "
                "(dp_shard or tp in the mesh); use bfloat16 there, or float8 in a mesh of pp and dp_replicate"
            )


def apply(function: Parallelize, stages: Sequence[tuple[int, nn.Module]], mesh: DeviceMesh | None) -> None:
    """Call the function for every stage; its parameters must keep their names."""
    for _, part in stages:
        if isinstance(part, StagePart):
            part.replay.twins.prepare()
    for stage, part in stages:
        before = dict(part.named_parameters(remove_duplicate=False))
        with _only_own_units(part):
            answer = function(part, mesh)
        if answer is not None and answer is not part:
            other = f"another {type(answer).__name__}" if isinstance(answer, nn.Module) else shorten(answer)
            raise StagelineError(
                f"parallelize returned {other} for stage {stage}; change the part in place, and return it or None"
            )
        after = dict(part.named_parameters(remove_duplicate=False))
        _refuse_new_names(stage, before, after)
    refuse_mixed_optimizers((name, parameter) for _, part in stages for name, parameter in part.named_parameters())


def _refuse_new_names(stage: int, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    gone, new = [name for name in before if name not in after], [name for name in after if name not in before]
    if gone or new:
        texts = [f"{names[0]} {what}" for names, what in ((gone, "is gone"), (new, "is new")) if names]
        raise StagelineError(
            f"parallelize changed the names of the parameters of stage {stage}: {' and '.join(texts)}; keep them, as "
            "checkpoints and optimizers find parameters by name"
        )
    for name, parameter in after.items():
        if tuple(parameter.shape) != tuple(before[name].shape):
            raise StagelineError(
                f"parallelize changed the shape of {name} from {tuple(before[name].shape)} to "
                f"{tuple(parameter.shape)}; let parallelize_module or fully_shard cut it, which keep the whole shape"
            )


@contextmanager
def _only_own_units(part: nn.Module) -> Iterator[None]:
    """Hide the units of other stages from a function: as None, or missing from a list or dict of modules."""
    if not isinstance(part, StagePart):
        yield
        return
    hidden = part.hide_other_units()
    try:
        yield
    finally:
        for children, entries in hidden:
            own = dict(children)
            children.clear()
            children.update({name: own.get(name) or module for name, module in entries.items()})


def groups_of(parts: Iterable[nn.Module], mesh: DeviceMesh | None) -> list[Any]:
    """The process groups that layers may use themselves: those of the mesh, and of the parameters."""
    meshes = [] if mesh is None else [mesh]
    sharded = (parameter for part in parts for parameter in part.parameters() if is_sharded(parameter))
    meshes += [parameter.device_mesh for parameter in sharded]
    groups = {id(group): group for inner in meshes for group in inner.get_all_groups()}
    return list(groups.values())


def materialise_sharded(
    recipe: Description[Any], parts: Iterable[nn.Module], seed: int, device: torch.device | str
) -> None:
    """Compute the parameters of stages one by one, and keep this process's part of each."""
    names = [(part, name) for part in parts for name, _ in part.named_parameters(remove_duplicate=False)]
    owners = [_owner(part, name) for part, name in names]
    targets = [parameters_of(module)[own] for module, own in owners]
    for (_, name), (module, own), target in zip(names, owners, targets, strict=True):
        if target is None or not target.is_meta or target is not parameters_of(module)[own]:
            continue
        recipe.materialise({name}.__contains__, seed=seed, device=device)
        full = parameters_of(module)[own]
        assert full is not None
        if is_sharded(full):
            continue
        cuts: dict[int, nn.Parameter] = {}
        for (holder, key), other in zip(owners, targets, strict=True):  # a tied one is computed for all its names
            if is_sharded(other) and (other is target or parameters_of(holder)[key] is full):
                if id(other) not in cuts:
                    cuts[id(other)] = nn.Parameter(part_like(full, other), requires_grad=other.requires_grad)
                parameters_of(holder)[key] = cuts[id(other)]


def _owner(part: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return part.get_submodule(path), own

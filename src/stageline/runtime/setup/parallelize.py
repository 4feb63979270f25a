"""The `parallelize` option: the user's own tensor parallelism and sharding, applied to the stages of this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.peer_connections import ended_by_peer
from stageline.model.build.build import Description
from stageline.model.compiled_models import any_compiled
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.tp_plan import plan_of
from stageline.model.units import layers_of
from stageline.runtime._torch_private import attributes_of, parameters_of, rootless_lists, share_shard
from stageline.runtime.guards.cut_layers import watch_cut_layers
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.setup.tensor_parallel import (
    cut_by_plan,
    dimension_to_shard,
    head_counts,
    kept_whole,
    refuse_uneven,
)
from stageline.tensors.sharded import is_sharded, part_like, sharding_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.distributed.layout import Layout

Parallelize: TypeAlias = "Callable[[Any, Any], Any]"
"""A function of a stage and of the mesh without "pp", which is None with "pp" alone."""


def shard_blocks(part: nn.Module, mesh: DeviceMesh | None, tied: Collection[str] = ()) -> None:
    """Apply FSDP2 to every layer or unit of a stage, over dp_shard: what a mesh with dp_shard does by default.

    `tied` are the names of tied parameters: outside of units, they are cut as those in units are. Parameters without
    dimensions stay whole, since FSDP2 cuts one.
    """
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    assert isinstance(part, nn.Sequential)
    if isinstance(part, StagePart):
        names = [name for name, _ in part.own_units()]
        names += [name for name, module in part.named_modules() if _has_outside_units(part, name, module, tied)]
    else:
        names = [name for name, _ in layers_of(part)]
    for name in {id(part.get_submodule(name)): name for name in names}.values():  # a layer may be there twice
        module = part.get_submodule(name)
        for own, parameter in module.named_parameters():
            if not parameter.is_contiguous():
                raise StagelineError(
                    f"FSDP2 shards only contiguous parameters, but {name}.{own} of shape {tuple(parameter.shape)} "
                    f"has strides {parameter.stride()}; make it contiguous with .contiguous(), or pass parallelize="
                )
        whole = {parameter for parameter in module.parameters() if parameter.dim() == 0}
        if len(whole) < len(set(module.parameters())):
            fully_shard(
                module, mesh=mesh["dp_shard"], shard_placement_fn=dimension_to_shard, ignored_params=whole or None
            )


def _has_outside_units(part: StagePart, name: str, module: nn.Module, tied: Collection[str]) -> bool:
    """Whether a module itself has one of these parameters, and is outside of the units of its stage."""
    units = [unit for unit, _ in part.own_units()]
    if any(name == unit or name.startswith(f"{unit}.") for unit in units):
        return False
    return any(f"{name}.{own}" in tied for own in parameters_of(module))


def find_parallelize(options: PipelineOptions, layout: Layout, model: nn.Module) -> Parallelize | None:
    """The function that is applied to every stage: the option, or the default of the mesh; None if there is nothing.

    Refuses what cannot be combined with it yet.
    """
    function = options.parallelize
    if layout.tensors > 1:
        function = _default_of(model, layout) if function is None else _evenly(function, layout.tensors)
        function = _compared(function) if options.compare_weights else function
    elif function is None and layout.shards > 1:
        function = partial(shard_blocks, tied=_names_of_tied(model))
    if function is not None and not layout.in_mesh:
        return _watched(function, options, model)
    if function is not None:
        _refuse_beside_shards(options, model)
        if options.compile is not False and layout.tensors > 1:
            _refuse_compiled(layout.tensors)
    return function


def _refuse_compiled(degree: int) -> None:
    raise StagelineError(
        f"compile= cannot be combined with tensor-parallel layers (the mesh has tp {degree}), nor can "
        "module.compile(), because compiled DTensor code is not verified; leave it out, or use dp_shard"
    )


def _refuse_beside_shards(options: PipelineOptions, model: nn.Module) -> None:
    """Refuse what cannot be combined with sharded parameters."""
    _refuse_float8(model)
    if options.cuda_graphs:
        raise StagelineError(
            "cuda_graphs=True cannot be combined with stages whose parameters are sharded (dp_shard or tp in the "
            "mesh): a captured action cannot gather its parameters; leave it out, or use a mesh of pp and "
            "dp_replicate"
        )


def _watched(function: Parallelize, options: PipelineOptions, model: nn.Module) -> Parallelize:
    """A user's function in a mesh of ranks and replicas, where it may shard parameters, too."""

    def apply_watched(part: nn.Module, mesh: DeviceMesh | None) -> Any:
        answer = function(part, mesh)
        if any(map(is_sharded, part.parameters())):
            _refuse_beside_shards(options, model)
        return answer

    return apply_watched


def _default_of(model: nn.Module, layout: Layout) -> Parallelize:
    """Cut the layers of a stage by the model's own plan, and shard its blocks if the mesh has dp_shard."""
    plan = plan_of(model)
    if not plan:
        raise StagelineError(
            f"the mesh has tp {layout.tensors}, but it is unknown which layers to cut: {type(model).__name__} has no "
            "tp_plan; pass parallelize=, a function of a stage and the mesh that calls torch's parallelize_module"
        )
    names, tied = kept_whole(plan, tied_names(model)), _names_of_tied(model)

    def cut_and_shard(part: nn.Module, mesh: DeviceMesh) -> None:
        parameters = part.named_parameters(remove_duplicate=False)
        cut_by_plan(part, mesh, plan, {id(parameter) for name, parameter in parameters if name in names})
        refuse_uneven(part, layout.tensors)
        if layout.shards > 1:
            shard_blocks(part, mesh, tied)

    return cut_and_shard


def _evenly(function: Parallelize, degree: int) -> Parallelize:
    """A user's function, and the check that tp divides what it cuts."""

    def apply_evenly(part: nn.Module, mesh: DeviceMesh | None) -> Any:
        heads = head_counts(part)  # the function may divide them
        answer = function(part, mesh)
        refuse_uneven(part, degree, heads)
        if any_compiled([part]):
            _refuse_compiled(degree)
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
        if any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__):
            raise StagelineError(
                f"{name} is a Float8Linear, but float8 cannot be combined with stages whose parameters are sharded "
                "(dp_shard or tp in the mesh); use bfloat16 there, or float8 in a mesh of pp and dp_replicate"
            )


def apply(function: Parallelize, stages: Sequence[tuple[int, nn.Module]], mesh: DeviceMesh | None) -> None:
    """Call the function for every stage; its parameters must keep their names."""
    for _, part in stages:
        if isinstance(part, StagePart):
            part.replay.twins.prepare()
            part.separate()
    cut: dict[int, int] = {}
    for stage, part in stages:
        _refuse_second_cut(stage, part, cut)
        before, layers = dict(part.named_parameters(remove_duplicate=False)), dict(_layers_of(part))
        with _only_own_units(part):
            answer = _call(function, stage, part, mesh)
        if answer is not None and answer is not part:
            other = f"another {type(answer).__name__}" if isinstance(answer, nn.Module) else shorten(answer)
            raise StagelineError(
                f"parallelize returned {other} for stage {stage}; change the stage in place, and return it or None"
            )
        after = dict(part.named_parameters(remove_duplicate=False))
        _refuse_new_names(stage, before, after)
        if any(map(is_sharded, after.values())):
            _refuse_float8(part)  # the function may have converted layers
            _refuse_new_layers(stage, layers, part)
        _keep_frozen(before, after)
        for module in part.modules():
            if any(map(is_sharded, parameters_of(module).values())):
                cut.setdefault(id(parameters_of(module)), stage)
        rootless = rootless_lists(part)
        if rootless:
            raise StagelineError(
                f"parallelize applied fully_shard to a list of {len(rootless)} modules of stage {stage}, but not to "
                "a module that contains them, which FSDP2 requires; call fully_shard(part, mesh=…) last, or pass "
                "the modules one by one"
            )


def _call(function: Parallelize, stage: int, part: nn.Module, mesh: DeviceMesh | None) -> Any:
    try:
        return function(part, mesh)
    except StagelineError:
        raise
    except Exception as error:
        waited = "; it waited for another process: parallelize must do the same on all processes"
        hint = waited if ended_by_peer(error) else ""
        raise StagelineError(
            f"parallelize raised an error for stage {stage}: {type(error).__name__}: {error}{hint}"
        ) from error


def _refuse_second_cut(stage: int, part: nn.Module, cut: Mapping[int, int]) -> None:
    """Refuse a layer that another stage of this process has as well; `cut` are those stages, by their parameters."""
    for name, module in part.named_modules():
        first = cut.get(id(parameters_of(module)))
        if first is not None:
            raise StagelineError(
                f"{name} is the same layer in stages {first} and {stage} of one process, but parallelize can cut a "
                "layer only once; use a schedule with one stage per rank (1f1b), or separate layers with tied "
                "parameters"
            )


def _refuse_new_names(stage: int, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    gone, new = [name for name in before if name not in after], [name for name in after if name not in before]
    if gone or new:
        texts = [f"{names[0]} {what}" for names, what in ((gone, "is gone"), (new, "is new")) if names]
        raise StagelineError(
            f"parallelize changed the names of the parameters of stage {stage}: {' and '.join(texts)}; keep the "
            f"names, because checkpoints and optimizers find parameters by name{_wrapper_option(new)}"
        )
    for name, parameter in after.items():
        if tuple(parameter.shape) != tuple(before[name].shape):
            raise StagelineError(
                f"parallelize changed the shape of {name} from {tuple(before[name].shape)} to "
                f"{tuple(parameter.shape)}; cut it with parallelize_module or fully_shard, which keep the whole shape"
            )


def _layers_of(part: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The layers of a stage, or the units of a model with a forward of its own."""
    if isinstance(part, StagePart):
        return [(name, part.get_submodule(name)) for name, _ in part.own_units()]
    assert isinstance(part, nn.Sequential)
    return layers_of(part)


def _refuse_new_layers(stage: int, before: Mapping[str, nn.Module], part: nn.Module) -> None:
    """Refuse another module in the place of a layer: the whole model has the old one, with the uncut parameters."""
    for name, module in _layers_of(part):
        if module is not before[name] and any(map(is_sharded, module.parameters())):
            raise StagelineError(
                f"parallelize replaced {name} of stage {stage} by another module ({type(module).__name__}) and "
                "cut that; replace it in the model before the pipeline is created, and cut it in place"
            )


def _wrapper_option(names: Iterable[str]) -> str:
    """The option of a pipeline that does what a wrapper with these names of parameters does, as text."""
    options = {"_checkpoint_wrapped_module": "recompute=", "_orig_mod": "compile="}
    parts = {part for name in names for part in name.split(".")}
    return "".join(f" (pass {option} instead of wrapping modules)" for part, option in options.items() if part in parts)


def _keep_frozen(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Freeze what was frozen: torch's `SequenceParallel` replaces frozen parameters by trainable ones."""
    for name, parameter in after.items():
        if parameter is not before[name] and not before[name].requires_grad:
            parameter.requires_grad_(False)


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
            children.update({name: module if own.get(name) is None else own[name] for name, module in entries.items()})


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
        whole_module, _ = _owner(recipe.model, name)  # what is outside of units, a stage has in a module of its own
        full = parameters_of(whole_module)[own]
        assert full is not None
        if is_sharded(full):
            continue
        cuts: dict[int, nn.Parameter] = {}
        for (_, key), (holder, attribute), other in zip(names, owners, targets, strict=True):
            tied = other is target or parameters_of(holder)[attribute] is full or key == name
            if other is None or not tied:  # a tied one is computed for all its names
                continue
            if not is_sharded(other):
                parameters_of(holder)[attribute] = full
                continue
            if id(other) not in cuts:
                cuts[id(other)] = nn.Parameter(part_like(full, other), requires_grad=other.requires_grad)
            parameters_of(holder)[attribute] = cuts[id(other)]


def _owner(part: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return part.get_submodule(path), own


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several.

    >>> layer = nn.Linear(2, 2)
    >>> tied_names(nn.Sequential(layer, nn.Tanh(), layer))
    [['0.weight', '2.weight'], ['0.bias', '2.bias']]
    """
    return [names for names in _names_of_parameters(model).values() if len(names) > 1]


def _names_of_tied(model: nn.Module) -> frozenset[str]:
    return frozenset(name for names in tied_names(model) for name in names)


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names


def names_of_several(model: nn.Module, stages: Iterable[nn.Module]) -> list[list[str]]:
    """The names of every parameter that is tied, or that stages have outside of their units, each in its own module."""
    places: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for root in (model, *stages):
        for module in root.modules():
            for own, parameter in parameters_of(module).items():
                places[id(parameter)].add((id(parameters_of(module)), own))
    return [names for number, names in _names_of_parameters(model).items() if len(places[number]) > 1]


def tie_again(
    model: nn.Module, own: Sequence[nn.Module], others: Iterable[nn.Module], several: Sequence[Sequence[str]]
) -> None:
    """Make the parameters with these names one again: in the model, the stages of this process, and all others.

    `fully_shard`, `parallelize_module` and `materialise_sharded` make several of one. The stages of one process then
    use one sharded parameter: gradients of all uses add into its `.grad`, and an optimizer has it once. Each stage
    gathers it for itself; those of one process must be cut in the same way. Where other ranks use it, too, they have it
    once each, and `shared_parameters` sums the gradients of all ranks.
    """
    here: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in own:
        for name, _ in part.named_parameters(remove_duplicate=False):
            here[name].append(_owner(part, name))
    for names in several:
        mine = [(name, *place) for name in names for place in here.get(name, ())]
        values = [parameters_of(module)[attribute] for _, module, attribute in mine]
        if not mine:
            continue
        first_name, first = mine[0][0], values[0]
        assert first is not None
        for (name, module, attribute), value in zip(mine[1:], values[1:], strict=True):
            assert value is not None
            if sharding_text(value) != sharding_text(first):
                raise StagelineError(
                    f"{first_name} and {name} are one parameter; {first_name} {sharding_text(first)} and {name} "
                    f"{sharding_text(value)}: make parallelize cut both in the same way, or untie them"
                )
            if value is not first:
                share_shard(own, mine[0][1:], (module, attribute))
        for root in (model, *own, *others):
            for name in names:
                path, _, attribute = name.rpartition(".")
                with suppress(AttributeError):  # another stage's
                    parameters = parameters_of(root.get_submodule(path))
                    if attribute in parameters:
                        parameters[attribute] = first

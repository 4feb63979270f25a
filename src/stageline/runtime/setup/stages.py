"""Stages: from the model and the schedule that a user passes to one module for each stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stageline.common.errors import ScheduleError, StagelineError, UnknownOption, nearest, shorten
from stageline.distributed.bootstrap import several_processes
from stageline.model.build.build import Description, describe
from stageline.model.compiled_models import unwrapped
from stageline.model.partition.partition import even_sizes
from stageline.model.skips import parts_of
from stageline.model.split import Staged, split
from stageline.model.units import NoStack, find_units, layers_of, refuse_lazy
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.opaque_objects import weights_inside
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import families, find_family, schedule
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import odd_class

_FILES = (".json", ".csv")
_OF_SPLIT = frozenset({"split", *inspect.signature(split).parameters}) - {"model", "example", "ranks", "schedule"}


def whole_model(stages: Any) -> nn.Module:
    """The model of all stages; its names are the ones in checkpoints and optimizers."""
    if isinstance(stages, Staged):
        return stages.model
    if isinstance(stages, nn.Module):
        return stages
    layers: list[Any] = list(stages) if isinstance(stages, list | tuple | nn.ModuleList) else [stages]
    wrong = [stage for stage in layers if not isinstance(stage, nn.Module)]
    if wrong or not layers:
        raise StagelineError(
            "Pipeline takes a model, a list of its stages, the result of sl.split, a function that builds the model, "
            f"or a list of functions that build its layers; got {shorten(wrong[0] if wrong else layers)}"
        )
    return nn.Sequential(*layers)


def refuse_odd_tensors(model: nn.Module) -> None:
    """Refuse parameters and buffers that a pipeline cannot hold: lazy ones and those of a tensor subclass."""
    refuse_lazy(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    allowed = {id(parameter) for module in sharded for parameter in module.parameters()}
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            kind = odd_class(tensor)
            if kind and id(tensor) not in allowed:
                raise StagelineError(
                    f"the {what} {name} is a {kind}; stages support only plain tensors, because the extra behaviour "
                    f"of a {kind} would not reach other ranks; pass a model with plain tensors"
                )


def refuse_other_device(model: nn.Module, device: torch.device | str) -> None:
    """Refuse a device for a model that exists on another one: only what is built later is placed there."""
    kinds = {tensor.device.type for tensors in (model.parameters(), model.buffers()) for tensor in tensors} - {"meta"}
    kind = torch.device(device).type
    if kind != "cpu" and kinds and kind not in kinds:
        raise StagelineError(
            f"device is {str(device)!r}, but the model is on {', '.join(sorted(kinds))}; move it with "
            f"model.to({str(device)!r}), or pass a function that builds it"
        )


def described(stages: Any) -> tuple[Any, Description[Any] | None]:
    """Describe a function that builds a model, or functions that build its layers: a meta model and its recipe.

    >>> model, recipe = described([lambda: nn.Linear(2, 3), lambda: nn.Linear(3, 2)])
    >>> len(model), model[0].weight.device.type, recipe.nbytes()
    (2, 'meta', 68)
    """
    stages = unwrapped(stages)
    if isinstance(stages, nn.Module | Staged):
        return stages, stages.recipe if isinstance(stages, Staged) else None
    if callable(stages):
        build = stages
        recipe = describe(lambda: unwrapped(build()))
        return recipe.model, recipe
    stages = with_functions(stages)
    builders = list(stages) if isinstance(stages, Sequence) else []
    if builders and all(callable(builder) and not isinstance(builder, nn.Module) for builder in builders):
        recipe = describe(lambda: nn.Sequential(*(builder() for builder in builders)))
        return recipe.model, recipe
    return stages, None


def refuse_second(stages: Any) -> None:
    """Refuse `stages=` beside a model: the number of stages follows from the schedule."""
    if not isinstance(stages, int):
        raise UnknownOption(f"the model is passed twice, once as stages={shorten(stages)}; pass it once")
    more = f", or schedule='interleaved', ranks={stages // 2}, chunks=2" if stages > 2 and stages % 2 == 0 else ""
    raise UnknownOption(
        f"stages={stages} is passed with the model, but the number of stages follows from the schedule: ranks × "
        f"chunks; pass ranks={max(stages, 1)} for one stage per rank{more}"
    )


def check_options(options: Mapping[str, Any], name_or_schedule: Any, own: Iterable[str]) -> None:
    """Refuse options that neither the pipeline (which has `own`) nor the family of the schedule has.

    >>> check_options({"microbatch": 4}, "interleaved", ["microbatches", "ranks"])
    Traceback (most recent call last):
    ...
    stageline.common.errors.UnknownOption: neither Pipeline nor interleaved has an option 'microbatch' (did you mean
    'microbatches'?); interleaved takes chunks, group
    """
    who, known = "a finished schedule", list[str]()
    if isinstance(name_or_schedule, str) and name_or_schedule == "auto":
        who, known = "schedule='auto'", ["chunks"]
    elif isinstance(name_or_schedule, str) and not _is_file(name_or_schedule):
        family = find_family(name_or_schedule)
        who, known = family.name, list(family.options)
    _refuse_cuts(known, options)
    unknown = next((name for name in options if name not in known), "")
    if unknown:
        other = next((name for name in families() if unknown in find_family(name).options), "")
        meant = f", which {other} has" if other else nearest(unknown, [*own, *known])
        raise UnknownOption(
            f"neither Pipeline nor {who} has an option {unknown!r}{meant}; {who} takes {', '.join(known) or 'none'}"
        )


def on_one_gpu(model: Any, built: bool, device: torch.device | str) -> bool:
    """Whether all parameters of a model are on one GPU, or will be `built` there."""
    if not isinstance(model, nn.Module):
        return False
    devices = {torch.device(device)} if built else {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and all(place.type == "cuda" for place in devices)


def default_ranks(replicas: int | None, deadline: float, one_gpu: bool) -> int | None:
    """The number of ranks if the user names none: one per process of a job, or one for a model on one GPU.

    >>> default_ranks(None, 1.0, one_gpu=True)
    1
    """
    if several_processes(deadline):
        return dist.get_world_size() // (replicas if isinstance(replicas, int) and replicas > 0 else 1) or 1
    return 1 if one_gpu else None  # threads on one GPU would only take turns


def find_schedule(
    source: str | Path | Schedule,
    layers: int,
    ranks: int | None,
    microbatches: int | None,
    *,
    default: Callable[[], int | None] = lambda: None,
    **options: Any,
) -> Schedule:
    """The schedule that a family's name, a file or a schedule stands for.

    Without `ranks`, there are as many as `default` says, if the family has such a schedule and the model enough layers.
    Otherwise every layer is a stage, and the family determines how many of them a rank holds.

    >>> find_schedule("1f1b", layers=4, ranks=None, microbatches=8).ranks
    4
    >>> find_schedule("1f1b", layers=4, ranks=None, microbatches=8, default=lambda: 2).ranks
    2
    """
    if not isinstance(source, str | Path | Schedule):
        raise StagelineError(
            "schedule must be a family such as '1f1b', a file, or a schedule from sl.schedule(…), "
            f"got {shorten(source)}"
        )
    if isinstance(source, Schedule) or _is_file(source):
        finished = source if isinstance(source, Schedule) else read_schedule(source)
        if microbatches is not None and microbatches != finished.microbatches:
            raise ScheduleError(f"microbatches={microbatches}, but the schedule has {finished.microbatches}")
        if ranks is not None and ranks != finished.ranks:
            raise ScheduleError(f"ranks={ranks}, but the schedule has {finished.ranks}")
        return finished
    family = find_family(str(source))
    if microbatches is None:
        raise ScheduleError(f"{family.name} needs microbatches=, the number of parts that a batch is split into")
    if ranks is not None:
        return schedule(str(source), ranks, microbatches, **options)
    count = default()
    if count is not None:
        with suppress(ScheduleError):
            candidate = schedule(str(source), count, microbatches, **options)
            if count == 1 or layers == 1 or candidate.stages <= layers:
                return candidate
            most = layers * count // candidate.stages
            raise StagelineError(
                f"one rank for each process makes {count} ranks and {candidate.stages} stages with {family.name}, but "
                f"the model has only {layers} layers to split; start at most {most} processes for each replica, or "
                "pass ranks= and replicas="
            )
    refused: list[ScheduleError] = []
    divisors = [count for count in range(layers, 0, -1) if layers % count == 0]
    for count in divisors:
        try:
            candidate = schedule(str(source), count, microbatches, **options)
        except ScheduleError as error:
            refused.append(error)
            continue
        if candidate.stages == layers:
            return candidate
    if refused and len({str(error) for error in refused}) == 1 and len(refused) == len(divisors):
        raise refused[0]  # the number of ranks is not the reason
    last = f": {refused[-1]}" if refused else ""
    raise ScheduleError(f"{family.name} does not fit {layers} stages on any number of ranks{last}; pass ranks=")


def _refuse_cuts(known: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse options of `split`, unless the family has one of that name."""
    of_split = [name for name in options if name in _OF_SPLIT and name not in known]
    if of_split:
        raise UnknownOption(
            f"{of_split[0]}= is an option of sl.split, but Pipeline splits a model evenly by layers; split the model "
            "first: "
            f"sl.Pipeline(sl.split(model, stages=…, {'by' if of_split[0] == 'split' else of_split[0]}=…), …)"
        )


def _is_file(name: str | Path) -> bool:
    return Path(name).suffix.lower() in _FILES


def count_layers(model: nn.Module | Staged | Sequence[nn.Module]) -> int:
    """The number of stages, or of layers or blocks to split into stages."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
        try:
            units = find_units(model)
        except NoStack:  # it is traced into as many stages as the schedule has
            return 1
        return sum(unit.block for unit in units) or len(units)
    return len(model)


def cut(source: Any, model: nn.Module, stages: int, example: Any = None) -> tuple[Any, list[nn.Sequential]]:
    """Split a model into stages: evenly by layers, the larger parts first; every part keeps the names of its layers.

    Also returns what to cut again at the same places: what inspecting a forward shows may depend on which of its
    tensors have memory.
    """
    if not isinstance(source, Staged) and not isinstance(model, nn.Sequential):
        source = split(model, stages, example=example)
    if isinstance(source, Staged):
        if len(source) != stages:
            raise StagelineError(f"the schedule has {stages} stages, but the model is split into {len(source)}")
        return source, source.parts()
    assert isinstance(model, nn.Sequential)
    layers = layers_of(model)
    if not isinstance(source, nn.Sequential) and stages != len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages, but {len(layers)} were passed; pass {stages}, or an nn.Sequential, "
            "which is split evenly"
        )
    if stages > len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages, but the model has only {len(layers)} layers; use fewer ranks or chunks"
        )
    ends = pairwise(accumulate(even_sizes(len(layers), stages), initial=0))
    return source, parts_of([layers[start:stop] for start, stop in ends])


def beside(model: nn.Module, tree: Any) -> Any:
    """A batch on the device of a model."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None:
        return tree
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


# Plain functions as layers: `[nn.Linear(4, 4), torch.relu, nn.Linear(4, 4)]`.


class FunctionLayer(nn.Module):
    """A function as a module without parameters.

    >>> import torch
    >>> FunctionLayer(torch.relu)
    FunctionLayer(relu)
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function  # the function itself, so that `forward` has its signature

    def extra_repr(self) -> str:
        """The name of the function."""
        return name_of(self.forward)


def name_of(function: Any) -> str:
    """The name of a function; of a partial, the name of the function it calls."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(function).__name__))


def builds(value: Any) -> bool:
    """Whether a callable takes no arguments, as a function that builds a layer does.

    >>> builds(lambda: nn.ReLU()), builds(nn.functional.relu), builds(nn.ReLU)
    (True, False, True)
    """
    if isinstance(value, type):
        return True
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(value.default is not value.empty or value.kind in any_number for value in parameters)


def as_layer(value: Any, number: int) -> Any:
    """Wrap a function as a layer and return anything else unchanged; refuse one with weights or without input."""
    if isinstance(value, nn.Module) or not callable(value):
        return value
    if isinstance(value, type):
        raise StagelineError(
            f"layer {number} is the class {value.__name__}, not a layer; pass an instance: {value.__name__}(…)"
        )
    name = name_of(value)
    if builds(value) and not inspect.signature(value).parameters:
        raise StagelineError(
            f"layer {number}, {name}, takes no input, but the list also contains layers; pass the layer that it "
            "builds, or one function per layer"
        )
    weights = weights_inside(value)
    if weights is not None:
        raise StagelineError(
            f"layer {number} is the function {name}, which uses {weights}; a pipeline would not train, save or place "
            "it. Pass the module itself as the layer, or a module that contains what the function uses"
        )
    return FunctionLayer(value)


def with_functions(stages: Any) -> Any:
    """Wrap the functions in a list of layers as modules; return anything else, and a list of builders, unchanged.

    >>> import torch
    >>> with_functions([nn.Tanh(), torch.relu])
    [Tanh(), FunctionLayer(relu)]
    """
    if not isinstance(stages, list | tuple) or not stages:
        return stages
    builders = [callable(layer) and not isinstance(layer, nn.Module) and builds(layer) for layer in stages]
    if all(builders) or (any(builders) and not all(map(callable, stages))):
        return stages
    if any(builders) and not any(isinstance(layer, nn.Module) for layer in stages):
        return [
            layer if builder else partial(lambda wrapped: wrapped, as_layer(layer, number))
            for number, (layer, builder) in enumerate(zip(stages, builders, strict=True))
        ]
    return [as_layer(layer, number) for number, layer in enumerate(stages)]

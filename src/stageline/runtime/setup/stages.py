"""Stages: from the model and the schedule that a user passes to one module for each stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stageline.common.errors import ScheduleError, StagelineError, UnknownOption, nearest, shorten
from stageline.model.build.build import Description, describe
from stageline.model.compiled_models import unwrapped
from stageline.model.partition.partition import even_sizes
from stageline.model.skips import parts_of
from stageline.model.split import Staged, split
from stageline.model.units import NoStack, find_units, layers_of, refuse_lazy
from stageline.runtime._torch_private import pytree
from stageline.runtime.setup.function_layers import with_functions
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
    """Refuse parameters and buffers that a pipeline cannot hold: lazy ones and those of a tensor subclass.

    >>> refuse_odd_tensors(nn.Sequential(nn.LazyLinear(2)))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: the parameter 0.weight has no shape yet, as in all lazy modules before their first
    batch; run one through the model (model(inputs)) on every process, and then create the Pipeline
    """
    refuse_lazy(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    allowed = {id(parameter) for module in sharded for parameter in module.parameters()}
    named: list[tuple[str, str, Tensor]] = [("parameter", name, tensor) for name, tensor in model.named_parameters()]
    named += [("buffer", name, tensor) for name, tensor in model.named_buffers()]
    for what, name, tensor in named:
        if id(tensor) not in allowed and odd_class(tensor):
            raise StagelineError(
                f"the {what} {name} is a {odd_class(tensor)}; stages hold plain tensors, and the extra behaviour of a "
                f"{odd_class(tensor)} would not reach other ranks; pass a model with plain tensors"
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
    """Refuse `stages=` beside a model: the number of stages follows from the schedule.

    >>> refuse_second(4)
    Traceback (most recent call last):
    ...
    stageline.common.errors.UnknownOption: stages=4 is passed beside the model, but the number of stages follows from
    the schedule: ranks × chunks; pass ranks=4 for one stage per rank, or schedule='interleaved', ranks=2, chunks=2
    """
    if not isinstance(stages, int):
        raise UnknownOption(f"the model is passed twice, once as stages={shorten(stages)}; pass it once")
    more = f", or schedule='interleaved', ranks={stages // 2}, chunks=2" if stages > 2 and stages % 2 == 0 else ""
    raise UnknownOption(
        f"stages={stages} is passed beside the model, but the number of stages follows from the schedule: ranks × "
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


def find_schedule(
    source: str | Path | Schedule, layers: int, ranks: int | None, microbatches: int | None, **options: Any
) -> Schedule:
    """The schedule that a family's name, a file or a schedule stands for."""
    if not isinstance(source, str | Path | Schedule):
        raise StagelineError(
            f"schedule is a family such as '1f1b', a file, or a schedule from sl.schedule(…), got {shorten(source)}"
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
    # Without ranks=, every layer is a stage, and the family determines how many of them a rank holds.
    refused: list[ScheduleError] = []
    for count in _divisors(layers):
        try:
            candidate = schedule(str(source), count, microbatches, **options)
        except ScheduleError as error:
            refused.append(error)
            continue
        if candidate.stages == layers:
            return candidate
    if refused and len({str(error) for error in refused}) == 1 and len(refused) == len(_divisors(layers)):
        raise refused[0]  # the number of ranks is not the reason
    last = f": {refused[-1]}" if refused else ""
    raise ScheduleError(f"{family.name} does not fit {layers} stages on any number of ranks{last}; pass ranks=")


def _refuse_cuts(known: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse options of `split`, unless the family has one of that name."""
    of_split = [name for name in options if name in _OF_SPLIT and name not in known]
    if of_split:
        raise UnknownOption(
            f"{of_split[0]}= is an option of sl.split, and Pipeline splits a model evenly by layers; split it first: "
            f"sl.Pipeline(sl.split(model, stages=…, {'by' if of_split[0] == 'split' else of_split[0]}=…), …)"
        )


def _is_file(name: str | Path) -> bool:
    return Path(name).suffix.lower() in _FILES


def _divisors(number: int) -> list[int]:
    return [count for count in range(number, 0, -1) if number % count == 0]


def count_layers(model: nn.Module | Staged | Sequence[nn.Module]) -> int:
    """The number of stages, or of layers or blocks to split into stages."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
        try:
            units = find_units(model)
        except NoStack:  # it is traced into as many stages as the schedule has
            return 1
        return sum(unit.block for unit in units) or len(units)
    return len(model)


def cut_once(stages_or_model: Any, model: nn.Module, stages: int, example: Any = None) -> Any:
    """Split a model with its own forward once, so that every later cut is at the same places.

    The result of inspecting a forward may depend on which of its tensors have memory.
    """
    if isinstance(stages_or_model, Staged) or isinstance(model, nn.Sequential):
        return stages_or_model
    return split(model, stages, example=example)


def cut(stages_or_model: Any, model: nn.Module, stages: int, example: Any = None) -> list[nn.Sequential]:
    """Split the layers evenly, the larger parts first; every part keeps the names of its layers."""
    if isinstance(stages_or_model, Staged):
        if len(stages_or_model) != stages:
            raise StagelineError(
                f"the schedule has {stages} stages, but the model is split into {len(stages_or_model)}"
            )
        return stages_or_model.parts()
    if not isinstance(model, nn.Sequential):
        return split(model, stages, example=example).parts()
    layers, exact = layers_of(model), not isinstance(stages_or_model, nn.Sequential)
    if exact and stages != len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages, but {len(layers)} were passed; pass {stages}, or an nn.Sequential, "
            "which is split evenly"
        )
    if stages > len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages, but the model has only {len(layers)} layers; use fewer ranks or chunks"
        )
    ends = pairwise(accumulate(even_sizes(len(layers), stages), initial=0))
    return parts_of([layers[start:stop] for start, stop in ends])


def cut_or_wait(
    stages_or_model: Any, model: nn.Module, stages: int, example: Any
) -> tuple[Any, list[nn.Sequential], StagelineError | None]:
    """The result of `cut_once` and its parts; no parts, and the reason, if an example is needed to split the model."""
    try:
        once = cut_once(stages_or_model, model, stages, example)
        return once, cut(once, model, stages, example), None
    except NoStack as error:
        return stages_or_model, [], error


def cut_by_batch(
    stages_or_model: Any, model: nn.Module, stages: int, example: Any, parts: list[nn.Sequential]
) -> list[nn.Sequential]:
    """Split a model by its first microbatch; return the existing parts, if any, when the model fails on it."""
    device = next((tensor.device for tensor in model.parameters()), None)
    if device is not None:
        example = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example)
    try:
        return cut(stages_or_model, model, stages, example)
    except Exception:  # the model may fail in any way
        if not parts:
            raise
        return parts

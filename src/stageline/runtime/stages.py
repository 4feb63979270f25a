"""From what a user gives to the stages of a schedule."""

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
from stageline.model.skips import parts_of
from stageline.model.split import Staged, even_sizes, split
from stageline.model.units import NoStack, find_units, layers_of, refuse_lazy
from stageline.runtime._torch_private import pytree
from stageline.runtime.function_layers import with_functions
from stageline.schedules.io import read_schedule
from stageline.schedules.placement import Placement
from stageline.schedules.registry import families, find_family, schedule
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import odd_class

_FILES = (".json", ".csv")
_OF_SPLIT = frozenset({"split", *inspect.signature(split).parameters}) - {"model", "example", "ranks", "schedule"}


def whole_model(stages: Any) -> nn.Module:
    """One model of all stages, whose names are those that checkpoints and optimizers see."""
    if isinstance(stages, Staged):
        return stages.model
    if isinstance(stages, nn.Module):
        return stages
    found: list[Any] = list(stages) if isinstance(stages, list | tuple | nn.ModuleList) else [stages]
    wrong = [stage for stage in found if not isinstance(stage, nn.Module)]
    if wrong or not found:
        raise StagelineError(
            "a Pipeline is made of a model, a list of its stages, or what sl.split gives; or of a function that builds "
            f"the model, or a list of functions that build its layers; got {shorten(wrong[0] if wrong else found)}"
        )
    return nn.Sequential(*found)


def refuse_odd_tensors(model: nn.Module) -> None:
    """Refuse parameters and buffers that a pipeline cannot hold: without a shape yet, or of a class of their own.

    >>> refuse_odd_tensors(nn.Sequential(nn.LazyLinear(2)))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: the parameter 0.weight has no shape yet, as in all lazy modules before their first
    batch; run one through the model (model(inputs)) on every process, and then make the Pipeline
    """
    refuse_lazy(model)
    kept = {id(each) for module in model.modules() if isinstance(module, FSDPModule) for each in module.parameters()}
    named = [("parameter", *each) for each in model.named_parameters()]
    for what, name, tensor in [*named, *(("buffer", *each) for each in model.named_buffers())]:
        if id(tensor) not in kept and odd_class(tensor):
            raise StagelineError(
                f"the {what} {name} is a {odd_class(tensor)}; stages hold plain tensors, and what a "
                f"{odd_class(tensor)} does beside that would not reach other ranks: give the model with plain ones"
            )


def described(stages: Any) -> tuple[Any, Description[Any] | None]:
    """Of a function that builds a model, or functions that build its layers: the model without memory, and its recipe.

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
    found = list(stages) if isinstance(stages, Sequence) else []
    if found and all(callable(each) and not isinstance(each, nn.Module) for each in found):
        recipe = describe(lambda: nn.Sequential(*(make() for make in found)))
        return recipe.model, recipe
    return stages, None


def refuse_second(stages: Any) -> None:
    """Refuse a `stages=` beside the model: it is no number of stages.

    >>> refuse_second(4)
    Traceback (most recent call last):
    ...
    stageline.common.errors.UnknownOption: stages=4 is given beside the model, and the number of stages follows from the
    schedule: ranks × chunks; say ranks=4 for one on each rank, or schedule='interleaved', ranks=2, chunks=2
    """
    if not isinstance(stages, int):
        raise UnknownOption(f"the model or its stages are given twice, once as stages={shorten(stages)}; give one")
    more = f", or schedule='interleaved', ranks={stages // 2}, chunks=2" if stages > 2 and stages % 2 == 0 else ""
    raise UnknownOption(
        f"stages={stages} is given beside the model, and the number of stages follows from the schedule: ranks × "
        f"chunks; say ranks={max(stages, 1)} for one on each rank{more}"
    )


def check_options(options: Mapping[str, Any], given: Any, own: Iterable[str]) -> None:
    """Refuse options that neither the pipeline has, whose `own` are named, nor the family of the schedule given.

    >>> check_options({"microbatch": 4}, "interleaved", ["microbatches", "ranks"])
    Traceback (most recent call last):
    ...
    stageline.common.errors.UnknownOption: neither Pipeline nor interleaved has an option 'microbatch' (did you mean
    'microbatches'?); interleaved takes chunks, group
    """
    who, known = "a schedule that is made", list[str]()
    if isinstance(given, str) and given == "auto":
        who, known = "schedule='auto'", ["chunks"]
    elif isinstance(given, str) and Path(given).suffix.lower() not in _FILES:
        family = find_family(given)
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
    given: str | Path | Schedule, layers: int, ranks: int | None, microbatches: int | None, **options: Any
) -> Schedule:
    """The schedule that was asked for."""
    file = isinstance(given, Schedule) or (isinstance(given, str | Path) and Path(given).suffix.lower() in _FILES)
    if not isinstance(given, str | Path | Schedule):
        raise StagelineError(
            f"schedule is a family such as '1f1b', a file, or what sl.schedule(…) gives, got {shorten(given)}"
        )
    if file:
        made = given if isinstance(given, Schedule) else read_schedule(given)
        if microbatches is not None and microbatches != made.microbatches:
            raise ScheduleError(f"microbatches={microbatches}, and the schedule has {made.microbatches}")
        if ranks is not None and ranks != made.ranks:
            raise ScheduleError(f"ranks={ranks}, and the schedule has {made.ranks}")
        return made
    family = find_family(str(given))
    if microbatches is None:
        raise ScheduleError(f"{family.name} needs microbatches=, the number of parts that a batch is cut into")
    if ranks is not None:
        return schedule(str(given), ranks, microbatches, **options)
    # Without a number of ranks, every layer is a stage, and the family says how many of them a rank holds.
    refused: list[ScheduleError] = []
    for count in _divisors(layers):
        try:
            made = schedule(str(given), count, microbatches, **options)
        except ScheduleError as error:
            refused.append(error)
            continue
        if made.stages == layers:
            return made
    if refused and len({str(error) for error in refused}) == 1 and len(refused) == len(_divisors(layers)):
        raise refused[0]  # it has nothing to do with the number of ranks
    last = f": {refused[-1]}" if refused else ""
    raise ScheduleError(f"{family.name} does not fit {layers} stages on any number of ranks{last}; give ranks=")


def _refuse_cuts(known: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse options that say how to cut the model, unless the family has one of that name."""
    asked = [name for name in options if name in _OF_SPLIT and name not in known]
    if asked:
        raise UnknownOption(
            f"{asked[0]}= says how to cut the model, and Pipeline cuts it by the count of its layers; cut it first: "
            f"sl.Pipeline(sl.split(model, stages=…, {'by' if asked[0] == 'split' else asked[0]}=…), …)"
        )


def _divisors(number: int) -> list[int]:
    return [count for count in range(number, 0, -1) if number % count == 0]


def count_layers(given: nn.Module | Staged | Sequence[nn.Module]) -> int:
    """How many stages there are, or how many layers or blocks to cut into stages."""
    if isinstance(given, nn.Module) and not isinstance(given, nn.Sequential):
        try:
            units = find_units(given)
        except NoStack:  # it is traced, into as many stages as are asked for
            return 1
        return sum(unit.block for unit in units) or len(units)
    return len(given)


def cut_once(given: Any, model: nn.Module, stages: int, example: Any = None) -> Any:
    """A model with a forward of its own as what `split` gives, so that it is cut at the same places ever after.

    What a look at the forward shows may depend on which of its tensors have memory.
    """
    if isinstance(given, Staged) or isinstance(model, nn.Sequential):
        return given
    return split(model, stages, example=example)


def cut(given: Any, model: nn.Module, stages: int, example: Any = None) -> list[nn.Sequential]:
    """Cut the layers evenly, the larger parts first; every part keeps the names of its layers."""
    if isinstance(given, Staged):
        if len(given) != stages:
            raise StagelineError(f"the schedule has {stages} stages and the model was split into {len(given)}")
        return given.parts()
    if not isinstance(model, nn.Sequential):
        return split(model, stages, example=example).parts()
    layers, exact = layers_of(model), not isinstance(given, nn.Sequential)
    if exact and stages != len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages and {len(layers)} were given; give as many, or an nn.Sequential to cut"
        )
    if stages > len(layers):
        raise StagelineError(
            f"the schedule has {stages} stages and the model only {len(layers)} layers to cut it into; "
            "use fewer ranks or chunks"
        )
    ends = pairwise(accumulate(even_sizes(len(layers), stages), initial=0))
    return parts_of([layers[start:stop] for start, stop in ends])


def cut_or_wait(
    given: Any, model: nn.Module, stages: int, example: Any
) -> tuple[Any, list[nn.Sequential], StagelineError | None]:
    """What `cut_once` returns, and its parts; no parts, and the reason, where only an example can tell where to cut."""
    try:
        once = cut_once(given, model, stages, example)
        return once, cut(once, model, stages, example), None
    except NoStack as error:
        return given, [], error


def cut_by_batch(
    given: Any, model: nn.Module, stages: int, shown: Any, parts: list[nn.Sequential]
) -> list[nn.Sequential]:
    """The parts of a model by the first microbatch; as they were, if there were any and it cannot be looked at."""
    where = next((tensor.device for tensor in model.parameters()), None)
    if where is not None:
        shown = pytree.tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, Tensor) else leaf, shown)
    try:
        return cut(given, model, stages, shown)
    except Exception:  # whatever the model says to being looked at
        if not parts:
            raise
        return parts


def only_microbatches(made: Schedule, count: int) -> Schedule:
    """The same order for the first microbatches alone, where a batch has fewer samples than parts."""
    if count == made.microbatches:
        return made
    programs: list[list[Any]] = []
    for program in made.programs:
        kept: list[Any] = []
        for entry in program:
            parts = [part for part in _parts(entry) if part.microbatch < count]
            kept += [entry] if len(parts) == len(_parts(entry)) else parts
        programs.append(kept)
    placement = Placement.of(made.ranks, made.placement.table, made.placement.direction[:count])
    return Schedule.from_programs(
        programs, placement=placement, training=made.training, name=made.name, options=made.options
    )


def forwards_of(made: Schedule) -> Schedule:
    """The same placement for inference: the forwards of the schedule, in its order."""
    programs = [[part for entry in program for part in _parts(entry) if part.kind == "F"] for program in made.programs]
    return Schedule.from_programs(programs, placement=made.placement, training=False, name=f"{made.name}, forwards")


def _parts(entry: Any) -> list[Any]:
    return [entry.forward, entry.backward] if hasattr(entry, "forward") else [entry]

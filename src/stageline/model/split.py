"""Cut a model into stages, without tracing it and without changing it; and the result, `Staged`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, cast

from torch import nn

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.common.units import Size, parse_sizes
from stageline.model import huggingface
from stageline.model.build.build import Description, describe
from stageline.model.compiled_models import unwrapped
from stageline.model.partition.partition import Partition, even_sizes, spans_of
from stageline.model.partition.schedule_cuts import CutConstraints, UnitCosts, cut_by_cost
from stageline.model.profile import Profile
from stageline.model.profiler import profile_units
from stageline.model.skips import check_units, parts_of
from stageline.model.stage_module.dry_run import CallOrder, DataFlow
from stageline.model.stage_module.forward_replay import Replay
from stageline.model.stage_module.stage_module import Original, StagePart
from stageline.model.stage_module.traced import TracedModel, trace
from stageline.model.units import NoStack, Unit, in_call_order, listed, uncalled, units_of
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import refuse_arrays

Spans = list[tuple[int, int]]
"""For each stage, its first unit and the one after its last."""

By: TypeAlias = str | Sequence[str] | Profile
WAYS = ("layers", "parameters", "time", "type:ClassOfBlock", "a list of names", "a profile")


def split(
    model: nn.Module | Callable[[], nn.Module],
    stages: int,
    *,
    by: By = "layers",
    layers_per_stage: Sequence[int] | None = None,
    stack: str | Sequence[str] = (),
    example: Any = None,
    ranks: int | None = None,
    placement: Literal["loop", "v"] | None = None,
    schedule: str | Schedule | None = None,
    memory: Size | Sequence[Size] | None = None,
    pinned: Mapping[str | int, int] | None = None,
    speed: Sequence[float] | None = None,
    everything: bool = False,
) -> Staged:
    """Cut a model into stages, without tracing it and without changing it.

    `model` may be a function that builds it: then nothing has memory yet, and a `Pipeline` creates only its own stages.

    `by` says where to cut: "layers", equal numbers of blocks, the larger stages first; "parameters", by their number;
    "time", by the time that the units take on `example`; a profile from `sl.profile`; "type:Block", between the modules
    of that class; or a list with the name of the first unit of each stage.

    A cut by parameters, time or profile makes the slowest rank as fast as possible. There are as many `ranks` as
    stages, unless given; otherwise stages are placed in a loop or a V (`placement`). `memory` is the limit of each rank
    (bytes, or "24GiB") for parameters, gradients and two optimizer states; `pinned` maps units to stages, and `speed`
    is the relative speed of each rank. With `schedule`, a family name or a `Schedule`, ranks and placement are the
    schedule's, and of several good cuts the one with the shortest simulated step is chosen.

    `layers_per_stage` is the number of blocks (or of all units) of each stage. `stack` names the list or lists of
    blocks; by default they are found automatically. `example` is a batch (a tuple of arguments, a dict of keywords, or
    one argument); the model runs on it once, to see the order in which it calls its units. It is needed if that differs
    from the order of definition, or if a unit is called twice, or if the forward uses its weights outside of it.
    `everything=True` passes the outputs of all units on, for a forward whose path depends on more than the form of its
    inputs.
    """
    model, recipe = _described(unwrapped(model))
    refuse_arrays(example, "the example")
    constraints = CutConstraints(ranks, placement, parse_sizes(memory), pinned, speed, schedule)
    stacks = _check_arguments(stages, by, layers_per_stage, stack, constraints, example)
    units, traced, flow, around = _called_units(model, stages, by, stacks, example)
    if stages > len(units):
        raise StagelineError(
            f"{type(model).__name__} has {len(units)} units ({listed([unit.name for unit in units])}), but {stages} "
            f"stages were requested; pass at most {len(units)}, or name smaller blocks with by='type:ClassOfBlock'"
        )
    costs = None if layers_per_stage is not None else _unit_costs(model, units, by, example)
    balance = None if costs is None else cut_by_cost(costs, stages, constraints, _even_spans(units, stages))
    spans = balance.stages if balance is not None else _spans(units, stages, by, layers_per_stage)
    return Staged(model, tuple(units), tuple(spans), balance, traced, flow, everything, around, recipe)


def _described(model: Any) -> tuple[nn.Module, Description[nn.Module] | None]:
    """Return a model, without memory if it is given as a function, and then also how to create its weights."""
    if isinstance(model, nn.Module):
        return model, None
    if not callable(model):
        raise StagelineError(f"split expects a model (nn.Module), got {shorten(model)}")
    recipe = describe(lambda: cast(nn.Module, unwrapped(model())))
    return recipe.model, recipe


def _called_units(
    model: nn.Module, stages: int, by: By, stacks: Sequence[str], example: Any
) -> tuple[list[Unit], TracedModel | None, DataFlow | None, tuple[str, ...]]:
    """Return the units in the order of their calls; trace the model if it has no units, or too few."""
    kind = by.removeprefix("type:") if isinstance(by, str) and by.startswith("type:") else ""
    try:
        defined = units_of(model, kind, stacks)
    except NoStack:
        if example is None:
            raise
        if by == "time" or isinstance(by, Profile):
            raise StagelineError(
                f"{type(model).__name__} has no units that can be measured separately, so it cannot be cut by time; "
                "use by='layers' or by='parameters', or pass an nn.Sequential"
            ) from None
        traced = trace(model, example)
        return traced.units(), traced, None, ()
    if isinstance(model, nn.Sequential):
        return defined, None, None, ()
    huggingface.prepare(model)
    check_units([(unit.name, unit.module) for unit in defined])
    units, flow = in_call_order(model, defined, example)
    around = uncalled(model, defined, units, example is not None)
    too_few = len(units) < stages and not any(unit.block for unit in units)
    if too_few and example is not None and isinstance(by, str) and by != "time":
        # The model calls too few modules to cut between; its graph may have more segments.
        traced = trace(model, example)
        return traced.units(), traced, None, ()
    return units, None, flow, around


def split_by_units(
    model: nn.Module | Callable[[], nn.Module], names: Sequence[str], counts: Sequence[int], example: Any = None
) -> Staged:
    """Cut a model into stages with these numbers of units; `names` are the units in the order of their calls."""
    model, recipe = _described(unwrapped(model))
    defined = units_of(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in modules]
    stacks = {name.rpartition(".")[0] for name in names}
    blocks = [unit.name for unit in defined if unit.block]
    unknown = [name for name in blocks if name.rpartition(".")[0] in stacks and name not in names]
    if missing or unknown:
        difference = f"no {missing[0]}" if missing else f"also {unknown[0]}"
        raise StagelineError(
            f"the plan is for {len(names)} units, {names[0]} … {names[-1]}, but {type(model).__name__} has {difference}"
            f"{nearest(missing[0], [unit.name for unit in defined]) if missing else ''}; plan the model that is split"
        )
    units = [Unit(name, modules[name], name in blocks) for name in names]
    flow: DataFlow | None = None
    around: tuple[str, ...] = ()
    if not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        check_units([(unit.name, unit.module) for unit in units])
        called, flow = in_call_order(model, units, example)
        if [unit.name for unit in called] != list(names):
            if example is not None:
                raise StagelineError(
                    f"the plan is for the units {listed(names)} in this order, but with the example the model calls "
                    f"{listed([unit.name for unit in called])}; pass an example like that of the plan"
                )
            flow = None  # the plan was made with inputs that differ from the library's example
        around = uncalled(model, defined, units, example is not None)
    return Staged(model, tuple(units), tuple(spans_of(counts)), None, None, flow, False, around, recipe)


def _spans(units: Sequence[Unit], stages: int, by: By, layers_per_stage: Sequence[int] | None) -> Spans:
    if layers_per_stage is not None:
        return _spans_by_counts(units, stages, list(layers_per_stage))
    if not isinstance(by, str | Profile):
        return _spans_by_names(units, stages, list(by))
    return _even_spans(units, stages)


def _even_spans(units: Sequence[Unit], stages: int) -> Spans:
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if stages > len(blocks):
        return spans_of(even_sizes(len(units), stages))
    return _spans_of_blocks(units, blocks, even_sizes(len(blocks), stages))


def _spans_of_blocks(units: Sequence[Unit], blocks: Sequence[int], sizes: Sequence[int]) -> Spans:
    """Give every stage this many blocks; other units go with the block before them, or with the first one."""
    starts = [0, *(blocks[first] for first in list(accumulate(sizes))[:-1])]
    return list(pairwise([*starts, len(units)]))


def _spans_by_counts(units: Sequence[Unit], stages: int, counts: list[int]) -> Spans:
    if len(counts) != stages:
        raise StagelineError(
            f"layers_per_stage has {len(counts)} numbers, but there are {stages} stages; pass one for each"
        )
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if sum(counts) == len(blocks):
        return _spans_of_blocks(units, blocks, counts)
    if sum(counts) == len(units):
        return spans_of(counts)
    raise StagelineError(
        f"layers_per_stage is {counts}, {sum(counts)} in total, but the model has {len(blocks)} blocks ({len(units)} "
        "units with those before and after them); it must add up to one of these"
    )


def _spans_by_names(units: Sequence[Unit], stages: int, names: list[str]) -> Spans:
    unit_names = [unit.name for unit in units]
    for name in names:
        if name not in unit_names:
            raise StagelineError(
                f"there is no unit {name!r}{nearest(name, unit_names)}; the units are {listed(unit_names)}"
            )
    starts = [unit_names.index(name) for name in names]
    if len(starts) == stages - 1:
        starts.insert(0, 0)
    if len(starts) != stages or starts != sorted(set(starts)):
        raise StagelineError(
            f"by= has {len(names)} unit names for {stages} stages; pass the first unit of each stage, in the order "
            "of the model"
        )
    starts[0] = 0
    return list(pairwise([*starts, len(units)]))


def _unit_costs(model: nn.Module, units: Sequence[Unit], by: By, example: Any) -> UnitCosts | None:
    """Return the cost of every unit for a cut by cost; memory is parameters, gradients and two optimizer states."""
    names, memory = [unit.name for unit in units], [4.0 * unit.bytes for unit in units]
    if by == "parameters":
        third = [unit.size / 3 for unit in units]
        return UnitCosts(names, [float(unit.size) for unit in units], third, third, third, memory)
    if by == "time":
        by = profile_units(model, units, example)
    if not isinstance(by, Profile):
        return None
    layers = {layer.name: layer for layer in by.layers}
    missing = [unit.name for unit in units if unit.name not in layers]
    if missing:
        raise StagelineError(
            f"the profile has no layer {missing[0]!r}{nearest(missing[0], layers)}; profile the model that is split"
        )
    calls = Counter(names)
    fields = ("seconds", "forward", "backward_input", "backward_weight")
    times = {field: [getattr(layers[name], field) / calls[name] for name in names] for field in fields}
    return UnitCosts(names=names, memory=memory, **times)


def _check_arguments(
    stages: Any, by: Any, layers_per_stage: Any, stack: Any, constraints: CutConstraints, example: Any
) -> list[str]:
    """Check the arguments of `split`, and return the names of the stacks."""
    check_positive("stages", stages)
    if constraints.ranks is not None:
        check_positive("ranks", constraints.ranks)
    _check_by(by)
    stacks = [stack] if isinstance(stack, str) and stack else list(stack) if _is_list(stack) or stack == "" else None
    if stacks is None or not all(isinstance(name, str) for name in stacks):
        raise StagelineError(f"stack must be the name of the list of blocks, or a list of names, got {shorten(stack)}")
    if layers_per_stage is not None:
        _check_counts(layers_per_stage)
        if by != "layers" and not (isinstance(by, str) and by.startswith("type:")):
            raise StagelineError(
                f"layers_per_stage= and by={shorten(by)} both define where to cut; pass only one of them"
            )
    used = [name for name, value in constraints._asdict().items() if value is not None and value != {}]
    if used and not (isinstance(by, Profile) or by in ("parameters", "time")):
        raise StagelineError(
            f"{', '.join(f'{name}=' for name in used)} {'needs' if len(used) == 1 else 'need'} costs: pass "
            "by='parameters', 'time' or a profile"
        )
    if by == "time" and example is None:
        raise StagelineError(
            "by='time' measures the model and needs a batch to run it on; pass example=, a tuple of the model's "
            "arguments, a dict of its keyword arguments, or its only argument, as large as one microbatch"
        )
    return stacks


def check_positive(name: str, value: Any) -> None:
    """Refuse anything but an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StagelineError(f"{name} must be an integer >= 1, got {shorten(value)}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_by(by: Any) -> None:
    if isinstance(by, Profile) or (_is_list(by) and all(isinstance(name, str) for name in by)):
        return
    if not isinstance(by, str) or not (by in WAYS[:3] or by.startswith("type:")):
        near = nearest(by, WAYS) if isinstance(by, str) else ""
        raise StagelineError(f"by must be one of {', '.join(WAYS)}, got {shorten(by)}{near}")


def _check_counts(counts: Any) -> None:
    if not _is_list(counts):
        raise StagelineError(
            "layers_per_stage must be a list with the number of blocks of each stage, such as [2, 3, 3]; got "
            f"{shorten(counts)}"
        )
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise StagelineError(
                f"layers_per_stage is {shorten(counts)}, and {shorten(count)} is not a number of layers: every stage "
                "needs at least one"
            )


@dataclass(frozen=True)
class Staged:
    """A model cut into stages, whose modules, names and tensors are still the model's own.

    >>> import stageline as sl
    >>> staged = sl.split(nn.Transformer(8, 2, 2, 2, 16, batch_first=True), stages=4)
    >>> print(staged)
    4 stages of Transformer
      0  encoder.layers.0                          600 parameters
      1  encoder.layers.1, encoder.norm            616 parameters
      2  decoder.layers.0                          904 parameters
      3  decoder.layers.1, decoder.norm            920 parameters
    >>> staged.state_dict().keys() == staged.model.state_dict().keys()
    True
    """

    model: nn.Module
    units: tuple[Unit, ...]
    """The units in the order in which the model calls them; a unit that is called twice appears twice."""
    cut: tuple[tuple[int, int], ...]
    """For each stage, its first unit and the one after its last."""
    balance: Partition | None = None
    """For a cut by cost, how even it is; `balance.chart()` draws one bar per rank."""
    traced: TracedModel | None = None
    """The graph, if the model had to be traced."""
    needs: DataFlow | None = None
    """The values that each unit is computed from, if an example showed them."""
    everything: bool = False
    """Whether all values cross all stage boundaries."""
    around: tuple[str, ...] = ()
    """Modules with parameters that belong to no unit, because the forward did not call them: every stage holds them,
    and runs them if a batch has inputs for them."""
    recipe: Description[Any] | None = field(default=None, repr=False)
    """How to create the weights, if the model was given as a function; its tensors have no memory yet."""

    @property
    def names(self) -> list[list[str]]:
        """The names of the units of each stage."""
        return [[unit.name for unit in self.units[start:stop]] for start, stop in self.cut]

    def parts(self) -> list[nn.Sequential]:
        """Return a module for each stage, which holds the stage's units under their own names."""
        if isinstance(self.model, nn.Sequential):
            return parts_of([[(unit.name, unit.module) for unit in self.units[start:stop]] for start, stop in self.cut])
        if self.traced is not None:
            return [self.traced.part(start, stop) for start, stop in self.cut]
        names = tuple(unit.name for unit in self.units)
        modules = {unit.name: Original(unit.module) for unit in self.units}
        defaults = huggingface.defaults_of(self.model)
        parts: list[nn.Sequential] = []
        for start, stop in self.cut:
            replay = Replay(CallOrder(names), start, stop, modules, defaults, self.everything)
            own = set(names[start:stop])
            if self.needs is not None:
                own |= self.needs.units_used(start, stop, stop == len(names))
            parts.append(StagePart(self.model, names, frozenset(own), replay))
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all stages, with the names of the whole model and in its order."""
        state = {name: value for part in self.parts() for name, value in part.state_dict().items()}
        return {name: state[name] for name in self.model.state_dict()}

    def __len__(self) -> int:
        return len(self.cut)

    def __str__(self) -> str:
        lines = [f"{len(self)} stages of {type(self.model).__name__}"]
        for stage, (start, stop) in enumerate(self.cut):
            units = self.units[start:stop]
            size = sum({id(unit.module): unit.size for unit in units}.values())
            lines.append(f"{stage:3}  {listed([unit.name for unit in units]):36} {size:8,} parameters")
        if self.around:
            lines.append(f"every stage holds {listed(self.around)}, which belongs to no unit because it was not called")
        return "\n".join(lines)

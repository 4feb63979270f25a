"""Cutting a model as it is into stages."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn

from stageline.common.errors import StagelineError, nearest, place_of, shorten
from stageline.common.units import Size, parse_sizes
from stageline.model import huggingface
from stageline.model.build.build import Description, describe
from stageline.model.compiled_models import eager, inner, unwrapped, warn_of_wrapped
from stageline.model.partition.partition import Partition
from stageline.model.partition.schedule_cuts import CutConstraints, UnitCosts, cut_by_cost
from stageline.model.profile.profile import Profile, profile_model
from stageline.model.skips import check_units, parts_of
from stageline.model.split_request import check_asked
from stageline.model.stage_module.boundary import arguments
from stageline.model.stage_module.forward_replay import Calls, Needs, Replay
from stageline.model.stage_module.stage_module import Original, StagePart
from stageline.model.stage_module.traced import Traced, trace
from stageline.model.units import NoStack, Unit, find_units, paths, refuse_lazy
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import refuse_arrays

Cut = list[tuple[int, int]]
"""For each stage, the calls that are its own: from the first to the one after the last."""

By: TypeAlias = str | Sequence[str] | Profile


@dataclass(frozen=True)
class Staged:
    """A model cut into stages, whose modules, names and tensors are still the model's own.

    >>> staged = split(nn.Transformer(8, 2, 2, 2, 16, batch_first=True), stages=4)
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
    """What is never cut, in the order in which the model calls it; what it calls twice is there twice."""
    cut: tuple[tuple[int, int], ...]
    """For each stage, its first unit and the one after its last."""
    balance: Partition | None = None
    """How even a cut by cost is: its `chart()` is a bar for every rank."""
    traced: Traced | None = None
    """The graph, where the model had to be traced."""
    needs: Needs | None = None
    """What each unit is computed from, as an example showed it."""
    everything: bool = False
    """Whether all values pass all cuts."""
    around: tuple[str, ...] = ()
    """Modules with parameters that are in no unit, since the forward was not seen to call them: every stage holds them,
    and runs them where a batch has the inputs for them."""
    recipe: Description[Any] | None = field(default=None, repr=False)
    """How to make the weights, where a function that builds the model was given; it has no memory yet."""

    @property
    def names(self) -> list[list[str]]:
        """The names of the units of each stage."""
        return [[unit.name for unit in self.units[start:stop]] for start, stop in self.cut]

    def parts(self) -> list[nn.Sequential]:
        """A module for each stage, which holds the stage's units under their own names."""
        if isinstance(self.model, nn.Sequential):
            return parts_of([[(unit.name, unit.module) for unit in self.units[start:stop]] for start, stop in self.cut])
        if self.traced is not None:
            return [self.traced.part(start, stop) for start, stop in self.cut]
        names = tuple(unit.name for unit in self.units)
        modules = {unit.name: Original(unit.module) for unit in self.units}
        defaults = huggingface.defaults_of(self.model)
        found: list[nn.Sequential] = []
        for start, stop in self.cut:
            replay = Replay(Calls(names), start, stop, modules, defaults, self.everything)
            own = set(names[start:stop])
            if self.needs is not None:
                own |= self.needs.held(start, stop, stop == len(names))
            found.append(StagePart(self.model, names, frozenset(own), replay))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of all stages, by the names of the whole model and in its order."""
        found = {name: value for part in self.parts() for name, value in part.state_dict().items()}
        return {name: found[name] for name in self.model.state_dict()}

    def __len__(self) -> int:
        """How many stages there are."""
        return len(self.cut)

    def __str__(self) -> str:
        """The units of every stage, and how many parameters they have."""
        lines = [f"{len(self)} stages of {type(self.model).__name__}"]
        for number, (start, stop) in enumerate(self.cut):
            units = self.units[start:stop]
            size = sum({id(unit.module): unit.size for unit in units}.values())
            lines.append(f"{number:3}  {_listed([unit.name for unit in units]):36} {size:8,} parameters")
        if self.around:
            lines.append(f"every stage holds {_listed(self.around)}, which is in no unit: it was not called")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


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

    `model` may be a function that builds it: then nothing has memory yet, and a `Pipeline` makes its own stages alone.

    `by` says where: "layers", as many blocks in every stage, the larger parts first; "parameters", by their number;
    "time", by what the units take on `example`; a profile that `sl.profile` made; "type:Block", the modules of that
    class; or the names of the first unit of each stage. By parameters, time or a profile, the slowest of the `ranks`
    (as many as stages unless given, placed in a loop or a V) is as fast as can be, with at most `memory` on each
    (bytes, or "24GiB") for parameters, gradients and two states of an optimizer, with units `pinned` to stages, and
    with ranks whose `speed` differs. With `schedule`, a family or what `sl.schedule` gives, ranks and placement are its
    own, and of several good cuts, the one with equal counts among them, that is taken whose step is shortest in
    simulation. `layers_per_stage` gives the number of blocks (or of all units) of each stage. `stack` names the list or
    lists of blocks, which are found otherwise. `example` is a batch (a tuple of arguments, a dict of keywords, or one
    argument) that the model is run on once, to see in which order it calls its units; needed where that is not the
    order in which it defines them, or where it calls one of them twice, or uses the weights of one outside of it.
    `everything=True` passes the outputs of all units on, for forwards whose way depends on more than the form of their
    inputs.
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module) and callable(model):
        build = model
        recipe = describe(lambda: cast(nn.Module, unwrapped(build())))
        staged = split(
            recipe.model, stages, by=by, layers_per_stage=layers_per_stage, stack=stack, example=example, ranks=ranks,
            placement=placement, schedule=schedule, memory=memory, pinned=pinned, speed=speed, everything=everything,
        )  # fmt: skip
        return replace(staged, recipe=recipe)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"split takes a model, an nn.Module, got {shorten(model)}")
    refuse_arrays(example, "the example")
    ask = CutConstraints(ranks, placement, parse_sizes(memory), pinned, speed, schedule)
    stacks = check_asked(stages, by, layers_per_stage, stack, ask, example)
    traced, needs = None, None
    around: tuple[str, ...] = ()
    try:
        units = _units(model, by, stacks)
    except NoStack:
        if example is None:
            raise
        if by == "time" or isinstance(by, Profile):
            raise StagelineError(
                f"{type(model).__name__} has no units that can be measured on their own, so it cannot be cut by time; "
                "cut by='layers' or 'parameters', or give an nn.Sequential"
            ) from None
        traced = trace(model, example)
        units = traced.units()
    if traced is None and not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        check_units([(unit.name, unit.module) for unit in units])
        defined = units
        units, needs = _in_order(model, units, example)
        around = _left_out(model, defined, units, example is not None)
        if _too_few(units, stages) and example is not None and isinstance(by, str) and by != "time":
            # What it does not call cannot be cut between; its graph may have more.
            traced, needs, around = trace(model, example), None, ()
            units = traced.units()
    if stages > len(units):
        raise StagelineError(
            f"{type(model).__name__} has {len(units)} units ({_listed([unit.name for unit in units])}), and {stages} "
            f"stages are asked for; give at most {len(units)}, or name smaller blocks with by='type:ClassOfBlock'"
        )
    work = None if layers_per_stage is not None else _costs(model, units, by, example)
    if work is not None:
        balance = cut_by_cost(work, stages, ask, _evenly(units, stages))
        return Staged(model, tuple(units), tuple(balance.stages), balance, traced, needs, everything, around)
    cut = _cut(units, stages, by, layers_per_stage)
    return Staged(model, tuple(units), tuple(cut), None, traced, needs, everything, around)


def split_by_units(
    model: nn.Module | Callable[[], nn.Module], names: Sequence[str], counts: Sequence[int], example: Any = None
) -> Staged:
    """Cut a model into stages of so many units each; the units are known by name, in the order of their calls.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    >>> split_by_units(model, ["0", "1", "2"], [2, 1]).names
    [['0', '1'], ['2']]
    """
    model = cast("nn.Module | Callable[[], nn.Module]", unwrapped(model))
    if not isinstance(model, nn.Module):
        build = model
        recipe = describe(lambda: cast(nn.Module, unwrapped(build())))
        return replace(split_by_units(recipe.model, names, counts, example), recipe=recipe)
    defined = _units(model, "layers", ())
    known = dict(paths(model))
    missing = [name for name in names if name not in known]
    stacks = {name.rpartition(".")[0] for name in names}
    beside = [unit.name for unit in defined if unit.block and unit.name.rpartition(".")[0] in stacks]
    unknown = [name for name in beside if name not in names]
    if missing or unknown:
        other = f"no {missing[0]}" if missing else f"{unknown[0]} beside them"
        raise StagelineError(
            f"the plan is for {len(names)} units, {names[0]} … {names[-1]}, and {type(model).__name__} has {other}"
            f"{nearest(missing[0], [unit.name for unit in defined]) if missing else ''}; plan the model that is split"
        )
    blocks = {unit.name for unit in defined if unit.block}
    units = [Unit(name, known[name], name in blocks) for name in names]
    needs: Needs | None = None
    around: tuple[str, ...] = ()
    if not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        check_units([(unit.name, unit.module) for unit in units])
        seen, needs = _in_order(model, units, example)
        if [unit.name for unit in seen] != list(names):
            if example is not None:
                raise StagelineError(
                    f"the plan is for the units {_listed(names)} in this order, and with the example the model calls "
                    f"{_listed([unit.name for unit in seen])}; give an example like that of the plan"
                )
            needs = None  # the library's own inputs are not those that it was planned with
        around = _left_out(model, defined, units, example is not None)
    return Staged(model, tuple(units), tuple(_spans(counts)), None, None, needs, False, around)


def _left_out(model: nn.Module, defined: Sequence[Unit], units: Sequence[Unit], with_example: bool) -> tuple[str, ...]:
    """The modules with parameters of their own that are in no unit; say so where the user gave no example."""
    called = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    around = [unit for unit in defined if any(id(parameter) not in called for parameter in unit.module.parameters())]
    if around and units and not with_example:
        size = sum(unit.size for unit in around)
        warnings.warn(
            f"{_listed([unit.name for unit in around])} of {type(model).__name__}, {size:,} parameters, is in no unit: "
            "the model does not call it with the inputs that its library gives it, and every stage runs it where a "
            "batch has others; give example=, a batch with all inputs, to make it units",
            stacklevel=3,
        )
    return tuple(unit.name for unit in around)


def _units(model: nn.Module, by: By, stack: Sequence[str]) -> list[Unit]:
    if isinstance(model, nn.Sequential) and not stack and not (isinstance(by, str) and by.startswith("type:")):
        return [Unit(name, module, True) for name, module in model._modules.items() if module is not None]
    kind = by.removeprefix("type:") if isinstance(by, str) and by.startswith("type:") else ""
    units = [Unit(*inner(unit.name, unit.module), unit.block) for unit in find_units(model, stack, kind)]
    warn_of_wrapped(model)
    return units


def _too_few(units: Sequence[Unit], stages: int) -> bool:
    """Whether a model without a stack calls fewer modules than there are to be stages."""
    return len(units) < stages and not any(unit.block for unit in units)


def _in_order(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], Needs | None]:
    """The units in the order of their calls, and what they are computed from, as far as that is known."""
    if example is not None:
        try:
            return _as_called(model, units, example)
        except Exception as error:
            if any(tensor.is_meta for tensor in model.parameters()):
                raise _no_example(model, error) from error
        try:  # what cannot be looked at without computing may run all the same
            return _as_run(model, units, example), None
        except Exception as error:
            raise _no_example(model, error) from error
    guess = huggingface.example_of(model)
    with suppress(Exception):  # it is not for every model
        return (units, None) if guess is None else _as_called(model, units, guess)
    return units, None


def _no_example(model: nn.Module, error: Exception) -> StagelineError:
    return StagelineError(
        f"{type(model).__name__} cannot run on the example, {shorten(error, 200)}{place_of(error)}; give a tuple of "
        "its arguments, a dict of keywords, or its only argument"
    )


def _as_run(model: nn.Module, units: list[Unit], example: Any) -> list[Unit]:
    """The units in the order in which a forward that computes calls them; buffers and random numbers stay."""
    called: list[Unit] = []
    args, kwargs = arguments(example)
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    hooks = [unit.module.register_forward_pre_hook(lambda *_, unit=unit: called.append(unit)) for unit in units]
    try:
        frame = eager(model, [unit.module for unit in units])
        with frame, torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*args, **{**huggingface.defaults_of(model), **kwargs})
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in kept:
            buffer.copy_(value)
    return called  # what is never called is in no stage's way


def _as_called(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], Needs]:
    """The units in the order in which a forward calls them, as often as it does; nothing is computed."""
    known = {unit.name: unit for unit in units}
    replay = Replay(
        Calls(()), 0, 0, {unit.name: Original(unit.module) for unit in units}, huggingface.defaults_of(model)
    )
    part = StagePart(model, tuple(known), frozenset(), replay)
    names, needs = replay.order(part.frame, example)
    return [known[name] for name in names], needs


def _cut(units: Sequence[Unit], stages: int, by: By, layers_per_stage: Sequence[int] | None) -> Cut:
    if layers_per_stage is not None:
        return _by_counts(units, stages, list(layers_per_stage))
    if not isinstance(by, str | Profile):
        return _by_names(units, stages, list(by))
    return _evenly(units, stages)


def even_sizes(count: int, parts: int) -> list[int]:
    """As many in every part, the larger parts first.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    return [count // parts + (part < count % parts) for part in range(parts)]


def _evenly(units: Sequence[Unit], stages: int) -> Cut:
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if stages > len(blocks):
        return _spans(even_sizes(len(units), stages))
    return _at_blocks(units, blocks, even_sizes(len(blocks), stages))


def _spans(sizes: Sequence[int]) -> Cut:
    return list(pairwise(accumulate(sizes, initial=0)))


def _at_blocks(units: Sequence[Unit], blocks: Sequence[int], sizes: Sequence[int]) -> Cut:
    """So many blocks in every stage; what is not a block goes with the block before it, or with the first one."""
    starts = [0, *(blocks[first] for first in list(accumulate(sizes))[:-1])]
    return list(pairwise([*starts, len(units)]))


def _by_counts(units: Sequence[Unit], stages: int, counts: list[int]) -> Cut:
    if len(counts) != stages:
        raise StagelineError(
            f"layers_per_stage has {len(counts)} numbers, and there are {stages} stages: give one for each"
        )
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if sum(counts) == len(blocks):
        return _at_blocks(units, blocks, counts)
    if sum(counts) == len(units):
        return _spans(counts)
    raise StagelineError(
        f"layers_per_stage is {counts}, {sum(counts)} in all, and the model has {len(blocks)} blocks ({len(units)} "
        "units with what is before and after them); let it add up to one of these"
    )


def _by_names(units: Sequence[Unit], stages: int, names: list[str]) -> Cut:
    known = [unit.name for unit in units]
    for name in names:
        if name not in known:
            raise StagelineError(f"there is no unit {name!r}{nearest(name, known)}; the units are {_listed(known)}")
    starts = [known.index(name) for name in names]
    if len(starts) == stages - 1:
        starts.insert(0, 0)
    if len(starts) != stages or starts != sorted(set(starts)):
        raise StagelineError(
            f"by names {len(names)} units for {stages} stages: give the first unit of each, in the order of the model"
        )
    starts[0] = 0
    return list(pairwise([*starts, len(units)]))


def _costs(model: nn.Module, units: Sequence[Unit], by: By, example: Any) -> UnitCosts | None:
    """What every unit costs, where a cut is to be by cost; parameters, gradients and two states of an optimizer."""
    names, memory = [unit.name for unit in units], [4.0 * unit.bytes for unit in units]
    if by == "parameters":
        third = [unit.size / 3 for unit in units]
        return UnitCosts(names, [float(unit.size) for unit in units], third, third, third, memory)
    if by == "time":
        by = profile_units(model, units, example)
    if not isinstance(by, Profile):
        return None
    measured = {layer.name: layer for layer in by.layers}
    missing = [unit.name for unit in units if unit.name not in measured]
    if missing:
        raise StagelineError(
            f"the profile has no layer {missing[0]!r}{nearest(missing[0], measured)}; profile the model that is split"
        )
    calls = Counter(names)
    parts = ("seconds", "forward", "backward_input", "backward_weight")
    times = {part: [getattr(measured[name], part) / calls[name] for name in names] for part in parts}
    return UnitCosts(names=names, memory=memory, **times)


def profile_units(model: nn.Module, units: Sequence[Unit], example: Any, **how: Any) -> Profile:
    """Measure every unit once, on its own."""
    refuse_lazy(model)
    args, kwargs = arguments(example)
    layers = {id(unit.module): (unit.name, unit.module) for unit in reversed(units)}
    with eager(model, [unit.module for unit in units]):
        return profile_model(
            model, args, {**huggingface.defaults_of(model), **kwargs}, layers=list(reversed(layers.values())), **how
        )


def profile(model: nn.Module, example: Any, *, repeats: int = 5, warmup: int = 2) -> Profile:
    """Measure what the units of a model cost: F, I and W apart, and the bytes that they keep.

    `example` is one microbatch: a tuple of arguments, a dict of keywords, or the only argument.

    >>> import torch
    >>> found = profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(3, 4), repeats=1, warmup=0)
    >>> [(layer.name, layer.parameters) for layer in found.layers]
    [('0', 80), ('1', 40)]
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"profile takes a model, an nn.Module, got {shorten(model)}")
    refuse_lazy(model)
    refuse_arrays(example, "the example")
    units = _units(model, "layers", ())
    if not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        with suppress(StagelineError):  # what is measured does not depend on it
            units, _ = _in_order(model, units, example)
    return profile_units(model, units, example, repeats=repeats, warmup=warmup)

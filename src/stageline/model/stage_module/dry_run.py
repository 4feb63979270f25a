"""Run a forward without computing anything, to learn which values every unit is computed from.

Every unit returns placeholder tensors, which remember where they come from. So it is known which values have to cross a
boundary: in a stack of blocks only the hidden states, in an encoder-decoder also the encoder's output, in a U-Net also
the skip connections.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model import huggingface
from stageline.model._torch_private import (
    map_tensors,
    remove_forward_hooks,
    tensors_in,
    tree_flatten,
    tree_unflatten,
    version_of,
    without_dispatch_modes,
)
from stageline.model.stage_module.boundary import GIVE_EXAMPLE, INPUT, PARAMETER, BoundaryValues, name_of_value
from stageline.model.stage_module.placeholder import (
    InplaceWrites,
    PlaceholderTensor,
    ValueNames,
    on_meta,
    placeholders_for_meta,
    placeholders_in,
    writes_allowed,
)
from stageline.model.stage_module.side_effects import Attributes, InplaceHistory, new_attributes, tensor_attributes
from stageline.tensors.pytree import learn
from stageline.tensors.random_numbers import generator_alone

_SHAPE_ERRORS = ("cannot be multiplied", "reduction dim", "must match", "size mismatch", "normalized_shape", "channels")
"""Parts of torch's messages for shapes that do not match, rather than for operators that need contents."""


@dataclass
class UnitTwins:
    """The units of a model, and copies of them on the meta device, which are made on demand."""

    modules: Mapping[str, Any]
    """The units, each as an `Original`; they may be on the meta device."""
    kept: dict[str, Attributes] = field(default_factory=dict)
    """Attributes in which units keep tensors of their forward; the frame of another stage cannot read those."""
    _twins: dict[str, nn.Module] = field(default_factory=dict)

    def run(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run the twin of a unit on meta tensors."""
        twin = self._twin(name)
        before = tensor_attributes(twin)
        with without_dispatch_modes():
            output = twin(*args, **kwargs)
        self.kept[name] = self.kept.get(name, frozenset()).union(new_attributes(before, twin))
        return output

    def prepare(self) -> None:
        """Copy all units now, before something changes them that dry runs must not see, such as sharding."""
        for name in self.modules:
            self._twin(name)

    def _twin(self, name: str) -> nn.Module:
        if name not in self._twins:
            self._twins[name] = meta_twin(self.modules[name].module)
        return self._twins[name]


@dataclass
class DryRun:
    """A forward in progress in which every unit returns placeholders."""

    units: UnitTwins
    arrived: BoundaryValues
    flow: DataFlow
    calls: CallOrder | None = None
    """The known order of calls, if any."""
    history: InplaceHistory | None = None
    """In-place changes, if they are to be recorded."""
    called: list[str] = field(default_factory=list)
    """The calls so far."""
    inside_unit = False

    def visit(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return placeholders for the output of a unit."""
        previous_calls = self.called.count(name)
        position = len(self.called) if self.calls is None else self.calls.position(name, previous_calls)
        self.called.append(name)
        self.flow.of_call[position] = placeholders_in((args, kwargs))
        if self.history is not None:
            self.history.use(position, (args, kwargs))
        lists = huggingface.collected()
        before = huggingface.lengths(lists)
        output = self._meta_output(name, position, args, kwargs)
        learn(output)
        leaves, spec = tree_flatten((output, huggingface.since(before)))
        for kind, size in before.items():
            del lists[kind][size:]
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), "cpu")
        placeholders = [
            PlaceholderTensor.of(leaf, device, frozenset({name_of_value(position, index)}))
            if isinstance(leaf, Tensor)
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        output, collected = tree_unflatten(placeholders, spec)
        huggingface.collect(collected)
        return output

    def _meta_output(self, name: str, position: int, args: Any, kwargs: Any) -> Any:
        """Return the output of a unit on the meta device; if it cannot run there, its first input instead."""
        # Every tensor gets a version of its own, so that a change of one is not mistaken for a change of another.
        meta_args, meta_kwargs = map_tensors(lambda tensor: on_meta(tensor).data, (args, kwargs))
        metas = tensors_in((meta_args, meta_kwargs))
        versions = list(map(version_of, metas))
        try:
            output = self.units.run(name, meta_args, meta_kwargs)
        except Exception as error:
            if any(words in str(error) for words in _SHAPE_ERRORS) or not metas:
                raise
            self.flow.unknown_calls.add(position)
            return metas[0]
        self._record_changes(position, (args, kwargs), versions, list(map(version_of, metas)))
        return output

    def _record_changes(self, position: int, inputs: Any, before: Sequence[int], after: Sequence[int]) -> None:
        if self.history is None or before == after:
            return
        input_names = {id(leaf): f"{INPUT}.{index}" for index, leaf in enumerate(self.arrived.leaves)}
        for tensor, old, new in zip(tensors_in(inputs), before, after, strict=True):
            if old != new:
                self.history.change(tensor, position, input_names.get(id(tensor)))

    def trace_flow(self, frame: nn.Module, boundaries: Sequence[int], everything: bool) -> None:
        """Run the frame with a known call order; refuse in-place changes that later stages would miss."""
        assert self.calls is not None
        names = self.calls.names
        args, kwargs = self.arrived.inputs(placeholders=True)
        writes = InplaceWrites()
        self.history, flow = writes.history, self.flow
        try:
            with torch.no_grad(), generator_alone(), torch.random.fork_rng(devices=[]), writes_allowed(writes):
                output = frame(*args, **kwargs)
                writes.history.use(len(names), output)
                flow.of_output = placeholders_in(output) | writes.into_real
                flow.copied = frozenset(writes.changed)
                flow.everything = everything
        except CallOrderError:
            raise
        except Exception as error:
            warnings.warn(
                f"could not infer what crosses the stage boundaries ({type(error).__name__}: {error}); "
                "the outputs of all units are passed on",
                stacklevel=2,
            )
            flow.everything = True
            flow.unknown_calls.update(range(len(names)))
        writes.history.check(names, boundaries, writes.changed)

    def trace_order(self, frame: nn.Module) -> None:
        """Run the frame with an unknown call order."""
        args, kwargs = self.arrived.inputs(placeholders=True)
        try:
            with (
                torch.no_grad(),
                generator_alone(),  # no other stage draws meanwhile
                torch.random.fork_rng(devices=[]),
                placeholders_for_meta(frame, (args, kwargs)),
                writes_allowed() as writes,
            ):
                self.flow.of_output = placeholders_in(frame(*args, **kwargs)) | writes.into_real
        except Exception:
            called = {id(self.units.modules[name].module) for name in self.called}
            if {id(unit.module) for unit in self.units.modules.values()} - called:
                raise  # code after the last unit does not matter for the order


def meta_twin(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device without copying its tensors."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    twin = copy.deepcopy(module, memo)
    for submodule in twin.modules():  # the user's hooks must not see dry runs
        remove_forward_hooks(submodule, keep=huggingface.collects)
    return twin


class CallOrderError(StagelineError):
    """A forward that calls its units in another order, or more often, than expected."""


@dataclass(frozen=True)
class CallOrder:
    """The units of a model in the order in which its forward calls them; a unit that is called twice appears twice."""

    names: tuple[str, ...]

    def position(self, name: str, previous_calls: int) -> int:
        """Return the position of a call, given the number of earlier calls of the same unit."""
        position = _positions(self.names).get((name, previous_calls))
        if position is None:
            raise CallOrderError(
                f"the model calls {name} {previous_calls + 1} times in one forward, but {self.names.count(name)} were "
                f"expected; {GIVE_EXAMPLE} to record the calls"
            )
        return position


@lru_cache(maxsize=64)
def _positions(names: tuple[str, ...]) -> dict[tuple[str, int], int]:
    return {(name, names[:position].count(name)): position for position, name in enumerate(names)}


@dataclass
class DataFlow:
    """The values that every call of a unit is computed from."""

    of_call: dict[int, ValueNames] = field(default_factory=dict)
    of_output: ValueNames = frozenset()
    copied: ValueNames = frozenset()
    """Values that the forward modifies in place."""
    everything: bool = False
    """Whether all values cross all boundaries, because the flow is unknown."""
    changed_by_units: set[str] = field(default_factory=set)
    """Values that units of this stage modify in place, and its frame does not."""
    unknown_calls: set[int] = field(default_factory=set)
    """Calls that may modify their inputs in place."""

    def after(self, position: int) -> ValueNames:
        """Return the values that the calls from a position on, and the output, are computed from."""
        later = (names for call, names in self.of_call.items() if call >= position)
        return frozenset().union(*later, self.of_output)

    def units_used(self, start: int, stop: int, last: bool) -> set[str]:
        """Return the units whose tensors the frame uses for what a stage computes."""
        names = frozenset().union(*(self.of_call.get(call, frozenset()) for call in range(start, stop)))
        names |= self.of_output if last else frozenset()
        return {name.removeprefix(PARAMETER).split("/")[0] for name in names if name.startswith(PARAMETER)}

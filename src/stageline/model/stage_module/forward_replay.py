"""Run the forward of a whole model on one stage, with only the stage's own units computing.

The first time that inputs of some form arrive, a dry run finds out which values later stages need.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model import huggingface
from stageline.model._torch_private import tensors_in
from stageline.model.stage_module.boundary import GIVE_EXAMPLE, PARAMETER, BoundaryValues, check_arguments
from stageline.model.stage_module.dry_run import CallOrder, CallOrderError, DataFlow, DryRun, UnitTwins
from stageline.model.stage_module.placeholder import PlaceholderTensor, ValueNames, on_meta, placeholders_in
from stageline.model.stage_module.shared_state import SharedStateWatch
from stageline.model.stage_module.side_effects import Counters, SideEffects, UnchangedInputs

Draw = Callable[..., Any]
"""Calls something that may draw random numbers, given its name."""


class ForeignReads(Protocol):
    """Calls a unit or a frame (named "") and refuses reads of other stages' parameters."""

    def call(self, name: str, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""

    def look(self, name: str, output: Any, inputs: Any = ()) -> None:
        """Check its output."""


class KeptAttributeError(CallOrderError):
    """A forward that reads an attribute in which a unit keeps a tensor."""


class _NextStageReached(BaseException):
    """The forward has reached the first unit of a later stage. Nothing in a model may catch it."""


@dataclass
class Replay:
    """The forward of one stage: which calls are its own, and what happens in the others."""

    calls: CallOrder
    start: int
    stop: int
    modules: dict[str, Any]
    """The units by name, each as an `Original`; they may be on the meta device."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model that a batch may omit."""
    everything: bool = False
    """Whether to pass on all values, needed or not."""
    draw: Draw | None = None
    """How units draw random numbers; None for torch's own way."""
    counters: Counters = field(default_factory=lambda: Counters([]))
    """Numbers that the frame changes."""
    watch: SharedStateWatch | None = None
    """Checks what units share with those of other stages."""
    foreign: ForeignReads | None = None
    """Checks what units and the frame read of other stages' parameters."""
    twins: UnitTwins = field(init=False)
    _flows: dict[str, DataFlow] = field(default_factory=dict)
    """By the form of the inputs."""
    _current: _StageRun | DryRun | None = None

    def __post_init__(self) -> None:
        self.twins = UnitTwins(self.modules)

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which receives the model's inputs."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which returns the model's output."""
        return self.stop == len(self.calls.names)

    @property
    def is_whole_model(self) -> bool:
        """Whether this is the only stage."""
        return self.first and self.last

    def run(self, frame: nn.Module, value: Any) -> Any:
        """Run the stage on the model's inputs, or on what the previous stage passed on."""
        if self.first:
            huggingface.refuse_cache(value, self.defaults)
            arrived = BoundaryValues.first(value, self.defaults)
        else:
            arrived = BoundaryValues.read(value)
        form = f"{arrived.form()} {frame.training}"
        is_new_form = form not in self._flows and not self.is_whole_model
        if is_new_form:
            if self.first:
                check_arguments(frame, arrived)
            self._flows[form] = self._find_flow(frame, arrived)
        flow = self._flows.get(form, DataFlow())
        arrived.copied = flow.copied
        self._current = current = _StageRun(self, arrived, flow, is_new_form)
        args, kwargs = arrived.inputs()
        try:
            output = frame(*args, **kwargs) if self.foreign is None else self.foreign.call("", frame, *args, **kwargs)
        except _NextStageReached:
            message = current.passed.write()
            if self.foreign is not None:
                self.foreign.look("", message)
            return message
        finally:
            self._current = None
        if not self.last:
            raise StagelineError(
                f"the forward of the model returned before it called {self.calls.names[self.stop]}, the first unit of "
                f"the next stage; {GIVE_EXAMPLE} to record the order of its calls"
            )
        missing = placeholders_in(output)
        if missing:
            raise StagelineError(f"the output of the model needs {self.describe_missing(missing)}")
        return output

    def _find_flow(self, frame: nn.Module, arrived: BoundaryValues) -> DataFlow:
        """Find out by a dry run what crosses the boundaries; refuse numbers that change in every forward."""
        before = self.counters.read()
        flow = self._dry_run(frame, arrived)
        changed = self.counters.changed(before)
        if changed:  # once, or in every forward
            between = self.counters.read()
            self._dry_run(frame, arrived)
            self.counters.refuse(changed & self.counters.changed(between))
        self.counters.restore(before)
        return flow

    def _dry_run(self, frame: nn.Module, arrived: BoundaryValues) -> DataFlow:
        self._current = dry_run = DryRun(self.twins, arrived, DataFlow(), self.calls)
        try:
            dry_run.trace_flow(frame, (self.start, self.stop), self.everything)
        finally:
            self._current = None
        return dry_run.flow

    def order(self, frame: nn.Module, value: Any) -> tuple[list[str], DataFlow]:
        """Return the units in the order in which the forward calls them, and the data flow, by a dry run."""
        self._current = dry_run = DryRun(self.twins, BoundaryValues.first(value, self.defaults), DataFlow())
        try:
            dry_run.trace_order(frame)
        finally:
            self._current = None
        return dry_run.called, dry_run.flow

    def describe_missing(self, names: ValueNames) -> str:
        """Return the missing values in words, and what to do."""
        described = [self._describe_value(name) for name in sorted(names)]
        if any(name.startswith(PARAMETER) for name in names):
            return f"{', '.join(described)}, which another stage holds; {GIVE_EXAMPLE} so that this stage holds it too"
        return (
            f"{', '.join(described)}, which the earlier stages did not pass on: the forward takes a different path "
            "than when it was recorded; split(…, everything=True) passes on all values"
        )

    def _describe_value(self, name: str) -> str:
        if name.startswith(PARAMETER):
            return name.removeprefix(PARAMETER).replace("/", ".")
        return f"the output of {self.calls.names[int(name.split('.')[0])]}" if name[0].isdigit() else f"the {name}"

    def visit(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle the call of a unit, or of a module without parameters that draws random numbers."""
        current = self._current
        if current is None:
            return real(*args, **kwargs)
        if name not in self.modules:  # it runs on every stage
            return self.call_drawing(name, real, args, kwargs)
        return current.visit(name, real, args, kwargs)

    def call_drawing(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call something that may draw random numbers."""
        return real(*args, **kwargs) if self.draw is None else self.draw(name, lambda: real(*args, **kwargs))

    def outside(self) -> bool:
        """Whether the forward is running outside of its units."""
        return self._current is not None and not self._current.inside_unit

    def tensor(self, name: str, attribute: str, value: Tensor, held: bool) -> Tensor:
        """Return a tensor of a unit for use by the frame: itself if the stage holds it, else a placeholder."""
        current = self._current
        if current is None or current.inside_unit or (held and not isinstance(current, DryRun)):
            return value
        return PlaceholderTensor.of(on_meta(value), value.device, frozenset({f"{PARAMETER}{name}/{attribute}"}))

    def refuse_kept(self, name: str, path: str, attribute: str) -> None:
        """Refuse to let the frame read an attribute in which a unit of another stage keeps a tensor."""
        if (path, attribute) in self.twins.kept.get(name, ()):
            raise KeptAttributeError(
                f"the forward reads {'.'.join(filter(None, (name, path, attribute)))}, which {name} stores as an "
                "attribute in its forward, but another stage runs that; return the value as well"
            )


@dataclass
class _StageRun:
    """A forward in progress in which the stage's own units compute."""

    replay: Replay
    arrived: BoundaryValues
    flow: DataFlow
    is_new_form: bool
    """Whether inputs of this form have arrived for the first time."""
    inside_unit: bool = False
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    call_counts: Counter[str] = field(default_factory=Counter)
    changed_by_frame: set[str] = field(default_factory=set)
    """Values that the frame modified in place."""
    checkpoints: _Checkpoints = field(default_factory=lambda: _Checkpoints())
    passed: BoundaryValues = field(init=False)
    """What the next stage receives."""

    def __post_init__(self) -> None:
        arrived = self.arrived
        self.passed = BoundaryValues(arrived.tree, arrived.leaves, dict(arrived.values), list(arrived.outputs))

    def visit(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of the stage's own units, or return what an earlier stage passed on."""
        replay = self.replay
        position = replay.calls.position(name, self.call_counts[name])
        self.call_counts[name] += 1
        if self.is_new_form:
            self.checkpoints.check(name, replay.start <= position < replay.stop)
        if position < replay.start:
            output, collected = self.arrived.output(position, name)
            _refuse_hooks(output, name, replay.outside)
            huggingface.collect(collected)
            return output
        if position >= replay.stop:
            self._select_passed()
            raise _NextStageReached
        if kwargs or any(type(argument) is not Tensor for argument in args):  # plain tensors are no placeholders
            missing = placeholders_in((args, kwargs))
            if missing:
                raise StagelineError(f"{name} needs {replay.describe_missing(missing)}")
        if self.grad_enabled and not torch.is_grad_enabled() and _checkpoint_frame("forward") is not None:
            raise StagelineError(
                f"the forward runs {name} in a checkpoint with use_reentrant=True, which hides its gradients from the "
                "stage; use use_reentrant=False, or recompute= of the pipeline"
            )
        before = huggingface.lengths(huggingface.collected())
        if self.is_new_form:
            output = self._checked_call(name, position, real, args, kwargs)
        else:
            output = self._call(name, real, args, kwargs)
        if not replay.last:
            self.passed.store(position, name, (output, huggingface.since(before)), self.flow.copied)
        return output

    def _checked_call(self, name: str, position: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit for the first time with inputs of this form, and check its side effects."""
        effects = SideEffects(name, real, (args, kwargs), self.replay.twins.kept.get(name, frozenset()))
        versions = self.passed.changed(self.arrived)
        unchanged = None
        if not self.replay.last and position in self.flow.unknown_calls:
            crossing = tensors_in([*self.passed.values.values(), *self.arrived.leaves])
            unchanged = UnchangedInputs(name, (args, kwargs), crossing)
        output = self._call(name, real, args, kwargs)
        effects.check(output)
        if unchanged is not None:
            unchanged.check()
        self._record_changes(versions)
        return output

    def _call(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        watch, foreign = self.replay.watch, self.replay.foreign
        if watch is not None:
            watch.before(name)
        if foreign is not None:
            real = partial(foreign.call, name, real)
        self.inside_unit = True
        try:
            output = self.replay.call_drawing(name, real, args, kwargs)
        finally:
            self.inside_unit = False
        if watch is not None:
            watch.after(name, (args, kwargs), output)
        return output

    def _record_changes(self, before: Mapping[str, int]) -> None:
        """After a unit, record the values that it modified in place, unless the frame had modified them."""
        changed_by_units = self.flow.changed_by_units
        for name, version in self.passed.changed(self.arrived).items():
            if name not in before:
                changed_by_units.add(name)
            elif before[name] == version and name not in changed_by_units:
                self.changed_by_frame.add(name)
        changed_by_units -= self.changed_by_frame

    def _select_passed(self) -> None:
        """Keep only the values that later stages need."""
        self.passed.check_versions(self.arrived, frozenset(self.flow.changed_by_units))
        if not self.flow.everything:
            needed = self.flow.after(self.replay.stop)
            self.passed.values = {name: value for name, value in self.passed.values.items() if name in needed}
            self.passed.drop_inputs(needed)


# Checkpoints and hooks


def _checkpoint_frame(function: str) -> Any:
    """Return the interpreter frame of the innermost running call of a function of torch's checkpointing.

    "forward" is reentrant checkpointing, which runs without a graph and builds it later.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        file = frame.f_code.co_filename.replace("\\", "/")
        if frame.f_code.co_name == function and file.endswith("torch/utils/checkpoint.py"):
            return frame
    return None


class _Checkpoints:
    """Checks that all units in one of the model's checkpoints are on one stage, which has to recompute it."""

    def __init__(self) -> None:
        self._first_unit, self._first_is_own = "", True

    def check(self, name: str, own: bool) -> None:
        """Check the call of a unit; `own` says whether it belongs to this stage."""
        frame = _checkpoint_frame("checkpoint")
        if frame is None:
            return
        # Mark the frame at its first unit. A reference to it would keep its variables alive.
        if frame.f_trace_lines:
            frame.f_trace_lines = False
            self._first_unit, self._first_is_own = name, own
        elif self._first_is_own != own:
            raise StagelineError(
                f"the forward runs {self._first_unit} and {name} in one checkpoint, but the model is cut between them; "
                "cut it elsewhere (layers_per_stage=, or by= the first unit of each stage), or remove the checkpoint "
                "and pass recompute= to the pipeline"
            )


def _refuse_hooks(output: Any, name: str, outside: Callable[[], bool]) -> None:
    """Refuse hooks that the frame registers on the output of another stage's unit: every stage would register them."""
    for tensor in [output] if isinstance(output, Tensor) else tensors_in(output):
        tensor.register_hook = partial(_register_hook, tensor, name, outside)  # type: ignore[method-assign]


def _register_hook(tensor: Tensor, name: str, outside: Callable[[], bool], hook: Any) -> Any:
    if outside():
        raise StagelineError(
            f"the forward registers a hook on the output of {name} outside of its units, and several stages run that "
            "code; call register_hook inside a unit"
        )
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]

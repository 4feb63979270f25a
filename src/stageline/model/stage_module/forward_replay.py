"""Running the forward of a whole model on one stage, and finding out what the next stage needs of it.

The first time that inputs of some form come, the forward runs once with nothing in it: every unit gives absent tensors,
which remember where they come from. So it is known which values each unit is computed from, and which of them have to
cross a cut: in a stack of blocks the hidden states alone, in an encoder and decoder also the encoder's output, in a
U-Net also the skip connections.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from stageline.common.errors import StagelineError
from stageline.model import huggingface
from stageline.model.stage_module.boundary import GIVE, INPUT, PARAMETER, Passed, check_arguments, key_of, on_meta
from stageline.model.stage_module.counters import Counters
from stageline.model.stage_module.inplace_history import History, Unchanged, versions
from stageline.model.stage_module.placeholder import Absent, Keys, Writes, keys_of, without_memory, writes_allowed
from stageline.model.stage_module.shared_state import Watch
from stageline.model.stage_module.side_effects import (
    Attributes,
    Checkpoints,
    Effects,
    fresh_attributes,
    inside_a_checkpoint,
    refuse_hooks,
    tensor_attributes,
)
from stageline.tensors.pytree import learn
from stageline.tensors.random_numbers import draws, generator_alone

_MISFITS = ("cannot be multiplied", "reduction dim", "must match", "size mismatch", "normalized_shape", "channels")
"""By these words torch says that something does not fit, and not that it cannot be done without contents."""
Draw = Callable[..., Any]
"""Calls something that may draw random numbers, by the name of what it is."""


class Calling(Protocol):
    """What calls something, by its name ("" for a frame), and may refuse what comes of it."""

    def call(self, name: str, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""

    def look(self, name: str, output: Any, inputs: Any = ()) -> None:
        """Look at what it gave."""


class CallsError(StagelineError):
    """A forward that calls its units in another order, or more often, than was expected."""


class KeptError(CallsError):
    """A forward that reads what a unit keeps as an attribute."""


class _Reached(BaseException):
    """The forward has come to the first unit of a later stage; nothing in a model may catch it."""


@dataclass(frozen=True)
class Calls:
    """The units of a model in the order in which its forward calls them; one that is called twice is there twice.

    >>> Calls(("a", "b", "a")).position("a", times=1)
    2
    """

    names: tuple[str, ...]

    def position(self, name: str, times: int) -> int:
        """Where a call stands, after so many earlier ones of the same unit."""
        found = self._positions.get((name, times))
        if found is None:
            raise CallsError(
                f"the model calls {name} {times + 1} times in one forward, and {self.names.count(name)} were expected; "
                f"{GIVE}, so that the calls are seen"
            )
        return found

    @property
    def _positions(self) -> dict[tuple[str, int], int]:
        return _positions(self.names)


@lru_cache(maxsize=64)
def _positions(names: tuple[str, ...]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        found[(name, seen.get(name, 0))] = index
        seen[name] = seen.get(name, 0) + 1
    return found


@dataclass
class Needs:
    """What a forward computes from what: for every call of a unit, the values that it is given."""

    of_call: dict[int, Keys] = field(default_factory=dict)
    of_output: Keys = frozenset()
    changed: Keys = frozenset()
    """Values that the forward changes in place."""
    everything: bool = False
    """Nothing could be found out, so all values cross all cuts."""
    inside: set[str] = field(default_factory=set)
    """Values that units of this stage change in place, and its frame does not."""
    unseen: set[int] = field(default_factory=set)
    """Calls of which it is not known what they change in place."""

    def after(self, position: int) -> Keys:
        """The values that calls from here on, and the output, are computed from."""
        later = (keys for at, keys in self.of_call.items() if at >= position)
        return frozenset().union(*later, self.of_output)

    def held(self, start: int, stop: int, last: bool) -> set[str]:
        """The units whose tensors the forward uses outside of them for what a stage computes."""
        keys = frozenset().union(*(self.of_call.get(at, frozenset()) for at in range(start, stop)))
        keys |= self.of_output if last else frozenset()
        return {key.removeprefix(PARAMETER).split("/")[0] for key in keys if key.startswith(PARAMETER)}


@dataclass
class Replay:
    """The forward of one stage: which calls are its own, and what happens in the others."""

    calls: Calls
    start: int
    stop: int
    modules: dict[str, Any]
    """The units by name, to find out what they give; they may be on the meta device."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keywords of the model that a batch may leave out."""
    everything: bool = False
    """Pass all values on, whether they are known to be needed or not."""
    draw: Draw | None = None
    """How the stage lets its units draw random numbers; as they come, unless given."""
    counters: Counters = field(default_factory=lambda: Counters([]))
    """What the frame counts."""
    watch: Watch | None = None
    """Looks at what units share with those of other stages."""
    foreign: Calling | None = None
    """Calls units and the frame around them, and looks at what they read of other stages' parameters."""
    kept: dict[str, Attributes] = field(default_factory=dict)
    """What units keep of their forward as attributes; the frame of another stage cannot read that."""
    _needs: dict[str, Needs] = field(default_factory=dict)
    _metas: dict[str, nn.Module] = field(default_factory=dict)
    _now: _Now | None = None

    @property
    def first(self) -> bool:
        """Whether the model's inputs come to this stage."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the model's output leaves this stage."""
        return self.stop == len(self.calls.names)

    @staticmethod
    def draws(module: nn.Module) -> bool:
        """Whether a module without parameters draws random numbers, and so has to draw by its name."""
        return draws(module)

    def run(self, frame: nn.Module, value: Any) -> Any:
        """Run a stage on the model's inputs, or on what the stage before passed on."""
        if self.first:
            huggingface.refuse_cache(value, self.defaults)
        arrived = Passed.first(value, self.defaults) if self.first else Passed.read(value)
        form = f"{arrived.form()} {frame.training}"
        fresh = form not in self._needs and not (self.first and self.last)
        if fresh and self.first:
            check_arguments(frame, arrived)
        if fresh:
            before = self.counters.now()
            self._needs[form] = self._look(frame, arrived)
            moved = self.counters.moved(before)
            if moved:  # once, or in every forward
                between = self.counters.now()
                self._look(frame, arrived)
                self.counters.refuse(moved & self.counters.moved(between))
            self.counters.put_back(before)
        needs = self._needs.get(form, Needs())
        arrived.changed = needs.changed
        self._now = now = _Now(arrived, needs, fresh=fresh)
        args, kwargs = arrived.inputs()
        try:
            found = frame(*args, **kwargs) if self.foreign is None else self.foreign.call("", frame, *args, **kwargs)
        except _Reached:
            written = now.passed.write()
            if self.foreign is not None:
                self.foreign.look("", written)
            return written
        finally:
            self._now = None
        if not self.last:
            raise StagelineError(
                f"the forward of the model ended before it came to {self.calls.names[self.stop]}, with which the next "
                f"stage begins; {GIVE}, so that the order of its calls is seen"
            )
        lost = keys_of(found)
        if lost:
            raise StagelineError(f"the output of the model needs {self._said(lost)}")
        return found

    def _said(self, keys: Keys) -> str:
        """What is missing, in words, and what to do."""
        names = [
            key.removeprefix(PARAMETER).replace("/", ".") if key.startswith(PARAMETER) else
            f"the output of {self.calls.names[int(key.split('.')[0])]}" if key[0].isdigit() else f"the {key}"
            for key in sorted(keys)
        ]  # fmt: skip
        if any(key.startswith(PARAMETER) for key in keys):
            return f"{', '.join(names)}, which another stage holds; {GIVE}, so that it is held here too"
        return (
            f"{', '.join(names)}, which the stages before did not pass on: the forward takes another way than when it "
            "was first seen; split(…, everything=True) passes all values on"
        )

    def visit(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called."""
        now = self._now
        if now is None:
            return real(*args, **kwargs)
        if name not in self.modules:  # it has no parameters, and runs on every stage
            return self._drawn(name, real, args, kwargs)
        if now.seen is not None:
            now.seen.append(name)
            return self._dry(name, len(now.seen) - 1, now, args, kwargs)
        position = self.calls.position(name, now.times.get(name, 0))
        now.times[name] = now.times.get(name, 0) + 1
        if now.dry is not None:
            return self._dry(name, position, now, args, kwargs)
        if now.fresh:
            now.checkpoints.check(name, self.start <= position < self.stop)
        if position < self.start:
            found, more = now.arrived.output(position, name)
            refuse_hooks(found, name, self.outside)
            huggingface.collect(more)
            return found
        if position >= self.stop:
            now.pass_on(self.stop)
            raise _Reached
        lost = keys_of((args, kwargs))
        if lost:
            raise StagelineError(f"{name} needs {self._said(lost)}")
        if now.grad and not torch.is_grad_enabled() and inside_a_checkpoint():
            raise StagelineError(
                f"the forward runs {name} in a checkpoint with use_reentrant=True, which hides its gradients from the "
                "stage; use use_reentrant=False, or recompute= of the pipeline"
            )
        alone = self.first and self.last
        effects = (
            Effects(name, real, (args, kwargs), self.kept.get(name, frozenset())) if now.fresh and not alone else None
        )
        before = huggingface.lengths(huggingface.collected())
        if self.watch is not None:
            self.watch.before(name)
        moved = now.passed.moved(now.arrived) if now.fresh else {}
        unseen = now.fresh and not self.last and position in now.needs.unseen
        unchanged = Unchanged(name, (args, kwargs), now.held()) if unseen else None
        now.inside = True
        if self.foreign is not None:
            real = partial(self.foreign.call, name, real)
        try:
            found = self._drawn(name, real, args, kwargs)
        finally:
            now.inside = False
        if self.watch is not None:
            self.watch.after(name, (args, kwargs), found)
        if effects is not None:
            effects.check(found)
            if unchanged is not None:
                unchanged.check()
            now.note_changes(moved)
        if not self.last:
            now.passed.keep(position, name, (found, huggingface.since(before)), now.needs.changed)
        return found

    def outside(self) -> bool:
        """Whether the frame of a forward runs, and no unit in it."""
        return self._now is not None and not self._now.inside

    def tensor(self, name: str, attribute: str, value: Tensor, held: bool) -> Tensor:
        """A tensor of a unit that the frame uses: itself where the stage holds it, else absent."""
        now = self._now
        if now is None or now.inside or (held and now.dry is None):
            return value
        return Absent.of(on_meta(value), value.device, frozenset({f"{PARAMETER}{name}/{attribute}"}))

    def refuse_kept(self, name: str, path: str, attribute: str) -> None:
        """Refuse to let the frame read what a unit of another stage keeps of its forward."""
        if (path, attribute) in self.kept.get(name, ()):
            raise KeptError(
                f"the forward reads {'.'.join(filter(None, (name, path, attribute)))}, which {name} keeps of its "
                "forward as an attribute, and another stage runs it; let it give it back, too"
            )

    def _drawn(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return real(*args, **kwargs) if self.draw is None else self.draw(name, lambda: real(*args, **kwargs))

    # Finding out what crosses the cuts.

    def _look(self, frame: nn.Module, arrived: Passed) -> Needs:
        needs = Needs()
        args, kwargs = arrived.inputs(absent=True)
        writes = Writes()
        self._now = _Now(arrived, needs, dry=needs, history=writes.history)
        try:
            with torch.no_grad(), _no_draws(), writes_allowed(writes):
                found = frame(*args, **kwargs)
                writes.history.use(len(self.calls.names), found)
                needs.of_output = keys_of(found) | writes.into_others
                needs.changed = frozenset(writes.changed)
                needs.everything = self.everything
        except CallsError:
            raise
        except Exception as error:
            warnings.warn(
                f"what has to pass from stage to stage could not be found out ({type(error).__name__}: {error}); "
                "the outputs of all units are passed on",
                stacklevel=2,
            )
            needs.everything = True
            needs.unseen.update(range(len(self.calls.names)))
        finally:
            self._now = None
        writes.history.check(self.calls.names, (self.start, self.stop), writes.changed)
        return needs

    def order(self, frame: nn.Module, value: Any) -> tuple[list[str], Needs]:
        """The units in the order in which a forward calls them, and what they need; by a run with nothing in it."""
        needs, seen = Needs(), list[str]()
        self._now = _Now(Passed.first(value, self.defaults), needs, dry=needs, seen=seen)
        args, kwargs = self._now.arrived.inputs(absent=True)
        try:
            with torch.no_grad(), _no_draws(), without_memory(frame, (args, kwargs)), writes_allowed() as writes:
                needs.of_output = keys_of(frame(*args, **kwargs)) | writes.into_others
            return seen, needs
        except Exception:
            missing = {id(each.module) for each in self.modules.values()} - {
                id(self.modules[name].module) for name in seen
            }
            if not missing:  # what comes after the last unit does not matter for the order
                return seen, needs
            raise
        finally:
            self._now = None

    def _dry(self, name: str, position: int, now: _Now, args: Any, kwargs: Any) -> Any:
        assert now.dry is not None
        now.dry.of_call[position] = keys_of((args, kwargs))
        lists = huggingface.collected()
        before = huggingface.lengths(lists)
        if now.history is not None:
            now.history.use(position, (args, kwargs))
        found = self._shape_of(name, position, now, args, kwargs)
        learn(found)
        leaves, spec = pytree.tree_flatten((found, huggingface.since(before)))
        for kind, size in before.items():
            del lists[kind][size:]
        device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), "cpu")
        found, more = pytree.tree_unflatten(
            [
                Absent.of(leaf, device, frozenset({key_of(position, index)})) if isinstance(leaf, Tensor) else leaf
                for index, leaf in enumerate(leaves)
            ],
            spec,
        )
        huggingface.collect(more)
        return found

    def _shape_of(self, name: str, position: int, now: _Now, args: Any, kwargs: Any) -> Any:
        """What a unit gives, on the meta device; for one that cannot run there, something like its first argument."""
        # Each with a version of its own, so that a change of one is not taken for a change of another.
        given = pytree.tree_map(lambda leaf: on_meta(leaf).data if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        metas = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        try:
            if name not in self._metas:
                self._metas[name] = meta_twin(self.modules[name].module)
            twin = self._metas[name]
            before, unchanged = tensor_attributes(twin), versions(metas)
            with _disable_current_modes():
                found = twin(*given[0], **given[1])
            now.note_meta_changes(position, (args, kwargs), unchanged, versions(metas))
            self.kept[name] = self.kept.get(name, frozenset()).union(fresh_attributes(before, twin))
            return found
        except Exception as error:
            if any(words in str(error) for words in _MISFITS):
                raise
            now.needs.unseen.add(position)
            first = next((leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), None)
            if first is None:
                raise
            return first


@dataclass
class _Now:
    """One forward that is under way."""

    arrived: Passed
    needs: Needs
    dry: Needs | None = None
    fresh: bool = False
    """Whether inputs of this form came for the first time."""
    inside: bool = False
    """Whether a unit runs."""
    grad: bool = field(default_factory=torch.is_grad_enabled)
    history: History | None = None
    """What units change in place, where the forward is looked at."""
    seen: list[str] | None = None
    """The calls so far, where their order is not known yet."""
    times: dict[str, int] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    """Values that the frame changed in place."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    passed: Passed = field(init=False)

    def __post_init__(self) -> None:
        self.passed = Passed(self.arrived.tree, self.arrived.leaves, dict(self.arrived.values), list(self.arrived.told))

    def held(self) -> list[Tensor]:
        """What passes from stage to stage as it is then."""
        return [leaf for leaf in (*self.passed.values.values(), *self.arrived.leaves) if isinstance(leaf, Tensor)]

    def note_meta_changes(self, position: int, given: Any, before: Sequence[int], after: Sequence[int]) -> None:
        """After a unit ran on the meta device: the tensors that it changed in place."""
        if self.history is None or before == after:
            return
        inputs = {id(leaf): f"{INPUT}.{index}" for index, leaf in enumerate(self.arrived.leaves)}
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        for tensor, old, new in zip(tensors, before, after, strict=True):
            if old != new:
                self.history.change(tensor, position, inputs.get(id(tensor)))

    def note_changes(self, before: Mapping[str, int]) -> None:
        """After a unit: the values that it changed in place, where the frame had not."""
        for key, version in self.passed.moved(self.arrived).items():
            if key not in before:
                self.needs.inside.add(key)
            elif before[key] == version and key not in self.needs.inside:
                self.outside.add(key)
        self.needs.inside -= self.outside

    def pass_on(self, stop: int) -> None:
        """Keep of all values those that later stages need."""
        self.passed.check_versions(self.arrived, frozenset(self.needs.inside))
        if not self.needs.everything:
            wanted = self.needs.after(stop)
            values = self.passed.values
            self.passed.values = {key: value for key, value in values.items() if key in wanted}
            self.passed.forget_inputs(wanted)


@contextmanager
def _no_draws() -> Iterator[None]:
    """Leave the random numbers as they were, and let no other stage draw meanwhile."""
    with generator_alone(), torch.random.fork_rng(devices=[]):
        yield


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, made without copying its tensors."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    twin = copy.deepcopy(module, memo)
    for each in twin.modules():  # hooks of the user's see what is computed, and not what is only looked at
        each._forward_pre_hooks.clear()
        for key, hook in list(each._forward_hooks.items()):
            if not huggingface.collects(hook):
                del each._forward_hooks[key]
    return twin

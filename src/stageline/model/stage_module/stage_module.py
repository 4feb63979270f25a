"""One stage of a model: the model's own forward, in which only the stage's units compute.

A stage holds its own units and a copy of the frame around them, so every name is as in the whole model, and hooks,
buffers and the code between the units are unchanged. When the forward calls a unit of an earlier stage, it receives
what that stage sent, or placeholders for what it did not send. When it calls the first unit of a later stage, the
forward ends, and the values that later stages need are passed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import (
    COMPILED_CALL,
    MODULE_DICTIONARIES,
    children_of,
    module_dictionaries,
    non_persistent_buffers,
    raw_version,
)
from stageline.model.compiled_models import Wrapper, is_wrapped
from stageline.model.stage_module.forward_replay import Replay
from stageline.model.stage_module.side_effects import Counters
from stageline.tensors.random_numbers import draws

_classes: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


class _UnitProxy:
    """A unit as the frame sees it: the replay of the stage handles its calls."""

    _stageline_name: str
    _stageline_replay: Replay
    _stageline_own: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        real: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return self._stageline_replay.visit(self._stageline_name, real, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Treat a direct call of `forward` like a call of the unit."""
        real: Callable[..., Any] = super().forward  # type: ignore[misc]
        if self._stageline_replay.outside():
            return self._stageline_replay.visit(self._stageline_name, real, args, kwargs)
        return real(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_stageline_own", True)
        try:
            value = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if own:
                raise
            value = getattr(self.__dict__["_stageline_original"].module, name)
        if name.startswith("_stageline") or not self._stageline_replay.outside():
            return value
        if isinstance(value, Tensor):
            return self._stageline_replay.tensor(self._stageline_name, name, value, own)
        if isinstance(value, nn.Module) and not own:
            return _ForeignModule(value, f"{self._stageline_name}/{name}", self._stageline_replay)
        return value


class _ForeignUnitProxy(_UnitProxy):
    """A unit of another stage: attributes in which it keeps tensors of its forward cannot be read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attributes = object.__getattribute__(self, "__dict__")  # a stage calls many of these: not by __getattribute__
        replay, name = attributes["_stageline_replay"], attributes["_stageline_name"]
        return replay.visit(name, super(_UnitProxy, self).__call__, args, kwargs)  # type: ignore[misc]

    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        replay = attributes.get("_stageline_replay")
        # While a stage is being copied, its replay may not have attributes yet.
        twins = None if replay is None else replay.__dict__.get("twins")
        if twins is not None and twins.kept and replay.outside():
            replay.refuse_kept(attributes["_stageline_name"], "", name)
        return super().__getattribute__(name)


class _ForeignModule:
    """A module inside of another stage's unit: its tensors are placeholders, and it cannot be called."""

    def __init__(self, module: nn.Module, name: str, replay: Replay) -> None:
        self._module, self._name, self._replay = module, name, replay

    def __getattr__(self, name: str) -> Any:
        unit, _, path = self._name.partition("/")
        self._replay.refuse_kept(unit, path, name)
        value = getattr(self._module, name)
        if isinstance(value, Tensor):
            return self._replay.tensor(unit, f"{path}.{name}", value, False)
        return _ForeignModule(value, f"{self._name}.{name}", self._replay) if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StagelineError(
            f"the forward calls {self._name.replace('/', '.')} outside its unit, which is on another stage; call "
            "the unit itself, or make its parts units with by='type:ClassOfPart'"
        )


class Original:
    """A reference to a module of the whole model, which copies of a stage share."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Original:
        return self


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module such that replacing children, parameters or buffers does not change the original."""
    module_copy = module.__class__.__new__(module.__class__)
    dictionaries = {name: dict(entries) for name, entries in module_dictionaries(module).items()}
    module_copy.__dict__ = {**module.__dict__, **dictionaries}
    return module_copy


def unit_proxy(module: nn.Module, name: str, replay: Replay, own: bool) -> nn.Module:
    """Return a unit whose calls go to the replay; a unit of another stage has no tensors and children."""
    kind, base = type(module), _UnitProxy if own else _ForeignUnitProxy
    if (base, kind) not in _classes:
        namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_stageline_class": kind}
        _classes[base, kind] = type(kind.__name__, (base, kind), namespace)
    proxy: Any = kind.__new__(_classes[base, kind])
    proxy.__dict__ = dict(module.__dict__)
    if not own:
        proxy.__dict__.update({dictionary: {} for dictionary in MODULE_DICTIONARIES})
    proxy.__dict__.update(
        _stageline_name=name, _stageline_replay=replay, _stageline_own=own, _stageline_original=Original(module)
    )
    return proxy  # type: ignore[no-any-return]


_NOT_REFRESHED = frozenset({*MODULE_DICTIONARIES, "named_parameters", "training"})
"""Attributes that a copy of a module does not take over from the original."""


def _same_weights(module: nn.Module, module_copy: nn.Module) -> bool:
    """Whether a copy has the module's own weights, so that the module's compiled code can run for it."""
    return all(mine is theirs for mine, theirs in zip(module.parameters(), module_copy.parameters(), strict=False))


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = model
    for name in path.split("."):
        module = None if module is None else children_of(module).get(name)
    return module


class _OwnParameters:
    """`named_parameters` of a frame, which has only the parameters of its stage: refused inside of the forward."""

    def __init__(self, module: nn.Module, replay: Replay) -> None:
        self._module, self._replay = module, replay

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnParameters:
        return _OwnParameters(copy.deepcopy(self._module, memo), copy.deepcopy(self._replay, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for index, parameter in enumerate(type(self._module).named_parameters(self._module, *args, **kwargs)):
            if index and self._replay.outside() and not self._replay.is_whole_model:
                raise StagelineError(
                    f"the forward of {type(self._module).__name__} reads all parameters, but a stage holds only some "
                    "of them; compute such a term of the loss outside the model"
                )
            yield parameter


class StagePart(nn.Sequential):
    """The part of a model for one stage, with the names of the whole model. It is called with what arrives."""

    one_layer = True
    replay: Replay
    _copies: list[tuple[Original, nn.Module]]
    _frame: tuple[nn.Module]
    _frame_buffers: list[tuple[str, Tensor]]
    """Buffers in the model's state that no unit holds."""

    def __init__(self, model: nn.Module, units: Sequence[str], own: frozenset[str], replay: Replay) -> None:
        """`units` are the names of all units, `own` those of this stage."""
        super().__init__()
        object.__setattr__(self, "replay", replay)
        self.__dict__["_copies"] = []
        is_own = {**dict.fromkeys(units, False), **dict.fromkeys(own, True)}
        frame = self._copy_frame(model, "", is_own)
        if not replay.is_whole_model:
            frames = [module for _, module in self._copies if "named_parameters" in module.__dict__]
            replay.counters = Counters(frames, [(name, unit.module) for name, unit in replay.modules.items()])
        self.__dict__["_frame"] = (frame,)  # in a tuple: its children are this module's, under their own names
        self.__dict__.update(module_dictionaries(frame))
        self.__dict__["_non_persistent_buffers_set"] = non_persistent_buffers(frame)
        self.__dict__["_model"] = Original(model)
        persistent = set(self.state_dict())
        prefixes = tuple(f"{name}." for name in units)
        self.__dict__["_frame_buffers"] = [
            (name, buffer)
            for name, buffer in self.named_buffers()
            if name in persistent and not name.startswith(prefixes)
        ]

    @property
    def whole_model(self) -> nn.Module:
        """The whole model; its children are found by name in the part, and many have one named `model`."""
        original: Original = self.__dict__["_model"]
        return original.module

    def _copy_frame(self, module: nn.Module, path: str, is_own: Mapping[str, bool]) -> nn.Module:
        """Copy a module with everything in it, and replace units by proxies."""
        has_units = not path or any(name.startswith(f"{path}.") for name in is_own)
        if path in is_own:
            module_copy = unit_proxy(module, path, self.replay, is_own[path])
        elif not has_units and draws(module):
            module_copy = unit_proxy(module, path, self.replay, True)
        elif not has_units:
            module_copy = module if not any(True for _ in module.children()) else shallow_copy(module)
        else:
            module_copy = Wrapper() if is_wrapped(module) else shallow_copy(module)
            for name, child in children_of(module).items():
                if child is not None:
                    child_path = f"{path}.{name}" if path else name
                    children_of(module_copy)[name] = self._copy_frame(child, child_path, is_own)
            module_copy.__dict__["named_parameters"] = _OwnParameters(module_copy, self.replay)
            module_copy.__dict__[COMPILED_CALL] = None  # its graph contains all units
        if module_copy is not module:
            self._copies.append((Original(module), module_copy))
        return module_copy

    @property
    def frame(self) -> nn.Module:
        """The copy of the model around the stage's units."""
        return self._frame[0]

    def random_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that draw random numbers under their own name: units, and what runs on every stage."""
        proxies: list[Any] = [
            module for _, module in self._copies if isinstance(module, _UnitProxy) and module._stageline_own
        ]
        return [(proxy._stageline_name, proxy) for proxy in proxies]

    def own_units(self) -> list[tuple[str, nn.Module]]:
        """Return the stage's own units, as the whole model holds them."""
        units = self.replay.modules
        return [(name, units[name].module) for name, _ in self.random_modules() if name in units]

    def hide_other_units(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Hide the units of other stages: as None, or missing from a list or dict of modules.

        Returns the dictionaries of children that were changed, each with a copy from before.
        """
        hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
        frames = [module for _, module in self._copies if "named_parameters" in module.__dict__]
        for module in {id(module): module for module in (*frames, self)}.values():
            children: dict[str, Any] = children_of(module)
            others = [name for name, child in children.items() if isinstance(child, _ForeignUnitProxy)]
            if others:
                hidden.append((children, dict(children)))
            for name in others:
                if isinstance(module, nn.ModuleList | nn.ModuleDict):
                    del children[name]
                else:
                    children[name] = None
        return hidden

    def separate(self) -> None:
        """Copy what this stage still shares with others: modules with parameters that are outside of units."""
        copied = {id(module_copy) for _, module_copy in self._copies}
        copies: dict[int, nn.Module] = {}

        def visit(module: nn.Module) -> None:
            children = children_of(module)
            for name, child in children.items():
                if child is None or isinstance(child, _UnitProxy) or not any(True for _ in child.parameters()):
                    continue
                if id(child) not in copied and id(child) not in copies:
                    copies[id(child)] = shallow_copy(child)
                    self._copies.append((Original(child), copies[id(child)]))
                children[name] = copies.get(id(child), child)
                visit(copies.get(id(child), child))

        visit(self.frame)

    def frame_modules(self) -> list[nn.Module]:
        """Return the modules of the whole model that are not inside of a unit."""
        inside = {id(module) for unit in self.replay.modules.values() for module in unit.module.modules()}
        return [module for module in self.whole_model.modules() if id(module) not in inside]

    def copies(self) -> dict[int, nn.Module]:
        """Return the copies that this stage runs, by the ids of the model's own modules."""
        return {id(original.module): module_copy for original, module_copy in self._copies}

    def refresh(self) -> None:
        """Take over attributes that were set on the model's modules; the units must still be the same."""
        for name, unit in self.replay.modules.items():
            if _submodule(self.whole_model, name) is not unit.module:
                raise StagelineError(f"{name} was replaced after the pipeline was created; create a new Pipeline")
        for original, module_copy in self._copies:
            if isinstance(module_copy, Wrapper):
                continue
            attributes = module_copy.__dict__
            for key, value in original.module.__dict__.items():
                if key in _NOT_REFRESHED or (key == COMPILED_CALL and "named_parameters" in attributes):
                    continue
                if key != COMPILED_CALL or _same_weights(original.module, module_copy):
                    attributes[key] = value

    def forward(self, value: Any) -> Any:
        """Run the model's forward up to the end of this stage."""
        for module, attributes in self._modules_and_attributes():
            attributes["training"] = module.training  # nn.Module's own assignment is slow
        versions = [raw_version(buffer) for _, buffer in self._frame_buffers]
        numbers = self.replay.counters.read()
        output = self.replay.run(self._frame[0], value)
        self.replay.counters.check(numbers)
        for (name, buffer), version in zip(self._frame_buffers, versions, strict=True):
            if raw_version(buffer) != version and not self.replay.is_whole_model:
                raise StagelineError(
                    f"the forward changes the buffer {name} outside its units, so every stage changes it; move the "
                    "change into a module with that buffer, so that only one stage makes it"
                )
        return output

    def _modules_and_attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return the model's own modules, each with the attributes of its copy."""
        pairs: list[tuple[nn.Module, dict[str, Any]]] = self.__dict__.get("_pairs", [])
        if len(pairs) != len(self._copies):
            pairs = [(original.module, module_copy.__dict__) for original, module_copy in self._copies]
            self.__dict__["_pairs"] = pairs
        return pairs

    def __deepcopy__(self, memo: dict[int, Any]) -> StagePart:
        """Copy the frame with its contents; tensors in the memo stay the same."""
        part = StagePart.__new__(StagePart)
        memo[id(self)] = part
        kept = {key: value for key, value in self.__dict__.items() if key not in ("_frame", "_pairs")}
        part.__dict__ = {key: copy.deepcopy(value, memo) for key, value in kept.items()}
        frame = copy.deepcopy(self._frame[0], memo)
        part.__dict__["_frame"] = (frame,)
        part.__dict__.update(module_dictionaries(frame))
        return part

"""One stage of a model: the model's own forward, in which only the stage's units compute.

A stage holds its units themselves and a copy of the frame around them, so every name is as in the whole model, and
hooks, buffers and whatever the forward does between the units stay what they are. Where the forward calls a unit of an
earlier stage, it gets what that stage sent, or something absent where it sent nothing; where it calls the first unit of
a later stage, it ends, and what later stages need goes on to the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.compiled_models import Wrapper, is_wrapped
from stageline.model.stage_module.counters import Counters
from stageline.model.stage_module.forward_replay import Replay

_classes: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


class _Called:
    """A unit as a frame sees it: when it is called, the replay of the stage decides what comes of it."""

    _stageline_name: str
    _stageline_replay: Replay
    _stageline_own: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        real: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return self._stageline_replay.visit(self._stageline_name, real, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called directly, it is a call all the same."""
        real: Callable[..., Any] = super().forward  # type: ignore[misc]
        if self._stageline_replay.outside():
            return self._stageline_replay.visit(self._stageline_name, real, args, kwargs)
        return real(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_stageline_own", True)
        try:
            found = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if own:
                raise
            found = getattr(self.__dict__["_stageline_of"].module, name)
        if name.startswith("_stageline") or not self._stageline_replay.outside():
            return found
        if isinstance(found, Tensor):
            return self._stageline_replay.tensor(self._stageline_name, name, found, own)
        if isinstance(found, nn.Module) and not own:
            return _Inner(found, f"{self._stageline_name}/{name}", self._stageline_replay)
        return found


class _Elsewhere(_Called):
    """A unit of another stage: what it keeps of its forward is not here."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        replay = own.get("_stageline_replay")
        # While a stage is being copied, its replay may not have anything yet.
        if replay is not None and replay.__dict__.get("kept") and replay.outside():
            replay.refuse_kept(own["_stageline_name"], "", name)
        return super().__getattribute__(name)


class _Inner:
    """A module inside of a unit that another stage holds: its tensors are absent, and it cannot be called."""

    def __init__(self, module: nn.Module, name: str, replay: Replay) -> None:
        self._module, self._name, self._replay = module, name, replay

    def __getattr__(self, name: str) -> Any:
        unit, _, path = self._name.partition("/")
        self._replay.refuse_kept(unit, path, name)
        found = getattr(self._module, name)
        if isinstance(found, Tensor):
            return self._replay.tensor(unit, f"{path}.{name}", found, False)
        return _Inner(found, f"{self._name}.{name}", self._replay) if isinstance(found, nn.Module) else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StagelineError(
            f"the forward calls {self._name.replace('/', '.')} outside of its unit, which is on another stage; call "
            "the unit itself, or make its parts units with by='type:ClassOfPart'"
        )


class Original:
    """A module of the whole model that a stage looks at and does not hold."""

    def __init__(self, module: nn.Module) -> None:
        """Keep it."""
        self.module = module

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Original:
        """Stay the same where the stage is copied."""
        return self


def copy_of(module: nn.Module) -> nn.Module:
    """A module of the same class and state, whose children can be replaced without changing the original's."""
    made = module.__class__.__new__(module.__class__)
    made.__dict__ = dict(module.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        made.__dict__[name] = dict(module.__dict__[name])
    return made


def called(module: nn.Module, name: str, replay: Replay, own: bool) -> nn.Module:
    """A unit that asks the replay when it is called; where it is not the stage's own, it holds nothing."""
    kind = type(module)
    base = _Called if own else _Elsewhere
    if (base, kind) not in _classes:
        words = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[base, kind] = type(kind.__name__, (base, kind), words)
    made: Any = kind.__new__(_classes[base, kind])
    made.__dict__ = dict(module.__dict__)
    if not own:
        for held in ("_modules", "_parameters", "_buffers"):
            made.__dict__[held] = {}
    made.__dict__.update(
        _stageline_name=name, _stageline_replay=replay, _stageline_own=own, _stageline_of=Original(module)
    )
    return made  # type: ignore[no-any-return]


_OWN = frozenset({"_modules", "_parameters", "_buffers", "named_parameters", "training"})
"""What a copy of a module has for itself."""


def _same_weights(module: nn.Module, made: nn.Module) -> bool:
    """Whether a copy computes with the module's own weights; what compiled the module does so too."""
    return all(mine is theirs for mine, theirs in zip(module.parameters(), made.parameters(), strict=False))


def _at(model: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = model
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


class _Guarded:
    """The parameters of a frame: its own stage's. A forward that looks at all of them would see only some."""

    def __init__(self, module: nn.Module, replay: Replay) -> None:
        self._module, self._replay = module, replay

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guarded:
        return _Guarded(copy.deepcopy(self._module, memo), copy.deepcopy(self._replay, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for number, found in enumerate(type(self._module).named_parameters(self._module, *args, **kwargs)):
            if number and self._replay.outside() and not (self._replay.first and self._replay.last):
                raise StagelineError(
                    f"the forward of {type(self._module).__name__} looks at all parameters, and a stage holds some; "
                    "add such a term to the loss outside of the model"
                )
            yield found


class StagePart(nn.Sequential):
    """What a rank holds of a model for one stage, by the names of the whole model; called with what arrives."""

    one_layer = True
    replay: Replay
    _copies: list[tuple[Original, nn.Module]]
    _frame: tuple[nn.Module]
    _shared: list[tuple[str, Tensor]]

    def __init__(self, model: nn.Module, units: Sequence[str], own: frozenset[str], replay: Replay) -> None:
        """`units` are the names of all units, `own` those of this stage."""
        super().__init__()
        object.__setattr__(self, "replay", replay)
        self.__dict__["_copies"] = []
        marked = {**dict.fromkeys(units, False), **dict.fromkeys(own, True)}
        frame = self._framed(model, "", marked)
        if not (replay.first and replay.last):
            frames = [made for _, made in self._copies if "named_parameters" in made.__dict__]
            replay.counters = Counters(frames, [(name, unit.module) for name, unit in replay.modules.items()])
        self.__dict__["_frame"] = (frame,)  # in a tuple: its children are this module's, under their own names
        self.__dict__["_modules"] = frame._modules
        self.__dict__["_parameters"] = frame._parameters
        self.__dict__["_buffers"] = frame._buffers
        self.__dict__["_non_persistent_buffers_set"] = frame._non_persistent_buffers_set
        self.__dict__["_model"] = Original(model)
        kept = set(self.state_dict())
        inside = tuple(f"{name}." for name in units)
        self.__dict__["_shared"] = [
            (name, buffer) for name, buffer in self.named_buffers() if name in kept and not name.startswith(inside)
        ]

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        found: nn.Module = self.__dict__["_model"].module
        return found

    def _framed(self, module: nn.Module, at: str, marked: Mapping[str, bool]) -> nn.Module:
        if at in marked:
            made = called(module, at, self.replay, marked[at])
        elif at and not any(name.startswith(f"{at}.") for name in marked) and not self.replay.draws(module):
            made = module if not any(True for _ in module.children()) else copy_of(module)
        elif at and not any(name.startswith(f"{at}.") for name in marked):
            made = called(module, at, self.replay, True)
        else:
            made = Wrapper() if is_wrapped(module) else copy_of(module)
            for name, child in module._modules.items():
                if child is not None:
                    made._modules[name] = self._framed(child, f"{at}.{name}" if at else name, marked)
            made.__dict__["named_parameters"] = _Guarded(made, self.replay)
            made.__dict__["_compiled_call_impl"] = None  # its graph has all units in it
        if made is not module:
            self._copies.append((Original(module), made))
        return made

    @property
    def frame(self) -> nn.Module:
        """The copy of the model around the stage's units."""
        return self._frame[0]

    def drawn(self) -> list[tuple[str, nn.Module]]:
        """What may draw random numbers by a name of its own: the stage's units, and what runs on every stage."""
        made: list[Any] = [each for _, each in self._copies if isinstance(each, _Called) and each._stageline_own]
        return [(each._stageline_name, each) for each in made]

    def copies(self) -> dict[int, nn.Module]:
        """The copies that this stage runs, by the ids of the model's own modules."""
        return {id(original.module): made for original, made in self._copies}

    def refresh(self) -> None:
        """Take over what was set on the model's modules meanwhile; its units must still be the same."""
        for name, unit in self.replay.modules.items():
            if _at(self.model, name) is not unit.module:
                raise StagelineError(f"{name} was replaced after the pipeline was made; make a new Pipeline")
        for original, made in self._copies:
            if isinstance(made, Wrapper):
                continue
            for key, value in original.module.__dict__.items():
                if key in _OWN or (key == "_compiled_call_impl" and "named_parameters" in made.__dict__):
                    continue
                if key != "_compiled_call_impl" or _same_weights(original.module, made):
                    made.__dict__[key] = value

    def forward(self, value: Any) -> Any:
        """Run the model's forward as far as this stage goes."""
        for original, made in self._copies:
            made.training = original.module.training
        before, numbers = [buffer._version for _, buffer in self._shared], self.replay.counters.now()
        found = self.replay.run(self._frame[0], value)
        self.replay.counters.check(numbers)
        for (name, buffer), version in zip(self._shared, before, strict=True):
            if buffer._version != version and not (self.replay.first and self.replay.last):
                raise StagelineError(
                    f"the forward changes the buffer {name} outside of its units, and every stage runs that; put the "
                    "change into a module with that buffer, so that one stage makes it"
                )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> StagePart:
        """Copy the frame with what it holds; tensors that are in the memo stay the same."""
        made = StagePart.__new__(StagePart)
        memo[id(self)] = made
        made.__dict__ = {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key != "_frame"}
        frame = copy.deepcopy(self._frame[0], memo)
        made.__dict__["_frame"] = (frame,)
        for name in ("_modules", "_parameters", "_buffers"):
            made.__dict__[name] = frame.__dict__[name]
        return made

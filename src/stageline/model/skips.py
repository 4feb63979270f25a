"""Skip connections in an `nn.Sequential`: one layer stashes a tensor, and a later one pops it.

Each layer passes one value to the next. A skip bypasses layers: a stage that neither stashes nor pops it passes it on
together with its own value, and the gradient travels back the same way.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from stageline.common.errors import StagelineError, shorten

Kind = TypeVar("Kind", bound=type[nn.Module])


@dataclass(frozen=True)
class Stash:
    """A request to keep a value under a name for a later layer."""

    name: str
    value: Any


@dataclass(frozen=True)
class Pop:
    """A request for the value that an earlier layer stashed."""

    name: str


def stash(name: str, value: Any) -> Stash:
    """Keep a value for a later layer: `yield sl.stash("skip", x)` in the forward of a skippable layer.

    >>> stash("skip", None)
    Stash(name='skip', value=None)
    """
    return Stash(name, value)


def pop(name: str) -> Pop:
    """Take a value that an earlier layer stashed: `x = yield sl.pop("skip")` in the forward of a skippable layer.

    >>> pop("skip")
    Pop(name='skip')
    """
    return Pop(name)


class _OpenSkips(threading.local):
    """The skips that this thread has stashed and not popped yet."""

    def __init__(self) -> None:
        self.skips: dict[str, Any] = {}
        self.target: dict[str, Any] = self.skips
        """Where the running layer stashes."""


_open = _OpenSkips()


@contextmanager
def carried(skips: dict[str, Any]) -> Iterator[None]:
    """Let layers pop from and stash into `skips`."""
    before, _open.skips = _open.skips, skips
    try:
        yield
    finally:
        _open.skips = before


def skippable(stash: Sequence[str] = (), pop: Sequence[str] = ()) -> Callable[[Kind], Kind]:
    """Decorate a class of layers that pass tensors to later layers of an `nn.Sequential`, bypassing those in between.

    The forward of such a layer is a generator. `stash` and `pop` are the names that it stashes and pops; each stashed
    name is popped once, by a later layer. If several layers are of one class, `isolate` gives each its own names. The
    model also runs without a pipeline.

    >>> import torch, stageline as sl
    >>> @skippable(stash=["skip"])
    ... class Down(nn.Linear):
    ...     def forward(self, x):
    ...         yield sl.stash("skip", x)
    ...         return super().forward(x)
    >>> @skippable(pop=["skip"])
    ... class Up(nn.Linear):
    ...     def forward(self, x):
    ...         skip = yield sl.pop("skip")
    ...         return super().forward(x) + skip
    >>> model = nn.Sequential(Down(4, 4), nn.Tanh(), Up(4, 4))
    >>> sl.check(model, (torch.ones(4, 4), torch.ones(4, 4)), ranks=3, loss_fn=nn.functional.mse_loss).equal
    True
    """
    stashes, pops = _names(stash, "stash"), _names(pop, "pop")

    def decorate(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise StagelineError(f"skippable must decorate a subclass of nn.Module, got {shorten(kind)}")
        if not inspect.isgeneratorfunction(kind.forward):
            raise StagelineError(
                f"{kind.__name__}.forward is not a generator; use `yield sl.stash(name, tensor)` and "
                "`tensor = yield sl.pop(name)`"
            )
        _decorate(kind, stashes, pops)
        return kind

    return decorate


def _names(names: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise StagelineError(f"{what}= of skippable must be a list of names, got {shorten(names)}")
    if len(set(names)) != len(names):
        raise StagelineError(f"skippable's {what} names {shorten(list(names))} contain a duplicate")
    return tuple(names)


def _decorate(kind: Any, stashes: tuple[str, ...], pops: tuple[str, ...]) -> None:
    # If the parent class is skippable, too, its wrapper of __call__ is replaced.
    plain, called = kind.forward, getattr(kind.__call__, "_skips_inner", kind.__call__)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        popped = kwargs.pop("_skips", None)
        if popped is None:  # forward was called directly
            popped = _pop_all(self)
        return _drive(self, plain(self, *args, **kwargs), popped)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # As a keyword argument, so that recomputing a layer from its arguments gives it the same skips.
        is_recomputed = "_skips" in kwargs
        if not is_recomputed:
            kwargs["_skips"] = _pop_all(self)
        before, _open.target = _open.target, {} if is_recomputed else _open.skips
        try:
            return called(self, *args, **kwargs)
        finally:
            _open.target = before

    call._skips_inner = called  # type: ignore[attr-defined]
    kind.forward, kind.__call__ = forward, call
    kind._skips_stashed, kind._skips_popped = stashes, pops
    kind.isolate = isolate


def isolate(layer: Any, namespace: str, only: Sequence[str] | None = None) -> Any:
    """Put a layer's skips, or `only` some, into a namespace that it shares with the layers it is paired with."""
    if not isinstance(namespace, str) or not namespace:
        raise StagelineError(f"isolate expects a namespace (str), got {shorten(namespace)}")
    known = (*layer._skips_stashed, *layer._skips_popped)
    wrong = [name for name in only or () if name not in known]
    if wrong:
        raise StagelineError(f"{type(layer).__name__} has no skip {wrong[0]!r}; it has {', '.join(known)}")
    spaces = dict(layer.__dict__.get("_skips_spaces", {}))
    spaces.update(dict.fromkeys(known if only is None else only, namespace))
    layer.__dict__["_skips_spaces"] = spaces
    return layer


def _full_name(layer: Any, name: str) -> str:
    space = layer.__dict__.get("_skips_spaces", {}).get(name, "")
    return f"{space}/{name}" if space else name


def _pop_all(layer: Any) -> dict[str, Any]:
    """Remove the skips that a layer pops from the open ones."""
    popped = {}
    for name in layer._skips_popped:
        full_name = _full_name(layer, name)
        if full_name not in _open.skips:
            raise StagelineError(
                f"{type(layer).__name__} pops {full_name!r}, but no earlier layer stashed it; layers with skips run "
                "in the order of their nn.Sequential"
            )
        popped[name] = _open.skips.pop(full_name)
    return popped


def _drive(layer: Any, steps: Generator[Any, Any, Any], popped: Mapping[str, Any]) -> Any:
    """Run the generator of a layer's forward to its end."""
    stashed: set[str] = set()
    used: set[str] = set()
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            unused = [name for name in layer._skips_stashed if name not in stashed]
            unused += [name for name in layer._skips_popped if name not in used]
            if unused:
                raise StagelineError(
                    f"{type(layer).__name__} declares the skip {unused[0]!r}, but its forward neither stashes nor pops "
                    "it; it must do so every time"
                ) from None
            return end.value
        answer = None
        if isinstance(request, Stash):
            _check_declared(layer, request.name, layer._skips_stashed, "stash")
            stashed.add(request.name)
            _open.target[_full_name(layer, request.name)] = request.value
        elif isinstance(request, Pop):
            _check_declared(layer, request.name, layer._skips_popped, "pop")
            used.add(request.name)
            answer = popped[request.name]
        else:
            raise StagelineError(
                f"{type(layer).__name__}.forward yields {shorten(request)}; a skippable layer yields sl.stash(name, "
                "tensor) or sl.pop(name), and returns its output"
            )


def _check_declared(layer: Any, name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        raise StagelineError(
            f"{type(layer).__name__} {'stashes' if what == 'stash' else 'pops'} {name!r}, which it does not declare; "
            f"write @sl.skippable({what}=[{name!r}])"
        )


# Skips across stage boundaries


@dataclass(frozen=True)
class _SkipEnd:
    layer: str
    stage: int
    position: int


class SkipPart(nn.Sequential):
    """The layers of a stage, and the skips that arrive and leave together with its value."""

    arrives: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def parts_of(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> list[nn.Sequential]:
    """Return a module for each stage, which knows the skips that cross its boundaries."""
    modules = (module for layers in stages for _, layer in layers for module in layer.modules())
    if not any(hasattr(module, "_skips_popped") for module in modules):
        return [nn.Sequential(OrderedDict(layers)) for layers in stages]
    ends = _skip_ends(stages)
    parts: list[nn.Sequential] = []
    for stage, layers in enumerate(stages):
        part = SkipPart(OrderedDict(layers))
        part.arrives = tuple(name for name, (start, stop) in ends.items() if start.stage < stage <= stop.stage)
        part.leaves = tuple(name for name, (start, stop) in ends.items() if start.stage <= stage < stop.stage)
        parts.append(part)
    return parts


def _names_of(module: Any, kind: str) -> list[str]:
    """Return the full names of the skips that a module "stashed" or "popped"."""
    return [_full_name(module, name) for name in getattr(module, f"_skips_{kind}", ())]


def check_units(units: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse skips between units of a model with its own forward, which passes values itself."""
    for name, unit in units:
        stashed, popped = (
            {skip for module in unit.modules() for skip in _names_of(module, kind)} for kind in ("stashed", "popped")
        )
        unpaired = sorted(stashed ^ popped)
        if unpaired:
            raise StagelineError(
                f"{name} stashes or pops {unpaired[0]!r} for another part of a model with its own forward; skips are "
                "for nn.Sequential and lists of stages: here, return the tensor and let the forward pass it on"
            )


def _skip_ends(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> dict[str, tuple[_SkipEnd, _SkipEnd]]:
    """Return where each skip starts and ends; refuse skips that are not stashed once and popped once, later."""
    ends: dict[str, dict[str, _SkipEnd]] = {"popped": {}, "stashed": {}}
    position = 0
    for stage, layers in enumerate(stages):
        for name, layer in layers:
            for module in layer.modules():
                position += 1
                end = _SkipEnd(f"{name} ({type(module).__name__})", stage, position)
                for kind, known in ends.items():
                    for skip in _names_of(module, kind):
                        if skip in known:
                            raise StagelineError(
                                f"the skip {skip!r} is {kind} twice, by layers {known[skip].layer} and {end.layer}; "
                                "give each pair of layers a name of its own, with layer.isolate('name of the pair')"
                            )
                        known[skip] = end
    starts, stops = ends["stashed"], ends["popped"]
    for skip, stop in stops.items():
        if skip not in starts or starts[skip].position >= stop.position:
            why = f"{starts[skip].layer}, which comes later, stashes it" if skip in starts else "no layer stashes it"
            raise StagelineError(f"layer {stop.layer} pops {skip!r}, but {why}; stash it in an earlier layer")
    for skip, start in starts.items():
        if skip not in stops:
            raise StagelineError(
                f"layer {start.layer} stashes {skip!r}, but no later layer pops it; pop it, or do not stash it"
            )
    return {skip: (start, stops[skip]) for skip, start in starts.items()}

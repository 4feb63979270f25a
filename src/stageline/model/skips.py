"""Skips between layers of an `nn.Sequential`: one layer stashes a tensor, a later one pops it.

Layers pass one value from each to the next. A skip goes around: on a stage that neither makes nor takes it, it travels
along with what the stage is given and passes on, and its gradient travels back the same way.
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
    """Keep a value under a name for a later layer."""

    name: str
    value: Any


@dataclass(frozen=True)
class Pop:
    """Take the value that an earlier layer stashed."""

    name: str


def stash(name: str, value: Any) -> Stash:
    """In the forward of a skippable layer: `yield sl.stash("skip", x)` keeps x for the layer that pops it.

    >>> stash("skip", None)
    Stash(name='skip', value=None)
    """
    return Stash(name, value)


def pop(name: str) -> Pop:
    """In the forward of a skippable layer: `x = yield sl.pop("skip")` takes what an earlier layer stashed.

    >>> pop("skip")
    Pop(name='skip')
    """
    return Pop(name)


class _Open(threading.local):
    """The skips that this thread has stashed and not popped yet."""

    def __init__(self) -> None:
        self.skips: dict[str, Any] = {}
        self.into: dict[str, Any] = self.skips
        """Where the layer that runs now stashes."""


_open = _Open()


@contextmanager
def carried(skips: dict[str, Any]) -> Iterator[None]:
    """Let the layers that run inside pop from and stash into `skips`."""
    before, _open.skips = _open.skips, skips
    try:
        yield
    finally:
        _open.skips = before


def skippable(stash: Sequence[str] = (), pop: Sequence[str] = ()) -> Callable[[Kind], Kind]:
    """A class decorator: the layer hands tensors to later layers of its `nn.Sequential`, around those between them.

    Its forward is a generator. `stash` and `pop` name what it stashes and pops; each name that is stashed is popped
    once, by a later layer. Layers of one class at several places get names of their own by `isolate`. The model runs as
    it is, without a pipeline, too.

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
            raise StagelineError(f"skippable decorates a class of nn.Module, got {shorten(kind)}")
        if not inspect.isgeneratorfunction(kind.forward):
            raise StagelineError(
                f"{kind.__name__}.forward is no generator; let it `yield sl.stash(name, tensor)` and "
                "`tensor = yield sl.pop(name)`"
            )
        _decorate(kind, stashes, pops)
        return kind

    return decorate


def _names(names: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise StagelineError(f"skippable takes {what}= as a list of names, got {shorten(names)}")
    if len(set(names)) != len(names):
        raise StagelineError(f"skippable's {what} names {shorten(list(names))} hold one of them twice")
    return tuple(names)


def _decorate(kind: Any, stashes: tuple[str, ...], pops: tuple[str, ...]) -> None:
    # Of a class whose parent is skippable, too, the parent's call is left out.
    plain, called = kind.forward, getattr(kind.__call__, "_skips_inner", kind.__call__)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        popped = kwargs.pop("_skips", None)
        if popped is None:  # forward was called directly
            popped = _take(self)
        return _drive(self, plain(self, *args, **kwargs), popped)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # As a keyword, so that what runs a layer once more from what it was given gives it the same skips.
        again = "_skips" in kwargs
        if not again:
            kwargs["_skips"] = _take(self)
        before, _open.into = _open.into, {} if again else _open.skips
        try:
            return called(self, *args, **kwargs)
        finally:
            _open.into = before

    call._skips_inner = called  # type: ignore[attr-defined]
    kind.forward, kind.__call__ = forward, call
    kind._skips_stashed, kind._skips_popped = stashes, pops
    kind.isolate = isolate


def isolate(layer: Any, namespace: str, only: Sequence[str] | None = None) -> Any:
    """Give a layer's skips, or `only` some, names of their own: those of the layers with the same namespace."""
    if not isinstance(namespace, str) or not namespace:
        raise StagelineError(f"isolate takes a namespace, a string, got {shorten(namespace)}")
    known = (*layer._skips_stashed, *layer._skips_popped)
    wrong = [name for name in only or () if name not in known]
    if wrong:
        raise StagelineError(f"{type(layer).__name__} has no skip {wrong[0]!r}; it has {', '.join(known)}")
    spaces = dict(layer.__dict__.get("_skips_spaces", {}))
    spaces.update(dict.fromkeys(known if only is None else only, namespace))
    layer.__dict__["_skips_spaces"] = spaces
    return layer


def _full(layer: Any, name: str) -> str:
    space = layer.__dict__.get("_skips_spaces", {}).get(name, "")
    return f"{space}/{name}" if space else name


def _take(layer: Any) -> dict[str, Any]:
    """What a layer pops, out of what is open."""
    found = {}
    for name in layer._skips_popped:
        full = _full(layer, name)
        if full not in _open.skips:
            raise StagelineError(
                f"{type(layer).__name__} pops {full!r}, and no layer before it stashed that; layers with skips run "
                "in the order of their nn.Sequential"
            )
        found[name] = _open.skips.pop(full)
    return found


def _drive(layer: Any, steps: Generator[Any, Any, Any], popped: Mapping[str, Any]) -> Any:
    """Run the generator of a layer's forward to its end."""
    stashed: set[str] = set()
    taken: set[str] = set()
    answer: Any = None
    while True:
        try:
            wish = steps.send(answer)
        except StopIteration as end:
            break_off = [name for name in layer._skips_stashed if name not in stashed]
            break_off += [name for name in layer._skips_popped if name not in taken]
            if break_off:
                raise StagelineError(
                    f"{type(layer).__name__} declares the skip {break_off[0]!r}, and its forward neither stashes nor "
                    "pops it; it must do so every time"
                ) from None
            return end.value
        answer = None
        if isinstance(wish, Stash):
            _declared(layer, wish.name, layer._skips_stashed, "stash")
            stashed.add(wish.name)
            _open.into[_full(layer, wish.name)] = wish.value
        elif isinstance(wish, Pop):
            _declared(layer, wish.name, layer._skips_popped, "pop")
            taken.add(wish.name)
            answer = popped[wish.name]
        else:
            raise StagelineError(
                f"{type(layer).__name__}.forward yields {shorten(wish)}; a skippable layer yields sl.stash(name, "
                "tensor) or sl.pop(name), and returns its output"
            )


def _declared(layer: Any, name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        raise StagelineError(
            f"{type(layer).__name__} {'stashes' if what == 'stash' else 'pops'} {name!r}, which it does not declare; "
            f"write @sl.skippable({what}=[{name!r}])"
        )


# What crosses the cuts of a model.


@dataclass(frozen=True)
class _End:
    layer: str
    stage: int
    place: int


class SkipPart(nn.Sequential):
    """The layers of a stage, and the skips that come to it and leave it beside its value."""

    arrives: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def has_skips(module: nn.Module) -> bool:
    """Whether a module, or one in it, stashes or pops."""
    return any(hasattr(each, "_skips_popped") for each in module.modules())


def parts_of(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> list[nn.Sequential]:
    """A module for each stage of layers, which knows the skips that cross its ends.

    >>> [len(part) for part in parts_of([[("0", nn.Tanh())], [("1", nn.Tanh()), ("2", nn.Tanh())]])]
    [1, 2]
    """
    if not any(has_skips(layer) for layers in stages for _, layer in layers):
        return [nn.Sequential(OrderedDict(layers)) for layers in stages]
    ends = _ends(stages)
    found: list[nn.Sequential] = []
    for stage, layers in enumerate(stages):
        part = SkipPart(OrderedDict(layers))
        part.arrives = tuple(name for name, (start, stop) in ends.items() if start.stage < stage <= stop.stage)
        part.leaves = tuple(name for name, (start, stop) in ends.items() if start.stage <= stage < stop.stage)
        found.append(part)
    return found


def check_units(units: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse skips between units of a model with a forward of its own: there, values pass by that forward."""
    for name, unit in units:
        ends: tuple[set[str], set[str]] = (set(), set())
        for each in unit.modules():
            for some, names in zip(
                ends, (getattr(each, "_skips_stashed", ()), getattr(each, "_skips_popped", ())), strict=True
            ):
                some.update(_full(each, skip) for skip in names)
        alone = sorted(ends[0] ^ ends[1])
        if alone:
            raise StagelineError(
                f"{name} stashes or pops {alone[0]!r} for another part of a model with a forward of its own; skips are "
                "for nn.Sequential and lists of stages: here, return the tensor and let the forward pass it on"
            )


def _ends(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> dict[str, tuple[_End, _End]]:
    """Where each skip begins and ends; refuse those that do not."""
    starts: dict[str, _End] = {}
    stops: dict[str, _End] = {}
    place = 0
    for stage, layers in enumerate(stages):
        for name, layer in layers:
            for each in layer.modules():
                place += 1
                here = _End(f"{name} ({type(each).__name__})", stage, place)
                for known, skips, done in (
                    (stops, getattr(each, "_skips_popped", ()), "popped"),
                    (starts, getattr(each, "_skips_stashed", ()), "stashed"),
                ):
                    for skip in skips:
                        _once(known, _full(each, skip), here, done)
    for full, stop in stops.items():
        if full not in starts or starts[full].place >= stop.place:
            why = f"{starts[full].layer}, which comes later, stashes it" if full in starts else "no layer stashes it"
            raise StagelineError(f"layer {stop.layer} pops {full!r}, and {why}; stash it in a layer before")
    for full, start in starts.items():
        if full not in stops:
            raise StagelineError(
                f"layer {start.layer} stashes {full!r}, and no later layer pops it; pop it, or leave it out"
            )
    return {full: (start, stops[full]) for full, start in starts.items()}


def _once(known: dict[str, _End], full: str, here: _End, done: str) -> None:
    if full in known:
        raise StagelineError(
            f"the skip {full!r} is {done} twice, by layers {known[full].layer} and {here.layer}; give each pair of "
            "layers a name of its own, with layer.isolate('name of the pair')"
        )
    known[full] = here

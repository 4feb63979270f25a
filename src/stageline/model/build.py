"""Building a model of which a rank holds only its own part, with the same bits for every number of ranks.

The constructor runs once without memory, and what it does is written down; then only the tensors that a rank owns are
made, each by the calls it depends on, with random numbers that depend on the seed and the tensor's name alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.errors import StagelineError, shorten
from stageline.model.record import ALLOCATES, record, recording
from stageline.model.tape import META, Place, Tape
from stageline.runtime.randomness import generator_alone

Owns = Callable[[str], bool]
M = TypeVar("M", bound=nn.Module)


def build(
    factory: Callable[[], M],
    owns: Owns = lambda name: True,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    otherwise: Literal["refuse", "construct"] = "refuse",
    unwritten: Literal["refuse", "zeros"] = "refuse",
) -> M:
    """Build a model that has memory only for the parameters and buffers that `owns(name)` says are this rank's.

    The others are on the meta device. The bits depend on the seed and on names, not on `owns`, `device` or the number
    of ranks. A constructor that cannot be recorded is refused with the line it is about, or, with
    `otherwise="construct"`, runs in the host's memory as a whole, seeded, before the rest is given up again.

    >>> def model():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> first = build(model, lambda name: name.startswith("0."), seed=1)
    >>> {name: str(each.device) for name, each in first.named_parameters()}
    {'0.weight': 'cpu', '0.bias': 'cpu', '2.weight': 'meta', '2.bias': 'meta'}
    >>> torch.equal(first[0].weight, build(model, seed=1)[0].weight)
    True
    """
    _known("otherwise", otherwise, ("refuse", "construct"))
    try:
        description = describe(factory)
    except StagelineError:
        if otherwise == "refuse":
            raise
        return _construct(factory, owns, seed, torch.device(device))
    return description.materialise(owns, seed=seed, device=device, unwritten=unwritten)


def describe(factory: Callable[[], M]) -> Description[M]:
    """Call a model's constructor without memory, and keep what it did to each tensor.

    >>> description = describe(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)))
    >>> description.model[0].weight.is_meta, description.nbytes()
    (True, 4020008)
    >>> description.nbytes(lambda name: name.startswith("1."))
    16008
    """
    model, tape = record(factory)
    held = _held(model)
    for each in held:
        if not each.tensor.is_meta:
            each.replace(_like(each.tensor, tape.constant(each.tensor)))
        each.place = tape.add(each.tensor)
    programs: dict[int, list[int]] = {}
    drawn: dict[int, str] = {}
    for each in held:
        if each.place.storage not in programs:
            programs[each.place.storage] = tape.program(each.place.storage)
            own = [at for at in programs[each.place.storage] if tape.calls[at].draws and at not in drawn]
            drawn.update({at: f"{each.names[0]}/{count}" for count, at in enumerate(own)})
    return Description(model, tape, held, programs, drawn)


@dataclass(frozen=True)
class Description(Generic[M]):
    """A model without memory, and how to make each of its tensors. Made by `describe`."""

    model: M
    _tape: Tape = field(repr=False)
    _held: list[_Held] = field(repr=False)
    _programs: dict[int, list[int]] = field(repr=False)
    _drawn: dict[int, str] = field(repr=False)  # for every call that draws, the name it is seeded by

    def nbytes(self, owns: Owns = lambda name: True) -> int:
        """How many bytes the tensors that `owns` names take; tied and overlapping ones count once.

        >>> describe(lambda: nn.Linear(10, 10)).nbytes()
        440
        """
        return sum(
            self._tape.storages[storage].nbytes() if len(group) > 1 else group[0].place.nbytes
            for storage, group in self._groups(owns).items()
        )

    def materialise(
        self,
        owns: Owns = lambda name: True,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        unwritten: Literal["refuse", "zeros"] = "refuse",
    ) -> M:
        """Give memory and values to the tensors that `owns` names, and return the model; others stay as they are.

        A tensor with several names is owned with any of them, and one that is a plain attribute also with its module.
        What the constructor allocates but never writes is refused by name, or zero with `unwritten="zeros"`.

        >>> model = describe(lambda: nn.Linear(2, 2)).materialise(lambda name: name == "bias")
        >>> model.weight.is_meta, model.bias.is_meta
        (True, False)
        """
        _known("unwritten", unwritten, ("refuse", "zeros"))
        groups = self._groups(owns, made=False)
        holes = {
            storage for storage, group in groups.items() for each in group if not self._tape.is_written(each.place)
        }
        if holes and unwritten == "refuse":
            names = ", ".join(each.about for storage in groups if storage in holes for each in groups[storage][:1])
            raise StagelineError(
                f"the constructor never writes all of {names}; give it a value there, or pass unwritten='zeros' if "
                "weights are loaded afterwards"
            )
        seeds = {at: _seed(seed, name) for at, name in self._drawn.items()}
        with recording:
            for storage, group in groups.items():
                memory = self._tape.replay(
                    self._programs[storage], storage, partial(_draw, seeds), clear=storage in holes
                )
                _place(group, memory, torch.device(device))
                del memory
        return self.model

    def _groups(self, owns: Owns, made: bool = True) -> dict[int, list[_Held]]:
        """The owned tensors by the storage they lie in, with or without those that are made already."""
        groups: dict[int, list[_Held]] = {}
        for each in self._held:
            if each.owned(owns) and (made or not each.made):
                groups.setdefault(each.place.storage, []).append(each)
        return groups


@dataclass(eq=False)
class _Held:
    """A tensor of a model: all its names, and how to put another one in its place."""

    tensor: Tensor
    about: str
    registered: bool  # as a parameter or buffer, not only an attribute
    names: list[str] = field(default_factory=list)
    puts: list[Callable[[Tensor], Any]] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # for an attribute: the parameters and buffers of its module
    place: Place = field(init=False)
    made: bool = False

    def owned(self, owns: Owns) -> bool:
        return any(owns(name) for name in (*self.names, *self.beside))

    def replace(self, tensor: Tensor) -> None:
        for put in self.puts:
            put(tensor)
        self.tensor = tensor


def _held(model: nn.Module) -> list[_Held]:
    """All tensors of a model in its order: parameters, buffers, and attributes that are tensors or hold some."""
    found: dict[int, _Held] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        registered = [*module._parameters.items(), *module._buffers.items()]
        beside = [start + name for name, value in registered if value is not None]
        for kind, values in (("parameter", module._parameters), ("buffer", module._buffers), ("", vars(module))):
            for name, value in values.items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                for path, tensor, put in _walk(start + name, value, partial(values.__setitem__, name)):
                    about = f"the {kind or 'attribute'} {path!r} of {type(module).__name__}"
                    each = found.setdefault(id(tensor), _Held(tensor, about, registered=bool(kind)))
                    each.names.append(path)
                    each.puts.append(put)
                    each.beside += [] if kind or each.registered else beside
    for each in found.values():
        if is_lazy(each.tensor) or each.tensor.layout is not torch.strided:
            raise StagelineError(f"cannot build {each.about}: it has no shape yet, or is not dense")
        if each.tensor._backward_hooks:
            raise StagelineError(f"cannot build {each.about} with its hooks; register them after building")
    return list(found.values())


def _walk(name: str, value: Any, put: Callable[[Any], Any]) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """The tensors in a value, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        yield name, value, put
    elif type(value) in (list, dict):
        for key, each in list(enumerate(value) if isinstance(value, list) else value.items()):
            yield from _walk(f"{name}.{key}", each, partial(value.__setitem__, key))
    elif type(value) is tuple:
        items = list(value)

        def put_item(key: int, new: Any) -> None:
            items[key] = new
            put(tuple(items))

        for key, each in enumerate(value):
            yield from _walk(f"{name}.{key}", each, partial(put_item, key))


def _like(old: Tensor, value: Tensor) -> Tensor:
    """A tensor of this value that is otherwise what the old one was: a parameter, its attributes."""
    wants_gradient = old.requires_grad and old.is_leaf
    if type(old) is Tensor:
        new = value.detach().requires_grad_(wants_gradient)
    else:
        new = Tensor._make_subclass(type(old), value.detach(), wants_gradient)
    vars(new).update(vars(old))
    return new


def _place(group: list[_Held], memory: torch.UntypedStorage, device: torch.device) -> None:
    """Let the tensors of a model lie in this memory; a single one takes no more than its own."""
    if len(group) == 1 and group[0].place.nbytes < memory.nbytes():
        values = [group[0].place.on(memory).clone().to(device)]
    else:
        if device.type != "cpu":
            whole = torch.empty(0, dtype=torch.uint8).set_(memory)
            memory = whole.to(device).untyped_storage()
        values = [each.place.on(memory) for each in group]
    for each, value in zip(group, values, strict=True):
        each.replace(_like(each.tensor, value))
        each.made = True


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1


def _draw(seeds: dict[int, int], at: int, call: Callable[[], Any]) -> Any:
    with _seeded(seeds[at]):
        return call()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let what runs inside draw from this seed; afterwards the host's generator is as it was before."""
    with generator_alone():
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


class _Cleared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets memory that is only allocated be zero, not what it held before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket.__name__ in ALLOCATES else result


def _construct(factory: Callable[[], M], owns: Owns, seed: int, device: torch.device) -> M:
    """Run the constructor as it is, seeded, and give up the memory of what is not owned."""
    with recording, _seeded(_seed(seed, "")), _Cleared():  # type: ignore[no-untyped-call]
        model = factory()
    for each in _held(model):
        target = device if each.owned(owns) else META
        if each.tensor.device != target:
            each.replace(_like(each.tensor, each.tensor.detach().to(target)))
    return model


def _known(argument: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise StagelineError(f"{argument} is {shorten(value)}; expected one of {', '.join(map(repr, values))}")

"""Build a model of which each rank holds only its part, with bits that do not depend on the number of ranks.

The constructor runs once on the meta device, and its operations are recorded. Then only the tensors that a rank owns
are computed, each by the calls it depends on, with random numbers that depend only on the seed and the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageline.common.errors import StagelineError, shorten
from stageline.model._torch_private import (
    MODULE_DICTIONARIES,
    TorchDispatchMode,
    buffers_of,
    has_hooks,
    make_subclass,
    parameters_of,
)
from stageline.model.build.recorder import ALLOCATES, record, recording
from stageline.model.build.tape import META, StorageView, Tape
from stageline.tensors.random_numbers import generator_alone, seed_of

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
    """Build a model with memory only for the parameters and buffers for which `owns(name)` is true.

    The others are on the meta device. The bits depend on the seed and on names, not on `owns`, `device` or the number
    of ranks. If the constructor cannot be recorded, raise `StagelineError` with the line that caused it. With
    `otherwise="construct"`, seed and run it in host memory as a whole instead, then free what is not owned. `unwritten`
    is explained in `Description.materialise`.

    >>> def model():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> first = build(model, lambda name: name.startswith("0."), seed=1)
    >>> {name: str(parameter.device) for name, parameter in first.named_parameters()}
    {'0.weight': 'cpu', '0.bias': 'cpu', '2.weight': 'meta', '2.bias': 'meta'}
    >>> torch.equal(first[0].weight, build(model, seed=1)[0].weight)
    True
    """
    _check_choice("otherwise", otherwise, ("refuse", "construct"))
    try:
        description = describe(factory)
    except StagelineError:
        if otherwise == "refuse":
            raise
        return _construct(factory, owns, seed, torch.device(device))
    return description.materialise(owns, seed=seed, device=device, unwritten=unwritten)


def describe(factory: Callable[[], M]) -> Description[M]:
    """Run a model's constructor on the meta device, and record what it does to each tensor.

    >>> description = describe(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)))
    >>> description.model[0].weight.is_meta, description.nbytes()
    (True, 4020008)
    >>> description.nbytes(lambda name: name.startswith("1."))
    16008
    """
    model, tape = record(factory)
    entries = _tensor_entries(model)
    for entry in entries:
        if not entry.tensor.is_meta:
            entry.replace(_like(entry.tensor, tape.constant(entry.tensor)))
        entry.view = tape.add(entry.tensor)
    programs: dict[int, list[int]] = {}
    seed_names: dict[int, str] = {}
    for entry in entries:
        storage = entry.view.storage
        if storage not in programs:
            programs[storage] = tape.program(storage)
            draws = [index for index in programs[storage] if tape.calls[index].draws and index not in seed_names]
            seed_names.update({index: f"{entry.names[0]}/{count}" for count, index in enumerate(draws)})
    return Description(model, tape, entries, programs, seed_names)


@dataclass(frozen=True)
class Description(Generic[M]):
    """A model on the meta device, and how to compute each of its tensors. Returned by `describe`."""

    model: M
    _tape: Tape = field(repr=False)
    _entries: list[_TensorEntry] = field(repr=False)
    _programs: dict[int, list[int]] = field(repr=False)
    _seed_names: dict[int, str] = field(repr=False)  # by call that draws: the name in its seed

    def nbytes(self, owns: Owns = lambda name: True) -> int:
        """Return the bytes of the owned tensors; tied and overlapping ones count once."""
        return sum(
            self._tape.storages[storage].nbytes() if len(group) > 1 else group[0].view.nbytes
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
        """Allocate and compute the owned tensors, and return the model; the others stay on the meta device.

        A tensor with several names is owned if any of them is; one that is a plain attribute is also owned with its
        module. If the constructor allocates an owned tensor but never writes it, raise `StagelineError` with its name,
        or set it to zero with `unwritten="zeros"`.

        >>> model = describe(lambda: nn.Linear(2, 2)).materialise(lambda name: name == "bias")
        >>> model.weight.is_meta, model.bias.is_meta
        (True, False)
        """
        _check_choice("unwritten", unwritten, ("refuse", "zeros"))
        groups = self._groups(owns, skip_materialised=True)
        unwritten_storages = {
            storage for storage, group in groups.items() for entry in group if not self._tape.is_written(entry.view)
        }
        if unwritten_storages and unwritten == "refuse":
            names = ", ".join(group[0].label for storage, group in groups.items() if storage in unwritten_storages)
            raise StagelineError(
                f"the constructor does not initialise all of {names}; initialise them there, or pass "
                "unwritten='zeros' if weights are loaded afterwards"
            )

        def draw(index: int, run: Callable[[], Any]) -> Any:
            with _seeded(seed, self._seed_names[index]):
                return run()

        with recording:
            for storage, group in groups.items():
                clear = storage in unwritten_storages
                memory = self._tape.replay(self._programs[storage], storage, draw, clear=clear)
                _assign_storage(group, memory, torch.device(device))
                del memory
        return self.model

    def _groups(self, owns: Owns, skip_materialised: bool = False) -> dict[int, list[_TensorEntry]]:
        """Group the owned tensors by their storage."""
        groups: dict[int, list[_TensorEntry]] = {}
        for entry in self._entries:
            if entry.is_owned(owns) and not (skip_materialised and entry.is_materialised):
                groups.setdefault(entry.view.storage, []).append(entry)
        return groups


@dataclass(eq=False)
class _TensorEntry:
    """A tensor of a model: all its names, and how to replace it."""

    tensor: Tensor
    label: str
    is_registered: bool  # as a parameter or buffer, not only an attribute
    names: list[str] = field(default_factory=list)
    setters: list[Callable[[Tensor], Any]] = field(default_factory=list)
    siblings: list[str] = field(default_factory=list)  # of an attribute: the parameters and buffers of its module
    view: StorageView = field(init=False)
    is_materialised: bool = False

    def is_owned(self, owns: Owns) -> bool:
        return any(owns(name) for name in (*self.names, *self.siblings))

    def replace(self, tensor: Tensor) -> None:
        for setter in self.setters:
            setter(tensor)
        self.tensor = tensor


def _tensor_entries(model: nn.Module) -> list[_TensorEntry]:
    """Return all tensors of a model in order: parameters, buffers, and attributes that are or contain tensors."""
    entries: dict[int, _TensorEntry] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        parameters, buffers = parameters_of(module), buffers_of(module)
        siblings = [dotted + name for name, value in (*parameters.items(), *buffers.items()) if value is not None]
        for kind, attributes in (("parameter", parameters), ("buffer", buffers), ("", vars(module))):
            for name, value in attributes.items():
                if name in MODULE_DICTIONARIES:
                    continue
                for path, tensor, setter in _walk(dotted + name, value, partial(attributes.__setitem__, name)):
                    label = f"the {kind or 'attribute'} {path!r} of {type(module).__name__}"
                    entry = entries.setdefault(id(tensor), _TensorEntry(tensor, label, is_registered=bool(kind)))
                    entry.names.append(path)
                    entry.setters.append(setter)
                    entry.siblings += [] if kind or entry.is_registered else siblings
    for entry in entries.values():
        if is_lazy(entry.tensor) or entry.tensor.layout is not torch.strided:
            raise StagelineError(f"cannot build {entry.label}: its shape is not known yet, or it is not dense")
        if has_hooks(entry.tensor):
            raise StagelineError(f"cannot build {entry.label}: it has hooks; register them after building")
    return list(entries.values())


def _walk(name: str, value: Any, setter: Callable[[Any], Any]) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Yield the tensors in a value and in nested lists, tuples and dicts, each with its path and a setter."""
    if isinstance(value, Tensor):
        yield name, value, setter
    elif type(value) in (list, dict):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            yield from _walk(f"{name}.{key}", item, partial(value.__setitem__, key))
    elif type(value) is tuple:
        items = list(value)

        def set_item(key: int, new: Any) -> None:
            items[key] = new
            setter(tuple(items))

        for key, item in enumerate(value):
            yield from _walk(f"{name}.{key}", item, partial(set_item, key))


def _like(old: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with this value and the type and attributes of the old one."""
    requires_grad = old.requires_grad and old.is_leaf
    if type(old) is Tensor:
        new = value.detach().requires_grad_(requires_grad)
    else:
        new = make_subclass(type(old), value.detach(), requires_grad)
    vars(new).update(vars(old))
    return new


def _assign_storage(group: list[_TensorEntry], memory: torch.UntypedStorage, device: torch.device) -> None:
    """Put the tensors of a group on this storage; a single tensor gets no more than its own size."""
    if len(group) == 1 and group[0].view.nbytes < memory.nbytes():
        values = [group[0].view.on(memory).clone().to(device)]
    else:
        if device.type != "cpu":
            whole = torch.empty(0, dtype=torch.uint8).set_(memory)
            memory = whole.to(device).untyped_storage()
        values = [entry.view.on(memory) for entry in group]
    for entry, value in zip(group, values, strict=True):
        entry.replace(_like(entry.tensor, value))
        entry.is_materialised = True


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the host's generator for a name, and restore its state on exit."""
    with generator_alone():
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed_of(f"{seed}/{name}"))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class _ZeroedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sets allocated memory to zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket.__name__ in ALLOCATES else result


def _construct(factory: Callable[[], M], owns: Owns, seed: int, device: torch.device) -> M:
    """Run the constructor normally with a seed, then free the memory of what is not owned."""
    with recording, _seeded(seed, ""), _ZeroedAllocations():  # type: ignore[no-untyped-call]
        model = factory()
    for entry in _tensor_entries(model):
        target = device if entry.is_owned(owns) else META
        if entry.tensor.device != target:
            entry.replace(_like(entry.tensor, entry.tensor.detach().to(target)))
    return model


def _check_choice(argument: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise StagelineError(f"{argument} is {shorten(value)}; expected one of {', '.join(map(repr, values))}")

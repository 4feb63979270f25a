"""Objects that hold tensors and cannot be cut into microbatches: the error that names them."""

from __future__ import annotations

import dis
import functools
import gc
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.common.imports import library_folders
from stageline.tensors.pytree import why_not

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator, range, slice, type(Ellipsis),
)  # fmt: skip
MOST = 20_000
"""How many objects to search inside a value; a value with more is refused as if it held a tensor."""


def is_plain(leaf: Any) -> bool:
    """Whether a leaf of a batch is a number, a string or another value that holds no other objects."""
    return isinstance(leaf, _PLAIN)


def refuse_opaque(leaf: Any, where: str, option: str) -> None:
    """Refuse a leaf of a batch that holds tensors but is not one: every microbatch would get all of them."""
    proxy = isinstance(leaf, weakref.ProxyTypes)  # isinstance says that the proxy of a tensor is one
    own = isinstance(leaf, (type, types.ModuleType)) and _is_users(_namespace_of(leaf))
    if not (proxy or own) and isinstance(leaf, (Tensor, *_PLAIN)):
        return
    if isinstance(leaf, np.ndarray) and not proxy:
        if leaf.ndim:
            verb = "are" if where in ("the inputs", "the targets") else "is"
            raise StagelineError(
                f"{where} {verb} a numpy array of shape {leaf.shape}; a batch must contain tensors; pass "
                "torch.from_numpy(array)"
            )
        return
    path = tensor_inside(leaf)
    if path is not None:
        kind = type(leaf).__name__
        reason = (
            f"{where} is a {kind} that contains tensors (at {path}), but a pipeline cannot cut a {kind} into "
            f"microbatches{why_not(leaf)}"
        )
        way = ", or pass the object by stage_kwargs to the stages that read it"
        if option:
            way = f"; or, to pass the whole object to every microbatch, {option}"
        raise StagelineError(f"{reason}; pass the tensors in a tuple, list, dict, named tuple or dataclass{way}")


def tensor_inside(value: Any) -> str | None:
    """Where an object holds a tensor or an array, or its code reads one; None if there is none.

    The search begins with the objects it refers to. Then follow the globals that its functions read and the attributes
    of its classes, if these are the user's. A tensor without dimensions holds no samples, so it does not count.

    >>> tensor_inside(functools.partial(torch.add, other=torch.ones(2)))
    'partial.other'
    >>> tensor_inside(print) is None
    True
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(type(value).__name__, value)]
    read: deque[tuple[str, Any]] = deque()
    alive: list[Any] = []  # an id is unique only while its object is alive
    if isinstance(value, (type, types.ModuleType)):  # of the user's
        waiting = [(f"{value.__name__}.{name}", part) for name, part in list(vars(value).items())]
    while waiting:
        path, inner = waiting.pop()
        if _holds_samples(inner):
            return path
        if id(inner) in seen or (isinstance(inner, _PLAIN) and not isinstance(inner, weakref.ProxyTypes)):
            continue
        seen.add(id(inner))
        alive.append(inner)
        if len(seen) > MOST:
            return f"{path}, past {MOST} objects"
        waiting += [(f"{path}{name}", part) for name, part in _referents(inner)]
        read += [(f"{path}{name}", part) for name, part in _reads(inner)]
    while read and len(seen) <= MOST:  # nearest first; these are not part of the batch, so there may be many
        path, inner = read.popleft()
        if _holds_samples(inner):
            return path
        if id(inner) in seen or isinstance(inner, (*_PLAIN, nn.Module, logging.Filterer)):
            continue
        seen.add(id(inner))
        alive.append(inner)
        read += [(f"{path}{name}", part) for name, part in (*_referents(inner), *_reads(inner))]
    return None


def _holds_samples(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _reads(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object's code reads, if it is the user's: globals of its functions, and attributes of its classes."""
    if isinstance(value, types.FunctionType):
        yield from _read_by(value.__code__, value.__globals__)
        return
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        yield from _read_by(value.gi_code, value.gi_frame.f_globals)
    for kind in type(value).__mro__:
        if _is_users(_namespace_of(kind)):
            yield from ((f".{name}", part) for name, part in list(vars(kind).items()))


def _read_by(code: types.CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if not _is_users(namespace):
        return
    names, attributes = _names_in(code)
    for name in names:
        part = namespace[name] if name in namespace else sys.modules.get(name)
        if isinstance(part, (type, types.ModuleType)):
            if _is_users(_namespace_of(part)):
                inner = vars(part)
                yield from ((f".{name}.{key}", inner[key]) for key in attributes if key in inner)
        elif name in namespace:
            yield f".{name}", part


_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "stageline"})
_INSTALLED = library_folders()


def _namespace_of(value: type | types.ModuleType) -> Mapping[str, Any]:
    return vars(value) if isinstance(value, types.ModuleType) else vars(sys.modules.get(value.__module__, sys))


def _is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether globals belong to a module of the user, not to an installed package.

    >>> _is_users(vars(torch)), _is_users({"__name__": "__main__"})
    (False, True)
    """
    name, file = str(namespace.get("__name__", "")), str(namespace.get("__file__", ""))
    return name.partition(".")[0] not in _LIBRARIES and not file.startswith(_INSTALLED)


def _referents(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, with its name in Python if that is known."""
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        yield from ((f".{name}", cell) for name, cell in zip(names, value.__closure__ or (), strict=True))
        yield from ((f".{name}", part) for name, part in (value.__kwdefaults__ or {}).items())
        yield from (("", part) for part in value.__defaults__ or ())
        yield from ((f".{name}", part) for name, part in vars(value).items())
        return
    if isinstance(value, (weakref.ref, *weakref.ProxyTypes)):
        # A proxy reveals its object only through a bound method.
        target = value() if isinstance(value, weakref.ref) else getattr(value.__repr__, "__self__", None)
        yield "()", target
        return
    if isinstance(value, ContextVar):
        yield ".get()", value.get(None)
        return
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{number}]", part) for number, part in enumerate(value.args))
        yield from ((f".{name}", part) for name, part in value.keywords.items())
        return
    if isinstance(value, types.CellType):
        try:
            yield "", value.cell_contents
        except ValueError:  # empty
            return
        return
    known = set[int]()
    if isinstance(value, dict):
        for key, part in list(value.items()):
            known.add(id(part))
            yield f"[{shorten(key)}]", part
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        known.add(id(own))
        yield from ((f".{name}", part) for name, part in list(own.items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            part = getattr(value, name, None)
            known.add(id(part))
            yield f".{name}", part
    yield from (("", part) for part in gc.get_referents(value) if id(part) not in known)


def weights_inside(function: Any) -> str | None:
    """What a function reads of a model: a parameter or buffer of a module, or a tensor that requires grad.

    Searches closures, default arguments, bound objects and globals; None if there is none.

    >>> linear = nn.Linear(2, 2)
    >>> weights_inside(linear.forward), weights_inside(torch.relu)
    ('the parameter weight of a Linear', None)
    """
    seen: set[int] = set()
    waiting: list[Any] = [function]
    alive: list[Any] = []
    while waiting and len(seen) < MOST:
        inner = waiting.pop()
        if isinstance(inner, nn.Module):
            for kind, names in (("parameter", inner.named_parameters()), ("buffer", inner.named_buffers())):
                for name, _ in names:
                    return f"the {kind} {name} of a {type(inner).__name__}"
        if isinstance(inner, Tensor):
            if inner.requires_grad:
                return f"a tensor of shape {tuple(inner.shape)} that requires grad"
            continue
        if id(inner) in seen or isinstance(inner, (*_PLAIN, np.ndarray)):
            continue
        seen.add(id(inner))
        alive.append(inner)
        waiting += [part for _, part in _referents(inner)]
        if isinstance(inner, types.FunctionType) and not (inner.__module__ or "").startswith("torch"):
            read, _ = _names_in(inner.__code__)
            waiting += [inner.__globals__[name] for name in read if name in inner.__globals__]
    return None


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals and modules that code and its inner functions read, and all attribute names."""
    names: set[str] = set()
    attributes: set[str] = set(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            names.add(str(step.argval))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = _names_in(inner)
            names.update(more[0])
            attributes.update(more[1])
    return tuple(sorted(names)), tuple(sorted(attributes))

"""Everything that a layer can reach: containers, objects, other modules, closures, and globals that its code uses."""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stageline.common.imports import library_folders
from stageline.model._torch_private import COMPILED_CALL, MODULE_ATTRIBUTES, buffers_of, children_of, parameters_of

_INTERNAL = MODULE_ATTRIBUTES | {COMPILED_CALL, "inplace"}
"""Attributes that are not followed. Hooks are among them: they are the user's own observers."""

_LIBRARIES = library_folders()
_OURS = str(Path(__file__).resolve().parents[1])
_CONTAINER_PACKAGES = frozenset({"argparse", "collections", "queue", "types"})
"""Modules of the standard library whose objects are containers."""
_MAX_OBJECTS = 20_000
"""Maximum number of objects visited for one stage; the walk gives up on references to a whole program."""


@dataclass(frozen=True)
class GlobalName:
    """A global name that a function uses."""

    values: dict[str, Any]
    name: str


@dataclass
class Holder:
    """A mutable object, and how a layer reaches it."""

    value: Any
    path: str
    is_set: bool = False
    """For a global name or a class: whether the visited code may assign it, or an attribute of it."""
    stages: tuple[int, ...] = ()
    """The stages whose layers reach it, if there are several."""

    @property
    def key(self) -> Any:
        """Its identity; a global name is identified by its module and name."""
        return (id(self.value.values), self.value.name) if isinstance(self.value, GlobalName) else id(self.value)

    def slots(self) -> dict[Any, Any]:
        """Return its current contents by key, index or attribute."""
        return slots_of(self.value)


def slots_of(value: Any) -> dict[Any, Any]:
    """Return the contents of an object by key, index or attribute."""
    if isinstance(value, dict | weakref.WeakValueDictionary | weakref.WeakKeyDictionary):
        return dict(value)
    if isinstance(value, types.FunctionType):
        return dict(vars(value))
    if isinstance(value, GlobalName):
        return {value.name: value.values[value.name]} if value.name in value.values else {}
    if isinstance(value, types.CellType):
        try:
            return {"": value.cell_contents}
        except ValueError:  # empty cell
            return {}
    if isinstance(value, list | tuple | deque | set | frozenset):
        return dict(enumerate(value))
    if isinstance(value, Tensor) or is_array(value):
        return {"": value}
    if isinstance(value, type | types.ModuleType):
        return {
            name: attribute
            for name, attribute in vars(value).items()
            if not name.startswith("__") and (isinstance(attribute, nn.Module) or not isinstance(attribute, _CODE))
        }
    if isinstance(value, nn.Module):
        attributes = {name: attribute for name, attribute in value.__dict__.items() if name not in _INTERNAL}
        return attributes | buffers_of(value)
    slots = dict(getattr(value, "__dict__", {}))
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            slots[name] = getattr(value, name)
    return slots


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def reach(layers: Sequence[tuple[str, nn.Module]]) -> dict[Any, Holder]:
    """Return the mutable objects that the layers of a stage can reach."""
    return _Walk().run(layers)


def reached_tensors(values: Sequence[tuple[str, Any]], frames: Sequence[nn.Module] = ()) -> list[Tensor] | None:
    """Return the parameters and tensors that layers or functions can reach; None if there are too many objects.

    For modules in `frames`, only attributes that are not registered modules or tensors count. Closures of library
    functions are followed, too: a decorator may be one.
    """
    walk = _Walk(through_libraries=True)
    walk.run(values, frames)
    if walk.gave_up:
        return None
    tensors: list[Tensor] = [*walk.parameters]
    for holder in walk.seen.values():
        if isinstance(holder.value, nn.Module):
            tensors += [parameter for parameter in parameters_of(holder.value).values() if parameter is not None]
        elif isinstance(holder.value, Tensor):
            tensors.append(holder.value)
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Walk:
    def __init__(self, through_libraries: bool = False) -> None:
        self._through_libraries = through_libraries
        self.gave_up = False
        self.parameters: list[nn.Parameter] = []
        self.seen: dict[Any, Holder] = {}
        self._done: set[int] = set()
        self._classes: set[int] = set()
        self.sets_classes = False
        self._queue: deque[tuple[Any, str]] = deque()

    def run(self, layers: Sequence[tuple[str, Any]], frames: Sequence[nn.Module] = ()) -> dict[Any, Holder]:
        for frame in frames:
            self._queue.extend((attribute, name) for name, attribute in vars(frame).items() if name not in _INTERNAL)
            self._class(type(frame), type(frame).__name__)
        self._queue.extend((layer, name) for name, layer in layers)
        while self._queue and len(self._done) < _MAX_OBJECTS:
            value, path = self._queue.popleft()
            if id(value) not in self._done and not isinstance(value, _PLAIN):
                self._done.add(id(value))
                self._visit(value, path)
        self.gave_up = bool(self._queue)
        for holder in self.seen.values():
            kinds = (type, types.FunctionType)
            holder.is_set = holder.is_set or (self.sets_classes and isinstance(holder.value, kinds))
        return self.seen

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, nn.Parameter):
            self.parameters.append(value)
        elif isinstance(value, _MUTABLE) or is_array(value):
            self._hold(value, path)
        elif isinstance(value, tuple | frozenset):
            self._queue.extend((entry, path) for entry in value)
        elif isinstance(value, weakref.ref):
            self._queue.append((value(), path))
        elif isinstance(value, partial):
            self._queue.extend([(value.func, path), (value.args, path), (value.keywords, path)])
        elif isinstance(value, types.BuiltinMethodType):  # append of a list
            self._queue.append((value.__self__, path))
        elif isinstance(value, types.MethodType):
            self._queue.extend([(value.__self__, path), (value.__func__, path)])
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, types.ModuleType):
            if is_user_module(value.__name__):
                self._hold(value, value.__name__)
        elif has_state(type(value)):
            self._hold(value, path)
            self._class(type(value), path)
        elif isinstance(model := getattr(value, "__dict__", {}).get("model"), nn.Module):  # a pipeline
            self.parameters.extend(model.parameters())

    def _hold(self, value: Any, path: str) -> None:
        holder = Holder(value, path)
        self.seen.setdefault(holder.key, holder)
        if not isinstance(value, Tensor) and not is_array(value):
            self._queue.extend((slot, slot_path(path, value, key)) for key, slot in holder.slots().items())

    def _module(self, module: nn.Module, path: str) -> None:
        self._hold(module, path)
        for name, child in children_of(module).items():
            self._queue.append((child, f"{path}.{name}"))
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                self.seen.setdefault(id(buffer), Holder(buffer, f"{path}.{name}"))
        self._class(type(module), path)

    def _class(self, kind: type, path: str) -> None:
        """Visit the class of an object: its class attributes, and what its methods use."""
        for base in kind.__mro__:
            if base is object or id(base) in self._classes or not is_user_module(base.__module__):
                continue
            self._classes.add(id(base))
            self._hold(base, base.__qualname__)
            for value in vars(base).values():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    self._queue.append((function, path))

    def _function(self, function: types.FunctionType, path: str) -> None:
        if not _is_user_file(function.__code__.co_filename):
            if self._through_libraries:
                self._queue.extend((cell, path) for cell in function.__closure__ or ())
            return
        self._hold(function, function.__qualname__)
        self._libraries(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._queue.append((cell, name))
        self._queue.extend((default, path) for default in (function.__defaults__ or ()))
        self._queue.extend((default, path) for default in (function.__kwdefaults__ or {}).values())
        self.sets_classes = self.sets_classes or _may_set_classes(function.__code__)
        for name, is_set in _global_names(function.__code__).items():
            value = function.__globals__.get(name)
            if name in vars(builtins) or isinstance(value, _CODE):
                self._queue.append((value, name))
                continue
            self._hold(GlobalName(function.__globals__, name), name)
            if is_set:
                self.seen[id(function.__globals__), name].is_set = True

    def _libraries(self, function: types.FunctionType) -> None:
        """Record the library modules that a function names, and whether it sets attributes there."""
        for names, is_set in _attribute_chains(function.__code__):
            value = function.__globals__.get(names[0])
            modules = [value]
            for name in names[1:]:
                value = _attribute(value, name) if isinstance(value, types.ModuleType) else None
                modules.append(value)
            for index, module in enumerate(modules):
                if isinstance(module, types.ModuleType) and not is_user_module(module.__name__):
                    holder = self.seen.setdefault(id(module), Holder(module, module.__name__))
                    holder.is_set = holder.is_set or (is_set and index == len(modules) - 1)


def _attribute(module: types.ModuleType, name: str) -> Any:
    """An attribute of a module; None if there is none. A lazy module, such as torch.classes, may raise any error."""
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def slot_path(path: str, value: Any, key: Any) -> str:
    """Return the path of a slot of a value, which has a path itself."""
    if isinstance(value, types.CellType | GlobalName | Tensor) or is_array(value):
        return path
    if isinstance(value, dict | list | deque):
        return f"{path}[{key!r}]"
    return f"{path}.{key}"


@lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> dict[str, bool]:
    """Return the global names that code and its nested functions use, and whether they are assigned."""
    names: dict[str, bool] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            is_set = instruction.opname == "STORE_GLOBAL"
            names[instruction.argval] = names.get(instruction.argval, False) or is_set
    for nested in _nested(code):
        names |= {name: is_set or names.get(name, False) for name, is_set in _global_names(nested).items()}
    return names


def _nested(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


@lru_cache(maxsize=4096)
def _attribute_chains(code: types.CodeType) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """Return the global names that code uses, with the attributes after them, and whether an attribute is set there."""
    chains: list[tuple[tuple[str, ...], bool]] = []
    names: tuple[str, ...] = ()
    sets = "setattr" in code.co_names
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            names = (instruction.argval,)
            chains.append((names, sets))
        elif names and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, instruction.argval)
            chains.append((names, sets))
        elif instruction.opname == "STORE_ATTR" and names:
            chains.append((names, True))
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            names = ()
    return tuple(dict.fromkeys((*chains, *(chain for nested in _nested(code) for chain in _attribute_chains(nested)))))


@lru_cache(maxsize=4096)
def _may_set_classes(code: types.CodeType) -> bool:
    """Whether code may set attributes of a class: of anything but a local variable such as `self`."""
    if "setattr" in code.co_names:
        return True
    previous = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and not previous.startswith("LOAD_FAST"):
            return True
        previous = instruction.opname
    return any(map(_may_set_classes, _nested(code)))


@lru_cache(maxsize=4096)
def _is_user_file(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _OURS))


def is_user_module(module: str) -> bool:
    """Whether a module, given by name, belongs to the user and not to a library; interactive code has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module not in sys.stdlib_module_names and (file is None or _is_user_file(file))


def has_state(kind: type) -> bool:
    """Whether objects of a class are searched: not those of torch and most of the standard library."""
    package = kind.__module__.partition(".")[0]
    return package in _CONTAINER_PACKAGES or (
        package not in sys.stdlib_module_names and package not in ("torch", "numpy", "stageline")
    )


def is_object(value: Any) -> bool:
    """Whether a value is an instance of a class whose objects are searched, other than a tensor, module or class."""
    kind = type(value)
    return not isinstance(value, Tensor | nn.Module | type) and kind.__module__ != "builtins" and has_state(kind)


_MUTABLE = (
    Tensor, dict, list, set, deque, types.CellType, weakref.WeakValueDictionary, weakref.WeakKeyDictionary,
)  # fmt: skip
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))

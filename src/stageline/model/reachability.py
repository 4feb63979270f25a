"""What a layer can reach beside its parameters: containers, objects, other modules, closures, globals of its class."""

from __future__ import annotations

import builtins
import dis
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "inplace"}
"""What every module has: its tensors, its children, its hooks. Hooks are the user's own observers."""

_LIBRARIES = tuple(
    path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))
)
_OURS = str(Path(__file__).resolve().parents[1])
_OPEN = frozenset({"argparse", "collections", "queue", "types"})
"""The standard library's modules whose objects are containers."""
_LIMIT = 20_000
"""Objects looked at for one stage; what refers to a whole program is given up on."""


@dataclass(frozen=True)
class Name:
    """A global name that a function uses."""

    values: dict[str, Any]
    name: str


@dataclass
class Holder:
    """Something that can be changed, and how a layer reaches it."""

    value: Any
    path: str
    is_set: bool = False
    """Of a global name or a class: whether code that was seen may set it, or an attribute of it."""

    @property
    def key(self) -> Any:
        """What it is known by: a global name belongs to its module."""
        return (id(self.value.values), self.value.name) if isinstance(self.value, Name) else id(self.value)

    def slots(self) -> dict[Any, Any]:
        """What it holds now, by key, index or attribute."""
        return slots_of(self.value)


def slots_of(value: Any) -> dict[Any, Any]:
    """What an object holds, by key, index or attribute.

    >>> slots_of([3, 4]), slots_of({"a": 1})
    ({0: 3, 1: 4}, {'a': 1})
    """
    if isinstance(value, dict | weakref.WeakValueDictionary | weakref.WeakKeyDictionary):
        return dict(value)
    if isinstance(value, types.FunctionType):
        return dict(vars(value))
    if isinstance(value, Name):
        return {value.name: value.values[value.name]} if value.name in value.values else {}
    if isinstance(value, types.CellType):
        try:
            return {"": value.cell_contents}
        except ValueError:  # nothing was put there yet
            return {}
    if isinstance(value, list | tuple | deque | set | frozenset):
        return dict(enumerate(value))
    if isinstance(value, Tensor) or is_array(value):
        return {"": value}
    if isinstance(value, type | types.ModuleType):
        found = {name: each for name, each in vars(value).items() if not name.startswith("__")}
        return {
            name: each for name, each in found.items() if isinstance(each, nn.Module) or not isinstance(each, _CODE)
        }
    if isinstance(value, nn.Module):
        return {name: each for name, each in value.__dict__.items() if name not in _INTERNAL} | value._buffers
    found = dict(getattr(value, "__dict__", {}))
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def is_array(value: Any) -> bool:
    """Whether something is an array of NumPy's."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def reach(layers: Sequence[tuple[str, nn.Module]]) -> dict[Any, Holder]:
    """What the layers of a stage can reach that can be changed.

    >>> box = {}
    >>> layer = nn.Linear(2, 2)
    >>> layer.box = box
    >>> [holder.path for holder in reach([("up", layer)]).values() if holder.value is box]
    ['up.box']
    """
    return _Walk().run(layers)


def reached_tensors(values: Sequence[tuple[str, Any]], frames: Sequence[nn.Module] = ()) -> list[Tensor] | None:
    """The parameters and tensors that layers or functions can reach; None where there is too much to look through.

    Of modules in `frames` only the attributes that are no registered modules or tensors count. Closures of
    libraries' functions are followed, too: a decorator may be one.

    >>> layer, other = nn.ReLU(), nn.Linear(2, 2, bias=False)
    >>> layer.box = [other]
    >>> [tensor is other.weight for tensor in reached_tensors([("up", layer)])]
    [True]
    """
    walk = _Walk(through_libraries=True)
    walk.frames(frames)
    walk.run(values)
    if walk.gave_up:
        return None
    tensors: dict[int, Tensor] = {id(each): each for each in walk.parameters}
    for holder in walk.seen.values():
        if isinstance(holder.value, nn.Module):
            tensors |= {id(each): each for each in holder.value._parameters.values() if each is not None}
        elif isinstance(holder.value, Tensor):
            tensors[id(holder.value)] = holder.value
    return list(tensors.values())


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

    def frames(self, modules: Sequence[nn.Module]) -> None:
        """Look at what modules hold beside their registered modules and tensors."""
        for module in modules:
            self._queue.extend((each, name) for name, each in module.__dict__.items() if name not in _INTERNAL)
            self._class(type(module), type(module).__name__)

    def run(self, layers: Sequence[tuple[str, Any]]) -> dict[Any, Holder]:
        self._queue.extend((layer, name) for name, layer in layers)
        while self._queue and len(self._done) < _LIMIT:
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
        elif isinstance(value, _HELD) or is_array(value):
            self._hold(value, path)
        elif isinstance(value, tuple | frozenset):
            self._queue.extend((each, path) for each in value)
        elif isinstance(value, weakref.ref):
            self._queue.append((value(), path))
        elif isinstance(value, partial):
            self._queue.extend((each, path) for each in (value.func, value.args, value.keywords))
        elif isinstance(value, types.BuiltinMethodType):  # append of a list
            self._queue.append((value.__self__, path))
        elif isinstance(value, types.MethodType):
            self._queue.extend([(value.__self__, path), (value.__func__, path)])
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, types.ModuleType):
            if is_users(value.__name__):
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
            self._queue.extend((each, _joined(path, value, key)) for key, each in holder.slots().items())

    def _module(self, module: nn.Module, path: str) -> None:
        self._hold(module, path)
        for name, child in module._modules.items():
            self._queue.append((child, f"{path}.{name}"))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.seen.setdefault(id(buffer), Holder(buffer, f"{path}.{name}"))
        self._class(type(module), path)

    def _class(self, kind: type, path: str) -> None:
        """What the class of an object holds for all of its objects, and what its methods use."""
        for each in kind.__mro__:
            if each is object or id(each) in self._classes or not is_users(each.__module__):
                continue
            self._classes.add(id(each))
            self._hold(each, each.__qualname__)
            for value in vars(each).values():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    self._queue.append((function, path))

    def _function(self, function: types.FunctionType, path: str) -> None:
        if not _in_users_code(function.__code__.co_filename):
            if self._through_libraries:
                self._queue.extend((cell, path) for cell in function.__closure__ or ())
            return
        self._hold(function, function.__qualname__)
        self._libraries(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._queue.append((cell, name))
        self._queue.extend((each, path) for each in (function.__defaults__ or ()))
        self._queue.extend((each, path) for each in (function.__kwdefaults__ or {}).values())
        self.sets_classes = self.sets_classes or _may_set_classes(function.__code__)
        for name, is_set in _global_names(function.__code__).items():
            value = function.__globals__.get(name)
            if name in vars(builtins) or isinstance(value, _CODE):
                self._queue.append((value, name))
                continue
            self._hold(Name(function.__globals__, name), name)
            if is_set:
                self.seen[id(function.__globals__), name].is_set = True

    def _libraries(self, function: types.FunctionType) -> None:
        """The modules of libraries that a function names, and whether it sets something there."""
        for names, is_set in _chains(function.__code__):
            value = function.__globals__.get(names[0])
            modules = [value]
            for name in names[1:]:
                value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
                modules.append(value)
            for index, module in enumerate(modules):
                if isinstance(module, types.ModuleType) and not is_users(module.__name__):
                    holder = self.seen.setdefault(id(module), Holder(module, module.__name__))
                    holder.is_set = holder.is_set or (is_set and index == len(modules) - 1)


def _joined(path: str, value: Any, key: Any) -> str:
    if isinstance(value, types.CellType | Name):
        return path
    if isinstance(value, dict | list | deque):
        return f"{path}[{key!r}]"
    return f"{path}.{key}"


@lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> dict[str, bool]:
    """The global names that code uses, that of functions inside of it too, and whether it sets them."""
    found: dict[str, bool] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            found[each.argval] = found.get(each.argval, False) or each.opname == "STORE_GLOBAL"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= {name: is_set or found.get(name, False) for name, is_set in _global_names(constant).items()}
    return found


@lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """The global names that code uses with the attributes behind them, and whether it sets an attribute there."""
    found: list[tuple[tuple[str, ...], bool]] = []
    names: tuple[str, ...] = ()
    sets = "setattr" in code.co_names
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            names = (each.argval,)
            found.append((names, sets))
        elif names and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, each.argval)
            found.append((names, sets))
        elif each.opname == "STORE_ATTR" and names:
            found.append((names, True))
        elif each.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            names = ()
    inside = (_chains(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys((*found, *(chain for chains in inside for chain in chains))))


@lru_cache(maxsize=4096)
def _may_set_classes(code: types.CodeType) -> bool:
    """Whether code sets attributes of something that is no local variable, as `self` is: perhaps of a class."""
    if "setattr" in code.co_names:
        return True
    before = ""
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR" and not before.startswith("LOAD_FAST"):
            return True
        before = each.opname
    return any(_may_set_classes(each) for each in code.co_consts if isinstance(each, types.CodeType))


@lru_cache(maxsize=1024)
def _data_names(value: Any, size: int) -> tuple[str, ...]:
    """The names of a class or a module that are neither functions nor classes; `size` is how many it has in all."""
    return tuple(
        name
        for name, each in vars(value).items()
        if not name.startswith("__") and (isinstance(each, nn.Module) or not isinstance(each, _CODE))
    )


@lru_cache(maxsize=4096)
def _in_users_code(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _OURS))


def is_users(module: str) -> bool:
    """Whether a module, by its name, is no library's: one without a file was typed in."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module not in sys.stdlib_module_names and (file is None or _in_users_code(file))


def has_state(kind: type) -> bool:
    """Whether objects of a class are looked into: those of the standard library and of torch are not."""
    package = kind.__module__.partition(".")[0]
    return package in _OPEN or (
        package not in sys.stdlib_module_names and package not in ("torch", "numpy", "stageline")
    )


_HELD = (
    Tensor, dict, list, set, deque, types.CellType, weakref.WeakValueDictionary, weakref.WeakKeyDictionary,
)  # fmt: skip
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))

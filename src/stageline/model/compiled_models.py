"""Models that `torch.compile` wrapped or compiled: unwrap them, or run them without compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from stageline.autograd.graphs.options import allow_forms
from stageline.model._torch_private import COMPILED_CALL, COMPILED_FUNCTION, MODULE_DICTIONARIES, WRAPPED, children_of


def is_wrapped(module: Any) -> bool:
    """Whether a module was returned by `torch.compile(module)`."""
    return isinstance(module, nn.Module) and isinstance(children_of(module).get(WRAPPED), nn.Module)


def unwrapped(model: Any) -> Any:
    """Return the model inside of `torch.compile(model)`, with a warning; return anything else unchanged."""
    owner = _owner_of_function(model)
    if owner is None and not is_wrapped(model):
        return model
    model = model if owner is None else owner
    while is_wrapped(model):
        model = children_of(model)[WRAPPED]
    _warn(f"torch.compile({type(model).__name__})")
    return model


def _owner_of_function(model: Any) -> nn.Module | None:
    """Return the module of a compiled function: torch.compile returns one for a module that it compiled before."""
    if not hasattr(model, COMPILED_FUNCTION) or isinstance(model, nn.Module):
        return None
    while model is not None:
        owner = getattr(model, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        model = getattr(model, "__wrapped__", None)
    return None


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} is unwrapped and runs without torch.compile: its graph cannot be cut into stages; pass compile=True "
        "to Pipeline, which compiles every layer or unit separately",
        stacklevel=4,
    )


def inner(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the module inside of all wrappers, and its name there."""
    while is_wrapped(module):
        name, module = f"{name}.{WRAPPED}", children_of(module)[WRAPPED]  # type: ignore[assignment]
    return name, module


def warn_of_wrapped(model: nn.Module) -> None:
    """Warn about wrapped parts of a model with its own forward: they run without compiled code."""
    names = [name for name, module in model.named_modules() if is_wrapped(module)]
    if names:
        _warn(f"{names[0]}, which torch.compile wrapped,")


class Wrapper(nn.Module):
    """Replaces the wrapper of torch.compile in a stage: it calls the module inside, under the same name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside."""
        return children_of(self)[WRAPPED](*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module inside."""
        children = self.__dict__.get(MODULE_DICTIONARIES[0], {})
        if name in children:
            return children[name]
        return getattr(children[WRAPPED], name) if children else super().__getattr__(name)


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules, or a module inside of them, is compiled."""
    return any(
        is_wrapped(submodule) or getattr(submodule, COMPILED_CALL, None) is not None
        for module in modules
        for submodule in module.modules()
    )


@contextmanager
def eager(model: nn.Module, units: Iterable[nn.Module]) -> Iterator[None]:
    """Run the frame around the units without compiled code, so that calls of the units can be observed."""
    inside = {id(module) for unit in units for module in unit.modules()}
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        if id(module) in inside:
            continue
        for key in (COMPILED_CALL, *(("forward",) if is_wrapped(module) else ())):
            if module.__dict__.get(key) is not None:
                changed.append((module, key, module.__dict__[key]))
                module.__dict__[key] = None
        if is_wrapped(module):
            module.__dict__["forward"] = children_of(module)[WRAPPED]
    try:
        yield
    finally:
        for module, key, value in changed:
            module.__dict__[key] = value


@contextmanager
def compiled(modules: Iterable[nn.Module], options: Mapping[str, Any] | None) -> Iterator[None]:
    """Run modules compiled by torch.compile with these keyword arguments; None changes nothing."""
    chosen = [] if options is None else [module for module in modules if any(True for _ in module.parameters())]
    before = [(module, module.__dict__.get(COMPILED_CALL)) for module in chosen]
    allow_forms(chosen)
    try:
        for module in chosen:
            module.compile(**(options or {}))
        yield
    finally:
        for module, implementation in before:
            module.__dict__[COMPILED_CALL] = implementation

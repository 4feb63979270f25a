"""Models that torch.compile wrapped or compiled: what is inside of the wrapper, and running it as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_WRAPPED = "_orig_mod"
"""Where torch.compile keeps the module that it was given."""


def is_wrapped(module: Any) -> bool:
    """Whether a module is what torch.compile(module) gave.

    >>> import torch
    >>> is_wrapped(nn.Linear(2, 2)), is_wrapped(torch.compile(nn.Linear(2, 2), backend="eager"))
    (False, True)
    """
    return isinstance(module, nn.Module) and isinstance(module._modules.get(_WRAPPED), nn.Module)


def unwrapped(model: Any) -> Any:
    """The model inside of torch.compile(model), with a warning that says what to do; all else as it is.

    >>> import torch
    >>> linear = nn.Linear(2, 2)
    >>> with warnings.catch_warnings(action="ignore"):
    ...     unwrapped(torch.compile(linear, backend="eager")) is linear
    True
    """
    held = _of_function(model)
    if held is None and not is_wrapped(model):
        return model
    model = model if held is None else held
    while is_wrapped(model):
        model = model._modules[_WRAPPED]
    _warn(f"torch.compile({type(model).__name__})")
    return model


def _of_function(model: Any) -> nn.Module | None:
    """The module in a function: torch.compile gives one for a module that it was given before."""
    if not hasattr(model, "_torchdynamo_orig_callable") or isinstance(model, nn.Module):
        return None
    while model is not None:
        owner = getattr(model, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        model = getattr(model, "__wrapped__", None)
    return None


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} is unwrapped and runs as it is without torch.compile: its graph cannot be cut into stages; give "
        "compile=True to Pipeline, which compiles every layer or unit by itself",
        stacklevel=4,
    )


def inner(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """A module inside of its wrappers, and its name there.

    >>> import torch
    >>> inner("block", torch.compile(nn.Linear(2, 2), backend="eager"))
    ('block._orig_mod', Linear(in_features=2, out_features=2, bias=True))
    """
    while is_wrapped(module):
        name, module = f"{name}.{_WRAPPED}", module._modules[_WRAPPED]  # type: ignore[assignment]
    return name, module


def warn_of_wrapped(model: nn.Module) -> None:
    """Say that wrapped parts of a model with a forward of its own run as they are."""
    names = [name for name, module in model.named_modules() if is_wrapped(module)]
    if names:
        _warn(f"{names[0]}, which torch.compile wrapped,")


class Wrapper(nn.Module):
    """What stands for a wrapper in a stage: it calls what it holds, under the same name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside."""
        return self._modules[_WRAPPED](*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """What it does not have, the module inside has."""
        held = self.__dict__.get("_modules", {})
        return held[name] if name in held else getattr(held[_WRAPPED], name) if held else super().__getattr__(name)


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether a module, or one in it, is compiled."""
    return any(
        is_wrapped(each) or getattr(each, "_compiled_call_impl", None) is not None
        for module in modules
        for each in module.modules()
    )


@contextmanager
def eager(model: nn.Module, units: Iterable[nn.Module]) -> Iterator[None]:
    """While this lasts, what is around the units runs as it is, so that calls of the units are seen."""
    inside = {id(module) for unit in units for module in unit.modules()}
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        if id(module) in inside:
            continue
        for key in ("_compiled_call_impl", *(("forward",) if is_wrapped(module) else ())):
            if module.__dict__.get(key) is not None:
                changed.append((module, key, module.__dict__[key]))
                module.__dict__[key] = None
        if is_wrapped(module):
            module.__dict__["forward"] = module._modules[_WRAPPED]
    try:
        yield
    finally:
        for module, key, value in changed:
            module.__dict__[key] = value

"""Plain functions as layers: `[nn.Linear(4, 4), torch.relu, nn.Linear(4, 4)]`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError
from stageline.runtime.batches.opaque_objects import weights_inside


class FunctionLayer(nn.Module):
    """A function as a module without parameters.

    >>> import torch
    >>> FunctionLayer(torch.relu)
    FunctionLayer(relu)
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function  # the function itself, so that `forward` has its signature

    def extra_repr(self) -> str:
        """The name of the function."""
        return name_of(self.forward)


def name_of(function: Any) -> str:
    """The name of a function; of a partial, the name of the function it calls."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(function).__name__))


def builds(value: Any) -> bool:
    """Whether a callable takes no arguments, as a function that builds a layer does.

    >>> builds(lambda: nn.ReLU()), builds(nn.functional.relu), builds(nn.ReLU)
    (True, False, True)
    """
    if isinstance(value, type):
        return True
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = inspect.Parameter
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is kinds.empty and parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    return not needed


def as_layer(value: Any, number: int) -> Any:
    """Wrap a function as a layer and return anything else unchanged; refuse one with weights or without input."""
    if isinstance(value, nn.Module) or not callable(value):
        return value
    if isinstance(value, type):
        raise StagelineError(
            f"layer {number} is the class {value.__name__}, not a layer; pass an instance: {value.__name__}(…)"
        )
    name = name_of(value)
    if builds(value) and not _takes_something(value):
        raise StagelineError(
            f"layer {number}, {name}, takes no input, and the list also has layers; pass the layer it builds, or a "
            "function that builds each layer"
        )
    weights = weights_inside(value)
    if weights is not None:
        raise StagelineError(
            f"layer {number} is the function {name}, which uses {weights}; a pipeline would not train, save or place "
            "it. Pass the module itself as the layer, or a module that holds what the function uses"
        )
    return FunctionLayer(value)


def _takes_something(function: Any) -> bool:
    return bool(inspect.signature(function).parameters)


def with_functions(stages: Any) -> Any:
    """Wrap the functions in a list of layers as modules; return anything else, and a list of builders, unchanged.

    >>> import torch
    >>> with_functions([nn.Tanh(), torch.relu])
    [Tanh(), FunctionLayer(relu)]
    """
    if not isinstance(stages, list | tuple) or not stages:
        return stages
    builders = [callable(layer) and not isinstance(layer, nn.Module) and builds(layer) for layer in stages]
    if all(builders) or (any(builders) and not all(map(callable, stages))):
        return stages
    if any(builders) and not any(isinstance(layer, nn.Module) for layer in stages):
        return [
            layer if builder else partial(_same, as_layer(layer, number))
            for number, (layer, builder) in enumerate(zip(stages, builders, strict=True))
        ]
    return [as_layer(layer, number) for number, layer in enumerate(stages)]


def _same(layer: nn.Module) -> nn.Module:
    return layer

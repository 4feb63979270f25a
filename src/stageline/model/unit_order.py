"""The units of a model in the order in which its forward calls them, as an example shows it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from stageline.common.errors import StagelineError, place_of, shorten
from stageline.model import huggingface
from stageline.model._torch_private import children_of
from stageline.model.compiled_models import eager, inner, warn_of_wrapped
from stageline.model.stage_module.boundary import arguments
from stageline.model.stage_module.data_flow import CallOrder, DataFlow
from stageline.model.stage_module.forward_replay import Replay
from stageline.model.stage_module.stage_module import Original, StagePart
from stageline.model.staged import listed
from stageline.model.units import Unit, find_units


def units_of(model: nn.Module, kind: str = "", stacks: Sequence[str] = ()) -> list[Unit]:
    """Return the units of a model in the order of definition: the layers of an `nn.Sequential`, or see `find_units`."""
    if isinstance(model, nn.Sequential) and not stacks and not kind:
        return [Unit(name, module, True) for name, module in children_of(model).items() if module is not None]
    units = [Unit(*inner(unit.name, unit.module), unit.block) for unit in find_units(model, stacks, kind)]
    warn_of_wrapped(model)
    return units


def in_call_order(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], DataFlow | None]:
    """Return the units in the order of their calls, and the data flow, as far as it is known.

    Without an example, a model of transformers is called with the library's own; other models keep their order.
    """
    if example is None:
        guess = huggingface.example_of(model)
        with suppress(Exception):  # the library's example does not suit every model
            return (units, None) if guess is None else _order_by_dry_run(model, units, guess)
        return units, None
    try:
        return _order_by_dry_run(model, units, example)
    except Exception as error:
        if any(tensor.is_meta for tensor in model.parameters()):
            raise _example_error(model, error) from error
    try:  # a model that cannot run without computing may still run
        return _order_by_run(model, units, example), None
    except Exception as error:
        raise _example_error(model, error) from error


def _example_error(model: nn.Module, error: Exception) -> StagelineError:
    return StagelineError(
        f"{type(model).__name__} cannot run on the example, {shorten(error, 200)}{place_of(error)}; pass a tuple of "
        "its arguments, a dict of keywords, or its only argument"
    )


def _order_by_run(model: nn.Module, units: list[Unit], example: Any) -> list[Unit]:
    """Run the model, and restore its buffers and the random state."""
    called: list[Unit] = []
    args, kwargs = arguments(example)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    hooks = [unit.module.register_forward_pre_hook(lambda *_, unit=unit: called.append(unit)) for unit in units]
    try:
        frame = eager(model, [unit.module for unit in units])
        with frame, torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*args, **{**huggingface.defaults_of(model), **kwargs})
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    return called


def _order_by_dry_run(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], DataFlow]:
    by_name = {unit.name: unit for unit in units}
    modules = {unit.name: Original(unit.module) for unit in units}
    replay = Replay(CallOrder(()), 0, 0, modules, huggingface.defaults_of(model))
    part = StagePart(model, tuple(by_name), frozenset(), replay)
    names, flow = replay.order(part.frame, example)
    return [by_name[name] for name in names], flow


def uncalled(model: nn.Module, defined: Sequence[Unit], called: Sequence[Unit], with_example: bool) -> tuple[str, ...]:
    """Return the modules with parameters that belong to no called unit; warn if the user gave no example."""
    parameters = {id(parameter) for unit in called for parameter in unit.module.parameters()}
    around = [
        unit for unit in defined if any(id(parameter) not in parameters for parameter in unit.module.parameters())
    ]
    if around and called and not with_example:
        size = sum(unit.size for unit in around)
        warnings.warn(
            f"{listed([unit.name for unit in around])} of {type(model).__name__}, {size:,} parameters, belongs to no "
            "unit: the model does not call it with the example inputs of its library, and every stage runs it if a "
            "batch has inputs for it; pass example=, a batch with all inputs, to make it units",
            stacklevel=3,
        )
    return tuple(unit.name for unit in around)

"""The `penalty` option: a penalty on parameters that each rank applies to its own, once per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import Floats
from stageline.runtime._torch_private import storage_id
from stageline.runtime.guards.foreign_reads import NamedTensors, ReadWatch, leaves_below, listed
from stageline.runtime.step_report import scalars_to_row
from stageline.tensors.sharded import is_sharded, whole
from stageline.tensors.thread_context import plain_precision

Penalty: TypeAlias = Callable[[str, nn.Parameter], Any]
"""Takes the name of a parameter in the whole model and the parameter; returns a scalar tensor, or None or 0."""


def terms_of(
    penalty: Penalty, named: Iterable[tuple[str, nn.Parameter]], model: NamedTensors | None = None
) -> dict[str, Tensor]:
    """The penalty of each parameter that has one, with its autograd graph.

    `model` holds the parameters of the model if the penalty can reach them: each term may read only its own.

    >>> layer = nn.Linear(2, 1)
    >>> list(terms_of(lambda name, parameter: parameter.abs().sum() if "bias" in name else None,
    ...               layer.named_parameters()))
    ['bias']
    """
    terms: dict[str, Tensor] = {}
    with torch.enable_grad():
        for name, parameter in named:
            value = _value_of(penalty, name, parameter, model)
            if is_sharded(value):  # the processes that share the parameter have a term of it each
                value = whole(value)
            if value is None or (isinstance(value, int | float) and value == 0):
                continue
            if not isinstance(value, Tensor) or value.numel() != 1:
                form = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shorten(value)
                raise StagelineError(
                    f"penalty must return a tensor with one element, or None for no penalty; for {name} it "
                    f"returned {form}"
                )
            if parameter.requires_grad and not value.requires_grad:
                raise StagelineError(
                    f"penalty returned a value without a graph for {name}, which is trained, so it would change the "
                    "loss but no gradient; compute it from the parameter, without detach() or .data"
                )
            strange = [leaf for leaf in leaves_below(value) if leaf is not parameter]
            if strange:
                raise StagelineError(
                    f"penalty for {name} depends on another tensor that requires a gradient, of shape "
                    f"{tuple(strange[0].shape)}; a penalty is a sum of terms, each of one parameter, because other "
                    "ranks hold the others"
                )
            terms[name] = value
    return terms


def _value_of(penalty: Penalty, name: str, parameter: nn.Parameter, model: NamedTensors | None) -> Any:
    """Call the penalty; refuse it if it reads another parameter of the model."""
    if model is None:
        return penalty(name, parameter)
    own = storage_id(parameter)

    def another(tensor: Tensor) -> str | None:
        known = model.name(tensor, passed=(own,))
        return None if tensor is parameter or known == name else known

    watch = ReadWatch(another)
    with watch:
        value = penalty(name, parameter)
    if watch.names:
        raise StagelineError(
            f"penalty for {name} depends on another parameter, {listed(list(watch.names))}; a penalty is a sum of "
            "terms, each of one parameter, because other ranks hold the others"
        )
    return value


def values_of(names: Sequence[str], terms: Mapping[str, Tensor], counted: Callable[[str], bool]) -> Floats:
    """The penalty of each parameter, in the order of the model; 0 for those that another process counts."""
    return scalars_to_row(names, {name: term for name, term in terms.items() if counted(name)})


def add_gradients(terms: Mapping[str, Tensor], scale: float = 1.0) -> None:
    """Run the backward of every penalty, multiplied by `scale`."""
    roots = [term if scale == 1.0 else term * scale for term in terms.values() if term.requires_grad]
    with plain_precision():
        if roots:
            torch.autograd.backward([root.reshape(()) for root in roots])


def penalty_not_finite(names: Sequence[str], values: Floats) -> str:
    """An error message that names the penalties that are not finite; empty if all are."""
    wrong = [name for name, value in zip(names, values.tolist(), strict=True) if not math.isfinite(value)]
    return f"the penalty of {listed(wrong)} is not finite" if wrong else ""

"""The state dict of the whole model, gathered from the stages of all ranks."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import RankHost
from stageline.tensors.sharded import whole
from stageline.transport.wire import DTYPES


def gather_state(host: RankHost, ranks: int, own: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Gather the state of all ranks in every process, as CPU tensors in the order of the whole model.

    If several ranks hold a name, the first rank's value is used. Values other than tensors travel as JSON. A value that
    does not survive JSON raises an error on all ranks.
    """
    if len(host.here) == ranks:
        return {name: _copy(own[name]) for name in order}
    state: dict[str, Any] = {}
    for rank in range(ranks):
        here = rank in host.here
        entries = json.loads(host.broadcast(json.dumps(_describe(own, state)) if here else "", rank))
        if isinstance(entries, str):
            raise StagelineError(entries)
        for name, entry in entries.items():
            if "value" in entry:
                state[name] = entry["value"]
                continue
            tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            if here:
                tensor = _copy(own[name])
            host.broadcast_tensor(tensor, rank)
            state[name] = tensor
    return {name: state[name] for name in order}


def check_state(state: Any, known: set[str], own: set[str], strict: bool) -> None:
    """Refuse a state dict whose names do not match the model's; `own` are the names that this process holds."""
    if not isinstance(state, Mapping):
        raise StagelineError(f"a state dict must map names to tensors, got {shorten(state)}")
    unknown = sorted(set(state) - known)
    # A state dict with names of other ranks is the whole model's, and must then be complete.
    missing = sorted((known if set(state) & known - own else own) - set(state))
    if strict and (unknown or missing):
        raise StagelineError(
            f"the state dict does not fit the model: {len(missing)} names are missing (first: {missing[:1]}), "
            f"{len(unknown)} are unknown (first: {unknown[:1]})"
        )


def check_shapes(state: Mapping[str, Any], parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a state dict in which a parameter of any process has another shape, before any is loaded.

    >>> check_shapes({"bias": torch.ones(3)}, nn.Linear(2, 2).named_parameters())
    Traceback (most recent call last):
        ...
    stageline.StagelineError: the state dict does not fit the model: bias has the shape (3,), and (2,) in the model
    """
    for name, parameter in parameters:
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StagelineError(
                f"the state dict does not fit the model: {name} has the shape {tuple(value.shape)}, and "
                f"{tuple(parameter.shape)} in the model"
            )


def _copy(value: Any) -> Any:
    return whole(value.detach()).to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value


def _describe(own: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, dict[str, Any]] | str:
    """The entries of a rank that no earlier rank has sent, without tensor data; or why one cannot be sent."""
    entries: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        if name in known:
            continue
        if isinstance(value, Tensor):
            entries[name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        elif _survives(value):
            entries[name] = {"value": value}
        else:
            return (
                f"the state {name!r} is {shorten(value)}, which is neither a tensor nor a value that JSON preserves; "
                "return a tensor from get_extra_state(), or dicts with string keys, lists, strings, numbers, bools "
                "and None"
            )
    return entries


def _survives(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def watched(parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters of this process, and warn if torch's own gradient clipping consumes them.

    Clipping is detected only if it iterates over this generator, directly or through other generators.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame, depth = frame.f_back, depth + 1
    name = "" if frame is None else frame.f_code.co_name
    if frame is not None and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and "norm" in name:
        warnings.warn(
            f"torch.nn.utils.{name.lstrip('_')} sees only the parameters of this process, so every process would clip "
            "by a different norm; use pipe.clip_grad_norm_(max_norm), which computes the norm over all processes",
            UserWarning,
            stacklevel=depth + 3,  # torch wraps its function once
        )
    yield from parameters

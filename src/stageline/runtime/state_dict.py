"""The state of the whole model from the stages of all ranks, and who must not ask for a norm of a part."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import World
from stageline.transport.wire import DTYPES


def gather_state(world: World, ranks: int, own: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Give every process the state of all ranks, as tensors of the host, in the order of the whole model.

    Of a name that several ranks hold, the state of the first of them counts. What is no tensor travels as JSON; what
    JSON cannot give back as it was is an error on all ranks.
    """
    if len(world.here) == ranks:
        return {name: _copy(own[name]) for name in order}
    found: dict[str, Any] = {}
    for rank in range(ranks):
        here = rank in world.here
        told = json.loads(world.tell(json.dumps(_describe(own, found)) if here else "", rank))
        if isinstance(told, str):
            raise StagelineError(told)
        for name, described in told.items():
            if "value" in described:
                found[name] = described["value"]
                continue
            tensor = torch.empty(described["shape"], dtype=DTYPES[described["dtype"]])
            if here:
                tensor = _copy(own[name])
            world.share(tensor, rank)
            found[name] = tensor
    return {name: found[name] for name in order}


def check_state(state: Any, known: set[str], own: set[str], strict: bool) -> None:
    """Refuse a state that does not fit the model, of whose names some are this process's own."""
    if not isinstance(state, Mapping):
        raise StagelineError(f"a state is a dict of tensors by name, got {shorten(state)}")
    unknown = sorted(set(state) - known)
    # A state that has more than this rank's part is the whole one, and then all of it must be there.
    missing = sorted((known if set(state) & known - own else own) - set(state))
    if strict and (unknown or missing):
        raise StagelineError(
            f"the state does not fit the model: {len(missing)} names are missing (first: {missing[:1]}), "
            f"{len(unknown)} are unknown (first: {unknown[:1]})"
        )


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value


def _describe(own: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, dict[str, Any]] | str:
    """What of a rank's state is not known yet: kinds of tensors, and other values; or why it cannot be told."""
    described: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        if name in known:
            continue
        if isinstance(value, Tensor):
            described[name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        elif _survives(value):
            described[name] = {"value": value}
        else:
            return (
                f"the state {name!r} is {shorten(value)}, which is neither a tensor nor something that JSON gives back "
                "as it was; let get_extra_state() return a tensor, or dicts with string keys, lists, strings, numbers, "
                "bools and None"
            )
    return described


def _survives(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def watched(parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Pass on the parameters of a part of a model, and warn torch's own clipping that they are not all.

    Only a caller that takes them from here is seen, directly or through generators; a list of them tells nothing.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame, depth = frame.f_back, depth + 1
    name = "" if frame is None else frame.f_code.co_name
    if frame is not None and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and "norm" in name:
        warnings.warn(
            f"torch.nn.utils.{name.lstrip('_')} sees the parameters of this process alone, and so every process would "
            "clip by another norm; use pipe.clip_grad_norm_(max_norm), which takes the norm over all of them",
            UserWarning,
            stacklevel=depth + 3,  # torch wraps its function once
        )
    yield from parameters

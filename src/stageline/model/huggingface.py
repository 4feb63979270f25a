"""What models of Hugging Face's transformers need beside what any model does; nothing here imports the library itself.

They collect router logits, hidden states and attentions by hooks while their forward runs. What a unit collects on its
stage belongs to what the unit gives, and is collected again where a later stage runs the same forward.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from stageline.common.errors import StagelineError


def pretrained(model: nn.Module) -> nn.Module | None:
    """The model of the library inside of a model: itself, or what an adapter wraps."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return None
    return next((module for module in model.modules() if isinstance(module, library.PreTrainedModel)), None)


def prepare(model: nn.Module) -> None:
    """Let every part that is able to collect outputs do so with one set of hooks, before frames are made of it."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if library is None or capturing is None:
        return
    for module in model.modules():
        if isinstance(module, library.PreTrainedModel):
            capturing.maybe_install_capturing_hooks(module)


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """Keywords that a stage needs unless a batch has them: no cache is filled, and so none is sent.

    A model of several, such as one of pictures and text, hands the keyword on to the one that has a cache.
    """
    inner = pretrained(model)
    if inner is None:
        return {}
    parameters = inspect.signature(inner.forward).parameters
    hands_on = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "use_cache" in parameters or (hands_on and _caches(getattr(inner, "config", None))):
        return {"use_cache": False}
    return {}


def _caches(config: Any) -> bool:
    """Whether a config inside of a config says that a cache is filled."""
    inside = [value for value in vars(config).values() if hasattr(value, "to_dict")] if config is not None else []
    return any(getattr(value, "use_cache", False) or _caches(value) for value in inside)


def refuse_cache(value: Any, defaults: dict[str, Any]) -> None:
    """Refuse a batch that asks for a cache, which is no value that stages can pass."""
    if "use_cache" in defaults and isinstance(value, dict) and value.get("use_cache"):
        raise StagelineError(
            f"the batch has use_cache={value['use_cache']!r}; a pipeline fills no cache, and training needs none: "
            "leave use_cache out, or give False"
        )


class _OnHost:
    """A model that says it is on the host: what it makes for itself has contents, also where it has no memory yet."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def example_of(model: nn.Module) -> Any:
    """A small batch that a model of the library can be looked at with; None for others."""
    inner = pretrained(model)
    property_of = inspect.getattr_static(type(inner), "dummy_inputs", None)
    if inner is None or not isinstance(property_of, property) or property_of.fget is None:
        return None
    given = property_of.fget(_OnHost(inner))
    if not isinstance(given, dict):
        return None
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)} | defaults_of(model)


NO_LOSS = "has no loss"
"""By these words `own_loss` says that there is none."""


def own_loss(output: Any, target: Any = None) -> torch.Tensor:
    """The loss that a model computes itself, given labels among its inputs: `Pipeline(model, loss_fn=sl.own_loss, …)`.

    >>> own_loss({"loss": torch.tensor(2.0)})
    tensor(2.)
    """
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise StagelineError(
            f"the model's output, a {type(output).__name__}, {NO_LOSS}; give it labels, or give another loss_fn"
        )
    return found


Collected = dict[str, list[Any]]


def collected() -> Collected:
    """The lists that outputs are collected in at this moment, by name."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return {}
    found = capturing._active_collector.get()
    return {} if not found else {name: items for name, items in found.items() if isinstance(items, list)}


def collects(hook: Any) -> bool:
    """Whether a hook is one that collects outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def lengths(lists: Collected) -> dict[str, int]:
    """How much is collected so far."""
    return {name: len(items) for name, items in lists.items()}


def since(before: dict[str, int]) -> dict[str, tuple[Any, ...]]:
    """What was collected since then."""
    return {name: tuple(items[before[name] :]) for name, items in collected().items() if len(items) > before[name]}


def collect(more: dict[str, tuple[Any, ...]]) -> None:
    """Collect what a unit of another stage did."""
    lists = collected()
    for name, items in more.items():
        if name in lists:
            lists[name].extend(items)

"""Gradients of a whole model and of its stages, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def pieces(tree: Any, parts: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(tree)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([column[part] for column in cut], spec) for part in range(parts)]


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def plainly(model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Any, targets: Any, parts: int) -> float:
    """Accumulate gradients over microbatches in a plain loop; return the loss."""
    total = 0.0
    for inputs_part, targets_part in zip(pieces(inputs, parts), pieces(targets, parts), strict=True):
        loss = loss_fn(call(model, inputs_part), targets_part) * (len(targets_part) / len(targets))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def gradients(model: nn.Module, without: tuple[str, ...] = ()) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if name not in without}


def noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

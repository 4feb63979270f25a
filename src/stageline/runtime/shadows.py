"""Copies of stages that share their weights with the original and gather gradients of their own.

Two uses of one parameter must not add into one `.grad` from two ranks at once, in whatever order they come: a
tied weight is used by two stages, and a family with two directions runs every stage on two ranks. The second use
runs on a *shadow*: a module that shares every tensor's memory with the original, in which the parameters in
question are objects of their own. After the step, their gradients are added to the originals' in a fixed order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Alias:
    """A parameter that stands for another one and shares its memory."""

    original: nn.Parameter
    own: nn.Parameter


def shadow_of(module: nn.Module, replaced: Iterable[nn.Parameter]) -> tuple[nn.Module, list[Alias]]:
    """Copy a module's structure; the replaced parameters become aliases, all other tensors stay the same objects."""
    aliases = [
        Alias(parameter, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
        for parameter in dict.fromkeys(replaced)
    ]
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo.update({id(alias.original): alias.own for alias in aliases})
    return copy.deepcopy(module, memo), aliases


def sync_modes(original: nn.Module, shadow: nn.Module) -> None:
    """Let the shadow train or evaluate as the original does."""
    for mine, other in zip(original.modules(), shadow.modules(), strict=True):
        other.training = mine.training


def clear(aliases: Sequence[Alias]) -> None:
    """Start a step with no gradients in the aliases."""
    for alias in aliases:
        alias.own.grad = None


def gather(aliases: Sequence[Alias]) -> None:
    """Add the aliases' gradients of this step to the originals', in the order of the stages."""
    for alias in aliases:
        grad, alias.own.grad = alias.own.grad, None
        if grad is None:
            continue
        with torch.no_grad():
            alias.original.grad = grad if alias.original.grad is None else alias.original.grad.add_(grad)

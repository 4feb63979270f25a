"""Gradients of the inputs of a step: the pipeline as the tail of a larger model, or an input that is learned.

Stage 0 gathers them microbatch by microbatch. When the step is over, leaves get theirs in `.grad`, one microbatch after
the other as in one process, and the graph that other inputs came from runs its backward once, for the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.runtime.batch import Keywords
from stageline.runtime.surroundings import plain_precision
from stageline.runtime.tree import learn, tensors_of
from stageline.runtime.worlds import PipelineError, World

Gradients = Mapping[int, Sequence[Tensor | None]]
"""For each microbatch, the gradient of every tensor among its inputs."""


def wanted(inputs: Any) -> list[bool]:
    """For every tensor of the inputs, whether it requires a gradient; empty if none does.

    >>> wanted({"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)})
    [False, True]
    >>> wanted(torch.ones(2))
    []
    """
    learn(inputs)
    flags = [tensor.requires_grad for tensor in tensors_of(pytree.tree_leaves(inputs))]
    return flags if any(flags) else []


def refuse_graphs(inputs: Any, replicas: int) -> None:
    """Refuse inputs with a graph where there are replicas: nobody would add up what lies behind the graph."""
    if replicas > 1 and any(tensor.grad_fn is not None for tensor in tensors_of(pytree.tree_leaves(inputs))):
        raise StagelineError(
            f"the inputs come from a graph, and there are {replicas} replicas: the gradients of what computed them "
            "would not be added up over replicas; give step a leaf, z = front(x).detach().requires_grad_(), run "
            "front's backward from z.grad yourself, and add up its gradients"
        )


def refuse_keywords(keywords: Keywords | None) -> None:
    """Refuse keyword inputs whose gradients would be computed twice, or by several stages at once."""
    users: dict[int, list[str]] = {}
    for stage, values in (keywords or {}).items():
        for name, value in values.items():
            for tensor in tensors_of(pytree.tree_leaves(value)):
                if not tensor.requires_grad:
                    continue
                place = f"stage_kwargs[{stage!r}][{name!r}]"
                users.setdefault(id(tensor), []).append(place)
                if tensor.grad_fn is not None or stage == "all" or len(users[id(tensor)]) > 1:
                    why = (
                        "comes from a graph, which each microbatch would run backwards once more"
                        if tensor.grad_fn is not None
                        else "is given to several stages, which would add to its gradient at once"
                    )
                    raise StagelineError(
                        f"{' and '.join(users[id(tensor)])} requires grad and {why}; give it among the inputs and let "
                        "the stages pass it on, or detach it"
                    )


def exchange(world: World, owners: Sequence[int], wants: Sequence[bool], own: Gradients) -> Gradients:
    """Give all processes the gradients of all ranks that run stage 0; all processes call this together."""
    gathered: dict[int, Sequence[Tensor | None]] = {}
    said: dict[int, Any] = {}
    for owner in owners:
        mine = owner in world.here
        shapes = {microbatch: [_describe(grad) for grad in grads] for microbatch, grads in own.items()} if mine else {}
        told = json.loads(world.tell(json.dumps({"wants": list(wants), "shapes": shapes}) if mine else "{}", owner))
        said[owner] = told["wants"]
        for text, described in told["shapes"].items():
            grads: list[Tensor | None] = []
            for index, shape in enumerate(described):
                if shape is None:
                    grads.append(None)
                    continue
                grad = own[int(text)][index] if mine else None
                sent = torch.empty(shape[0], dtype=getattr(torch, shape[1])) if grad is None else grad.detach()
                world.share(sent, owner)
                grads.append(sent)
            gathered[int(text)] = grads
    first = owners[0]
    for owner in owners[1:]:
        if said[owner] != said[first]:
            raise PipelineError(
                f"ranks {first} and {owner} both run stage 0, and only one of them was given inputs that require grad; "
                "give both the same"
            )
    return gathered


def _describe(grad: Tensor | None) -> tuple[list[int], str] | None:
    return None if grad is None else (list(grad.shape), str(grad.dtype).removeprefix("torch."))


def give_gradients(inputs: Any, parts: Sequence[Any], gradients: Gradients) -> None:
    """Add to the `.grad` of the inputs that are leaves, and run the graph of the others backwards, once.

    >>> leaf = torch.zeros(2, requires_grad=True)
    >>> give_gradients(leaf, leaf.tensor_split(2), {0: [torch.ones(1)], 1: [torch.full((1,), 2.0)]})
    >>> leaf.grad
    tensor([1., 2.])
    """
    tensors = tensors_of(pytree.tree_leaves(inputs))
    pieces = {microbatch: tensors_of(pytree.tree_leaves(parts[microbatch])) for microbatch in sorted(gradients)}
    with plain_precision():
        for microbatch, own in pieces.items():
            arrived = [
                (piece, grad.to(piece.device))
                for tensor, piece, grad in zip(tensors, own, gradients[microbatch], strict=True)
                if tensor.is_leaf and piece.requires_grad and grad is not None
            ]
            if arrived:
                torch.autograd.backward([piece for piece, _ in arrived], [grad for _, grad in arrived])
        roots = [
            (tensor, _joined([own[index] for own in pieces.values()], [grads[index] for _, grads in ordered]))
            for ordered in [sorted(gradients.items())]
            for index, tensor in enumerate(tensors)
            if tensor.grad_fn is not None and any(grads[index] is not None for _, grads in ordered)
        ]
        if roots:
            torch.autograd.backward([tensor for tensor, _ in roots], [grad for _, grad in roots])


def _joined(pieces: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """The gradient of a whole input: of its pieces side by side, or added up where every microbatch got all of it."""
    present = [
        torch.zeros_like(piece) if grad is None else grad.to(piece.device)
        for piece, grad in zip(pieces, grads, strict=True)
    ]
    if present[0].dim() > 0:
        return torch.cat(present)
    total = present[0]
    for grad in present[1:]:
        total = total + grad
    return total

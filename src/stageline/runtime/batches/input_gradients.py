"""Gradients of the inputs of a step: the pipeline as the tail of a larger model, or an input that is learned.

Stage 0 collects them microbatch by microbatch. After the step, leaves get theirs in `.grad`, one microbatch after the
other as in one process, and the graph behind the other inputs runs its backward once, for the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.rank_host import RankHost
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.chunk_specs import Keywords
from stageline.tensors.copies import detached
from stageline.tensors.pytree import learn, tensors_of
from stageline.tensors.thread_context import plain_precision

Gradients = Mapping[int, Sequence[Tensor | None]]
"""For each microbatch, the gradient of every tensor among its inputs."""
Roots = Sequence[tuple[Tensor, Tensor]]
"""Inputs that come from a graph, and the leaves that are cut into microbatches in their place."""


def prepare_inputs(
    inputs: Any, targets: Any, keywords: Keywords | None, replicas: int
) -> tuple[Any, Sequence[bool], Roots]:
    """The inputs with leaves in place of tensors that come from a graph, which of them require grad, and these leaves.

    Refuses batches whose gradients a pipeline cannot compute.

    >>> z = torch.ones(2, requires_grad=True) * 3
    >>> tree, wants, ((root, leaf),) = prepare_inputs({"z": z}, None, None, replicas=1)
    >>> root is z, tree["z"] is leaf, leaf.is_leaf, wants
    (True, True, True, [True])
    """
    wants = require_gradients(inputs)
    if replicas > 1 and any(tensor.grad_fn is not None for tensor in tensors_of(pytree.tree_leaves(inputs))):
        raise StagelineError(
            f"the inputs come from a graph, but with {replicas} replicas the gradients of the modules that computed "
            "them would not be summed over replicas; pass a leaf to step, z = front(x).detach().requires_grad_(), "
            "run front's backward from z.grad yourself, and sum its gradients"
        )
    _refuse_keywords(keywords)
    for tensor in tensors_of(pytree.tree_leaves(targets)):
        if tensor.grad_fn is not None:
            raise StagelineError(
                f"the targets come from a graph ({type(tensor.grad_fn).__name__}), which each microbatch would run "
                "backwards again; detach them (targets.detach()), or pass them among the inputs"
            )
    if not wants:
        return inputs, (), ()
    roots: dict[int, tuple[Tensor, Tensor]] = {}

    def as_leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        if id(value) not in roots:
            roots[id(value)] = (value, detached(value, True))
        return roots[id(value)][1]

    whole = pytree.tree_map(as_leaf, inputs)
    return whole, wants, list(roots.values())


def require_gradients(inputs: Any) -> list[bool]:
    """For every tensor of the inputs, whether it requires a gradient; empty if none does."""
    learn(inputs)
    flags = [tensor.requires_grad for tensor in tensors_of(pytree.tree_leaves(inputs))]
    return flags if any(flags) else []


def _refuse_keywords(keywords: Keywords | None) -> None:
    """Refuse keyword inputs whose gradients would be computed twice, or by several stages at the same time."""
    users: dict[int, list[str]] = {}
    for stage, values in (keywords or {}).items():
        for name, value in values.items():
            for tensor in tensors_of(pytree.tree_leaves(value)):
                if not tensor.requires_grad:
                    continue
                places = users.setdefault(id(tensor), [])
                places.append(f"stage_kwargs[{stage!r}][{name!r}]")
                if tensor.grad_fn is not None or stage == "all" or len(places) > 1:
                    why = (
                        "comes from a graph, which each microbatch would run backwards again"
                        if tensor.grad_fn is not None
                        else "goes to several stages, which would add to its gradient at the same time"
                    )
                    raise StagelineError(
                        f"{' and '.join(places)} requires grad and {why}; pass it among the inputs and let the stages "
                        "pass it on, or detach it"
                    )


def exchange(host: RankHost, owners: Sequence[int], wants: Sequence[bool], own: Gradients) -> Gradients:
    """Share the gradients of all ranks that run stage 0 with all processes, which all call this."""
    gathered: dict[int, Sequence[Tensor | None]] = {}
    wants_of: dict[int, Any] = {}
    shapes = {microbatch: [_describe(grad) for grad in grads] for microbatch, grads in own.items()}
    for owner in owners:
        mine = owner in host.here
        report = json.loads(host.broadcast(json.dumps({"wants": list(wants), "shapes": shapes}), owner))
        wants_of[owner] = report["wants"]
        for text, described in report["shapes"].items():
            grads: list[Tensor | None] = []
            for index, shape in enumerate(described):
                if shape is None:
                    grads.append(None)
                    continue
                grad = own[int(text)][index] if mine else None
                sent = torch.empty(shape[0], dtype=getattr(torch, shape[1])) if grad is None else grad.detach()
                host.broadcast_tensor(sent, owner)
                grads.append(sent)
            gathered[int(text)] = grads
    first = owners[0]
    for owner in owners[1:]:
        if wants_of[owner] != wants_of[first]:
            raise PipelineError(
                f"ranks {first} and {owner} both run stage 0, and only one of them received inputs that require grad; "
                "pass the same inputs to both"
            )
    return gathered


def _describe(grad: Tensor | None) -> tuple[list[int], str] | None:
    return None if grad is None else (list(grad.shape), str(grad.dtype).removeprefix("torch."))


def give_gradients(parts: Sequence[Any], roots: Roots, gradients: Gradients) -> None:
    """Add to the `.grad` of inputs that are leaves, and run the backward of the graph of the others, once.

    >>> leaf = torch.zeros(2, requires_grad=True)
    >>> give_gradients(leaf.tensor_split(2), [], {0: [torch.ones(1)], 1: [torch.full((1,), 2.0)]})
    >>> leaf.grad
    tensor([1., 2.])
    """
    with plain_precision():
        for microbatch in sorted(gradients):
            pieces = tensors_of(pytree.tree_leaves(parts[microbatch]))
            arrived = [
                (piece, grad.to(piece.device))
                for piece, grad in zip(pieces, gradients[microbatch], strict=True)
                if piece.requires_grad and grad is not None
            ]
            if arrived:
                torch.autograd.backward([piece for piece, _ in arrived], [grad for _, grad in arrived])
        reached = [(root, leaf.grad) for root, leaf in roots if leaf.grad is not None]
        if reached:
            torch.autograd.backward([root for root, _ in reached], [grad for _, grad in reached])

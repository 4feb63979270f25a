"""The `shard_optimizer` option (ZeRO-1): every replica steps a part of the parameters, and keeps their optimizer state.

    replica 0   gradients of a b c d ─┬ sum ─▶ a b ─ optimizer.step() ─▶ weights a b ─┬ broadcast ─▶ a b c d
    replica 1   gradients of a b c d ─┘     ─▶ c d ─ optimizer.step() ─▶ weights c d ─┘           ─▶ a b c d

The gradients are summed in the same buckets as without the option, so they have the same bits. Afterwards only the
replica that steps a parameter keeps its gradient. The optimizer of any other replica skips the parameter, as torch's
optimizers do where `.grad` is None, and never makes a state for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from stageline.distributed.collectives import ReplicaGroup
from stageline.distributed.rank_host import Floats, RankHost
from stageline.tensors.sharded import local, part_bytes


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """Assign sizes to parts such that the largest sum is small: the largest first, to the part with the least.

    >>> balance([2, 8, 4, 1], parts=2)
    [1, 0, 1, 1]
    """
    loads, assigned = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        part = min(range(parts), key=lambda part: loads[part])
        loads[part] += sizes[index]
        assigned[index] = part
    return assigned


class OptimizerShards:
    """Which replica steps each parameter of this process, and the exchange of weights after a step of the optimizer."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: ReplicaGroup, replicas: int, bucket_mb: float
    ) -> None:
        """`named` are the parameters of this process, and `group` its counterparts in each of the `replicas`."""
        # Those that are trained first, so that they are balanced among themselves.
        order = sorted(named, key=lambda item: not item[1].requires_grad)
        owners = balance([part_bytes(parameter) for _, parameter in order], replicas)
        self._owners = {parameter: replica for (_, parameter), replica in zip(order, owners, strict=True)}
        self._group, self._replicas, self._bucket = group, replicas, bucket_mb * 2**20
        self.names = frozenset(name for name, parameter in order if self.keeps(parameter))
        """The parameters that this replica steps."""
        self._due: set[nn.Parameter] = set()
        """The parameters that an optimizer may have changed since they were last broadcast."""
        after_step = weakref.WeakMethod(self._after_step)

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            method = after_step()
            if method is not None:
                method(optimizer)

        self.close = weakref.finalize(self, register_optimizer_step_post_hook(hook).remove)
        """Leaves optimizers alone from then on."""

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether this replica steps a parameter."""
        return self._owners.get(parameter, self._group.position) == self._group.position

    def _after_step(self, optimizer: Optimizer) -> None:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if self._due and not stepped.isdisjoint(self._owners):
            # The optimizer of a replica may have only the parameters that it updates.
            known = self._group.all_gather(np.array([float(parameter in stepped) for parameter in self._owners]))
            owners = enumerate(self._owners.items())
            self.broadcast({parameter for number, (parameter, replica) in owners if known[replica, number]})

    def reduced(self) -> None:
        """Gradients are summed: an optimizer may step now."""
        self._due = set(self._owners)

    @torch.no_grad()
    def broadcast(self, chosen: Container[nn.Parameter] | None = None) -> None:
        """Copy every parameter from the replica that steps it, unless that happened since the last sum of gradients.

        All replicas call this together: after a step of an optimizer over the `chosen` parameters, or for all.
        """
        due = [
            parameter
            for parameter in self._owners
            if parameter in self._due and parameter.requires_grad and (chosen is None or parameter in chosen)
        ]
        self._due.difference_update(due)
        queues = [
            _alike([parameter for parameter in due if self._owners[parameter] == replica], self._bucket)
            for replica in range(self._replicas)
        ]
        for buckets in zip_longest(*queues, fillvalue=()):  # one of every replica at a time
            started = [(bucket, *self._start(bucket, replica)) for replica, bucket in enumerate(buckets) if bucket]
            for bucket, flat, wait in started:
                wait()
                if not self.keeps(bucket[0]):
                    for parameter, values in zip(bucket, _pieces(flat, bucket), strict=True):
                        local(parameter).copy_(values)

    def _start(self, bucket: Sequence[nn.Parameter], replica: int) -> tuple[Tensor, Callable[[], None]]:
        own = [local(parameter) for parameter in bucket]
        flat = torch.empty(sum(part.numel() for part in own), dtype=own[0].dtype, device=own[0].device)
        if replica == self._group.position:
            for part, piece in zip(own, _pieces(flat, bucket), strict=True):
                piece.copy_(part)
        return flat, self._group.broadcast_async(flat, replica)

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Bring gradients of earlier steps to the first replica, to which the next one is added without the option.

        All replicas call this together, before a step.
        """
        present = self._group.all_gather(np.array([float(parameter.grad is not None) for parameter in self._owners]))
        for number, (parameter, replica) in enumerate(self._owners.items()):
            if not present[replica, number]:
                continue
            own = local(parameter)
            flat = torch.empty(own.numel(), dtype=own.dtype, device=own.device)
            if self.keeps(parameter) and parameter.grad is not None:
                flat.view(own.shape).copy_(local(parameter.grad))
            self._group.broadcast_async(flat, replica)()
            if self._group.position == 0 and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                local(parameter.grad).copy_(flat.view(own.shape))
            elif self._group.position:
                parameter.grad = None

    def sum_norms(self, norms: Floats) -> Floats:
        """The norms of all replicas' gradients, of which each parameter has one."""
        return np.asarray(self._group.all_gather(norms).sum(0))


def spread_not_finite(host: RankHost, gradients: Iterable[Tensor | None]) -> None:
    """If any process has a gradient that is not finite, plant an infinity in the gradients of every process.

    A GradScaler looks at the gradients of its own process, and all must skip the same steps.
    """
    own = [local(gradient) for gradient in gradients if gradient is not None]
    wrong = any(not bool(gradient.isfinite().all()) for gradient in own)
    if host.all_gather(np.array([float(wrong)])).any() and own and not wrong:
        first = next(gradient for gradient in own if gradient.numel())
        first.detach()[(0,) * first.dim()] = float("inf")


def _alike(parameters: Iterable[nn.Parameter], size: float) -> Iterator[list[nn.Parameter]]:
    """Group parameters of one type and device, in order, into buckets of about `size` bytes."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        full = sum(local(member).nbytes for member in bucket) + local(parameter).nbytes > size
        if bucket and (full or (bucket[0].dtype, bucket[0].device) != kind):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _pieces(flat: Tensor, bucket: Sequence[nn.Parameter]) -> list[Tensor]:
    """The parts of a flat tensor in the shapes of parameters."""
    shapes = [local(parameter).shape for parameter in bucket]
    pieces = torch.split(flat, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

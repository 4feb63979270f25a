"""Gradient reduction: sums gradients over replicas in buckets while the pipeline drains.

    rank 0   … B1 B2 B3 │ W2 W3                    after the last action that adds to a stage's gradients, they are
                        ╰─▶ buckets of the stage   copied into buckets, which are reduced over all replicas while the
    rank 1   … B3 │ W1 W2 W3                       rank continues

All replicas reduce the same buckets in the same order, the order of the whole schedule, whatever the timing. A bucket
also counts, for each parameter, the replicas that have a gradient. Replicas without one contribute zeros. A parameter
for which no replica has a gradient keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.collectives import ReplicaGroup
from stageline.tensors.sharded import local


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type and device whose gradients are reduced together.

    More than two replicas are added in an order that depends on the place of an element in the tensor that is reduced.
    A bucket is therefore a table with a row for each of them, in which every parameter fills some columns: the row of
    an element, and so the order, depends on its parameter alone, and not on the layout or on other parameters.

        3 replicas   a0 a1 a2 │ b0 │ counts      elements of a parameter are stored row by row
                     a3 a4 a5 │ b1 │
                     a6 a7    │    │
    """

    stage: int | None
    """None for parameters that several stages use."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype
    """The type in which they are summed."""
    rows: int = 1

    @property
    def _widths(self) -> list[int]:
        """The number of columns for each parameter and for the counts."""
        sizes = [*(local(parameter).numel() for _, parameter in self.parameters), len(self.parameters)]
        return [-(-size // self.rows) for size in sizes]

    def _columns(self, table: Tensor) -> list[Tensor]:
        """The columns of a table for each parameter and for the counts."""
        widths = self._widths
        return list(torch.split(table, [*widths, table.shape[1] - sum(widths)], dim=1))[:-1]

    def _new(self) -> Tensor:
        """A table of zeros, or without values if every place gets one."""
        width = sum(self._widths)
        shape = (self.rows, width + (width % 2 if self.rows > 1 else 0))  # gloo cuts every row in two
        make = torch.empty if self.rows == 1 else torch.zeros
        return make(shape, dtype=self.dtype, device=self.parameters[0][1].device)

    def empty(self) -> Tensor:
        """A table that stands for no gradients at all."""
        return self._new().zero_()

    def fill(self) -> Tensor:
        """The gradients as one table, followed by a 1 for each parameter that has one."""
        table = self._new()
        columns = self._columns(table)
        has_gradient = [float(parameter.grad is not None) for _, parameter in self.parameters]
        _store(torch.tensor(has_gradient), columns[-1])
        for (name, parameter), own in zip(self.parameters, columns, strict=False):
            grad = parameter.grad
            if grad is None:
                own.zero_()
            else:
                if grad.layout != torch.strided:
                    raise StagelineError(
                        f"the gradient of {name} is {shorten(str(grad.layout))}, but only dense gradients are reduced "
                        "over replicas; use sparse=False"
                    )
                _store(local(grad).detach().reshape(-1), own)
        return table

    def assign(self, table: Tensor, keeps: Callable[[nn.Parameter], bool] = lambda parameter: True) -> None:
        """Copy the sum back into the gradients of the parameters that this process keeps, and drop the others."""
        columns = self._columns(table)
        counts = columns[-1].reshape(-1)[: len(self.parameters)].tolist()
        for (_, parameter), count, sums in zip(self.parameters, counts, columns, strict=False):
            if not keeps(parameter):
                parameter.grad = None
            elif count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                own = local(parameter.grad).detach()
                own.copy_(sums.reshape(-1)[: own.numel()].view(own.shape))


def _store(values: Tensor, columns: Tensor) -> None:
    """Write values into columns of a table, row by row."""
    width = columns.shape[1]
    full = len(values) // max(1, width)
    columns[:full].copy_(values[: full * width].view(full, width))
    rest = values[full * width :]
    if len(rest):
        columns[full, : len(rest)].copy_(rest)


def buckets_of(
    stage: int | None,
    named: Iterable[tuple[str, nn.Parameter]],
    size: float,
    dtype: torch.dtype | None = None,
    rows: int = 1,
) -> Iterator[Bucket]:
    """Group parameters, in order, into buckets of at most `size` bytes; a larger one gets a bucket to itself.

    Gradients are summed in `dtype`; without one, in float32 or a wider type of the parameter. A bucket has `rows` rows.

    >>> layer = nn.Linear(4, 4)
    >>> [[name for name, _ in bucket.parameters] for bucket in buckets_of(0, layer.named_parameters(), size=64)]
    [['weight'], ['bias']]
    """
    kept: list[tuple[str, nn.Parameter]] = []
    kind: tuple[torch.dtype, torch.device] | None = None
    room = 0.0
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        added = dtype or torch.promote_types(parameter.dtype, torch.float32)
        need = local(parameter).numel() * added.itemsize
        if kept and (kind != (added, parameter.device) or need > room):
            assert kind is not None
            yield Bucket(stage, tuple(kept), kind[0], rows)
            kept = []
        if not kept:
            kind, room = (added, parameter.device), size
        kept.append((name, parameter))
        room -= need
    if kept:
        assert kind is not None
        yield Bucket(stage, tuple(kept), kind[0], rows)


class Reducer:
    """Reduces the gradients of one rank's stages over all replicas.

    >>> class Twice:  # two replicas with equal gradients
    ...     direct, size = False, 2
    ...     def all_reduce_async(self, flat):
    ...         return lambda: flat.mul_(2)
    >>> layer = nn.Linear(2, 1)
    >>> layer.weight.grad = torch.ones(1, 2)
    >>> reducer = Reducer({0: list(layer.named_parameters())}, [], Twice(), bucket_mb=25)
    >>> reducer.begin()
    >>> reducer.ready(0)
    >>> reducer.finish()
    >>> layer.weight.grad, layer.bias.grad
    (tensor([[2., 2.]]), None)
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[tuple[str, nn.Parameter]]],
        shared: Sequence[Sequence[tuple[str, nn.Parameter]]],
        group: ReplicaGroup,
        *,
        bucket_mb: float = 25.0,
        dtype: torch.dtype | None = None,
        keeps: Callable[[nn.Parameter], bool] = lambda parameter: True,
    ) -> None:
        """`stages` holds the parameters that a single stage uses, in the order in which stages finish.

        `shared` holds parameters that several stages use, grouped by their users: they reduce them in the same buckets
        and so get the same bits. `keeps` says for which parameters this process keeps the sum.
        """
        size, rows = bucket_mb * 2**20, group.size if group.size > 2 else 1  # the sum of two has no order
        self._buckets = [
            bucket for stage, named in stages.items() for bucket in buckets_of(stage, named, size, dtype, rows)
        ]
        self._shared = [bucket for named in shared for bucket in buckets_of(None, named, size, dtype, rows)]
        self._group, self._keeps = group, keeps
        self._ready: set[int | None] = set()
        self._filled: list[_Reduction] = []
        self._begun = 0

    def begin(self) -> None:
        """Start a step: no stage is ready."""
        self._ready, self._filled, self._begun = set(), [], 0

    def ready(self, stage: int) -> None:
        """Called by the thread that computes a stage when its gradients are complete in this replica."""
        self._ready.add(stage)
        self._fill()

    def finish(self, succeeded: bool = True) -> None:
        """Wait for all buckets of stages; if the step failed, zeros replace those that are not ready."""
        if succeeded:
            self._ready.update(bucket.stage for bucket in self._buckets)
            self._fill()
        for bucket in self._buckets[len(self._filled) :]:
            self._filled.append(_Reduction(bucket, bucket.empty(), self._group))
        self._end(succeeded)

    def finish_shared(self) -> None:
        """Reduce the parameters that several stages use, once they are complete in every replica."""
        self._filled = [_Reduction(bucket, bucket.fill(), self._group) for bucket in self._shared]
        self._begun = 0
        self._end(True)

    def _fill(self) -> None:
        """Start all buckets whose turn has come."""
        for bucket in self._buckets[len(self._filled) :]:
            if bucket.stage not in self._ready:
                break
            self._filled.append(_Reduction(bucket, bucket.fill(), self._group))
        while self._begun < len(self._filled) and self._filled[self._begun].begin(wait=False):
            self._begun += 1

    def _end(self, succeeded: bool) -> None:
        for reduction in self._filled[self._begun :]:
            reduction.begin(wait=True)
        with torch.no_grad():
            for reduction in self._filled:
                flat = reduction.wait()
                if succeeded:
                    reduction.bucket.assign(flat, self._keeps)
        self._filled, self._begun = [], 0


class Reducers:
    """Several reducers, each over its own processes, as one."""

    def __init__(self, elements: int, reducers: Sequence[Reducer]) -> None:
        self.elements = elements
        """The number of elements of all parameters that are trained, which must be the same in all replicas."""
        self._reducers = list(reducers)

    def begin(self) -> None:
        """Start a step."""
        for reducer in self._reducers:
            reducer.begin()

    def ready(self, stage: int) -> None:
        """The gradients of a stage are complete on this rank."""
        for reducer in self._reducers:
            reducer.ready(stage)

    def finish(self, succeeded: bool = True) -> None:
        """Wait for all buckets of stages."""
        for reducer in self._reducers:
            reducer.finish(succeeded)

    def finish_shared(self) -> None:
        """Reduce the parameters that several stages use."""
        for reducer in self._reducers:
            reducer.finish_shared()


class _Reduction:
    """A bucket that is being reduced; a GPU's goes through the host unless the group reduces it directly."""

    def __init__(self, bucket: Bucket, flat: Tensor, group: ReplicaGroup) -> None:
        self.bucket = bucket
        self._flat = self._sent = flat
        self._group = group
        self._done: Callable[[], None] | None = None
        self._copied: Any = None
        if flat.is_cuda and not group.direct:
            # On a side stream: the compute stream continues with other stages.
            side: Any = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
            side.wait_event(torch.cuda.current_stream(flat.device).record_event())
            self._sent = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            with torch.cuda.stream(side):
                self._sent.copy_(flat, non_blocking=True)
                self._copied = side.record_event()
            flat.record_stream(side)

    def begin(self, *, wait: bool) -> bool:
        """Start the sum and return True; without `wait`, return False if the copy to the host is not done."""
        if self._copied is not None:
            if not wait and not self._copied.query():
                return False
            self._copied.synchronize()
        flat = torch.view_as_real(self._sent) if self._sent.is_complex() else self._sent
        self._done = self._group.all_reduce_async(flat)
        return True

    def wait(self) -> Tensor:
        """Wait for the sum and return it."""
        assert self._done is not None
        self._done()
        if self._sent is not self._flat:
            self._flat.copy_(self._sent)
        return self._flat

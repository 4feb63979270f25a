"""Adding up gradients over replicas, in buckets, while the pipeline still drains.

    rank 0   … B1 B2 B3 │ W2 W3                    after the last action that adds to a stage's gradients, they are
                        ╰─▶ buckets of the stage   copied into flat buckets, which are added over all replicas while
    rank 1   … B3 │ W1 W2 W3                       this rank goes on

All replicas add the same buckets in the same order, whatever the timing: that of the whole schedule. A bucket also
holds, for each parameter, how many replicas have a gradient of it. One that only some have counts as zeros in the
others, and one that none has stays without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten


class Adding(Protocol):
    """What adds a flat tensor over all replicas."""

    @property
    def direct(self) -> bool:
        """Whether tensors of a GPU are added without the host."""

    def add(self, flat: Tensor) -> Callable[[], None]:
        """Begin to add in place; what is given back waits for it."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are added up together, of one type and on one device."""

    stage: int | None
    """None for parameters that several stages use."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype
    """What they are added in."""

    @property
    def elements(self) -> int:
        """Of the parameters together."""
        return sum(parameter.numel() for _, parameter in self.parameters)

    def empty(self) -> Tensor:
        """Zeros in place of gradients, of none of the parameters."""
        device = self.parameters[0][1].device
        return torch.zeros(self.elements + len(self.parameters), dtype=self.dtype, device=device)

    def fill(self) -> Tensor:
        """The gradients as one flat tensor, and then for each parameter whether there is one."""
        device = self.parameters[0][1].device
        flat = torch.empty(self.elements + len(self.parameters), dtype=self.dtype, device=device)
        at, elements = 0, self.elements
        flat[elements:] = torch.tensor([float(parameter.grad is not None) for _, parameter in self.parameters])
        for name, parameter in self.parameters:
            grad = parameter.grad
            if grad is None:
                flat[at : at + parameter.numel()].zero_()
            else:
                if grad.layout != torch.strided:
                    raise StagelineError(
                        f"the gradient of {name} is {shorten(str(grad.layout))}, and only dense ones are added up over "
                        "replicas; use sparse=False"
                    )
                flat[at : at + parameter.numel()].view(parameter.shape).copy_(grad.detach())
            at += parameter.numel()
        return flat

    def give(self, flat: Tensor) -> None:
        """Let the parameters have their parts of the sum as gradients."""
        there, at = flat[self.elements :].tolist(), 0
        for (_, parameter), count in zip(self.parameters, there, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.detach().copy_(flat[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()


def buckets_of(
    stage: int | None, named: Iterable[tuple[str, nn.Parameter]], size: float, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Cut parameters into buckets of at most `size` bytes, in their order; a larger one has a bucket of its own.

    Gradients are added in `dtype`; without one, in float32, or in what is more exact than that.

    >>> layer = nn.Linear(4, 4)
    >>> [[name for name, _ in each.parameters] for each in buckets_of(0, layer.named_parameters(), size=64)]
    [['weight'], ['bias']]
    """
    kept: list[tuple[str, nn.Parameter]] = []
    kind: tuple[torch.dtype, torch.device] | None = None
    room = 0.0
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        added = dtype or torch.promote_types(parameter.dtype, torch.float32)
        need = parameter.numel() * added.itemsize
        if kept and (kind != (added, parameter.device) or need > room):
            assert kind is not None
            yield Bucket(stage, tuple(kept), kind[0])
            kept = []
        if not kept:
            kind, room = (added, parameter.device), size
        kept.append((name, parameter))
        room -= need
    if kept:
        assert kind is not None
        yield Bucket(stage, tuple(kept), kind[0])


class Reducer:
    """Adds up the gradients of one rank's stages over all replicas, step by step.

    >>> class Twice:  # two replicas that have the same
    ...     direct = False
    ...     def add(self, flat):
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
        column: Adding,
        *,
        bucket_mb: float = 25.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`stages` are the parameters that one stage alone uses, in the order in which stages finish.

        `shared` are parameters that several stages use, in groups that have the same users: these add them in the same
        buckets, and so get the same bits.
        """
        size = bucket_mb * 2**20
        self._buckets = [each for stage, named in stages.items() for each in buckets_of(stage, named, size, dtype)]
        self._shared = [each for named in shared for each in buckets_of(None, named, size, dtype)]
        self._column = column
        self._ready: set[int | None] = set()
        self._filled: list[_OnItsWay] = []
        self._begun = 0

    @property
    def elements(self) -> int:
        """Of all gradients together; it must be the same in all replicas."""
        return sum(bucket.elements for bucket in (*self._buckets, *self._shared))

    def begin(self) -> None:
        """Begin a step: no stage is ready."""
        self._ready, self._filled, self._begun = set(), [], 0

    def ready(self, stage: int) -> None:
        """The gradients of a stage are complete in this replica; called by the thread that computes them."""
        self._ready.add(stage)
        self._fill()

    def finish(self, well: bool = True) -> None:
        """Wait for all buckets of stages; where the step failed, zeros take the place of those that are not ready."""
        if well:
            self._ready.update(bucket.stage for bucket in self._buckets)
        self._fill()
        for bucket in self._buckets[len(self._filled) :]:
            self._filled.append(_OnItsWay(bucket, bucket.empty(), self._column))
        self._end(well)

    def finish_shared(self) -> None:
        """Add up what several stages use, when it is complete in every replica."""
        self._filled = [_OnItsWay(bucket, bucket.fill(), self._column) for bucket in self._shared]
        self._begun = 0
        self._end(True)

    def _fill(self) -> None:
        """Take up all buckets whose turn has come."""
        for bucket in self._buckets[len(self._filled) :]:
            if bucket.stage not in self._ready:
                break
            self._filled.append(_OnItsWay(bucket, bucket.fill(), self._column))
        while self._begun < len(self._filled) and self._filled[self._begun].begin(wait=False):
            self._begun += 1

    def _end(self, well: bool) -> None:
        for each in self._filled[self._begun :]:
            each.begin(wait=True)
        with torch.no_grad():
            for each in self._filled:
                flat = each.wait()
                if well:
                    each.bucket.give(flat)
        self._filled, self._begun = [], 0


class _OnItsWay:
    """A bucket that is being added up; one of a GPU goes through the host, unless there is a direct way."""

    def __init__(self, bucket: Bucket, flat: Tensor, column: Adding) -> None:
        self.bucket = bucket
        self._flat = self._sent = flat
        self._column = column
        self._done: Callable[[], None] | None = None
        self._copied: Any = None
        if flat.is_cuda and not column.direct:
            # Beside the compute stream, which goes on with other stages.
            aside: Any = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
            aside.wait_event(torch.cuda.current_stream(flat.device).record_event())
            self._sent = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            with torch.cuda.stream(aside):
                self._sent.copy_(flat, non_blocking=True)
                self._copied = aside.record_event()
            flat.record_stream(aside)

    def begin(self, *, wait: bool) -> bool:
        """Begin to add, if its bytes are where they are sent from; else wait for them, or say that they are not."""
        if self._copied is not None:
            if not wait and not self._copied.query():
                return False
            self._copied.synchronize()
        self._done = self._column.add(torch.view_as_real(self._sent) if self._sent.is_complex() else self._sent)
        return True

    def wait(self) -> Tensor:
        """The sum."""
        assert self._done is not None
        self._done()
        if self._sent is not self._flat:
            self._flat.copy_(self._sent)
        return self._flat


def check_buckets(bucket_mb: float, dtype: torch.dtype | None) -> None:
    """Refuse sizes and types that no bucket can have."""
    if not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
        raise StagelineError(f"bucket_mb is a size in MiB above 0, got {shorten(bucket_mb)}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise StagelineError(
            f"reduce_dtype is a type of floating-point numbers, as torch.bfloat16, got {shorten(dtype)}"
        )

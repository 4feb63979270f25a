"""Non-finite values: where the first NaN or infinity of a step appeared.

A step fails only if a loss or a gradient is not finite. The tensors that cross stages are checked to name the stage and
microbatch where it started; they alone do not fail a step, because a mask may hold -inf on purpose.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PipelineError
from stageline.distributed.rank_host import Floats
from stageline.faults.monitor.verdict import describe
from stageline.runtime._torch_private import flatten_dense, foreach_norm, pytree, sparse_values
from stageline.runtime.guards.foreign_reads import listed
from stageline.schedules.schedule import Schedule
from stageline.tensors.sharded import local

if TYPE_CHECKING:
    from stageline.runtime.setup.model_stages import ModelStages

SMALL = 1 << 15
"""Gradients of a stage with up to this many elements are checked after every backward, others once per step."""
WIDTH = 6
"""The number of fields of an event."""
LETTERS = "FBIW"
VALUES = ("NaN", "inf", "-inf")
OUTPUT, LOSS, GRADIENT, PARAMETERS, BEFORE = range(5)


class Event(NamedTuple):
    """A value that is not finite; events sort in the order in which a microbatch passes through the stages."""

    microbatch: int
    position: int
    letter: int
    stage: int
    what: int
    """`OUTPUT`, `LOSS`, `GRADIENT` (sent to the stage before), `PARAMETERS`, or already there `BEFORE` the step."""
    value: int
    """An index into `VALUES`; the lowest, if the tensor holds several."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action in which it appeared."""
        return LETTERS[self.letter], self.stage, self.microbatch

    def __str__(self) -> str:
        value = f"{'an' if self.value == 1 else 'a'} {VALUES[self.value]}"
        if self.what == BEFORE:
            return f"{value} in a gradient that stage {self.stage} already had before this step; call zero_grad()"
        where = {
            OUTPUT: "in the output",
            LOSS: "in the loss",
            GRADIENT: "in the gradient that it passes back",
            PARAMETERS: "in the gradients of its parameters",
        }[self.what]
        return f"{value} {where}, in {describe(self.place)}"


def sum_of(tensor: Tensor) -> Tensor | None:
    """A sum that is finite only if all values are finite and it does not overflow; None for integers.

    >>> sum_of(torch.tensor([1.0, float("inf")])), sum_of(torch.tensor([1, 2]))
    (tensor(inf), None)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.itemsize < 2:
        return None
    if tensor.layout is not torch.strided:
        if tensor.layout is not torch.sparse_coo and not tensor.is_nested:
            return None
        tensor = tensor.values() if tensor.is_nested else sparse_values(tensor)
    return tensor.sum(dtype=torch.float32) if tensor.itemsize < 4 else tensor.sum()


def kind_of(tensor: Tensor) -> int | None:
    """The index into `VALUES` of a value in the tensor; None if all are finite."""
    if tensor.layout is not torch.strided:
        tensor = tensor.values() if tensor.is_nested else sparse_values(tensor)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for number, holds in enumerate((torch.isnan, torch.isposinf, torch.isneginf)):
        if bool(holds(plain).any()):
            return number
    return None


def finite(tensor: Tensor) -> bool:
    """Whether all values of a CPU tensor are finite; fast if they are."""
    total = sum_of(tensor)
    return total is None or cmath.isfinite(total.item()) or kind_of(tensor) is None


def _all_finite(small: Sequence[Tensor]) -> bool:
    """Whether all values of small tensors are finite; one call, because a call for each would dominate."""
    if any(tensor.layout is not torch.strided for tensor in small):
        return False
    return finite(flatten_dense(small))


def _magnitudes(grads: Sequence[Tensor]) -> Tensor:
    """Numbers on the device of the gradients that are finite only if all values are; sums of sparse ones may overflow.

    >>> _magnitudes([torch.ones(2), torch.ones(3).bfloat16()]), _magnitudes([torch.tensor([1.0, float("nan")])])
    (tensor([1., 1.]), tensor([nan]))
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    others: list[Tensor] = []
    for grad in grads:
        if grad.layout is torch.strided and grad.is_floating_point() and grad.itemsize >= 2 and grad.numel():
            by_type.setdefault(grad.dtype, []).append(grad)
        elif (total := sum_of(grad)) is not None:
            others.append(total.abs().reshape(1))
    # The largest absolute values: few kernels for many tensors, and no overflow.
    largest = [torch.stack(list(foreach_norm(group, float("inf")))) for group in by_type.values()]
    values = [*largest, *others]
    return values[0] if len(values) == 1 else torch.cat(values or [torch.zeros(0, device=grads[0].device)])


class FiniteWatch:
    """Checks the values that one rank computes in a step.

    On a GPU it does not wait: sums stay on the device and are read only if a gradient is not finite. There, the
    parameters are listed in the first backward, when the GPU already has work.
    """

    def __init__(self, stages: int, parts: Mapping[int, nn.Module], *, gradients: bool, on_gpu: bool) -> None:
        """`parts` are the stages of the rank; `gradients` says whether gradients of parameters are checked."""
        self._stages, self._on_gpu = stages, on_gpu
        self._parts = parts if gradients else {}
        self._bad: set[int] = set()
        self._events: list[Event] = []
        self._kept: list[tuple[Event, Tensor]] = []
        self._magnitudes: dict[int, Tensor] = {}
        """By stage, the magnitudes of its gradients, on the GPU."""
        for stage in () if on_gpu else self._parameters:
            self._check_parameters(Event(0, -1, 1, stage, BEFORE, 0))

    @cached_property
    def _parameters(self) -> dict[int, list[nn.Parameter]]:
        """By stage, the parameters whose gradients are checked."""
        return {
            stage: [parameter for parameter in part.parameters() if parameter.requires_grad]
            for stage, part in self._parts.items()
        }

    @cached_property
    def _often(self) -> set[int]:
        """The stages whose gradients are checked after every backward."""
        return {stage for stage, own in self._parameters.items() if _is_small(own)}

    def action(self, letter: int, stage: int, microbatch: int, leaves: Sequence[Any] | None) -> None:
        """Check the values that an action sends to another stage."""
        if leaves:
            forward = letter == 0
            position = stage if forward else 2 * self._stages - stage
            event = Event(microbatch, position, letter, stage, OUTPUT if forward else GRADIENT, 0)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    self._check(leaf, event)
        if letter in (1, 3) and stage in self._often and stage not in self._bad:
            self._check_parameters(Event(microbatch, 3 * self._stages - stage, letter, stage, PARAMETERS, 0))

    def _check(self, tensor: Tensor, event: Event) -> bool:
        total = sum_of(tensor)
        if total is None:
            return True
        if self._on_gpu:
            self._kept.append((event, total))
            return True
        if cmath.isfinite(total.item()):
            return True
        value = kind_of(tensor)
        if value is not None:
            self._events.append(event._replace(value=value))
        return value is None

    def _check_parameters(self, event: Event) -> None:
        grads = _own_grads(self._parameters[event.stage])
        if self._on_gpu:
            total = (
                sum_of(flatten_dense(grads)) if grads and all(grad.layout is torch.strided for grad in grads) else None
            )
            self._kept += [] if total is None else [(event, total)]
            return
        if not grads or (event.stage in self._often and _all_finite(grads)):
            return
        for grad in grads:
            if not self._check(grad, event):
                self._bad.add(event.stage)
                return

    def end(self) -> None:
        """Check, at the end of the program, the gradients that were not checked after every action."""
        for stage, own in self._parameters.items():
            grads = _own_grads(own)
            if not grads or (stage in self._often and not self._on_gpu):
                continue
            if self._on_gpu:
                self._magnitudes[stage] = _magnitudes(grads)
            elif not all(map(finite, grads)):
                self._bad.add(stage)

    @property
    def known(self) -> bool:
        """Whether a non-finite value is known, without waiting for a GPU."""
        return bool(self._events)

    def bad(self) -> set[int]:
        """The stages whose gradients are not finite; waits for a GPU."""
        by_stage, self._magnitudes = self._magnitudes, {}
        values = iter(torch.cat(list(by_stage.values())).tolist() if by_stage else [])
        for stage, magnitudes in by_stage.items():
            is_finite = all(map(cmath.isfinite, list(islice(values, len(magnitudes)))))
            grads = () if is_finite else (parameter.grad for parameter in self._parameters[stage])
            if any(kind_of(local(grad)) is not None for grad in grads if grad is not None):
                self._bad.add(stage)
        return self._bad

    def events(self) -> list[Event]:
        """The events so far; waits for a GPU."""
        if self._kept:
            wrong = ~torch.stack([total.abs().double() for _, total in self._kept]).isfinite()
            began: set[int] = set()
            for (event, total), odd in zip(self._kept, wrong.tolist(), strict=True):
                if odd and event.what == PARAMETERS and event.stage in began:
                    continue  # accumulated gradients stay non-finite in later actions
                if odd:
                    began.update([event.stage] if event.what == PARAMETERS else [])
                    value = kind_of(total)
                    self._events.append(event._replace(value=0 if value is None else value))
            self._kept = []
        return self._events


def _own_grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist: of sharded ones, this process's part."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad if type(grad) is Tensor else local(grad) for grad in grads]


def _is_small(parameters: Sequence[Tensor]) -> bool:
    one_type = len({parameter.dtype for parameter in parameters}) == 1
    return one_type and sum(parameter.numel() for parameter in parameters) <= SMALL


def first(events: Iterable[Event]) -> Event | None:
    """The first event; -inf counts only if there is nothing else."""
    known = sorted(events)
    return next((event for event in known if event.value < 2), next(iter(known), None))


def write_events(events: Iterable[Event]) -> Floats:
    """The first -inf event and the first of any other value, as numbers that can be summed with zeros of other ranks.

    >>> event = Event(2, 1, 0, 1, OUTPUT, 0)
    >>> read_events(write_events([event])) == [event]
    True
    """
    rows = np.zeros((2, WIDTH))
    known = sorted(events)
    for row, weak in zip(rows, (False, True), strict=True):
        event = next((event for event in known if (event.value == 2) is weak), None)
        if event is not None:
            row[:] = event
            row[:2] += 1  # an event is never all zeros
    return rows.reshape(-1)


def read_events(row: Floats) -> list[Event]:
    """Read the events that `write_events` wrote."""
    rows = row.reshape(-1, WIDTH).astype(int).tolist()
    return [Event(microbatch - 1, position - 1, *rest) for microbatch, position, *rest in rows if microbatch]


class NotFinite(NamedTuple):
    """Why a step with a non-finite loss or gradient fails, and where the first such value appeared."""

    event: Event
    rank: int
    text: str
    known: bool
    """Whether the microbatch is known."""

    @property
    def doing(self) -> str:
        """The action in which it appeared, as text."""
        if self.known:
            return describe(self.event.place)
        return f"the backward of stage {self.event.stage}"

    def with_inputs(self, inputs: Sequence[Any]) -> NotFinite:
        """Add to the text if the first non-finite value is in the inputs; `inputs` are the microbatches."""
        event = self.event
        if (event.what, event.stage) != (OUTPUT, 0):
            return self
        leaves = pytree.tree_leaves(inputs[event.microbatch])
        if all(finite(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return self
        return self._replace(text=f"{self.text}; the inputs of microbatch {event.microbatch} are not finite")


def not_finite(
    losses: Sequence[float], events: Sequence[Event], bad: Sequence[int], schedule: Schedule
) -> NotFinite | None:
    """The failure of a step with non-finite losses or stages with non-finite gradients (`bad`); None if it is good."""
    microbatch = next((number for number, loss in enumerate(losses) if not cmath.isfinite(loss)), None)
    if microbatch is None and not bad:
        return None
    if microbatch is not None:  # the cause of the first such loss is earlier in the same microbatch
        loss = losses[microbatch]
        value = 0 if loss != loss else 1 if loss > 0 else 2
        earlier = (event for event in events if event.microbatch == microbatch and event.position <= schedule.stages)
        events = [*earlier, Event(microbatch, schedule.stages, 0, schedule.stages - 1, LOSS, value)]
    event = first(events)
    known = event is not None
    if event is None:  # gradients flow backwards, so it appeared at the last of these stages or after it
        event = Event(0, 0, 1, max(bad), PARAMETERS, 0)
    rank = int(schedule.placement.rank_of(event.stage, event.microbatch))
    if microbatch is not None:
        problem = f"the loss of microbatch {microbatch} is {losses[microbatch]} on stage {schedule.stages - 1}"
        where = "its inputs are finite" if event.what == LOSS else f"the first value that is not finite is {event}"
    else:
        problem = f"the gradients are not finite though the loss is {sum(losses):.4g}"
        where = f"the first value that is not finite is {event}" if known else "the microbatch is not known"
    return NotFinite(event, rank, f"{problem}, and {where}; check_finite=False accepts such values", known)


def refuse_norm(stages: ModelStages, norms: Floats, total: Tensor) -> None:
    """Raise an error that names the parameters whose gradients are not finite, and their stages."""
    stage_of = {
        name: stage
        for stage, part in reversed(list(enumerate(stages.parts)))
        for name, _ in part.named_parameters(remove_duplicate=False)
    }
    wrong = [
        f"{name} (stage {stage_of.get(name, '?')})"
        for (name, _), norm in zip(stages.model.named_parameters(), norms.tolist(), strict=True)
        if not math.isfinite(norm)
    ]
    raise PipelineError(
        f"the norm of the gradients is {total.item()}, and those of {listed(wrong) or 'all parameters together'} "
        "are not finite or too large; no gradient was clipped and no parameter changed: call zero_grad() before "
        "the next step; check_finite=False accepts such gradients"
    )

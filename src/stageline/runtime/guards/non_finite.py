"""Values that are not finite: where the first one of a step appeared.

Only a loss or a gradient fails a step. What stages pass to each other is looked at to name the stage and microbatch
where it began: a tensor that crosses stages may hold -inf on purpose, as masks do.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stageline.faults.monitor.verdict import describe
from stageline.runtime._torch_private import flatten_dense, pytree, sparse_values
from stageline.schedules.schedule import Schedule

Floats = NDArray[np.float64]
SMALL = 1 << 15
"""Up to how many elements the gradients of a stage are looked at after every backward, and not once a step."""
WIDTH = 6
"""How many numbers an event takes."""
LETTERS = "FBIW"
VALUES = ("NaN", "inf", "-inf")
OUTPUT, LOSS, GRADIENT, PARAMETERS, BEFORE = range(5)


class Event(NamedTuple):
    """A value that is not finite: the first in the order in which a microbatch goes through the stages comes first."""

    microbatch: int
    position: int
    letter: int
    stage: int
    what: int
    """`OUTPUT` of a stage, `LOSS`, `GRADIENT` that it passes back, of its `PARAMETERS`, or there `BEFORE` the step."""
    value: int
    """Which of `VALUES`; with several, the first of them."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action in which it appeared."""
        return LETTERS[self.letter], self.stage, self.microbatch

    def __str__(self) -> str:
        """Say it as an error would."""
        value = f"{'an' if self.value == 1 else 'a'} {VALUES[self.value]}"
        if self.what == BEFORE:
            return f"{value} in a gradient that stage {self.stage} had before this step: call zero_grad()"
        where = {
            OUTPUT: "in the output",
            LOSS: "in the loss",
            GRADIENT: "in the gradient that it passes back",
            PARAMETERS: "in the gradients of its parameters",
        }[self.what]
        return f"{value} {where}, in {describe(self.place)}"


def sum_of(tensor: Tensor) -> Tensor | None:
    """A number that is finite only if all values are, unless they are too large to be added; None for whole numbers.

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
    """Which of `VALUES` a tensor holds; None where all are finite."""
    if tensor.layout is not torch.strided:
        tensor = tensor.values() if tensor.is_nested else sparse_values(tensor)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for number, holds in enumerate((torch.isnan, torch.isposinf, torch.isneginf)):
        if bool(holds(plain).any()):
            return number
    return None


def finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor of the host are finite; quick where they are."""
    total = sum_of(tensor)
    return total is None or cmath.isfinite(total.item()) or kind_of(tensor) is None


def _all_finite(small: Sequence[Tensor]) -> bool:
    """Whether the values of small tensors are finite; at once, as a call for each would take longer than they do."""
    if any(tensor.layout is not torch.strided for tensor in small):
        return False
    return finite(flatten_dense(small))


class FiniteWatch:
    """Looks at what one rank computes in a step.

    On a GPU nothing is waited for: sums are kept there, and read only if the gradients prove not to be finite.
    """

    def __init__(self, stages: int, parts: Mapping[int, nn.Module], *, gradients: bool, on_gpu: bool) -> None:
        """Of the stages of a rank; `gradients` says whether those of parameters are looked at."""
        self._stages, self._on_gpu = stages, on_gpu
        self._parameters = {
            stage: [parameter for parameter in part.parameters() if parameter.requires_grad] if gradients else []
            for stage, part in parts.items()
        }
        self._often = {stage for stage, own in self._parameters.items() if _is_small(own)}
        self._bad: set[int] = set()
        self._events: list[Event] = []
        self._kept: list[tuple[Event, Tensor]] = []
        self._totals: dict[int, list[Tensor]] = {}
        for stage in () if on_gpu else self._parameters:
            self._look_at_parameters(Event(0, -1, 1, stage, BEFORE, 0))

    def action(self, letter: int, stage: int, microbatch: int, leaves: Sequence[Any] | None) -> None:
        """An action is done, and passes this on."""
        if leaves:
            forward = letter == 0
            position = stage if forward else 2 * self._stages - stage
            event = Event(microbatch, position, letter, stage, OUTPUT if forward else GRADIENT, 0)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    self._look_at(leaf, event)
        if letter in (1, 3) and stage in self._often and stage not in self._bad:
            self._look_at_parameters(Event(microbatch, 3 * self._stages - stage, letter, stage, PARAMETERS, 0))

    def _look_at(self, tensor: Tensor, event: Event) -> bool:
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

    def _look_at_parameters(self, event: Event) -> None:
        grads = [parameter.grad for parameter in self._parameters[event.stage] if parameter.grad is not None]
        if self._on_gpu:
            total = (
                sum_of(flatten_dense(grads)) if grads and all(grad.layout is torch.strided for grad in grads) else None
            )
            self._kept += [] if total is None else [(event, total)]
            return
        if not grads or (event.stage in self._often and _all_finite(grads)):
            return
        for grad in grads:
            if not self._look_at(grad, event):
                self._bad.add(event.stage)
                return

    def end(self) -> None:
        """The program is over: look at the gradients that were not looked at after every action."""
        for stage, own in self._parameters.items():
            grads = [parameter.grad for parameter in own if parameter.grad is not None]
            if not grads or (stage in self._often and not self._on_gpu):
                continue
            if self._on_gpu:
                self._totals[stage] = [total for grad in grads if (total := sum_of(grad)) is not None]
            elif not all(map(finite, grads)):
                self._bad.add(stage)

    @property
    def known(self) -> bool:
        """Whether anything that is not finite is known of, without waiting."""
        return bool(self._events)

    def bad(self) -> set[int]:
        """The stages whose gradients are not finite; on a GPU, this waits for them."""
        for stage, totals in self._totals.items():
            if totals and not bool(torch.stack([total.abs().double() for total in totals]).sum().isfinite()):
                grads = (parameter.grad for parameter in self._parameters[stage])
                if any(kind_of(grad) is not None for grad in grads if grad is not None):
                    self._bad.add(stage)
        self._totals = {}
        return self._bad

    def events(self) -> list[Event]:
        """What was not finite, as far as it is known; on a GPU, this waits for it."""
        if self._kept:
            wrong = ~torch.stack([total.abs().double() for _, total in self._kept]).isfinite()
            began: set[int] = set()
            for (event, total), odd in zip(self._kept, wrong.tolist(), strict=True):
                if odd and event.what == PARAMETERS and event.stage in began:
                    continue  # gradients that are not finite stay so in the actions after that
                if odd:
                    began.update([event.stage] if event.what == PARAMETERS else [])
                    value = kind_of(total)
                    self._events.append(event._replace(value=0 if value is None else value))
            self._kept = []
        return self._events


def _is_small(parameters: Sequence[Tensor]) -> bool:
    one_type = len({parameter.dtype for parameter in parameters}) == 1
    return one_type and sum(parameter.numel() for parameter in parameters) <= SMALL


def first(events: Iterable[Event]) -> Event | None:
    """Where it began: -inf counts only where there is nothing else."""
    known = sorted(events)
    return next((event for event in known if event.value < 2), next(iter(known), None))


def write_events(events: Iterable[Event]) -> Floats:
    """The first event and the first that is not -inf, as numbers that stay what they are when zeros are added.

    >>> event = Event(2, 1, 0, 1, OUTPUT, 0)
    >>> read_events(write_events([event])) == [event]
    True
    """
    row = np.zeros(2 * WIDTH)
    known = list(events)
    strong, weak = (
        first(event for event in known if event.value < 2),
        first(event for event in known if event.value == 2),
    )
    for place, event in enumerate((strong, weak)):
        if event is not None:
            row[place * WIDTH : (place + 1) * WIDTH] = event
            row[place * WIDTH] += 1
            row[place * WIDTH + 1] += 1
    return row


def read_events(row: Floats) -> list[Event]:
    """The events of all ranks."""
    found = []
    for numbers in row.reshape(-1, WIDTH).astype(int).tolist():
        if numbers[0]:
            found.append(Event(numbers[0] - 1, numbers[1] - 1, *numbers[2:]))
    return found


def loss_events(losses: Sequence[float], stages: int) -> list[Event]:
    """The losses that are not finite, as events."""
    found = []
    for microbatch, loss in enumerate(losses):
        if not cmath.isfinite(loss):
            value = 0 if loss != loss else 1 if loss > 0 else 2
            found.append(Event(microbatch, stages, 0, stages - 1, LOSS, value))
    return found


class NotFinite(NamedTuple):
    """Why a step whose loss or gradients are not finite fails, and where it began."""

    event: Event
    rank: int
    text: str
    known: bool
    """Whether the microbatch is known."""

    @property
    def doing(self) -> str:
        """The action in which it began, as text."""
        if self.known:
            return describe(self.event.place)
        return f"the backward of stage {self.event.stage}"

    def with_inputs(self, inputs: Sequence[Any]) -> NotFinite:
        """Say so where it began in the batch itself, whose microbatches these are."""
        event = self.event
        if (event.what, event.stage) != (OUTPUT, 0):
            return self
        leaves = pytree.tree_leaves(inputs[event.microbatch])
        if all(finite(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return self
        return self._replace(text=f"{self.text}; the inputs of microbatch {event.microbatch} are not finite themselves")

    def to_json(self) -> dict[str, str]:
        """What all ranks are told."""
        return {"doing": self.doing, "text": self.text}


def not_finite(
    losses: Sequence[float], events: Sequence[Event], bad: Sequence[int], schedule: Schedule
) -> NotFinite | None:
    """Judge a step by its losses and by the stages whose gradients are not finite; None where it is good."""
    wrong = loss_events(losses, schedule.stages)
    if not wrong and not bad:
        return None
    if wrong:  # what led to the first of these losses came before it, in the same microbatch
        at = wrong[0].microbatch
        events = [event for event in events if event.microbatch == at and event.position <= schedule.stages]
        wrong = wrong[:1]
    event = first([*events, *wrong])
    known = event is not None
    if event is None:  # gradients flow from the last stage to the first, so it began no later than in the last of them
        event = Event(0, 0, 1, max(bad), PARAMETERS, 0)
    rank = int(schedule.placement.rank_of(event.stage, event.microbatch))
    if wrong:
        microbatch = wrong[0].microbatch
        said = f"the loss of microbatch {microbatch} is {losses[microbatch]} on stage {schedule.stages - 1}"
        where = (
            "what it was given is finite" if event.what == LOSS else f"the first value that is not finite is {event}"
        )
    else:
        said = f"the gradients are not finite though the loss is {sum(losses):.4g}"
        where = f"the first value that is not finite is {event}" if known else "the microbatch is not known"
    return NotFinite(event, rank, f"{said}, and {where}; check_finite=False lets such values pass", known)

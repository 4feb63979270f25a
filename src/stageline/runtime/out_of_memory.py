"""The error of an action that runs out of memory: where, planned and allocated bytes, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stageline.common.errors import ScheduleError
from stageline.common.units import format_size
from stageline.distributed.failures import OutOfMemory
from stageline.schedules.registry import schedule as make_schedule
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate

if TYPE_CHECKING:
    from stageline.planning.plan import Plan
    from stageline.runtime.executor import StepRequest
    from stageline.runtime.stage import Stage

PLAN_ADVICE = "sl.plan(…, memory=…, recompute='auto'), which finds a plan that fits"
FRUGAL = ("1f1b", "interleaved", "v-half", "v-min", "zb-v")
"""Families that hold few microbatches at a time."""
MUCH_LESS = 0.95
"""A schedule is worth a change if it holds at most this fraction."""


@dataclass(frozen=True)
class MemoryContext:
    """What an executor knows about the memory of its rank."""

    schedule: Schedule
    rank: int
    stages: Mapping[int, Stage]
    device: int | None
    planned: Plan | Costs | None = None

    def planned_bytes(self) -> tuple[float | None, str]:
        """The planned peak of the rank, and what it is made of; None if nothing was planned."""
        if self.planned is None:
            return None, "no memory was planned"
        if isinstance(self.planned, Costs):
            peak = simulate(self.schedule, self.planned).peak_memory[self.rank]
            return peak, f"{format_size(peak)} of activations were planned for rank {self.rank}"
        memory = self.planned.memory[self.rank]
        parts = [f"{name} {format_size(size)}" for name, size in memory._asdict().items() if size]
        return memory.total, f"{format_size(memory.total)} were planned for rank {self.rank} ({', '.join(parts)})"

    def allocated_bytes(self) -> tuple[int | None, str]:
        """The bytes that torch has allocated on the rank's GPU, and how many there are."""
        if self.device is None:
            return None, ""
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return allocated, (
            f"cuda:{self.device} has {format_size(allocated)} allocated and {format_size(reserved)} reserved by this "
            f"process, and {format_size(free)} free of {format_size(total)}"
        )

    def in_flight(self) -> str:
        """How many microbatches the rank's stages hold."""
        numbers = {stage: part.in_flight for stage, part in self.stages.items()}
        held = ", ".join(f"{number} of stage {stage}" for stage, number in sorted(numbers.items()) if number)
        return f"microbatches in flight on rank {self.rank}: {held}" if held else ""

    def advice(self, samples: int, training: bool) -> Iterator[str]:
        """The options that lower the peak, most effective first."""
        recompute = next(iter(self.stages.values())).options.recompute if self.stages else None
        if training and recompute is not None and not recompute.stages:
            yield "recompute='stage', which keeps only the inputs of a stage"
        frugal = frugal_schedule(self.schedule) if training else None
        if frugal is not None:
            name, share = frugal
            yield f"schedule='{name}', which needs {share:.0%} of the memory of {self.schedule.name}"
        microbatches = self.schedule.microbatches
        if samples >= 2 * microbatches:
            yield f"microbatches={2 * microbatches} instead of {microbatches}, of half the size"
        if training:
            yield PLAN_ADVICE


def held_share(schedule: Schedule) -> float:
    """The largest number of microbatches that a rank holds, in activations of the whole model."""
    return max(verify(schedule).peak_held) / schedule.stages


def frugal_schedule(schedule: Schedule) -> tuple[str, float] | None:
    """The family that holds the least for these ranks and microbatches, and its share; None if none holds much less.

    >>> from stageline.schedules.registry import schedule
    >>> frugal_schedule(schedule("gpipe", 1, 8)), frugal_schedule(schedule("v-min", 4, 8))
    (('1f1b', 0.125), None)
    """
    current, best = held_share(schedule), None
    for name in FRUGAL:
        try:
            share = held_share(make_schedule(name, schedule.ranks, schedule.microbatches)) / current
        except ScheduleError:
            continue
        if share <= MUCH_LESS and (best is None or share < MUCH_LESS * best[1]):
            best = name, share
    return best


def out_of_memory(context: MemoryContext, doing: object, error: BaseException, request: StepRequest) -> OutOfMemory:
    """The error that replaces torch's; its type is still torch's, too."""
    planned, planned_text = context.planned_bytes()
    allocated, allocated_text = context.allocated_bytes()
    advice = "; ".join(context.advice(request.samples, request.training))
    parts = [_first_sentence(str(error)), allocated_text, planned_text, context.in_flight()]
    parts.append(f"to reduce memory: {advice}" if advice else "use smaller microbatches, or more ranks")
    action, stage, microbatch = doing if isinstance(doing, tuple) and len(doing) == 3 else (None, None, None)
    return OutOfMemory(
        "; ".join(part for part in parts if part),
        action=action,
        stage=stage,
        microbatch=microbatch,
        planned=planned,
        allocated=allocated,
    )


def _first_sentence(text: str) -> str:
    """What torch wanted to allocate, without its account of the GPU.

    >>> _first_sentence("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of")
    'CUDA out of memory. Tried to allocate 20.00 MiB'
    """
    allocation = re.match(r"(.*?Tried to allocate [\d.]+ \w+)", text, re.DOTALL)
    return allocation[1] if allocation else text.strip().rstrip(".")

"""Schedules derived from another one: for fewer microbatches, or without backwards."""

from __future__ import annotations

from stageline.schedules.action import Action, Entry, Overlap
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule


def only_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The same order for the first `count` microbatches, for a batch with fewer samples than microbatches."""
    if count == schedule.microbatches:
        return schedule
    programs: list[list[Entry]] = []
    for program in schedule.programs:
        kept: list[Entry] = []
        for entry in program:
            parts = [part for part in _parts(entry) if part.microbatch < count]
            kept += [entry] if len(parts) == len(_parts(entry)) else parts
        programs.append(kept)
    placement = Placement.of(schedule.ranks, schedule.placement.table, schedule.placement.direction[:count])
    return Schedule.from_programs(
        programs, placement=placement, training=schedule.training, name=schedule.name, options=schedule.options
    )


def forwards_of(schedule: Schedule) -> Schedule:
    """The schedule for inference: only its forwards, in the same order."""
    programs = [
        [part for entry in program for part in _parts(entry) if part.kind == "F"] for program in schedule.programs
    ]
    return Schedule.from_programs(
        programs, placement=schedule.placement, training=False, name=f"{schedule.name}, forwards"
    )


def _parts(entry: Entry) -> list[Action]:
    return [entry.forward, entry.backward] if isinstance(entry, Overlap) else [entry]

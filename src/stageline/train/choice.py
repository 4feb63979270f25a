"""Choosing the cut and the schedule: by the profile of the model, the fastest in simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stageline.errors import CostError, ScheduleError, StagelineError
from stageline.model.partition import partition
from stageline.model.profile import Profile
from stageline.model.staged import even_sizes
from stageline.schedules.certificate import verify
from stageline.schedules.files import read_schedule, write_aside
from stageline.schedules.registry import families, schedule
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline
from stageline.train.config import Parallelism


@dataclass(frozen=True)
class Choice:
    """A schedule, how many units each of its stages has, and what it is expected to take."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    costs: Costs
    tried: tuple[tuple[str, float], ...] = ()
    """What was compared: families and the seconds that a step takes in simulation, the fastest first."""

    @property
    def timeline(self) -> Timeline:
        """The planned step."""
        return simulate(self.schedule, self.costs)

    def write(self, folder: Path, asked: dict[str, Any]) -> None:
        """Keep it, with what was asked for, so that a run that goes on makes the same choice."""
        self.schedule.write(folder / "schedule.json")
        kept = {
            "asked": asked,
            "layers_per_stage": list(self.layers_per_stage),
            "costs": self.costs.to_json(),
            "tried": [list(pair) for pair in self.tried],
        }
        write_aside(folder / "choice.json", iter([json.dumps(kept, indent=1) + "\n"]))

    @staticmethod
    def read(folder: Path, asked: dict[str, Any]) -> Choice | None:
        """The choice that an earlier start of the run made, if it was asked for the same."""
        try:
            kept = json.loads((folder / "choice.json").read_text(encoding="utf-8"))
            made, counts = read_schedule(folder / "schedule.json"), [int(each) for each in kept["layers_per_stage"]]
            if kept["asked"] != asked or len(counts) != made.stages or min(counts) < 1:
                return None
            return Choice(
                made,
                tuple(counts),
                Costs.from_json(kept["costs"]),
                tuple((str(name), float(seconds)) for name, seconds in kept["tried"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is made again


def choose(profile: Profile, asked: Parallelism, ranks: int, microbatches: int) -> Choice:
    """The fastest of the schedules that were asked for, each with its best cut, simulated with the profile's costs.

    >>> import torch
    >>> from stageline.model.staged import profile
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> found = choose(profile(layers, torch.ones(32, 64), repeats=1), Parallelism(), ranks=2, microbatches=4)
    >>> len(found.tried) > 5, sum(found.layers_per_stage)
    (True, 8)
    """
    found: list[tuple[float, float, Choice]] = []
    refused = ""
    for made in _candidates(asked, ranks, microbatches):
        if isinstance(made, ScheduleError):
            refused = str(made)
            continue
        try:
            counts = _cut(profile, made, asked.pipeline_parallel_split)
        except StagelineError as error:
            refused = f"{made.name}: {error}"
            continue
        ends = np.cumsum([0, *counts]).tolist()
        costs = profile.costs(list(pairwise(ends)))
        planned = simulate(made, costs)
        found.append((planned.makespan, max(planned.peak_memory), Choice(made, tuple(counts), costs)))
    if not found:
        raise StagelineError(
            f"no schedule fits {len(profile.layers)} units on {ranks} ranks with {microbatches} microbatches: {refused}"
        )
    found.sort(key=lambda each: each[:2])
    best = found[0][2]
    tried = tuple((each.schedule.name, makespan) for makespan, _, each in found)
    return Choice(best.schedule, best.layers_per_stage, best.costs, tried)


def _candidates(asked: Parallelism, ranks: int, microbatches: int) -> Iterator[Schedule | ScheduleError]:
    """The schedule that was asked for, or all that accumulate gradients in order, so that bits do not depend on it."""
    if asked.pipeline_parallel_schedule_csv:
        made = read_schedule(asked.pipeline_parallel_schedule_csv)
        if (made.ranks, made.microbatches) != (ranks, microbatches):
            raise ScheduleError(
                f"{asked.pipeline_parallel_schedule_csv} has {made.ranks} ranks and {made.microbatches} microbatches, "
                f"and the job has {ranks} and {microbatches}; see pipeline_parallel_degree, local_batch_size and "
                "pipeline_parallel_microbatch_size"
            )
        yield made
        return
    chunks = {"chunks": asked.pipeline_parallel_chunks} if asked.pipeline_parallel_chunks else {}
    if asked.pipeline_parallel_schedule != "auto":
        yield schedule(asked.pipeline_parallel_schedule, ranks, microbatches, **chunks)
        return
    for name in families():
        try:
            made = schedule(name, ranks, microbatches, **chunks)
            if made.training and made.placement.directions == 1 and verify(made).in_order:
                yield made
        except (ScheduleError, TypeError) as error:
            yield error if isinstance(error, ScheduleError) else ScheduleError(str(error))


def _cut(profile: Profile, made: Schedule, by: Literal["time", "parameters", "layers"]) -> list[int]:
    """How many units each stage has."""
    units = len(profile.layers)
    if made.stages > units:
        raise CostError(f"there are {made.stages} stages and only {units} units")
    table = made.placement.table[0].tolist()
    chunks = made.stages // made.ranks
    loop = [stage % made.ranks for stage in range(made.stages)]
    vee = [*range(made.ranks), *reversed(range(made.ranks))]
    placement: Literal["loop", "v"] | None = "loop" if table == loop else "v" if table == vee else None
    if by == "layers" or placement is None:
        return even_sizes(units, made.stages)
    costs: Sequence[float] = profile.seconds if by == "time" else [float(layer.parameters) for layer in profile.layers]
    return partition(costs, made.ranks, chunks=chunks, placement=placement).layers_per_stage

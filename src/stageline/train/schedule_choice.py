"""Choosing the cut and the schedule of a job: by a plan from the model's profile, kept for when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stageline.common.errors import NothingFits, ScheduleError, StagelineError, in_flags
from stageline.common.files import write_text
from stageline.model.profile.profile import Profile
from stageline.planning.io import read_plan
from stageline.planning.plan import Plan, plan
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import schedule
from stageline.schedules.schedule import Schedule
from stageline.train.config.config import Config, Parallelism

PLAN, ASKED = "plan.json", "choice.json"
TIME_LIMIT = 1.0
"""Seconds that the search may take: a job should start at once."""
STATES = {"AdamW": 8.0, "Adam": 8.0, "SGD": 4.0, "Adafactor": 1.0, "Muon": 4.0}
"""Bytes of an optimizer's state for a parameter, about."""


def keep(found: Plan, folder: Path, asked: dict[str, Any]) -> None:
    """Keep it with what was asked for, so that a run that goes on makes the same choice."""
    found.write(folder / PLAN)
    write_text(folder / ASKED, json.dumps({"asked": asked}, indent=1) + "\n")


def kept(folder: Path, asked: dict[str, Any]) -> Plan | None:
    """The choice that an earlier start of the run made, if it was asked for the same."""
    try:
        if json.loads((folder / ASKED).read_text(encoding="utf-8"))["asked"] != asked:
            return None
        return read_plan(folder / PLAN)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is made again


def choose(
    profile: Profile, config: Config, ranks: int, microbatches: int, memory: float | None = None
) -> tuple[Plan, str]:
    """The fastest of the schedules that were asked for, with its best cut; and what people should know of it.

    >>> import torch
    >>> from stageline.model.profile.profiler import profile
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> found, _ = choose(profile(layers, torch.ones(32, 64), repeats=1), Config(), ranks=2, microbatches=4)
    >>> len(found.alternatives) > 5, sum(found.layers_per_stage)
    (True, 8)
    """
    asked = config.parallelism
    made = _given(asked, ranks, microbatches)
    half = config.training.dtype == "bfloat16"
    given: dict[str, Any] = {
        "profile": profile,
        "ranks": ranks,
        "microbatches": microbatches,
        "schedule": "auto" if made is None else made,
        "chunks": asked.pipeline_parallel_chunks or None if made is None else None,
        "split": asked.pipeline_parallel_split,
        "recompute": "stage" if config.activation_checkpoint.mode == "full" else "none",
        "parameter_bytes": 2.0 if half else 4.0,
        # The optimizer works on a float32 master of what is held in bfloat16.
        "optimizer_bytes_per_parameter": STATES.get(config.optimizer.name, 8.0) + (4.0 if half else 0.0),
        "time_limit": TIME_LIMIT,
    }
    try:
        return plan(memory=memory, **given), ""
    except NothingFits as error:  # it is an estimate: the job may try all the same
        return plan(**given), in_config_words(str(error))


def _given(asked: Parallelism, ranks: int, microbatches: int) -> Schedule | None:
    """The schedule that was asked for; None where it is to be chosen."""
    if asked.pipeline_parallel_schedule_csv:
        made = read_schedule(asked.pipeline_parallel_schedule_csv)
        if (made.ranks, made.microbatches) != (ranks, microbatches):
            raise ScheduleError(
                f"{asked.pipeline_parallel_schedule_csv} has {made.ranks} ranks and {made.microbatches} microbatches, "
                f"and the job has {ranks} and {microbatches}; see pipeline_parallel_degree, local_batch_size and "
                "pipeline_parallel_microbatch_size"
            )
        return made
    if asked.pipeline_parallel_schedule.lower() == "auto":
        return None
    chunks = {"chunks": asked.pipeline_parallel_chunks} if asked.pipeline_parallel_chunks else {}
    made = schedule(asked.pipeline_parallel_schedule, ranks, microbatches, **chunks)
    if not made.training:
        raise StagelineError(f"{made.name} is for inference; take a schedule that trains, or auto")
    return made


def in_config_words(text: str) -> str:
    """What `sl.plan` advises, as flags of a job.

    >>> in_config_words("what would fit: recompute='auto' brings it to 3 GiB; ranks=8 brings it to 1 GiB")
    'what would fit: --activation_checkpoint.mode full brings it to 3 GiB; --parallelism.pipeline_parallel_degree 8
    brings it to 1 GiB'
    """
    text = text.replace("recompute='auto'", "recompute=full").replace("recompute='stage'", "recompute=full")
    return in_flags(
        text,
        {
            "ranks": "--parallelism.pipeline_parallel_degree",
            "schedule": "--parallelism.pipeline_parallel_schedule",
            "recompute": "--activation_checkpoint.mode",
            "memory": "a rank with",
        },
    )

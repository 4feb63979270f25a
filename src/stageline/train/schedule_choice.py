"""The choice of stages and schedule: a plan from the model's profile, saved for when the run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stageline.common.errors import NothingFits, ScheduleError, StagelineError, in_flags
from stageline.common.files import write_text
from stageline.model.profile import Profile
from stageline.planning.io import read_plan
from stageline.planning.plan import Plan, plan
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import schedule
from stageline.schedules.schedule import Schedule
from stageline.train.config.config import Config, Parallelism
from stageline.train.run_folder import CHOICE, PLAN

TIME_LIMIT = 1.0
"""Seconds that the search may take, because a job should start soon."""
OPTIMIZER_STATE_BYTES = {"AdamW": 8.0, "Adam": 8.0, "SGD": 4.0, "Adafactor": 1.0, "Muon": 4.0}
"""Approximate bytes of optimizer state for each parameter."""


def save_choice(choice: Plan, folder: Path, request: dict[str, Any]) -> None:
    """Save a choice with its request, so that a resumed run makes the same one."""
    choice.write(folder / PLAN)
    write_text(folder / CHOICE, json.dumps({"asked": request}, indent=1) + "\n")


def load_choice(folder: Path, request: dict[str, Any]) -> Plan | None:
    """Return the choice of an earlier start for the same request; None if there is none."""
    try:
        if json.loads((folder / CHOICE).read_text(encoding="utf-8"))["asked"] != request:
            return None
        return read_plan(folder / PLAN)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose_schedule(
    profile: Profile, config: Config, ranks: int, microbatches: int, memory: float | None = None
) -> tuple[Plan, str]:
    """Return the fastest schedule that the configuration allows, with its best split; and a note, or an empty string.

    >>> import torch
    >>> from stageline.model.profiler import profile
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> choice, _ = choose_schedule(profile(layers, torch.ones(32, 64), repeats=1), Config(), ranks=2, microbatches=4)
    >>> len(choice.alternatives) > 5, sum(choice.layers_per_stage)
    (True, 8)
    """
    options = config.parallelism
    fixed = _fixed_schedule(options, ranks, microbatches)
    half = config.training.dtype == "bfloat16"
    request: dict[str, Any] = {
        "profile": profile,
        "ranks": ranks,
        "microbatches": microbatches,
        "schedule": "auto" if fixed is None else fixed,
        "chunks": options.pipeline_parallel_chunks or None if fixed is None else None,
        "split": options.pipeline_parallel_split,
        "recompute": "stage" if config.activation_checkpoint.mode == "full" else "none",
        "parameter_bytes": 2.0 if half else 4.0,
        # A bfloat16 parameter has a float32 master weight.
        "optimizer_bytes_per_parameter": OPTIMIZER_STATE_BYTES.get(config.optimizer.name, 8.0) + (4.0 if half else 0.0),
        "time_limit": TIME_LIMIT,
    }
    try:
        return plan(memory=memory, **request), ""
    except NothingFits as error:  # an estimate, so the job may still try
        return plan(**request), in_config_words(str(error))


def _fixed_schedule(options: Parallelism, ranks: int, microbatches: int) -> Schedule | None:
    """Return the schedule that the configuration names; None for "auto"."""
    if file := options.pipeline_parallel_schedule_csv:
        fixed = read_schedule(file)
        if (fixed.ranks, fixed.microbatches) != (ranks, microbatches):
            raise ScheduleError(
                f"{file} has {fixed.ranks} ranks and {fixed.microbatches} microbatches, and the job has {ranks} and "
                f"{microbatches}; see pipeline_parallel_degree, local_batch_size and pipeline_parallel_microbatch_size"
            )
        return fixed
    if options.pipeline_parallel_schedule.lower() == "auto":
        return None
    chunks = {"chunks": options.pipeline_parallel_chunks} if options.pipeline_parallel_chunks else {}
    fixed = schedule(options.pipeline_parallel_schedule, ranks, microbatches, **chunks)
    if not fixed.training:
        raise StagelineError(f"{fixed.name} is for inference; use a schedule that trains, or auto")
    return fixed


def in_config_words(text: str) -> str:
    """Return the advice of `sl.plan` as flags of a job.

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

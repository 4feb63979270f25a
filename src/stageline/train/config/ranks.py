"""The number of ranks of a job whose config leaves it open."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from stageline.common.errors import StagelineError
from stageline.schedules.io import read_schedule
from stageline.train.config.config import Parallelism

DEFAULT_RANKS = 4
"""Ranks of a pipeline without GPUs, as threads of one process."""
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def count_gpus(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs that torch uses; before torch is imported, those that the driver lists."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    try:
        present = len(list(DRIVER_GPUS.iterdir()))
    except OSError:
        return 0
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def started_processes(environment: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun started; 1 without it.

    >>> started_processes({}), started_processes({"WORLD_SIZE": "8"})
    (1, 8)
    """
    text = environment.get("WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def choose_ranks(options: Parallelism, processes: int, gpus: int) -> int:
    """Return the ranks of a pipeline: those of the config, or the best number for the processes and GPUs.

    >>> [choose_ranks(Parallelism(), processes=1, gpus=gpus) for gpus in (0, 1, 8)]
    [4, 1, 1]
    >>> [choose_ranks(Parallelism(), processes, gpus=8) for processes in (2, 3, 8)]
    [2, 3, 4]
    >>> choose_ranks(Parallelism(pipeline_parallel_degree=2), processes=1, gpus=1)
    2
    """
    if options.pipeline_parallel_degree:
        return options.pipeline_parallel_degree
    if options.pipeline_parallel_schedule_csv:
        with suppress(StagelineError):  # the rules of the config report it
            return read_schedule(options.pipeline_parallel_schedule_csv).ranks
    replicas = options.data_parallel_replicate_degree
    if processes == 1 and replicas > 1:  # they are still to be started, one for each GPU
        return max(1, gpus // replicas) if gpus else DEFAULT_RANKS
    if processes == 1:
        return 1 if gpus else DEFAULT_RANKS
    if replicas:
        return max(1, processes // replicas)
    return processes if processes % DEFAULT_RANKS else DEFAULT_RANKS


def ranks_of_job(options: Parallelism) -> int:
    """Return the ranks of a pipeline in the environment of this process."""
    return options.pipeline_parallel_degree or choose_ranks(options, started_processes(os.environ), count_gpus())

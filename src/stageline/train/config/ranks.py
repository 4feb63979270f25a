"""The degrees of a job: ranks, replicas, shards and tensor parallel, if the config leaves one open."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

from stageline.common.errors import StagelineError
from stageline.common.machine import cores
from stageline.distributed.launchers.slurm import slurm_place
from stageline.distributed.launchers.threads import launched_ranks
from stageline.schedules.io import read_schedule
from stageline.train.config.config import Parallelism

DEFAULT_RANKS = 4
"""The most ranks of a pipeline if nobody asked for more: without GPUs, or beside another degree that is the rest."""
CHOOSE = 0
"""The degree of a pipeline that leaves processes to another degree, or has the ranks of a schedule file."""
REST = -1
"""The degree that takes the processes which the others leave."""
UNSET = -2
"""A degree that no file, flag or dict has set."""
REPLICAS = "data_parallel_replicate_degree"
SHARDS = "data_parallel_shard_degree"
TENSORS = "tensor_parallel_degree"
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
    """Return the number of processes that torchrun, `srun` or another launcher started; 1 without them.

    >>> started_processes({}), started_processes({"WORLD_SIZE": "8"})
    (1, 8)
    """
    text = {**environment, **slurm_place(environment)}.get("WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


class Degrees(NamedTuple):
    """The sizes of a job's mesh; their product is the number of processes."""

    pipeline_parallel_degree: int
    data_parallel_replicate_degree: int
    data_parallel_shard_degree: int
    tensor_parallel_degree: int

    @property
    def processes(self) -> int:
        """The number of processes that the job needs."""
        return prod(self)

    def __str__(self) -> str:
        """
        >>> print(Degrees(2, 1, 3, 1))
        pipeline_parallel_degree 2 × data_parallel_replicate_degree 1 × data_parallel_shard_degree 3
        """
        sizes = [f"{name} {size}" for name, size in zip(self._fields, self, strict=True)]
        return " × ".join(sizes[:2] + [text for text, size in zip(sizes[2:], self[2:], strict=True) if size > 1])


def open_degrees() -> Parallelism:
    """Return the defaults, with ranks and replicas that nobody has set."""
    return Parallelism(pipeline_parallel_degree=UNSET, data_parallel_replicate_degree=UNSET)


def close_degrees(options: Parallelism) -> None:
    """Set what nobody has set: one degree is the rest, first that of the pipeline, then that of the replicas."""
    if options.pipeline_parallel_degree == UNSET:
        leaves = _has_rest(options) or options.pipeline_parallel_schedule_csv
        options.pipeline_parallel_degree = CHOOSE if leaves else REST
    if options.data_parallel_replicate_degree == UNSET:
        options.data_parallel_replicate_degree = 1 if _has_rest(options) else REST


def _has_rest(options: Parallelism) -> bool:
    return any(_degree(options, name) == REST for name in Degrees._fields)


def degree_errors(options: Parallelism) -> Iterator[str]:
    """Check the degrees as far as they do not depend on the number of processes."""
    for name in Degrees._fields[2:]:
        if getattr(options, name) == 0:
            yield f"parallelism.{name} is 0; it must be at least 1, or -1 for the rest"
    rests = [name for name in Degrees._fields if _degree(options, name) == REST]
    if len(rests) > 1:
        values = " and ".join(f"parallelism.{name} is {getattr(options, name)}" for name in rests)
        meaning = "for replicas, 0 means -1, the rest" if options.data_parallel_replicate_degree == 0 else "the rest"
        yield f"{values} ({meaning}), but only one degree can be the rest; set one of them to 1 or more"


def _degree(options: Parallelism, name: str) -> int:
    """Return a degree of the config; 0 replicas are the rest."""
    degree = int(getattr(options, name))
    return REST if name == REPLICAS and degree == 0 else degree


def find_degrees(options: Parallelism, processes: int, gpus: int) -> Degrees:
    """Return the degrees of a job on this number of processes; if no rest fits, their product is another number.

    >>> find_degrees(Parallelism(data_parallel_replicate_degree=2), processes=6, gpus=0)
    Degrees(pipeline_parallel_degree=3, data_parallel_replicate_degree=2, data_parallel_shard_degree=1,
    tensor_parallel_degree=1)
    """
    for error in degree_errors(options):
        raise StagelineError(error)
    others = [_degree(options, name) for name in Degrees._fields[1:]]
    ranks = choose_ranks(options, processes, gpus)
    rest = max(1, _to_be_started(options, processes, gpus) // (ranks * _known(others)))
    return Degrees(ranks, *(rest if degree == REST else degree for degree in others))


def _known(degrees: list[int]) -> int:
    """Return the product of the degrees that are not the rest; a degree of 0 is refused elsewhere."""
    return prod(degree for degree in degrees if degree > 0)


def choose_ranks(options: Parallelism, processes: int, gpus: int) -> int:
    """Return the ranks of a pipeline: those of the config, or the best number for the processes and GPUs.

    >>> [choose_ranks(Parallelism(), processes=1, gpus=gpus) for gpus in (1, 8)]
    [1, 8]
    >>> [choose_ranks(Parallelism(), processes, gpus=8) for processes in (2, 3, 8)]
    [2, 3, 8]
    >>> choose_ranks(Parallelism(pipeline_parallel_degree=2), processes=1, gpus=1)
    2
    """
    degree = options.pipeline_parallel_degree
    if degree > 0:
        return degree
    if degree != REST and options.pipeline_parallel_schedule_csv:
        with suppress(StagelineError):  # the rules of the config report it
            return read_schedule(options.pipeline_parallel_schedule_csv).ranks
    others = [_degree(options, name) for name in Degrees._fields[1:]]
    pipelines = _known(others)
    processes = _to_be_started(options, processes, gpus)
    if processes == 1:
        return max(1, (launched_ranks() or (1 if gpus else min(DEFAULT_RANKS, cores()))) // pipelines)
    left = max(1, processes // pipelines)
    return left if REST not in others or degree == REST or left % DEFAULT_RANKS else DEFAULT_RANKS


def _to_be_started(options: Parallelism, processes: int, gpus: int) -> int:
    """Return the number of processes; a single one will start one for each GPU. Threads share a GPU."""
    return gpus if processes == 1 and gpus and options.launcher == "processes" else processes


def processes_to_start(options: Parallelism) -> int:
    """Return the number of processes that `stageline train` starts; 1 if it runs in its own.

    It does so as one of the processes of another launcher, if the ranks are threads, and if the ranks of one pipeline
    are more than the GPUs: then they are threads on one GPU.
    """
    if options.launcher == "threads" or os.environ.get("WORLD_SIZE") or slurm_place(os.environ):
        return 1
    gpus = count_gpus()
    degrees = find_degrees(options, 1, gpus)
    return 1 if 0 < gpus < degrees.processes == degrees.pipeline_parallel_degree else degrees.processes


def ranks_of_job(options: Parallelism) -> int:
    """Return the ranks of a pipeline in the environment of this process."""
    return choose_ranks(options, started_processes(os.environ), count_gpus())

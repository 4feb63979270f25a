"""Where the job runs: how many ranks and replicas, which of them is this process, and on what device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stageline.common.errors import StagelineError
from stageline.distributed.bootstrap import check_environment
from stageline.train.config.config import Config


@dataclass(frozen=True)
class Layout:
    """The place of this process in the job."""

    ranks: int
    """Of a pipeline."""
    replicas: int
    processes: int
    rank: int
    """Of this process among all."""
    device: torch.device

    @property
    def replica(self) -> int:
        """The replica that this process is part of."""
        return self.rank // self.ranks if self.processes > 1 else 0

    @property
    def main(self) -> bool:
        """Whether this process shows progress and writes what the run keeps."""
        return self.rank == 0

    @property
    def first(self) -> bool:
        """Whether this process is the first rank of its replica."""
        return self.processes == 1 or self.rank % self.ranks == 0

    def __str__(self) -> str:
        """For people.

        >>> print(Layout(4, 1, 1, 0, torch.device("cpu")))
        4 ranks as threads on cpu
        """
        how = "threads" if self.processes == 1 else "processes"
        times = f" × {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.ranks} ranks{times} as {how} on {self.device.type}"


def find_layout(config: Config) -> Layout:
    """Read it from the group of processes that there is, or from the environment, as torchrun sets it, and from the
    configuration.

    >>> find_layout(Config()).ranks
    4
    """
    ranks, asked = config.parallelism.pipeline_parallel_degree, config.parallelism.data_parallel_replicate_degree
    grouped = dist.is_available() and dist.is_initialized()
    processes = dist.get_world_size() if grouped else check_environment(os.environ)
    if processes == 1:
        if asked > 1:
            raise StagelineError(
                f"parallelism.data_parallel_replicate_degree is {asked}, and replicas are processes: start them with "
                f"torchrun --nproc-per-node {ranks * asked} -m stageline train, or set it to 1"
            )
        return Layout(ranks, 1, 1, 0, _device(0))
    replicas = asked or max(processes // ranks, 1)
    if ranks * replicas != processes:
        raise StagelineError(
            f"{ranks} ranks of a pipeline × {replicas} replicas need {ranks * replicas} processes, and {processes} "
            f"were started; start {ranks * replicas}, or set parallelism.pipeline_parallel_degree and "
            f"data_parallel_replicate_degree so that their product is {processes}"
        )
    rank = dist.get_rank() if grouped else int(os.environ["RANK"])
    return Layout(ranks, replicas, processes, rank, _device(int(os.environ.get("LOCAL_RANK", rank if grouped else 0))))


def _device(local_rank: int) -> torch.device:
    """A GPU where there is one for this process, unless the environment hides it (CUDA_VISIBLE_DEVICES)."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())

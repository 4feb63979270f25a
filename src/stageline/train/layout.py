"""The layout of a job: the sizes of its mesh and batches, and the place and device of this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from stageline.common.errors import StagelineError
from stageline.common.machine import cores
from stageline.distributed.attempts import SEAT, SLOT
from stageline.distributed.bootstrap import check_environment
from stageline.distributed.launchers.slurm import slurm_place
from stageline.timeline.costs import Share
from stageline.train.config.config import Config
from stageline.train.config.ranks import REPLICAS, SHARDS, TENSORS, count_gpus, find_degrees

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class JobLayout:
    """The place of this process in the job."""

    ranks: int
    """The ranks of a pipeline."""
    replicas: int
    """The pipelines with samples of their own: replicas times shards."""
    processes: int
    rank: int
    """The number of this process."""
    device: torch.device
    shards: int = 1
    """The replicas that share parameters, gradients and optimizer state."""
    tensors: int = 1
    """The processes that share the layers of a rank, and take the same samples."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of a job with shards or tensor parallel; None for ranks and replicas, whose groups the pipeline
        makes."""
        if self.shards == self.tensors == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (self.replicas // self.shards, self.shards, self.tensors, self.ranks)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp", "pp"))

    @property
    def replica(self) -> int:
        """The replica of this process."""
        return self.rank // (self.ranks * self.tensors) if self.processes > 1 else 0

    @property
    def tensor(self) -> int:
        """The part of the layers that this process has."""
        return self.rank // self.ranks % self.tensors if self.processes > 1 else 0

    @property
    def main(self) -> bool:
        """Whether this process prints progress and writes the files of the run."""
        return self.rank == 0

    @property
    def first(self) -> bool:
        """Whether this process is the first rank of its replica."""
        return self.processes == 1 or self.rank % (self.ranks * self.tensors) == 0

    def __str__(self) -> str:
        """
        >>> print(JobLayout(4, 1, 1, 0, torch.device("cpu")))
        4 ranks as threads on cpu
        >>> print(JobLayout(1, 1, 1, 0, torch.device("cuda", 0)))
        1 rank on cuda:0
        """
        if self.ranks == self.processes == 1:
            return f"1 rank on {self.device}"
        how = "threads" if self.processes == 1 else "processes"
        replicas = self.replicas // self.shards
        times = f" × {replicas} replicas" if replicas > 1 else ""
        times += f" × {self.shards} shards" if self.shards > 1 else ""
        times += f" × {self.tensors} tensor parallel" if self.tensors > 1 else ""
        return f"{self.ranks} ranks{times} as {how} on {self.device.type}"


ZERO_REPLICAS = "parallelism.data_parallel_replicate_degree=0 is deprecated; use -1 for all remaining processes"


def find_job_layout(config: Config) -> JobLayout:
    """Return the layout, from the process group or the environment of torchrun, and from the configuration."""
    if config.parallelism.data_parallel_replicate_degree == 0:
        warnings.warn(ZERO_REPLICAS, DeprecationWarning, stacklevel=2)
    grouped = dist.is_available() and dist.is_initialized()
    if not grouped:
        os.environ.update(slurm_place(os.environ))
    processes = dist.get_world_size() if grouped else check_environment(os.environ)
    options = config.parallelism if processes > 1 else replace(config.parallelism, launcher="threads")
    degrees = find_degrees(options, processes, count_gpus())
    ranks, replicas, shards, tensors = degrees
    if processes == 1:
        named = ((REPLICAS, replicas, "replicas"), (SHARDS, shards, "shards"), (TENSORS, tensors, "parts of a layer"))
        for name, degree, what in named:
            if degree > 1:
                raise StagelineError(
                    f"parallelism.{name} is {degree}, but {what} must be processes: set "
                    "parallelism.launcher to processes "
                    f"for stageline train, start {degrees.processes} with stageline launch or torchrun, or set the "
                    "degree to 1"
                )
        return JobLayout(ranks, 1, 1, 0, _device(0))
    if degrees.processes != processes:
        raise StagelineError(
            f"parallelism.{degrees} need {degrees.processes} processes, but {processes} were started; start "
            f"{degrees.processes}, or set the degrees so that their product is {processes}"
        )
    rank = dist.get_rank() if grouped else int(os.environ["RANK"])
    # Where other ranks were lost, the number of this one changes, and its GPU does not.
    local_rank = os.environ.get(SLOT) or os.environ.get(SEAT) or os.environ.get("LOCAL_RANK")
    device = _device(int(local_rank) if local_rank else rank if grouped else 0)
    return JobLayout(ranks, replicas * shards, processes, rank, device, shards, tensors)


@contextmanager
def process_settings(config: Config, layout: JobLayout) -> Iterator[None]:
    """Set the number of threads and deterministic algorithms for a job, and restore them afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(config.training.deterministic or deterministic)
        if layout.processes == 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // layout.ranks))  # ranks that are threads share the cores
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def note_on_gpus(config: Config, layout: JobLayout) -> str:
    """Return a sentence about how a job uses the GPUs of this machine if that is not one rank per GPU."""
    gpus = count_gpus()
    if layout.processes > 1 or not gpus:
        return ""
    if layout.ranks > 1:
        return f"{layout.ranks} ranks share one GPU as threads; one rank per GPU is faster"
    if config.parallelism.pipeline_parallel_degree == 1:
        return ""
    if gpus == 1:
        return (
            "one rank uses the only GPU, which is faster than several; set parallelism.pipeline_parallel_degree to "
            "run several ranks as threads on it"
        )
    return (
        f"one rank uses one of the {gpus} GPUs; for one rank per GPU, start stageline train with parallelism.launcher "
        f"processes, or torchrun --nproc-per-node {gpus}"
    )


def ranks_here(layout: JobLayout) -> int:
    """Return how many ranks of a job are on a host, of all its pipelines."""
    if layout.processes == 1:
        return layout.ranks
    return int(os.environ.get("LOCAL_WORLD_SIZE", layout.processes))


def core_shares(layout: JobLayout, threads: int, speeds: tuple[float, ...] = ()) -> tuple[Share, ...]:
    """Return what the ranks of a pipeline share, if each computes with so many threads: cores, or as threads a GPU.

    On every host, the pipelines of a job share the cores equally. `speeds` are those of ranks that compute at once.

    >>> core_shares(JobLayout(4, 1, 1, 0, torch.device("cuda", 0)), threads=1)
    (Share(ranks=(0, 1, 2, 3), capacity=1.0, speeds=()),)
    """
    ranks = range(layout.ranks)
    if layout.device.type != "cpu":
        return (Share(ranks, 1.0),) if layout.processes == 1 else ()
    here = ranks_here(layout)
    hosts = [ranks[first : first + here] for first in range(0, layout.ranks, here)]
    return tuple(Share(host, cores() / threads * len(host) / here, speeds) for host in hosts)


def _device(local_rank: int) -> torch.device:
    """Return the GPU of this process, or the CPU if no GPU is visible."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@dataclass(frozen=True)
class BatchSizes:
    """How the samples of an optimizer step are divided.

    >>> batch_sizes(Config.read(None, "training.local_batch_size=8", "training.global_batch_size=32"), replicas=2)
    BatchSizes(per_step=32, local=8, accumulation=2, microbatch=2, microbatches=4)
    """

    per_step: int
    """Samples of an optimizer step, over all replicas."""
    local: int
    """Samples of a pipeline step, of one replica."""
    accumulation: int
    """Pipeline steps in an optimizer step."""
    microbatch: int
    """Samples of a microbatch."""
    microbatches: int


def batch_sizes(config: Config, replicas: int) -> BatchSizes:
    """Divide the samples of an optimizer step."""
    training = config.training
    local = training.local_batch_size
    pipeline_step = local * replicas
    per_step = training.global_batch_size or pipeline_step
    if per_step % pipeline_step:
        below, above = per_step // pipeline_step * pipeline_step, (per_step // pipeline_step + 1) * pipeline_step
        raise StagelineError(
            f"training.global_batch_size is {per_step}, which is not a multiple of {replicas} replicas × "
            f"training.local_batch_size {local}; the nearest multiples are {f'{below} and ' if below else ''}{above}"
        )
    if training.continuous_steps and per_step > pipeline_step:
        raise StagelineError(
            f"training.continuous_steps trains on one batch per step, but training.global_batch_size {per_step} "
            f"accumulates gradients of {per_step // pipeline_step} batches; set one of the two to its default"
        )
    microbatch = min(config.parallelism.pipeline_parallel_microbatch_size, local)
    return BatchSizes(per_step, local, per_step // pipeline_step, microbatch, -(-local // microbatch))

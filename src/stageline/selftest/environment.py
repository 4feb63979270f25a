"""What a rank runs on: versions, host, GPUs, driver, and the variables that matter."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline._version import __version__

VARIABLES = ("STAGELINE_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_", "SLURM_NNODES", "LOCAL_", "TORCH_")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class RankEnvironment:
    """What a rank runs on."""

    rank: int
    host: str
    versions: dict[str, str]
    system: str
    cores: int
    threads: int
    gpus: list[str]
    variables: dict[str, str]
    """Those of Stageline and of the communication libraries, without secrets."""


def describe_rank() -> RankEnvironment:
    """Describe this rank."""
    versions = {"stageline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        lines = DRIVER.read_text(encoding="utf-8").splitlines() if DRIVER.is_file() else []
        versions["driver"] = next((word for word in " ".join(lines[:1]).split() if word[:1].isdigit()), "unknown")
    return RankEnvironment(
        int(os.environ.get("RANK", "0")),
        socket.gethostname(),
        versions,
        platform.platform(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.get_num_threads(),
        [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and "SECRET" not in name
        },
    )


def differing_versions(ranks: Sequence[RankEnvironment]) -> list[str]:
    """A sentence for each version that is not the same on all ranks.

    >>> here = RankEnvironment(0, "a", {"torch": "2.11"}, "", 1, 1, [], {})
    >>> differing_versions([here, RankEnvironment(1, "b", {"torch": "2.13"}, "", 1, 1, [], {})])
    ['rank 1 on host b runs torch 2.13, and rank 0 on host a runs torch 2.11; install the same versions on all hosts']
    """
    first = ranks[0]
    return [
        f"rank {rank.rank} on host {rank.host} runs {name} {rank.versions.get(name, 'none')}, and rank 0 on host "
        f"{first.host} runs {name} {version}; install the same versions on all hosts"
        for rank in ranks[1:]
        for name, version in first.versions.items()
        if rank.versions.get(name) != version
    ]

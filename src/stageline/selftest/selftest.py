"""The checks of a self-test, in order, and their result; and what every rank runs on."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stageline._version import __version__
from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.distributed.bootstrap import find_host
from stageline.distributed.pairs import Pair, measure_pairs, pairs_of
from stageline.selftest.bits import FamilyBits, check_families, own_device
from stageline.selftest.page import page
from stageline.selftest.planted_kill import PlantedKill, plant_kill

FORMAT, VERSION = "stageline-selftest", 1
NAME = "stageline-selftest"
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


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test.

    >>> result = SelfTest("processes", "2026-01-01 00:00:00 +0000", 1.5)
    >>> result.problems, result.to_json()["ok"]
    ([], True)
    """

    launcher: str
    started: str
    seconds: float
    ranks: Sequence[RankEnvironment] = ()
    families: Sequence[FamilyBits] = ()
    pairs: Sequence[Pair] = ()
    kill: PlantedKill | None = None
    problems: list[str] = field(default_factory=list)
    """What failed, a sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"format": FORMAT, "version": VERSION, "ok": not self.problems, **asdict(self)}

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the page and the JSON file; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        html, data = folder / f"{NAME}.html", folder / f"{NAME}.json"
        write_text(data, json.dumps(self.to_json(), indent=1) + "\n")
        write_text(html, page(self.to_json()))
        return html, data


def run_selftest(deadline: float = 30.0, families: Sequence[str] | None = None, kill: bool = True) -> SelfTest:
    """Run all checks; every rank of the job calls this, and all get the same result.

    `families` are the schedule families to check, by default all; `kill` is whether a rank of a small job of its own is
    killed, to see whether the others name it.
    """
    began, started = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes < 2:
        raise StagelineError(f"the self-test needs at least 2 ranks, but this job has {processes}")
    host = find_host(processes, deadline)
    gather = _Gather(host, processes)
    ranks = [RankEnvironment(**row) for row in gather(asdict(describe_rank()))]
    problems = differing_versions(ranks)
    bits = check_families(processes, deadline, families)
    problems += [f"{family.name}: {family.text}" for family in bits if family.verdict in ("different", "failed")]
    pairs = measure_pairs(host, pairs_of(processes), own_device())
    killed = plant_kill(gather, deadline) if kill else None
    if killed is not None:
        problems += killed.problems
    problems = sorted({problem for row in gather(problems) for problem in row})
    return SelfTest(launcher_name(os.environ), started, time.monotonic() - began, ranks, bits, pairs, killed, problems)


class _Gather:
    """Collects JSON data of all ranks."""

    def __init__(self, host: Any, processes: int) -> None:
        self._host, self._processes = host, processes
        self.rank = int(os.environ["RANK"])

    def __call__(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        return [json.loads(self._host.broadcast_to_all(text, rank)) for rank in range(self._processes)]


def launcher_name(environment: Mapping[str, str]) -> str:
    """Who started this rank.

    >>> launcher_name({"TORCHELASTIC_RUN_ID": "none"}), launcher_name({"SLURM_STEP_ID": "0"}), launcher_name({})
    ('torchrun', 'SLURM', 'processes')
    """
    variables = {"TORCHELASTIC_RUN_ID": "torchrun", "RAY_JOB_ID": "Ray", "SLURM_STEP_ID": "SLURM"}
    return next((name for variable, name in variables.items() if environment.get(variable)), "processes")


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

"""The checks of a self-test, in order, and their result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.distributed.bootstrap import find_host
from stageline.selftest.bits import FamilyBits, check_families
from stageline.selftest.environment import RankEnvironment, describe_rank, differing_versions
from stageline.selftest.page import page
from stageline.selftest.pairs import Pair, measure_pairs
from stageline.selftest.planted_kill import PlantedKill, plant_kill

FORMAT, VERSION = "stageline-selftest", 1
NAME = "stageline-selftest"


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
        raise StagelineError(f"the self-test needs at least 2 ranks, and this job has {processes}")
    host = find_host(processes, deadline)
    gather = _Gather(host, processes)
    ranks = [RankEnvironment(**row) for row in gather(asdict(describe_rank()))]
    problems = differing_versions(ranks)
    bits = check_families(processes, deadline, families)
    problems += [f"{family.name}: {family.text}" for family in bits if family.verdict in ("different", "failed")]
    pairs = measure_pairs(host, processes)
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

"""Jobs that lose ranks, and end with the bits of a job that lost none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageline.distributed.launchers.launcher import Job, Outcome
from stageline.distributed.launchers.processes import ProcessLauncher
from stageline.distributed.recovery_policy import Recovery
from stageline.train.events import read_metrics
from support.jobs import TINY, losses, weights
from support.recovery_rank import random_kills, train

pytestmark = pytest.mark.timeout(300)

Kills = list[tuple[int, int, str, int]]


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 32, 4000).astype(np.uint16).tobytes())
    return path


def run(tokens: Path, name: str, kills: Kills, *more: str, ranks: int = 2, restarts: int = 8) -> list[Outcome]:
    words = [word.removeprefix("--") for word in TINY] + [f"job.dump_folder={tokens.parent / name}", *more]
    words += [f"training.dataset_path={tokens}", f"parallelism.pipeline_parallel_degree={ranks}"]
    launcher = ProcessLauncher(logs=tokens.parent / f"{name}-logs")
    return launcher.run(Job(train, (words, kills), ranks, timeout=200, recovery=Recovery(restarts)))


def log_of(tokens: Path, name: str) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted((tokens.parent / f"{name}-logs").iterdir()))


def recoveries(tokens: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(tokens.parent / name / "metrics.jsonl").of("recovery")


def assert_same(tokens: Path, name: str, outcomes: list[Outcome]) -> None:
    assert [outcome.failure for outcome in outcomes] == [""] * len(outcomes), log_of(tokens, name)
    assert losses(tokens, name) == losses(tokens, "whole")
    assert weights(tokens, name, 16) == weights(tokens, "whole", 16)


def test_a_job_that_loses_ranks_ends_with_the_same_bits(tokens: Path) -> None:
    run(tokens, "whole", [])
    kills = [(0, 1, "step", 7), (1, 0, "restoring", 1), (2, 0, "save", 3)]
    assert_same(tokens, "parts", run(tokens, "parts", kills))
    rows = recoveries(tokens, "parts")
    lost = [[f"rank {rank} was killed by SIGKILL" for rank in ranks] for ranks in ((1, 0), (0,))]
    assert [row["lost"] for row in rows] == lost, "the second rank was lost while the job recovered"
    assert {row["state"] for row in rows} == {"memory"}
    lines = (tokens.parent / "parts" / "metrics.jsonl").read_text().splitlines()
    marked = [row["step"] for row in map(json.loads, lines) if row["event"] == "step" and "recovery" in row]
    assert marked
    assert len(losses(tokens, "parts")) == 16


@pytest.mark.host_matrix
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_moments_leave_the_same_bits(tokens: Path, seed: int) -> None:
    chance = random.Random(seed)
    run(tokens, "whole", [], ranks=4)
    kills = random_kills(chance, 4)
    outcomes = run(tokens, "parts", kills, ranks=4)
    assert_same(tokens, "parts", outcomes)

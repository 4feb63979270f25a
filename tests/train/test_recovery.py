"""Jobs that lose ranks, and end with the bits of a job that lost none."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from stageline.distributed.attempts import Announcements
from stageline.distributed.launchers.launcher import Outcome
from stageline.distributed.launchers.replacements import Replacements
from stageline.distributed.recovery_policy import Recovery
from stageline.train.events import read_metrics
from support.jobs import losses, weights
from support.recovery_rank import Kills, random_kills, run, write_tokens

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return write_tokens(tmp_path)


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
    kills = [(0, 1, "step", 7), (1, 1, "restoring", 1), (2, 0, "save", 3)]
    assert_same(tokens, "parts", run(tokens, "parts", kills, recovery=Recovery(max_restarts=3, spares=1)))
    rows = recoveries(tokens, "parts")
    lost = [["rank 1 was killed by SIGKILL"] * 2, ["rank 0 was killed by SIGKILL"]]
    assert [row["lost"] for row in rows] == lost, "the rank that was restarted died while the job recovered"
    assert [row["action"] for row in rows] == ["spare", "restart"]
    assert {row["state"] for row in rows} == {"memory"}
    lines = (tokens.parent / "parts" / "metrics.jsonl").read_text().splitlines()
    marked = [row["step"] for row in map(json.loads, lines) if row["event"] == "step" and "recovery" in row]
    assert marked
    memory = [row["memory_by_process"] for row in map(json.loads, lines) if "memory_by_process" in row]
    assert memory
    assert all(len(sizes) == 2 and min(sizes) > 0 for sizes in memory)
    assert len(losses(tokens, "parts")) == 16


@pytest.mark.host_matrix
@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_parallel": 1, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "tensor_parallel": 2},
    ],
    ids=str,
)
def test_a_job_of_sharded_parameters_returns_to_host_memory(tokens: Path, degrees: dict[str, int]) -> None:
    more = [f"parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    ranks = math.prod(degrees.values())
    run(tokens, "whole", [], *more, ranks=ranks)
    kills = [(0, ranks - 1, "step", 7), (1, 0, "copy", 2)]
    recovery = Recovery(max_restarts=3, spares=1)
    assert_same(tokens, "parts", run(tokens, "parts", kills, *more, ranks=ranks, recovery=recovery))
    rows = recoveries(tokens, "parts")
    assert [(row["action"], row["state"]) for row in rows] == [("restart", "memory")] * 2
    assert rows[0]["step"] > 5, "after the newest checkpoint"


@pytest.mark.host_matrix
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_moments_leave_the_same_bits(tokens: Path, seed: int) -> None:
    chance = random.Random(seed)
    run(tokens, "whole", [], ranks=4)
    kills = random_kills(chance, 4)
    spares = seed % 2
    on_loss = ("spare", "restart") if spares else ("restart",)
    outcomes = run(tokens, "parts", kills, ranks=4, recovery=Recovery(8, on_loss, spares))
    assert_same(tokens, "parts", outcomes)


@pytest.mark.host_matrix
def test_a_rank_that_freezes_is_killed_and_restarted(tokens: Path) -> None:
    run(tokens, "whole", [])
    outcomes = run(tokens, "parts", [(0, 1, "freeze", 7)], "comm.train_timeout_seconds=10")
    assert_same(tokens, "parts", outcomes)
    assert [(row["action"], row["lost"]) for row in recoveries(tokens, "parts")] == [("restart", ["rank 1 froze"])]


@pytest.mark.host_matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_freezes_while_another_is_replaced_is_replaced_too(tokens: Path, rank: int) -> None:
    run(tokens, "whole", [])
    kills = [(0, 1 - rank, "step", 7), (1, rank, "freeze meeting", 1)]
    outcomes = run(tokens, "parts", kills, "comm.train_timeout_seconds=3")
    assert_same(tokens, "parts", outcomes)
    (row,) = recoveries(tokens, "parts")
    assert row["lost"] == [
        f"rank {1 - rank} was killed by SIGKILL",
        f"rank {rank} did not join the other ranks in time",
    ]


@pytest.mark.host_matrix
def test_a_job_trains_with_fewer_replicas_until_the_lost_one_is_back(tokens: Path) -> None:
    degrees = ["parallelism.pipeline_parallel_degree=2", "parallelism.data_parallel_replicate_degree=2"]
    recovery = Recovery(max_restarts=4, on_loss=("shrink_replicas", "restart"))
    outcomes = run(tokens, "parts", [(0, 1, "step", 7)], *degrees, "training.steps=60", ranks=4, recovery=recovery)
    assert [outcome.failure for outcome in outcomes] == [""] * 4, log_of(tokens, "parts")
    actions = [row["action"] for row in recoveries(tokens, "parts")]
    assert actions == ["shrink_replicas", "return"], "replica 1 goes on alone"
    history = read_metrics(tokens.parent / "parts" / "metrics.jsonl")
    steps = history.of("step")
    assert [row["step"] for row in steps] == list(range(1, 61))
    alone = [row for row in steps if row.get("recovery", {}).get("action") == "shrink_replicas"]
    assert {row["tokens"] for row in alone} == {steps[0]["tokens"] / 2}, "what was really seen"
    assert {row["tokens"] for row in steps if row not in alone} == {steps[0]["tokens"]}


@pytest.mark.host_matrix
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_the_other_replica_may_be_lost_before_the_first_one_is_back(tokens: Path, copies: int) -> None:
    degrees = ["parallelism.pipeline_parallel_degree=2", "parallelism.data_parallel_replicate_degree=2"]
    recovery = Recovery(max_restarts=4, on_loss=("shrink_replicas", "restart"))
    kills: Kills = [(0, 1, "step", 7), (1, 2, "copy", copies)]
    outcomes = run(tokens, "parts", kills, *degrees, ranks=4, recovery=recovery)
    assert [outcome.failure for outcome in outcomes] == [""] * 4, log_of(tokens, "parts")
    assert list(losses(tokens, "parts")) == list(range(1, 17))


@pytest.mark.host_matrix
def test_the_plan_is_made_anew_for_the_ranks_that_are_left(tokens: Path) -> None:
    """They read each other's states; none writes a new one before the others have read the old ones."""
    run(tokens, "whole", [], ranks=3)
    kills = [(0, 0, "step", 7), (1, 2, "reads late", 0), (1, 1, "writes early", 0)]
    outcomes = run(tokens, "parts", kills, ranks=3, recovery=Recovery(1, ("replan",)))
    assert_same(tokens, "parts", outcomes)
    (row,) = recoveries(tokens, "parts")
    assert (row["action"], row["ranks"]) == ("replan", 2)


def lose(*ranks: int) -> list[Outcome]:
    return [Outcome(rank, failure="was killed by SIGKILL", code=-9) for rank in ranks]


def test_the_first_possible_action_is_taken() -> None:
    everything = ("restart", "spare", "shrink_replicas", "replan")
    announcements = Announcements(HashStore())
    launcher = Replacements(Recovery(9, everything), 4, announcements)
    assert launcher.next(lose(3), {0, 1, 2}).action == "restart"  # type: ignore[union-attr]
    attempt = launcher.next(lose(3), {0, 1, 2})
    assert attempt is not None
    assert attempt.action == "restart", "nothing else is possible, although the restart failed"
    launcher.spares = [4]
    attempt = launcher.next(lose(3), {0, 1, 2})
    assert attempt is not None
    assert (attempt.action, attempt.spares, attempt.before) == ("spare", {4: 3}, (0, 1, 2, 3))
    announcements.describe(per_replica=2, replans=False)
    attempt = launcher.next(lose(3), {0, 1, 2})
    assert attempt is not None
    assert (attempt.action, attempt.ranks) == ("shrink_replicas", {0: 0, 1: 1})
    assert launcher.next([], {0, 1, 2, 3}) is None, "the lost replica is not ready"
    announcements.complete(attempt.number)
    for seat in (2, 3):
        announcements.arrive(seat, attempt.number)
    attempt = launcher.next([], {0, 1, 2, 3})
    assert attempt is not None
    assert (attempt.action, len(attempt.ranks), attempt.before) == ("return", 4, (0, 1))


def test_a_rank_that_raises_or_is_asked_to_end_is_not_replaced() -> None:
    for outcome in (
        Outcome(1, failure="was killed by SIGTERM", code=-15),
        Outcome(1, failure="ended with exit code 3", code=3),
    ):
        assert Replacements(Recovery(1), 2, Announcements(HashStore())).next([outcome], {0}) is None
    launcher = Replacements(Recovery(1), 2, Announcements(HashStore()))
    assert launcher.next([Outcome(1, error=ValueError(), failure="Traceback …", code=1)], {0}) is None
    assert launcher.given_up == "rank 1 failed by itself"

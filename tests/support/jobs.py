"""Training jobs of several processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline.testing import Child, ForkServer
from stageline.train.checkpoint import newest
from support.ports import free_port

SCRIPT = Path(__file__).with_name("job_rank.py")

TINY = [
    "--training.steps=16",
    "--training.seq_len=16",
    "--training.local_batch_size=8",
    "--training.dataset=memmap",
    "--training.dataset_dtype=uint16",
    "--model.dim=16",
    "--model.n_layers=4",
    "--model.n_heads=2",
    "--model.dropout=0.1",
    "--model.vocab_size=32",
    "--sample.tokens=4",
    "--validation.freq=10",
    "--validation.steps=1",
    "--checkpoint.interval=5",
    "--parallelism.launcher=threads",
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=zb-h1",  # planning would take as long as training
    "--metrics.timeline_freq=0",
    "--comm.train_timeout_seconds=60",
]

PATIENCE = 240.0


def start(
    fork_server: ForkServer,
    tokens: Path,
    run: str,
    *more: str,
    processes: int = 1,
    full: int | None = None,
    function: str = "main",
) -> list[Child]:
    """Start a job, of one process with ranks as threads or of several, as torchrun would.

    From the checkpoint of step `full` on, the first rank's disk is full.
    """
    words = [*TINY, f"--training.dataset_path={tokens}", f"--job.dump_folder={tokens.parent / run}", *more]
    environment = {"OMP_NUM_THREADS": "1"}
    if processes > 1:
        port = str(free_port())
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        fork_server.start(
            SCRIPT,
            function if full is None else "on_a_full_disk",
            [words] if full is None else [words, full],
            log=tokens.parent / f"{run}.{rank}.log",
            environment=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
        )
        for rank in range(processes)
    ]


def exit_codes(children: list[Child]) -> list[int]:
    return [child.wait(PATIENCE) for child in children]


def log_of(tokens: Path, run: str, rank: int = 0) -> str:
    return (tokens.parent / f"{run}.{rank}.log").read_text()


def step_of(tokens: Path, run: str) -> int:
    try:
        lines = (tokens.parent / run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # not started yet, or set aside by a new start
        return 0
    return max((row["step"] for row in map(json.loads, lines) if row["event"] == "step"), default=0)


def wait_for(tokens: Path, run: str, step: int) -> None:
    end = time.monotonic() + PATIENCE
    while step_of(tokens, run) < step:
        assert time.monotonic() < end, log_of(tokens, run)
        time.sleep(0.005)


def wait_until(child: Child, condition: Callable[[], bool]) -> None:
    """Wait for something that a process does while it is alive."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert child.poll() is None
        assert time.monotonic() < end
        time.sleep(0.005)


def losses(tokens: Path, run: str) -> dict[int, tuple[float, float]]:
    rows = map(json.loads, (tokens.parent / run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if row["event"] == "step"}


def validations(tokens: Path, run: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (tokens.parent / run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == "validation"]


def weights(tokens: Path, run: str, step: int) -> dict[str, list[float]]:
    with newest(tokens.parent / run / "checkpoint") as checkpoint:  # type: ignore[union-attr]
        assert checkpoint is not None
        assert checkpoint.step == step
        return {name: value.flatten().tolist() for name, value in sorted(checkpoint.read_model().items())}

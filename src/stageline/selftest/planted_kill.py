"""One rank of a small job is killed in a step: do the others name it, and how soon?

Each rank of the self-test starts one process, and these make a job of their own on the CPU, across the same hosts. So
the self-test itself continues.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stageline.common.errors import PipelineError
from stageline.common.files import write_text
from stageline.common.machine import listen
from stageline.common.temporary_folder import TemporaryFolder

STEP = 3
"""The step in which the last rank kills itself."""
START = 120.0
"""Seconds for the processes to start."""


@dataclass(frozen=True)
class PlantedKill:
    """What the survivors of a killed rank said."""

    killed: int
    errors: list[str]
    """The error of each rank; empty for the killed one."""
    seconds: float
    """From the kill until the last survivor had raised; across hosts, as well as their clocks agree."""
    problems: list[str]


def plant_kill(gather: Any, deadline: float) -> PlantedKill:
    """Run the job; all ranks call this. `gather` collects JSON data of all ranks."""
    rank, ranks = gather.rank, len(gather(None))
    [port, *_] = gather(_free_port() if rank == 0 else 0)
    ended = _run_own(port, deadline)
    rows = gather(ended)
    killed = ranks - 1
    problems = []
    for number, row in enumerate(rows):
        if number == killed:
            if row["code"] != -signal.SIGKILL:
                problems.append(f"kill test: rank {killed} should have killed itself: {row['text'] or row['code']}")
        elif f"rank {killed} died" not in row["text"]:
            problems.append(f"kill test: rank {number} did not report rank {killed}: {row['text'] or 'no error'}")
    moments = [row["moment"] for row in rows if row["moment"]]
    seconds = max(moments) - rows[killed]["moment"] if rows[killed]["moment"] and moments else 0.0
    return PlantedKill(killed, [row["text"] for row in rows], max(0.0, seconds), problems)


def _free_port() -> int:
    address = os.environ["MASTER_ADDR"]
    with listen("::" if ":" in address else "0.0.0.0") as listener:
        return int(listener.getsockname()[1])


def _run_own(port: int, deadline: float) -> dict[str, Any]:
    """Start the process of this rank, wait for its end, and return what it wrote."""
    with TemporaryFolder("selftest-") as folder:
        file = folder / "answer.json"
        dropped = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment |= {"MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "", "STAGELINE_FLIGHT_DIR": str(folder)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", f"from {__name__} import main; main({str(file)!r}, {deadline!r})"]
        with (folder / "log").open("w+b") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                code = process.wait(START + 3 * deadline)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if file.exists():
                return {"code": code, **json.loads(file.read_text(encoding="utf-8"))}
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
        late = f"it did not end within {START + 3 * deadline:g} s" if code == -signal.SIGKILL else ""
        return {"code": code, "text": late or (lines[-1] if lines else f"it ended with code {code}"), "moment": 0.0}


def main(file: str, deadline: float) -> None:
    """Step until the last rank dies; write what this rank then says."""
    from stageline.runtime.pipeline import Pipeline

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(ranks)))
    steps = [0]

    def write(text: str) -> None:
        write_text(Path(file), json.dumps({"text": text, "moment": time.time()}))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if rank == ranks - 1 and steps[0] == STEP:
            write("")
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(output, target)

    try:
        pipe = Pipeline(
            model, loss_fn=loss_fn, schedule="1f1b", ranks=ranks, microbatches=ranks, deadline=max(deadline, 10.0)
        )
        batch = torch.ones(2 * ranks, 4)
        for steps[0] in range(STEP + 2):
            pipe.step(batch, batch)
    except PipelineError as error:
        write(str(error).splitlines()[0])
    else:
        write("")

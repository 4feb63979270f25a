"""What a process of a training job runs in tests: the command, with its words. Imported once, before processes fork."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers import when they first step

import stageline.cli.train
import stageline.train.report
import stageline.train.trainer  # noqa: F401
from stageline.cli.app import run
from stageline.common.interrupts import StopSignals
from stageline.runtime.executor import Executor


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent computed with
    sys.exit(run(["train", *words]))


def hang(words: list[str], folder: str) -> None:
    """The same, with a third action program that never ends; says by files that it is in it, and what signals came."""
    hear, signals = StopSignals._receive, itertools.count(1)

    def noted(self: StopSignals, *arguments: Any) -> None:
        hear(self, *arguments)
        (Path(folder) / f"heard-{next(signals)}").touch()

    StopSignals._receive = noted  # type: ignore[method-assign,assignment]
    never_end(3, folder)
    main(words)


def never_end(program: int, folder: str) -> None:
    """Let an action program never end, counted from 1; a file says that it runs."""
    run_program, programs = Executor.run, itertools.count(1)

    def long(self: Executor, *arguments: Any) -> Any:
        if next(programs) == program:
            (Path(folder) / "inside").touch()
            time.sleep(1000.0)
        return run_program(self, *arguments)

    Executor.run = long  # type: ignore[method-assign,assignment]


def command(words: list[str], folder: str) -> None:
    """The console script, with a second action program that never ends; says by a file that it is in it."""
    from stageline.cli import main

    never_end(2, folder)
    torch.set_num_threads(1)
    sys.argv[1:] = ["train", *words]
    main()


def slow_validation(words: list[str]) -> None:
    """The job, with a validation that begins with a long turn, in which there is time to interrupt it."""
    from stageline.train.step import TrainingStep

    evaluate, mark = TrainingStep.evaluate, Path("validating")

    def slow(self: TrainingStep, *arguments: Any) -> Any:
        mark.touch()
        time.sleep(1.0)
        return evaluate(self, *arguments)

    TrainingStep.evaluate = slow  # type: ignore[method-assign,assignment]
    main(words)


def on_a_full_disk(words: list[str], step: int) -> None:
    """The same, but the first rank cannot write tensors from the checkpoint of a step on."""
    from stageline.train.checkpoint import writer
    from stageline.train.checkpoint.shards import write_tensors

    def refuse(path: Path, *rest: Any) -> Any:
        if int(path.parent.name[5:13]) >= step and os.environ["RANK"] == "0":
            raise OSError(28, "No space left on device")
        return write_tensors(path, *rest)

    vars(writer)["write_tensors"] = refuse
    main(words)


def noted_when_waiting(words: list[str], folder: str) -> None:
    """The same; says by a file that it begins to wait for other ranks."""
    from stageline.train import setup

    job_host = vars(setup)["job_host"]

    def noted(*arguments: Any) -> Any:
        (Path(folder) / "inside").touch()
        return job_host(*arguments)

    vars(setup)["job_host"] = noted
    main(words)


def killed_while_saving(words: list[str], step: int, folder: str) -> None:
    """The same, but the last rank is killed in the middle of its part of the checkpoint of a step."""
    from stageline.train.checkpoint import folder as disk

    write = disk.ChecksummedFile.write

    def die(self: disk.ChecksummedFile, data: bytes | memoryview) -> None:
        write(self, data)
        place = self.path.parent.name
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if last and place.startswith("step-") and int(place[5:13]) >= step:
            note = Path(folder) / f"killed-{threading.get_ident()}"  # several threads may write
            note.write_text(str(time.time()))
            note.replace(Path(folder) / "killed")
            os.kill(os.getpid(), signal.SIGKILL)

    disk.ChecksummedFile.write = die  # type: ignore[method-assign]
    try:
        main(words)
    finally:
        (Path(folder) / f"ended-{os.environ['RANK']}").write_text(str(time.time()))

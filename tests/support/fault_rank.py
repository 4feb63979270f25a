"""A rank for tests of faults: runs a plan of steps, some with faults, and writes the outcome of each.

A plan is a list of items, the same for all ranks; the answer to each is a line of JSON in `answers-RANK`.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.distributed.thread_host import join_started
from stageline.tensors.pytree import Leaf
from stageline.testing import FaultyStage, FaultyTransport, assert_same_bits, one_process_step
from stageline.transport.protocol import Message

RANKS, MICROBATCHES = 3, 4


def stages(width: int = 4) -> list[FaultyStage]:
    """Three of them, with buffers that change in every forward."""
    torch.manual_seed(1)
    return [FaultyStage(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))) for _ in range(RANKS)]


def batch(width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(16, width, generator=generator), torch.randn(16, width, generator=generator)


class Faults:
    """Faults by name; each first writes a file that says that it happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.interrupted = threading.Event()

    def of(self, name: str) -> Any:
        def fault(value: Tensor) -> Tensor:
            (self.folder / f"planted-{os.getpid()}").write_text(str(time.time()))
            spoiled: Tensor | None = getattr(self, name)(value)
            return value if spoiled is None else spoiled

        return fault

    def error(self, value: Tensor) -> None:
        raise ArithmeticError("planted")

    def kill(self, value: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, value: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def nan(self, value: Tensor) -> Tensor:
        return value * float("nan")

    def infinity(self, value: Tensor) -> Tensor:
        return value * float("inf")

    def broken_gpu(self, value: Tensor) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def interrupt(self, value: Tensor) -> None:
        raise KeyboardInterrupt

    def slow(self, value: Tensor) -> None:
        """Sleep longer than the deadline of `hurry`."""
        time.sleep(6.0)

    def held(self, value: Tensor) -> None:
        """Wait until the main thread is interrupted."""
        assert self.interrupted.wait(200.0)

    def after(self, value: Tensor) -> None:
        """Fail after another rank has failed, and before that is known."""
        wait_for(self.folder / "failed")
        raise ArithmeticError("planted later")

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.interrupted.set()
        signal.default_int_handler(number, frame)

    def stay(self, value: Tensor) -> None:
        """Wait long enough for a signal."""
        time.sleep(60.0)


class Wire:
    """Corrupts the next message of a stage, if a fault is set."""

    def __init__(self) -> None:
        self.fault = ""
        self.traffic = ""
        self.stage = -1

    def spoil(self, message: Message) -> list[Leaf]:
        leaves = list(message.leaves)
        place = (message.header.traffic, message.header.stage, message.header.microbatch)
        if not self.fault or place != (self.traffic, self.stage, 2):
            return leaves
        fault, self.fault = self.fault, ""
        first = leaves[0]
        assert isinstance(first, Tensor)
        return [first.to(torch.float64) if fault == "dtype" else first[:1], *leaves[1:]]


class Job:
    """One process of a job: all ranks as threads, or one rank."""

    def __init__(self, rank: int, folder: Path, deadline: float, width: int = 4) -> None:
        self.rank, self.faults, self.wire, self.width, self.steps = rank, Faults(folder), Wire(), width, 0
        self.model = stages(width)
        self.plain = copy.deepcopy(nn.Sequential(*self.model))
        self.pipe = self.faulty(deadline)
        signal.signal(signal.SIGINT, self.faults.hear)

    def faulty(self, deadline: float) -> sl.Pipeline:
        pipe = self.pipeline("1f1b", deadline)
        host: Any = pipe.runner.host
        honest = host.transport
        host.transport = lambda rank: FaultyTransport(honest(rank), replaced=self.wire.spoil)
        return pipe

    def hurry(self, deadline: float) -> dict[str, Any]:
        """Continue with another deadline."""
        self.pipe = self.faulty(deadline)
        return {}

    def pipeline(self, schedule: str, deadline: float) -> sl.Pipeline:
        return sl.Pipeline(
            self.model,
            loss_fn=functional.mse_loss,
            schedule=schedule,
            microbatches=MICROBATCHES,
            deadline=deadline,
            seed=7,
        )

    def step(self, plant: list[Any] | None = None, wire: list[Any] | None = None) -> dict[str, Any]:
        """Run a step with a fault; return the error, and what changed."""
        self.steps += 1
        os.environ["STAGELINE_FLIGHT_DIR"] = str(self.faults.folder / f"flights-{self.steps}")
        if plant is not None:
            fault, stage, action, microbatch = plant
            if stage in self.pipe.runner.stages.local:
                self.model[stage].plant(self.faults.of(fault), action, microbatch)
        if wire is not None:
            self.wire.fault, self.wire.traffic, self.wire.stage = wire
        before = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        outcome: dict[str, Any] = {"error": "", "text": "", "notes": [], "trace": ""}
        try:
            self.pipe.step(*batch(self.width))
        except BaseException as error:
            outcome = {
                "error": type(error).__name__,
                "text": str(error),
                "notes": getattr(error, "__notes__", []),
                "trace": "".join(traceback.format_exception(error)),
            }
        after = self.pipe.state_dict()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        return {**outcome, "at": time.time(), "changed": changed, "threads": self.threads()}

    def right(self) -> dict[str, Any]:
        """Run a step without a fault, and compare its bits with one process."""
        self.pipe.zero_grad()
        self.plain.zero_grad()
        self.pipe.step(*batch(self.width))
        one_process_step(self.plain, functional.mse_loss, *batch(self.width), microbatches=MICROBATCHES)
        mine = dict(self.pipe.named_gradients())
        alone = {name: value.grad for name, value in self.plain.named_parameters()}
        assert_same_bits(mine, {name: alone[name] for name in mine}, "gradients")
        buffers = dict(self.pipe.named_buffers())
        plain = dict(self.plain.named_buffers())
        assert_same_bits(dict(buffers), {name: plain[name] for name in buffers}, "buffers")
        return {"right": True, "threads": self.threads()}

    def odd_one(self, odd: int, deadline: float) -> dict[str, Any]:
        """Give one rank a different schedule from the others."""
        try:
            self.pipeline("gpipe" if self.rank == odd else "1f1b", deadline)
        except sl.PipelineError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"error": ""}

    def unheard(self) -> dict[str, Any]:
        """Rank 1 fails first, but rank 0 reports its failure first."""
        host: Any = self.pipe.runner.host
        report = host._control.report

        def late(failure: Any) -> None:
            (self.faults.folder / "failed").touch()
            assert host._control.verdict(200.0) is not None
            report(failure)

        if self.rank == 1:
            host._control.report = late
        try:
            return self.step(["error", 1, "F", 0] if self.rank == 1 else ["after", 0, "F", 1])
        finally:
            host._control.report = report

    def leave(self, who: int) -> dict[str, Any]:
        """One rank ends between two steps."""
        if self.rank == who:
            sys.exit(7)
        return self.step()

    @staticmethod
    def threads() -> list[str]:
        """Return the pipeline's threads that do not end, except for those of its connections."""
        mine = [thread for thread in threading.enumerate() if thread.name.startswith("stageline")]
        mine = [thread for thread in mine if thread.name not in ("stageline control", "stageline keeper")]
        for thread in mine:
            join_started(thread, 5.0 if thread.name == "stageline store" else 60.0)  # whose store froze stays
        return [thread.name for thread in mine if thread.is_alive()]


def meet(folder: Path, rank: int, ranks: Sequence[int]) -> None:
    """Wait until all processes of the job have started."""
    (folder / f"here-{rank}").touch()
    for other in ranks:
        wait_for(folder / f"here-{other}")


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + 200.0
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.005)


def main(
    rank: int, folder: str, plan: list[dict[str, Any]], deadline: float, width: int = 4, ranks: Sequence[int] = ()
) -> None:
    """Run the plan once all ranks have started."""
    torch.set_num_threads(1)
    path = Path(folder) / f"answers-{rank}"

    def answer(value: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **value}) + "\n")

    os.environ["STAGELINE_FLIGHT_DIR"] = str(Path(folder) / "flights-0")
    meet(Path(folder), rank, ranks)
    if plan and plan[0].get("dies_at_start") == rank:  # when all have connected, and make their groups together
        dist.new_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    try:
        job = Job(rank, Path(folder), deadline, width)
    except sl.StagelineError as error:
        answer({"error": type(error).__name__, "text": str(error), "at": time.time()})
        return
    answer({"ready": time.time()})
    for item in plan:
        options = dict(item)
        answer(getattr(job, options.pop("do"))(**options))


if __name__ == "__main__":
    main(int(os.environ.get("RANK", "0")), sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))

"""A rank of two that measures steps of known length, and writes the timeline of the last one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import stageline as sl
from stageline.testing import SleepStage


def main(rank: int, folder: str) -> None:
    """Make a few steps; rank 0 writes what was measured, in a step alone and in a run."""
    torch.set_num_threads(1)
    stages = [SleepStage(0.02, 0.02, 0.02, width=4) for _ in range(2)]
    x = torch.ones(4, 4)
    pipe = sl.Pipeline(
        stages, loss_fn=functional.mse_loss, ranks=2, schedule="1f1b", microbatches=4, replan="warn", replan_every=3
    )
    host: Any = pipe.runner.host
    host._align_after, first = 0.0, host.clocks.moment
    for _ in range(4):
        stats = pipe.step(x, x)
    assert host.clocks.moment > first  # clocks that drift are aligned again
    assert stats.bubble == pipe.timeline.bubble
    pipe.timeline.write(Path(folder) / f"step-{rank}.json")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in pipe.run([(x, x)] * 3, optimizer=optimizer):
        pass
    pipe.timeline.write(Path(folder) / f"run-{rank}.json")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

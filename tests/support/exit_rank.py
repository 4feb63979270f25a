"""A rank of a job that loses its last rank, after which every other rank ends in a different way.

Every survivor is waiting in a collective when it learns of the loss, and that collective never ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import torch
from torch import nn

import stageline as sl


def lose_a_rank() -> sl.PipelineError:
    """Train until a rank is lost, and wait in a collective for it; only survivors come back."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)  # forked ranks have the number of the process they come from
    torch.manual_seed(0)
    pipe = sl.Pipeline(
        [nn.Linear(2, 2) for _ in range(ranks)], loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2
    )
    x = torch.ones(4, 2)
    pipe.step(x, x)
    host = pipe.runner.host
    if rank == ranks - 1:
        host.all_reduce(np.zeros(1))  # so all have finished their step
        host.abandon(KeyboardInterrupt())
        print("left", flush=True)
        time.sleep(1000.0)
    try:
        host.all_reduce(np.zeros(1))
        host.all_reduce(np.zeros(1))
    except sl.PipelineError as error:
        print("lost", flush=True)
        print("kept in a buffer", end="")
        return error
    raise AssertionError("no rank was lost")


def nested() -> None:
    def deeper() -> None:
        raise SystemExit(5)

    deeper()


def exit_in_a_thread() -> None:
    """A thread that calls exit ends alone; the process continues."""
    thread = threading.Thread(target=sys.exit, args=(9,))
    thread.start()
    thread.join()
    sys.exit(4)


def exit_in_a_child() -> None:
    """A forked child has an exit code of its own."""
    child = os.fork()
    if child == 0:
        sys.exit(11)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 1)


def end(how: str) -> None:
    """Lose a rank, and end."""
    try:
        raise lose_a_rank()
    except sl.PipelineError:
        if how == "number":
            sys.exit(3)
        elif how == "text":
            sys.exit("the job is over")
        elif how == "nested":
            nested()
        elif how == "thread":
            exit_in_a_thread()
        elif how == "child":
            exit_in_a_child()
        elif how == "at once":
            sys.stdout.flush()
            os._exit(6)
        elif how == "interrupt":
            raise KeyboardInterrupt from None
        elif how == "uncaught":
            raise


def test_that_fails() -> None:
    """What `python -m pytest` of this file runs."""
    raise lose_a_rank()


if __name__ == "__main__":
    end(sys.argv[1])

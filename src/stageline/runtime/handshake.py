"""What all ranks must have in common before they start."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn

from stageline._version import __version__
from stageline.errors import StagelineError, shorten
from stageline.runtime.batch import digest
from stageline.runtime.worlds import World
from stageline.schedules.schedule import Schedule


def facts_of(model: nn.Module, schedule: Schedule) -> dict[str, str]:
    """What is compared between the processes, whatever was asked for.

    >>> import stageline as sl
    >>> facts = facts_of(nn.Linear(2, 1), sl.schedule("gpipe", ranks=1, microbatches=1))
    >>> facts["the names and shapes of the model"]
    "{'weight': (1, 2), 'bias': (1,)}"
    """
    order = digest([torch.from_numpy(part) for part in (schedule.kinds, schedule.stage_ids, schedule.microbatch_ids)])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {
        "the schedule": f"{schedule!r} {order}",
        "the names and shapes of the model": repr(shapes),
        "the number of threads (torch.get_num_threads)": str(torch.get_num_threads()),
        "the version of torch": str(torch.__version__),
        "the version of stageline": __version__,
    }


def common_seed(world: World, seed: int | None) -> int:
    """The seed of the first process, known to all; it must be exact in a float, so its last 52 bits count."""
    if seed is not None and not isinstance(seed, int):
        raise StagelineError(f"seed is a whole number, got {shorten(seed)}")
    mine = (torch.initial_seed() if seed is None else seed) & (2**52 - 1)
    return int(world.announce(np.array([float(mine)]))()[0, 0, 0])


def find_deadline(given: float | None) -> float:
    """The deadline asked for, that of the environment, or a minute."""
    text = os.environ.get("STAGELINE_DEADLINE", "")
    try:
        found = float(given if given is not None else text or 60.0)
    except (TypeError, ValueError):
        found = 0.0
    if not 0 < found < float("inf"):
        name = "deadline" if given is not None else "STAGELINE_DEADLINE"
        raise StagelineError(f"{name} is a number of seconds above 0, got {given if given is not None else text!r}")
    return found

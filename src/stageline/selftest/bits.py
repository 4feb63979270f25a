"""Every schedule family against a plain loop over the same microbatches: all bits of losses and gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stageline.common.errors import ScheduleError, StagelineError
from stageline.runtime.check import check
from stageline.schedules.registry import families, schedule


@dataclass(frozen=True)
class FamilyBits:
    """How a family compares with the plain loop."""

    name: str
    verdict: str
    """equal, reordered or different; skipped if the family has no schedule for this number of ranks; or failed."""
    text: str
    seconds: float


def check_families(ranks: int, deadline: float, names: Sequence[str] | None = None) -> list[FamilyBits]:
    """Run a small model through every family, and in this process alone; all ranks call this."""
    return [_check(name, ranks, deadline) for name in names or families()]


def _check(name: str, ranks: int, deadline: float) -> FamilyBits:
    began, microbatches = time.perf_counter(), 2 * ranks
    try:
        planned = schedule(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError as error:
        return FamilyBits(name, "skipped", str(error), 0.0)
    if not planned.training:
        return FamilyBits(name, "skipped", "it has no backwards to train with", 0.0)
    torch.manual_seed(0)
    device = own_device()
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(2 * planned.stages)]
    model = nn.Sequential(*layers).to(device)
    batch = torch.randn(2 * microbatches, 16).to(device), torch.randn(2 * microbatches, 16).to(device)
    try:
        report = check(model, batch, ranks=ranks, schedule=planned, loss_fn=nn.functional.mse_loss, deadline=deadline)
    except StagelineError as error:
        return FamilyBits(name, "failed", str(error), time.perf_counter() - began)
    same = report.compared - len(report.differing)
    text = f"{same} of {report.compared} gradients have the same bits"
    return FamilyBits(name, report.verdict, text, time.perf_counter() - began)


def own_device() -> torch.device:
    """The GPU of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

"""Stages that become slower: reported once and soon, with threads and with processes; noise is never reported."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import run_ranks
from stageline.timeline.costs import Floats
from stageline.timeline.drift import PAST, QUIET, WINDOW, Stragglers

STAGES = 4


def steps(count: int, seed: int, jitter: float = 0.1, bursts: float = 0.3) -> Floats:
    """What stages take: some more than others, with noise, with bursts that last a few steps, and with a load that all
    of them feel."""
    draw = np.random.default_rng(seed)
    base = draw.uniform(1.0, 3.0, STAGES)
    load = np.exp(np.repeat(draw.normal(0.0, 0.3, count // 20 + 1), 20)[:count])
    noise = np.exp(np.abs(draw.normal(0.0, jitter, (count, STAGES))))
    bursty = np.where(draw.random((count, STAGES)) < bursts, draw.uniform(1.0, 4.0, (count, STAGES)), 1.0)
    whole = base * load[:, None] * noise * bursty
    return np.stack([whole, whole / 3], axis=1) * 1e-3


def named(rows: Floats) -> list[tuple[int, int]]:
    """At which step which stage is named."""
    watch = Stragglers(sl.schedule("1f1b", ranks=STAGES, microbatches=4))
    return [(step, straggler.stage) for step, row in enumerate(rows) for straggler in watch.add(row)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_nobody(seed: int) -> None:
    assert named(steps(1000, seed)) == []
    assert named(steps(1000, seed, jitter=0.4, bursts=0.6)) == []


@pytest.mark.parametrize("forward_alone", [False, True])
def test_a_stage_that_takes_twice_as_long_is_named_once_and_soon(forward_alone: bool) -> None:
    for seed in range(20):
        draw = np.random.default_rng(100 + seed)
        begin, stage = int(draw.integers(9, 200)), int(draw.integers(STAGES))
        rows = steps(begin + QUIET, seed, jitter=0.05, bursts=0.02)
        if forward_alone:
            rows[begin:, 0, stage] += rows[begin:, 1, stage]
            rows[begin:, 1, stage] *= 2
        else:
            rows[begin:, :, stage] *= 2
        ((step, reported),) = named(rows)
        assert reported == stage
        assert WINDOW <= step - begin + 1 <= 10


def test_what_all_stages_do_alike_or_only_for_a_moment_is_no_straggler() -> None:
    rows = np.ones((200, 2, STAGES))
    rows[50:] *= 3.0
    rows[100 : 100 + WINDOW - 1, :, 2] *= 5.0
    assert named(rows) == []


def test_every_lasting_change_is_told_once() -> None:
    rows = np.ones((600, 2, STAGES))
    rows[100:, :, 1] *= 2.0
    rows[200:, :, 1] *= 2.0
    rows[300:, :, 1] /= 4.0  # as at the beginning: nothing to report
    rows[300 + PAST + QUIET :, :, 1] *= 2.0
    assert named(rows) == [(first + WINDOW - 1, 1) for first in (100, 200, 300 + PAST + QUIET)]


class Sleeper(nn.Module):
    """A layer with a set duration, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = 0.01

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.as_tensor(self.linear(x))


def test_a_pipeline_of_hundreds_of_stages_is_watched() -> None:
    schedule = sl.schedule("zb-h1", ranks=300, microbatches=1)
    watch = Stragglers(schedule)
    normal = sl.simulate(schedule).end - sl.simulate(schedule).start
    slow = np.where(schedule.stage_ids == 290, 2 * normal, normal)
    stages = [straggler.stage for step in range(40) for straggler in watch.after(normal if step < 20 else slow)]
    assert stages == [290]


def train(rank: int, how: str, stragglers: bool = True, at: int = 14, count: int = 26) -> list[str]:
    """What is logged in steps of three stages, of which the second becomes slow."""
    torch.manual_seed(0)
    layers = [Sleeper() for _ in range(3)]
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("stageline").addHandler(handler)
    pipe = sl.Pipeline(
        nn.Sequential(*layers), loss_fn=functional.mse_loss, microbatches=4, ranks=3, seed=1, stragglers=stragglers
    )
    x = torch.randn(4, 4)

    def batches() -> Any:
        for step in range(count):
            layers[1].seconds = 0.06 if step >= at else 0.01
            yield x, x

    try:
        if how == "run":
            list(pipe.run(batches(), optimizer=torch.optim.SGD(pipe.parameters(), lr=0.0)))
        else:
            for inputs, targets in batches():
                pipe.step(inputs, targets)
    finally:
        logging.getLogger("stageline").removeHandler(handler)
    return lines


@pytest.mark.parametrize("how", ["step", "run"])
@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_planted_sleep_is_named_by_one_line(how: str, where: str) -> None:
    warnings = [train(0, how)] if where == "threads" else run_ranks(train, 3, how, timeout=200)
    assert [len(lines) for lines in warnings] == [1] + [0] * (len(warnings) - 1)
    (line,) = warnings[0]
    assert "stage 1 on rank 1 became slower than the other stages and stayed slower" in line
    step = int(line.split("after step ")[1].split(",")[0])
    assert 14 <= step < 24


def test_who_does_not_want_to_know_is_not_told() -> None:
    assert train(0, "step", stragglers=False) == []

"""Stages that sleep: each sleep falls into its own action, and the gradients are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch

import stageline as sl
from stageline.testing import SleepStage, assert_same_bits, one_process_step


def stages(count: int, width: int = 4) -> list[SleepStage]:
    torch.manual_seed(0)
    sleeping = [SleepStage(0.0, 0.0, 0.0, width=width) for _ in range(count)]
    for stage in sleeping:
        stage.weight.data.normal_()
    return sleeping


def kinds(stage: SleepStage) -> str:
    """Every sleep so far, one letter each; forgets them."""
    letters = "".join(slept.kind for slept in stage.slept)
    stage.slept.clear()
    return letters


@pytest.mark.parametrize("family", ["1f1b", "interleaved", "zb-h1", "zb-v", "chimera"])
def test_every_sleep_runs_once_per_microbatch_and_gradients_are_exact(family: str) -> None:
    schedule = sl.schedule(family, 2, 4)
    model = stages(schedule.stages)
    twin = torch.nn.Sequential(*copy.deepcopy(model))
    pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule=schedule)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    stats = pipe.step(x, y)
    assert stats.unsplit == 0
    one_process_step(twin, torch.nn.functional.mse_loss, x, y, 4, directions=schedule.placement.direction.tolist())
    mine = dict(pipe.named_gradients())
    assert_same_bits(mine, {name: parameter.grad for name, parameter in twin.named_parameters()}, "gradients")
    if family != "chimera":  # which runs copies of the stages
        assert [sorted(kinds(stage)) for stage in model] == [sorted("FIW" * 4)] * len(model)


def test_a_split_backward_sleeps_each_half_in_its_own_action() -> None:
    """Both ranks defer W to the end."""
    schedule = sl.Schedule.from_programs(
        [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]
    )
    model = stages(2)
    sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule=schedule).step(
        torch.randn(2, 4), torch.randn(2, 4)
    )
    assert kinds(model[1]) == "FIFIWW"
    assert kinds(model[0]) == "FFIIWW"


def test_inference_sleeps_forwards_alone() -> None:
    model = stages(2)
    pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="1f1b", microbatches=2)
    pipe.predict(torch.randn(2, 4))
    assert [kinds(stage) for stage in model] == ["FF", "FF"]


def test_a_sleep_takes_at_least_its_time() -> None:
    stage = SleepStage(0.002, 0.0, 0.0, width=1)
    stage(torch.zeros(1, 1))
    assert stage.slept[0].seconds >= 0.0019

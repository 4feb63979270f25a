"""A stage: in-place changes of its input, the layout of its gradients, and values that it passes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.runtime.stage import Stage
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import Average, assert_steps_equal_loop

BOTH = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1).mul_(3)


def test_a_first_stage_that_changes_its_batch_in_place() -> None:
    """Microbatches are parts of one tensor, and a change of one was mistaken for a change of all."""
    torch.manual_seed(1)
    model = [nn.Sequential(InPlace(), nn.Linear(4, 4)), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.Sequential(*model))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    other = x.clone()
    sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=4).step(x, y)
    one_process_step(plain, functional.mse_loss, other, y, 4)
    assert_same_bits(gradients(nn.Sequential(*model)), gradients(plain))
    again = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=4, recompute="stage")
    again.zero_grad()
    plain.zero_grad()
    again.step(x, y)
    one_process_step(plain, functional.mse_loss, x.clone(), y, 4)
    assert_same_bits(gradients(nn.Sequential(*model)), gradients(plain))


@BOTH
def test_a_stage_that_begins_in_place(schedule: str) -> None:
    """The input of a stage is a leaf of its graph, which must not be changed in place."""

    def build() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]

    assert_steps_equal_loop(build, torch.randn(4, 4), torch.randn(4, 4), schedule=schedule)
    assert_steps_equal_loop(
        lambda: [nn.Linear(4, 4), InPlace()], torch.randn(4, 4), torch.randn(4, 4), schedule=schedule
    )


class Across(nn.Module):
    """A norm over the other dimension: its gradients come out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def across() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(16, 16), Across()), nn.Sequential(Pool(), nn.Linear(16, 4))]


@BOTH
def test_gradients_keep_their_layout_between_stages(schedule: str) -> None:
    """Gathered in .grad, an expanded one was copied, and the kernels after it gave other bits."""
    assert_steps_equal_loop(across, torch.randn(12, 8, 16), torch.randn(12, 4), 3, schedule=schedule)


def layouts(rank: int, schedule: str) -> None:
    torch.manual_seed(1)
    model = across()
    plain = copy.deepcopy(nn.Sequential(*model))
    x, y = torch.randn(12, 8, 16), torch.randn(12, 4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=3, schedule=schedule)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 3)
    mine = dict(pipe.named_gradients())
    assert_same_bits(mine, {name: grad for name, grad in gradients(plain).items() if name in mine})


@BOTH
def test_gradients_keep_their_layout_between_processes(schedule: str) -> None:
    """An expanded gradient arrived as a full one."""
    run_ranks(layouts, 2, schedule)


class Optional(nn.Module):
    """Takes a pair as one argument, and has another that it seldom needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]) * scale, pair[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_of_a_sequential_are_chained_the_same_way_for_every_split(ranks: int) -> None:
    """Where a stage was one layer, a tuple was spread over its arguments."""
    model: Any = nn.Sequential(*(Optional() for _ in range(4)))
    pipe = sl.Pipeline(model, loss_fn=lambda o, t: functional.mse_loss(o[0], t), ranks=ranks, microbatches=2)
    x = (torch.randn(4, 4), torch.randn(4, 4))
    parts = zip(torch.split(x[0], 2), torch.split(x[1], 2), strict=True)
    assert torch.equal(pipe.predict(x)[0], torch.cat([model(part)[0] for part in parts]))


class PassesOn(nn.Module):
    """Adds its first input to its second one only at the end; before that, it passes both on."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), last

    def forward(self, x: Tensor, first: Tensor | None = None) -> Any:
        y = self.linear(x)
        first = y * 2 if first is None else first
        return y + first if self.last else (y, first)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_value_that_a_stage_only_passes_on_keeps_its_gradient(family: str) -> None:
    torch.manual_seed(0)
    stages = [PassesOn(False), PassesOn(False), PassesOn(True)]
    twins = copy.deepcopy(stages)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule=family, microbatches=2)
    pipe.step(x, y)
    for xi, yi in zip(x.chunk(2), y.chunk(2), strict=True):
        passed = twins[1](*twins[0](xi))
        (functional.mse_loss(twins[2](*passed), yi) / 2).backward()  # type: ignore[no-untyped-call]
    for stage, twin in zip(stages, twins, strict=True):
        assert stage.linear.weight.grad is not None
        assert torch.equal(stage.linear.weight.grad, torch.as_tensor(twin.linear.weight.grad))


def test_a_failed_step_restores_buffers_that_were_replaced() -> None:
    model: Any = nn.Sequential(Average(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    pipe = sl.Pipeline(model, loss_fn=lambda o, t: o.mean() * float("nan"), ranks=3, microbatches=2)
    with pytest.raises(sl.PipelineError, match="is nan on stage 2"):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    assert_same_bits(dict(model.named_buffers()), dict(before))


def test_flight_records_hold_the_bytes_of_sent_and_received_messages() -> None:
    pipe = sl.Pipeline(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), loss_fn=functional.mse_loss, microbatches=2)
    pipe.step(torch.randn(6, 4), torch.randn(6, 4))
    for executor in pipe.runner.executors_for(2, True).executors:
        for messages in (executor.flight.sent, executor.flight.received):
            assert [message[-1] for message in messages] == [3 * 4 * 4] * 2


@pytest.mark.parametrize(("family", "ranks", "split"), [("zb-h1", 2, {1}), ("interleaved-zb", 1, set())])
def test_i_and_w_run_as_one_backward_where_no_other_rank_waits(
    family: str, ranks: int, split: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the timeline shows each with half of its time."""
    splits: set[int] = set()
    run = Stage.backward_input

    def counted(stage: Stage, *args: Any) -> Any:
        splits.add(stage.index)
        return run(stage, *args)

    monkeypatch.setattr(Stage, "backward_input", counted)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=family, ranks=ranks, microbatches=4)
    assert pipe.step(x, y).unsplit == 0
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert splits == split
    for stage in {0, 1} - split:
        own = [timed for timed in pipe.timeline.actions(0) if timed.action.stage == stage and timed.action.kind in "IW"]
        assert [timed.action.kind for timed in own] == ["I", "W"] * 4
        for first, second in zip(own[::2], own[1::2], strict=True):
            assert first.end == second.start
            assert first.end - first.start == pytest.approx(second.end - second.start)
            assert first.end > first.start

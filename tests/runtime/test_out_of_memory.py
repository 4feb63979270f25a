"""A step that runs out of memory says where, what was planned and allocated, and which option helps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.distributed.failures import OutOfMemory, may_follow_change
from stageline.runtime.out_of_memory import MemoryContext, frugal_schedule
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import batch, blocks

TORCH_TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 8 MiB"


class Greedy(nn.Module):
    """Runs out of memory in its third forward, or its third backward, as long as `fails` is set."""

    def __init__(self, layer: nn.Module, in_backward: bool = False) -> None:
        super().__init__()
        self.layer, self.in_backward, self.fails, self.calls = layer, in_backward, True, 0

    def _allocate(self, gradient: Tensor | None = None) -> None:
        self.calls += 1
        if self.fails and self.calls == 3:
            raise torch.OutOfMemoryError(TORCH_TEXT)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.in_backward:
            self._allocate()
        elif y.requires_grad:
            y.register_hook(self._allocate)
        return torch.as_tensor(y)


def model_with(in_backward: bool = False) -> Any:
    model = blocks(4)
    model[2] = Greedy(model[2], in_backward)
    return model


def pipeline(model: Any, name: str = "gpipe", ranks: int = 2, **options: Any) -> sl.Pipeline:
    return sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=4, **options)


def test_the_error_names_the_action_and_what_helps() -> None:
    pipe = pipeline(model_with())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.step(*batch(16))
    error: Any = caught.value
    assert issubclass(type(error), sl.PipelineError)
    assert (error.action, error.stage, error.microbatch) == ("F", 1, 2)
    assert (error.planned, error.allocated) == (None, None)
    text = str(error)
    assert text.startswith(
        "rank 1 failed in F of stage 1, microbatch 2: OutOfMemory: CUDA out of memory. Tried to allocate 20.00 MiB; "
    )
    for part in (
        "no memory was planned", "microbatches in flight on rank 1: 2 of stage 1", "recompute='stage'",
        "schedule='1f1b', which needs 50% of the memory of gpipe", "microbatches=8 instead of 4", "memory=",
        "zero_grad",
    ):  # fmt: skip
        assert part in text, part
    assert "total capacity" not in text
    cause = error.__cause__
    assert cause is not None
    assert str(cause.__cause__) == TORCH_TEXT


@pytest.mark.parametrize(("name", "action"), [("1f1b", "B"), ("zb-h1", "I")])
def test_a_backward_that_runs_out_of_memory_is_named(name: str, action: str) -> None:
    with pytest.raises(OutOfMemory) as caught:
        pipeline(model_with(in_backward=True), name).step(*batch(16))
    assert (caught.value.action, caught.value.stage, caught.value.microbatch) == (action, 1, 2)


def test_the_next_step_is_right_after_the_error_was_caught() -> None:
    model, plain = model_with(), blocks(4)
    pipe = pipeline(model)
    x, y = batch(16)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        pipe.step(x, y)
    model[2].fails = False
    pipe.zero_grad()
    loss = pipe.step(x, y).loss
    assert loss == one_process_step(plain, functional.mse_loss, x, y, 4)
    own = {name.replace("2.layer.", "2."): grad for name, grad in gradients(model).items()}
    assert_same_bits(own, gradients(plain))


def test_options_that_are_set_are_not_advised() -> None:
    with pytest.raises(OutOfMemory) as caught:
        pipeline(model_with(), "1f1b", ranks=1, recompute="stage").step(*batch(4))
    text = str(caught.value)
    assert "recompute='stage'" not in text
    assert "microbatches=8" not in text  # there is one sample in each
    assert "schedule='" not in text
    assert "sl.plan(…, memory=…, recompute='auto')" in text


def test_an_evaluation_is_advised_smaller_microbatches_alone() -> None:
    with pytest.raises(OutOfMemory) as caught:
        pipeline(model_with()).evaluate(*batch(16))
    assert "to reduce memory: microbatches=8 instead of 4, of half the size; no parameter" in str(caught.value)


def test_planned_bytes_come_from_the_plan() -> None:
    model = model_with()
    model[2].fails = False
    plan = sl.plan(model, torch.ones(4, 8), ranks=2, microbatches=4, schedule="1f1b", repeats=1)
    pipe = sl.Pipeline(plan.split(model), loss_fn=functional.mse_loss, schedule=plan.schedule, planned=plan)
    model[2].fails, model[2].calls = True, 0
    with pytest.raises(OutOfMemory) as caught:
        pipe.step(*batch(16))
    error = caught.value
    rank = plan.schedule.placement.rank_of(error.stage or 0, 0)
    assert error.planned == plan.memory[rank].total
    assert f"were planned for rank {rank} (parameters " in str(error)


def test_costs_plan_the_activations() -> None:
    pipe = pipeline(model_with(), planned=sl.Costs(activation=1024.0))
    with pytest.raises(OutOfMemory, match=r"4 KiB of activations were planned for rank 1") as caught:
        pipe.step(*batch(16))
    assert caught.value.planned == 4096


def test_a_gpu_states_its_allocated_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("memory_allocated", 3 * 2**30), ("memory_reserved", 4 * 2**30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 5 * 2**30))
    allocated, text = MemoryContext(sl.schedule("1f1b", 1, 1), 0, {}, device=1).allocated_bytes()
    assert allocated == 3 * 2**30
    assert text == "cuda:1 has 3 GiB allocated and 4 GiB reserved by this process, and 1 MiB free of 5 GiB"


def test_a_schedule_is_advised_if_it_holds_much_less() -> None:
    name, share = frugal_schedule(sl.schedule("gpipe", 4, 16)) or ("", 1.0)
    assert name == "v-min"
    assert share == pytest.approx(3 / 16, abs=0.1)
    assert frugal_schedule(sl.schedule("1f1b", 1, 16)) is None


def test_no_changed_shape_is_blamed_for_it() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory: a tensor of this size and shape")
    assert may_follow_change(error) == (False, False)


def fails(rank: int) -> tuple[str, bool, tuple[Any, ...]]:
    pipe = pipeline(model_with())
    with pytest.raises(sl.PipelineError) as caught:
        pipe.step(*batch(16))
    error: Any = caught.value
    return str(error), isinstance(error, torch.OutOfMemoryError), (error.action, error.stage, error.microbatch)


def test_all_processes_raise_it() -> None:
    first, second = run_ranks(fails, 2)
    assert first == second
    assert first[0].startswith("rank 1 failed in F of stage 1, microbatch 2: OutOfMemory: CUDA out of memory")
    assert first[1:] == (True, ("F", 1, 2))


class Huge(nn.Module):
    """Asks for more memory than any GPU has."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(2**44, dtype=torch.uint8, device=x.device).sum()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_runs_out_of_memory_states_its_bytes() -> None:
    model = nn.Sequential(blocks(1), Huge(), blocks(1)).to("cuda")
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="gpipe", ranks=1, microbatches=4)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate .*iB") as caught:
        pipe.step(*(part.to("cuda") for part in batch(16)))
    error: Any = caught.value
    assert (error.action, error.stage, error.microbatch) == ("F", 0, 0)
    assert error.allocated > 0
    assert "cuda:0 has" in str(error)


def test_a_failed_step_keeps_nothing_of_the_forward() -> None:
    """The error that a pipeline would keep holds the frames of the forward, and these hold its activations."""
    alive: list[weakref.ref[Tensor]] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            large = x * 2
            alive.append(weakref.ref(large))
            raise ValueError("planted")

    model = blocks(4)
    model[2] = Fails()
    pipe = pipeline(model)
    with pytest.raises(sl.PipelineError, match="planted"):
        pipe.step(*batch(16))
    gc.collect()
    assert [tensor() for tensor in alive] == [None]

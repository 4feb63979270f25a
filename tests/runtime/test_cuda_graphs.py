"""Captured actions: replayed on the inputs of each step, with the results of a pipeline that captures nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import stageline as sl
from stageline.runtime.cuda_graphs import ActionGraphs
from stageline.runtime.setup.options import PipelineOptions
from stageline.testing import assert_same_bits
from support.gradients import gradients
from support.pipelines import Block, batch, blocks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class HostRecorder:
    """Does on the host what a CUDA graph does: runs the same code again, on the same inputs, into the same outputs."""

    captures = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        result = run()
        fixed = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        computed = True

        def replay() -> None:
            nonlocal computed
            if not computed:
                new = [leaf.detach() for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
                for old, value in zip(fixed, new, strict=True):
                    old.copy_(value)
            computed = False

        return result, replay

    def memory(self) -> int:
        return 0


def captured(pipe: sl.Pipeline, samples: int = 8) -> list[HostRecorder]:
    """Let the ranks of a pipeline on the host capture their actions."""
    recorders = []
    for executor in pipe.runner.executors_for(pipe.schedule.microbatches, True).executors:
        recorders.append(HostRecorder())
        executor.graphs = ActionGraphs(executor.stages.values(), recorders[-1])
    return recorders


def pair(model: nn.Module, **options: Any) -> tuple[sl.Pipeline, sl.Pipeline]:
    """Two pipelines of equal models."""
    first, second = (
        sl.Pipeline(m, loss_fn=functional.mse_loss, ranks=2, microbatches=4, **options)
        for m in (model, copy.deepcopy(model))
    )
    return first, second


def assert_same_steps(first: sl.Pipeline, second: sl.Pipeline, steps: int = 5, samples: int = 8) -> None:
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1) for pipe in (first, second)]
    for step in range(steps):
        torch.manual_seed(step)
        x, y = batch(samples)
        assert first.step(x, y).loss == second.step(x, y).loss
        assert_same_bits(gradients(first.model), gradients(second.model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("family", "compile_"), [("1f1b", False), ("zb-h1", "graphs"), ("zb-v", False), ("interleaved-zb", False)]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_every_action_is_captured_once_and_replayed(family: str, compile_: bool | str) -> None:
    first, second = pair(blocks(4), schedule=family, compile=compile_)
    recorders = captured(first)
    assert_same_steps(first, second)
    tasks = [executor._tasks for executor in first.runner.executors_for(first.schedule.microbatches, True).executors]
    actions = [sum(not (task.joined and task.label[0] == "W") for task in own) for own in tasks]
    assert [recorder.captures for recorder in recorders] == actions


def test_gradients_accumulate_over_steps_as_without_graphs() -> None:
    first, second = pair(blocks(4), schedule="zb-h1")
    captured(first)
    for step in range(6):
        torch.manual_seed(step)
        x, y = batch(8)
        first.step(x, y)
        second.step(x, y)
        assert_same_bits(gradients(first.model), gradients(second.model))
        if step == 3:
            first.zero_grad()
            second.zero_grad()


def test_another_shape_runs_without_graphs() -> None:
    first, second = pair(blocks(4), schedule="zb-h1")
    (recorder, _) = captured(first)
    assert_same_steps(first, second, steps=4)
    captures = recorder.captures
    assert_same_steps(first, second, steps=2, samples=12)
    assert_same_steps(first, second, steps=2)
    assert recorder.captures == captures


def test_another_weight_of_a_microbatch_runs_without_graphs() -> None:
    first, second = pair(blocks(4), schedule="1f1b")
    captured(first)
    assert_same_steps(first, second, steps=4)
    x, y = batch(8)
    assert first.step(x, y, scale=2.0).loss == second.step(x, y, scale=2.0).loss
    assert_same_bits(gradients(first.model), gradients(second.model))


def test_new_memory_of_a_parameter_is_captured_again() -> None:
    first, second = pair(blocks(4), schedule="zb-h1")
    (recorder, _) = captured(first)
    assert_same_steps(first, second, steps=4)
    captures = recorder.captures
    for pipe in (first, second):
        weight = pipe.model[0].up.weight  # type: ignore[index]
        weight.data = weight.data * 0.5
    assert_same_steps(first, second, steps=3)
    assert recorder.captures > captures


def test_a_stage_that_draws_random_numbers_is_not_captured() -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.5), Block(), Block())
    first, second = pair(model, schedule="1f1b", seed=3)
    captured(first)
    with pytest.warns(UserWarning, match="stage 0 draws random numbers"):
        assert_same_steps(first, second)


def test_metrics_that_are_numbers_are_not_captured() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, float]]:
        return functional.mse_loss(output, target), {"mean": float(output.detach().mean())}

    pipe = sl.Pipeline(blocks(2), loss_fn=loss_fn, schedule="1f1b", ranks=2, microbatches=2)
    captured(pipe)
    x, y = batch(8)
    with pytest.warns(UserWarning, match="metrics of loss_fn"):
        values = [pipe.step(x * step, y).metrics["mean"] for step in range(4)]
    assert len(set(values)) == 4


def test_stages_on_the_host_say_that_nothing_is_captured() -> None:
    pipe = sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, ranks=2, microbatches=2, cuda_graphs=True)
    with pytest.warns(UserWarning, match="cuda_graphs=True has no effect: no stage is on a GPU"):
        pipe.step(*batch(8))


def test_reduce_overhead_means_cuda_graphs() -> None:
    options = PipelineOptions(functional.mse_loss, compile={"backend": "graphs", "mode": "reduce-overhead"})
    assert options.cuda_graphs
    assert options.compile == {"backend": "graphs"}
    assert PipelineOptions(functional.mse_loss, compile={"mode": "reduce-overhead"}).compile is True


def test_cuda_graphs_is_a_bool() -> None:
    with pytest.raises(sl.StagelineError, match="cuda_graphs must be True or False, got 1"):
        pair(blocks(2), schedule="1f1b", cuda_graphs=1)


@needs_gpu
@pytest.mark.parametrize("family", ["1f1b", "interleaved-zb", "zb-v"])
@pytest.mark.parametrize("compile_", [False, "graphs", True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_graphs_on_a_gpu_equal_a_pipeline_without_them(family: str, compile_: bool | str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = blocks(4, 64).to("cuda", dtype)
    options = {"schedule": family, "compile": compile_, "ranks": 1, "microbatches": 4}
    options |= {"chunks": 4} if family == "interleaved-zb" else {}
    first, second = (
        sl.Pipeline(m, loss_fn=functional.mse_loss, cuda_graphs=m is model, **options)  # type: ignore[arg-type]
        for m in (model, copy.deepcopy(model))
    )
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1) for pipe in (first, second)]
    for step in range(5):
        torch.manual_seed(step)
        x, y = torch.randn(8, 64, device="cuda", dtype=dtype), torch.randn(8, 64, device="cuda", dtype=dtype)
        assert first.step(x, y).loss == second.step(x, y).loss
        assert_same_bits(gradients(first.model), gradients(second.model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (executor,) = first.runner.executors_for(4, True).executors
    assert executor.graphs is not None
    assert all("F" in state.actions for state in executor.graphs.microbatches.values())
    assert executor.graphs.memory > 0

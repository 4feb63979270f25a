"""The pipeline computes what one process computes, bit for bit, and says clearly what goes wrong."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.runtime import stage as stage_module
from stageline.tensors.random_numbers import random_numbers
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients
from support.pipelines import (
    TRAINING,
    Block,
    batch,
    blocks,
    linear_pipeline,
    noisy,
    sizes,
    tied_model,
    token_loss,
    train_beside_the_loop,
)
from support.threads import left_over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINING)
def test_every_family_gives_the_bits_of_one_process(name: str, dtype: torch.dtype) -> None:
    """Losses, gradients and parameters after three optimizer steps, for 1 to 4 ranks and 1 to 9 microbatches.

    float32 and bfloat16 take turns over these sizes; if the environment says STAGELINE_SWEEP=full, both take all.
    """
    cases = list(sizes(name))
    if os.environ.get("STAGELINE_SWEEP") != "full":
        cases = cases[:1] + cases[1 if dtype == torch.bfloat16 else 2 :: 2]
    assert cases
    for ranks, microbatches in cases:
        train_beside_the_loop(name, ranks, microbatches, dtype)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "chimera"])
def test_the_measured_timeline_has_the_schedules_actions_in_its_order(name: str) -> None:
    pipe = sl.Pipeline(blocks(), loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4)
    pipe.step(*batch())
    measured, planned = pipe.timeline, sl.simulate(pipe.schedule)
    assert measured.schedule == pipe.schedule
    for planned_one, measured_one in zip(planned.actions(0), measured.actions(0), strict=True):
        assert planned_one.action == measured_one.action
    pairs = pipe.schedule.pairs
    assert len(pairs) == 0 or name == "dualpipe-v"
    assert (measured.start[pairs] == measured.start[pairs + 1]).all()
    assert (measured.end[pairs] == measured.end[pairs + 1]).all()
    for rank in range(2):
        times = [timed.start for timed in measured.actions(rank)]
        assert times == sorted(times)
    assert sl.compare(planned, measured).first is planned
    assert all(message.end >= message.start for message in measured.messages())
    assert measured.bubble is not None
    assert 0 <= measured.bubble < 1
    assert all(idle.total >= 0 for idle in measured.idle)


def test_a_schedule_read_from_a_file_runs(tmp_path: Any) -> None:
    sl.schedule("zb-v", 2, 4).write(tmp_path / "a.csv")
    model, plain = blocks(4), blocks(4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=tmp_path / "a.csv")
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(model), gradients(plain))


def test_out_of_order_backwards_accumulate_in_the_stages_own_order() -> None:
    s = sl.Schedule.from_programs([["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]])
    model, plain = blocks(1), blocks(1)
    sl.Pipeline([model[0]], loss_fn=functional.mse_loss, schedule=s).step(*batch(3))
    x, y = batch(3)
    for index in (2, 1, 0):
        torch.autograd.backward(functional.mse_loss(plain(x[index : index + 1]), y[index : index + 1]) / 3)
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    "first", ["0F0 0F1 0F2 0I0 0I1 0W0 0W1 0B2", "0F0 0F1 0B0 0I1 0F2 0W1 0B2", "0F0 0F1 0F2 0I0 0W0 0B1 0I2 0W2"]
)
def test_a_stage_that_mixes_whole_and_split_backwards_in_order_gives_the_bits_of_the_loop(first: str) -> None:
    second = [f"1{kind}{microbatch}" for microbatch in range(3) for kind in ("F", "B")]
    schedule = sl.Schedule.from_programs([first.split(), second])
    assert sl.verify(schedule).in_order
    model, alone = blocks(2), blocks(2)
    x, y = batch(6)
    sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule).step(x, y)
    one_process_step(alone, functional.mse_loss, x, y, 3)
    assert_same_bits(gradients(model), gradients(alone))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_several_steps_accumulate_exactly(name: str) -> None:
    """torch.distributed.pipelining divides earlier accumulated gradients again."""
    model, plain = blocks(), blocks()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4)
    for _ in range(3):
        pipe.step(*batch())
        one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-zb"])
@pytest.mark.parametrize("frozen", [[0], [0, 1], [3], [1, 2], [0, 1, 2]])
def test_frozen_stages_anywhere(name: str, frozen: list[int]) -> None:
    """torch's zero-bubble schedules give the stage after a frozen first one no gradient at all."""
    model, plain = blocks(4), blocks(4)
    for layers in (model, plain):
        for index in frozen:
            layers[index].requires_grad_(False)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4)
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert any(grad is not None for grad in gradients(model).values())
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_parameter_hooks_fire_once_a_microbatch(name: str) -> None:
    """torch's zero-bubble schedules skip them."""
    counts: dict[str, int] = {}
    model = blocks(4)

    def count(key: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[key] = counts.get(key, 0) + 1

        return hook

    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for parameter_name, parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count(f"{parameter_name} accumulated"))
        parameter.register_hook(count(f"{parameter_name} arrived"))
    model[1].register_full_backward_hook(count("module backward"))
    model[2].register_forward_hook(count("module forward"))
    sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4).step(*batch())
    assert len(counts) == 2 * len(list(model.parameters())) + 2
    assert set(counts.values()) == {4}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_tied_weights_get_one_gradient_each_use_summed_first(name: str) -> None:
    """torch replicates them and never sums their gradients."""

    tokens = torch.randint(0, 11, (6, 5))
    model, plain = tied_model(), tied_model()
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule=name, ranks=2, microbatches=3)
    pipe.step(tokens, tokens)
    assert model[3].weight is model[0].weight
    # The reference: an untied copy of the head, its own sum over the microbatches, added at the end.
    untied = nn.Parameter(plain[0].weight.detach().clone())
    plain[3].weight = untied
    one_process_step(plain, token_loss, tokens, tokens, microbatches=3)
    assert plain[0].weight.grad is not None
    assert untied.grad is not None
    plain[0].weight.grad.add_(untied.grad)
    expected = {key: grad for key, grad in gradients(plain).items() if key != "3.weight"}
    assert_same_bits(gradients(model), expected)


def test_outputs_have_as_many_rows_as_the_batch_whatever_its_size() -> None:
    """torch returns 12 rows for a batch of 10, stale rows for a smaller one, and aborts for a larger one."""
    model = blocks(4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    for samples in (10, 4, 3, 1, 23):
        x, y = batch(samples)
        assert torch.equal(
            pipe.predict(x), torch.cat([model(part) for part in x.tensor_split(4) if len(part)]).detach()
        )
        stats = pipe.step(x, y)
        assert (stats.samples, stats.microbatches) == (samples, min(samples, 4))


@pytest.mark.parametrize("name", TRAINING)
def test_a_batch_smaller_than_the_microbatches_trains_as_the_loop_does(name: str) -> None:
    model, plain = blocks(), blocks()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=6)
    directions = pipe.schedule.placement.direction.tolist()
    x, y = batch(3)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 6, directions=directions if 1 in directions else None)
    assert_same_bits(gradients(model), gradients(plain))


def test_shapes_may_change_from_step_to_step_and_from_microbatch_to_microbatch() -> None:
    class Grow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(1, len(x))  # another width for another number of samples

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=1) * self.scale

    def build() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 3), Grow(), nn.Tanh(), Mean())

    model, plain = build(), build()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", microbatches=2)
    for samples, width in ((5, 3), (3, 3)):
        x, y = torch.randn(samples, width), torch.randn(samples)
        pipe.step(x, y)
        one_process_step(plain, functional.mse_loss, x, y, 2)
    assert_same_bits(gradients(model), gradients(plain))


def test_trees_of_tensors_numbers_strings_and_none_pass_between_stages() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
            x = self.linear(batch["x"])
            return {"x": x, "skip": [x * 2, None], "mask": batch["mask"], "ids": batch["ids"], "how": "twice", "by": 2}

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, skip: list[Any], mask: Tensor, ids: Tensor, how: str, by: int) -> tuple[Any, ...]:
            assert mask.dtype == torch.bool
            assert ids.dtype == torch.int64
            assert (how, by, skip[1]) == ("twice", 2, None)
            return self.linear(x).masked_fill(mask, 0.0) * by, skip[0], ids

    class Last(nn.Module):
        def forward(self, x: Tensor, skip: Tensor, ids: Tensor) -> Tensor:
            return x + skip + ids.unsqueeze(1)

    stages = [First(), Middle(), Last()]
    plain_first, plain_middle, plain_last = copy.deepcopy(stages)
    x = {"x": torch.randn(6, 4), "mask": torch.rand(6, 4) > 0.5, "ids": torch.arange(6)}
    y = torch.randn(6, 4)
    sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule="zb-h1", microbatches=3).step(x, y)
    for part in range(3):
        rows = slice(2 * part, 2 * part + 2)
        middle = plain_middle(**plain_first({key: value[rows] for key, value in x.items()}))
        torch.autograd.backward(functional.mse_loss(plain_last(*middle), y[rows]) * (2 / 6))
    for mine, plain in ((stages[0], plain_first), (stages[1], plain_middle)):
        assert_same_bits(gradients(mine), gradients(plain))


def test_no_step_is_run_for_rehearsal() -> None:
    """torch runs the model an extra time to learn its shapes: BatchNorm counts five batches of four."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert int(model[1].num_batches_tracked) == 4
    assert_same_bits(dict(pipe.named_buffers()), dict(plain.named_buffers()))


def test_evaluation_leaves_gradients_and_buffers_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4).eval()
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    result = pipe.evaluate(x, y, outputs=True)
    assert result.loss == one_process_step(copy.deepcopy(model), functional.mse_loss, x, y, 4)
    assert torch.equal(result.outputs, torch.cat([model(part) for part in x.tensor_split(4)]).detach())
    assert_same_bits(dict(model.state_dict()), dict(before))
    assert all(grad is None for grad in gradients(model).values())


def test_sum_reduction_weighs_every_microbatch_alike() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction="sum")

    model, plain = blocks(4), blocks(4)
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule="1f1b", ranks=2, microbatches=3, loss_reduction="sum")
    stats = pipe.step(*batch())
    assert stats.loss == one_process_step(plain, loss_fn, *batch(), microbatches=3, loss_reduction="sum")
    assert_same_bits(gradients(model), gradients(plain))


def test_names_are_those_of_the_whole_model() -> None:
    model = blocks(5)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=3, microbatches=2)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert [len(part) for part in pipe.runner.stages.parts] == [2, 2, 1]
    pipe.step(*batch())
    assert all(grad is not None for _, grad in pipe.named_gradients())
    other = sl.Pipeline(blocks(5), loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=2)
    other.load_state_dict(pipe.state_dict())
    assert_same_bits(dict(other.state_dict()), dict(pipe.state_dict()))


def test_clipping_is_by_the_norm_over_all_stages() -> None:
    model, plain = blocks(4), blocks(4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4)
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    norm = pipe.clip_grad_norm_(0.01)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("stage", "when"), [(0, "forward"), (1, "forward"), (3, "forward"), (1, "backward"), (3, "backward")]
)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_stage_that_raises_is_named_and_the_pipeline_can_be_used_again(name: str, stage: int, when: str) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ArithmeticError("planted")

    class Fragile(Block):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken and when == "forward":
                raise ArithmeticError("planted")
            return super().forward(Break.apply(x) if self.broken else x)  # type: ignore[no-untyped-call]

    torch.manual_seed(5)
    model: Any = nn.Sequential(*(Fragile() for _ in range(4)))
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=4, deadline=20)
    threads = threading.enumerate()
    model[stage].broken = True
    kind = "F" if when == "forward" else "B" if name == "1f1b" else "I"
    words = f"rank {stage} failed in {kind} of stage {stage}, microbatch 0: ArithmeticError: planted"
    with pytest.raises(sl.PipelineError, match=words):
        pipe.step(*batch())
    assert left_over(threads) == []
    model[stage].broken = False
    pipe.zero_grad()
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(model), gradients(plain))


def test_invalid_arguments_are_refused() -> None:
    def make(stages: Any = None, **options: Any) -> sl.Pipeline:
        return sl.Pipeline(stages or blocks(4), **{"loss_fn": functional.mse_loss, "microbatches": 4, **options})

    x, y = batch()
    wrong: Any = {0: 3}
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(schedule="1f1"), "did you mean '1f1b'"),
        (lambda: make(microbatches=None), "needs microbatches="),
        (lambda: make(nn.Linear(8, 8), ranks=2).step(x, y), "Linear has 1 units .* but 2 stages were requested"),
        (lambda: make([nn.Linear(2, 2), 3]), "or a list of functions that build its layers; got 3"),
        (lambda: make(schedule="1f1b", ranks=5), "5 stages, but the model has only 4 layers"),
        (lambda: make(list(blocks(4)), schedule="1f1b", ranks=3), "3 stages, but 4 were passed"),
        (lambda: make(schedule=sl.schedule("1f1b", 2, 3)), "microbatches=4, but the schedule has 3"),
        (lambda: make(loss_reduction="max"), "'mean', 'sum' or 'count'"),
        (lambda: make(recompute="all"), "recompute='all' matches no module .* pass 'none' or 'stage'"),
        (lambda: make(recompute=[3]), "recompute must be 'none', 'stage', or modules chosen .* got 3"),
        (lambda: make(recompute="stage", recompute_policy=[]), "leave recompute out"),
        (lambda: make(recompute_policy=3), "recompute_policy must be a function or a list of operators, got 3"),
        (lambda: make().step(x, y, stage_kwargs={9: {}}), "stage_kwargs has the key 9; pass a stage from 0 to 3"),
        (lambda: make().step(x, y, stage_kwargs=wrong), r"stage_kwargs\[0\] is 3"),
        (lambda: make().step(x, y, stage_kwargs={1: {"mask": x}}), "'mask' for stage 1, but no layer .* accept x"),
        (lambda: make().step(x, y, stage_kwargs={1: {"x": x[:3]}}), r"10 samples of inputs and 3 of stage_kwargs\[1\]"),
        (lambda: make(loss_reduction="count").step(x, y), "needs count="),
        (lambda: make().step(x, y, count=3), "requires loss_reduction='count'"),
        (lambda: make(deadline=0), "above 0"),
        (lambda: make().step(x, y[:3]), "10 samples of inputs and 3 of targets"),
        (lambda: make().step(x[:0], y[:0]), "no samples"),
        (lambda: make().step(3, y), "the inputs must contain tensors"),
        (lambda: make().timeline, "before the first step"),
        (lambda: make(schedule="forward-only").step(x, y), "has no backwards to train with"),
        (lambda: make(loss_fn=lambda output, target: output).step(x, y), "must return one number"),
    ]
    for mistake, words in mistakes:
        with pytest.raises(sl.StagelineError, match=words):
            mistake()


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    def make(*arguments: Any, **options: Any) -> Any:
        kind: Any = sl.Pipeline
        return kind(*arguments, **options)

    common: dict[str, Any] = {"loss_fn": functional.mse_loss, "microbatches": 4, "ranks": 2}
    schedule = sl.schedule("1f1b", 2, 4)
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(blocks(4), stages=4), r"follows from the schedule: ranks × chunks; pass ranks=4 for one stage"),
        (lambda: make(blocks(4), stages=4, **common), r"schedule='interleaved', ranks=2, chunks=2$"),
        (lambda: make(blocks(4), stages=3, **common), r"pass ranks=3 for one stage per rank$"),
        (lambda: make(blocks(4), stages=[blocks(4)], **common), "passed twice, once as stages="),
        (
            lambda: make(blocks(4), schedul="zb-v", **common),
            r"nor 1f1b has an option 'schedul' \(did you mean 'schedule'",
        ),
        (lambda: make(blocks(4), micro_batches=2, **common), "did you mean 'microbatches'"),
        (lambda: make(blocks(4), chunks=2, **common), "'chunks', which .* has; 1f1b takes none$"),
        (
            lambda: make(blocks(4), schedule="interleaved", chunk=2, **common),
            "did you mean 'chunks'.*takes chunks, group",
        ),
        (
            lambda: make(blocks(4), schedule=schedule, chunks=2, **common),
            "nor a finished schedule has an option 'chunks'",
        ),
        (lambda: make(blocks(4), layers_per_stage=[1, 3], **common), "split the model first: sl.Pipeline"),
    ]
    for mistake, words in mistakes:
        with pytest.raises(TypeError, match=words) as caught:
            mistake()
        assert isinstance(caught.value, sl.StagelineError)
    assert make(stages=blocks(4), **common).ranks == 2


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 2), ("1f1b", 4), ("zb-v", 2), ("interleaved", 4), ("zb-h1", 3)])
def test_dropout_draws_the_same_for_every_schedule_and_number_of_ranks(name: str, ranks: int, recompute: Any) -> None:
    """Also when a forward is recomputed; and a step leaves torch's own generator unchanged."""
    runs = []
    options: dict[str, Any]
    for options in ({"schedule": "gpipe", "ranks": 1}, {"schedule": name, "ranks": ranks, "recompute": recompute}):
        model = noisy()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=4, seed=7, **options)
        x, y = batch()
        before = torch.get_rng_state()
        losses = [pipe.step(x, y).losses for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        runs.append((losses, gradients(model)))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][0] != runs[0][0][1], "another step draws other numbers"
    assert_same_bits(runs[0][1], runs[1][1])


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_two_directions_refuse_buffers_that_change(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4)
    with pytest.raises(sl.PipelineError, match=r"the buffer 1\.\w+ changed in training"):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


def test_metrics_are_weighted_as_the_loss_is() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return functional.mse_loss(output, target), {"largest": output.detach().amax(), "one": 1.0}

    model = blocks(4)
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule="1f1b", ranks=2, microbatches=4)
    x, y = batch()
    stats, result = pipe.step(x, y), pipe.evaluate(x, y)
    parts = [(float(model(part).detach().amax()), len(part) / len(x)) for part in x.tensor_split(4)]
    assert stats.metrics["largest"] == pytest.approx(sum(value * weight for value, weight in parts))
    assert stats.metrics["one"] == pytest.approx(1.0)
    assert result.metrics == stats.metrics
    assert result.loss == stats.loss


def test_a_count_of_targets_weighs_padded_batches_over_several_steps() -> None:
    """Two steps, divided by the targets of both: the gradient of the mean over all targets that count."""
    ignore = -100

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=ignore, reduction="sum")

    def build() -> Any:
        torch.manual_seed(9)
        return nn.Sequential(nn.Embedding(7, 8), Block(), Block(), nn.Linear(8, 7))

    model, plain = build(), build()
    tokens = torch.randint(0, 7, (2, 6, 5))
    targets = tokens.clone()
    targets[0, 2:, 3:] = ignore
    count = int((targets != ignore).sum())
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule="zb-h1", ranks=2, microbatches=3, loss_reduction="count")
    for step in range(2):
        pipe.step(tokens[step], targets[step], count=count)
    whole = functional.cross_entropy(plain(tokens.flatten(0, 1)).flatten(0, 1), targets.flatten(), ignore_index=ignore)
    torch.autograd.backward(whole)
    for name, grad in gradients(plain).items():
        mine = gradients(model)[name]
        assert grad is not None
        assert mine is not None
        torch.testing.assert_close(mine, grad)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_experts_and_outputs_that_get_no_gradient_in_some_microbatches(name: str) -> None:
    class Experts(nn.Module):
        """The first sample's sign chooses the expert; the other one, and one of the outputs, get no gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
            chosen = self.experts[int(x[0, 0] > 0)](x)
            return chosen, chosen * 2

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), x

    class End(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return torch.tanh(x)

    torch.manual_seed(10)
    stages: list[Any] = [Start(), Experts(), Experts(), End()]
    plain = copy.deepcopy(stages)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule=name, microbatches=4).step(x, y)
    for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        value = plain[0](part)
        for stage in plain[1:]:
            value = stage(*value)
        torch.autograd.backward(functional.mse_loss(value, target) * (2 / 8))
    for mine, other in zip(stages, plain, strict=True):
        assert_same_bits(gradients(mine), gradients(other))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_a_layer_may_stand_in_several_places(name: str) -> None:
    """Across stages each place is a use of its own; within a stage autograd adds them up."""
    torch.manual_seed(11)
    shared, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model: Any = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), other, nn.Tanh(), shared, nn.Tanh())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=3)
    stages = pipe.schedule.stages
    stats = pipe.step(x, y)
    # The reference: a copy of the shared layer for every stage that holds it, and their sums in the order of stages.
    copies = {index: copy.deepcopy(shared) for index in range(stages)}
    for layer_copy in copies.values():
        layer_copy.zero_grad()
    twin, layers = copy.deepcopy(other), 8 // stages
    plain: Any = nn.Sequential(
        *(
            copies[index // layers] if layer is shared else twin if layer is other else nn.Tanh()
            for index, layer in enumerate(model)
        )
    )
    twin.zero_grad()
    assert stats.loss == one_process_step(plain, functional.mse_loss, x, y, 3)
    used = [copies[index] for index in range(stages) if copies[index].weight.grad is not None]
    total = torch.as_tensor(used[0].weight.grad).clone()
    for layer_copy in used[1:]:
        total += torch.as_tensor(layer_copy.weight.grad)
    assert torch.equal(torch.as_tensor(shared.weight.grad), total)
    assert_same_bits(gradients(other), gradients(twin))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "chimera"])
def test_keyword_inputs_of_single_stages_are_split_like_the_batch(name: str) -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            x = super().forward(x) * scale
            return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0.0)

    torch.manual_seed(12)
    model: Any = nn.Sequential(*(Masked() if index % 2 else Block() for index in range(4)))
    plain = copy.deepcopy(model)
    x, y = batch()
    masks = {1: torch.rand(10, 3) > 0.5, 3: torch.rand(10, 3) > 0.5}
    stage_kwargs: dict[int | str, Any] = {1: {"mask": masks[1], "scale": 2.0}, 3: {"mask": masks[3]}}
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule=name, microbatches=4, ranks=4 if name[0] != "z" else 2
    )
    if pipe.schedule.stages == 2:
        stage_kwargs = {0: stage_kwargs[1], 1: stage_kwargs[3]}
    stats = pipe.step(x, y, stage_kwargs=stage_kwargs)
    directions = pipe.schedule.placement.direction.tolist()
    losses = []
    kept: dict[Any, Any] = {}
    for way in sorted(set(directions)):
        if way:
            kept = {parameter: parameter.grad for parameter in plain.parameters()}
            plain.zero_grad()
        parts = zip(*(tensor.tensor_split(4) for tensor in (x, y, masks[1], masks[3])), range(4), strict=True)
        for xi, yi, first, second, index in parts:
            if directions[index] == way:
                output = plain[3](plain[2](plain[1](plain[0](xi), first, 2.0)), second)
                loss = functional.mse_loss(output, yi) * (len(xi) / 10)
                torch.autograd.backward(loss)
                losses.append((index, float(loss.detach())))
        for parameter, before in kept.items():
            parameter.grad = before.add_(parameter.grad)
    assert list(stats.losses) == [loss for _, loss in sorted(losses)]
    assert_same_bits(gradients(model), gradients(plain))
    result = pipe.evaluate(x, y, stage_kwargs=stage_kwargs, outputs=True)
    assert result.losses == stats.losses
    assert torch.equal(pipe.predict(x, stage_kwargs=stage_kwargs), result.outputs)


def test_keyword_inputs_for_all_stages_reach_those_that_take_them() -> None:
    class Shifted(Block):
        def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
            return super().forward(x) + torch.as_tensor(shift)

    torch.manual_seed(13)
    model: Any = nn.Sequential(Shifted(), Block(), Shifted(), Block())
    x, _ = batch()
    shift = torch.randn(10, 1, 8)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=5)
    expected = model[3](model[2](model[1](model[0](x, shift=shift)), shift=shift))
    assert torch.allclose(pipe.predict(x, stage_kwargs={"all": {"shift": shift}}), expected)


def test_a_layer_that_draws_random_numbers_is_detected_whatever_its_name() -> None:
    class Quiet(Block):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.5)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target + torch.randn_like(target))

    runs = []
    for name, ranks in (("gpipe", 1), ("zb-h1", 4), ("interleaved", 2)):
        torch.manual_seed(14)
        model: Any = nn.Sequential(Block(), Quiet(), Block(), Quiet())
        pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule=name, ranks=ranks, microbatches=4, seed=3)
        losses = [pipe.step(*batch()).losses for _ in range(2)]
        runs.append((losses, gradients(model)))
    assert runs[0][0] == runs[1][0] == runs[2][0]
    for _, grads in runs[1:]:
        assert_same_bits(runs[0][1], grads)


def test_a_layer_that_begins_to_draw_later_is_detected_with_a_warning() -> None:
    class Late(Block):
        begun = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return functional.dropout(x, 0.5) if self.begun else x

    x, y = batch()
    model: Any = nn.Sequential(Block(), Late())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4, seed=3)
    pipe.step(x, y)
    model[1].begun = True
    with pytest.warns(UserWarning, match="torch's global random number generator was used during step 1"):
        pipe.step(x, y)
    before = torch.get_rng_state()
    pipe.step(x, y)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_that_drops_nothing_may_begin_to_drop() -> None:
    """While its rate is 0, ranks need not take turns at the generator; then it draws as in one rank."""

    class Rated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.drop = 0.0, nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.drop(super().forward(x)), self.dropout)

    runs = []
    for name, ranks in (("gpipe", 1), ("zb-h1", 4)):
        torch.manual_seed(14)
        model: Any = nn.Sequential(*(Rated() for _ in range(4)))
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=4, seed=3)
        losses = [pipe.step(*batch()).losses]
        model[1].drop.p = 0.5
        losses.append(pipe.step(*batch()).losses)
        model[2].dropout = 0.5
        before = torch.get_rng_state()
        losses.append(pipe.step(*batch()).losses)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append((losses, gradients(model)))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_dropout_outside_of_units_may_begin_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage runs it, and while its rate is 0, none of them takes the generator for it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.drop = nn.ModuleList(Block() for _ in range(4)), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.drop(block(x))
            return x

    drawn: list[str] = []

    def seeded(seed: int, step: int, microbatch: int, name: str) -> AbstractContextManager[None]:
        drawn.append(name)
        return random_numbers(seed, step, microbatch, name)

    monkeypatch.setattr(stage_module, "random_numbers", seeded)
    runs = []
    for ranks in (1, 4):
        torch.manual_seed(14)
        model = Model()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=ranks, microbatches=4, seed=3)
        pipe.step(*batch())
        drawn.clear()
        losses = [pipe.step(*batch()).losses]
        assert "drop" not in drawn
        model.drop.p = 0.5
        losses.append(pipe.step(*batch()).losses)
        assert "drop" in drawn
        assert losses[0] != losses[1]
        runs.append((losses, gradients(model)))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_the_repr_of_a_pipeline_describes_it() -> None:
    assert repr(linear_pipeline(schedule="zb-v")) == (
        "<Pipeline of Sequential: 4 stages on 2 ranks, schedule zb-v, 2 microbatches; ranks are threads of this "
        "process on cpu>"
    )
    assert repr(linear_pipeline(schedule="gpipe", ranks=1, microbatches=1)) == (
        "<Pipeline of Sequential: 1 stage on 1 rank, schedule gpipe, 1 microbatch; in this process on cpu>"
    )
    assert "not initialised" in repr(sl.Pipeline.__new__(sl.Pipeline))

"""One test for each defect that was found and mended, with its story."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import Block, batch
from support.threads import left_over


def compare(build: Any, x: Tensor, y: Tensor, microbatches: int = 2, **given: Any) -> sl.StepStats:
    """Two steps of a pipeline and of the loop; fail where a bit differs."""
    torch.manual_seed(1)
    model = build()
    plain = copy.deepcopy(nn.Sequential(*model))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=microbatches, **given)
    for _ in range(2):
        stats = pipe.step(x, y)
        assert stats.loss == one_process_step(plain, functional.mse_loss, x, y, microbatches)
    assert_same_bits(gradients(nn.Sequential(*model)), gradients(plain))
    return stats


BOTH = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


def tied_v(rank: int) -> Tensor:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 30, bias=False))
    model[3].weight = model[0].weight
    pipe = sl.Pipeline(model, loss_fn=functional.cross_entropy, schedule="zb-v", ranks=2, microbatches=4)
    tokens = torch.randint(0, 30, (8,))
    pipe.step(tokens, tokens)
    found = dict(pipe.named_gradients())
    return torch.as_tensor(found["0.weight"]) if "0.weight" in found else torch.zeros(0)


def test_a_tied_weight_whose_uses_are_on_one_rank_of_several() -> None:
    """That rank thought that there was nobody to tell, and the others waited for it."""
    (first, second), expected = run_ranks(tied_v, 2), tied_v(0)
    assert torch.equal(first, expected)
    assert len(second) == 0


class Turned(nn.Module):
    """A weight that is used transposed, without a product."""

    def __init__(self, how: str, rows: int = 4, columns: int = 4) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.t() if self.how == "add" else x * self.weight.t()


@BOTH
@pytest.mark.parametrize("how", ["add", "mul"])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_transposed_weight_that_is_added_or_multiplied(schedule: str, how: str, rows: int) -> None:
    """Its gradient shared memory with the one that went to the stage before, or had the wrong shape."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    compare(lambda: [nn.Linear(4, 4), Turned(how, rows), Turned(how, rows)], x, y, schedule=schedule)


class Rotary(nn.Module):
    """A real weight that is used as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(self.weight))


@BOTH
def test_a_real_weight_used_as_complex_numbers(schedule: str) -> None:
    """By hand, its gradient lacked the conjugate."""
    compare(lambda: [Rotary(), Rotary()], torch.randn(8, 4, 2), torch.randn(8, 4, 2), schedule=schedule)


@BOTH
def test_convolutions_in_the_threads_of_ranks(schedule: str) -> None:
    """A fresh thread did not know the number of threads that was set."""

    def build() -> list[nn.Module]:
        return [nn.Conv2d(3, 8, 3), nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))]

    compare(build, torch.randn(12, 3, 8, 8), torch.randn(12, 4), schedule=schedule)


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixed_precision_around_a_step_reaches_the_ranks(ranks: int) -> None:
    """It was silently ignored where ranks are threads."""
    seen = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            seen.append(found.dtype)
            return found

    pipe = sl.Pipeline(
        nn.Sequential(Seen(4, 4), Seen(4, 4)),
        loss_fn=lambda output, target: functional.mse_loss(output.float(), target),
        ranks=ranks,
        microbatches=2,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert set(seen) == {torch.bfloat16}


def test_no_grad_around_a_step_does_not_keep_it_from_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for ranks in (1, 2):
        model.zero_grad()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=ranks, microbatches=2)
        with torch.no_grad():
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        assert all(grad is not None for grad in gradients(model).values())


def test_recomputed_stages_of_complex_numbers() -> None:
    """Only floats were told to want a gradient, so the stages before got none."""
    layers = [nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(2)]
    x = torch.randn(8, 4, dtype=torch.cfloat)
    pipe = sl.Pipeline(layers, loss_fn=lambda o, t: (o - t).abs().mean(), microbatches=2, recompute="stage")
    pipe.step(x, x)
    assert all(grad is not None for _, grad in pipe.named_gradients())


class Average(nn.Module):
    """Keeps a running mean in a buffer that it assigns anew, and one that it changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count: Tensor
        self.scale: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.scale.add_(1.0)
        return torch.as_tensor(self.linear(x) * self.scale.clone())


@BOTH
@pytest.mark.parametrize("recompute", ["stage", "*"])
def test_buffers_of_a_recomputed_module_are_those_of_its_first_run(schedule: str, recompute: str) -> None:
    """The second run saw, and changed, what later microbatches had made of them."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(Average(), Average())
    plain: Any = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule=schedule, ranks=2, microbatches=4, recompute=recompute
    )
    for _ in range(2):
        assert pipe.step(x, y).loss == one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_failed_step_puts_back_buffers_that_were_assigned_anew() -> None:
    model: Any = nn.Sequential(Average(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    pipe = sl.Pipeline(model, loss_fn=lambda o, t: o.mean() * float("nan"), ranks=3, microbatches=2)
    with pytest.raises(sl.PipelineError, match="is nan on stage 2"):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    assert_same_bits(dict(model.named_buffers()), dict(before))


class Spoils(nn.Module):
    """Changes what a module inside of it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1
        found = self.inner(hidden + 1) + self.inner(hidden)
        hidden.mul_(2)
        return torch.as_tensor(found + hidden)


def test_an_input_that_changes_before_a_module_runs_again_is_refused() -> None:
    """It was computed once more from the changed input."""
    pipe = sl.Pipeline([Spoils(), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2, recompute="*.inner")
    with pytest.raises(sl.PipelineError, match=r"an input of module 0.inner was changed in place"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1).mul_(3)


def test_a_first_stage_that_changes_its_batch_in_place() -> None:
    """Microbatches are parts of one tensor, and a change of one was taken for a change of all."""
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
    compare(across, torch.randn(12, 8, 16), torch.randn(12, 4), 3, schedule=schedule)


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


class Twice(nn.Module):
    """A weight that is used as it is and through a function of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x @ self.weight, self.weight @ self.weight.t())


@BOTH
def test_a_weight_that_is_used_through_a_function_of_itself(schedule: str) -> None:
    """Its parts were added in another order than autograd's."""
    compare(lambda: [nn.Linear(8, 8), Twice(), Twice()], torch.randn(6, 8), torch.randn(6, 8), schedule=schedule)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def inside(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.linear(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.inside, x, use_reentrant=False))


@BOTH
def test_dropout_inside_torchs_checkpointing_on_threads(schedule: str) -> None:
    """Its recomputation set the generator that all threads share, while others drew from it."""
    x = torch.randn(16, 16, 64)
    found = []
    for ranks in (1, 4, 4, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(Checkpointed() for _ in range(8)))
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, ranks=ranks, microbatches=8, seed=1)
        pipe.step(x, 0 * x)
        found.append(gradients(model))
    for each in found[1:]:
        assert_same_bits(each, found[0])


def test_ctrl_c_stops_every_rank_and_stays_what_it_is() -> None:
    """The ranks went on in the background and added into gradients; with one rank it became another error."""

    class Interrupted(Block):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise KeyboardInterrupt
            return super().forward(x)

    for ranks in (1, 2):
        model: Any = nn.Sequential(Block(), Interrupted())
        plain = copy.deepcopy(model)
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=ranks, microbatches=4)
        before = threading.enumerate()
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*batch())
        assert left_over(before) == []
        model[1].broken = plain[1].broken = False
        pipe.zero_grad()
        pipe.step(*batch())
        one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
        assert_same_bits(gradients(model), gradients(plain))


def test_ctrl_c_while_the_caller_waits_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Block):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Slow.runs += 1
            if Slow.runs == 2:
                assert told.wait(60)
            return super().forward(x)

    told = threading.Event()
    join = threading.Thread.join
    calls: list[int] = []

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        told.set()  # the ranks have been told by now, and are waited for
        join(self, timeout)

    pipe = sl.Pipeline(nn.Sequential(Slow(), Slow()), loss_fn=functional.mse_loss, ranks=2, microbatches=8)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*batch())
    runs = Slow.runs
    assert runs < 16
    time.sleep(0.2)
    assert Slow.runs == runs, "nothing goes on in the background"


@BOTH
def test_a_stage_that_begins_in_place(schedule: str) -> None:
    """What a stage is given is a leaf of its graph, which nothing may change in place."""

    def build() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]

    compare(build, torch.randn(4, 4), torch.randn(4, 4), schedule=schedule)
    compare(lambda: [nn.Linear(4, 4), InPlace()], torch.randn(4, 4), torch.randn(4, 4), schedule=schedule)


def test_what_one_pipeline_recomputes_is_not_the_business_of_another() -> None:
    """Its choice stayed with the model."""
    runs: list[int] = []
    model = nn.Sequential(Block(), Block())
    model[0].register_forward_pre_hook(lambda *_: runs.append(1))
    sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute="*").step(*batch())
    assert len(runs) == 8
    runs.clear()
    sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4).step(*batch())
    assert len(runs) == 4


def test_a_compiled_module_is_not_chosen_and_one_around_it_may_be() -> None:
    """The compiler traced the hooks, and then did not find them as it had seen them."""
    model: Any = nn.Sequential(Block(), Block())
    model[0].compile(backend="eager")
    with pytest.raises(sl.StagelineError, match=r"module 0 is compiled by module.compile\(\)"):
        sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute="*")
    outer: Any = nn.Sequential(nn.Sequential(model[0]), nn.Sequential(Block()))
    plain = copy.deepcopy(outer)
    sl.Pipeline(outer, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute=["0", "1"]).step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(outer), gradients(plain))


def test_mistakes_that_were_told_in_the_words_of_others() -> None:
    class Sets(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return frozenset([super().forward(x), x])

    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def make(**given: Any) -> sl.Pipeline:
        layers = given.pop("layers", [nn.Linear(4, 4), nn.Linear(4, 4)])
        return sl.Pipeline(layers, **{"loss_fn": functional.mse_loss, "microbatches": 2, **given})

    wrong: Any = [1]
    mistakes: list[tuple[Any, str]] = [
        (lambda: make().step(None, y), "the inputs are None"),
        (lambda: make().step(x, None), "the targets are None"),
        (lambda: make(loss_fn=None), "loss_fn is a function of output and target, got None"),
        (lambda: make(deadline="x"), "deadline is a number of seconds above 0, got 'x'"),
        (lambda: make().step(x, y, stage_kwargs=wrong), "stage_kwargs is a dict by stage"),
        (lambda: make().load_state_dict(wrong), "a state dict maps names to tensors"),
        (lambda: make(seed="a"), "seed is a whole number, got 'a'"),
        (lambda: make(loss_fn=lambda o, t: (o.mean(), {"m": "text"})).step(x, y), "the metric 'm' is 'text'"),
        (lambda: make(loss_fn=lambda o, t: (o.mean(), {"m": o})).step(x, y), "a metric is one number"),
        (
            lambda: make(layers=[Sets(4, 4), nn.Linear(4, 4)]).step(x, y),
            "stage 0 passes on a frozenset",
        ),
        (lambda: copy.deepcopy(make()), "copy its model"),
    ]
    for mistake, words in mistakes:
        with pytest.raises(sl.StagelineError, match=words):
            mistake()
    for given in ({"microbatches": 0}, {"foo": 3}):
        with pytest.raises(sl.ScheduleError) as caught:
            make(**given)
        assert "on any number of ranks" not in str(caught.value)
    with torch.inference_mode(), pytest.raises(sl.StagelineError, match="inference_mode"):
        make().step(x, y)


class Optional(nn.Module):
    """Takes a pair as one argument, and has another that it seldom needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]) * scale, pair[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_layers_of_a_sequential_are_chained_as_it_chains_them_wherever_it_is_cut(ranks: int) -> None:
    """Where a stage was one layer, a tuple was spread over its arguments."""
    model: Any = nn.Sequential(*(Optional() for _ in range(4)))
    pipe = sl.Pipeline(model, loss_fn=lambda o, t: functional.mse_loss(o[0], t), ranks=ranks, microbatches=2)
    x = (torch.randn(4, 4), torch.randn(4, 4))
    parts = zip(torch.split(x[0], 2), torch.split(x[1], 2), strict=True)
    assert torch.equal(pipe.predict(x)[0], torch.cat([model(part)[0] for part in parts]))


class PassesOn(nn.Module):
    """Adds what it was given first to what it was given second, only at the end; on the way it is passed on."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), last

    def forward(self, x: Tensor, first: Tensor | None = None) -> Any:
        y = self.linear(x)
        first = y * 2 if first is None else first
        return y + first if self.last else (y, first)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_the_gradient_of_what_a_stage_only_passes_on_is_not_lost(family: str) -> None:
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

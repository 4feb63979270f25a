"""Skips in an nn.Sequential: stashed by one layer, popped by a later one, with the bits of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients

Steps = Generator[Any, Any, Any]


@sl.skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Steps:
        h = torch.tanh(self.linear(x))
        yield sl.stash("skip", h)
        return h * h.sigmoid()


@sl.skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Steps:
        skip = yield sl.pop("skip")
        return torch.tanh(self.linear(x)) + skip * skip.cos()


@sl.skippable(stash=["late"], pop=["early"])
class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Steps:
        early = yield sl.pop("early")
        h = self.linear(x) * early
        yield sl.stash("late", h)
        return h.relu()


@sl.skippable(stash=["early", "nothing"])
class First(Down):
    def forward(self, x: Tensor) -> Steps:
        yield sl.stash("early", self.linear(x))
        yield sl.stash("nothing", None)
        return x.sin()


@sl.skippable(pop=["late", "nothing"])
class Last(Up):
    def forward(self, x: Tensor) -> Steps:
        late = yield sl.pop("late")
        assert (yield sl.pop("nothing")) is None
        return self.linear(x) - late


def unet() -> nn.Sequential:
    """Three nested skips, and a layer of layers."""
    torch.manual_seed(0)
    names = ["outer", "middle", "inner"]
    down = [Down().isolate(name) for name in names]  # type: ignore[operator]
    up = [Up().isolate(name) for name in reversed(names)]  # type: ignore[operator]
    return nn.Sequential(down[0], nn.Sequential(down[1], nn.ReLU()), down[2], nn.Linear(6, 6), nn.Dropout(0.0), *up)


def chained() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(First(), nn.Linear(6, 6), Middle(), nn.Tanh(), nn.Linear(6, 6), Last())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 6)


def looped(model: nn.Module, parts: int = 4) -> dict[str, Tensor | None]:
    inputs, targets = batch()
    for part, wanted in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
        (functional.mse_loss(model(part), wanted) / parts).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def piped(model: Any, **options: Any) -> dict[str, Tensor | None]:
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=4, **options)
    pipe.step(*batch())
    return gradients(pipe.model)


@pytest.mark.parametrize("family", sorted(sl.families()))
def test_skips_have_the_bits_of_a_loop_in_every_family(family: str) -> None:
    schedule = sl.schedule(family, 2, 4)
    for make in (unet, chained) if schedule.training else ():
        model = make()
        grads, expected = piped(copy.deepcopy(model), schedule=family, ranks=2), looped(model)
        if sl.verify(schedule).in_order and schedule.placement.directions == 1:
            assert_same_bits(grads, expected)
        else:  # microbatches are added in another order
            torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("recompute", ["none", "stage", [Down, Up], "*"])
def test_skips_are_recomputed(recompute: Any) -> None:
    model = unet()
    for family in ("1f1b", "zb-h1"):
        mine = copy.deepcopy(model)
        assert_same_bits(piped(mine, schedule=family, ranks=4, recompute=recompute), looped(copy.deepcopy(model)))


def test_skips_work_with_lists_of_stages_cuts_by_cost_evaluation_and_plans() -> None:
    model, inputs = unet(), batch()[0]
    assert_same_bits(piped(list(copy.deepcopy(model)), schedule="1f1b"), looped(copy.deepcopy(model)))
    profile = sl.profile(model, inputs[:2], repeats=1, warmup=0)
    staged = sl.split(copy.deepcopy(model), stages=4, by=profile)
    assert_same_bits(piped(staged, schedule="zb-h1", ranks=4), looped(copy.deepcopy(model)))
    pipe = sl.Pipeline(copy.deepcopy(model), loss_fn=functional.mse_loss, ranks=4, microbatches=4)
    assert torch.equal(pipe.predict(inputs), torch.cat([model(part) for part in inputs.tensor_split(4)]))
    assert sl.check(model, batch(), ranks=4, loss_fn=functional.mse_loss).equal
    assert_same_bits(
        piped(copy.deepcopy(model), schedule="auto", ranks=2, example=batch()[0]), looped(copy.deepcopy(model))
    )


def on_processes(rank: int) -> dict[str, dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    answers = {}
    for family in ("1f1b", "zb-v"):
        pipe = sl.Pipeline(unet(), loss_fn=functional.mse_loss, schedule=family, microbatches=4, ranks=2)
        pipe.step(*batch())
        answers[family] = dict(pipe.named_gradients())
    return answers


def test_skips_work_on_processes() -> None:
    expected = looped(unet())
    for answers in run_ranks(on_processes, 2):
        for grads in answers.values():
            assert_same_bits(grads, {name: expected[name] for name in grads})


@sl.skippable(pop=["missing"])
class Lonely(Up):
    def forward(self, x: Tensor) -> Steps:
        return x + (yield sl.pop("missing"))


@sl.skippable(stash=["skip"])
class Undeclared(Down):
    def forward(self, x: Tensor) -> Steps:
        yield sl.stash("other", x)
        return x


@sl.skippable(stash=["skip"])
class Forgetful(Down):
    def forward(self, x: Tensor) -> Steps:
        if x.numel() < 0:
            yield sl.stash("skip", x)
        return x


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Down, nn.Tanh], r"layer 0 \(Down\) stashes 'skip', but no later layer pops it"),
        ([nn.Tanh, Lonely], r"layer 1 \(Lonely\) pops 'missing', but no layer stashes it"),
        ([Up, Down], r"layer 0 \(Up\) pops 'skip', but 1 \(Down\), which comes later, stashes it"),
        ([Down, Down, Up], r"the skip 'skip' is stashed twice, by layers 0 \(Down\) and 1 \(Down\).*isolate"),
        ([Down, Up, Up], r"the skip 'skip' is popped twice"),
    ],
)
def test_skips_that_do_not_match_are_refused_at_construction(layers: list[type[nn.Module]], message: str) -> None:
    instances = [layer() for layer in layers]
    for model in (nn.Sequential(*instances), instances):
        with pytest.raises(sl.StagelineError, match=message):
            sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=len(instances), microbatches=2)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Undeclared, "Undeclared stashes 'other', which it does not declare"), (Forgetful, "every time")],
)
def test_a_layer_must_use_exactly_the_skips_it_declares(layer: type[nn.Module], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        nn.Sequential(layer(), Up())(batch()[0])


def test_misuse_of_the_decorator_is_refused() -> None:
    with pytest.raises(sl.StagelineError, match="forward is not a generator"):
        sl.skippable(stash=["x"])(nn.Linear)
    with pytest.raises(sl.StagelineError, match="a list of names"):
        sl.skippable(stash="skip")
    with pytest.raises(sl.StagelineError, match="has no skip 'x'; it has skip"):
        Down().isolate("here", only=["x"])  # type: ignore[operator]
    with pytest.raises(sl.StagelineError, match="pops 'skip', but no earlier layer stashed it"):
        Up()(batch()[0])


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Down(), Up()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_with_its_own_forward_returns_its_skips() -> None:
    with pytest.raises(sl.StagelineError, match=r"blocks\.0 stashes or pops 'skip'.*return the tensor"):
        sl.Pipeline(Whole(), loss_fn=functional.mse_loss, ranks=2, microbatches=2)

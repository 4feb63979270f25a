"""Forwards that do more than pass a value from block to block: correct, or refused with the reason."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.model.stage_module.placeholder import PlaceholderTensor
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients, noise, plainly

X, Y = noise(6, 8), noise(6, 8, seed=3)


class Block(nn.Module):
    aux: Any = 0.0
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    kind: type[Block] = Block
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) * self.scale
        return torch.as_tensor(self.head(h))


class InPlace(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h).mul_(1.5)
            functional.relu_(h)
        return torch.as_tensor(self.head(h))


class Directly(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block.forward(h)
        return torch.as_tensor(self.head(h))


class Normed(Model):
    """A norm without parameters but with statistics, beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(super().forward(x)))


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return torch.as_tensor(self.head(h))


class Tied(Model):
    """The head uses the embedding's weight without a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return functional.linear(h, torch.as_tensor(self.embed.weight))


def both(model: nn.Module, family: str = "1f1b", **more: Any) -> tuple[nn.Module, nn.Module, sl.Pipeline]:
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=family, ranks=2, microbatches=2, **more)
    for _ in range(2):
        assert pipe.step(X, Y).loss == plainly(plain, functional.mse_loss, X, Y, 2)
    return model, plain, pipe


@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
@pytest.mark.parametrize("kind", [Model, InPlace, Directly, Normed, Checkpointed])
@pytest.mark.filterwarnings(
    "ignore:torch's global random number generator was used"
)  # checkpointing restores the generator
def test_these_forwards_equal_the_plain_model(kind: type[Model], family: str) -> None:
    torch.manual_seed(0)
    model, plain, pipe = both(kind(), family)
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    pipe.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(pipe.predict(X), plain(X))


def test_a_weight_that_is_used_outside_of_its_unit_is_held_where_it_is_needed() -> None:
    torch.manual_seed(0)
    model, plain, _ = both(Tied(), example=X)
    assert_same_bits(gradients(model, ("embed.weight",)), gradients(plain, ("embed.weight",)))
    torch.testing.assert_close(model.get_parameter("embed.weight").grad, plain.get_parameter("embed.weight").grad)
    unseen = sl.split(Tied(), 2)
    pipe = sl.Pipeline(unseen, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError, match=r"needs embed\.weight, which another stage holds; pass example= to Pipeline"
    ):
        pipe.step(X, Y)


def on_processes(rank: int) -> tuple[float, dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe = sl.Pipeline(Tied(), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2, example=X)
    return pipe.step(X, Y).loss, dict(pipe.named_gradients())


def test_a_weight_that_is_used_outside_of_its_unit_on_processes() -> None:
    torch.manual_seed(0)
    plain = Tied()
    loss = plainly(plain, functional.mse_loss, X, Y, 2)
    for rank_loss, grads in run_ranks(on_processes, 2):
        assert rank_loss == loss
        torch.testing.assert_close(grads["embed.weight"], plain.get_parameter("embed.weight").grad)


class Appends(Block):
    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        if kept is not None:
            kept.append(x.mean())
        return super().forward(x)


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.pow(2).mean()
        return super().forward(x)


class WithList(Model):
    kind = Appends

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.embed(x), list[Tensor]()
        for block in self.blocks:
            h = block(h, kept)
        return torch.as_tensor(self.head(h) + sum(kept))


class WithAttribute(Model):
    kind = Keeps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(torch.as_tensor(block.aux) for block in self.blocks)


class Reentrant(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return torch.as_tensor(self.head(h))


class Regularised(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(parameter.pow(2).sum() for parameter in self.parameters())


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        return super().forward(x)


class ChangesInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = x.mul_(2)
        return super().forward(y) + x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithList, r"blocks\.0 changes a list among its inputs, which other stages do not see; return"),
        (WithAttribute, r"the forward reads blocks\.2\.aux, which blocks\.2 stores as an attribute in its forward"),
        (Reentrant, r"in a checkpoint with use_reentrant=True, .*; use use_reentrant=False, or recompute="),
        (
            Regularised,
            r"reads all parameters, but a stage holds only some of them; compute such a term of the loss outside",
        ),
        (Counting, r"changes the buffer count outside its units, so every stage changes it"),
        (ChangesInput, r"modifies its input\.0 in place; make it use a copy"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*")
def test_these_forwards_are_refused(kind: type[Model], message: str) -> None:
    pipe = sl.Pipeline(kind(), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    with pytest.raises(sl.PipelineError, match=message):
        pipe.step(X.clone(), Y)


class Drops(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.embed(x), 0.5, self.training)
        for block in self.blocks:
            h = block(h)
        return torch.as_tensor(self.head(h))


def test_random_numbers_outside_of_units_are_the_same_for_any_number_of_stages_from_the_first_step_on() -> None:
    results = []
    for ranks, recompute in ((1, "none"), (2, "none"), (2, "stage")):
        torch.manual_seed(0)
        model = Drops()
        pipe = sl.Pipeline(
            model,
            loss_fn=functional.mse_loss,
            schedule="1f1b",
            ranks=ranks,
            microbatches=2,
            seed=3,
            recompute=recompute,
        )
        results.append(([pipe.step(X, Y).loss for _ in range(2)], gradients(model)))
    for losses, grads in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(grads, results[0][1])


def test_attributes_set_on_the_model_later_take_effect() -> None:
    torch.manual_seed(0)
    model, plain, pipe = both(Model())
    for copy_of_model in (model, plain):
        copy_of_model.scale = 3.0  # type: ignore[assignment]
        copy_of_model.get_submodule("blocks.1").scale = 0.5  # type: ignore[assignment]
    assert pipe.step(X, Y).loss == plainly(plain, functional.mse_loss, X, Y, 2)
    model.get_submodule("blocks")._modules["0"] = Block()
    with pytest.raises(sl.PipelineError, match=r"blocks\.0 was replaced after the pipeline was created"):
        pipe.step(X, Y)


class ByMode(Model):
    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return torch.as_tensor(self.head(h + first if self.training else h))


def test_evaluation_and_training_may_take_different_paths() -> None:
    torch.manual_seed(0)
    model = ByMode()
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    pipe.eval()
    plain.eval()
    assert torch.equal(pipe.predict(X), plain(X))
    pipe.train()
    plain.train()
    assert pipe.step(X, Y).loss == plainly(plain, functional.mse_loss, X, Y, 2)


class BySize(Model):
    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return torch.as_tensor(self.head(h + first if len(x) > 1 else h))


def test_all_values_can_be_passed_on() -> None:
    torch.manual_seed(0)
    model = BySize()
    plain = copy.deepcopy(model)
    staged = sl.split(model, 2, everything=True)
    pipe = sl.Pipeline(staged, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=2)
    for size in (2, 6):
        loss = pipe.step(X[:size], Y[:size]).loss
        assert loss == plainly(plain, functional.mse_loss, X[:size], Y[:size], 2)


def test_an_invalid_example_is_refused() -> None:
    with pytest.raises(sl.StagelineError, match="Model cannot run on the example"):
        sl.split(Model(), 2, example=noise(2, 5))


def test_inputs_that_the_first_stage_cannot_take_are_refused_with_its_signature() -> None:
    pipe = sl.Pipeline(Model(), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    with pytest.raises(sl.PipelineError, match=r"cannot take its inputs: .*; Model takes \(x\), but received y; a"):
        pipe.step({"y": X}, Y)
    with pytest.raises(sl.PipelineError, match=r"Model takes \(x\), but received 2 arguments"):
        pipe.step((X, X), Y)


class Two(NamedTuple):
    hidden: Tensor
    first: Tensor | None


@dataclass
class Held:
    hidden: Tensor
    first: Tensor | None = None
    label: str = "x"


def of_kind(kind: Any) -> type[Model]:
    """Return a model class whose blocks pass on a structured value."""

    class Passes(Block):
        def forward(self, x: Any) -> Any:
            hidden, first = (x, x) if isinstance(x, Tensor) else (x.hidden, x.first)
            return kind(hidden + torch.tanh(self.linear(hidden)), first)

    class Structured(Model):
        kind = Passes

        def forward(self, x: Tensor) -> Tensor:
            hidden: Any = self.embed(x)
            for block in self.blocks:
                hidden = block(hidden)
            assert type(hidden) is kind
            return torch.as_tensor(self.head(hidden.hidden + hidden.first))

    return Structured


@pytest.mark.parametrize("kind", [Two, Held])
@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
def test_blocks_pass_on_named_tuples_and_dataclasses(kind: Any, family: str) -> None:
    torch.manual_seed(0)
    assert sl.check(of_kind(kind)(), (X, Y), ranks=2, schedule=family, loss_fn=functional.mse_loss).equal


def structured(rank: int, ranks: int = 2) -> float:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Wraps(), nn.Linear(8, 8)]
    pipe = sl.Pipeline(
        nn.Sequential(nn.Sequential(layers[0], layers[1]), nn.Sequential(Unwraps(), layers[2])),
        loss_fn=functional.mse_loss, ranks=ranks, microbatches=2,
    )  # fmt: skip
    return pipe.step(X, Y).loss


class Wraps(nn.Module):
    def forward(self, x: Tensor) -> Two:
        return Two(x, None)


class Unwraps(nn.Module):
    def forward(self, pair: Two) -> Tensor:
        assert type(pair) is Two
        return pair.hidden


def test_a_process_knows_the_classes_of_another() -> None:
    assert len({*run_ranks(structured, 2), structured(0, 1)}) == 1


def test_a_dataclass_that_cannot_be_constructed_is_refused() -> None:
    @dataclass
    class Odd:
        hidden: Tensor
        first: Tensor
        more: int = field(default=0, init=False)

    with pytest.raises(sl.PipelineError, match=r"passes on a Odd, .*; its field more is not a constructor argument"):
        sl.check(of_kind(Odd)(), (X, Y), ranks=2, loss_fn=functional.mse_loss)


def test_a_dataclass_as_a_batch_is_cut_into_microbatches() -> None:
    class Reads(Model):
        def forward(self, batch: Any) -> Tensor:
            assert batch.hidden.shape == batch.first.shape == (2, 8)
            return super().forward(batch.hidden + batch.first)

    pipe = sl.Pipeline(Reads(), loss_fn=functional.mse_loss, ranks=2, microbatches=3)
    assert pipe.step(Held(X, X), Y).samples == 6


def test_a_mapping_counts_as_a_dict() -> None:
    torch.manual_seed(0)
    model = Model()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=3)
    assert pipe.step(UserDict(x=X), Y).loss == pipe.step({"x": X}, Y).loss
    assert len(sl.profile(model, UserDict(x=X), repeats=1, warmup=0).layers) == 6


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        parametrize.register_parametrization(self, "gain", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


def test_a_parameter_of_the_model_itself_may_be_parametrized() -> None:
    torch.manual_seed(0)
    model = Parametrized()
    assert sl.split(model, stages=2).units[0].name == "embed"
    report = sl.check(model, (X, Y), ranks=2, schedule="zb-h1", loss_fn=functional.mse_loss)
    assert report.equal
    assert report.compared == 13


class Together(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for first in (0, 2):
            pair = self.blocks[first : first + 2]
            # The generator is one of all threads, and nothing is drawn.
            h = checkpoint(lambda h, pair=pair: pair[1](pair[0](h)), h, use_reentrant=False, preserve_rng_state=False)
        return torch.as_tensor(self.head(h))


def test_blocks_of_one_checkpoint_stay_together() -> None:
    torch.manual_seed(0)
    assert sl.check(Together(), (X, Y), ranks=2, loss_fn=functional.mse_loss).equal
    apart = sl.split(Together(), stages=2, layers_per_stage=[1, 3])
    pipe = sl.Pipeline(apart, loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError,
        match=r"runs blocks\.0 and blocks\.1 in one checkpoint, .* cut it elsewhere .*layers_per_stage",
    ):
        pipe.step(X, Y)


class Experts(nn.Module):
    """A block whose path depends on values, so that it cannot run without computing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for name in "ab"})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.gate(x).argmax(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.values()):
            if (chosen == index).any():
                mixed = mixed + expert(x) * (chosen == index)[:, None]
        return x + mixed, mixed.square().mean()


class InDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
        self.layers = nn.ModuleDict({f"layer{index}": Experts() for index in range(4)})
        self.gains = nn.ParameterList(torch.ones(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        for name, gain in zip(self.layers, self.gains, strict=True):
            x, more = self.layers[name](x * gain)
            total = total + more
        return torch.as_tensor(self.heads["first"](x) + self.heads["second"](x) + total)


@pytest.mark.filterwarnings("ignore:could not infer what crosses the stage boundaries")
def test_blocks_heads_and_parameters_may_be_in_dicts_and_lists() -> None:
    torch.manual_seed(0)
    model = InDicts()
    staged = sl.split(model, stages=2, example=X)
    assert staged.names == [
        ["layers.layer0", "layers.layer1"],
        ["layers.layer2", "layers.layer3", "heads.first", "heads.second"],
    ]
    assert len(sl.profile(model, X, repeats=1, warmup=0).layers) == 6
    for family in ("1f1b", "zb-v"):
        assert sl.check(model, (X, Y), ranks=2, schedule=family, loss_fn=functional.mse_loss, example=X).equal


def test_running_an_example_changes_nothing() -> None:
    class Normed(InDicts):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(functional.dropout(self.norm(x)))

    model = Normed()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert sl.split(model, stages=2, example=X).names[0][0] == "norm"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counts(Model):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Limits(Model):
    longest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return super().forward(x) * self.longest


def test_a_forward_that_counts_its_calls_is_refused_and_one_that_stores_a_constant_is_not() -> None:
    model = Counts()
    model.calls = 0
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    with pytest.raises(sl.PipelineError, match="changes calls of Counts every time, outside its units"):
        pipe.step(X, Y)
    kept = Limits()
    kept.longest = 0
    assert sl.check(kept, (X, Y), ranks=2, microbatches=3, loss_fn=functional.mse_loss).equal


class Hooked(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            if h.requires_grad:
                h.register_hook(lambda grad: 2 * grad)
        return torch.as_tensor(self.head(h))


class HookedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
        return super().forward(x)


def test_a_hook_on_what_crosses_a_cut_is_never_called_twice() -> None:
    torch.manual_seed(0)
    pipe = sl.Pipeline(Hooked(), loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError, match=r"registers a hook on the output of blocks\.1 .* register_hook inside a unit"
    ):
        pipe.step(X, Y)

    class Inside(Model):
        kind = HookedInside

    assert sl.check(Inside(), (X, Y), ranks=2, loss_fn=functional.mse_loss).equal


def test_cached_shapes_of_placeholders_depend_on_all_arguments() -> None:
    """A result is reused for the same arguments only, and later in-place changes of it do not matter."""
    x = PlaceholderTensor.of(torch.empty(2, 3, dtype=torch.int64, device="meta"), "cpu", frozenset({"x"}))
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert (x / 2).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert [(x + other).dtype for other in (1, 1.0, True, 1)] == [torch.int64, torch.float32, torch.int64, torch.int64]
    assert [tuple(x.sum(axis).shape) for axis in (0, 1, 0)] == [(3,), (2,), (3,)]
    first, second, third = (_form(x + 1) for _ in range(3))
    first.unsqueeze_(0)
    assert second.shape == third.shape == _form(x + 1).shape == (2, 3)


def _form(value: torch.Tensor) -> torch.Tensor:
    assert isinstance(value, PlaceholderTensor)
    return value.on_meta

"""A model without an example: with threads the first batch shows where it is cut, and processes require one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, cos: Tensor) -> Any:
        q, k, v = self.attn(x).chunk(3, -1)
        return self.proj(functional.scaled_dot_product_attention(q * cos, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, cos: Tensor) -> Any:
        x = x + self.attn(self.norm_1(x), cos)
        return x + self.mlp(self.norm_2(x))


class HeadFirst(nn.Module):
    """A GPT that defines its head before its body, as litgpt does."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 11, bias=False)
        blocks = nn.ModuleList(Block() for _ in range(4))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(11, 8), "h": blocks, "ln_f": nn.LayerNorm(8)})
        self.register_buffer("cos", torch.rand(16, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Any:
        body: Any = self.transformer
        x, cos = body["wte"](tokens), self.cos[: tokens.shape[1]]  # type: ignore[index]
        for block in body["h"]:
            x = block(x, cos)
        return self.lm_head(body["ln_f"](x))


class Towers(nn.Module):
    """Two towers that are not called in the order in which they are defined."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.image = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        for layer in self.image:
            image = torch.tanh(layer(image))
        for layer in self.text:
            text = torch.tanh(layer(text))
        return image @ text.T


class Bare(nn.Module):
    """Parameters without modules: there is nothing to cut between before the model is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(torch.tanh(x @ self.first) @ self.second)


class Translates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.body = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        return self.head(self.body(source, target))


def square(output: Any, _: Any) -> Any:
    first = output if isinstance(output, Tensor) else output[0]
    return first.square().mean()


def pair() -> Any:
    return torch.randn(4, 5, 8), torch.randn(4, 6, 8)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "head first": (HeadFirst, lambda: torch.randint(0, 11, (4, 6))),
    "towers": (Towers, lambda: (torch.randn(4, 8), torch.randn(4, 8))),
    "bare": (Bare, lambda: torch.randn(4, 8)),
    "nn.Transformer": (lambda: nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True), pair),
    "nn.Transformer after its head": (Translates, pair),
}


def loop(model: nn.Module, inputs: Any, loss_fn: Callable[[Any, Any], Any], parts: int) -> float:
    leaves, tree = pytree.tree_flatten(inputs)
    total = 0.0
    for part in range(parts):
        piece = pytree.tree_unflatten([leaf.tensor_split(parts)[part] for leaf in leaves], tree)
        kwargs = piece if isinstance(piece, dict) else {}
        args = () if kwargs else piece if isinstance(piece, tuple) else (piece,)
        loss = loss_fn(model(*args, **kwargs), None) * (1 / parts)
        loss.backward()
        total += float(loss.detach())
    return total


def trains(model: nn.Module, inputs: Any, loss_fn: Callable[[Any, Any], Any], schedule: str) -> None:
    """Two steps of the optimizer, whose parameters were read before anything was cut."""
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule=schedule, ranks=2, microbatches=2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (pipe, plain)]
    assert sorted(name for name, _ in pipe.named_parameters()) == sorted(name for name, _ in plain.named_parameters())
    assert list(pipe.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        stats = pipe.step(inputs)
        assert stats.loss == loop(plain, inputs, loss_fn, 2)
        pipe.clip_grad_norm_(1e9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert list(pipe.state_dict()) == list(plain.state_dict())  # in the order of definitions, not of calls
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in plain.named_buffers()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_batch_shows_where_a_model_is_cut(case: str, schedule: str) -> None:
    make, batch = CASES[case]
    trains(make(), batch(), square, schedule)


@pytest.mark.parametrize("name", ["CLIP", "Siglip", "DPT"])
def test_models_with_two_towers_or_a_neck_need_no_example(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small: Any = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**small, "vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**small, "image_size": 8, "patch_size": 4}
    inputs: Any = {"input_ids": torch.randint(3, 30, (4, 6)), "pixel_values": torch.randn(4, 3, 8, 8)}
    if name == "DPT":
        config = transformers.DPTConfig(
            **{**small, "num_hidden_layers": 4}, image_size=16, patch_size=4, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[4, 8, 8, 8], fusion_hidden_size=8, is_hybrid=False,
        )  # fmt: skip
        model, inputs = transformers.DPTForDepthEstimation(config), {"pixel_values": torch.randn(4, 3, 16, 16)}
        trains(model.eval(), inputs, lambda output, _: output.predicted_depth.square().mean(), "1f1b")
        return
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{name}Model")(config)
    trains(model.eval(), inputs, lambda output, _: output.logits_per_image.square().mean(), "1f1b")


@pytest.mark.parametrize("case", ["head first", "bare"])
def test_predictions_runs_and_built_models_wait_for_the_first_batch_too(case: str) -> None:
    make, batch = CASES[case]
    inputs, model = batch(), make()
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=square, ranks=2, microbatches=2)
    with torch.no_grad():
        expected = torch.cat([plain(part) for part in inputs.tensor_split(2)])
    pipe.load_state_dict(plain.state_dict())
    assert torch.equal(pipe.predict(inputs), expected)
    assert torch.equal(sl.Pipeline(model, loss_fn=square, ranks=2, microbatches=2).predict(inputs), expected)

    runner = sl.Pipeline(model, loss_fn=square, schedule="zb-h1", ranks=2, microbatches=2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (runner, plain)]
    for _ in runner.run(iter([inputs, inputs]), optimizer=optimizers[0]):
        loop(plain, inputs, square, 2)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))

    built = sl.Pipeline(make, loss_fn=square, ranks=2, microbatches=2, seed=3)
    assert all(not parameter.is_meta for parameter in built.parameters())
    alone = copy.deepcopy(built.model)
    built.step(inputs)
    loop(alone, inputs, square, 2)
    assert_same_bits(dict(built.named_gradients()), {name: p.grad for name, p in alone.named_parameters()})


def test_a_check_needs_no_example() -> None:
    assert sl.check(HeadFirst(), (torch.randint(0, 11, (4, 6)), torch.zeros(4)), ranks=2, loss_fn=square)


def test_a_batch_that_a_model_cannot_run_on_is_named() -> None:
    pipe = sl.Pipeline(Bare(), loss_fn=square, ranks=2, microbatches=2)
    with pytest.raises(sl.StagelineError, match=r"torch\.export cannot trace it: .* reduction dim"):
        pipe.step(torch.randn(4, 7))
    with pytest.raises(sl.StagelineError, match="the inputs are None"):
        pipe.step(None)
    assert pipe.step(torch.randn(4, 8)).samples == 4


class Odd(nn.Module):
    """Does not call its layers in the order in which it defines them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.h = nn.Linear(8, 8)

    def forward(self, x: Tensor, slow: Tensor | None = None) -> Any:
        x = self.h(x)
        if slow is not None:
            x = self.a(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.a(x) if slow is None else x


def fails_on_short(output: Tensor, target: Tensor) -> Tensor:
    if len(target) == 1:
        raise ValueError("one sample")
    return functional.mse_loss(output, target)


def fail(pipe: sl.Pipeline, batch: Any, how: str) -> None:
    if how == "run":
        next(pipe.run([batch], optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1)))
    elif how == "step" or isinstance(batch[0], dict):
        pipe.step(*batch)
    else:
        pipe.predict(batch[0])


@pytest.mark.filterwarnings("ignore:could not infer what crosses the stage boundaries")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("how", ["step", "run", "predict"])
def test_a_pipeline_waits_for_its_first_good_batch(schedule: str, how: str) -> None:
    """A first batch that fails, in the model or in the loss, decides nothing."""
    model = Odd()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe = sl.Pipeline(model, loss_fn=fails_on_short, schedule=schedule, ranks=2, microbatches=4)
    for wrong in ((torch.randn(8, 7), y), ({"x": x[:4], "slow": x[:4]}, y[:4])):
        with pytest.raises((sl.StagelineError, sl.PipelineError), match=r"mat1|shapes|one sample"):
            fail(pipe, wrong, how)
    pipe.zero_grad()
    total = pipe.step(x, y).loss
    expected = 0.0
    for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        loss = functional.mse_loss(plain(part), target) * (1 / 4)
        torch.autograd.backward(loss)
        expected += float(loss.detach())
    assert total == expected
    assert_same_bits(
        dict(pipe.named_gradients()), {name: parameter.grad for name, parameter in plain.named_parameters()}
    )


def without_example(rank: int) -> list[str]:
    errors = []
    torch.manual_seed(0)
    for make, inputs in ((HeadFirst, torch.randint(0, 11, (4, 6))), (Bare, torch.randn(4, 8))):
        torch.manual_seed(0)
        try:
            sl.Pipeline(make(), loss_fn=square, ranks=2, microbatches=2).step(inputs)
        except sl.StagelineError as error:
            errors.append(str(error))
        torch.manual_seed(0)
        model = make()
        plain = copy.deepcopy(model)
        pipe = sl.Pipeline(model, loss_fn=square, ranks=2, microbatches=2, example=inputs[:1])
        pipe.step(inputs)
        loop(plain, inputs, square, 2)
        mine = dict(pipe.named_gradients())
        assert_same_bits(mine, {name: p.grad for name, p in plain.named_parameters() if name in mine})
    return errors


def test_processes_ask_for_an_example_and_show_how() -> None:
    """Their parameters are known only when the cut is."""
    for errors in run_ranks(without_example, 2):
        assert len(errors) == 2
        for words in errors:
            assert "pass example= to" in words
            assert "sl.Pipeline(model, …, example=inputs)" in words

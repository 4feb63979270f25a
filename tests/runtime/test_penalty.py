"""Losses that read parameters are refused by name; a penalty on parameters is what the plain loop computes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

import stageline as sl
from stageline.runtime.step_report import add_up
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import TRAINING, Head, batch, blocks, tied_model, token_loss, weights


def ridge(name: str, parameter: nn.Parameter) -> Tensor | None:
    """L2 on weights, L1 on biases, nothing on norms."""
    if ".norm" in name:
        return None
    return 0.1 * parameter.pow(2).sum() if "weight" in name else 0.01 * parameter.abs().sum()


def penalised_step(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, **options: Any) -> float:
    """The documented loop: the microbatches' backwards, then that of the penalty."""
    scale, loss_fn = options.pop("scale", 1.0), options.pop("loss_fn", functional.mse_loss)
    loss = one_process_step(model, lambda o, t: loss_fn(o, t) * scale, x, y, microbatches, **options) / scale
    terms = [term for name, parameter in model.named_parameters() if (term := ridge(name, parameter)) is not None]
    (torch.stack(terms).sum() * scale).backward()
    return float(loss + sum(term.item() for term in terms))


def train_with_penalty(name: str, ranks: int = 2, **options: Any) -> None:
    model, plain = blocks(), blocks()
    for network in (model, plain):
        network[3].up.weight.requires_grad_(False)
    chunks: dict[str, Any] = {"chunks": 2} if name in ("interleaved", "looped-bfs") else {}
    pipe = sl.Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=name,
        ranks=ranks,
        microbatches=4,
        penalty=ridge,
        **chunks,
        **options,
    )
    directions = pipe.schedule.placement.direction if pipe.schedule.placement.directions > 1 else None
    mine, other = (torch.optim.AdamW(network.parameters(), lr=1e-2) for network in (pipe, plain))
    x, y = batch()
    for scale in (1.0, 0.5):
        stats = pipe.step(x, y, scale=scale)
        expected = penalised_step(plain, x, y, 4, directions=directions, scale=scale)
        assert stats.loss == pytest.approx(expected, rel=1e-6)
        assert stats.loss == add_up(stats.losses) + stats.penalty
        grads = dict(pipe.named_gradients())
        assert_same_bits(grads, {key: grad for key, grad in gradients(plain).items() if key in grads})
        mine.step()
        mine.zero_grad()
        other.step()
        other.zero_grad()


@pytest.mark.parametrize("name", TRAINING)
def test_a_penalty_gives_the_bits_of_the_loop(name: str) -> None:
    train_with_penalty(name)
    train_with_penalty(name, recompute="stage")


def test_a_penalty_accumulates_with_every_step_and_counts_tied_weights_once() -> None:
    model, plain = tied_model(), tied_model()
    tokens = torch.randint(0, 11, (6, 5))
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule="zb-h1", ranks=2, microbatches=3, penalty=ridge)
    for _ in range(2):
        stats = pipe.step(tokens, tokens)
        expected = penalised_step(plain, tokens, tokens, 3, loss_fn=token_loss)
        assert stats.loss == pytest.approx(expected, rel=1e-6)
    # A tied weight's uses are added up stage by stage: equal but for rounding.
    for name, grad in gradients(plain).items():
        assert grad is not None
        torch.testing.assert_close(dict(pipe.named_gradients())[name], grad)
    assert stats.penalty > 0


def test_a_run_adds_the_penalty_as_steps_do() -> None:
    models = [blocks(), blocks()]
    batches = [batch() for _ in range(3)]
    losses: list[list[float]] = []
    for model, interlocks in zip(models, (True, False), strict=True):
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4, penalty=ridge)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses.append([])
        if interlocks:
            losses[-1] = [stats.loss for stats in pipe.run(batches, optimizer=optimizer, max_norm=0.5)]
        else:
            for x, y in batches:
                losses[-1].append(pipe.step(x, y).loss)
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert losses[0] == losses[1]
    assert_same_bits(weights(models[0]), weights(models[1]))


def test_check_compares_with_a_loop_that_has_the_penalty() -> None:
    assert sl.check(blocks(), batch(), ranks=2, schedule="zb-h1", loss_fn=functional.mse_loss, penalty=ridge)


def test_a_penalty_that_cannot_be_right_is_refused() -> None:
    model = blocks()
    x, y = batch()

    def refused(penalty: Any, message: str) -> None:
        with pytest.raises(sl.StagelineError, match=message):
            sl.Pipeline(
                model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4, penalty=penalty
            ).step(x, y)

    refused(0.1, "penalty must be a function of a parameter's name and the parameter, got 0.1")
    refused(
        lambda name, parameter: parameter * 2,
        r"a tensor with one element.* for 0.norm.weight it returned a tensor of shape \(8,\)",
    )
    refused(lambda name, parameter: parameter.detach().sum(), "without a graph for 0.norm.weight, which is trained")
    refused(
        lambda name, parameter: (parameter.sum() - model[0].up.weight.sum()) ** 2, "on another parameter, 0.up.weight"
    )
    refused(
        lambda name, parameter: parameter.sum() * float("nan") if name == "5.up.bias" else None,
        "penalty of 5.up.bias is not finite",
    )


# Losses that read parameters.


class WithModel(nn.Module):
    """A loss that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        squares = [parameter.pow(2).sum() for parameter in self.model.parameters()]
        return functional.mse_loss(output, target) + torch.stack(squares).sum()


def with_list(parameters: list[Tensor], output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target) + sum(parameter.pow(2).sum() for parameter in parameters)


def from_data(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    known = [parameter.data for parameter in model.parameters()]
    return lambda output, target: functional.mse_loss(output, target) + sum(values.sum() for values in known)


def all_at_once(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda o, t: functional.mse_loss(o, t) + torch.stack(torch._foreach_norm(list(model.parameters()))).sum()


READERS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda m: lambda o, t: functional.mse_loss(o, t) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    "detached": lambda m: lambda o, t: functional.mse_loss(o, t) * (1 + m[0].up.weight.detach().norm()),
    "through .data": lambda m: lambda o, t: functional.mse_loss(o, t) + m[0].up.weight.data.sum(),
    "kept .data": from_data,
    "a vector": lambda m: lambda o, t: functional.mse_loss(o, t) + parameters_to_vector(m.parameters()).norm(),
    "all at once": all_at_once,
    "a module": WithModel,
    "a partial": lambda m: functools.partial(with_list, list(m.parameters())),
    "a second forward": lambda m: lambda o, t: functional.mse_loss(o, m(t)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_loss_that_reads_parameters_is_refused_with_their_names(reader: str) -> None:
    model = blocks()
    before = copy.deepcopy(model.state_dict())
    pipe = sl.Pipeline(model, loss_fn=READERS[reader](model), schedule="zb-h1", ranks=2, microbatches=4)
    with pytest.raises(
        sl.PipelineError, match=r"loss_fn reads .* of the model .*: 0\..*penalty=lambda name, parameter"
    ):
        pipe.step(*batch())
    assert_same_bits(dict(before), dict(model.state_dict()))


def test_a_loss_that_begins_to_read_parameters_later_is_refused_then() -> None:
    model, calls = blocks(), [0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        loss = functional.mse_loss(output, target)
        return loss if calls[0] <= 8 else loss + model[0].up.weight.pow(2).sum()

    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule="1f1b", ranks=2, microbatches=4)
    pipe.step(*batch())
    pipe.step(*batch())
    with pytest.raises(sl.PipelineError, match=r"loss_fn reads a parameter or buffer .*: 0\.up\.weight"):
        pipe.step(*batch())


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("how", ["a closure", "an object", "a partial"])
def test_a_read_that_begins_at_any_microbatch_of_any_step_is_refused_in_that_step(how: str, detached: bool) -> None:
    model, calls = blocks(), [0]

    class Holder:
        def __init__(self) -> None:
            self.held = {"model": model}

        def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
            return late(self.held["model"], output, target)

    def late(read: Any, output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        loss = functional.mse_loss(output, target)
        weight = read[0].up.weight
        return loss if calls[0] <= 6 else loss * (1 + (weight.detach() if detached else weight).pow(2).sum())

    forms: dict[str, Any] = {
        "a closure": lambda output, target: late(model, output, target),
        "an object": Holder().loss_fn,
        "a partial": functools.partial(late, model),
    }
    pipe = sl.Pipeline(model, loss_fn=forms[how], schedule="1f1b", ranks=2, microbatches=4)
    pipe.step(*batch())
    with pytest.raises(sl.PipelineError, match=r"microbatch 2.*loss_fn reads a parameter or buffer .*: 0\.up\.weight"):
        pipe.step(*batch())


@pytest.mark.parametrize("detached", [False, True])
def test_a_penalty_that_reads_another_parameter_is_refused(detached: bool) -> None:
    model, calls = blocks(), [0]

    def crossed(name: str, parameter: nn.Parameter) -> Tensor:
        calls[0] += 1
        weight: Tensor = model[0].up.weight
        term = parameter.pow(2).sum()
        late = calls[0] > len(list(model.parameters()))
        return term * (weight.detach() if detached else weight).sum() if late else term

    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4, penalty=crossed)
    pipe.step(*batch())
    with pytest.raises(sl.StagelineError, match=r"penalty for 0\.\S+ depends on another parameter, 0\.up\.weight"):
        pipe.step(*batch())


@pytest.mark.parametrize("name", TRAINING)
def test_a_loss_may_read_the_form_of_any_parameter_and_the_values_of_the_last_stages(name: str) -> None:
    model, plain = blocks(), blocks()

    def loss_of(network: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            first = next(network.parameters())
            loss = functional.mse_loss(output.to(first.device).to(first), target.type_as(first))
            return torch.as_tensor(loss + torch.zeros_like(first).sum() + 0.1 * network[-1].down.weight.pow(2).sum())

        return loss_fn

    chunks: dict[str, Any] = {"chunks": 2} if name in ("interleaved", "looped-bfs") else {}
    pipe = sl.Pipeline(model, loss_fn=loss_of(model), schedule=name, ranks=2, microbatches=4, **chunks)
    x, y = batch()
    if pipe.schedule.placement.directions > 1:
        with pytest.raises(sl.PipelineError, match=r"that are not only on the last stage: 7\.down\.weight"):
            pipe.step(x, y)
        return
    pipe.step(x, y)
    one_process_step(plain, loss_of(plain), x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * self.temperature, target)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_a_loss_with_parameters_of_its_own_trains_them_on_one_rank_or_is_refused(name: str) -> None:
    model, plain = blocks(), blocks()
    mine, other = Temperature(), Temperature()
    pipe = sl.Pipeline(model, loss_fn=mine, schedule=name, ranks=2, microbatches=4)
    x, y = batch()
    if name == "dualpipe":
        with pytest.raises(sl.PipelineError, match="trains 1 parameters that are not in the model: temperature"):
            pipe.step(x, y)
        return
    pipe.step(x, y)
    one_process_step(plain, other, x, y, 4)
    assert_same_bits({**gradients(model), **gradients(mine)}, {**gradients(plain), **gradients(other)})


def test_a_tied_weight_of_the_last_stage_is_refused_in_the_loss() -> None:
    model = tied_model()
    head: Head = model[-1]
    pipe = sl.Pipeline(model, loss_fn=lambda o, t: token_loss(o, t) + head.weight.pow(2).sum(), ranks=2, microbatches=3)
    tokens = torch.randint(0, 11, (6, 5))
    with pytest.raises(sl.PipelineError, match=r"that are not only on the last stage: 0\.weight"):
        pipe.step(tokens, tokens)


# Ranks that are processes.


def on_processes(rank: int) -> list[str]:
    for name in ("1f1b", "zb-v", "dualpipe"):
        train_with_penalty(name)
    train_with_penalty("interleaved", recompute="stage")
    errors = []
    readers: list[Callable[[Any], Any]] = [READERS["a sum"], READERS["detached"], lambda m: Temperature()]
    for reader in readers:
        model = blocks()
        pipe = sl.Pipeline(model, loss_fn=reader(model), schedule="1f1b", ranks=2, microbatches=4)
        with pytest.raises(sl.PipelineError) as caught:
            pipe.step(*batch())
        errors.append(str(caught.value))
    built = sl.Pipeline(blocks, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    whole = built.model

    def absent(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) + sum(parameter.pow(2).sum() for parameter in whole.parameters())

    built = sl.Pipeline(whole, loss_fn=absent, schedule="1f1b", ranks=2, microbatches=4)
    with pytest.raises(sl.PipelineError) as caught:
        built.step(*batch())
    return [*errors, str(caught.value)]


def test_penalties_and_refusals_are_the_same_on_processes() -> None:
    for errors in run_ranks(on_processes, 2, timeout=200):
        for text in (errors[0], errors[1], errors[3]):
            assert "loss_fn reads" in text
            assert "0.up.weight" in text or "0.norm.weight" in text
        assert "loss_fn trains 1 parameters that are not in the model: temperature" in errors[2]


def with_replicas(rank: int) -> float:
    model, plain = blocks(), blocks()
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=1, replicas=2, microbatches=2, penalty=ridge
    )
    x, y = batch(8)
    mine = slice(4 * pipe.replica, 4 * pipe.replica + 4)
    for sync in (False, True):
        stats = pipe.step(x[mine], y[mine], sync=sync)
    for _ in range(2):
        expected = penalised_step(plain, x, y, 4)
    assert stats.loss == pytest.approx(expected, rel=1e-6)
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(dict(pipe.named_gradients())[name], grad)
    return stats.loss


def test_replicas_count_a_penalty_once() -> None:
    first, second = run_ranks(with_replicas, 2)
    assert first == second

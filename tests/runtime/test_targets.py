"""Targets: none at all, ones without dimensions, and ones with a graph, which are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.runtime.step_report import add_up
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients


def backward(loss: Any) -> None:
    loss.backward()


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Gpt(nn.Module):
    """A model that takes its targets and returns its loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Residual(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def squared(output: Tensor, target: Any) -> Tensor:
    assert target is None
    return output.square().mean()


@pytest.mark.parametrize("name", [name for name in sl.families() if name != "forward-only"])
def test_a_step_without_targets_gives_none_to_the_loss(name: str) -> None:
    """In every family, recomputed or not; evaluate does the same."""
    schedule = sl.schedule(name, ranks=2, microbatches=4)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(schedule.stages)))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=squared, schedule=schedule, recompute="stage" if name == "zb-h1" else "none")
    stats = pipe.step(x)
    parts = schedule.microbatches
    losses = []
    for xi in x.tensor_split(parts):
        loss = squared(plain(xi), None) * (len(xi) / 8)
        backward(loss)
        losses.append(float(loss.detach()))
    assert stats.losses == tuple(losses)
    if schedule.placement.directions == 1 and pipe.certificate.in_order:
        assert_same_bits(gradients(model), gradients(plain))
    assert pipe.evaluate(x).loss == add_up(losses)


def test_a_model_that_returns_its_loss_trains() -> None:
    model = Gpt()
    plain = copy.deepcopy(model)
    tokens, targets = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    pipe = sl.Pipeline(model, loss_fn=lambda out, _: out[1], ranks=2, microbatches=2, example=(tokens[:1], targets[:1]))
    for _ in range(2):
        pipe.step((tokens, targets))
        for xi, yi in zip(tokens.tensor_split(2), targets.tensor_split(2), strict=True):
            backward(plain(xi, yi)[1] * 0.5)
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("batch", ["a tensor", "a pair", "a dict of arguments"])
def test_a_run_without_targets(batch: str) -> None:
    """The batches of a run may be inputs alone."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plain = copy.deepcopy(model)
    xs = [torch.randn(4, 4) for _ in range(3)]
    batches: Any = {
        "a tensor": xs,
        "a pair": [(x, None) for x in xs],
        "a dict of arguments": [{"inputs": x} for x in xs],
    }
    pipe = sl.Pipeline(model, loss_fn=squared, schedule="zb-h1", ranks=2, microbatches=2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    run = pipe.run(batches[batch], optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert len(list(run)) == 3
    for x in xs:
        for xi in x.tensor_split(2):
            backward(squared(plain(xi), None) * 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


def picky(output: Tensor, target: Any) -> Tensor:
    return squared(output, None) if target is None else functional.mse_loss(output, target)


def without(rank: int) -> tuple[Any, float, int, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    pipe = sl.Pipeline(model, loss_fn=picky, schedule="zb-h1", ranks=2, microbatches=3)
    errors = []
    wrong: Any = x.numpy()
    for inputs, targets in (
        (x, y if rank == 0 else None),
        (x if rank == 1 else None, y),
        (wrong if rank == 0 else x, y),
    ):
        try:
            pipe.step(inputs, targets)
        except sl.StagelineError as error:
            errors.append(str(error))
    pipe.zero_grad()
    loss = pipe.step(x if rank == 0 else None).loss
    grads = {name: None if grad is None else grad.clone() for name, grad in pipe.named_gradients()}
    pipe.zero_grad()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    steps = len(list(pipe.run([{"inputs": x if rank == 0 else None} for _ in range(2)], optimizer=optimizer)))
    try:
        list(pipe.run([(x, y if rank == 0 else None)], optimizer=optimizer))
    except sl.StagelineError as error:
        errors.append(str(error))
    return grads, loss, steps, errors


def test_processes_agree_on_whether_there_are_targets() -> None:
    """None on all ranks reaches the loss; targets missing on the last stage's rank are named on every rank."""
    answers = run_ranks(without, 2)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    loss = 0.0
    for xi in torch.randn(6, 4).tensor_split(3):
        part = squared(plain(xi), None) * (len(xi) / 6)
        backward(part)
        loss += float(part.detach())
    assert_same_bits({**answers[0][0], **answers[1][0]}, gradients(plain))
    for _, last_loss, steps, errors in answers:
        assert last_loss == loss
        assert steps == 2
        assert len(errors) == 4
        assert "rank 0 received the targets, but rank 1, which reads them, received None" in errors[0]
        assert "rank 1 received the inputs, but rank 0, which reads them, received None" in errors[1]
        assert "are a numpy array" in errors[2]  # what rank 0 refused is not mistaken for missing
        assert "rank 0 received the targets, but rank 1" in errors[3]


@pytest.mark.parametrize("wrap", [lambda target: target, lambda target: (target,)])
def test_targets_without_dimensions_go_to_every_microbatch(wrap: Any) -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        value = target[0] if isinstance(target, tuple) else target
        assert value.dim() == 0
        return torch.as_tensor((output - value).square().mean())

    model = nn.Sequential(Residual(4, 4), Residual(4, 4))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=loss_fn, ranks=2, microbatches=4)
    loss = pipe.step(x, wrap(torch.tensor(0.5))).loss
    parts = [loss_fn(plain(part), torch.tensor(0.5)) / 4 for part in x.tensor_split(4)]
    for part in parts:
        backward(part)
    assert loss == sum(float(part.detach()) for part in parts)
    assert_same_bits(dict(pipe.named_gradients()), gradients(plain))


def test_targets_with_a_graph_are_refused_and_told_to_be_detached() -> None:
    """Each microbatch would run the backward of the teacher's graph again."""
    model, teacher = nn.Sequential(Residual(4, 4), Residual(4, 4)), Residual(4, 4)
    x = torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    with pytest.raises(sl.StagelineError, match=r"the targets come from a graph \(AddBackward0\).*targets\.detach\(\)"):
        pipe.step(x, teacher(x))
    assert all(grad is None for _, grad in pipe.named_gradients())
    assert pipe.evaluate(x, teacher(x)).loss == pipe.step(x, teacher(x).detach()).loss

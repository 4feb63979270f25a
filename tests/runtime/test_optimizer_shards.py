"""Optimizer state that is divided among replicas: the bits are those of replicas that keep all of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer, optimizer

import stageline as sl
from stageline.testing import run_ranks
from support.pipelines import Block, tied_model, token_loss

torch.set_num_threads(1)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(replica: int, step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + 10 * replica + step)
    shape = (samples + replica, 5, 8)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pipeline(source: nn.Module | None = None, **options: Any) -> sl.Pipeline:
    arguments = {"ranks": 2, "replicas": 2, "microbatches": 2, "loss_fn": functional.mse_loss, **options}
    return sl.Pipeline(model() if source is None else source, **arguments)


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def by_name(pipe: sl.Pipeline) -> Optimizer:
    """Groups with weight decay for matrices alone."""
    groups = [
        {
            "params": [value for _, value in pipe.named_parameters() if (value.dim() > 1) == matrix],
            "weight_decay": decay,
        }
        for matrix, decay in ((True, 0.2), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=0.05, foreach=False)


def train(pipe: sl.Pipeline, make: Callable[[Any], Optimizer], data: Any = batch, steps: int = 4) -> dict[str, Any]:
    """Train with clipping and a schedule of learning rates; returns every number, and the state of this process."""
    stepper = make(pipe) if make is by_name else make(pipe.parameters())
    rates = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
    losses, norms = [], []
    for step in range(steps):
        losses.append(pipe.step(*data(pipe.replica, step)).loss)
        norms.append(pipe.clip_grad_norm_(0.05).item())
        stepper.step()
        stepper.zero_grad()
        rates.step()
    return {"losses": losses, "norms": norms, "weights": snapshot(pipe), "state": stepper.state}


def snapshot(pipe: sl.Pipeline) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    same_weights(one["weights"], other["weights"])


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def trains(ranks: int, replicas: int) -> None:
    options: dict[str, Any] = {"ranks": ranks, "replicas": replicas}
    for make in (adamw, momentum, by_name):
        whole = train(pipeline(**options, bucket_mb=0.001), make)
        pipe = pipeline(**options, shard_optimizer=True, bucket_mb=0.001)
        mine = train(pipe, make)
        equal(mine, whole)
        # Every parameter has a state in one replica, and these are balanced.
        sizes = [sum(value.nbytes for slots in result["state"].values() for value in slots.values() if value.dim())
                 for result in (mine, whole)]  # fmt: skip
        assert sizes[0] <= sizes[1] * (1 / replicas + 0.15)
        held = [name for name, parameter in pipe.named_parameters() if parameter in mine["state"]]
        assert held == [name for name, _ in pipe.named_parameters() if pipe.updates(name)]
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, held)
        assert sorted(name for names in gathered for name in names) == sorted(
            name for name, _ in model().named_parameters()
        )


def accumulates() -> None:
    """Over steps that are summed each time, and over steps of which only the last is."""
    results = []
    for shard in (False, True):
        pipe = pipeline(shard_optimizer=shard)
        stepper = momentum(pipe.parameters())
        for syncs in ((True, True), (False, True), (True, False, True)):
            for step, sync in enumerate(syncs):
                pipe.step(*batch(pipe.replica, step), scale=0.5, sync=sync)
            stepper.step()
            stepper.zero_grad(set_to_none=len(syncs) == 2)
        results.append(snapshot(pipe))
    same_weights(*results)


def ties_and_penalties() -> None:
    """A weight that two ranks use, a penalty, frozen parameters, and one that no replica gives a gradient."""

    def tokens(replica: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * replica + step)
        both = torch.randint(7, (4, 5), generator=generator)
        return both, both

    results = []
    for shard in (False, True):
        tied = tied_model()
        pipe = pipeline(
            tied, loss_fn=token_loss, shard_optimizer=shard, penalty=lambda name, value: value.square().sum() * 1e-3
        )
        results.append(train(pipe, adamw, tokens))
    equal(*results)
    results = []
    for shard in (False, True):
        source = model()
        for number, parameter in enumerate(source.parameters()):
            parameter.requires_grad_(number % 3 > 0)
        source[1].unused = nn.Parameter(torch.ones(3))
        results.append(train(pipeline(source, shard_optimizer=shard), adamw))
    equal(*results)


def runs() -> None:
    """`pipe.run`, and a step that it skips because its gradients are not finite."""
    results = []
    for shard in (False, True):
        pipe = pipeline(shard_optimizer=shard)

        def batches(replica: int = pipe.replica) -> Iterable[Any]:
            for step in range(4):
                x, y = batch(replica, step)
                yield {"inputs": x, "targets": y * 1e38 if step == 1 else y, "scale": 1.0}

        pipe.check_finite = False
        with pytest.warns(UserWarning, match="not continuous"):
            run = pipe.run(batches(), optimizer=adamw, max_norm=0.1, skip_not_finite=True)
        figures = [(stats.loss, stats.norm) for stats in run]
        results.append((repr(figures), snapshot(pipe)))
    assert results[0][0] == results[1][0]
    same_weights(results[0][1], results[1][1])


def scales(rank: int, shard: bool) -> None:
    """A GradScaler of torch skips a step in all processes if the gradients of any are not finite."""
    pipe = pipeline(shard_optimizer=shard, check_finite=False)
    stepper = torch.optim.AdamW(pipe.parameters(), lr=0.05, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        pipe.step(*batch(pipe.replica, step), scale=scaler.get_scale())
        before = snapshot(pipe)
        scaler.unscale_(stepper)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        assert any(not torch.equal(value, before[name]) for name, value in pipe.named_parameters())
    hot = [parameter for name, parameter in pipe.named_parameters() if not shard or pipe.updates(name)]
    first: Any = hot[0]
    handle = first.register_hook(lambda grad: grad * float("inf")) if rank == 2 else None
    pipe.step(*batch(pipe.replica, 3), scale=scaler.get_scale())
    before = snapshot(pipe)
    scaler.unscale_(stepper)
    scaler.step(stepper)
    scaler.update()
    same_weights(snapshot(pipe), before)
    assert scaler.get_scale() == 2.0
    if handle is not None:
        handle.remove()


def updates_by_hand() -> None:
    """An update that is not torch's is exchanged before the next use, or on request."""
    results = []
    for shard in (False, True):
        pipe = pipeline(shard_optimizer=shard)
        for step in range(3):
            pipe.step(*batch(pipe.replica, step))
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            if step == 1:
                pipe.broadcast_parameters()
        loss = pipe.evaluate(*batch(pipe.replica, 9)).loss
        results.append((loss, snapshot(pipe), pipe.state_dict(gather=True)))
    assert results[0][0] == results[1][0]
    same_weights(results[0][1], results[1][1])
    same_weights(results[0][2], results[1][2])


def reads_between() -> None:
    """After a step of the optimizer the weights are the same in all replicas; two optimizers share the parameters."""
    results = []
    for shard in (False, True):
        pipe = pipeline(shard_optimizer=shard)
        parameters = list(pipe.parameters())
        own = [value for name, value in pipe.named_parameters() if pipe.updates(name)]
        chosen = parameters if pipe.replica else own  # an optimizer may have only what its replica updates
        halves = [[value for value in parameters[half::2] if value in set(chosen)] for half in (0, 1)]
        steppers = [adamw(halves[0]), momentum(halves[1])]
        averages = {name: value.detach().clone() for name, value in pipe.named_parameters()}
        for step in range(3):
            pipe.step(*batch(pipe.replica, step))
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            for name, value in pipe.named_parameters():
                averages[name].lerp_(value.detach(), 0.5)
        results.append(averages)
    same_weights(*results)


def mistakes(rank: int) -> list[str]:
    texts = []
    for options in ({"shard_optimizer": 1}, {"shard_optimizer": rank == 0}):
        with pytest.raises(sl.StagelineError) as error:
            pipeline(**options)
        texts.append(str(error.value))
    return texts


def everything(rank: int) -> list[str]:
    trains(2, 2)
    trains(1, 4)
    accumulates()
    ties_and_penalties()
    runs()
    scales(rank, shard=False)
    scales(rank, shard=True)
    updates_by_hand()
    reads_between()
    gc.collect()
    assert not optimizer._global_optimizer_post_hooks  # those of pipelines that are gone
    return mistakes(rank)


def test_replicas_that_share_the_optimizer_state_have_the_same_bits() -> None:
    for first, second in run_ranks(everything, 4, timeout=120):
        assert first == "shard_optimizer must be True or False, got 1"
        assert "differ in shard_optimizer: rank 0 has 'True' and rank 1 has 'False'" in second


def test_without_replicas_it_changes_nothing() -> None:
    pipe = sl.Pipeline(model(), loss_fn=functional.mse_loss, ranks=2, microbatches=2, shard_optimizer=True)
    other = sl.Pipeline(copy.deepcopy(model()), loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    equal(train(pipe, adamw), train(other, adamw))
    assert all(pipe.updates(name) for name, _ in pipe.named_parameters())
    pipe.broadcast_parameters()

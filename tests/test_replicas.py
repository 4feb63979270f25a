"""Replicas of a pipeline: what two times two processes compute is what one loop over all their samples would."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from test_pipeline import Block, batch, gradients

RANKS, REPLICAS, MICROBATCHES = 2, 2, 4
LAYERS = 8
FAMILIES = {"1f1b": {}, "zb-h1": {}, "zb-v": {}, "interleaved": {"chunks": 2}, "dualpipe": {}, "chimera": {}}
Gradients = dict[str, Tensor | None]


def model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(layers)))


def data(replica: int, samples: int = 9) -> tuple[Tensor, Tensor]:
    """What a replica is given: samples of its own."""
    x, y = batch()
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (samples, *x.shape[1:])
    return torch.randn(shape, generator=generator), torch.randn((samples, *y.shape[1:]), generator=generator)


def pipeline(made: nn.Module, schedule: str = "1f1b", **options: Any) -> sl.Pipeline:
    given = {"ranks": RANKS, "replicas": REPLICAS, "microbatches": MICROBATCHES, **options}
    return sl.Pipeline(made, loss_fn=functional.mse_loss, schedule=schedule, **given)


def alone(
    plain: nn.Module,
    samples: list[int],
    schedule: sl.Schedule,
    before: list[Gradients] | None = None,
) -> tuple[Gradients, list[float], list[Gradients]]:
    """A plain loop over each replica's samples, weighed by those of all: gradients added over replicas, the losses, and
    each replica's gradients. `before` is what each replica's gradients hold already."""
    total, losses, each = sum(samples), [], []
    for replica, count in enumerate(samples):
        for name, parameter in plain.named_parameters():
            held = None if before is None else before[replica][name]
            parameter.grad = None if held is None else held.clone()
        x, y = data(replica, count)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return functional.mse_loss(output, target) * (len(output) / total)

        ways = schedule.placement.direction.tolist() if schedule.placement.directions > 1 else None
        losses.append(one_process_step(plain, loss_fn, x, y, MICROBATCHES, loss_reduction="sum", directions=ways))
        each.append(gradients(plain))
    return added(each), losses, each


def added(each: list[Gradients]) -> Gradients:
    """Gradients of replicas, added in their order; one that is not there counts as zeros."""
    found: Gradients = {}
    for name in each[0]:
        there = [grad for grad in (one[name] for one in each) if grad is not None]
        found[name] = sum(there[1:], start=there[0]) if there else None
    return found


def mine(pipe: sl.Pipeline, expected: Gradients) -> tuple[Gradients, Gradients]:
    found = dict(pipe.named_gradients())
    return found, {name: expected[name] for name in found}


def families(rank: int) -> dict[str, Any]:
    """Every family twice, with samples that differ between replicas: the bits, and whether both runs have the same."""
    told = {}
    for name, options in FAMILIES.items():
        samples, losses, kept = [9, 6], [], []
        for _ in range(2):
            plain = model()
            pipe = pipeline(copy.deepcopy(plain), name, **options)
            stats = pipe.step(*data(pipe.replica, samples[pipe.replica]))
            expected, alone_losses, _ = alone(plain, samples, pipe.schedule)
            assert_same_bits(*mine(pipe, expected), f"gradients of {name}")
            losses.append(stats.loss)
            kept.append({key: grad.clone() for key, grad in pipe.named_gradients() if grad is not None})
            assert stats.loss == sum(alone_losses)
            assert stats.samples == 15
            assert stats.microbatches == len(stats.losses) == 4
        assert_same_bits(dict(kept[0]), dict(kept[1]))
        told[name] = (losses, sorted(kept[0]))
    return told


def test_gradients_are_those_of_one_loop_over_the_samples_of_all_replicas() -> None:
    found = run_ranks(families, 4)
    for name in FAMILIES:
        assert len({str(each[name][0]) for each in found}) == 1
        held = [set(each[name][1]) for each in found]
        assert held[0] == held[2]
        assert held[1] == held[3]
        assert held[0] | held[1] == {key for key, _ in model().named_parameters()}

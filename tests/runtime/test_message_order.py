"""Messages that a rank takes out of order: parked, and the same bits as the loop."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyTransport, assert_same_bits, run_ranks
from support.gloo_pairs import gloo_payloads
from support.gradients import gradients
from support.instances import examples, in_random_order, of_no_family


def layers(count: int) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


def samples(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(2 * microbatches + 1, 4), torch.randn(2 * microbatches + 1, 4)


def additions(schedule: sl.Schedule, stage: int) -> list[int]:
    """The microbatches in the order in which a stage adds their gradients."""
    program = schedule.programs[schedule.rank_of(stage)]
    actions = [part for entry in program for part in (entry if isinstance(entry, sl.Overlap) else (entry,))]
    return [action.microbatch for action in actions if action.kind in "BW" and action.stage == stage]


def expected(schedule: sl.Schedule, steps: int) -> dict[str, Tensor | None]:
    """The gradients of plain loops over the microbatches, for each stage in its own order."""
    grads: dict[str, Tensor | None] = {}
    for stage in range(schedule.stages):
        model = layers(schedule.stages)
        x, y = samples(schedule.microbatches)
        parts = list(zip(*(part.tensor_split(schedule.microbatches) for part in (x, y)), strict=True))
        for microbatch in steps * additions(schedule, stage):
            xi, yi = parts[microbatch]
            torch.autograd.backward(functional.mse_loss(model(xi), yi) * (len(xi) / len(x)))
        grads |= {name: grad for name, grad in gradients(model).items() if name.startswith(f"{stage}.")}
    return grads


def reordered(ranks: int, seed: int) -> sl.Schedule:
    """A random schedule on this many ranks that takes messages out of order."""
    dice = random.Random(seed)
    while True:
        stages, microbatches = 2 * ranks, dice.randint(3, 5)
        placement = sl.Placement.loop(ranks, chunks=2, microbatches=microbatches)
        schedule = sl.Schedule.from_programs(in_random_order(dice, placement), placement=placement)
        if schedule.stages == stages and sl.verify(schedule).reordered_channels:
            return schedule


@given(of_no_family(ranks=3))
@settings(max_examples=examples(60))
def test_any_order_gives_the_bits_of_the_loop(schedule: sl.Schedule) -> None:
    table = schedule.placement.table
    assume(len(table) == 1)
    assume(len(set(table[0].tolist())) == schedule.ranks)
    model = layers(schedule.stages)
    pipe = sl.Pipeline(list(model), loss_fn=functional.mse_loss, schedule=schedule)
    for _ in range(2):  # a second step finds nothing that the first one parked
        pipe.step(*samples(schedule.microbatches))
    assert_same_bits(gradients(model), expected(schedule, 2))


@pytest.mark.parametrize("seed", range(4))
def test_losses_and_forwards_alone_are_those_of_the_loop(seed: int) -> None:
    schedule = reordered(2, seed)
    model = layers(schedule.stages)
    pipe = sl.Pipeline(list(model), loss_fn=functional.mse_loss, schedule=schedule)
    x, y = samples(schedule.microbatches)
    assert not pipe.certificate.in_channel_order
    output = model(x).detach()
    loss = float(functional.mse_loss(output, y))
    assert pipe.evaluate(x, y).loss == pytest.approx(loss)
    assert torch.allclose(pipe.predict(x), output)
    assert pipe.step(x, y).loss == pytest.approx(loss)
    assert pipe.step(x[:1], y[:1]).microbatches == 1  # of which none can be reordered


def test_steps_that_interlock_keep_the_bits() -> None:
    for seed in range(3):
        schedule = reordered(2, seed)
        batches = [samples(schedule.microbatches)] * 3
        weights: list[dict[str, Tensor | None]] = []
        for interlocks in (True, False):
            model = layers(schedule.stages)
            pipe = sl.Pipeline(list(model), loss_fn=functional.mse_loss, schedule=schedule)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            if interlocks:
                list(pipe.run(batches, optimizer=optimizer))
            else:
                for x, y in batches:
                    pipe.step(x, y)
                    optimizer.step()
                    pipe.zero_grad()
            weights.append({name: parameter.detach() for name, parameter in model.named_parameters()})
        assert_same_bits(weights[0], weights[1])


def train(rank: int, seeds: list[int], apart: bool) -> list[dict[str, Tensor | None]]:
    """On processes; optionally with tensors on separate groups, as NCCL carries them."""
    grads = []
    for seed in seeds:
        schedule = reordered(2, seed)
        model = layers(schedule.stages)
        pipe = sl.Pipeline(list(model), loss_fn=functional.mse_loss, schedule=schedule)
        if apart:
            host: Any = pipe.runner.host
            host._transport._payloads = gloo_payloads()
        for _ in range(2):
            pipe.step(*samples(schedule.microbatches))
        own = [f"{stage}." for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
        grads.append({name: grad for name, grad in gradients(model).items() if name.startswith(tuple(own))})
    return grads


@pytest.mark.parametrize("apart", [False, True], ids=["with their headers", "apart"])
def test_any_order_gives_the_bits_of_the_loop_on_processes(apart: bool) -> None:
    seeds = [0, 1, 2]
    first, second = run_ranks(train, 2, seeds, apart, timeout=240)
    for seed, one, two in zip(seeds, first, second, strict=True):
        assert_same_bits({**one, **two}, expected(reordered(2, seed), 2))


def test_a_message_that_was_not_sent_in_its_turn_is_still_refused() -> None:
    """Parked messages are checked like all others."""
    schedule = reordered(2, 0)
    pipe = sl.Pipeline(list(layers(schedule.stages)), loss_fn=functional.mse_loss, schedule=schedule, deadline=5.0)
    host: Any = pipe.runner.host
    honest = host.transport
    host.transport = lambda rank: FaultyTransport(honest(rank), relabel=lambda head: replace(head, microbatch=99))
    with pytest.raises(sl.PipelineError, match=r"expected the output of .*, but got the output of .* microbatch 99"):
        pipe.step(*samples(schedule.microbatches))

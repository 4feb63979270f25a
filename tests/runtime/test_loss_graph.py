"""Losses without a graph are refused, as `loss.backward()` does; a graph that ends on the way equals the loop's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks

FAMILIES = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "interleaved-zb", "dualpipe", "chimera", "hanayo"]
MICROBATCHES = 8


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Later(nn.Linear):
    """Detaches only some microbatches."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() if float(x.detach().flatten()[0]) > 0 else y


def layers(*kinds: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(8, 8) for kind in kinds))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)


def detached_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.detach(), target)


def count(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target.argmax(-1)).float().mean()


def frozen() -> nn.Sequential:
    return layers(*[nn.Linear] * 4).requires_grad_(False)


CASES: list[tuple[Callable[[], nn.Sequential], Callable[..., Tensor], str]] = [
    (lambda: layers(nn.Linear, nn.Linear, nn.Linear, Detached), functional.mse_loss, "its output does not"),
    (frozen, functional.mse_loss, "every parameter is frozen"),
    (lambda: layers(*[nn.Linear] * 4), detached_loss, "the loss that loss_fn computed does not"),
    (lambda: layers(*[nn.Linear] * 4), count, "the loss that loss_fn computed does not"),
    (lambda: layers(nn.Linear, nn.Linear, nn.Linear, Later), functional.mse_loss, "its output does not"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loss_without_a_graph_is_refused(name: str) -> None:
    for build, loss_fn, why in CASES:
        for recompute in ("none", "stage") if name in ("1f1b", "zb-h1") else ("none",):
            model = build()
            before = copy.deepcopy(model.state_dict())
            pipe = sl.Pipeline(
                model, loss_fn=loss_fn, schedule=name, microbatches=MICROBATCHES, ranks=2, recompute=recompute
            )
            with pytest.raises(sl.PipelineError, match=rf"does not require grad, so no parameter .*{why}"):
                pipe.step(*batch())
            with pytest.raises(RuntimeError, match="does not require grad"):
                one_process_step(build(), loss_fn, *batch(), MICROBATCHES)
            assert_same_bits(dict(model.state_dict()), dict(before))
            pipe.evaluate(*batch())


def test_a_run_stops_and_keeps_the_parameters() -> None:
    model = layers(nn.Linear, nn.Linear, nn.Linear, Detached)
    before = copy.deepcopy(model.state_dict())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", microbatches=MICROBATCHES, ranks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(sl.PipelineError, match="does not require grad"):
        list(pipe.run([batch()] * 3, optimizer=optimizer))
    assert_same_bits(dict(model.state_dict()), dict(before))
    assert pipe.steps == 0


def equal_the_loop(name: str, *kinds: type[nn.Linear], **options: Any) -> dict[str, Tensor | None]:
    """Make a step, compare it with the loop, and return the gradients of the stages that are here."""
    model, plain = layers(*kinds), layers(*kinds)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2, **options)
    pipe.step(*batch())
    placement = pipe.schedule.placement
    directions = placement.direction.tolist() if placement.directions > 1 else None
    one_process_step(plain, functional.mse_loss, *batch(), MICROBATCHES, directions=directions)
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}
    mine = dict(pipe.named_gradients())
    assert_same_bits(mine, {key: expected[key] for key in mine})
    return mine


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_that_detaches_on_the_way_leaves_earlier_ones_without_gradients(name: str) -> None:
    for recompute in ("none", "stage") if name in ("1f1b", "zb-h1") else ("none",):
        gradients = equal_the_loop(name, nn.Linear, Detached, nn.Linear, nn.Linear, recompute=recompute)
        assert [key for key, grad in gradients.items() if grad is None] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        equal_the_loop(name, nn.Linear, Later, nn.Linear, nn.Linear, recompute=recompute)


def on_processes(rank: int) -> list[str]:
    errors = []
    for name in ("1f1b", "zb-v"):
        equal_the_loop(name, nn.Linear, Detached, nn.Linear, nn.Linear)
        for build, loss_fn, _ in CASES[:3]:
            pipe = sl.Pipeline(build(), loss_fn=loss_fn, schedule=name, microbatches=MICROBATCHES, ranks=2)
            try:
                pipe.step(*batch())
            except sl.PipelineError as error:
                errors.append(str(error))
    return errors


def test_processes_refuse_it_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for errors in run_ranks(on_processes, 2):
        assert len(errors) == 6
        for text, (_, _, why) in zip(errors, CASES[:3] * 2, strict=True):
            assert why in text

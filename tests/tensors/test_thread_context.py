"""Settings of the calling thread that the threads of ranks share: thread counts, autocast and grad mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from support.gradients import gradients
from support.pipelines import assert_steps_equal_loop

BOTH = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


@BOTH
def test_convolutions_in_the_threads_of_ranks(schedule: str) -> None:
    """A fresh thread did not know the number of threads that was set."""

    def build() -> list[nn.Module]:
        return [nn.Conv2d(3, 8, 3), nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))]

    assert_steps_equal_loop(build, torch.randn(12, 3, 8, 8), torch.randn(12, 4), schedule=schedule)


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixed_precision_around_a_step_reaches_the_ranks(ranks: int) -> None:
    """It was silently ignored where ranks are threads."""
    seen = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            seen.append(output.dtype)
            return output

    pipe = sl.Pipeline(
        nn.Sequential(Seen(4, 4), Seen(4, 4)),
        loss_fn=lambda output, target: functional.mse_loss(output.float(), target),
        ranks=ranks,
        microbatches=2,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert set(seen) == {torch.bfloat16}


def test_a_step_under_no_grad_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for ranks in (1, 2):
        model.zero_grad()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=ranks, microbatches=2)
        with torch.no_grad():
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        assert all(grad is not None for grad in gradients(model).values())

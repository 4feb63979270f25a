"""On a GPU, the planned memory of a step is the measured one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stageline as sl
from support.pipelines import Block, token_loss

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

WIDTH, CLASSES, MICROBATCHES = 512, 8192, 4


@pytest.mark.parametrize(
    "options",
    [{"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}, {"schedule": "gpipe", "recompute": "stage"}],
)
def test_planned_memory_is_within_ten_percent_of_the_measured(options: dict[str, Any]) -> None:
    gc.collect()
    functional.linear(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))  # allocates workspaces
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    layers = [nn.Embedding(CLASSES, WIDTH), *(Block(WIDTH) for _ in range(6)), nn.Linear(WIDTH, CLASSES)]
    model = nn.Sequential(*layers).to("cuda")
    tokens = torch.randint(0, CLASSES, (8 * MICROBATCHES, 256), device="cuda")
    plan = sl.plan(
        model, tokens[:8], loss_fn=token_loss, targets=tokens[:8], ranks=1, microbatches=MICROBATCHES,
        **{"recompute": "none", **options},
    )  # fmt: skip
    pipe = sl.Pipeline(plan.split(model), loss_fn=token_loss, schedule=plan.schedule, recompute=plan.recompute)
    optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        pipe.step(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(plan.memory[0].total, rel=0.1)

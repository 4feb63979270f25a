"""Mistakes in the use of a pipeline: one error that names the argument and the remedy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from support.pipelines import linear_pipeline


def test_calling_a_pipeline_hints_at_predict() -> None:
    with pytest.raises(sl.StagelineError, match=r"pipe\.predict\(inputs\) returns the outputs"):
        linear_pipeline()(torch.ones(4, 4))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"x": x}, lambda x: [x, 3]])
def test_a_numpy_batch_is_refused_with_the_remedy(wrap: Any) -> None:
    x = np.ones((4, 4), dtype=np.float32)
    pipe = linear_pipeline()
    calls: list[Any] = [pipe.predict, lambda x: pipe.step(x, torch.ones(4, 4)), lambda x: pipe.evaluate(x, x)]
    for call in calls:
        with pytest.raises(
            sl.StagelineError, match=r"(is|are) a numpy array of shape \(4, 4\); .* torch\.from_numpy\(array\)"
        ):
            call(wrap(x))


def test_invalid_arguments_are_named() -> None:
    class Sets(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return frozenset([super().forward(x), x])

    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def make(**options: Any) -> sl.Pipeline:
        layers = options.pop("layers", [nn.Linear(4, 4), nn.Linear(4, 4)])
        return sl.Pipeline(layers, **{"loss_fn": functional.mse_loss, "microbatches": 2, **options})

    wrong: Any = [1]
    mistakes: list[tuple[Any, str]] = [
        (lambda: make().step(None, y), "the inputs are None"),
        (lambda: make().step(x, None), "the targets are None"),
        (lambda: make(loss_fn=None), "loss_fn must be a function of output and target, got None"),
        (lambda: make(deadline="x"), "deadline must be a number of seconds above 0, got 'x'"),
        (lambda: make().step(x, y, stage_kwargs=wrong), "stage_kwargs must be a dict by stage"),
        (lambda: make().load_state_dict(wrong), "a state dict must map names to tensors"),
        (lambda: make(device="gpu"), "device must be a torch.device or its name, such as 'cuda:0', got 'gpu'"),
        (
            lambda: make(device="cuda"),
            r"device is 'cuda', but the model is on cpu; move it with model.to\('cuda'\), or",
        ),
        (lambda: make(seed="a"), "seed must be an integer, got 'a'"),
        (lambda: make(loss_fn=lambda o, t: (o.mean(), {"m": "text"})).step(x, y), "the metric 'm' is 'text'"),
        (lambda: make(loss_fn=lambda o, t: (o.mean(), {"m": o})).step(x, y), "a metric must be one number"),
        (
            lambda: make(layers=[Sets(4, 4), nn.Linear(4, 4)]).step(x, y),
            "stage 0 passes on a frozenset",
        ),
        (lambda: copy.deepcopy(make()), "a copy of its model"),
    ]
    for mistake, words in mistakes:
        with pytest.raises(sl.StagelineError, match=words):
            mistake()
    for wrong_option in ({"microbatches": 0}, {"foo": 3}):
        with pytest.raises(sl.ScheduleError) as caught:
            make(**wrong_option)
        assert "on any number of ranks" not in str(caught.value)
    with torch.inference_mode(), pytest.raises(sl.StagelineError, match="inference_mode"):
        make().step(x, y)

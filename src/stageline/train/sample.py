"""Text from a trained language model: token by token, through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.runtime.pipeline import Pipeline
from stageline.train.losses import logits_of
from stageline.train.task import evaluating


def generate(
    pipe: Pipeline,
    prompt: Sequence[int],
    count: int,
    *,
    length: int,
    tell: Callable[[int], int | None],
    temperature: float = 0.8,
    seed: int = 0,
    give: Callable[[Tensor], Any] = lambda tokens: tokens,
) -> list[int]:
    """Go on from a prompt, with at most `length` tokens in view; every process of a pipeline calls this together.

    Only the last stage knows the logits, so `tell` gives all processes the token that was drawn there (-1 elsewhere),
    or None to end early.
    The same seed gives the same tokens for any number of ranks.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))
    >>> pipe = Pipeline(model, loss_fn=torch.nn.functional.mse_loss, ranks=2, microbatches=1)
    >>> len(generate(pipe, [1], 5, length=3, tell=lambda token: token))
    6
    """
    tokens = list(prompt)
    draw = torch.Generator().manual_seed(seed)
    with evaluating(pipe.model):
        for _ in range(count):
            output = pipe.predict(give(torch.tensor([tokens[-length:]])))
            token = tell(-1 if output is None else _pick(logits_of(output)[0, -1], temperature, draw))
            if token is None:
                break
            tokens.append(token)
    return tokens


def _pick(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    known = logits.detach().float().cpu()
    if temperature <= 0:
        return int(known.argmax())
    return int(torch.multinomial(torch.softmax(known / temperature, 0), 1, generator=draw))

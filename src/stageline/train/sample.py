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
    share: Callable[[int], int | None],
    temperature: float = 0.8,
    seed: int = 0,
    inputs: Callable[[Tensor], Any] = lambda rows: rows,
) -> list[int]:
    """Continue a prompt, with a context of at most `length` tokens; all processes of a pipeline call this together.

    Only the last stage has the logits: `share` gives all processes the token that was drawn there (it is called with -1
    elsewhere), or returns None to stop early. `inputs` turns rows of tokens into the inputs of the model. The same seed
    gives the same tokens for any number of ranks.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))
    >>> pipe = Pipeline(model, loss_fn=torch.nn.functional.mse_loss, ranks=2, microbatches=1)
    >>> len(generate(pipe, [1], 5, length=3, share=lambda token: token))
    6
    """
    tokens = list(prompt)
    draw = torch.Generator().manual_seed(seed)
    with evaluating(pipe.model):
        for _ in range(count):
            output = pipe.predict(inputs(torch.tensor([tokens[-length:]])))
            token = share(-1 if output is None else _pick(logits_of(output)[0, -1], temperature, draw))
            if token is None:
                break
            tokens.append(token)
    return tokens


def _pick(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    logits = logits.detach().float().cpu()
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw))

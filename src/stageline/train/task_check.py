"""Whether a model that is to foretell the next token is shown that token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from stageline.train.losses import logits_of
from stageline.train.task import evaluating


def looks_ahead(model: nn.Module, inputs: Any, *, words: int = 2) -> bool:
    """Whether what a model says of a place changes with the tokens behind it; False where that cannot be found out.

    `inputs` are rows of tokens, or a dict with them as `input_ids`; `words` is how many different tokens there are.

    >>> class Mean(nn.Module):
    ...     def forward(self, tokens):
    ...         return tokens.float().mean(1, keepdim=True).expand(tokens.shape)[..., None]
    >>> looks_ahead(Mean(), torch.arange(8)[None])
    True
    >>> looks_ahead(nn.Embedding(8, 4), torch.arange(8)[None])
    False
    """
    given = inputs if isinstance(inputs, dict) else {"": inputs}
    key = "input_ids" if "input_ids" in given else ""
    tokens = given.get(key)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        return False
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % max(words, 2)
    call: Callable[[Tensor], Any] = (lambda rows: model(**{**given, key: rows})) if key else model
    with evaluating(model), torch.no_grad(), suppress(Exception):  # its first real step says what is wrong with it
        first, second = (logits_of(call(rows))[:, :half] for rows in (tokens, other))
        return first.dim() == 3 and not torch.allclose(first.float(), second.float(), rtol=1e-3, atol=1e-4)
    return False

"""Text from a trained language model, token by token, on the ranks of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.runtime.pipeline import Pipeline
from stageline.train.data.tokenizer import Tokenizer
from stageline.train.gpt import KeyValueCache
from stageline.train.task import evaluating, logits_of

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a character becomes of which only some bytes are decoded."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the same seed draws the same tokens for any number of ranks.

    >>> Sampling(temperature=0).pick(torch.tensor([0.1, 0.7, 0.2]))
    1
    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
        ...
    stageline.StagelineError: top_p is 1.5; it must be above 0 and at most 1
    """

    temperature: float = 0.8
    """0 picks the most likely token."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0 means from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities add up to this."""
    seed: int = 0
    _numbers: torch.Generator = field(default_factory=torch.Generator, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse values that no drawing can have."""
        if not self.temperature >= 0:
            raise StagelineError(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k < 0:
            raise StagelineError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise StagelineError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        self._numbers.manual_seed(self.seed)

    def pick(self, logits: Tensor) -> int:
        """Draw a token."""
        logits = logits.detach().double().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        likely, tokens = torch.sort(logits, descending=True, stable=True)
        if self.top_k:
            likely, tokens = likely[: self.top_k], tokens[: self.top_k]
        chances = torch.softmax(likely / self.temperature, 0)
        if self.top_p < 1:
            before = chances.cumsum(0) - chances
            chances = chances[before < self.top_p]
        return int(tokens[torch.multinomial(chances, 1, generator=self._numbers)])


def generate(
    pipe: Pipeline,
    prompt: Sequence[int],
    count: int,
    *,
    length: int,
    share: Callable[[int], int | None],
    sampling: Sampling,
    inputs: Callable[[Tensor], Any] = lambda rows: rows,
    use_cache: bool = True,
) -> Iterator[int]:
    """Continue a prompt, with a context of at most `length` tokens; all processes of a pipeline call this together.

    Only the last stage has the logits: `share` gives all processes the token that was drawn there (it is called with -1
    elsewhere), or returns None to stop early. `inputs` turns rows of tokens into the inputs of the model. A model with
    a cache of keys and values, such as the built-in GPT, computes only the last token, until the context is full; after
    that, and in other models, every token computes the whole context.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))
    >>> pipe = Pipeline(model, loss_fn=torch.nn.functional.mse_loss, ranks=2, microbatches=1)
    >>> len(list(generate(pipe, [1], 5, length=3, share=lambda token: token, sampling=Sampling())))
    5
    """
    tokens = list(prompt)
    cache = getattr(pipe.model, "cache", None)
    if not isinstance(cache, KeyValueCache):
        cache = KeyValueCache()
        use_cache = False
    cache.restart(enabled=use_cache)
    try:
        with evaluating(pipe.model):
            for _ in range(count):
                if len(tokens) > length:
                    cache.restart(enabled=False)
                context = tokens[cache.num_tokens :] if cache.enabled else tokens[-length:]
                output = pipe.predict(inputs(torch.tensor([context])))
                if cache.enabled:
                    cache.num_tokens = len(tokens)
                token = share(-1 if output is None else sampling.pick(logits_of(output)[0, -1]))
                if token is None:
                    return
                tokens.append(token)
                yield token
    finally:
        cache.restart(enabled=False)


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens as they come, and only whole characters.

    >>> from stageline.train.data.tokenizer import Bytes
    >>> list(text_pieces(Bytes(), [100], iter("éa".encode())))
    ['é', 'a']
    """
    all_tokens = list(prompt)
    shown = len(tokenizer.decode(all_tokens))
    for token in tokens:
        all_tokens.append(token)
        text = tokenizer.decode(all_tokens)
        if len(text) > shown and not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    rest = tokenizer.decode(all_tokens)[shown:]
    if rest:
        yield rest

"""Texts, tokens and tokenizers for tests of data."""

from __future__ import annotations

from typing import Any

import numpy as np

from stageline.train.config.config import Config
from stageline.train.data import Data, File, Tokens, open_data


def job(dataset: str = "text", path: str = "", *, seq_len: int = 4, **more: Any) -> Config:
    config = Config()
    config.training.dataset, config.training.dataset_path, config.training.seq_len = dataset, path, seq_len
    for name, value in more.items():
        section, _, field = name.partition("__")
        assert hasattr(getattr(config, section), field)
        setattr(getattr(config, section), field, value)
    return config


def counting(samples: int, seq_len: int = 3) -> Tokens:
    """Tokens of which each says where it stands."""
    return Tokens(np.arange(samples * seq_len + 1), seq_len, name="counting", digest="counting")


def tokens_of(data: Data) -> list[int]:
    """All tokens of the training data."""
    assert isinstance(data.train, Tokens)
    return [int(token) for token in data.train.array[:]]


def text_of(path: str, **more: Any) -> str:
    data = open_data(job("text", path, **more))
    assert data.tokenizer is not None
    return bytes(tokens_of(data)).replace(b"\xff", b"|").decode()


def train_tokenizer(path: str = "tokenizer.json", separator: str | None = "<|endoftext|>", words: str = "ab") -> File:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [f"the stage of the {words} line"] * 4,
        trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            special_tokens=[separator] if separator else [],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.enable_truncation(8)
    tokenizer.save(path)
    return File(path)

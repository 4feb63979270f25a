"""Sources of numbered samples."""

from __future__ import annotations

import numpy as np

from stageline.train.data import Tokens


def counting(samples: int, seq_len: int = 3) -> Tokens:
    """Tokens of which each says where it stands."""
    return Tokens(np.arange(samples * seq_len + 1), seq_len, name="counting", digest="counting")

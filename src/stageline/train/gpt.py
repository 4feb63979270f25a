"""The built-in language model: a small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class KeyValueCache:
    """The keys and values of earlier tokens, which generation keeps for every block; shared by the parts of a model.

    A forward of the tokens that follow sees them: first all tokens of a prompt, then one at a time.
    """

    def __init__(self) -> None:
        """Disabled: a forward sees its own tokens only."""
        self.enabled = False
        self.num_tokens = 0
        """The number of tokens before those of the next forward."""
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def restart(self, *, enabled: bool) -> None:
        """Forget all tokens."""
        self.enabled, self.num_tokens, self._blocks = enabled, 0, {}

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to those of a block, and return all of them."""
        if block in self._blocks:
            key, value = (torch.cat(pair, 2) for pair in zip(self._blocks[block], (key, value), strict=True))
        self._blocks[block] = key, value
        return key, value


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float, number: int, cache: KeyValueCache) -> None:
        """`heads` must divide `dim`; `number` is the place of this block in the model."""
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.number, self.cache = number, cache
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, tokens, width) to the same shape."""
        samples, tokens, width = x.shape
        # -1: with tensor parallel, a process has some of the heads.
        parts = self.qkv(self.norm1(x)).view(samples, tokens, 3, -1, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if self.cache.enabled:
            key, value = self.cache.extend(self.number, key, value)
        # A token after those in the cache sees all of them.
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=tokens == key.shape[2]
        )
        x = x + self.drop(self.proj(attended.transpose(1, 2).flatten(2)))
        return torch.as_tensor(x + self.drop(self.down(functional.gelu(self.up(self.norm2(x))))))


TP_PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.qkv": "packed_colwise_3",
    "blocks.*.proj": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
"""How tensor parallel cuts the layers."""


class GPT(nn.Module):
    """A GPT that maps tokens to logits.

    >>> model = GPT(vocab_size=256, length=16, dim=32, layers=2, heads=2)
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 256])
    """

    tp_plan = TP_PLAN

    def __init__(
        self, vocab_size: int, length: int, dim: int, layers: int, heads: int, dropout: float = 0.0, tied: bool = False
    ) -> None:
        """`length` is the maximum number of tokens of a sample; `tied` shares the embedding matrix with the head."""
        super().__init__()
        self.length = length
        self.cache = KeyValueCache()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, number, self.cache) for number in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Scale down the layers that write to the residual stream by the root of their number.
                writes_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes_residual else 0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (samples, tokens) to the logits of the next token at every position."""
        first = self.cache.num_tokens
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.norm(x)))

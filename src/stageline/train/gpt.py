"""The built-in language model: a small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        """`heads` must divide `dim`."""
        super().__init__()
        self.heads, self.dropout = heads, dropout
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
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
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
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
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
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.norm(x)))

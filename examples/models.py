"""Ordinary models, each turned into a pipeline in one line: its stages, a check against one process, and a few steps.

python examples/models.py [gpt|uneven|tied|resnet|unet|translator|shared] [--ranks 2] [--schedule 1f1b] [--steps 3]

None of the models depends on Stageline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl

WORDS = 97


class Block(nn.Module):
    def __init__(self, width: int = 16, inner: int = 64, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.drop(self.down(functional.gelu(self.up(self.norm(x))))))


class GPT(nn.Module):
    """As in nanoGPT: all layers in a ModuleDict, with the targets and the loss in the forward."""

    def __init__(self, blocks: int = 4, drop: float = 0.0, tied: bool = False, uneven: bool = False) -> None:
        super().__init__()
        inner = [64 * (1 + index) if uneven else 64 for index in range(blocks)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, 16),
                "wpe": nn.Embedding(64, 16),
                "drop": nn.Dropout(drop),
                "h": nn.ModuleList(Block(inner=size, drop=drop) for size in inner),
                "ln_f": nn.LayerNorm(16),
            }
        )
        self.lm_head = nn.Linear(16, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, words: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(words) + parts.wpe(torch.arange(words.shape[1], device=words.device)))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        loss = None if targets is None else functional.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1))
        return logits, loss


def convolutions(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Skip connections from every level down to the one up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, 4), convolutions(4, 8), convolutions(8, 16)])
        self.middle = convolutions(16, 16)
        self.up = nn.ModuleList([convolutions(32, 8), convolutions(16, 4), convolutions(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return torch.as_tensor(self.head(x))


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        before = width // stride
        self.first, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4), Residual(4))
        self.layer2 = nn.Sequential(Residual(8, 2), Residual(8))
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm(self.stem(x))))
        x = self.average(self.layer2(self.layer1(x)))
        return torch.as_tensor(self.head(torch.flatten(x, 1)))


class Translator(nn.Module):
    """An encoder and a decoder; every block of the decoder reads the output of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 3)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.decoder(self.target(target), self.encoder(self.source(source)))))


class Shared(nn.Module):
    """A model that uses one layer after every second block."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.shared, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            x = self.shared(x) if index % 2 else x
        return torch.as_tensor(self.head(x))


class Outside(nn.Module):
    """A model with residuals and a parameter outside of the blocks, so that all outputs are needed until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return torch.as_tensor(self.head(x))


class HeadFirst(nn.Module):
    """A model that defines its head before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.inside = nn.Linear(8, 2), nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return torch.as_tensor(self.head(x))


def words(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def next_words(output: Any, target: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


EXAMPLES: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, Callable[[Any, Tensor], Tensor]]] = {
    "gpt": (GPT, words(8, 16), words(8, 16), next_words),
    "uneven": (lambda: GPT(uneven=True), words(8, 16), words(8, 16), next_words),
    "tied": (lambda: GPT(tied=True), words(8, 16), words(8, 16), next_words),
    "resnet": (ResNet, noise(8, 3, 16, 16), noise(8, 2), functional.mse_loss),
    "unet": (UNet, noise(8, 3, 16, 16), noise(8, 2, 16, 16), functional.mse_loss),
    "translator": (Translator, (words(8, 12), words(8, 10)), words(8, 10), next_words),
    "shared": (Shared, noise(8, 5), noise(8, 2), functional.mse_loss),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt", choices=list(EXAMPLES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    make, inputs, targets, loss_fn = EXAMPLES[options.model]
    torch.manual_seed(0)
    model = make()
    schedule = sl.schedule(options.schedule, options.ranks, microbatches=4)
    print(sl.split(model, schedule.stages, example=inputs))
    print(sl.check(model, (inputs, targets), ranks=options.ranks, schedule=schedule, loss_fn=loss_fn, example=inputs))
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule=schedule, example=inputs)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(options.steps):
        stats = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {stats.loss:.4f}")


if __name__ == "__main__":
    main()

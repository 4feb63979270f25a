"""What is trained: a model as a function that builds it, its loss, and how a batch is given to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.common.imports import find_function
from stageline.model.huggingface import own_loss
from stageline.model.huggingface_config import HuggingFaceConfig, config_file, read_config
from stageline.train.config.config import Config
from stageline.train.gpt import GPT
from stageline.train.losses import Loss, find_loss, logits_of


@dataclass
class Task:
    """A model to train."""

    name: str
    build: Callable[[], Any]
    """Makes the model, or a tuple that begins with it, as `stageline check` takes it."""
    loss_name: str
    loss_weights: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    assets: dict[str, bytes] = field(default_factory=dict)
    """Small files that belong to the model, such as the config.json by which transformers opens it."""
    configured: HuggingFaceConfig | None = None
    """What a Hugging Face config said of the model, where one did."""
    own: Any = None
    """The loss that came with the model."""
    given: Callable[[Any, Any], Any] | None = None
    """A loss from Python, in place of the one that is named."""

    def make(self) -> nn.Module:
        """Build the model, with random weights."""
        with default_dtype(self.dtype):
            made = self.build()
        parts = made if isinstance(made, tuple) else (made,)
        if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
            raise StagelineError(
                f"{self.name} returned a {type(made).__name__}; it must return a model, or a tuple of a model, its "
                "inputs, targets and loss function, the last ones left out as you like"
            )
        self.own = parts[3] if len(parts) == 4 else None
        return parts[0]

    @property
    def speaks(self) -> bool:
        """Whether its loss is that of a language model."""
        return self.loss_name in ("cross_entropy", "weighted_cross_entropy", "own")

    @property
    def loss(self) -> Loss:
        """The loss; one that comes with the model is known once that was built."""
        if self.given is not None:
            return Loss(self.given, "mean")
        return find_loss(self.loss_name, self.loss_weights, self.own)

    def batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """What a pipeline is given for a batch of data."""
        if self.loss.function is not own_loss or isinstance(inputs, Mapping):
            return inputs, targets
        # The model shifts by itself: a place is given the target of the one before it.
        labels = inputs
        if isinstance(targets, Tensor):
            alike = targets.shape == inputs.shape and targets.dim() == 2
            labels = torch.cat([inputs[:, :1], targets[:, :-1]], 1) if alike else targets
        return {"input_ids": inputs, "labels": labels}, labels

    def check_length(self, tokens: int, seq_len: int) -> None:
        """Refuse rows of more tokens than the model has positions for: it would fail deep inside."""
        found = self.configured
        if found is None or found.positions is None or 2 * tokens <= found.positions:  # no need to look closer
            return
        if found.max_tokens is not None and tokens > found.max_tokens:
            said = f"training.seq_len is {tokens}" if tokens == seq_len else f"the samples have {tokens} tokens"
            less = "training.seq_len" if tokens == seq_len else "the samples"
            raise StagelineError(
                f"{said}, and {found.positions_name} of {found.path} is {found.positions}, which leaves positions for "
                f"{found.max_tokens} tokens; take up to {found.max_tokens} for {less}, or raise {found.positions_name} "
                "in that file"
            )


def make_task(config: Config, vocab_size: int) -> Task:
    """The task that a configuration asks for; `vocab_size` is what the data has.

    >>> task = make_task(Config(), vocab_size=256)
    >>> sum(parameter.numel() for parameter in task.make().parameters())
    1664256
    """
    name, training = config.model.name, config.training
    dtype = getattr(torch, training.dtype)
    build: Callable[[], Any]
    assets: dict[str, bytes] = {}
    configured: HuggingFaceConfig | None = None
    if name == "gpt":
        build = _gpt(config, vocab_size)
    elif (file := config_file(name)) is not None:
        found, assets = _huggingface(file, vocab_size if training.dataset in ("python", "text") else 0)
        build, configured = lambda: found.make(torch.get_default_dtype()), found
    elif ":" in name:
        build = find_function(name)
    else:
        raise StagelineError(
            f"model.name is {name!r}; give gpt, the config.json of a Hugging Face model or its folder, or "
            "package.module:function"
        )
    return Task(name, build, training.loss, tuple(training.loss_weights), dtype, assets, configured)


def _gpt(config: Config, vocab_size: int) -> Callable[[], GPT]:
    model = config.model
    words = model.vocab_size or vocab_size
    if not words:
        raise StagelineError("nothing says how many different tokens the data has: set model.vocab_size")
    if words < vocab_size:
        raise StagelineError(
            f"model.vocab_size is {words} and the data has {vocab_size} words; give at least as many, or 0 for just so"
        )
    if model.dim % model.n_heads:
        raise StagelineError(f"model.dim is {model.dim}, which {model.n_heads} heads (model.n_heads) do not divide")
    weights = config.training.loss_weights
    if weights and len(weights) != words:
        raise StagelineError(
            f"training.loss_weights has {len(weights)} numbers and the model knows {words} words; give one for each"
        )
    return lambda: GPT(
        words, config.training.seq_len, model.dim, model.n_layers, model.n_heads, model.dropout, model.tie_embeddings
    )


def _huggingface(path: Path, vocab_size: int) -> tuple[HuggingFaceConfig, dict[str, bytes]]:
    found = read_config(path)
    if found.vocab_size is not None and found.vocab_size < vocab_size:
        raise StagelineError(
            f"{path} has a vocab_size of {found.vocab_size}, and the data has {vocab_size} words; set "
            "model.tokenizer_path to the tokenizer of that model, or give it more words"
        )
    extra = [each for each in sorted(path.parent.glob("*.json")) if each.name.startswith(("token", "special_"))]
    return found, {"config.json": found.text, **{each.name: each.read_bytes() for each in extra}}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let all modules evaluate, and then each do what it did before: what a user froze stays frozen.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     [each.training for each in model]
    [False, False]
    >>> [each.training for each in model]
    [True, False]
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make what is built inside of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def count_targets(loss: Loss, targets: Any) -> float | None:
    """How much the targets of a batch weigh; None for a loss that is a mean."""
    if loss.count is None:
        return None
    if not isinstance(targets, Tensor):
        raise StagelineError(f"this loss needs targets that are one tensor, got {type(targets).__name__}")
    return loss.count(targets)


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

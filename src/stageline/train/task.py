"""The task of a job: a function that builds the model, its loss, and the arguments that a batch becomes.

Losses over tokens are summed and divided by the number of targets of a whole step, over all microbatches, accumulation
steps and replicas. So a short or padded sample counts by its tokens, wherever it ends up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.common.errors import StagelineError
from stageline.common.imports import find_function
from stageline.model.huggingface import HuggingFaceConfig, adapter_of, config_file, own_loss, read_config
from stageline.runtime.setup.options import Reduction
from stageline.train.checkpoint.export_layouts import ADAPTER_CONFIG
from stageline.train.config.config import Config
from stageline.train.gpt import GPT


@dataclass
class Task:
    """A model to train."""

    name: str
    build: Callable[[], Any]
    """Returns the model, or a tuple that starts with it, as for `stageline check`."""
    loss_name: str
    loss_weights: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    assets: dict[str, bytes] = field(default_factory=dict)
    """Small files that belong to the model, such as the config.json of transformers."""
    configured: HuggingFaceConfig | None = None
    """The Hugging Face config of the model, if it has one."""
    model_loss: Any = None
    """The loss function that `build` returned with the model."""
    user_loss: Callable[[Any, Any], Any] | None = None
    """A loss function that replaces the named one."""
    adapter_names: dict[str, str] = field(default_factory=dict)
    """The names under which peft saves the parameters of an adapter; known once `make` was called."""

    def make(self) -> nn.Module:
        """Build the model, with random weights."""
        with default_dtype(self.dtype):
            built = self.build()
        parts = built if isinstance(built, tuple) else (built,)
        if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
            raise StagelineError(
                f"{self.name} returned {type(built).__name__}; it must return a model, (model, inputs), (model, "
                "inputs, targets) or (model, inputs, targets, loss_fn)"
            )
        self.model_loss = parts[3] if len(parts) == 4 else None
        if (adapter := adapter_of(parts[0])) is not None:
            self.adapter_names = adapter.names
            self.assets[ADAPTER_CONFIG] = adapter.config
        return parts[0]

    @property
    def predicts_tokens(self) -> bool:
        """Whether the loss is that of a language model."""
        return self.loss_name in ("cross_entropy", "weighted_cross_entropy", "own")

    @property
    def loss(self) -> Loss:
        """The loss; one that comes with the model is known once `make` was called."""
        if self.user_loss is not None:
            return Loss(self.user_loss, "mean")
        return find_loss(self.loss_name, self.loss_weights, self.model_loss)

    def batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the inputs and targets of the pipeline for a batch of data."""
        if self.loss.function is not own_loss or isinstance(inputs, Mapping):
            return inputs, targets
        # The model shifts labels itself: each position gets the target of the previous one.
        labels = inputs
        if isinstance(targets, Tensor):
            per_token = targets.shape == inputs.shape and targets.dim() == 2
            labels = torch.cat([inputs[:, :1], targets[:, :-1]], 1) if per_token else targets
        return {"input_ids": inputs, "labels": labels}, labels

    def check_length(self, tokens: int, seq_len: int) -> None:
        """Raise if samples have more tokens than the model has positions for: it would fail deep inside."""
        config = self.configured
        if config is None or config.positions is None or 2 * tokens <= config.positions:  # `max_tokens` is slow
            return
        if config.max_tokens is not None and tokens > config.max_tokens:
            is_option = tokens == seq_len
            subject = f"training.seq_len is {tokens}" if is_option else f"the samples have {tokens} tokens"
            name = config.positions_name
            raise StagelineError(
                f"{subject}, but {name} in {config.path} is {config.positions}, which leaves positions for only "
                f"{config.max_tokens} tokens; use at most {config.max_tokens} for "
                f"{'training.seq_len' if is_option else 'the samples'}, or increase {name} in that file"
            )


def make_task(config: Config, vocab_size: int) -> Task:
    """Return the task of a configuration; `vocab_size` is that of the data."""
    name, training = config.model.name, config.training
    dtype = getattr(torch, training.dtype)
    build: Callable[[], Any]
    assets: dict[str, bytes] = {}
    configured: HuggingFaceConfig | None = None
    if name == "gpt":
        build = _gpt(config, vocab_size)
    elif (file := config_file(name)) is not None:
        hf_config, assets = _huggingface(file, vocab_size if training.dataset in ("python", "text") else 0)
        build, configured = lambda: hf_config.make(torch.get_default_dtype()), hf_config
    else:
        build = find_function(name)
    return Task(name, build, training.loss, tuple(training.loss_weights), dtype, assets, configured)


def _gpt(config: Config, vocab_size: int) -> Callable[[], GPT]:
    model = config.model
    size = model.vocab_size or vocab_size
    if not size:
        raise StagelineError("the vocabulary size of the data is unknown: set model.vocab_size")
    if size < vocab_size:
        raise StagelineError(
            f"model.vocab_size is {size}, but the vocabulary of the data has {vocab_size} tokens; set it to that "
            "number, or to 0"
        )
    weights = config.training.loss_weights
    if weights and len(weights) != size:
        raise StagelineError(
            f"training.loss_weights has {len(weights)} numbers, but the vocabulary has {size} tokens; use one per token"
        )
    return lambda: GPT(
        size, config.training.seq_len, model.dim, model.n_layers, model.n_heads, model.dropout, model.tie_embeddings
    )


def _huggingface(path: Path, vocab_size: int) -> tuple[HuggingFaceConfig, dict[str, bytes]]:
    config = read_config(path)
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise StagelineError(
            f"{path} has a vocab_size of {config.vocab_size}, but the vocabulary of the data has {vocab_size} "
            "tokens; set model.tokenizer_path to the tokenizer of that model, or raise its vocab_size"
        )
    files = [file for file in sorted(path.parent.glob("*.json")) if file.name.startswith(("token", "special_"))]
    return config, {"config.json": config.text, **{file.name: file.read_bytes() for file in files}}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch all modules to evaluation, and afterwards each one back to its own mode.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     [layer.training for layer in model]
    [False, False]
    >>> [layer.training for layer in model]
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
    """Set torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def count_targets(loss: Loss, targets: Any) -> float | None:
    """Return the total weight of the targets of a batch; None for a mean loss."""
    if loss.count is None:
        return None
    if not isinstance(targets, Tensor):
        raise StagelineError(f"this loss needs a single tensor of targets, got {type(targets).__name__}")
    return loss.count(targets)


def looks_ahead(model: nn.Module, inputs: Any, *, vocab_size: int = 2) -> bool:
    """Whether the output at a position changes with the tokens after it; False if the model cannot be run alone.

    `inputs` are rows of tokens, or a dict with them as `input_ids`.

    >>> class Mean(nn.Module):
    ...     def forward(self, tokens):
    ...         return tokens.float().mean(1, keepdim=True).expand(tokens.shape)[..., None]
    >>> looks_ahead(Mean(), torch.arange(8)[None])
    True
    >>> looks_ahead(nn.Embedding(8, 4), torch.arange(8)[None])
    False
    """
    keywords = inputs if isinstance(inputs, dict) else {"": inputs}
    key = "input_ids" if "input_ids" in keywords else ""
    tokens = keywords.get(key)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        return False
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % max(vocab_size, 2)
    call: Callable[[Tensor], Any] = (lambda rows: model(**{**keywords, key: rows})) if key else model
    with evaluating(model), torch.no_grad(), suppress(Exception):  # the first step reports what is wrong
        first, second = (logits_of(call(rows))[:, :half] for rows in (tokens, other))
        return first.dim() == 3 and not torch.allclose(first.float(), second.float(), rtol=1e-3, atol=1e-4)
    return False


IGNORED = -100
"""The target that is ignored, as in torch and transformers."""


@dataclass(frozen=True)
class Loss:
    """A loss function for a pipeline, and how the losses of microbatches are combined."""

    function: Callable[[Any, Any], Any]
    reduction: Reduction
    count: Callable[[Tensor], float] | None = None
    """Returns the total weight of targets, by which the sum is divided."""


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, an output of transformers, a dict or a tuple.

    >>> logits_of({"logits": torch.ones(2)}).shape
    torch.Size([2])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return torch.as_tensor(output["logits"])
    if hasattr(output, "logits"):
        return torch.as_tensor(output.logits)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise StagelineError(
        f"the model returns a {type(output).__name__} without logits; return a tensor, a dict with 'logits' or a "
        "tuple that starts with them, or set training.loss to your own function, as package.module:function"
    )


def find_loss(name: str, weights: tuple[float, ...] = (), model_loss: Any = None) -> Loss:
    """Return the loss with this name; `model_loss` is the model's own loss function, if it has one.

    >>> loss = find_loss("cross_entropy")
    >>> targets = torch.tensor([[1, 2], [3, IGNORED]])
    >>> float(loss.function(torch.zeros(2, 2, 8), targets)) / loss.count(targets)     # the logarithm of 8
    2.079...
    """
    if name in ("cross_entropy", "own") and model_loss is not None:
        return Loss(model_loss, "mean")
    if name == "cross_entropy":
        return Loss(_cross_entropy_sum, "count", lambda targets: float((targets != IGNORED).sum()))
    if name == "weighted_cross_entropy":
        class_weights = torch.tensor(weights, dtype=torch.float32)
        return Loss(partial(_cross_entropy_sum, weights=class_weights), "count", partial(_target_weight, class_weights))
    if name == "mse":
        return Loss(_mean_squared_error, "mean")
    if name == "own":
        return Loss(own_loss, "mean")
    return Loss(find_function(name), "mean")


def _cross_entropy_sum(output: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    logits = logits_of(output)
    if weights is not None and len(weights) != logits.shape[-1]:
        raise StagelineError(
            f"training.loss_weights has {len(weights)} weights, but the model has {logits.shape[-1]} classes; use one "
            "weight per class"
        )
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        None if weights is None else weights.to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _mean_squared_error(output: Any, targets: Tensor) -> Tensor:
    predictions = logits_of(output)
    if predictions.shape != targets.shape:  # torch would broadcast them
        raise StagelineError(
            f"training.loss is mse, but the model returns shape {tuple(predictions.shape)} and the targets have "
            f"{tuple(targets.shape)}; the shapes must be equal"
        )
    return functional.mse_loss(predictions.float(), targets.float())


def _target_weight(weights: Tensor, targets: Tensor) -> float:
    valid = targets[targets != IGNORED].to(weights.device)
    if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < len(weights):
        raise StagelineError(
            f"training.loss_weights has {len(weights)} weights, but targets range from {int(valid.min())} to "
            f"{int(valid.max())}; use one weight per class"
        )
    return float(weights.double()[valid].sum())

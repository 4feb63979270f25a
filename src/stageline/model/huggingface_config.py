"""Hugging Face models described by a config.json; transformers is imported when one is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.common.errors import StagelineError

if TYPE_CHECKING:
    import torch
    from torch import nn

POSITIONS = "max_position_embeddings"


def config_file(name: str | Path) -> Path | None:
    """Return the config.json that a name refers to (a .json file, or a folder that should have one), or None.

    >>> config_file("gpt2/config.json"), config_file("package.module:function")
    (PosixPath('gpt2/config.json'), None)
    """
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" else None


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A model described by its config; not built yet."""

    path: Path
    text: bytes
    """The contents of the file."""
    config: Any
    """The config object of transformers."""
    architecture: str
    """The class that the file names; empty if it names none."""

    def make(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model with random weights: the class named in the config, or else a causal language model.

        `dtype` is its training dtype.

        >>> import json
        >>> sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1}
        >>> _ = Path("config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> type(read_config("config.json").make()).__name__
        'GPT2LMHeadModel'
        """
        import transformers

        if dtype is not None:
            self.config.dtype = dtype
        model_class: Any = getattr(transformers, self.architecture, None) if self.architecture else None
        auto_class: Any = transformers.AutoModelForCausalLM
        model: nn.Module = model_class(self.config) if model_class is not None else auto_class.from_config(self.config)
        return model

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size, if the config has one."""
        size = getattr(self.config, "vocab_size", None)
        return size if isinstance(size, int) else None

    @property
    def positions(self) -> int | None:
        """Number of positions in the config; see `max_tokens` for whether it limits the sequence length."""
        count = getattr(self.config, POSITIONS, None)
        return count if isinstance(count, int) else None

    @property
    def positions_name(self) -> str:
        """The name of that option in the config.

        >>> import json
        >>> _ = Path("config.json").write_text(json.dumps({"model_type": "gpt2"}))
        >>> read_config("config.json").positions_name
        'n_positions'
        """
        return str(getattr(self.config, "attribute_map", {}).get(POSITIONS, POSITIONS))

    @cached_property
    def max_tokens(self) -> int | None:
        """Maximum sequence length, from the tables of position embeddings, learned or fixed.

        None if positions are computed, as rotary ones are, so that any length is possible.

        >>> import json
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        >>> for kind in ("gpt2", "roberta", "llama"):
        ...     _ = Path("config.json").write_text(json.dumps({"model_type": kind, "intermediate_size": 8, **sizes}))
        ...     print(kind, read_config("config.json").max_tokens)
        gpt2 16
        roberta 14
        llama None
        """
        import torch

        if self.positions is None:
            return None
        with torch.device("meta"):
            model = self.make()
        lengths = []
        for name, module in model.named_modules():
            leaf_name = name.rpartition(".")[2]
            if isinstance(module, torch.nn.Embedding) and ("pos" in leaf_name or leaf_name == "wpe"):
                # Some models start counting after the padding index; others reserve rows.
                offset = 0 if module.padding_idx is None else module.padding_idx + 1
                lengths.append(min(self.positions, module.num_embeddings - offset))
        tables = [table for name, table in model.named_buffers() if name.rpartition(".")[2] == "embed_positions"]
        return min([*lengths, *(len(table) for table in tables)], default=None)


def read_config(path: str | Path) -> HuggingFaceConfig:
    """Read a config.json; raise `StagelineError` if it is invalid.

    >>> _ = Path("config.json").write_text('{"model_type": "gpt22"}')
    >>> read_config("config.json")
    Traceback (most recent call last):
    ...
    stageline.StagelineError: config.json is not a config that transformers knows: ...
    """
    file = Path(path)
    try:
        text = file.read_bytes()
        values = json.loads(text)
    except (OSError, ValueError) as error:
        raise StagelineError(f"cannot read the config {file}: {error}") from error
    try:
        import transformers
    except ImportError as error:
        raise StagelineError(
            "a Hugging Face config needs transformers: pip install 'stageline[huggingface]'"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**{**values, "model_type": values["model_type"]})
    except (KeyError, ValueError, TypeError) as error:
        raise StagelineError(f"{file} is not a config that transformers knows: {error}") from error
    return HuggingFaceConfig(file, text, config, next(iter(values.get("architectures") or []), ""))

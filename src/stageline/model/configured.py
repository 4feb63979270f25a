"""Models of Hugging Face's transformers that a config.json describes; the library is imported when one is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.errors import StagelineError

if TYPE_CHECKING:
    import torch
    from torch import nn

POSITIONS = "max_position_embeddings"


def config_file(name: str | Path) -> Path | None:
    """The file that a name stands for if it is that of a config, or of a folder that should have one.

    >>> config_file("gpt2/config.json"), config_file("package.module:function")
    (PosixPath('gpt2/config.json'), None)
    """
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" else None


@dataclass(frozen=True)
class Configured:
    """A model as its config describes it; nothing of it is built yet."""

    path: Path
    text: bytes
    """The file, as it is."""
    config: Any
    """What the library made of it."""
    architecture: str
    """The class that the file names; empty where it names none."""

    def make(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build it with random weights: of the class named, or else as a language model. `dtype` is what it trains in.

        >>> import json
        >>> sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1}
        >>> _ = Path("config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> type(read_config("config.json").make()).__name__
        'GPT2LMHeadModel'
        """
        import transformers

        if dtype is not None:
            self.config.dtype = dtype
        kind: Any = getattr(transformers, self.architecture, None) if self.architecture else None
        automatic: Any = transformers.AutoModelForCausalLM
        made: nn.Module = kind(self.config) if kind is not None else automatic.from_config(self.config)
        return made

    @property
    def vocab_size(self) -> int | None:
        """How many words it knows, if it says so."""
        found = getattr(self.config, "vocab_size", None)
        return found if isinstance(found, int) else None

    @property
    def positions(self) -> int | None:
        """How many positions the config speaks of; whether a row may be longer is for `longest` to say."""
        found = getattr(self.config, POSITIONS, None)
        return found if isinstance(found, int) else None

    @property
    def positions_name(self) -> str:
        """What the config calls them.

        >>> import json
        >>> _ = Path("config.json").write_text(json.dumps({"model_type": "gpt2"}))
        >>> read_config("config.json").positions_name
        'n_positions'
        """
        return str(getattr(self.config, "attribute_map", {}).get(POSITIONS, POSITIONS))

    @cached_property
    def longest(self) -> int | None:
        """The most tokens that a row may have: those for which there is a position in a table of them, learned or not.

        None where positions are computed, as rotary ones are, so that any row can be given.

        >>> import json
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        >>> for kind in ("gpt2", "roberta", "llama"):
        ...     _ = Path("config.json").write_text(json.dumps({"model_type": kind, "intermediate_size": 8, **sizes}))
        ...     print(kind, read_config("config.json").longest)
        gpt2 16
        roberta 14
        llama None
        """
        import torch

        if self.positions is None:
            return None
        with torch.device("meta"):
            model = self.make()
        found = []
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if isinstance(module, torch.nn.Embedding) and ("pos" in last or last == "wpe"):
                # Some count on from the place of the padding; others keep rows for themselves.
                before = 0 if module.padding_idx is None else module.padding_idx + 1
                found.append(min(self.positions, module.num_embeddings - before))
        tables = [table for name, table in model.named_buffers() if name.rpartition(".")[2] == "embed_positions"]
        return min([*found, *(len(table) for table in tables)], default=None)


def read_config(path: str | Path) -> Configured:
    """Read a config.json, or say what is wrong with it.

    >>> _ = Path("config.json").write_text('{"model_type": "gpt22"}')
    >>> read_config("config.json")
    Traceback (most recent call last):
    ...
    stageline.errors.StagelineError: config.json is no config that transformers knows: ...
    """
    file = Path(path)
    try:
        text = file.read_bytes()
        given = json.loads(text)
    except (OSError, ValueError) as error:
        raise StagelineError(f"cannot read the config {file}: {error}") from error
    try:
        import transformers
    except ImportError as error:
        raise StagelineError(
            "a Hugging Face config needs transformers: pip install 'stageline[huggingface]'"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**{**given, "model_type": given["model_type"]})
    except (KeyError, ValueError, TypeError) as error:
        raise StagelineError(f"{file} is no config that transformers knows: {error}") from error
    return Configured(file, text, config, next(iter(given.get("architectures") or []), ""))

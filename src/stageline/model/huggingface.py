"""Models of Hugging Face transformers: special cases of their forward, and models described by a config.json.

The library is imported only when a config is read. Its models collect router logits, hidden states and attentions with
hooks while their forward runs. What a unit collects on its stage is treated as part of its output, and is collected
again when a later stage runs the forward.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import torch
from torch import nn

from stageline.common.errors import StagelineError, shorten
from stageline.common.imports import is_hub_name
from stageline.common.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from torch import nn


def pretrained(model: nn.Module) -> nn.Module | None:
    """Return the library's model inside of a model: the model itself, or the one that an adapter wraps."""
    return next(_pretrained_in(model), None)


def _pretrained_in(model: nn.Module) -> Iterator[nn.Module]:
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is not None:
        yield from (module for module in model.modules() if isinstance(module, library.PreTrainedModel))


def prepare(model: nn.Module) -> None:
    """Install the library's hooks that collect outputs once, before frames are copied."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    for module in _pretrained_in(model) if capturing is not None else ():
        capturing.maybe_install_capturing_hooks(module)


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """Return keyword arguments for batches that omit them: without a cache, because stages cannot send one.

    A model of several models, such as one for images and text, passes the keyword to the one with a cache.
    """
    inner = pretrained(model)
    if inner is None:
        return {}
    parameters = inspect.signature(inner.forward).parameters
    passes_keywords = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "use_cache" in parameters or (passes_keywords and _caches(getattr(inner, "config", None))):
        return {"use_cache": False}
    return {}


def _caches(config: Any) -> bool:
    """Whether a nested config enables a cache."""
    inside = [value for value in vars(config).values() if hasattr(value, "to_dict")] if config is not None else []
    return any(getattr(value, "use_cache", False) or _caches(value) for value in inside)


def refuse_cache(value: Any, defaults: dict[str, Any]) -> None:
    """Refuse a batch that enables the cache, which stages cannot pass on."""
    if "use_cache" in defaults and isinstance(value, dict) and value.get("use_cache"):
        raise StagelineError(
            f"the batch has use_cache={value['use_cache']!r}; a pipeline does not support a key-value cache, and "
            "training does not need one; omit use_cache, or set it to False"
        )


class _OnHost:
    """A model that claims to be on the host, so that the tensors it creates have contents even if it is on meta."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def example_of(model: nn.Module) -> Any:
    """Return the small batch that a model of the library provides for tracing; None for other models."""
    inner = pretrained(model)
    property_of = inspect.getattr_static(type(inner), "dummy_inputs", None)
    if inner is None or not isinstance(property_of, property) or property_of.fget is None:
        return None
    batch = property_of.fget(_OnHost(inner))
    if not isinstance(batch, dict):
        return None
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)} | defaults_of(model)


NO_LOSS = "has no loss"
"""Part of the error of `own_loss`, by which callers recognize it."""


def own_loss(output: Any, target: Any = None) -> torch.Tensor:
    """Return the loss that a model computes from labels among its inputs: `Pipeline(model, loss_fn=sl.own_loss, …)`.

    >>> own_loss({"loss": torch.tensor(2.0)})
    tensor(2.)
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise StagelineError(
            f"the model's output, a {type(output).__name__}, {NO_LOSS}; give it labels, or pass another loss_fn"
        )
    return loss


Collected = dict[str, list[Any]]


def collected() -> Collected:
    """Return the lists in which the library currently collects outputs, by name."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return {}
    collector = capturing._active_collector.get()  # private in transformers 5
    return {} if not collector else {name: items for name, items in collector.items() if isinstance(items, list)}


def collects(hook: Any) -> bool:
    """Whether a hook is one of the library's that collect outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def lengths(lists: Collected) -> dict[str, int]:
    """Return the lengths of the lists."""
    return {name: len(items) for name, items in lists.items()}


def since(before: dict[str, int]) -> dict[str, tuple[Any, ...]]:
    """Return what was collected since `lengths` returned `before`."""
    return {name: tuple(items[before[name] :]) for name, items in collected().items() if len(items) > before[name]}


def collect(outputs: dict[str, tuple[Any, ...]]) -> None:
    """Add what a unit of another stage collected."""
    lists = collected()
    for name, items in outputs.items():
        if name in lists:
            lists[name].extend(items)


# Adapters of peft


@dataclass(frozen=True)
class Adapter:
    """The adapter in a model, as peft saves it."""

    config: bytes
    """The contents of adapter_config.json."""
    names: dict[str, str]
    """The name in adapter_model.safetensors of each of its parameters."""


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the active adapter of a model of peft; None for other models."""
    library: Any = sys.modules.get("peft")
    if library is None or not isinstance(model, library.PeftModel):
        return None
    peft_model: Any = model
    config = copy(peft_model.peft_config[peft_model.active_adapter])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(peft_model.get_base_model(), "name_or_path", None)
    with TemporaryFolder("adapter-") as folder:
        config.save_pretrained(str(folder))
        text = (folder / "adapter_config.json").read_bytes()
    state = model.state_dict(keep_vars=True)
    saved = library.get_peft_model_state_dict(
        model, dict(state), adapter_name=peft_model.active_adapter, save_embedding_layers=False
    )
    places = {id(tensor): name for name, tensor in state.items()}
    return Adapter(text, {places[id(tensor)]: name for name, tensor in saved.items() if id(tensor) in places})


# Models described by a config.json

POSITIONS = "max_position_embeddings"


def config_file(name: str | Path) -> Path | None:
    """Return the config.json that a name refers to: a .json file, a folder that should have one, or a hub name.

    None for other names. The files of a hub name are downloaded, or taken from the cache of the hub's library.
    """
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.suffix == ".json":
        return path
    return hub_files(str(name), CONFIG_FILES) / "config.json" if is_hub_name(str(name)) else None


CONFIG_FILES = ("config.json", "tokenizer*.json", "special_tokens_map.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
HUB = "https://huggingface.co"
PATIENCE = 5.0
"""Seconds to wait for an answer of the hub."""


def hub_files(name: str, patterns: Sequence[str]) -> Path:
    """Return a folder with files of a model of the hub; raise at once, in one sentence, if they cannot be had."""
    try:
        library: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise StagelineError(
            f"{name} is a name on the Hugging Face hub, which needs transformers; run pip install "
            "'stageline[huggingface]'"
        ) from None
    try:
        return Path(library.snapshot_download(name, allow_patterns=list(patterns), local_files_only=_hub_refuses(name)))
    except StagelineError:
        raise
    except Exception as error:  # of several libraries
        raise StagelineError(f"cannot load {name} from the Hugging Face hub: {shorten(str(error), 300)}") from None


def _hub_refuses(name: str) -> bool:
    """Ask the hub for a model, once; if it gives no answer, return whether the files are in the local cache."""
    library: Any = importlib.import_module("huggingface_hub")
    endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    cached = isinstance(library.try_to_load_from_cache(name, "config.json"), str)
    headers = {"User-Agent": "stageline"}
    if token := library.get_token():
        headers["Authorization"] = f"Bearer {token}"
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "ON", "YES"):
            raise OSError("HF_HUB_OFFLINE is set")
        url = f"{endpoint}/{name}/resolve/main/config.json"
        with urlopen(Request(url, headers=headers, method="HEAD"), timeout=PATIENCE):
            return False
    except OSError as error:
        if cached:
            return True
        code = getattr(error, "code", None)
        if code == 404:
            raise StagelineError(
                f"there is no folder {name}, and the Hugging Face hub has no model of that name with a config.json"
            ) from None
        if code in (401, 403):
            raise StagelineError(
                f"the Hugging Face hub denied access to {name} (HTTP {code}); request access on its page, and set "
                "HF_TOKEN"
            ) from None
        raise StagelineError(
            f"there is no folder {name}, and the Hugging Face hub at {endpoint} cannot be reached to load a model of "
            f"that name: {getattr(error, 'reason', error)}; download it on a machine that can reach the hub (hf "
            f"download {name} --local-dir FOLDER), and pass that folder instead of the name"
        ) from None


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
        """The name of that option in the config."""
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


EXPECTED = "the config.json of a Hugging Face model, or for stageline plan a file that stageline profile wrote"


def read_config(path: str | Path) -> HuggingFaceConfig:
    """Read a config.json; raise `StagelineError` if it is invalid."""
    file = Path(path)
    try:
        text = file.read_bytes()
        values = json.loads(text)
    except OSError as error:
        raise StagelineError(f"cannot read {file}: {error.strerror or error}; expected {EXPECTED}") from error
    except ValueError as error:
        raise StagelineError(f"{file} is not JSON ({error}); expected {EXPECTED}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise StagelineError(f"{file} has no 'model_type'; expected {EXPECTED}")
    try:
        import transformers
    except ImportError as error:
        raise StagelineError(
            "a Hugging Face config needs transformers; run pip install 'stageline[huggingface]'"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**values)
    except (KeyError, ValueError, TypeError) as error:
        raise StagelineError(f"{file} is not a config that transformers supports: {error}") from error
    return HuggingFaceConfig(file, text, config, next(iter(values.get("architectures") or []), ""))

"""The layouts in which other libraries open a model: GPT-2's of transformers, adapters of peft.

A layout maps the names of a checkpoint to the names of the other library, and adds the files that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stageline.train.checkpoint.shards import TensorSource, dtype_name

ADAPTER_CONFIG = "adapter_config.json"
BLOCK_NAMES = {
    "norm1.weight": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "qkv.weight": "attn.c_attn.weight",
    "proj.weight": "attn.c_proj.weight",
    "norm2.weight": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "up.weight": "mlp.c_fc.weight",
    "up.bias": "mlp.c_fc.bias",
    "down.weight": "mlp.c_proj.weight",
    "down.bias": "mlp.c_proj.bias",
}
"""The names of a block of the built-in GPT, and of one of GPT-2."""
TRANSPOSED = ("qkv.weight", "proj.weight", "up.weight", "down.weight")
"""GPT-2 stores these as (inputs, outputs)."""
OUTER_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Export:
    """A model as another library opens it."""

    tensors: list[TensorSource]
    files: dict[str, bytes]
    """Small files beside the tensors."""
    stem: str = "model"
    """How the names of the tensor files begin."""


def huggingface_export(tensors: Sequence[TensorSource], files: Mapping[str, bytes], state: Any) -> Export | None:
    """Return a model as `from_pretrained` of transformers, or of peft for an adapter, opens it; None if it cannot be.

    `state` is the state of the job that a checkpoint holds.
    """
    job = state if isinstance(state, dict) else {}
    if isinstance(names := job.get("adapter"), dict) and ADAPTER_CONFIG in files:
        adapter = [replace(tensor, key=names[tensor.key]) for tensor in tensors if tensor.key in names]
        return Export(adapter, {ADAPTER_CONFIG: files[ADAPTER_CONFIG]}, "adapter_model")
    if "config.json" in files:
        return Export(list(tensors), dict(files))
    model = job.get("config", {}).get("model", {})
    if model.get("name") == "gpt" and is_gpt([tensor.key for tensor in tensors]):
        return gpt2_export(tensors, files, heads=int(model["n_heads"]), dropout=float(model["dropout"]))
    return None


def is_gpt(names: Sequence[str]) -> bool:
    """Whether these are the parameters of the built-in GPT.

    >>> is_gpt(["tokens.weight", "blocks.0.qkv.weight"]), is_gpt(["tokens.weight", "blocks.0.router.weight"])
    (True, False)
    """
    return all(name in OUTER_NAMES or _block_part(name) in BLOCK_NAMES for name in names)


def _block_part(name: str) -> str:
    """Return the name of a parameter inside its block; empty if it is in none."""
    blocks, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    return part if blocks == "blocks" and number.isdecimal() else ""


def gpt2_export(
    tensors: Sequence[TensorSource], files: Mapping[str, bytes], *, heads: int, dropout: float = 0.0
) -> Export:
    """Return the built-in GPT as a GPT-2, with the same logits.

    The built-in GPT has no bias in its attention: GPT-2 gets zeros. Its activation is the exact GELU.
    """
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    exported: list[TensorSource] = []
    for tensor in tensors:
        part = _block_part(tensor.key)
        if not part:
            exported.append(replace(tensor, key=OUTER_NAMES[tensor.key]))
            continue
        name = f"transformer.h.{tensor.key.split('.')[1]}.{BLOCK_NAMES[part]}"
        exported.append(_transposed(tensor, name) if part in TRANSPOSED else replace(tensor, key=name))
        if part in ("qkv.weight", "proj.weight"):
            exported.append(_zeros(name.removesuffix("weight") + "bias", tensor))
    vocab_size, width = shapes["tokens.weight"]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": shapes["positions.weight"][0],
        "n_embd": width,
        "n_layer": sum(name.endswith(".qkv.weight") for name in shapes),
        "n_head": heads,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        "tie_word_embeddings": "head.weight" not in shapes,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype_name(tensors[0].dtype),
    }
    return Export(exported, {**files, "config.json": json.dumps(config, indent=2).encode() + b"\n"})


def _transposed(tensor: TensorSource, name: str) -> TensorSource:
    return TensorSource(name, tensor.dtype, tensor.shape[::-1], lambda: tensor.take().T)


def _zeros(name: str, weight: TensorSource) -> TensorSource:
    shape = weight.shape[:1]
    return TensorSource(name, weight.dtype, shape, lambda: torch.zeros(shape, dtype=weight.dtype))

"""Flex attention's BlockMask as a part of a batch: cut along its first dimension, the samples."""

from __future__ import annotations

import sys
from typing import Any

import torch

from stageline.common.errors import StagelineError


def is_mask(value: Any) -> bool:
    """Whether a value is a BlockMask; does not import flex attention."""
    library: Any = sys.modules.get("torch.nn.attention.flex_attention")
    return library is not None and isinstance(value, library.BlockMask)


def mask_samples(mask: Any) -> int | None:
    """How many samples a mask is for; None if all of them share one mask."""
    blocks = mask.kv_num_blocks
    return int(blocks.shape[0]) if blocks.dim() > 2 and blocks.shape[0] > 1 else None


def cut_mask(mask: Any, parts: int, filled: int) -> list[Any]:
    """The first `filled` of `parts` parts of a mask; each calls the mask's function with samples of the whole batch."""
    if mask_samples(mask) is None:
        return [mask] * filled
    if getattr(mask, "dq_write_order", None) is not None or getattr(mask, "dq_kv_order", None) is not None:
        raise StagelineError(
            "a BlockMask with an order of dQ writes cannot be cut into microbatches; build it without dq_write_order"
        )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    columns = {name: torch.tensor_split(tensor, parts) for name in names if (tensor := getattr(mask, name)) is not None}
    options: dict[str, Any] = {} if mask.q_indices is not None else {"compute_q_blocks": False}
    masks, first = [], 0
    for part in range(filled):
        tensors = {name: column[part] for name, column in columns.items()}
        masks.append(
            type(mask).from_kv_blocks(
                **tensors,
                BLOCK_SIZE=mask.BLOCK_SIZE,
                mask_mod=_shifted(mask.mask_mod, first),
                seq_lengths=mask.seq_lengths,
                **options,
            )
        )
        first += int(tensors["kv_num_blocks"].shape[0])
    return masks


def _shifted(function: Any, first: int) -> Any:
    """The function of a mask, for samples counted from `first`."""

    def shifted(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return function(sample + first, head, query, key)

    return shifted if first else function

"""How much memory a rank takes while it builds its share of a Llama, against the share itself.

python benchmarks/building.py [--ranks 4] [--layers 40] [--width 2048] [--dtype bfloat16]

Every rank is a process of its own and builds a contiguous group of layers; the embedding goes with the first, the norm
and the head with the last. The peak is the kernel's high-water mark of the process, which is reset before. Needs
transformers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stageline.model.build.build import describe
from stageline.testing import run_ranks


def resident(key: str) -> int:
    """The resident size of this process in bytes, now (VmRSS) or at its highest (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def llama(layers: int, width: int, dtype: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert isinstance(model, nn.Module)
    return model


def build_share(rank: int, ranks: int, layers: int, width: int, dtype: str) -> dict[str, Any]:
    llama(1, 64, dtype)  # what transformers imports when it is first used
    describe(lambda: llama(1, 64, dtype)).materialise()
    first, last = layers * rank // ranks, layers * (rank + 1) // ranks

    def owns(name: str) -> bool:
        if name.startswith("model.layers."):
            return first <= int(name.split(".")[2]) < last
        if name.startswith("model.embed_tokens."):
            return rank == 0
        return name.startswith("model.rotary_emb.") or rank == ranks - 1

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from now
    before = resident("VmRSS")
    start = time.perf_counter()
    description = describe(lambda: llama(layers, width, dtype))
    described = time.perf_counter() - start
    share = description.nbytes(owns)
    model = description.materialise(owns, seed=1)
    seconds = time.perf_counter() - start
    tensors = [*model.parameters(), *model.buffers()]
    held = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if not each.is_meta}
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "share": share,
        "held": sum(held.values()),
        "before": before,
        "peak": resident("VmHWM") - before,
        "described": described,
        "seconds": seconds,
        "finite": all(bool(torch.isfinite(each).all()) for each in model.parameters() if not each.is_meta),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    found = run_ranks(build_share, given.ranks, given.ranks, given.layers, given.width, given.dtype, timeout=1800.0)
    print(f"Llama of {found[0]['parameters'] / 1e9:.2f} billion parameters, {given.dtype}, {given.ranks} processes")
    print("rank  share MiB  after imports MiB  peak of building MiB  peak/share  held = share  described s  built s")
    for rank, each in enumerate(found):
        print(
            f"{rank:4} {each['share'] / 2**20:10.1f} {each['before'] / 2**20:18.1f} {each['peak'] / 2**20:21.1f}"
            f" {each['peak'] / each['share']:11.3f}  {each['held'] == each['share'] and each['finite']!s:>12}"
            f" {each['described']:12.2f} {each['seconds']:8.1f}"
        )
    worst = max(each["peak"] / each["share"] for each in found)
    print(f"highest peak/share {worst:.3f}: {'under' if worst < 1.10 else 'NOT under'} 1.10")


if __name__ == "__main__":
    main()

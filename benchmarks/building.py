"""Peak memory of a rank that builds its share of a Llama, compared with the size of the share.

python benchmarks/building.py [--ranks 4] [--layers 40] [--width 2048] [--dtype bfloat16]

Every rank is a process and builds a contiguous group of layers; the first also holds the embedding, the last the norm
and the head. The peak is the kernel's high-water mark of the process, reset before the build. Needs transformers.
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
    held = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta
    }
    return {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "share": share,
        "held": sum(held.values()),
        "before": before,
        "peak": resident("VmHWM") - before,
        "described": described,
        "seconds": seconds,
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in model.parameters() if not tensor.is_meta),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    results = run_ranks(
        build_share, options.ranks, options.ranks, options.layers, options.width, options.dtype, timeout=1800.0
    )
    print(
        f"Llama of {results[0]['parameters'] / 1e9:.2f} billion parameters, {options.dtype}, {options.ranks} processes"
    )
    print("rank  share MiB  after imports MiB  peak of building MiB  peak/share  held = share  described s  built s")
    for rank, result in enumerate(results):
        print(
            f"{rank:4} {result['share'] / 2**20:10.1f} {result['before'] / 2**20:18.1f} {result['peak'] / 2**20:21.1f}"
            f" {result['peak'] / result['share']:11.3f}  {result['held'] == result['share'] and result['finite']!s:>12}"
            f" {result['described']:12.2f} {result['seconds']:8.1f}"
        )
    worst = max(result["peak"] / result["share"] for result in results)
    print(f"highest peak/share {worst:.3f}: {'under' if worst < 1.10 else 'NOT under'} 1.10")


if __name__ == "__main__":
    main()

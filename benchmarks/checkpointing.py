"""How fast a checkpoint is written, and for how long it blocks training.

python benchmarks/checkpointing.py [--megabytes 512] [--repeats 5] [--folder FOLDER] [--device cpu] [--json]

The same tensors (a model and two optimizer slots for each parameter) are written in turn with safetensors' own
save_file, with save_file and a sync, and as a checkpoint, which is synced, checksummed and published atomically. A
plain copy into fresh memory and one into reused memory are shown for comparison with the time that `save` blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from stageline.train.checkpoint import Writer, newest


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def synced(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def measure(folder: Path, tensors: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    names = [name for name in tensors if "/" not in name]
    model = {name: tensors[name] for name in names}
    optimizer = {name: {slot: tensors[f"{name}/{slot}"] for slot in ("exp_avg", "exp_avg_sq")} for name in names}
    taken: dict[str, list[float]] = {}
    used = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}

    def note(what: str, do: Callable[[], object], turn: int) -> None:
        took = seconds(do)
        if turn:  # the first one warms up
            taken.setdefault(what, []).append(took)

    with Writer(folder / "checkpoint", keep=1) as writer:
        for turn in range(repeats + 1):
            host = {name: tensor.cpu() for name, tensor in tensors.items()}
            path = folder / f"{turn}.safetensors"
            note("save_file", lambda path=path, host=host: save_file(host, path), turn)  # type: ignore[misc]
            path.unlink()
            note("save_file and fsync", lambda path=path, host=host: synced(host, path), turn)  # type: ignore[misc]
            path.unlink()
            del host
            note(
                "copy, fresh memory",
                lambda: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()},
                turn,
            )
            note("copy, used memory", lambda: [used[name].copy_(tensor) for name, tensor in tensors.items()], turn)
            began = time.perf_counter()
            note("save blocks", lambda turn=turn: writer.save(turn, model, optimizer), turn)  # type: ignore[misc]
            writer.wait()
            if turn:
                taken.setdefault("checkpoint, to its publication", []).append(time.perf_counter() - began)
            checkpoint = newest(folder / "checkpoint", deep=False)
            assert checkpoint is not None
            with checkpoint:
                note("verify, every byte", checkpoint.verify, turn)
                note("read the model", checkpoint.read_model, turn)
    return {what: statistics.median(times) for what, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="size of model and optimizer together (default 512)")
    parser.add_argument("--repeats", type=int, default=5, help="of each; the median counts (default 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    layers = 24
    rows = max(1, options.megabytes * 10**6 // (layers * 3 * 4 * 1024))
    names = [f"layers.{layer}.weight{slot}" for layer in range(layers) for slot in ("", "/exp_avg", "/exp_avg_sq")]
    tensors = {name: torch.randn(rows, 1024, device=options.device) for name in names}
    size = sum(tensor.nbytes for tensor in tensors.values())
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        medians = measure(folder, tensors, options.repeats)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"bytes": size, **medians}))
        return
    base = medians["save_file"]
    print(f"torch {torch.__version__}, {options.device}: {size / 1e6:.0f} MB in {len(tensors)} tensors")
    for what, median in medians.items():
        whole = size / 3 if what == "read the model" else size
        rate = f"{whole / median / 1e6:7.0f} MB/s"
        print(f"{what:32} {median:7.3f} s  {rate}  {median / base:5.2f} of save_file's time")


if __name__ == "__main__":
    main()

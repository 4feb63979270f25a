"""A GPT in a mesh of stages × shards (FSDP2) or stages × tensor parallel: this runtime against torch's own composition.

python benchmarks/mesh_speed.py [--layouts fsdp tp] [--families 1f1b zb-v] [--repeats 9] [--gpu] [--quick] [--json]

Four processes: two stages or more on each of two rows. torch's composition is torchtitan's: `PipelineStage` over stages
that the same function has cut with `fully_shard` or `parallelize_module`, with gathered parameters kept until the last
backward. Both run the same stages on the same samples in the same processes, in turns; a time is the median of the
slowest process, and "on cores" is the processor time of all processes in a step, which says more than tokens/s where
the machine is shared. "peak" is the peak memory of a step on the fullest process, in processes of its own: the kernel's
high-water mark above the memory after imports, or with `--gpu` what torch allocated. "gathered", "reduced" and
"all-reduced" are the bytes of the results of these collectives in one step of one process, over the least possible:
every parameter gathered once, every gradient reduced once, and for tensor parallel two all-reduces of the activations
in the forward and two in the backward of every block. With `--gpu`, all ranks use one GPU over NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import stageline as sl
from stageline.testing import run_ranks

VOCABULARY, HEAD = 512, 32
FAMILIES = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zb-v": "ScheduleZBVZeroBubble"}
LAYOUTS = {"fsdp": "dp_shard", "tp": "tp"}


class Size(NamedTuple):
    """The model, and the samples of one data coordinate."""

    width: int
    blocks: int
    length: int
    microbatches: int
    samples: int  # of a microbatch


CPU, GPU = Size(192, 8, 96, 8, 2), Size(2048, 8, 1024, 8, 2)


class Block(nn.Module):
    """A transformer block whose heads tensor parallel can divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inside(self.first(x)).unflatten(-1, (-1, 3, HEAD)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.second(x)))))


def model(stages: int, size: Size, device: torch.device) -> list[nn.Sequential]:
    """As many blocks in every stage, the embedding with the first ones and the head with the last."""
    torch.manual_seed(0)
    with device:
        parts = [nn.Sequential(*(Block(size.width) for _ in range(size.blocks // stages))) for _ in range(stages)]
        parts[0].insert(0, nn.Embedding(VOCABULARY, size.width))
        parts[-1].append(nn.Linear(size.width, VOCABULARY))
    return [part.bfloat16() for part in parts] if device.type == "cuda" else parts


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def parallelize(part: Any, mesh: Any) -> None:
    """As torchtitan: tensor parallel in every block, then FSDP2 for every block and the rest of the stage."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = mesh.mesh_dim_names
    for module in part.modules():
        if isinstance(module, Block):
            if "tp" in names:
                cut = {"inside": ColwiseParallel(), "out": RowwiseParallel()}
                parallelize_module(module, mesh["tp"], {**cut, "up": ColwiseParallel(), "down": RowwiseParallel()})
            if "dp_shard" in names:
                fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=False)
    if "dp_shard" in names:
        fully_shard(part, mesh=mesh["dp_shard"], reshard_after_forward=False)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of whole tensors that this process gathers, reduces and all-reduces."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come by
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = str(func.overloadpacket)
            tensors = [value for value in torch.utils._pytree.tree_leaves((args, result)) if isinstance(value, Tensor)]
            for kind, word in (("gather", "gathered"), ("reduce_scatter", "reduced"), ("all_reduce", "all-reduced")):
                if kind in name or (kind == "all_reduce" and "allreduce" in name):
                    self.bytes[word] += max(value.nbytes for value in tensors)
        return result


class Ours:
    """A pipeline of this runtime."""

    def __init__(self, mesh: DeviceMesh, family: str, size: Size, device: torch.device) -> None:
        schedule = sl.schedule(family, 2, size.microbatches)
        parts, here = model(schedule.stages, size, device), mesh["pp"].get_local_rank()
        for part, rank in zip(parts, schedule.placement.table[0].tolist(), strict=True):
            if rank != here:
                part.to("meta")
        self.pipe = sl.Pipeline(parts, loss_fn=loss_fn, schedule=schedule, mesh=mesh, parallelize=parallelize)

    def step(self, tokens: Tensor) -> None:
        self.pipe.zero_grad()
        self.pipe.step(tokens, tokens)

    def gradients(self) -> dict[str, Any]:
        return dict(self.pipe.named_gradients())


class Torchs:
    """torch.distributed.pipelining over the same stages, cut by the same function."""

    def __init__(self, mesh: DeviceMesh, family: str, size: Size, device: torch.device) -> None:
        from torch.distributed import pipelining

        placement = sl.schedule(family, 2, size.microbatches).placement.table[0].tolist()
        self.mine = [index for index, rank in enumerate(placement) if rank == mesh["pp"].get_local_rank()]
        whole = model(len(placement), size, device)
        self.parts, self.last = {index: whole[index] for index in self.mine}, len(placement) - 1
        inner = mesh[next(name for name in mesh.mesh_dim_names or () if name != "pp")]
        for part in self.parts.values():
            parallelize(part, inner)
        stages = [
            pipelining.PipelineStage(part, index, len(placement), device, group=mesh["pp"].get_group())
            for index, part in self.parts.items()
        ]
        kind = getattr(pipelining.schedules, FAMILIES[family])
        self.schedule = kind(stages if len(placement) > 2 else stages[0], size.microbatches, loss_fn=loss_fn)

    def step(self, tokens: Tensor) -> None:
        for part in self.parts.values():
            part.zero_grad()
        arguments: dict[str, Any] = {"target": tokens, "losses": []} if self.last in self.parts else {}
        self.schedule.step(*([tokens] if 0 in self.parts else []), **arguments)

    def gradients(self) -> dict[str, Any]:
        return {
            f"{index}.{name}": parameter.grad
            for index, part in self.parts.items()
            for name, parameter in part.named_parameters()
        }


WAYS: dict[str, Callable[..., Any]] = {"stageline": Ours, "torch": Torchs}


def prepared(layout: str, size: Size, gpu: bool) -> tuple[DeviceMesh, torch.device, Tensor]:
    """The mesh, the device and this process's samples."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("pp", LAYOUTS[layout]))
    generator = torch.Generator().manual_seed(mesh.get_coordinate()[1] if layout == "fsdp" else 0)  # type: ignore[index]
    shape = (size.samples * size.microbatches, size.length)
    return mesh, device, torch.randint(0, VOCABULARY, shape, generator=generator).to(device)


def timed(step: Callable[[Tensor], None], tokens: Tensor) -> tuple[float, float]:
    """The seconds of a step, and those of this process on a core."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    began, on_core = time.perf_counter(), time.process_time()
    step(tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - on_core


def times(rank: int, layout: str, family: str, size: Size, repeats: int, gpu: bool) -> dict[str, Any]:
    """Seconds of every step of both, in turns; the bytes of their collectives; and how far their gradients differ."""
    mesh, device, tokens = prepared(layout, size, gpu)
    runs = {way: make(mesh, family, size, device) for way, make in WAYS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(repeats + 2):
        for way, run in runs.items():
            taken = timed(run.step, tokens)
            if turn > 1:
                seconds[way].append(taken)
    gradients = {way: run.gradients() for way, run in runs.items()}
    difference = max(
        (whole(mine) - whole(gradients["torch"][name])).abs().max().item() / whole(mine).abs().max().item()
        for name, mine in gradients["stageline"].items()
    )
    collectives = {}
    for way, run in runs.items():
        with Collectives() as counted:
            run.step(tokens)
        collectives[way] = dict(counted.bytes)
    full = sum(grad.numel() * grad.element_size() for grad in gradients["torch"].values())
    blocks = sum(isinstance(module, Block) for part in runs["torch"].parts.values() for module in part.modules())
    activations = tokens.numel() * size.width * gradients["torch"].popitem()[1].element_size()
    least = {"gathered": full, "reduced": full} if layout == "fsdp" else {"all-reduced": 4 * blocks * activations}
    return {"seconds": seconds, "bytes": collectives, "least": least, "difference": difference}


def whole(tensor: Any) -> Tensor:
    return torch.as_tensor(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(rank: int, way: str, layout: str, family: str, size: Size, gpu: bool) -> int:
    """The peak bytes of a step on this process."""
    mesh, device, tokens = prepared(layout, size, gpu)
    before = torch.cuda.memory_allocated() if gpu else resident("VmRSS")
    run = WAYS[way](mesh, family, size, device)
    run.step(tokens)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from now
    run.step(tokens)
    return (torch.cuda.max_memory_allocated() if gpu else resident("VmHWM")) - before


def row_of(layout: str, family: str, size: Size, repeats: int, gpu: bool) -> dict[str, Any]:
    kind: dict[str, Any] = {"backend": "nccl", "share_gpu": True} if gpu else {}
    results = run_ranks(times, 4, layout, family, size, repeats, gpu, timeout=300, **kind)
    row: dict[str, Any] = {"layout": layout, "family": family}
    tokens = size.samples * size.microbatches * size.length * (2 if layout == "fsdp" else 1)
    for way in WAYS:
        turns = list(zip(*(result["seconds"][way] for result in results), strict=True))
        slowest = [max(seconds for seconds, _ in turn) for turn in turns]
        on_cores = [sum(seconds for _, seconds in turn) for turn in turns]
        peaks = run_ranks(peak, 4, way, layout, family, size, gpu, timeout=300, **kind)
        row[way] = {"tokens/s": tokens / statistics.median(slowest), "peak": max(peaks), "peaks": peaks}
        row[way]["core seconds"] = statistics.median(on_cores)
        for word in results[0]["least"]:
            row[way][word] = sum(result["bytes"][way].get(word, 0) for result in results)
            row[f"least {word}"] = sum(result["least"][word] for result in results)
    row["times torch"] = row["stageline"]["tokens/s"] / row["torch"]["tokens/s"]
    row["difference"] = max(result["difference"] for result in results)
    return row


def line_of(row: dict[str, Any]) -> str:
    words = [key.removeprefix("least ") for key in row if key.startswith("least ")]
    columns = []
    for way in WAYS:
        figures = row[way]
        shares = ", ".join(f"{word} {figures[word] / row[f'least {word}']:.2f} of the least" for word in words)
        speed = f"{figures['tokens/s']:7.0f} tokens/s, {figures['core seconds']:5.2f} s on cores"
        columns.append(f"{way} {speed}, peak {figures['peak'] / 2**20:6.0f} MiB, {shares}")
    what = f"{row['layout']:5} {row['family']:12}"
    return (
        f"{what} {'   '.join(columns)}   {row['times torch']:.2f} times torch, gradients within {row['difference']:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=9, help="measured steps of each (default 9)")
    parser.add_argument("--gpu", action="store_true", help="all ranks on one GPU, over NCCL, in bfloat16")
    parser.add_argument("--quick", action="store_true", help="one family, few repeats")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    size = GPU if options.gpu else CPU
    families, repeats = (["1f1b"], 3) if options.quick else (options.families, options.repeats)
    if not options.json:
        device = torch.cuda.get_device_name(0) if options.gpu else "CPU, gloo"
        print(f"torch {torch.__version__}, {device}, four processes, {size}")
    rows = []
    for layout in options.layouts:
        for family in families:
            rows.append(row_of(layout, family, size, repeats, options.gpu))
            if not options.json:
                print(line_of(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

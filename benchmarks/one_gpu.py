"""A GPT on one GPU: a plain loop over microbatches, pipelines of four stages on that GPU, and torch's.

python benchmarks/one_gpu.py [--repeats 5] [--samples 2] [--blocks 16] [--width 2048] [--profile] [--json]

bfloat16, 16 microbatches with the given number of samples of 1024 tokens. Every number is a median of this run,
measured in turns. Memory is the peak allocation without parameters and gradients; with CUDA graphs, that of their pool.
Ranks are threads of this process; torch's schedules run their four stages on one rank. In "interleaved-zb" W follows I
at once, and both run as one backward; in "W later", another action is between them, and the backward is split. "by
certificate" is the peak that follows from the schedule's order and the measured memory of every stage per microbatch:
what it holds after its forward and between I and W, and what each of its actions needs beside that while it runs.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional

import stageline as sl
from stageline.runtime.microbatches import Batch
from stageline.testing import one_process_step

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "interleaved, 1 rank": ("interleaved", 1, {"chunks": 4}),
    "interleaved-zb, 1 rank": ("interleaved-zb", 1, {"chunks": 4}),
    "interleaved-zb, 1 rank, W later": ("interleaved-zb", 1, {"chunks": 4}),
    "interleaved-zb, graphs": ("interleaved-zb", 1, {"chunks": 4, "compile": "graphs"}),
    "interleaved-zb, inductor": ("interleaved-zb", 1, {"chunks": 4, "compile": True}),
    "interleaved, CUDA graphs": ("interleaved", 1, {"chunks": 4, "cuda_graphs": True}),
    "interleaved-zb, CUDA graphs": ("interleaved-zb", 1, {"chunks": 4, "cuda_graphs": True}),
    "interleaved-zb, inductor, CUDA graphs": (
        "interleaved-zb",
        1,
        {"chunks": 4, "compile": True, "cuda_graphs": True},
    ),
    "1f1b, 4 threads": ("1f1b", 4, {}),
    "zb-h1, 4 threads": ("zb-h1", 4, {}),
}
PEERS = {"torch interleaved": "ScheduleInterleaved1F1B", "torch zero-bubble": "ScheduleInterleavedZeroBubble"}
MICROBATCHES, LENGTH, VOCABULARY = 16, 1024, 32768


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.inside(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.second(x)))))


def w_later(schedule: sl.Schedule) -> sl.Schedule:
    """The same schedule, in which another action stands between every I and its W, except for the last W."""
    programs = []
    for program in schedule.programs:
        actions = list(map(str, program))
        for place in range(len(actions) - 2, -1, -1):
            if "W" in actions[place]:
                actions[place : place + 2] = actions[place + 1], actions[place]
        programs.append(actions)
    return sl.Schedule.from_programs(programs, placement=schedule.placement, name=schedule.name)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def peer(name: str, parts: list[nn.Sequential], tokens: Tensor) -> Callable[[], Any]:
    """torch's schedule over the same parts, all on this one rank."""
    stages = [
        pipelining.PipelineStage(part, index, len(parts), torch.device("cuda")) for index, part in enumerate(parts)
    ]
    schedule = getattr(pipelining.schedules, PEERS[name])(stages, MICROBATCHES, loss_fn=loss_fn)
    return lambda: schedule.step(tokens, target=tokens, losses=[])


def work_of(pipe: sl.Pipeline, tokens: Tensor) -> Any:
    executors = pipe.runner.executors_for(MICROBATCHES, True)
    return pipe.runner.batches.request(executors, Batch(tokens, tokens, training=True), 0, len(tokens), len(tokens))


def graphs_of(pipe: sl.Pipeline) -> Any:
    return pipe.runner.executors_for(MICROBATCHES, True).executors[0].graphs


class StageBytes(NamedTuple):
    """The memory of one stage and microbatch."""

    activation: float
    """Held after its forward."""
    residue: float
    """Held between I and W."""
    transient: dict[str, float]
    """By kind of action, what it needs while it runs beside what is held before and after it."""


def bytes_by_stage(pipe: sl.Pipeline, tokens: Tensor) -> list[StageBytes]:
    """Measure the memory of every stage for one microbatch."""
    work = work_of(pipe, tokens)
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that no gradient is taken for an activation
    stages = {
        index: stage
        for executor in pipe.runner.executors_for(MICROBATCHES, True).executors
        for index, stage in executor.stages.items()
    }
    transients: dict[int, dict[str, float]] = {index: {} for index in stages}

    def measured(index: int, kind: str, action: Callable[[], Any]) -> tuple[Any, float]:
        """Run an action; return its result, and by how many bytes more is held after it."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = action()
        after = torch.cuda.memory_allocated()
        transients[index][kind] = torch.cuda.max_memory_allocated() - max(before, after)
        return result, after - before

    def forward(index: int, leaves: Any) -> Any:
        leaves = stages[index].forward(0, 0, leaves, "tensor", [index > 0], True, {}).leaves
        if index == len(stages) - 1:
            stages[index].loss(0, 0, leaves[0], work.targets[0], 1 / MICROBATCHES, True)
        return leaves

    held = {}
    leaves: Any = [work.inputs[0]]
    for index in sorted(stages):
        (output,), added = measured(index, "F", partial(forward, index, leaves))
        leaves = [output.detach()]
        del output
        held[index] = [float(added), 0.0]
    leaves, grads = [], None
    split = "W" in str(pipe.schedule.programs[0])
    for index in sorted(stages, reverse=True):
        if split:
            ((grad,), _), _ = measured(index, "I", partial(stages[index].backward_input, 0, grads))
            grads = None
            _, added = measured(index, "W", partial(stages[index].backward_weight, 0))
            held[index][1] = -float(added)
        else:
            ((grad,), _), _ = measured(index, "B", partial(stages[index].backward, 0, grads))
        grads = [grad]
    pipe.zero_grad()
    return [StageBytes(held[index][0], held[index][1], transients[index]) for index in sorted(stages)]


def by_certificate(pipe: sl.Pipeline, stages: list[StageBytes]) -> float:
    """The peak over the schedule's order of what its stages hold and need, all ranks together (they share the GPU)."""
    planned = sl.simulate(pipe.schedule)
    moments: list[tuple[float, int, float]] = []
    for rank in range(pipe.schedule.ranks):
        for timed in planned.actions(rank):
            stage, kind = stages[timed.action.stage], str(timed.action.kind)
            activation, residue = stage.activation, stage.residue
            change = {"F": activation, "B": -activation, "I": residue - activation, "W": -residue}[kind]
            needed = stage.transient.get(kind, 0.0)
            moments.append((timed.start, 1, needed + max(change, 0.0)))
            moments.append((timed.end, 0, min(change, 0.0) - needed))
    peak = now = 0.0
    for _, _, change in sorted(moments):
        now += change
        peak = max(peak, now)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2, help="samples of 1024 tokens in a microbatch (default 2)")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--only", nargs="*", help="these cases alone, beside the plain loop")
    parser.add_argument("--profile", action="store_true", help="say where the host's time of the split backward goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    meeting = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("nccl", store=dist.FileStore(meeting, 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, options.width), *(Block(options.width) for _ in range(options.blocks))]
    model = nn.Sequential(*layers, nn.Linear(options.width, VOCABULARY, bias=False)).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, VOCABULARY, (options.samples * MICROBATCHES, LENGTH), device="cuda")
    pipes: dict[str, sl.Pipeline] = {}
    for name, (family, ranks, extra) in CASES.items():
        if not options.only or name in options.only:
            trained = (
                copy.deepcopy(model) if {"compile", "cuda_graphs"} & {*extra} else model
            )  # what is compiled or captured stays so
            sizes: dict[str, Any] = {"ranks": ranks, "microbatches": MICROBATCHES}
            if name.endswith("W later"):
                pipes[name] = sl.Pipeline(
                    trained, loss_fn=loss_fn, schedule=w_later(sl.schedule(family, **sizes, **extra))
                )
            else:
                pipes[name] = sl.Pipeline(trained, loss_fn=loss_fn, schedule=family, **sizes, **extra)
    runs: dict[str, Callable[[], Any]] = {
        "plain loop": lambda: one_process_step(model, loss_fn, tokens, tokens, MICROBATCHES)
    }
    runs |= {name: (lambda pipe=pipe: pipe.step(tokens, tokens)) for name, pipe in pipes.items()}  # type: ignore[misc]
    if not options.only:
        parts = [copy.copy(part) for part in pipes["interleaved, 1 rank"].runner.stages.parts]
        runs |= {name: peer(name, parts, tokens) for name in PEERS}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, float] = {}
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for turn in range(options.repeats + 2):
        for name, run in runs.items():
            for other in {model, *(pipe.model for pipe in pipes.values())}:
                other.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated() - own  # other models, too
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn >= 2:
                taken[name].append(time.perf_counter() - began)
                peaks[name] = (torch.cuda.max_memory_allocated() - 2 * own - base) / 2**30
                if name in pipes and (graphs := graphs_of(pipes[name])) is not None:
                    peaks[name] = graphs.memory / 2**30
    medians = {name: statistics.median(values) for name, values in taken.items()}
    rows = []
    for name, median in medians.items():
        row = {"case": name, "ms": 1e3 * median, "times plain": median / medians["plain loop"], "GiB": peaks[name]}
        if name in pipes:
            model.zero_grad()
            row["by certificate"] = by_certificate(pipes[name], bytes_by_stage(pipes[name], tokens)) / 2**30
        rows.append(row)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.blocks} blocks "
            f"of width {options.width}"
        )
        for row in rows:
            certified = f", by certificate {row['by certificate']:6.2f}" if "by certificate" in row else ""
            print(f"{row['case']:38} {row['ms']:8.1f} ms   {row['times plain']:.3f} times plain", end="")
            print(f"   {row['GiB']:6.2f} GiB{certified}")
    dist.destroy_process_group()
    if options.profile:
        for name in pipes:
            if "1 rank" in name:
                profile_step(name, pipes[name], tokens)


def profile_step(name: str, pipe: sl.Pipeline, tokens: Tensor) -> None:
    """The host's time of one step, function by function."""
    profiler = cProfile.Profile()
    (executor,) = pipe.runner.executors_for(MICROBATCHES, True).executors
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record()
    request = replace(work_of(pipe, tokens), start_events={0: (event, 0.0)})
    profiler.enable()
    executor.run(request)
    profiler.disable()
    torch.cuda.synchronize()
    print(name)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()

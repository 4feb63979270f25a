"""A small GPT on two single-threaded processes: the step that a profile predicts and the measured step.

python benchmarks/profile_accuracy.py [--rounds 30] [--microbatches 8] [--families 1f1b zb-h1] [--json]

Both processes profile the layers at the same time, so that each core is slowed down by the other as in a step. A
transfer is half of a ping-pong between the two through the same transport. `sl.simulate` predicts a step from both, and
the prediction is compared with a step of `sl.Pipeline`. Profiles and steps alternate in one run: a ratio is the median
over the turns of the measured step over the prediction of the same turn. "measured" is a call of `step` as a user sees
it, "makespan" the time from its first to its last action, and the last columns are the ratios of action times to the
profile, by kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from runtime_speed import BLOCKS, SIZES, VOCABULARY, loss_fn, model
from stageline.model.partition.partition import even_sizes
from stageline.model.profile import Profile
from stageline.model.profiler import profile_layers
from stageline.model.units import layers_of
from stageline.testing import run_ranks
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import SocketTransport

WIDTH, LENGTH, BATCH = SIZES["middle"]
FAMILIES = ["1f1b", "zb-h1", "interleaved-zb"]
PINGS = 40


class Loss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return loss_fn(logits, target)


def ping_pong(transport: SocketTransport, samples: int) -> float:
    """Half of the median round trip of a message as large as the steps'."""
    me, other = transport.rank, 1 - transport.rank
    transport.begin({(other, "forward"): PINGS}, {(other, "forward"): PINGS})
    taken = []
    for number in range(PINGS):
        out = Message(Header(me, other, "forward", me, number, 0), [torch.zeros(samples, LENGTH, WIDTH)], "*", [True])
        back = Header(other, me, "forward", other, number, 0)
        began = time.perf_counter()
        if me == 0:
            transport.send(out)
        transport.receive(back, 30.0)
        if me == 1:
            transport.send(out)
        taken.append(time.perf_counter() - began)
    transport.finish(30.0)
    return statistics.median(taken[PINGS // 5 :]) / 2


def measure(rank: int, families: list[str], microbatches: int, rounds: int) -> dict[str, Any]:
    """Profiles, transfers, and the steps of every family, in turns."""
    transport = SocketTransport(Links.join())
    whole, loss = nn.Sequential(*model(1, WIDTH)[0]), Loss()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    part = tokens[: BATCH // microbatches].clone()
    layers = [*layers_of(whole), ("loss", loss)]
    pipes = {
        name: sl.Pipeline(
            nn.Sequential(*model(1, WIDTH)[0]), loss_fn=loss_fn, schedule=sl.schedule(name, 2, microbatches)
        )
        for name in families
    }
    measured: dict[str, Any] = {"profiles": [], "transfers": [], "steps": {name: [] for name in families}}
    for turn in range(rounds + 1):
        dist.barrier()
        profile = profile_layers(layers, lambda: loss(whole(part), part), repeats=3, warmup=1)
        dist.barrier()
        transfer = ping_pong(transport, len(part))
        for name, pipe in pipes.items():
            pipe.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            pipe.step(tokens, tokens)
            dist.barrier()
            taken = time.perf_counter() - began
            if turn:
                measured["steps"][name].append((taken, pipe.timeline))
        if turn:
            measured["profiles"].append(profile)
            measured["transfers"].append(transfer)
    return measured


def ranges(stages: int, layers: int) -> list[tuple[int, int]]:
    """The layers of each stage as `sl.Pipeline` cuts them; the loss belongs to the last."""
    sizes = even_sizes(layers - 1, stages)
    sizes[-1] += 1
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


def promised(schedule: sl.Schedule, profiles: list[Profile], transfer: float) -> sl.Timeline:
    """The step that the profiles of two ranks predict; each stage has the cost measured on its own rank."""
    stages = ranges(schedule.stages, len(profiles[0].layers))
    owners = schedule.placement.table[0].tolist()
    layers = [
        layer for (start, stop), rank in zip(stages, owners, strict=True) for layer in profiles[rank].layers[start:stop]
    ]
    costs = replace(profiles[0], layers=tuple(layers)).costs(stages, transfer=transfer)
    return sl.simulate(schedule, costs)


def row_of(name: str, microbatches: int, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one family: of each round its own profile and its own step."""
    schedule = sl.schedule(name, 2, microbatches)
    transfer = statistics.median(taken for process in seen for taken in process["transfers"])
    plans = [
        promised(schedule, list(pair), transfer)
        for pair in zip(*(process["profiles"] for process in seen), strict=True)
    ]
    steps = [
        max(first[0], second[0]) for first, second in zip(*(process["steps"][name] for process in seen), strict=True)
    ]
    timelines = [timeline for _, timeline in seen[0]["steps"][name]]
    spans = [timeline.makespan for timeline in timelines]
    return {
        "family": name,
        "simulated ms": 1e3 * statistics.median(plan.makespan for plan in plans),
        "measured ms": 1e3 * statistics.median(steps),
        "makespan ms": 1e3 * statistics.median(spans),
        "measured/simulated": over(steps, [plan.makespan for plan in plans]),
        "makespan/simulated": over(spans, [plan.makespan for plan in plans]),
        "transfer ms": 1e3 * transfer,
        "slower": {
            kind: over([total(kind, timeline) for timeline in timelines], [total(kind, plan) for plan in plans])
            for kind in sorted(kinds_of(schedule))
        },
    }


def over(measured: list[float], simulated: list[float]) -> float:
    """The median of the ratios of all rounds."""
    return statistics.median(first / second for first, second in zip(measured, simulated, strict=True))


def kinds_of(schedule: sl.Schedule) -> set[str]:
    return {action.kind for program in schedule.programs for action in program if isinstance(action, sl.Action)}


def total(kind: str, timeline: sl.Timeline) -> float:
    """Seconds of all actions of a kind."""
    return sum(timed.end - timed.start for timed in timeline.actions() if timed.action.kind == kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="turns of a profile and a step of each family")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    seen = run_ranks(measure, 2, options.families, options.microbatches, options.rounds, timeout=600)
    rows = [row_of(name, options.microbatches, seen) for name in options.families]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"torch {torch.__version__}, {BLOCKS} blocks of width {WIDTH}, {BATCH} × {LENGTH} tokens, two processes")
    for row in rows:
        kinds = "  ".join(f"{kind} {factor:.2f}" for kind, factor in row["slower"].items())
        print(
            f"{row['family']:15} simulated {row['simulated ms']:6.1f} ms  measured {row['measured ms']:6.1f}, "
            f"ratio {row['measured/simulated']:.3f}  makespan {row['makespan ms']:6.1f}, "
            f"ratio {row['makespan/simulated']:.3f}  transfer {row['transfer ms']:.2f} ms  {kinds}"
        )


if __name__ == "__main__":
    main()

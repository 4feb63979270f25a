"""Stages that only sleep: how much longer a step takes than its schedule predicts, here and in torch.

python benchmarks/sleep_stages.py [--ranks 4 8] [--microbatches 16] [--families 1f1b zb-v] [--repeats 5] [--quick]

Every rank sleeps 10 ms in F, I and W of every microbatch; with V chunks per rank, each chunk sleeps a V-th of that. A
ratio is the median of the measured steps over the makespan that `sl.simulate` predicts for the same order. Its costs,
measured in the same run, are the times of F, I and W of a stage, and of a message through the same transport between
two ranks that sleep in turns. The first ratio uses the times of a stage that plain autograd runs alone in a loop,
including its few tensors; the second uses only the sleeps; the third, "nominal", uses 10 ms and free transfers. torch
runs the same stages in the same processes, in turns; its ratio uses the makespan of its own order, which equals ours if
the column says so.
`sl.explain` attributes our excess, in milliseconds, averaged over the ranks; "transfer" is the excess over the plan,
and "outside" is rank 0's time before the first and after the last action of the step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl
from stageline.testing import SleepStage, run_ranks
from stageline.transport.protocol import Header, Message, Transport
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import SocketTransport
from stageline.transport.threads import ThreadHub

TORCH = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
NOMINAL, WIDTH, ROUNDS = 0.01, 1024, 25


def stages_of(schedule: sl.Schedule) -> list[SleepStage]:
    part = NOMINAL * schedule.ranks / schedule.stages
    return [SleepStage(part, part, part, width=WIDTH) for _ in range(schedule.stages)]


def costs_of(parts: dict[str, float], transfer: float) -> sl.Costs:
    return sl.Costs(
        forward=parts["F"],
        backward_input=parts["I"],
        backward_weight=parts["W"],
        backward=parts.get("B"),
        transfer=transfer,
    )


def alone(schedule: sl.Schedule, repeats: int = 12) -> dict[str, float]:
    """What F, I, W and a whole backward of a stage take by plain autograd, with nothing around it."""
    stage = stages_of(schedule)[0]
    taken: dict[str, list[float]] = {kind: [] for kind in "FIWB"}

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        taken[kind].append(time.perf_counter() - began)
        return result

    gradient = torch.ones(1, WIDTH)
    for _ in range(repeats):
        x = torch.ones(1, WIDTH).requires_grad_()
        y = timed("F", lambda x=x: stage(x))  # type: ignore[misc]
        timed("I", lambda x=x, y=y: torch.autograd.grad(y, x, gradient, retain_graph=True))  # type: ignore[misc]
        timed("W", lambda y=y: y.backward(gradient, inputs=[stage.weight]))  # type: ignore[misc]
        y = stage(x)
        timed("B", lambda y=y: y.backward(gradient))  # type: ignore[misc]
    return {kind: statistics.median(times) for kind, times in taken.items()}


def ping_pong(transport: Transport) -> float:
    """The median time from sending to having a message, between ranks 0 and 1 in turns, each after a sleep.

    Like the ranks of a step: the sender has just slept as long as an action takes, and the receiver waits.
    """
    me, other = transport.rank, 1 - transport.rank
    taken = []
    for number in range(ROUNDS):
        for sender in (0, 1):
            if sender == me:
                time.sleep(NOMINAL)
                leaves: list[Any] = [torch.zeros(1, WIDTH), time.perf_counter()]
                transport.send(Message(Header(me, other, "forward", me, number, 0), leaves, "*", [True, False]))
            else:
                _, sent = transport.receive(Header(other, me, "forward", other, number, 0), 30.0).leaves
                taken.append(time.perf_counter() - float(sent))  # type: ignore[arg-type]
    return statistics.median(taken[ROUNDS // 5 :])


def mean_slept(stages: list[SleepStage]) -> dict[str, tuple[float, int]]:
    """The seconds of each kind and how many sleeps they were; forgets them."""
    sleeps = {}
    for kind in "FIW":
        lengths = [slept.seconds for stage in stages for slept in stage.slept if slept.kind == kind]
        sleeps[kind] = (sum(lengths), len(lengths))
    for stage in stages:
        stage.slept.clear()
    return sleeps


def torchs(name: str, parts: list[SleepStage], schedule: sl.Schedule) -> tuple[Callable[[Any, Any], Any], list[str]]:
    """A step of torch's schedule over the same stages, and torch's order, a line for each rank."""
    from torch.distributed import pipelining

    mine = schedule.placement.stages_of(dist.get_rank())
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(parts[index], index, len(parts), cpu) for index in mine]
    kind = getattr(pipelining.schedules, TORCH[name])
    peer = kind(stages[0] if name == "1f1b" else stages, schedule.microbatches, loss_fn=nn.functional.mse_loss)
    computes = re.compile(r"\d+[FBIW]\d+")
    order = [
        " ".join(str(action) for action in peer.pipeline_order[rank] if computes.fullmatch(str(action)))
        for rank in range(schedule.ranks)
    ]
    first, last = 0 in mine, len(parts) - 1 in mine

    def step(x: Any, y: Any) -> None:
        arguments: dict[str, Any] = {"target": y, "losses": []} if last else {}
        peer.step(*([x] if first else []), **arguments)

    return step, order


def measure(pipe: sl.Pipeline, step: Callable[[Any, Any], Any], stages: list[SleepStage], turns: int) -> dict[str, Any]:
    """Seconds of this many steps, what the sleeps took, and where the time of our own steps went."""
    x, y = torch.ones(pipe.schedule.microbatches, WIDTH), torch.zeros(pipe.schedule.microbatches, WIDTH)
    mean_slept(stages)
    taken, timelines = [], []
    for _ in range(turns):
        pipe.zero_grad()
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        step(x, y)
        taken.append(time.perf_counter() - began)
        if step == pipe.step:
            timelines.append(pipe.timeline)
    return {"seconds": taken, "slept": mean_slept(stages), "timelines": timelines}


def in_process(rank: int, ranks: int, microbatches: int, families: list[str], repeats: int) -> list[dict[str, Any]]:
    """All families on this rank: ours and torch's in turns."""
    warnings.simplefilter("ignore")
    transport = SocketTransport(Links.join())
    transfer = 0.0
    if rank < 2:
        # The shortest of several: gloo on a busy machine has slow spells, and a long transfer would flatter the ratio.
        times = []
        for _ in range(3):
            transport.begin({(1 - rank, "forward"): ROUNDS}, {(1 - rank, "forward"): ROUNDS})
            times.append(ping_pong(transport))
            transport.finish(30.0)
        transfer = min(times)
    dist.barrier()
    rows = []
    for name in families:
        schedule = sl.schedule(name, ranks, microbatches)
        ours, twins = stages_of(schedule), stages_of(schedule)
        pipe = sl.Pipeline(ours, loss_fn=nn.functional.mse_loss, schedule=schedule)
        row: dict[str, Any] = {"transfer": transfer, "stageline": [], "torch": [], "order": None}
        row["alone"] = alone(schedule) if rank == 0 else None
        dist.barrier()
        runs: dict[str, tuple[Callable[[Any, Any], Any], list[SleepStage]]] = {"stageline": (pipe.step, ours)}
        try:
            theirs, row["order"] = torchs(name, twins, schedule)
            runs["torch"] = (theirs, twins)
        except ValueError as refused:
            row["refused"] = str(refused)
        for turn in range(repeats + 1):
            for who, (step, stages) in runs.items():
                seen = measure(pipe, step, stages, 1)
                if turn:
                    row[who].append(seen)
        rows.append(row)
    return rows


def on_threads(ranks: int, microbatches: int, families: list[str], repeats: int) -> list[dict[str, Any]]:
    hub = ThreadHub(2)
    taken: list[float] = []
    other = threading.Thread(target=lambda: taken.append(ping_pong(hub.end(1))))
    other.start()
    taken.append(ping_pong(hub.end(0)))
    other.join()
    rows = []
    for name in families:
        schedule = sl.schedule(name, ranks, microbatches)
        ours = stages_of(schedule)
        pipe = sl.Pipeline(ours, loss_fn=nn.functional.mse_loss, schedule=schedule)
        measure(pipe, pipe.step, ours, 1)
        steps = [measure(pipe, pipe.step, ours, 1) for _ in range(repeats)]
        own = alone(schedule)
        rows.append({"transfer": min(taken), "stageline": steps, "torch": [], "order": None, "alone": own})
    return rows


def row_of(name: str, where: str, ranks: int, microbatches: int, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one family from what every process saw."""
    schedule = sl.schedule(name, ranks, microbatches)
    transfer = max(process["transfer"] for process in seen)
    row: dict[str, Any] = {"where": where, "ranks": ranks, "family": name, "transfer ms": 1e3 * transfer}
    for who in ("stageline", "torch"):
        steps = list(zip(*(process[who] for process in seen), strict=True))
        if not steps:
            row |= {f"{who} s": None, f"{who} ratio": None, f"{who} over sleeps": None, f"{who} nominal": None}
            continue
        taken = statistics.median(max(part["seconds"][0] for part in parts) for parts in steps)
        slept = {
            kind: sum(part["slept"][kind][0] for parts in steps for part in parts)
            / sum(part["slept"][kind][1] for parts in steps for part in parts)
            for kind in "FIW"
        }
        order_run = schedule
        if who == "torch":
            # torch's table of 1F1B is not what it runs (it lacks forwards of the last rank); its loop runs our order.
            if name != "1f1b":
                order_run = sl.Schedule.from_programs([line.split() for line in seen[0]["order"]], name="torch")
            row["same order"] = order_run == schedule
        costs = costs_of(seen[0]["alone"], transfer)
        nominal = costs_of(dict.fromkeys("FIW", NOMINAL * ranks / schedule.stages), 0.0)
        row[f"{who} s"] = taken
        row[f"{who} makespan"] = sl.simulate(order_run, costs).makespan
        row[f"{who} ratio"] = taken / row[f"{who} makespan"]
        row[f"{who} over sleeps"] = taken / sl.simulate(order_run, costs_of(slept, transfer)).makespan
        row[f"{who} nominal"] = taken / sl.simulate(order_run, nominal).makespan
        if who == "stageline":
            row["slept ms"] = {kind: 1e3 * value for kind, value in slept.items()}
            row["alone ms"] = {kind: 1e3 * value for kind, value in seen[0]["alone"].items()}
            row["excess ms"] = excess(schedule, costs, [parts[0] for parts in steps])
    return row


def excess(schedule: sl.Schedule, costs: sl.Costs, steps: list[dict[str, Any]]) -> dict[str, float]:
    """Where the time beyond the simulated makespan went, on average over steps and ranks."""
    planned = sl.simulate(schedule, costs)
    totals: dict[str, float] = {}
    for step in steps:
        (measured,) = step["timelines"]
        explanation = sl.explain(planned, measured)
        parts = explanation.mean._asdict()
        parts["transfer"] -= explanation.planned_mean.transfer
        parts["outside"] = step["seconds"][0] - measured.makespan
        for part in ("slow", "transfer", "host", "late", "outside"):
            totals[part] = totals.get(part, 0.0) + 1e3 * parts[part] / len(steps)
    return totals


def show(row: dict[str, Any]) -> str:
    def ratios(who: str) -> str:
        if row[f"{who} ratio"] is None:
            return "-"
        return f"{row[f'{who} ratio']:.3f} ({row[f'{who} over sleeps']:.3f}, {row[f'{who} nominal']:.3f})"

    order = {True: "same order", False: "own order", None: ""}[row.get("same order")]
    parts = " ".join(f"{name} {value:.1f}" for name, value in row["excess ms"].items())
    ours = f"{row['stageline s']:.3f} s  ratio {ratios('stageline')}"
    where = f"{row['where']:9} P={row['ranks']} {row['family']:12}"
    return f"{where} {ours}  torch {ratios('torch')} {order}  transfer {row['transfer ms']:.2f} ms | {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--families", nargs="+", default=list(TORCH), choices=list(TORCH))
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each (default 5)")
    parser.add_argument("--where", nargs="+", default=["threads", "processes"], choices=["threads", "processes"])
    parser.add_argument("--quick", action="store_true", help="4 ranks, 8 microbatches, 2 steps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.microbatches, options.repeats = [4], 8, 2
    torch.set_num_threads(1)
    rows = []
    if not options.json:
        print(
            f"torch {torch.__version__}, {options.microbatches} microbatches; ratio over what the stages take alone "
            "(over their sleeps, nominal); excess over the first in ms"
        )
    for ranks in options.ranks:
        for where in options.where:
            sizes = (ranks, options.microbatches, options.families, options.repeats)
            seen = [on_threads(*sizes)] if where == "threads" else run_ranks(in_process, ranks, *sizes, timeout=600)
            for index, name in enumerate(options.families):
                row = row_of(name, where, ranks, options.microbatches, [process[index] for process in seen])
                rows.append(row)
                if not options.json:
                    print(show(row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

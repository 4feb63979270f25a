"""How good synthesized schedules are, compared with proven bounds, the families and the zero-bubble heuristic.

    python benchmarks/synthesis.py [PART…] [--quick] [--time-limit SECONDS] [--processor-time] [--json]

Costs resemble measured ones (F = 10, I = 10.5, W = 8, a transfer 0.5), with equal stages and with stages that differ by
up to 30%. Every gap is proven in this run. Only the seconds, and the progress of a search within its time limit, depend
on the speed of the machine. On a busy one, `--processor-time` limits each search by the seconds that it computes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import stageline as sl
from stageline.synthesis import search
from stageline.synthesis.bounds import lower_bound
from stageline.synthesis.list_scheduling import Board
from stageline.synthesis.problem import problem_of
from stageline.synthesis.zero_bubble import zero_bubble_plans

SPREAD = 0.3
Row = dict[str, Any]


def costs_of(ranks: int, seed: int | None, residue: float = 1.0) -> sl.Costs:
    """Return realistic costs; with a seed, of stages that differ by up to 30%."""
    dice = random.Random(seed)
    sizes = [1.0 if seed is None else dice.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(ranks)]
    return sl.Costs(
        forward=[10 * size for size in sizes],
        backward_input=[10.5 * size for size in sizes],
        backward_weight=[8 * size for size in sizes],
        transfer=0.5,
        residue=residue,
    )


def zero_bubble_heuristic(costs: sl.Costs, ranks: int, count: int, cap: float, objective: str) -> float:
    """Return the best objective value of all variants of the zero-bubble heuristic; infinite if all deadlock."""
    problem = problem_of(costs, ranks, count, cap, 1, "loop", objective, True)
    plans = zero_bubble_plans(Board(problem), lower_bound(problem))
    return min((plan.value for plan in plans if plan is not None), default=math.inf)


def optima(arguments: argparse.Namespace) -> Iterator[Row]:
    """Instances with a known optimum."""
    for residue, known in ((0.5, {4: 278, 5: 258, None: 257}), (1.0, {4: 278, 5: 265, None: 257})):
        costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1, residue=residue)
        for cap, optimum in known.items():
            r = sl.synthesize(costs, 4, 8, memory=cap, time_limit=max(10.0, arguments.time_limit))
            yield {
                "residue": residue, "cap": cap, "optimum": optimum, "achieved": r.achieved, "gap": r.gap,
                "seconds": r.seconds,
            }  # fmt: skip


def gaps(arguments: argparse.Namespace) -> Iterator[Row]:
    """Gaps without a memory cap, for many and for few microbatches."""
    for ranks in (8, 16) if arguments.quick else (8, 16, 32):
        for count in (ranks // 2, ranks, 3 * ranks // 2, 2 * ranks, 4 * ranks, 8 * ranks):
            for seeds in ([None], range(2 if arguments.quick else 6)):
                results = [
                    sl.synthesize(costs_of(ranks, seed), ranks, count, time_limit=arguments.time_limit)
                    for seed in seeds
                ]
                yield {
                    "ranks": ranks, "microbatches": count, "stages": "equal" if seeds == [None] else "±30%",
                    "largest gap": max(r.gap for r in results), "mean gap": statistics.mean(r.gap for r in results),
                    "seconds": max(r.seconds for r in results),
                }  # fmt: skip


def against_heuristic(arguments: argparse.Namespace) -> Iterator[Row]:
    """Makespan over that of the zero-bubble heuristic, at many caps; above 1 would be worse."""
    for ranks in (4, 8):
        for count in (2 * ranks, 4 * ranks):
            for residue in (0.5, 1.0):
                ratios, alone = [], 0
                for seed in (None, 0) if arguments.quick else (None, 0, 1, 2):
                    costs = costs_of(ranks, seed, residue)
                    for share in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, math.inf):
                        cap = share * ranks
                        peer = zero_bubble_heuristic(costs, ranks, count, cap, "makespan")
                        r = sl.synthesize(costs, ranks, count, memory=cap, time_limit=arguments.time_limit)
                        alone += peer == math.inf
                        ratios += [r.achieved / peer] * (peer < math.inf)
                yield {
                    "ranks": ranks, "microbatches": count, "residue": residue, "instances": len(ratios),
                    "largest ratio": max(ratios), "mean ratio": statistics.mean(ratios), "heuristic found none": alone,
                }  # fmt: skip


def cap_instances() -> Iterator[tuple[int, int, float, float, int | None]]:
    """Yield 40 instances: ranks, microbatches, cap over ranks, residue, and the seed of unequal stages."""
    dice = random.Random(40)
    for ranks, factor in itertools.product((4, 6, 8, 16, 32), (2, 3, 4, 8)):
        for tight in (True, False):
            cap = dice.choice((0.5, 0.75) if tight else (1.0, 1.25, 1.5, 2.0))
            residue = dice.choice((0.3, 0.5, 0.75, 1.0))
            yield ranks, factor * ranks, cap, residue, dice.choice((None, dice.randrange(100)))


def under_caps(arguments: argparse.Namespace) -> Iterator[Row]:
    """Spans of 40 instances under caps, with the best heuristic, the bound, and the optimum where it is proven."""
    for ranks, count, share, residue, seed in itertools.islice(cap_instances(), 16 if arguments.quick else None):
        costs, cap = costs_of(ranks, seed, residue), share * ranks
        r = sl.synthesize(costs, ranks, count, memory=cap, objective="span", time_limit=arguments.time_limit)
        peers = {**r.named, "zero-bubble": zero_bubble_heuristic(costs, ranks, count, cap, "span")}
        name = min(peers, key=lambda peer: peers[peer])
        yield {
            "ranks": ranks, "microbatches": count, "cap over ranks": share, "residue": residue,
            "stages": "equal" if seed is None else "±30%", "span": r.achieved,
            "best heuristic": name, "its span": peers[name], "ratio": r.achieved / peers[name],
            "bound": r.lower_bound, "gap": r.gap, "optimum": r.achieved if r.gap < 1e-4 else None,
            "seconds": r.seconds,
        }  # fmt: skip


def two_chunks(arguments: argparse.Namespace) -> Iterator[Row]:
    """Two stages per rank under the memory of each family: v-min, v-half and zb-v on a V, interleaved on a loop."""
    costs = costs_of(1, None, 0.5)
    for ranks, count in ((4, 8), (4, 16), (8, 16), (8, 32), (16, 32))[: 3 if arguments.quick else None]:
        stage = sl.Costs(**{**costs.to_json(), "forward": 5, "backward_input": 5.25, "backward_weight": 4,
                            "activation": 0.5, "residue": 0.25})  # fmt: skip
        for name in ("v-min", "v-half", "zb-v", "interleaved", "interleaved-zb"):
            peer = sl.simulate(sl.schedule(name, ranks, count), stage)
            placement = "loop" if name.startswith("interleaved") else "v"
            cap = max(peer.peak_memory)
            r = sl.synthesize(
                stage, ranks, count, chunks=2, placement=placement, memory=cap, time_limit=arguments.time_limit
            )
            yield {
                "ranks": ranks, "microbatches": count, "placement": placement, "cap": cap, "family": name,
                "its makespan": peer.makespan, "makespan": r.achieved, "ratio": r.achieved / peer.makespan,
                "bound": r.lower_bound, "gap": r.gap, "seconds": r.seconds,
            }  # fmt: skip


def published(arguments: argparse.Namespace) -> Iterator[Row]:
    """The instance of the zero-bubble paper's program with its largest bubble: P=16, M=48, a cap of 1.25 P."""
    costs = sl.Costs(forward=11.347, backward_input=11.248, backward_weight=8.132, transfer=0.377, residue=0.5)
    ideal = 48 * (11.347 + 11.248 + 8.132)
    for objective in ("span", "makespan"):
        peer = zero_bubble_heuristic(costs, 16, 48, 20, objective)
        r = sl.synthesize(costs, 16, 48, memory=20, objective=objective, time_limit=max(20.0, arguments.time_limit))
        yield {
            "objective": objective, "bubble": 1 - ideal / r.achieved, "bubble of the heuristic": 1 - ideal / peer,
            "bubble at the bound": 1 - ideal / r.lower_bound, "gap": r.gap, "seconds": r.seconds,
        }  # fmt: skip


def first_answer(arguments: argparse.Namespace) -> Iterator[Row]:
    """Seconds to the first result, and in total, for large steps."""
    for ranks, count, cap in ((64, 256, None), (64, 256, 64), (32, 256, 24)):
        improvements: list[Any] = []
        begun = time.perf_counter()
        r = sl.synthesize(
            costs_of(ranks, 0), ranks, count, memory=cap, time_limit=arguments.time_limit, progress=improvements.append
        )
        total = time.perf_counter() - begun
        yield {
            "ranks": ranks, "microbatches": count, "cap": cap, "first seconds": improvements[0].seconds,
            "first": improvements[0].achieved, "achieved": r.achieved, "gap": r.gap, "seconds": total,
        }  # fmt: skip


def memory_of_1f1b(arguments: argparse.Namespace) -> Iterator[Row]:
    """Unequal stages in the memory of 1f1b: the gain over 1f1b, and its share of the possible gain."""
    for ranks in (4, 8):
        for count in (2 * ranks, 4 * ranks):
            for residue in (1.0, 0.5):
                shorter, closed, gap = [], [], []
                for seed in range(8 if arguments.quick else 50):
                    costs = costs_of(ranks, seed, residue)
                    caps = [ranks - rank for rank in range(ranks)]
                    r = sl.synthesize(costs, ranks, count, memory=caps, time_limit=arguments.time_limit)
                    best = min(r.named.values())
                    shorter.append(1 - r.achieved / r.named["1f1b"])
                    gap.append(r.gap)
                    room = best - r.lower_bound
                    closed.append((best - r.achieved) / room if room > 1e-9 * best else 1.0)
                low, middle, high = statistics.quantiles(closed, n=10)[0], statistics.median(closed), max(closed)
                yield {
                    "ranks": ranks, "microbatches": count, "residue": residue,
                    "shorter than 1f1b": statistics.mean(shorter), "mean gap": statistics.mean(gap),
                    "closed, 10%": low, "closed, median": middle, "closed, best": high,
                    "closed, mean": statistics.mean(closed),
                }  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "optima": optima,
    "gaps": gaps,
    "heuristic": against_heuristic,
    "caps": under_caps,
    "chunks": two_chunks,
    "published": published,
    "first": first_answer,
    "1f1b": memory_of_1f1b,
}
SHARES = ("gap", "shorter", "closed", "bubble")


def shown(key: str, value: object) -> str:
    if isinstance(value, float):
        if any(word in key for word in SHARES):
            return f"{value:.2%}"
        return f"{value:.3f}" if "ratio" in key or "seconds" in key else f"{value:.6g}"
    return "none" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer instances")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds for each search")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--processor-time", action="store_true", help="count the seconds that this process computes")
    arguments = parser.parse_args()
    if arguments.processor_time:
        vars(search)["time"] = types.SimpleNamespace(monotonic=time.process_time)
    tables: dict[str, list[Row]] = {}
    for name in arguments.parts or PARTS:
        if not arguments.json:
            print(f"\n{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
        tables[name] = []
        for row in PARTS[name](arguments):
            tables[name].append(row)
            if not arguments.json:
                print("  " + "  ".join(f"{key} {shown(key, value)}" for key, value in row.items()), flush=True)
    if arguments.json:
        json.dump(tables, sys.stdout, indent=2)


if __name__ == "__main__":
    main()

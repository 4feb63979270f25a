"""How fast schedules are built, verified and simulated: compared with torch in the same run, and by size.

    python benchmarks/schedule_speed.py [--quick] [--json] [--largest]

With --largest, only 1f1b on 4096 ranks with 16384 microbatches is measured: 134 million actions, a few minutes.

Every number is measured in this run, in a fresh process, so that no measurement sees memory that another one left.
Seconds are wall-clock time; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

import stageline as sl

MOST_OF_TORCH = 1 / 20
"""Target: the share of torch's time for making alone in which we make, verify and simulate."""
MOST_SECONDS, MOST_BYTES = 10.0, 2 * 2**30
"""Targets for 1024 ranks and 4096 microbatches."""
LARGEST, LARGEST_BYTES = (4096, 16384), 8 * 2**30
"""The ranks and microbatches of the largest schedule, and the target for its memory."""

COSTS = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)

Parts: TypeAlias = tuple[float, float, float]
"""Seconds to make, to verify and to simulate."""

Given = ParamSpec("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Cost:
    """What one schedule cost: the median over the repeats of each part, and the peak of the whole process."""

    family: str
    ranks: int
    chunks: int
    microbatches: int
    actions: int
    make: float
    verify: float
    simulate: float
    total: float
    lowest: float
    highest: float
    repeats: int
    peak_bytes: int

    @property
    def per_action(self) -> float:
        """Microseconds."""
        return self.total / self.actions * 1e6


def fresh(function: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
    """Run it in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def once(family: str, ranks: int, microbatches: int, options: dict[str, int]) -> tuple[Parts, sl.Schedule]:
    """Make, verify and simulate a schedule; simulated means that all its figures have been read."""
    start = time.perf_counter()
    schedule = sl.schedule(family, ranks, microbatches, **options)
    built = time.perf_counter()
    sl.verify(schedule)
    verified = time.perf_counter()
    timeline = sl.simulate(schedule, COSTS)
    figures = (timeline.makespan, timeline.span, timeline.bubble or 0.0, timeline.span_bubble, *timeline.peak_memory)
    simulated = time.perf_counter()
    assert min(figures) >= 0
    return (built - start, verified - built, simulated - verified), schedule


def measure(family: str, ranks: int, microbatches: int, options: dict[str, int], most: int) -> Cost:
    """Repeat one schedule for about three seconds, at least once and at most this often."""
    once(family, 4, 8, options)  # loads the families and numpy's own parts
    parts: list[Parts] = []
    while not parts or (len(parts) < most and sum(map(sum, parts)) < 3):
        gc.collect()
        seconds, schedule = once(family, ranks, microbatches, options)
        parts.append(seconds)
        actions, chunks = schedule.num_actions, schedule.chunks
        del schedule
    totals = [sum(part) for part in parts]
    make, verify, simulate = (statistics.median(part) for part in zip(*parts, strict=True))
    return Cost(
        family=family,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        actions=actions,
        make=make,
        verify=verify,
        simulate=simulate,
        total=statistics.median(totals),
        lowest=min(totals),
        highest=max(totals),
        repeats=len(totals),
        peak_bytes=peak_bytes(),
    )


def against_torch(ranks: int, chunks: int, microbatches: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Let torch make its interleaved schedule and us do everything with ours, in turns in one process."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    # torch asks only for the sizes of the stages when it makes a schedule, and only makes it: it has no
    # verification and no simulation to compare.
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            is_first=chunk == 0,
            is_last=False,
            submod=None,
            has_backward=True,
        )
        for chunk in range(chunks)
    ]
    once("interleaved", 4, 8, {"chunks": chunks})
    theirs: list[float] = []
    ours: list[Parts] = []
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        peer: Any = ScheduleInterleaved1F1B(stages, microbatches)
        theirs.append(time.perf_counter() - start)
        order = {rank: [str(step) for step in row if step is not None] for rank, row in peer.pipeline_order.items()}
        del peer
        for _ in range(repeats):
            gc.collect()
            seconds, schedule = once("interleaved", ranks, microbatches, {"chunks": chunks})
            ours.append(seconds)
    same = all(order[rank] == list(map(str, program)) for rank, program in enumerate(schedule.programs))
    make, verify, simulate = (statistics.median(part) for part in zip(*ours, strict=True))
    total = statistics.median(map(sum, ours))
    torch_make = statistics.median(theirs)
    return {
        "ranks": ranks,
        "chunks": chunks,
        "microbatches": microbatches,
        "actions": schedule.num_actions,
        "same_order": same,
        "torch_version": version("torch"),
        "torch_make": torch_make,
        "torch_make_all": theirs,
        "make": make,
        "verify": verify,
        "simulate": simulate,
        "total": total,
        "total_all": [sum(parts) for parts in ours],
        "ratio": total / torch_make,
        "ratio_make_alone": make / torch_make,
    }


# What is measured, part by part; each part prints itself and returns its data.


def part_torch(quick: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    sizes = (64, 4, 256) if quick else (64, 4, 512)
    say("\n1. Against torch: interleaved 1F1B, both in turns in one process\n")
    try:
        version("torch")
    except PackageNotFoundError:
        say("   torch is not installed: nothing to compare with")
        return None
    result = fresh(against_torch, *sizes, rounds=1 if quick else 2, repeats=3 if quick else 5)
    ranks, chunks, microbatches = sizes
    say(f"   {ranks} ranks × {chunks} chunks, {microbatches} microbatches: {result['actions']:,} actions")
    say(f"   the two orders are {'the same' if result['same_order'] else 'NOT the same'}, action by action\n")
    rows = [
        [f"torch {result['torch_version']}: make only", *_spread(result["torch_make_all"])],
        ["stageline: make", f"{result['make']:.3f}", "", ""],
        ["stageline: verify", f"{result['verify']:.3f}", "", ""],
        ["stageline: simulate", f"{result['simulate']:.3f}", "", ""],
        ["stageline: all three", *_spread(result["total_all"])],
    ]
    say(table(["", "seconds (median)", "lowest … highest", "runs"], rows))
    say(
        f"\n   all three here / making alone in torch: 1/{1 / result['ratio']:.1f}",
    )
    say(f"   making alone here / making alone in torch: 1/{1 / result['ratio_make_alone']:.0f}")
    if not quick:
        say(f"   target: at most 1/{1 / MOST_OF_TORCH:.0f}: {verdict(result['ratio'] <= MOST_OF_TORCH)}")
    return result


def part_large(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    ranks, microbatches = (256, 1024) if quick else (1024, 4096)
    say(f"\n2. Large: 1f1b, {ranks} ranks, {microbatches} microbatches, once in each of two fresh processes\n")
    costs = [fresh(measure, "1f1b", ranks, microbatches, {}, 1) for _ in range(2)]
    say(cost_table(costs))
    if not quick:
        fast = max(cost.total for cost in costs) <= MOST_SECONDS
        small = max(cost.peak_bytes for cost in costs) <= MOST_BYTES
        say(f"\n   target: at most {MOST_SECONDS:g} s in each: {verdict(fast)}")
        say(f"   target: at most {MOST_BYTES / 2**30:g} GiB in each: {verdict(small)}")
    return [asdict(cost) for cost in costs]


def part_largest(say: Callable[[str], None]) -> dict[str, Any]:
    ranks, microbatches = LARGEST
    say(f"1f1b, {ranks} ranks, {microbatches} microbatches, once in a fresh process\n")
    cost = fresh(measure, "1f1b", ranks, microbatches, {}, 1)
    say(cost_table([cost]))
    small = cost.peak_bytes < LARGEST_BYTES
    say(f"\n   target: less than {LARGEST_BYTES / 2**30:g} GiB: {verdict(small)}")
    return asdict(cost)


def part_curve(title: str, sizes: Iterable[tuple[int, int]], say: Callable[[str], None]) -> dict[str, Any]:
    say(f"\n{title}\n")
    costs = [fresh(measure, "1f1b", ranks, microbatches, {}, 5) for ranks, microbatches in sizes]
    say(cost_table(costs))
    result: dict[str, Any] = {"points": [asdict(cost) for cost in costs]}
    large = costs[len(costs) // 2 :]
    if len(large) > 1:
        slope = np.polyfit(np.log([cost.actions for cost in large]), np.log([cost.total for cost in large]), 1)[0]
        result["exponent"] = float(slope)
        say(
            f"\n   over the last {len(large)} rows, time grows as actions to the power {slope:.2f} "
            "(1 is linear, less where fixed costs still fade; fitted on logarithms)"
        )
    return result


def part_families(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    ranks, microbatches = (16, 128) if quick else (64, 512)
    names = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe") if quick else tuple(sl.families())
    which = "Some families" if quick else "Every family"
    say(f"\n5. {which} at {ranks} ranks, {microbatches} microbatches, with default options, by total time\n")
    costs = [fresh(measure, name, ranks, microbatches, {}, 5) for name in names]
    say(cost_table(sorted(costs, key=lambda cost: cost.total)))
    return [asdict(cost) for cost in costs]


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    versions = f"stageline {sl.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    say(f"{versions}; {machine}{'; --quick: smaller sizes' if quick else ''}")
    say("make: the schedule. verify: every rule and the certificate. simulate: the timeline, with makespan,")
    say("span, both bubbles and the peak memory of every rank read from it. Seconds of wall-clock time;")
    say("runs: how often it was measured, the median is shown. peak: the whole process, Python and numpy included.")
    start = time.perf_counter()
    highest = 256 if quick else 1024
    most = 2048 if quick else 16384
    results = {
        "versions": versions,
        "machine": machine,
        "quick": quick,
        "against_torch": part_torch(quick, say),
        "large": part_large(quick, say),
        "curve_ranks": part_curve(
            "3. The curve: 1f1b with 4 microbatches per rank",
            ((ranks, 4 * ranks) for ranks in doubling(16, highest)),
            say,
        ),
        "curve_microbatches": part_curve(
            "4. The curve: 1f1b at 64 ranks with more and more microbatches",
            ((64, microbatches) for microbatches in doubling(64, most)),
            say,
        ),
        "families": part_families(quick, say),
    }
    results["seconds"] = time.perf_counter() - start
    say(f"\nAll of this took {results['seconds']:.0f} s.")
    return results


def doubling(low: int, high: int) -> Iterable[int]:
    while low <= high:
        yield low
        low *= 2


# How it is printed.


def cost_table(costs: Sequence[Cost]) -> str:
    head = ["family", "ranks", "chunks", "microbatches", "actions", "make s", "verify s", "simulate s", "total s"]
    head += ["µs per action", "peak MiB", "runs"]
    rows = [
        [
            *(cost.family, str(cost.ranks), str(cost.chunks), str(cost.microbatches), f"{cost.actions:,}"),
            *(f"{seconds:.4f}" for seconds in (cost.make, cost.verify, cost.simulate, cost.total)),
            *(f"{cost.per_action:.2f}", f"{cost.peak_bytes / 2**20:.0f}", str(cost.repeats)),
        ]
        for cost in costs
    ]
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([" ", first.strip().ljust(widths[0]), *others]))
    return "\n".join(line.rstrip() for line in lines)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def _spread(seconds: Sequence[float]) -> tuple[str, str, str]:
    return (
        f"{statistics.median(seconds):.3f}",
        f"{min(seconds):.3f} … {max(seconds):.3f}",
        str(len(seconds)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under half a minute")
    parser.add_argument("--json", action="store_true", help="print the data as JSON; the tables go to standard error")
    parser.add_argument("--largest", action="store_true", help="only the largest schedule, of 134 million actions")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    results = part_largest(say) if options.largest else run(options.quick, say)
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()

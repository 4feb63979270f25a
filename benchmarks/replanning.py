"""A stage that becomes 1.5 times slower during a run: what replanning the order gains, and the best possible.

python benchmarks/replanning.py [--ranks 4] [--microbatches 8] [--schedules 1f1b zb-h1 auto] [--slow 2] [--steps 12]

Every rank is a thread whose stage sleeps 10 ms in F, I and W of every microbatch. After some steps, one stage sleeps
15 ms instead. A pipeline with `replan="auto"` detects that and changes the order; one with "off" does not. Rows show
medians of measured steps: before the slowdown, after it, and after replanning. They also show simulated makespans with
the new sleeps: of the original order, of the new one, and of the best order that `sl.synthesize` finds for these costs,
without a memory cap and with the memory of the original order. "auto" starts with the order synthesized for the costs
before the slowdown with the memory of 1f1b. If no order is 1% better, the row says so, and its gain is noise.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from typing import Any

import torch
from torch import nn

import stageline as sl
from stageline.testing import SleepStage

NOMINAL, WIDTH, TIMES = 0.01, 64, 1.5
RESIDUE = 0.5
"""The residue: the share of an activation that is held from I to W."""


def costs_of(stages: int, slow: int | None, transfer: float = 2e-4) -> sl.Costs:
    row = [NOMINAL * (TIMES if stage == slow else 1.0) for stage in range(stages)]
    return sl.Costs(forward=row, backward_input=row, backward_weight=row, residue=RESIDUE, transfer=transfer)


def first_order(name: str, ranks: int, microbatches: int) -> sl.Schedule:
    if name != "auto":
        return sl.schedule(name, ranks, microbatches)
    caps = list(range(ranks, 0, -1))
    return sl.synthesize(costs_of(ranks, None), ranks, microbatches, memory=caps, time_limit=5.0).schedule


def run(schedule: sl.Schedule, slow: int, steps: int, mode: Any) -> dict[str, Any]:
    """Run steps before the slowdown, as many while it is detected, and as many after that."""
    stages = [SleepStage(NOMINAL, NOMINAL, NOMINAL, width=WIDTH) for _ in range(schedule.stages)]
    pipe = sl.Pipeline(
        stages, loss_fn=nn.functional.mse_loss, schedule=schedule, replan=mode, replan_every=steps,
        planned=costs_of(schedule.stages, None),
    )  # fmt: skip
    x, y = torch.ones(schedule.microbatches, WIDTH), torch.zeros(schedule.microbatches, WIDTH)

    def period() -> float:
        return statistics.median([pipe.step(x, y).seconds for _ in range(steps)][1:])

    before = period()
    for kind in "FIW":
        stages[slow].seconds[kind] = TIMES * NOMINAL
    slowed = period()
    after = period()
    drift = [] if pipe.drift is None else [str(replan) for replan in pipe.replans]
    return {"before": before, "slowed": slowed, "after": after, "schedule": pipe.schedule, "said": drift}


def row_of(name: str, ranks: int, microbatches: int, slow: int, steps: int) -> dict[str, Any]:
    schedule = first_order(name, ranks, microbatches)
    changed, kept = (run(schedule, slow, steps, mode) for mode in ("auto", "off"))
    costs = costs_of(schedule.stages, slow)
    caps = sl.simulate(schedule, costs).peak_memory
    shape = {"chunks": schedule.stages // schedule.ranks, "placement": schedule.placement.pattern}
    best, same = (
        sl.synthesize(costs, ranks, microbatches, memory=memory, time_limit=5.0, **shape)  # type: ignore[arg-type]
        for memory in (None, caps)
    )
    old, new = (sl.simulate(order, costs).makespan for order in (schedule, changed["schedule"]))
    return {
        "schedule": name,
        "before ms": 1e3 * changed["before"],
        "slowed ms": 1e3 * changed["slowed"],
        "re-planned ms": 1e3 * changed["after"],
        "not re-planned ms": 1e3 * kept["after"],
        "measured gain": 1 - changed["after"] / kept["after"],
        "simulated old ms": 1e3 * old,
        "simulated new ms": 1e3 * new,
        "best ms": 1e3 * best.achieved,
        "best in the same memory ms": 1e3 * same.achieved,
        "over the best": new / best.achieved,
        "over the best in the same memory": new / same.achieved,
        "said": changed["said"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1", "auto"])
    parser.add_argument("--slow", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("stageline").setLevel(logging.ERROR)
    rows = [
        row_of(name, options.ranks, options.microbatches, options.slow, options.steps) for name in options.schedules
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("            measured, ms                              simulated, ms          new over the best order")
    print("schedule    before  slowed  re-planned  not  gain     old     new    best    any memory  the same memory")
    for row in rows:
        print(
            f"{row['schedule']:<10} {row['before ms']:7.1f} {row['slowed ms']:7.1f} {row['re-planned ms']:9.1f} "
            f"{row['not re-planned ms']:7.1f} {row['measured gain']:6.1%} {row['simulated old ms']:7.1f} "
            f"{row['simulated new ms']:7.1f} {row['best ms']:7.1f} {row['over the best']:9.3f} "
            f"{row['over the best in the same memory']:14.3f}"
        )
        for line in row["said"] or ["not re-planned: no order was found that is much better"]:
            print(f"           {line}")


if __name__ == "__main__":
    main()

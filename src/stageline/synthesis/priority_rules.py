"""The rules that list scheduling tries, the most promising first."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from stageline.synthesis.list_scheduling import PriorityRule
from stageline.synthesis.problem import SLACK, Problem

ORDERS = ((3, 2, 1, 0), (1, 3, 2, 0), (2, 3, 1, 0), (2, 1, 3, 0), (1, 2, 3, 0), (3, 2, 0, 1))
"""Priorities on a V placement; see `PriorityRule.order`."""
HABITS = (
    *((0.0, 0.01, math.inf), (0.0, 1.0, math.inf), (0.0, 0.5, -1), (0.0, 0.01, 1), (0.0, 0.5, 2), (0.0, 1.0, 0)),
    *((0.5, 0.01, math.inf), (0.0, 0.01, -1), (0.0, 0.01, 2), (0.0, 1.0, -1), (1.0, 1.0, math.inf), (0.5, 0.5, 2)),
)
"""(patience, gap, max_deferred) of a rule; −1 means one per rank."""


def tight_groups(problem: Problem) -> list[int]:
    """Return group sizes (negative: diagonals) that can finish where memory holds few microbatches at a time.

    On a diagonal the first microbatch reaches its last chunk after P(V−1) turns; the microbatches started meanwhile
    must fit too.
    """
    ranks, chunks = problem.ranks, problem.chunks
    if chunks == 1:
        return []
    microbatch_memory = [
        max(sum(problem.activation[stage][m] for stage in stages) for m in range(problem.microbatches))
        for stages in problem.stages_of
    ]
    capacity = min(
        cap / memory if memory > 0 else math.inf for cap, memory in zip(problem.caps, microbatch_memory, strict=True)
    )
    if capacity >= ranks:
        return []
    num_whole = max(1, int(capacity))
    turns = [math.ceil(ranks * (chunks - 1) / max(count - 1, 0.5)) for count in (num_whole, capacity, num_whole + 1)]
    diagonals = [-min(turn, ranks * chunks) for turn in (*turns, ranks * chunks)]
    return list(dict.fromkeys([num_whole, *diagonals, max(1, num_whole - 1)]))


def is_tight(problem: Problem) -> bool:
    """Whether each rank holds one stage, and some rank holds fewer microbatches than there are ranks."""
    return problem.chunks == 1 and any(
        cap < problem.ranks * max(row) * (1 - SLACK) for cap, row in zip(problem.caps, problem.activation, strict=True)
    )


def random_rules(problem: Problem, lower_bound: float, dice: random.Random) -> Iterator[PriorityRule]:
    """Yield random rules for tight caps, where waiting for a gradient often saves more time than it costs."""
    ranks = problem.ranks
    wholes = [whole for whole in (False, True) if problem.allows_form(whole)]
    while True:
        ahead = None
        if dice.random() < 0.3:
            slope = dice.uniform(0.3, 2.0)
            ahead = tuple(max(1.0, float(round(slope * (ranks - rank)))) for rank in range(ranks))
        yield PriorityRule(
            ahead=ahead,
            max_deferred=dice.choice((0, 1, 2, 3, ranks, math.inf, math.inf)),
            patience=dice.choice((0.0, 0.3, 0.5, 0.7, 1.0)),
            gap=dice.choice((0.01, 0.3, 0.5, 0.7, 1.0)),
            target=lower_bound * dice.uniform(1.0, 1.1) if dice.random() < 0.5 else math.inf,
            alternate=dice.random() < 0.5,
            forward_first=dice.random() < 0.3,
            whole=dice.choice(wholes),
        )


TARGETS = (1.0, 1.01, 1.03, 1.06)
"""Objective values to aim at, over the lower bound."""


def rules_for(problem: Problem, lower_bound: float = 0.0) -> Iterator[PriorityRule]:
    """Yield rules for list scheduling, the most promising first; with a lower bound, also rules that aim at it."""
    ranks, chunks = problem.ranks, problem.chunks
    wholes = [whole for whole in (False, True) if problem.allows_form(whole)]
    on_v = problem.pattern == "v"
    groups = [0] if chunks == 1 or (on_v and chunks == 2) else [0, -1, -2, 1, 2 * ranks, problem.microbatches]
    tight = tight_groups(problem)
    depths: list[tuple[float, ...] | None] = [None]
    for depth in (2.0, 1.0, 1.5, 1.25):
        limits = [round(depth * (ranks - rank)) + (chunks - 1) * ranks - (depth == 2) for rank in range(ranks)]
        depths.append(tuple(max(1.0, float(limit)) for limit in limits))
    priorities: list[dict[str, Any]] = [{"forward_first": False}, {"forward_first": True}, {"alternate": True}]
    if on_v:
        priorities = [{"order": order} for order in ORDERS] + [{"order": ()}] * (chunks > 2)
    narrow_priorities: list[dict[str, Any]] = [{"order": order} for order in ORDERS[: chunks > 2]] + [{"order": ()}]
    variants = list(product(tight, narrow_priorities if on_v else priorities)) + list(product(groups, priorities))
    if lower_bound > 0 and False in wholes:
        for factor, gap, ahead, (group, priority) in product(TARGETS, (1.0, 0.5), depths, variants):
            yield PriorityRule(ahead=ahead, gap=gap, target=factor * lower_bound, group=group, **priority)
    for patience, gap, deferred in HABITS:
        max_deferred = ranks if deferred < 0 else deferred
        for ahead, (group, priority), whole in product(depths, variants, wholes):
            yield PriorityRule(
                ahead=ahead, max_deferred=max_deferred, patience=patience, gap=gap, whole=whole, group=group, **priority
            )

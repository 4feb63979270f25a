"""Schedules to test on: small ones of every family, and random ones of none."""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

import stageline as sl
from support import oracle

TWO_WAY = ("chimera", "dualpipe")
"""The families that hold every stage twice, and so cannot run its backwards in one order."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "interleaved": [{"chunks": 1}, {"chunks": 2}, {"chunks": 3}],
    "interleaved-zb": [{"chunks": 1}, {"chunks": 2}, {"chunks": 3}],
    "forward-only": [{"chunks": 1}, {"chunks": 2}],
    "looped-bfs": [{"chunks": 1}, {"chunks": 2}, {"chunks": 3}],
    "hanayo": [{"waves": 1}, {"waves": 2}],
}
"""The options to try where a family has some."""

VARIANTS = [
    (name, options)
    for name in [
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "interleaved",
        "interleaved-zb",
        "looped-bfs",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe",
        "dualpipe-v",
        "chimera",
        "hanayo",
        "forward-only",
    ]
    for options in OPTIONS.get(name, [{}])
]
"""Every family, with each of its options."""

TRAINING = [(name, options) for name, options in VARIANTS if name != "forward-only"]
ONE_WAY = [(name, options) for name, options in VARIANTS if name not in TWO_WAY]


def allows(name: str, ranks: int, microbatches: int) -> bool:
    """Whether the definition of a family allows this number of ranks and microbatches."""
    if name == "chimera":
        return ranks % 2 == 0
    if name == "dualpipe":
        return ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks
    return name != "dualpipe-v" or microbatches >= 2 * ranks


@cache
def _schedule(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> sl.Schedule:
    return sl.schedule(name, ranks, microbatches, **dict(options))


@cache
def _certificate(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> sl.Certificate:
    return sl.verify(_schedule(name, ranks, microbatches, options))


def cached_schedule(name: str, ranks: int, microbatches: int, **options: Any) -> sl.Schedule:
    """Make a schedule, once for all tests."""
    return _schedule(name, ranks, microbatches, tuple(options.items()))


def cached_certificate(name: str, ranks: int, microbatches: int, **options: Any) -> sl.Certificate:
    """Verify a schedule, once for all tests."""
    return _certificate(name, ranks, microbatches, tuple(options.items()))


@st.composite
def of_families(draw: st.DrawFn, ranks: int = 4, microbatches: int = 6, training: bool = False) -> sl.Schedule:
    """A small schedule of any family; a family that asks for more microbatches gets them."""
    name, options = draw(st.sampled_from(TRAINING if training else VARIANTS))
    p = draw(st.integers(1, ranks))
    m = draw(st.integers(1, microbatches))
    if name in TWO_WAY:
        p += p % 2
    if name.startswith("dualpipe") and m < 2 * p:
        p = min(p, 2)
        m = 2 * p + 2 * (m % 2)
    if name == "dualpipe":
        m += m % 2
    return cached_schedule(name, p, m, **options)


@st.composite
def of_no_family(draw: st.DrawFn, ranks: int = 4, stages: int = 5, microbatches: int = 4) -> sl.Schedule:
    """A random schedule that gets to its end: random placement, random order, some backwards split, some pairs.

    Its messages may be taken out of order.
    """
    dice = random.Random(draw(st.integers(0, 2**32 - 1)))
    p = draw(st.integers(1, ranks))
    s = draw(st.integers(1, stages))
    m = draw(st.integers(1, microbatches))
    ways = draw(st.integers(1, 2))
    table = [[dice.randrange(p) for _ in range(s)] for _ in range(ways)]
    placement = sl.Placement.of(p, table, [dice.randrange(ways) for _ in range(m)])
    programs = in_random_order(dice, placement)
    for _ in range(draw(st.integers(0, 4))):
        programs = _with_a_pair(dice, programs, placement)
    return sl.Schedule.from_programs(programs, placement=placement, training=True)


def in_random_order(dice: random.Random, placement: sl.Placement) -> list[list[sl.Action | sl.Overlap]]:
    """Run one possible action after the other, until all have run."""
    last = placement.stages - 1
    programs: list[list[sl.Action | sl.Overlap]] = [[] for _ in range(placement.ranks)]
    ready = [sl.Action("F", 0, microbatch) for microbatch in range(placement.microbatches)]
    eager = dice.random()  # whether to prefer late stages, as a real schedule does
    while ready:
        by_depth = dice.random() < eager
        chosen = min(ready, key=lambda a: (a.microbatch, a.kind == "F")) if by_depth else dice.choice(ready)
        ready.remove(chosen)
        kind, stage, microbatch = chosen
        programs[placement.rank_of(stage, microbatch)].append(chosen)
        if kind == "F" and stage < last:
            ready.append(sl.Action("F", stage + 1, microbatch))
        elif kind == "F":
            ready.append(sl.Action(dice.choice(("B", "I")), stage, microbatch))
        if kind in "BI" and stage > 0:
            ready.append(sl.Action(dice.choice(("B", "I")), stage - 1, microbatch))
        if kind == "I":
            ready.append(sl.Action("W", stage, microbatch))
    return programs


def _with_a_pair(
    dice: random.Random, programs: list[list[sl.Action | sl.Overlap]], placement: sl.Placement
) -> list[list[sl.Action | sl.Overlap]]:
    """Join two neighbours, a forward and a backward, if the schedule still gets to its end."""
    places = []
    for rank, program in enumerate(programs):
        for at, (one, two) in enumerate(pairwise(program)):
            if isinstance(one, sl.Action) and isinstance(two, sl.Action):
                kinds = {one.kind, two.kind}
                if "F" in kinds and kinds & {"B", "I"}:
                    places.append((rank, at))
    if not places:
        return programs
    rank, at = dice.choice(places)
    one, two = programs[rank][at : at + 2]
    assert isinstance(one, sl.Action)
    assert isinstance(two, sl.Action)
    pair = sl.Overlap(one, two) if one.kind == "F" else sl.Overlap(two, one)
    joined = [list(program) for program in programs]
    joined[rank][at : at + 2] = [pair]
    paired = sl.Schedule.from_programs(joined, placement=placement, training=True)
    return joined if oracle.judge(paired) is None else programs


def examples(count: int) -> int:
    """How many examples a property test runs: all if STAGELINE_SWEEP=full, otherwise a third."""
    return count if os.environ.get("STAGELINE_SWEEP") == "full" else max(20, count // 3)

"""Cuts of layers into stages: as good as an exhaustive search, within memory limits and pins; and clear errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.common.errors import StagelineError
from stageline.model.partition.cuts import minimise
from stageline.model.partition.partition import Partition, evaluate, partition, uniform
from stageline.model.partition.request import PartitionRequest
from stageline.model.partition.schedule_cuts import CutConstraints, UnitCosts, cut_by_cost
from stageline.model.partition.v_cuts import cut_from_all_pairs
from stageline.schedules.placement import Placement
from stageline.schedules.registry import schedule
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate
from support.instances import examples

SHAPES = [(1, "loop"), (2, "v"), (2, "loop")]
OTHER_SHAPES = [(3, "loop"), (3, "v")]


def all_cuts(layers: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    for inner in combinations(range(1, layers), stages - 1):
        places = (0, *inner, layers)
        yield list(pairwise(places))


def rank_of(ranks: int, chunks: int, placement: str) -> list[int]:
    return [int(rank) for rank in Placement.of_pattern(placement, ranks, chunks).table[0]]


def totals(stages: list[tuple[int, int]], values: list[int], holders: list[int]) -> list[int]:
    sums = [0] * (max(holders) + 1)
    for (start, stop), rank in zip(stages, holders, strict=True):
        sums[rank] += sum(values[start:stop])
    return sums


def best_of_all(problem: dict[str, Any]) -> tuple[float, float] | None:
    """Return the slowest rank of the best cut and the smallest sum of squares, by trying all; None if none fits."""
    costs, ranks, chunks = problem["costs"], problem["ranks"], problem["chunks"]
    holders = rank_of(ranks, chunks, problem["placement"])
    speed = problem["speed"] or [1.0] * ranks
    ratings = []
    for stages in all_cuts(len(costs), ranks * chunks):
        if not all(stages[stage][0] <= layer < stages[stage][1] for layer, stage in problem["pinned"].items()):
            continue
        if problem["caps"] is not None and any(
            held > cap for held, cap in zip(totals(stages, problem["memory"], holders), problem["caps"], strict=True)
        ):
            continue
        loads = [work / fast for work, fast in zip(totals(stages, costs, holders), speed, strict=True)]
        ratings.append((max(loads), sum(load**2 for load in loads)))
    return min(ratings, default=None)


@st.composite
def problems(draw: st.DrawFn, shapes: list[tuple[int, str]], most_layers: int = 11) -> dict[str, Any]:
    chunks, placement = draw(st.sampled_from(shapes))
    ranks = draw(st.integers(1, 4 if chunks == 1 else 3 if chunks == 2 else 2))
    layers = draw(st.integers(ranks * chunks, most_layers))
    # Small numbers make ties; a few large ones make ranks that can do nothing else.
    cost = draw(st.sampled_from([st.integers(0, 3), st.integers(1, 40), st.one_of(st.integers(0, 5), st.just(50))]))
    sizes = st.lists(cost, min_size=layers, max_size=layers)
    memory, caps = None, None
    if draw(st.booleans()):
        memory = draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
        even = sum(memory) // ranks
        caps = draw(st.lists(st.integers(even, even + 12), min_size=ranks, max_size=ranks))
    pinned: dict[int, int] = {}
    if draw(st.booleans()):
        # Pins that some cut satisfies.
        inner = sorted(draw(st.permutations(range(1, layers)))[: ranks * chunks - 1])
        for layer in draw(st.lists(st.integers(0, layers - 1), max_size=3)):
            pinned[layer] = int(np.searchsorted(inner, layer, side="right"))
    speed = draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=ranks, max_size=ranks))
    return {
        "costs": draw(sizes), "ranks": ranks, "chunks": chunks, "placement": placement,
        "memory": memory, "caps": caps, "pinned": pinned, "speed": speed,
    }  # fmt: skip


def check_kept(cut: Partition, problem: dict[str, Any]) -> None:
    """Check the constraints of a cut, and that its figures are correct."""
    ranks, chunks = problem["ranks"], problem["chunks"]
    assert len(cut.stages) == ranks * chunks
    assert [cut.stages[0][0], *(stop for _, stop in cut.stages[:-1])] == [start for start, _ in cut.stages]
    assert cut.stages[-1][1] == len(problem["costs"])
    assert all(start < stop for start, stop in cut.stages)
    for layer, stage in problem["pinned"].items():
        assert cut.stages[stage][0] <= layer < cut.stages[stage][1]
    holders = rank_of(ranks, chunks, problem["placement"])
    assert cut.rank_of == tuple(holders)
    speed = problem["speed"] or [1.0] * ranks
    work = totals(cut.stages, problem["costs"], holders)
    assert cut.loads == tuple(load / fast for load, fast in zip(work, speed, strict=True))
    if problem["memory"] is not None:
        assert cut.memory == tuple(totals(cut.stages, problem["memory"], holders))
        assert all(held <= cap for held, cap in zip(cut.memory, problem["caps"], strict=True))
    without = {name: value for name, value in problem.items() if name != "pinned"}
    same = evaluate(cut.stages, **without)
    assert (same.loads, same.memory) == (cut.loads, cut.memory)


@settings(max_examples=examples(300))
@given(problems(SHAPES))
def test_one_chunk_and_two_are_as_good_as_any_cut(problem: dict[str, Any]) -> None:
    best = best_of_all(problem)
    if best is None:
        with pytest.raises(StagelineError, match="no cut fits the memory"):
            partition(**problem)
        return
    cut = partition(**problem)
    check_kept(cut, problem)
    assert cut.slowest == best[0]
    assert cut.optimal
    assert cut.gap == 0.0
    if problem["chunks"] == 1:
        assert sum(load**2 for load in cut.loads) == pytest.approx(best[1], rel=1e-12)


@settings(max_examples=examples(150))
@given(problems(OTHER_SHAPES))
def test_other_shapes_report_their_gap_to_the_bound(problem: dict[str, Any]) -> None:
    best = best_of_all(problem)
    try:
        cut = partition(**problem)
    except StagelineError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert refused.startswith("no cut was found that fits the memory")
        assert problem["caps"] is not None
        return
    assert best is not None
    check_kept(cut, problem)
    assert cut.bound <= best[0] * (1 + 1e-12)
    assert best[0] <= cut.slowest
    assert cut.gap == pytest.approx((cut.slowest - cut.bound) / cut.bound if cut.bound else 0.0)
    assert cut.optimal == (cut.slowest <= cut.bound)


@settings(max_examples=examples(100))
@given(problems(SHAPES), st.data())
def test_the_cap_that_an_error_names_works_and_none_below(problem: dict[str, Any], data: st.DataObject) -> None:
    layers, ranks = len(problem["costs"]), problem["ranks"]
    problem["memory"] = data.draw(st.lists(st.integers(1, 30), min_size=layers, max_size=layers))
    problem["caps"] = 0
    with pytest.raises(StagelineError, match="no cut fits the memory") as caught:
        partition(**problem)
    cap = int(str(caught.value).split("equal for all ranks, is ")[1].split(":")[0])
    problem["caps"] = [cap] * ranks
    check_kept(partition(**problem), problem)
    problem["caps"] = [cap - 1] * ranks
    assert best_of_all(problem) is None


@settings(max_examples=examples(60))
@given(st.integers(1, 40), st.integers(1, 10), st.randoms(use_true_random=False))
def test_costs_of_any_size_and_unit_are_cut_the_same(layers: int, ranks: int, dice: Any) -> None:
    layers = max(layers, ranks)
    costs = [dice.random() for _ in range(layers)]
    cut = partition(costs, ranks)
    for unit in (2.0**-900, 2.0**300):
        assert partition([cost * unit for cost in costs], ranks).stages == cut.stages
    assert partition(costs, ranks) == cut
    assert cut.slowest <= evaluate(uniform(layers, ranks), costs, ranks).slowest * (1 + 1e-12)


@pytest.mark.parametrize(("chunks", "placement"), [(1, "loop"), (2, "v"), (2, "loop"), (4, "loop"), (3, "v")])
def test_equal_layers_are_spread_evenly(chunks: int, placement: str) -> None:
    for layers in (12, 13, 23, 24):
        cut = partition([1] * layers, 3, chunks, placement)
        assert cut.slowest == -(-layers // 3)
        assert cut.optimal


def test_layers_without_cost_can_be_cut() -> None:
    for chunks, placement in ((1, "loop"), (2, "v"), (2, "loop")):
        cut = partition([0.0] * 9, 3, chunks, placement)
        assert (cut.slowest, cut.gap, cut.optimal) == (0.0, 0.0, True)


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_a_v_of_many_layers_is_never_worse_than_what_a_search_finds(seed: int) -> None:
    dice = np.random.default_rng(seed)
    ranks, layers = int(dice.integers(2, 7)), int(dice.integers(20, 60))
    costs = dice.uniform(0.1, 2.0, layers)
    best = partition(costs, ranks, 2, "v")
    for _ in range(200):
        inner = sorted(dice.choice(np.arange(1, layers), 2 * ranks - 1, replace=False).tolist())
        cut = list(zip((0, *inner), (*inner, layers), strict=True))
        assert best.slowest <= evaluate(cut, costs, ranks, 2, "v").slowest * (1 + 1e-12)
    held = dice.integers(1, 100, layers)
    least = partition(held, ranks, 2, "v").slowest
    capped = partition(costs, ranks, 2, "v", memory=held, caps=least)
    assert capped.slowest >= best.slowest
    assert capped.memory is not None
    assert max(capped.memory) <= least


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6), st.sampled_from(["v", "loop"]), st.sampled_from([0.02, 0.1, 1.0]))
def test_slack_gives_more_even_stages_and_the_gap_says_the_price(seed: int, placement: str, slack: float) -> None:
    dice = np.random.default_rng(seed)
    costs = dice.uniform(0.5, 1.5, int(dice.integers(16, 40)))
    best, even = (partition(costs, 4, 2, placement, slack=fraction) for fraction in (0.0, slack))
    assert best.optimal
    assert even.slowest <= best.slowest * (1 + slack)
    assert even.bound == pytest.approx(best.slowest, rel=1e-11)
    assert even.gap == pytest.approx(even.slowest / best.slowest - 1, abs=1e-11)
    if slack == 1.0:
        longest = [max(costs[start:stop].sum() for start, stop in cut.stages) for cut in (best, even)]
        assert longest[1] <= longest[0] * 1.2


@settings(max_examples=examples(40))
@given(st.integers(0, 10**6))
def test_the_heuristic_cut_of_a_v_is_used_only_if_proven_optimal(seed: int) -> None:
    # Heavy layers beside light ones, few layers a stage: there the quick search misses cuts.
    dice = np.random.default_rng(seed)
    ranks = int(dice.integers(2, 7))
    layers = int(dice.integers(2 * ranks, 6 * ranks))
    costs, held = dice.lognormal(0, 2, layers), dice.lognormal(0, 1, layers)
    for caps in (None, held.sum() / ranks * dice.uniform(1.0, 2.0)):
        request = PartitionRequest(costs, ranks, 2, "v", None if caps is None else held, caps, None, None)
        problem = request.problem({})
        slow = minimise(partial(cut_from_all_pairs, problem, capped=caps is not None), 0.0)
        if slow is None:
            with pytest.raises(StagelineError, match="no cut fits"):
                partition(costs, ranks, 2, "v", memory=held, caps=caps)
            continue
        cut = partition(costs, ranks, 2, "v", memory=None if caps is None else held, caps=caps)
        assert cut.slowest == pytest.approx(max(request.sums(costs, slow)), rel=1e-11)
        assert cut.optimal


FAMILIES = ["1f1b", "zb-v", "interleaved", "dualpipe-v", "hanayo", "dualpipe", "chimera", "interleaved-zb"]


def work_of(costs: Any, layers: int) -> UnitCosts:
    third = (costs / 3).tolist()
    return UnitCosts([f"layer.{index}" for index in range(layers)], costs.tolist(), third, third, third, [1.0] * layers)


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6), st.sampled_from(FAMILIES))
def test_a_cut_for_a_schedule_is_never_slower_in_simulation_than_equal_counts(seed: int, family: str) -> None:
    dice = np.random.default_rng(seed)
    target = schedule(family, 4, 16)
    layers = int(dice.integers(target.stages, 5 * target.stages))
    costs = dice.uniform(0.2, 1.8, layers)
    even = uniform(layers, target.stages)
    best = cut_by_cost(work_of(costs, layers), target.stages, CutConstraints(schedule=target), even)

    def makespan(stages: list[tuple[int, int]]) -> float:
        works = [float(costs[start:stop].sum()) / 3 for start, stop in stages]
        return simulate(target, Costs(works, works, works)).makespan

    assert makespan(best.stages) <= makespan(even) * (1 + 1e-12)
    assert best.bound <= best.slowest * (1 + 1e-12)
    # The time of every rank is that of its stages, a microbatch; where stages are on two ranks, half of each.
    share = 1 / len(target.placement.table)
    loads = np.zeros(4)
    for row in target.placement.table:
        for (start, stop), rank in zip(best.stages, row, strict=True):
            loads[rank] += costs[start:stop].sum() * share
    assert best.loads == pytest.approx(loads.tolist())


@settings(max_examples=examples(30))
@given(st.lists(st.integers(1, 20), min_size=4, max_size=9))
def test_stages_on_two_ranks_are_cut_as_well_as_any(costs: list[int]) -> None:
    dualpipe = schedule("dualpipe", 4, 8)
    cut = cut_by_cost(
        work_of(np.array(costs, dtype=float), len(costs)), 4, CutConstraints(schedule=dualpipe), uniform(len(costs), 4)
    )

    def slowest(stages: list[tuple[int, int]]) -> float:
        works = [sum(costs[start:stop]) for start, stop in stages]
        return max(works[0] + works[3], works[1] + works[2]) / 2

    best = min(map(slowest, all_cuts(len(costs), 4)))
    assert cut.bound == pytest.approx(best)
    assert cut.slowest == pytest.approx(slowest(cut.stages))
    assert cut.also_on == (3, 2, 1, 0)


def test_caps_and_pins_hold_for_a_schedule_too_and_its_chart_shows_both_stages_of_a_rank() -> None:
    work = work_of(np.array([1.0, 1, 1, 1, 1, 1, 1, 5]), 8)
    cut = cut_by_cost(work, 4, CutConstraints(schedule="dualpipe", memory=5, pinned={"layer.5": 3}), uniform(8, 4))
    assert cut.memory is not None
    assert max(cut.memory) <= 5
    assert cut.stages[3][0] <= 5
    assert "rank 0  0" in cut.chart()
    assert cut.chart().splitlines()[2].split()[2:4] == cut.chart().splitlines()[5].split()[2:4]
    with pytest.raises(StagelineError, match="every stage is on two ranks of the schedule; leave speed= out"):
        cut_by_cost(work, 4, CutConstraints(schedule="dualpipe", speed=[1, 1, 1, 2]), uniform(8, 4))
    odd = Schedule.from_programs(
        [["0F0", "0B0", "2F0", "2B0"], ["1F0", "1B0"]], placement=Placement.of(2, [[0, 1, 0]], [0])
    )
    with pytest.raises(
        StagelineError, match=r"places its stages on ranks as .*; cuts by cost support only stages placed"
    ):
        cut_by_cost(work, 3, CutConstraints(schedule=odd), uniform(8, 3))


def test_a_heavy_last_layer_gets_a_rank_with_fewer_layers() -> None:
    costs = [1.0] * 12 + [4.0]
    even = evaluate(uniform(13, 4), costs, 4)
    cut = partition(costs, 4)
    assert (even.loads, cut.loads) == ((4.0, 3.0, 3.0, 6.0), (4.0, 4.0, 4.0, 4.0))
    assert cut.layers_per_stage == [4, 4, 4, 1]


def test_the_chart_shows_both_cuts_on_one_scale() -> None:
    costs = [1.0] * 12 + [4.0]
    cut = partition(costs, 4)
    assert cut.chart(evaluate(uniform(13, 4), costs, 4), width=60).splitlines() == [
        "13 layers, 4 stages, 4 ranks",
        "░ before: slowest 6 (rank 3)",
        "█ after: slowest 4 (rank 0): no cut is better, 1.5 times as fast",
        "rank 0  0-3    ░░░░░░░░░░░░░░░░░░░░░░░░░░░░│               4",
        "        0-3    ████████████████████████████│               4",
        "rank 1  4-6    ░░░░░░░░░░░░░░░░░░░░░       │               3",
        "        4-7    ████████████████████████████│               4",
        "rank 2  7-9    ░░░░░░░░░░░░░░░░░░░░░       │               3",
        "        8-11   ████████████████████████████│               4",
        "rank 3  10-12  ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  6",
        "        12     ████████████████████████████│               4",
    ]


def test_the_chart_of_many_ranks_leaves_some_out_and_shows_memory() -> None:
    cut = partition([1.0] * 200, 100, memory=[2] * 200, caps=5)
    lines = cut.chart(width=70).splitlines()
    assert len(lines) == 2 + 64
    assert "(37 ranks not shown)" in "\n".join(lines)
    assert lines[-1].endswith("2  4 bytes of 5")
    assert max(map(len, lines)) <= 70
    assert evaluate([2, 1], [1, 1, 1], 2, memory=[4, 4, 4], caps=5).chart().count("(too much)") == 1


GOOD: dict[str, Any] = {"costs": [1, 2, 3, 4], "ranks": 2}
NAMES = ["embed", "block.0", "block.1", "head"]
BAD = [
    ({"costs": [1, -2, 3]}, r"costs\[1\] is -2; it must be a finite number >= 0"),
    ({"costs": [1, float("nan")], "names": ["a", "b"]}, r"costs\[1\] \(b\) is nan"),
    ({"costs": [1, float("inf")]}, r"costs\[1\] is inf"),
    ({"costs": []}, r"costs is \[\]; pass a list of numbers, one per layer"),
    ({"costs": ["a", "b"]}, r"costs is \['a', 'b'\]; pass numbers"),
    ({"ranks": 5}, "5 ranks with 1 chunks each are 5 stages, but there are 4 layers"),
    ({"ranks": 0}, "ranks is 0; pass an integer from 1"),
    ({"ranks": 2.0}, "ranks is 2.0; pass an integer"),
    ({"chunks": -1}, "chunks is -1"),
    ({"placement": "vee"}, r"placement is 'vee' \(did you mean 'v'\?\)"),
    ({"memory": [1, 2]}, "memory has 2 entries; expected 4"),
    ({"caps": 3}, "caps needs memory"),
    ({"memory": [1] * 4, "caps": [1, 2, 3]}, "caps has 3 entries; expected 2"),
    ({"memory": [1] * 4, "caps": float("nan")}, r"caps\[0\] is nan"),
    ({"speed": [1]}, "speed has 1 entries; expected 2"),
    ({"speed": [1, 0]}, r"speed\[1\] is 0; it must be above 0"),
    ({"slack": -0.1}, "slack must be a fraction >= 0"),
    ({"slack": float("nan")}, "slack must be a fraction >= 0.*nan"),
    ({"names": ["a"]}, "names has 1 entries, but costs has 4"),
    ({"pinned": {4: 0}}, "pinned has the layer 4; pass a number from 0 to 3"),
    ({"pinned": {1: 2}}, r"pinned\[1\] is stage 2; there are 2, so pass 0 to 1"),
    ({"pinned": {"head": 1}}, "pinned has the layer 'head', but layers have no names"),
    ({"pinned": {"block1": 1}, "names": NAMES}, r"no layer has that name \(did you mean 'block.1'\?\)"),
    ({"pinned": {"block.0": 1, "block.1": 0}, "names": NAMES}, r"layer 1 \(block.0\) is pinned to stage 1, and"),
    ({"pinned": {0: 1}}, "layer 0 is always in stage 0, and layer 0 is pinned to stage 1: a layer is in one stage"),
    ({"ranks": 4, "pinned": {1: 0}}, "layer 1 is pinned to stage 0, and layer 3 is always in stage 3: the 4 stages"),
    ({"memory": [1, 9, 1, 1], "caps": 5}, "layer 1 alone has 9 bytes; the largest cap of a rank is 5; the smallest"),
    ({"memory": [3, 3, 3, 3], "caps": 5}, "have 12 bytes; the caps of all ranks add up to 10; the smallest.* is 6"),
    ({"memory": [3, 3, 3, 3], "caps": [8, 5]}, "the closest gives rank 0 9 bytes; its cap is 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD)
def test_bad_input_is_one_clear_error(change: dict[str, Any], says: str) -> None:
    with pytest.raises(StagelineError, match=says):
        partition(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([2, 1, 1], "got 3 stages; 2 ranks with 1 chunks each have 2 stages"),
        ([2, 3], "the stages hold 5 layers, but there are 4"),
        ([4, 0], "stage 1 holds the layers 4 to 4.* at least one"),
        ([(0, 2), (3, 4)], "stage 1 holds the layers 3 to 4.* must start at 2"),
        ([(0, 2), "x"], "stage 1 is 'x'"),
    ],
)
def test_evaluate_refuses_an_invalid_cut(stages: Any, says: str) -> None:
    with pytest.raises(StagelineError, match=says):
        evaluate(stages, [1, 2, 3, 4], 2)


def test_uniform_and_charts_refuse_mismatched_sizes() -> None:
    with pytest.raises(StagelineError, match="2 layers cannot be cut into 3 stages"):
        uniform(2, 3)
    with pytest.raises(
        StagelineError, match="before is a cut of 4 layers for 2 ranks, but this one is for 3 layers and 3 ranks"
    ):
        partition([1, 1, 1], 3).chart(partition([1, 1, 1, 1], 2))


def test_pins_may_be_names() -> None:
    cut = partition([1, 2, 3, 4], 2, names=NAMES, pinned={"block.0": 1})
    assert cut.stages == [(0, 1), (1, 4)]
    assert cut.names == tuple(NAMES)


def test_partition_does_not_import_torch() -> None:
    code = "import sys; import stageline.model.partition.partition; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

"""Lower bounds against the true optimum, which is found by trying every order of small instances."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.schedules.channels import check_channels
from stageline.synthesis.baselines import programs_of, sequential_plan
from stageline.synthesis.bounds import Relaxation, lower_bound, one_rank, quick_bound
from stageline.synthesis.cp_sat import decide
from stageline.synthesis.cp_sat import search as exact_search
from stageline.synthesis.fast_simulate import end_times, peak_memory_of
from stageline.synthesis.list_scheduling import Board, PriorityRule, ProgramPlan, list_schedule, schedule_of
from stageline.synthesis.periodic import periodic_plans
from stageline.synthesis.problem import Problem, problem_of
from stageline.synthesis.windows import improve_in_windows
from support.instances import examples

Step = tuple[str, int, int]


def orders(problem: Problem, rank: int, split: dict[tuple[int, int], bool]) -> Iterator[list[Step]]:
    """Every order of a rank's actions that keeps stages in order and fits its memory."""
    cap = problem.caps[rank] * (1 + 1e-9)
    actions: list[Step] = []
    for stage in problem.stages_of[rank]:
        for m in range(problem.microbatches):
            actions += [(kind, stage, m) for kind in ("FIW" if split[stage, m] else "FB")]

    def before(one: Step, two: Step) -> bool:
        """Whether the first must come before the second on this rank."""
        (a, s, m), (b, t, n) = one, two
        if s == t:
            same = a == b or (a in "BI" and b in "BI") or (a in "BW" and b in "BW")
            return (m < n and same) or (m == n and "FIW".replace("I", "BI").index(a) < "FBIW".index(b) and a != b)
        if m != n:
            return False
        return (a == b == "F" and s < t) or (a in "BI" and b in "BI" and s > t) or (a == "F" and b in "BI")

    def size(step: Step) -> tuple[float, float]:
        """Additional memory during an action, and after it."""
        kind, s, m = step
        held, kept = problem.activation[s][m], problem.residue[s][m]
        extra = problem.transients["FBIW".index(kind)][s][m]
        change = {"F": held, "B": -held, "I": kept - held, "W": -kept}[kind]
        return max(change, extra + (held if kind == "F" else 0.0)), change

    def extend(done: list[Step], left: list[Step], level: float) -> Iterator[list[Step]]:
        if not left:
            yield done
        for step in left:
            during, change = size(step)
            if level + during <= cap and not any(before(other, step) for other in left if other != step):
                yield from extend([*done, step], [other for other in left if other != step], level + change)

    yield from extend([], actions, 0.0)


def optimum(problem: Problem, most: int = 40_000) -> float | None:
    """The best objective over all orders of all ranks; None if there are too many to try."""
    pairs = list(product(range(problem.stages), range(problem.microbatches)))
    choices = [{True: (True,), False: (False,), None: (True, False)}[problem.split]] * len(pairs)
    best, count = math.inf, 0
    for chosen in product(*choices):
        split = dict(zip(pairs, chosen, strict=True))
        ways = [list(orders(problem, rank, split)) for rank in range(problem.ranks)]
        count += math.prod(map(len, ways))
        if count > most:
            return None
        for programs in product(*ways):
            texts = [[f"{stage}{kind}{m}" for kind, stage, m in program] for program in programs]
            schedule = sl.Schedule.from_programs(texts, placement=problem.placement, training=True)
            try:
                sl.verify(schedule)
            except sl.ScheduleError:
                continue
            timeline = sl.simulate(schedule, problem.costs)
            best = min(best, timeline.makespan if problem.objective == "makespan" else timeline.span)
    return best


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """An instance whose orders can all be tried: few stages, two microbatches, any costs and caps."""
    dice = random.Random(draw(st.integers(0, 2**32 - 1)))
    ranks, chunks, count = draw(st.sampled_from([(1, 1, 2), (2, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (3, 1, 1)]))
    stages = ranks * chunks

    def some(low: int = 0) -> list[int]:
        return [dice.randint(low, 6) for _ in range(stages)]

    transients: list[Any] = [0, {"F": some(), "W": some()}]
    costs = sl.Costs(
        forward=some(draw(st.integers(0, 1))),
        backward_input=some(1),
        backward_weight=some(draw(st.integers(0, 1))),
        transfer=dice.choice([0, 1, 3]),
        activation=some(1),
        residue=some(),
        transient=dice.choice(transients),
        scale=dice.choice([None, [1, 2][:count]]),
    )
    arguments = (chunks, dice.choice(["loop", "v"]), dice.choice(["makespan", "span"]), dice.choice([True, False]))
    free = problem_of(costs, ranks, count, None, *arguments)
    room = dice.choice([0, 0, 2, 5, math.inf])
    return problem_of(costs, ranks, count, [least + room for least in free.least_memory], *arguments)


def tight_problem(dice: random.Random) -> Problem:
    """An instance with one stage a rank and memory for two or three microbatches, so that forwards meet gradients."""
    ranks, count = dice.choice([(3, 6), (4, 5), (4, 6), (5, 6)])

    def some(low: int, high: int) -> list[int]:
        return [dice.randint(low, high) for _ in range(ranks)]

    costs = sl.Costs(
        forward=dice.choice([some(3, 6), [4] * ranks]),
        backward_input=dice.choice([some(3, 6), [4] * ranks]),
        backward_weight=some(0, 2),
        transfer=dice.choice([0, 1, 2]),
        residue=dice.choice([0, 0.5, 1]),
        scale=dice.choice([None, None, [dice.choice([1, 2]) for _ in range(count)]]),
    )
    arguments = (1, "loop", dice.choice(["makespan", "span"]), dice.choice([True, False, None]))
    least = problem_of(costs, ranks, count, None, *arguments).least_memory
    rooms: list[list[float]] = [[1] * ranks, [1.5] * ranks, [*some(1, 2)]]
    caps = [need + more for need, more in zip(least, dice.choice(rooms), strict=True)]
    return problem_of(costs, ranks, count, caps, *arguments)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_crossings_raise_no_bound_above_the_optimum(seed: int) -> None:
    problem = tight_problem(random.Random(seed))
    bound = lower_bound(problem)
    with patch("stageline.synthesis.bounds.floors_of", lambda relaxation, heads: {}):  # the solver must not use them
        board, plan = Board(problem), sequential_plan(problem)
        ends = end_times(board, plan.programs)
        assert ends is not None
        starts = {code: ends[code] - board.durations[code] for program in plan.programs for code in program}
        limits: dict[str, Any] = {"seconds": 60, "effort": 5, "seed": 0, "on_bound": lambda bound: None}
        result = exact_search(board, starts, lower_bound(problem), plan.value, **limits)
    if result.programs is not None:  # at least as long as the optimum, even if time ran out
        timeline = sl.simulate(schedule_of(problem, result.programs), problem.costs)
        achieved = timeline.makespan if problem.objective == "makespan" else timeline.span
        assert bound <= achieved * (1 + 1e-9)


def test_crossings_prove_what_rank_loads_do_not() -> None:
    costs = sl.Costs(forward=10, backward_input=10.5, backward_weight=8, transfer=0.5)
    problem = problem_of(costs, 4, 16, 2, 1, "loop", "span", True)
    with patch("stageline.synthesis.bounds.floors_of", lambda relaxation, heads: {}):
        without = lower_bound(problem)
    assert lower_bound(problem) > 1.05 * without


def best_of_states(problem: Problem) -> float:
    """The best objective of an instance with one stage a rank, by exhaustive search.

    A state is how many F, I and W every rank has run; of all ways to come to it, those are kept that no other way
    beats in the moment each rank is free and each message arrives.
    """
    ranks, count = problem.ranks, problem.microbatches
    kinds = {True: "FIW", False: "FB"}[bool(problem.split)]
    start = ((0,) * len(kinds),) * ranks
    blank = ((0.0,) * ranks, ((),) * ranks, ((),) * ranks)
    layer: dict[Any, list[Any]] = {start: [blank]}
    for _ in range(len(kinds) * ranks * count):
        following: dict[Any, list[Any]] = {}
        for state, ways in layer.items():
            for rank, at in product(range(ranks), range(len(kinds))):
                if not may_run(problem, state, rank, at):
                    continue
                done = list(state[rank])
                done[at] += 1
                key = (*state[:rank], tuple(done), *state[rank + 1 :])
                for way in ways:
                    keep_best(following.setdefault(key, []), ran(problem, state, way, rank, kinds[at], state[rank][at]))
        layer = following
    begins = [0.0] * ranks
    if problem.objective == "span":
        for rank in range(1, ranks):
            begins[rank] = begins[rank - 1] + problem.times[0][rank - 1][0] + problem.forward_hop[rank - 1][0]
    (ways,) = layer.values()
    return float(min(max(end - begin for end, begin in zip(way[0], begins, strict=True)) for way in ways))


def may_run(problem: Problem, state: Any, rank: int, at: int) -> bool:
    """Whether a rank may run its next F, I or W: it exists, its input is ready, and it fits."""
    done = state[rank]
    m = done[at]
    if m == problem.microbatches or (at > 0 and m >= done[at - 1]):
        return False
    neighbour = rank - 1 if at == 0 else rank + 1
    if at < 2 and 0 <= neighbour < problem.ranks and state[neighbour][at] <= m:
        return False
    sizes, kept = problem.activation[rank], problem.residue[rank]
    level = sum(sizes[done[1] : done[0]]) + (sum(kept[done[2] : done[1]]) if len(done) == 3 else 0.0)
    kind = (0, (2 if len(done) == 3 else 1), 3)[at]
    during = level + problem.transients[kind][rank][m] + (sizes[m] if at == 0 else 0.0)
    after = level - sizes[m] + kept[m] if (at == 1 and len(done) == 3) else 0.0
    return bool(max(during, after) <= problem.caps[rank] * (1 + 1e-9))


def ran(problem: Problem, state: Any, way: Any, rank: int, kind: str, m: int) -> Any:
    """When ranks are free and messages arrive after one more action: outputs to each rank, and gradients to each."""
    free, forth, back = way
    begin = free[rank]
    outputs, gradients = [list(row) for row in forth], [list(row) for row in back]
    if kind == "F" and rank:
        begin = max(begin, outputs[rank].pop(0))
    if kind in "BI" and rank < problem.ranks - 1:
        begin = max(begin, gradients[rank].pop(0))
    end = begin + problem.times["FBIW".index(kind)][rank][m]
    if kind == "F" and rank < problem.ranks - 1:
        outputs[rank + 1].append(end + problem.forward_hop[rank][m])
    if kind in "BI" and rank:
        gradients[rank - 1].append(end + problem.backward_hop[rank][m])
    return (*free[:rank], end, *free[rank + 1 :]), tuple(map(tuple, outputs)), tuple(map(tuple, gradients))


def keep_best(ways: list[Any], new: Any) -> None:
    """Keep a way unless another one is at least as early everywhere."""

    def flat(way: Any) -> list[float]:
        return [*way[0], *(time for rows in way[1:] for row in rows for time in row)]

    mine = flat(new)
    others = [flat(way) for way in ways]
    if any(all(one <= two for one, two in zip(other, mine, strict=True)) for other in others):
        return
    ways[:] = [
        way
        for way, other in zip(ways, others, strict=True)
        if not all(one <= two for one, two in zip(mine, other, strict=True))
    ]
    ways.append(new)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_under_a_cap_no_bound_exceeds_the_best_of_all_orders(seed: int) -> None:
    dice = random.Random(seed)
    ranks, count = dice.choice([(1, 5), (2, 3), (2, 4), (2, 4), (3, 2), (3, 3)])

    def some(low: int, high: int) -> list[int]:
        return [dice.randint(low, high) for _ in range(ranks)]

    costs = sl.Costs(
        forward=some(1, 5),
        backward_input=some(1, 5),
        backward_weight=some(1, 5),
        transfer=dice.choice([0, 1, 4]),
        activation=dice.choice([1, 2]),
        residue=dice.choice([0, 1, 2]),
        scale=dice.choice([None, None, [dice.choice([1, 2]) for _ in range(count)]]),
    )
    arguments = (1, "loop", dice.choice(["makespan", "makespan", "span"]), dice.choice([True, True, False]))
    least = problem_of(costs, ranks, count, None, *arguments).least_memory
    caps = [need + dice.randint(0, 8) / 2 for need in least]
    problem = problem_of(costs, ranks, count, caps, *arguments)
    best = best_of_states(problem)
    assert lower_bound(problem) <= best + 1e-9
    assert quick_bound(Relaxation(problem)) <= best + 1e-9
    r = sl.synthesize(costs, ranks, count, memory=caps, objective=arguments[2], split=arguments[3], time_limit=30)
    assert r.achieved == pytest.approx(best)
    assert r.gap == 0


@given(tiny())
@settings(max_examples=examples(60))
def test_no_bound_exceeds_the_optimum_and_exact_search_finds_it(problem: Problem) -> None:
    best = optimum(problem)
    if best is None:
        return
    assert lower_bound(problem) <= best + 1e-9
    assert quick_bound(Relaxation(problem)) <= best + 1e-9
    board = Board(problem)
    plan = sequential_plan(problem)
    ends = end_times(board, plan.programs)
    assert ends is not None
    starts = {code: ends[code] - board.durations[code] for program in plan.programs for code in program}
    limits: dict[str, Any] = {"seconds": 60, "effort": 60, "seed": 0, "on_bound": lambda bound: None}
    result = exact_search(board, starts, lower_bound(problem), plan.value, **limits)
    assert result.is_finished
    assert result.programs is not None
    assert result.bound == pytest.approx(best, abs=1e-6)
    timeline = sl.simulate(schedule_of(problem, result.programs), problem.costs)
    achieved = timeline.makespan if problem.objective == "makespan" else timeline.span
    assert achieved == pytest.approx(best, abs=1e-6)
    below, above = (decide(board, 0.0, factor * best, seconds=60, effort=60, seed=0) for factor in (0.999, 1.000001))
    assert below.programs is None
    assert below.bound <= best + 1e-6
    assert above.programs is not None


@pytest.mark.parametrize(("chunks", "placement"), [(1, "loop"), (2, "v"), (2, "loop")])
def test_windows_shorten_a_plan_and_keep_it_valid(chunks: int, placement: str) -> None:
    costs = sl.Costs(forward=[4, 5, 3] * chunks, backward_input=4, backward_weight=3, transfer=0.3, residue=0.7)
    problem = problem_of(costs, 3, 5, 3.5 * chunks, chunks, placement, "span", True)
    plan = sequential_plan(problem)
    plans = improve_in_windows(Board(problem), plan, dice=random.Random(0), seconds_left=lambda: 60.0)
    *_, best = islice(plans, 12)
    assert best.value < 0.8 * plan.value
    schedule = schedule_of(problem, best.programs)
    assert sl.verify(schedule).in_order
    check_channels(schedule)
    timeline = sl.simulate(schedule, costs)
    assert timeline.span == pytest.approx(best.value)
    assert max(timeline.peak_memory) <= 3.5 * chunks * (1 + 1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30))
def test_a_choice_of_whole_and_split_backwards_is_bounded_too(seed: int) -> None:
    dice = random.Random(seed)
    costs = sl.Costs(
        forward=[dice.randint(1, 5) for _ in range(2)],
        backward_input=dice.randint(1, 5),
        backward_weight=dice.randint(1, 5),
        backward=dice.randint(2, 9),
        residue=dice.choice([0, 1, 2]),
        overlap=None,
    )
    problem = problem_of(costs, 2, 1, dice.choice([1, 2, None]), 1, "loop", "makespan", None)
    best = optimum(problem)
    assert best is not None
    assert lower_bound(problem) <= best + 1e-9
    r = sl.synthesize(costs, 2, 1, memory=problem.caps, time_limit=30)
    assert r.achieved == pytest.approx(best)
    assert r.gap == 0


def test_the_known_bounds_hold_or_are_exceeded() -> None:
    f, i, w, c = 10, 11, 7, 1
    for residue in (0, 0.5, 1):
        costs = sl.Costs(forward=f, backward_input=i, backward_weight=w, transfer=c, residue=residue)
        for p, m, cap in [(4, 8, None), (4, 8, 4), (4, 8, 2), (8, 16, 6), (3, 20, 3), (6, 3, 4)]:
            makespan, span = (
                lower_bound(problem_of(costs, p, m, cap, 1, "loop", objective, None))
                for objective in ("makespan", "span")
            )
            assert makespan >= m * (f + i + w) + (p - 1) * (f + c) - 1e-9
            assert span >= (p - 1) * (f + i + 2 * c) + m * (f + i) + w - 1e-9
            if cap is not None:
                assert span >= m * (f + i + w) + max(0, (p - 1) * (i + 2 * c) + (p - min(cap, m)) * f) - 1e-9
            assert makespan >= span - 1e-9


def test_a_cap_of_one_leaves_no_choice_and_the_bound_says_so() -> None:
    costs = sl.Costs(forward=[3, 5, 2], backward_input=[4, 1, 6], backward_weight=[2, 2, 9], transfer=1)
    problem = problem_of(costs, 3, 5, 1, 1, "loop", "makespan", None)
    r = sl.synthesize(costs, 3, 5, memory=1)
    assert lower_bound(problem) == pytest.approx(r.achieved)


@given(st.lists(st.tuples(*[st.integers(0, 8)] * 3), min_size=1, max_size=6))
@settings(max_examples=examples(100))
def test_one_rank_is_between_the_simple_bounds_and_any_order(jobs: list[tuple[int, int, int]]) -> None:
    length = one_rank([(float(head), float(time), float(tail)) for head, time, tail in jobs])
    assert length >= max(head + time + tail for head, time, tail in jobs)
    for chosen in range(1, 2 ** len(jobs)):
        some = [job for at, job in enumerate(jobs) if chosen >> at & 1]
        low, tail = min(job[0] for job in some), min(job[2] for job in some)
        assert length >= low + sum(job[1] for job in some) + tail
    now = longest = 0
    for head, time, tail in sorted(jobs):
        now = max(now, head) + time
        longest = max(longest, now + tail)
    assert length <= longest


@given(st.sampled_from(["1f1b", "zb-h1", "zb-h2", "gpipe", "eager-1f1b"]), st.integers(1, 5), st.integers(1, 7))
@settings(max_examples=examples(60))
def test_the_fast_simulation_agrees_with_simulate(name: str, ranks: int, microbatches: int) -> None:
    dice = random.Random(ranks * 100 + microbatches)
    costs = sl.Costs(
        forward=[dice.uniform(1, 3) for _ in range(ranks)],
        backward_input=[dice.uniform(1, 3) for _ in range(ranks)],
        transfer=[[dice.uniform(0, 2) for _ in range(ranks)] for _ in range(ranks)],
        scale=[dice.uniform(0.5, 2) for _ in range(microbatches)],
    )
    schedule = sl.schedule(name, ranks, microbatches)
    problem = problem_of(costs, ranks, microbatches, None, 1, "loop", "makespan", None)
    ends = end_times(Board(problem), programs_of(schedule))
    assert ends is not None
    timeline = sl.simulate(schedule, costs)
    codes = [code for program in programs_of(schedule) for code in program]
    assert [ends[code] for code in codes] == pytest.approx(timeline.end.tolist())


def test_the_bound_holds_for_overlapped_pairs_that_save_time() -> None:
    costs = sl.Costs(overlap=1.5)
    for p, m in [(2, 4), (4, 8), (3, 9)]:
        timeline = sl.simulate(sl.schedule("dualpipe-v", p, m), costs)
        for objective, value in (("makespan", timeline.makespan), ("span", timeline.span)):
            assert lower_bound(problem_of(costs, p, m, None, 2, "v", objective, None)) <= value + 1e-9
        r = sl.synthesize(costs, p, m, chunks=2, placement="v", time_limit=0.5)
        assert r.achieved <= timeline.makespan
        assert r.lower_bound <= r.achieved


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_a_repeated_middle_is_valid_and_needs_no_more_memory(seed: int) -> None:
    dice = random.Random(seed)
    ranks, chunks = dice.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    more = dice.choice([12, dice.randint(1, 9)])
    short, long = (
        Board(problem_of(sl.Costs(residue=0.5), ranks, count, None, chunks, "loop", "makespan", True))
        for count in (2 * ranks + 1, 2 * ranks + 1 + more)
    )
    held = dice.choice([ranks * chunks, 2 * ranks])
    plan = list_schedule(short, PriorityRule(ahead=(held,) * ranks, gap=dice.choice([0.01, 1])))
    if plan is None:
        return
    peaks = [peak_memory_of(short, program) for program in plan.programs]
    for periodic in periodic_plans(short, plan, long, tries=10, is_over=lambda: False):
        schedule = schedule_of(long.problem, periodic.programs)
        assert sl.verify(schedule).in_order
        timeline = sl.simulate(schedule, long.problem.costs)
        assert periodic.value == pytest.approx(timeline.makespan)
        if more == 12:  # a multiple of every part, so that none is run in part
            assert all(now <= before for now, before in zip(timeline.peak_memory, peaks, strict=True))


def test_a_middle_with_both_forms_of_the_backward_is_not_repeated() -> None:
    short, long = (Board(problem_of(sl.Costs(), 1, count, None, 1, "loop", "makespan", None)) for count in (4, 8))
    mixed = ["0F0", "0B0", "0F1", "0I1", "0W1", "0F2", "0B2", "0F3", "0I3", "0W3"]
    programs = programs_of(sl.Schedule.from_programs([mixed]))
    for plan in periodic_plans(short, ProgramPlan(programs, 12.0, "by hand"), long, tries=20, is_over=lambda: False):
        sl.verify(schedule_of(long.problem, plan.programs))


def test_the_quick_bound_of_a_large_step_is_near_the_careful_one() -> None:
    costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    for cap in (None, 8, 6):
        for objective in ("makespan", "span"):
            problem = problem_of(costs, 8, 64, cap, 1, "loop", objective, None)
            assert 0.75 * lower_bound(problem) <= quick_bound(Relaxation(problem)) <= lower_bound(problem) + 1e-9

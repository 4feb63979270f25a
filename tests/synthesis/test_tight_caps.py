"""Caps below the number of ranks: proofs from trips exclude no schedule that exists; beams and windows find some."""

from __future__ import annotations

import random
from itertools import combinations, islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.synthesis import cp_sat, windows
from stageline.synthesis.baselines import sequential_plan
from stageline.synthesis.beam_search import Beam, random_beam_rules
from stageline.synthesis.bounds import lower_bound
from stageline.synthesis.fast_simulate import evaluate
from stageline.synthesis.list_scheduling import Board, ProgramPlan, list_schedule, schedule_of
from stageline.synthesis.local_search import improve
from stageline.synthesis.priority_rules import random_rules
from stageline.synthesis.problem import Problem, problem_of
from stageline.synthesis.trips import MIN_WAYS, TripBounds
from support.instances import examples


def tight_problem(dice: random.Random) -> Problem:
    """An instance with one stage a rank and memory for few microbatches: any costs, caps, transfers and lengths."""
    ranks, count = dice.randint(2, 6), dice.randint(4, 10)

    def some(low: float, high: float) -> Any:
        return dice.choice([[dice.uniform(low, high) for _ in range(ranks)], [4.0] * ranks])

    transients: list[Any] = [0, {"F": 0.2}]
    costs = sl.Costs(
        forward=some(2, 6),
        backward_input=some(2, 6),
        backward_weight=some(0, 3),
        transfer=dice.choice([0, 0.5, 2]),
        residue=dice.choice([0, 0.5, 1]),
        transient=dice.choice(transients),
        scale=dice.choice([None, None, [dice.choice([1, 1.5, 2]) for _ in range(count)]]),
    )
    arguments = (1, "loop", dice.choice(["makespan", "span"]), dice.choice([True, None]))
    least = problem_of(costs, ranks, count, None, *arguments).least_memory
    room = dice.choice([1, 1.5, 2, 3])
    caps = [need + dice.choice([room, room, dice.uniform(0.5, 4)]) for need in least]
    return problem_of(costs, ranks, count, caps, *arguments)


def good_plan(problem: Problem, dice: random.Random) -> ProgramPlan | None:
    """A short schedule: the best of some rules, improved by local search."""
    board = Board(problem)
    rules = random_rules(problem, lower_bound(problem), dice)
    plans = [list_schedule(board, rule) for _, rule in zip(range(40), rules, strict=False)]
    beams = random_beam_rules(dice, 40, lower_bound(problem))
    plans += [Beam(board).plan(rule) for _, rule in zip(range(3), beams, strict=False)]
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)
    if best is None:
        return None
    limits: dict[str, Any] = {"moves": 300, "lower_bound": 0.0, "is_over": lambda: False}
    return [best, *improve(board, best, dice=dice, **limits)][-1]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30))
def test_every_window_has_a_solution_and_every_solution_fits_in_memory(seed: int) -> None:
    dice = random.Random(seed)
    problem = tight_problem(dice)
    board, cp_model = Board(problem), cp_sat.solver()
    rules = islice(random_rules(problem, lower_bound(problem), dice), 20)
    plan = next((plan for rule in rules if (plan := list_schedule(board, rule)) is not None), sequential_plan(problem))
    statuses, programs_solved = [], []

    def solve(*arguments: Any) -> Any:
        statuses.append(unchanged_solve(*arguments))
        return statuses[-1]

    def evaluated(board: Board, programs: Any, how: str) -> ProgramPlan | None:
        result = evaluate(board, programs, how)
        if programs is not None:
            programs_solved.append(result)
        return result

    unchanged_solve = cp_sat.solve
    with patch.object(cp_sat, "solve", solve), patch.object(windows, "evaluate", evaluated):
        plans = list(islice(windows.improve_in_windows(board, plan, dice=dice, seconds_left=lambda: 60.0), 4))
    assert len(plans) == len(statuses) == 4
    assert cp_model.INFEASIBLE not in statuses  # the orders of the plan are a solution
    assert None not in programs_solved
    assert plans[-1].value <= plan.value * (1 + 1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_trips_exclude_no_schedule_that_exists(seed: int) -> None:
    dice = random.Random(seed)
    problem = tight_problem(dice)
    bounds, plan = TripBounds(problem, dice), good_plan(problem, dice)
    if plan is None or bounds.num_slots < 2:
        return
    subsets = [
        slots for size in (2, 3) for slots in combinations(range(min(bounds.num_slots, problem.microbatches)), size)
    ]
    for slots in dice.sample(subsets, min(4, len(subsets))):
        for max_ways in (1, 3, 20):
            assert not bounds.excludes(slots, plan.value, max_ways, 1e6, lambda: False)


def test_trips_prove_more_than_the_bound_of_single_actions() -> None:
    costs = sl.Costs(forward=[10, 12, 9, 8], backward_input=[11, 12, 9, 8], backward_weight=6, transfer=0.5)
    problem = problem_of(costs, 4, 24, 3, 1, "loop", "span", True)
    bounds = TripBounds(problem, random.Random(0))
    low = lower_bound(problem)
    assert bounds.excludes((0, 1, 2), 1.01 * low, 40, 1e7, lambda: False)
    assert not bounds.excludes((0, 1, 2), 1.2 * low, 40, 1e7, lambda: False)
    raised = low
    for work in (1e5, 1e5, 10, 10, 2e5):
        raised = bounds.attempt(raised, 1.2 * low, work, lambda: False)
    assert 1.01 * low < raised < 1.2 * low


def test_trips_stop_when_the_work_is_done_or_time_is_up() -> None:
    problem = problem_of(sl.Costs(), 4, 24, 3, 1, "loop", "span", True)
    bounds = TripBounds(problem, random.Random(0))
    assert not bounds.excludes((0, 1, 2), 0.5 * lower_bound(problem), 4, 1e7, lambda: True)
    assert not bounds.excludes((0, 1, 2), 2 * lower_bound(problem), 4, 100, lambda: False)
    assert bounds.work < 1000
    assert bounds.attempt(1.0, 2.0, MIN_WAYS, lambda: False) == 1.0


def test_trips_need_memory_that_is_tight() -> None:
    problem = problem_of(sl.Costs(), 4, 6, None, 1, "loop", "span", True)
    bounds = TripBounds(problem, random.Random(0))
    assert bounds.num_slots == 0
    assert bounds.attempt(1.0, 2.0, 1e6, lambda: False) == 1.0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_plans_of_beam_search_are_valid_and_fit_in_memory(seed: int) -> None:
    dice = random.Random(seed)
    problem = tight_problem(dice)
    (rule,) = (rule for _, rule in zip(range(1), random_beam_rules(dice, dice.choice([1, 5, 30]), 50.0), strict=False))
    plan = Beam(Board(problem)).plan(rule)
    if plan is None:
        return
    schedule = schedule_of(problem, plan.programs)
    assert sl.verify(schedule).in_order
    timeline = sl.simulate(schedule, problem.costs)
    value = timeline.makespan if problem.objective == "makespan" else timeline.span
    assert value == pytest.approx(plan.value)
    for peak, cap in zip(timeline.peak_memory, problem.caps, strict=True):
        assert peak <= cap * (1 + 1e-9)


def test_beam_search_is_shorter_than_the_rules_of_the_list_scheduler() -> None:
    dice = random.Random(78)
    sizes = [dice.uniform(0.7, 1.3) for _ in range(6)]
    costs = sl.Costs(
        forward=[10 * size for size in sizes],
        backward_input=[10.5 * size for size in sizes],
        backward_weight=[8 * size for size in sizes],
        transfer=0.5,
    )
    problem = problem_of(costs, 6, 24, 3, 1, "loop", "span", None)
    board, low = Board(problem), lower_bound(problem)
    beams = (Beam(board).plan(rule) for _, rule in zip(range(6), random_beam_rules(dice, 100, low), strict=False))
    rules = (list_schedule(board, rule) for _, rule in zip(range(100), random_rules(problem, low, dice), strict=False))
    best_beam, best_rule = (min(plan.value for plan in plans if plan is not None) for plans in (beams, rules))
    assert best_beam < best_rule


def test_a_beam_search_ends_when_time_is_up() -> None:
    problem = problem_of(sl.Costs(), 4, 24, 3, 1, "loop", "span", True)
    rule = next(random_beam_rules(random.Random(0), 10, 50.0))
    assert Beam(Board(problem)).plan(rule, lambda: True) is None

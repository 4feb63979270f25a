"""Ranks that share cores: more of them than cores slow each other down, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageline as sl
from stageline.timeline.sharing import run_shared
from stageline.timeline.simulate import durations, hop_times

FAMILIES = ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "dualpipe-v")


def costs_of(schedule: sl.Schedule, seed: int) -> sl.Costs:
    draw = np.random.default_rng(seed)
    forward, inputs, weights, pair = (draw.random(schedule.stages).tolist() for _ in range(4))
    return sl.Costs(forward, inputs, weights, transfer=0.1, overlap=pair)


@given(st.sampled_from(FAMILIES), st.integers(0, 99))
def test_enough_cores_change_nothing(name: str, seed: int) -> None:
    schedule = sl.schedule(name, 4, 8)
    costs = costs_of(schedule, seed)
    alone = sl.simulate(schedule, costs)
    start, end = run_shared(schedule.graph, durations(schedule, costs), hop_times(schedule, costs), ())
    np.testing.assert_allclose(start, alone.start, atol=1e-9)
    np.testing.assert_allclose(end, alone.end, atol=1e-9)
    assert np.array_equal(sl.simulate(schedule, replace(costs, shares=[sl.Share(range(4), 4)])).end, alone.end)


@given(st.sampled_from(FAMILIES), st.integers(0, 99), st.sampled_from([1.0, 2.0, 3.0, 2.5]))
def test_cores_do_the_work_of_all_ranks_and_no_more(name: str, seed: int, cores: float) -> None:
    schedule = sl.schedule(name, 4, 8)
    costs = costs_of(schedule, seed)
    alone = sl.simulate(schedule, costs)
    shared = sl.simulate(schedule, replace(costs, shares=[sl.Share(range(4), cores)]))
    assert shared.makespan >= max(alone.makespan, sum(alone.busy) / cores) * (1 - 1e-9)
    assert shared.makespan <= alone.makespan * 4 / cores * (1 + 1e-9)
    assert (shared.end - shared.start >= (alone.end - alone.start) * (1 - 1e-9)).all()


def test_ranks_on_one_core_take_turns() -> None:
    """Two ranks, one microbatch: nothing runs at the same time. Two microbatches: two forwards do, at half speed."""
    costs = sl.Costs(forward=1, backward=2, shares=[sl.Share([0, 1], 1)])
    assert sl.simulate(sl.schedule("gpipe", 2, 1), costs).makespan == 6
    timeline = sl.simulate(sl.schedule("gpipe", 2, 2), costs)
    assert timeline.makespan == 12  # all work, one after the other
    assert [(timed.start, timed.end) for timed in timeline.actions(0)][:2] == [(0.0, 1.0), (1.0, 3.0)]
    assert next(timeline.actions(1)).end == 3.0


def test_shares_of_hosts_and_their_file(tmp_path: Path) -> None:
    """Two hosts with one core for two ranks each."""
    costs = sl.Costs(shares=[sl.Share([0, 1], 1), sl.Share([2, 3], 1)])
    again = sl.Costs.from_json(costs.to_json())
    assert again.shares == (sl.Share((0, 1), 1), sl.Share((2, 3), 1))
    schedule = sl.schedule("1f1b", 4, 8)
    both = sl.simulate(schedule, costs).makespan
    assert sl.simulate(schedule, sl.Costs(shares=[sl.Share([0, 1], 1)])).makespan <= both
    assert "shares" not in sl.Costs().to_json()
    path = tmp_path / "step.json"
    sl.simulate(schedule, costs).write(path)
    assert sl.read_timeline(path).makespan == both


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sl.Share([], 1), "different whole numbers"),
        (lambda: sl.Share([0, 0], 1), "different whole numbers"),
        (lambda: sl.Share([0, -1], 1), "different whole numbers"),
        (lambda: sl.Share([0], 0), "capacity of a share must be a number above 0"),
        (lambda: sl.Costs(shares=[(0, 1)]), "shares must be a list of sl.Share"),  # type: ignore[list-item]
        (lambda: sl.Costs.from_json({"shares": [[0, 1]]}), "shares must be a list of objects like"),
        (lambda: sl.simulate(sl.schedule("1f1b", 2, 2), sl.Costs(shares=[sl.Share([2], 1)])), "shares name rank 2"),
    ],
)
def test_wrong_shares_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(sl.CostError, match=text):
        make()

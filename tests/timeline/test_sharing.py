"""Ranks that share cores, and transfers that share links: they slow each other down, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageline as sl
from stageline.timeline.sharing import Shared, run_shared
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
    hop, receivers = hop_times(schedule, costs), schedule.graph.receivers
    start, end, arrived = run_shared(schedule.graph, durations(schedule, costs), hop, hop, Shared())
    np.testing.assert_allclose(start, alone.start, atol=1e-9)
    np.testing.assert_allclose(end, alone.end, atol=1e-9)
    np.testing.assert_allclose(arrived[receivers], alone.transfers.arrived, atol=1e-9)
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


@given(st.sampled_from(FAMILIES), st.integers(0, 99), st.sampled_from([2.0, 4.0]), st.floats(0.3, 1.0))
def test_neighbours_slow_each_other_down(name: str, seed: int, cores: float, speed: float) -> None:
    schedule = sl.schedule(name, 4, 8)
    costs = costs_of(schedule, seed)
    plain, slow = (
        sl.simulate(schedule, replace(costs, shares=[sl.Share(range(4), cores, speeds)])).makespan
        for speeds in ((), (1.0, speed))
    )
    assert plain * (1 - 1e-9) <= slow <= plain / speed * (1 + 1e-9)
    alone = sl.simulate(sl.schedule("1f1b", 4, 1), replace(costs_of(sl.schedule("1f1b", 4, 1), seed)))
    shared = replace(alone.costs or costs, shares=[sl.Share(range(4), cores, (1.0, speed))])
    assert np.allclose(sl.simulate(alone.schedule, shared).end, alone.end)  # never two at once


LINKS = {
    "one card for all": [sl.SharedLink(range(4), range(4))],
    "two hosts": list(sl.SharedLink.of_hosts([[0, 1], [2, 3]])),
    "four hosts": list(sl.SharedLink.of_hosts([[0], [1], [2], [3]])),
    "room for three": [sl.SharedLink(range(4), range(4), capacity=3)],
}


def linked_costs(schedule: sl.Schedule, seed: int, with_bytes: bool) -> sl.Costs:
    costs = replace(costs_of(schedule, seed), transfer=0.2)
    return replace(costs, bandwidth=10.0, message=[5.0] * schedule.stages) if with_bytes else costs


@given(st.sampled_from(FAMILIES), st.integers(0, 99), st.sampled_from(list(LINKS)), st.booleans())
def test_shared_links_never_make_a_transfer_faster(name: str, seed: int, links: str, with_bytes: bool) -> None:
    schedule = sl.schedule(name, 4, 8)
    costs = linked_costs(schedule, seed, with_bytes)
    alone, shared = (sl.simulate(schedule, replace(costs, links=used)) for used in ((), LINKS[links]))
    at_full_speed = alone.transfers.arrived - alone.transfers.sent
    assert (shared.transfers.arrived - shared.transfers.sent >= at_full_speed * (1 - 1e-9)).all()
    assert np.allclose(shared.end - shared.start, alone.end - alone.start)
    assert shared.makespan >= alone.makespan * (1 - 1e-9)


@given(st.sampled_from(FAMILIES), st.integers(0, 99), st.sampled_from(list(LINKS)), st.booleans())
def test_a_link_moves_all_bytes_and_no_more_than_it_can(name: str, seed: int, links: str, with_bytes: bool) -> None:
    """While n transfers use a link, they move together at most as much as its capacity, and in the end everything."""
    schedule = sl.schedule(name, 4, 8)
    costs = linked_costs(schedule, seed, with_bytes)
    shared = sl.simulate(schedule, replace(costs, links=LINKS[links]))
    latency, work = (0.2, 0.5) if with_bytes else (0.0, 0.2)
    rank, source = schedule.graph.rank, schedule.graph.source
    for link in LINKS[links]:
        receivers = shared.transfers.receivers
        on_link = np.isin(rank[source[receivers]], link.sources) & np.isin(rank[receivers], link.targets)
        begin, arrived = shared.transfers.sent[on_link] + latency, shared.transfers.arrived[on_link]
        for first in begin.tolist():  # what begins and arrives in an interval moves within it
            for last in arrived[arrived > first].tolist():
                inside = (begin >= first - 1e-9) & (arrived <= last + 1e-9)
                assert inside.sum() * work <= link.capacity * (last - first) + 1e-6


def test_transfers_that_do_not_overlap_are_not_slowed_down() -> None:
    """One microbatch is at one place at a time."""
    schedule, links = sl.schedule("1f1b", 4, 1), LINKS["one card for all"]
    for with_bytes in (False, True):
        costs = linked_costs(schedule, 1, with_bytes)
        alone, shared = (sl.simulate(schedule, replace(costs, links=used)) for used in ((), links))
        assert np.allclose(shared.transfers.arrived, alone.transfers.arrived)
        assert shared.makespan == pytest.approx(alone.makespan)


def test_two_messages_on_one_card() -> None:
    """Two ranks send to each other over one card: each takes twice as long; with a latency, only its bytes."""
    placement = sl.Placement.two_way(2, [0, 1])
    schedule = sl.Schedule.from_programs([["0F0", "1F1"], ["0F1", "1F0"]], placement=placement, training=False)
    for costs, end in ((sl.Costs(transfer=3), 8.0), (sl.Costs(transfer=1, bandwidth=1, message=2), 7.0)):
        assert sl.simulate(schedule, costs).makespan == 5.0
        assert sl.simulate(schedule, replace(costs, links=[sl.SharedLink([0, 1], [0, 1])])).makespan == end
        both_ways = sl.SharedLink.of_hosts([[0], [1]])
        assert sl.simulate(schedule, replace(costs, links=both_ways)).makespan == 5.0


def test_shares_of_hosts_and_their_file(tmp_path: Path) -> None:
    """Two hosts with one core for two ranks each."""
    costs = sl.Costs(shares=[sl.Share([0, 1], 1), sl.Share([2, 3], 1)])
    again = sl.Costs.from_json(costs.to_json())
    assert again.shares == (sl.Share((0, 1), 1), sl.Share((2, 3), 1))
    schedule = sl.schedule("1f1b", 4, 8)
    both = sl.simulate(schedule, costs).makespan
    assert sl.simulate(schedule, sl.Costs(shares=[sl.Share([0, 1], 1)])).makespan <= both
    assert not {"shares", "links"} & set(sl.Costs().to_json())
    links = sl.Costs(links=LINKS["two hosts"], shares=[sl.Share([0, 1], 2, [1.0, 0.8])])
    assert sl.Costs.from_json(links.to_json()) == replace(links, links=tuple(links.links), shares=tuple(links.shares))
    path = tmp_path / "step.json"
    sl.simulate(schedule, costs).write(path)
    assert sl.read_timeline(path).makespan == both


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sl.Share([], 1), "different integers"),
        (lambda: sl.Share([0, 0], 1), "different integers"),
        (lambda: sl.Share([0, -1], 1), "different integers"),
        (lambda: sl.Share([0], 0), "capacity of a share must be a number above 0"),
        (lambda: sl.Share([0], 1, [1.5]), "speeds of a share must be numbers above 0 and at most 1"),
        (lambda: sl.SharedLink([], [1]), "sources of a shared link must be different integers"),
        (lambda: sl.SharedLink([0], [1], 0), "capacity of a shared link must be a number above 0"),
        (lambda: sl.Costs(shares=[(0, 1)]), "shares must be a list of sl.Share"),  # type: ignore[list-item]
        (lambda: sl.Costs(links=[sl.Share([0], 1)]), "links must be a list of sl.SharedLink"),  # type: ignore[list-item]
        (lambda: sl.Costs.from_json({"links": [[0, 1]]}), "links must be a list of objects like"),
        (
            lambda: sl.simulate(sl.schedule("1f1b", 2, 2), sl.Costs(links=[sl.SharedLink([0], [2])])),
            "links contain rank 2",
        ),
        (lambda: sl.Costs.from_json({"shares": [[0, 1]]}), "shares must be a list of objects like"),
        (lambda: sl.simulate(sl.schedule("1f1b", 2, 2), sl.Costs(shares=[sl.Share([2], 1)])), "shares contain rank 2"),
    ],
)
def test_wrong_shares_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(sl.CostError, match=text):
        make()

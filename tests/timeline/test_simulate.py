"""Timelines against a plain event simulation, and the figures that are read from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.schedules import dependencies
from stageline.schedules import schedule as schedules
from stageline.timeline.timeline import Transfers
from support import oracle
from support.instances import cached_schedule, examples, of_families, of_no_family

# Whole numbers, halves and powers of two: no sum of them is ever rounded, so ties are ties on both sides.
times = st.integers(0, 8).map(float)
sizes = st.sampled_from([0.0, 1.0, 2.0, 4.0])
scales = st.sampled_from([0.5, 1.0, 2.0])
speeds = st.sampled_from([0.5, 1.0, 2.0, 4.0])


@dataclass
class Case:
    """A schedule, its costs in our format, and the same in the oracle's."""

    schedule: sl.Schedule
    costs: sl.Costs
    prices: oracle.Prices
    memory: oracle.Memory

    @property
    def timeline(self) -> sl.Timeline:
        return sl.simulate(self.schedule, self.costs)


def one_or_each(draw: st.DrawFn, value: st.SearchStrategy[float], count: int) -> tuple[Any, list[float]]:
    """Draw one number for all, or one for each; return it as passed, and expanded."""
    if draw(st.booleans()):
        one = draw(value)
        return one, [one] * count
    values = draw(st.lists(value, min_size=count, max_size=count))
    return values, values


def one_or_square(draw: st.DrawFn, value: st.SearchStrategy[float], count: int) -> tuple[Any, list[list[float]]]:
    """Draw one number for all pairs of ranks, or one for each pair."""
    if draw(st.booleans()):
        one = draw(value)
        return one, [[one] * count] * count
    square = [draw(st.lists(value, min_size=count, max_size=count)) for _ in range(count)]
    return square, square


@st.composite
def cases(draw: st.DrawFn, training: bool = False) -> Case:
    """A random schedule with random costs, each in one of the accepted forms."""
    schedule = draw(st.one_of(of_families(training=training), of_no_family()))
    stages, microbatches = schedule.stages, schedule.microbatches
    given_costs: dict[str, Any] = {}
    given_costs["forward"], forward = one_or_each(draw, times, stages)
    whole = None
    if draw(st.booleans()):
        given_costs["backward"], whole = one_or_each(draw, times, stages)
    halves = [1.0] * stages if whole is None else [time / 2 for time in whole]
    backward_input = backward_weight = halves
    gives_input, gives_weight = draw(st.booleans()), draw(st.booleans())
    if whole is not None and gives_input != gives_weight:  # the other half is what is left
        quarter, rest = [time / 4 for time in whole], [time * 3 / 4 for time in whole]
        backward_input, backward_weight = (quarter, rest) if gives_input else (rest, quarter)
        given_costs["backward_input" if gives_input else "backward_weight"] = quarter
    else:
        if gives_input:
            given_costs["backward_input"], backward_input = one_or_each(draw, times, stages)
        if gives_weight:
            given_costs["backward_weight"], backward_weight = one_or_each(draw, times, stages)
    backward = whole or [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
    overlap = bandwidth = None
    if draw(st.booleans()):
        given_costs["overlap"], overlap = one_or_each(draw, times, stages)
    given_costs["transfer"], latency = one_or_square(draw, times, schedule.ranks)
    if draw(st.booleans()):
        given_costs["bandwidth"], bandwidth = one_or_square(draw, speeds, schedule.ranks)
    given_costs["message"], message = one_or_each(draw, sizes, stages)
    scale = [1.0] * microbatches
    if draw(st.booleans()):
        scale = given_costs["scale"] = draw(st.lists(scales, min_size=microbatches, max_size=microbatches))
    given_costs["activation"], activation = one_or_each(draw, sizes, stages)
    given_costs["residue"], residue = one_or_each(draw, sizes, stages)
    if draw(st.booleans()):
        drawn = {kind: one_or_each(draw, sizes, stages) for kind in draw(st.sets(st.sampled_from("FBIW")))}
        given_costs["transient"] = {kind: value for kind, (value, _) in drawn.items()}
        transient = {kind: drawn[kind][1] if kind in drawn else [0.0] * stages for kind in "FBIW"}
    else:
        given_costs["transient"], every = one_or_each(draw, sizes, stages)
        transient = dict.fromkeys("FBIW", every)
    prices = oracle.Prices(
        forward, backward, backward_input, backward_weight, overlap, latency, bandwidth, message, scale
    )
    memory = oracle.Memory(activation, residue, transient, scale)
    return Case(schedule, sl.Costs(**given_costs), prices, memory)


# ---- Times ----


@given(cases())
@settings(max_examples=examples(300))
def test_every_action_starts_and_ends_when_an_event_simulation_says(case: Case) -> None:
    step = oracle.play(case.schedule, case.prices)
    times = {timed.action: (timed.start, timed.end) for timed in case.timeline.actions()}
    assert times.keys() == step.start.keys()
    for task, (start, end) in times.items():
        assert start == pytest.approx(step.start[oracle.Task(*task)])
        assert end == pytest.approx(step.end[oracle.Task(*task)])


@given(cases())
@settings(max_examples=examples(100))
def test_every_message_leaves_and_arrives_when_an_event_simulation_says(case: Case) -> None:
    plan, step = oracle.Plan(case.schedule), oracle.play(case.schedule, case.prices)
    expected = {
        (plan.home(source), plan.home(task), source, task): (step.end[source], step.arrival[task])
        for task in plan.tasks
        if (source := plan.source(task)) and plan.home(source) != plan.home(task)
    }
    times = {tuple(message)[:4]: (message.start, message.end) for message in case.timeline.messages()}
    assert times == {key: pytest.approx(value) for key, value in expected.items()}


@given(cases())
@settings(max_examples=examples(100))
def test_makespan_span_and_bubbles_are_what_their_definitions_say(case: Case) -> None:
    timeline = case.timeline
    step = oracle.play(case.schedule, case.prices)
    programs = [program for program in oracle.Plan(case.schedule).programs if program]
    busy = [sum(case.prices.of_entry(entry) for entry in program) for program in programs]
    spans = [step.end[program[-1][0]] - step.start[program[0][0]] for program in programs]
    makespan, ideal = max(step.end.values()), max(busy)
    assert timeline.makespan == pytest.approx(makespan)
    assert timeline.span == pytest.approx(max(spans))
    assert timeline.ideal == pytest.approx(ideal)
    assert timeline.bubble == pytest.approx((makespan - ideal) / makespan if makespan else 0.0)
    assert timeline.bubble is not None
    assert timeline.utilisation is not None
    assert timeline.imbalance is not None
    assert timeline.utilisation == pytest.approx(sum(busy) / (case.schedule.ranks * makespan) if makespan else 1.0)
    assert timeline.bubble + timeline.imbalance + timeline.utilisation == pytest.approx(1.0)
    assert timeline.span_bubble == pytest.approx((max(spans) - ideal) / max(spans) if max(spans) else 0.0)


def test_a_pair_takes_what_both_take_unless_given_a_time_of_its_own() -> None:
    schedule = cached_schedule("dualpipe-v", 2, 4)
    pair = next(entry for entry in schedule.programs[0] if isinstance(entry, sl.Overlap))

    def length(costs: sl.Costs) -> float:
        times = {timed.action: (timed.start, timed.end) for timed in sl.simulate(schedule, costs).actions()}
        assert times[pair.forward] == times[pair.backward]
        return times[pair.forward][1] - times[pair.forward][0]

    assert length(sl.Costs(forward=3, backward=5)) == 8
    assert length(sl.Costs(forward=3, backward=5, overlap=6)) == 6


@pytest.mark.parametrize(
    "programs",
    [
        [["0F0"], ["1F0", "1B0"]],
        [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
        [["0B0", "0F0"], ["1F0", "1B0"]],
        [["0F0", "0B0"], ["2F0", "2B0"]],
    ],
    ids=["incomplete", "deadlock", "backward first", "stage held by nobody"],
)
def test_a_schedule_that_cannot_run_is_not_simulated(programs: list[list[str]]) -> None:
    schedule = sl.Schedule.from_programs(programs, training=True)
    with pytest.raises(sl.ScheduleError) as caught:
        sl.simulate(schedule)
    assert caught.value.rule in ("complete", "progress", "placement")


# ---- Idle time ----


@given(cases())
@settings(max_examples=examples(150))
def test_idle_time_is_divided_by_what_was_waited_for(case: Case) -> None:
    expected = oracle.gaps(case.schedule, oracle.play(case.schedule, case.prices))
    for idle, gap in zip(case.timeline.idle, expected, strict=True):
        assert (idle.warmup, idle.transfer, idle.peer, idle.drain) == pytest.approx(gap)
        assert idle.host == pytest.approx(0)


@given(cases())
@settings(max_examples=examples(100))
def test_idle_and_busy_time_of_every_rank_add_up_to_the_makespan(case: Case) -> None:
    timeline = case.timeline
    for idle, busy in zip(timeline.idle, timeline.busy, strict=True):
        assert min(idle) >= 0
        assert idle.total == pytest.approx(sum(idle))
        assert idle.total + busy == pytest.approx(timeline.makespan)


def test_idle_time_of_two_ranks_by_hand() -> None:
    """One microbatch: rank 1 waits to be reached, rank 0 for the work of rank 1 and for the way back.

    rank 0  FFF..........BBBB
    rank 1  ...>>FFBBBB>>....      F takes 3 and 2, B takes 4, a hop 2
    """
    timeline = sl.simulate(cached_schedule("1f1b", 2, 1), sl.Costs(forward=[3, 2], backward=4, transfer=2))
    assert timeline.idle[0]._asdict() == {"warmup": 0, "peer": 8, "transfer": 2, "host": 0, "drain": 0}
    assert timeline.idle[1]._asdict() == {"warmup": 5, "peer": 0, "transfer": 0, "host": 0, "drain": 6}


def test_a_rank_that_dawdles_in_a_measured_step_is_idle_by_its_own_fault() -> None:
    nothing = Transfers(np.array([], dtype=np.int64), np.array([]), np.array([]))
    measured = sl.Timeline(
        cached_schedule("gpipe", 1, 2), np.array([0.0, 3.0, 4.0, 7.0]), np.array([1.0, 4.0, 6.0, 9.0]), nothing
    )
    assert measured.idle[0]._asdict() == {"warmup": 0, "peer": 0, "transfer": 0, "host": 3, "drain": 0}


@pytest.mark.parametrize("zero", [-1000.0, 1000.0])
def test_nothing_depends_on_when_the_clock_of_a_measured_step_was_set_to_zero(zero: float) -> None:
    planned = sl.simulate(cached_schedule("dualpipe-v", 2, 4), sl.Costs(transfer=0.5))
    moved = planned.transfers
    measured = sl.Timeline(
        planned.schedule,
        planned.start + zero,
        planned.end + zero,
        Transfers(moved.receivers, moved.sent + zero, moved.arrived + zero),
    )
    assert measured.makespan == planned.makespan
    assert measured.span == planned.span
    assert measured.idle == planned.idle
    assert [timed.action for timed in measured.critical_path] == [timed.action for timed in planned.critical_path]
    difference = sl.compare(planned, measured)
    assert not difference.later.any()
    assert difference.makespan == 0


# ---- The critical path ----


@given(cases())
@settings(max_examples=examples(150))
def test_the_critical_path_has_no_gap_from_the_start_to_the_end_of_the_step(case: Case) -> None:
    timeline = case.timeline
    path = timeline.critical_path
    hops = {(m.source_rank, m.target_rank, m.start, m.end) for m in timeline.messages()}
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for one, two in pairwise(path):
        assert one.end == two.start or (one.rank, two.rank, one.end, two.start) in hops
        assert one.rank == two.rank or (one.rank, two.rank, one.end, two.start) in hops


def test_the_critical_path_of_1f1b_goes_down_and_up_again() -> None:
    path = sl.simulate(cached_schedule("1f1b", 3, 1), sl.Costs(transfer=1)).critical_path
    assert [str(timed.action) for timed in path] == ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]


def test_the_critical_path_stays_on_a_rank_that_is_slower_than_all_others() -> None:
    path = sl.simulate(cached_schedule("1f1b", 3, 8), sl.Costs(forward=[1, 9, 1], backward=[1, 9, 1])).critical_path
    assert [timed.rank for timed in path] == [0] + [1] * 16 + [0]


# ---- Memory ----


@given(cases(training=True))
@settings(max_examples=examples(200))
def test_peak_memory_is_the_most_that_the_programs_hold(case: Case) -> None:
    event("residue above activation" if max(case.memory.residue) > min(case.memory.activation) else "")
    assert case.timeline.peak_memory == pytest.approx(oracle.peak_memory(case.schedule, case.memory))


@given(cases(training=True))
@settings(max_examples=examples(100))
def test_memory_over_time_rises_and_falls_with_the_entries(case: Case) -> None:
    timeline, step = case.timeline, oracle.play(case.schedule, case.prices)
    for rank, program in enumerate(oracle.Plan(case.schedule).programs):
        expected = []
        for entry, during, after in oracle.levels(program, case.memory):
            expected += [(step.start[entry[0]], during), (step.end[entry[0]], after)]
        moments, levels = timeline.memory(rank)
        assert list(zip(moments.tolist(), levels.tolist(), strict=True)) == [pytest.approx(e) for e in expected]
        assert max(levels.tolist(), default=0.0) == pytest.approx(timeline.peak_memory[rank])


def test_all_memory_is_given_back_at_the_end_of_a_training_step() -> None:
    timeline = sl.simulate(cached_schedule("zb-v", 3, 5), sl.Costs(activation=3, residue=5, transient=7))
    assert [timeline.memory(rank)[1][-1] for rank in range(3)] == [0, 0, 0]


def test_a_residue_above_the_activation_counts_from_the_end_of_its_i() -> None:
    """As with recomputation: I leaves more behind than F did."""
    schedule = sl.Schedule.from_programs([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert sl.simulate(schedule, sl.Costs(activation=1, residue=3)).peak_memory == (6,)


@pytest.mark.parametrize(("kind", "peak"), [("F", 12), ("B", 12), ("W", 2)])
def test_transient_memory_counts_while_its_action_runs(kind: str, peak: float) -> None:
    timeline = sl.simulate(cached_schedule("gpipe", 1, 2), sl.Costs(transient={kind: 10}))
    assert timeline.peak_memory == (peak,)


# ---- Two timelines ----


def test_compare_says_how_much_later_and_longer_each_action_is() -> None:
    schedule = cached_schedule("1f1b", 2, 3)
    first, second = sl.simulate(schedule), sl.simulate(schedule, sl.Costs(forward=[1, 3], transfer=1))
    difference = sl.compare(first, second)
    before, after = ({t.action: t for t in timeline.actions()} for timeline in (first, second))
    for index, action in enumerate(before):
        assert difference.later[index] == after[action].start - before[action].start
        assert difference.longer[index] == (2 if (action.kind, action.stage) == ("F", 1) else 0)
    assert difference.makespan == second.makespan - first.makespan
    assert difference.stage_time("F") == (0, 2)
    assert difference.stage_time("B") == difference.stage_time("W") == (0, 0)


def test_compare_matches_actions_by_name_where_the_orders_differ() -> None:
    first, second = (sl.simulate(cached_schedule(name, 3, 5)) for name in ("gpipe", "1f1b"))
    difference = sl.compare(first, second)
    after = {timed.action: timed.start for timed in second.actions()}
    for timed, later in zip(first.actions(), difference.later.tolist(), strict=True):
        assert later == after[timed.action] - timed.start


def test_compare_names_the_actions_that_moved_most() -> None:
    schedule = cached_schedule("1f1b", 3, 4)
    difference = sl.compare(sl.simulate(schedule), sl.simulate(schedule, sl.Costs(forward=[1, 1, 4])))
    most = difference.largest(5)
    moved = sorted(np.abs(difference.later).tolist(), reverse=True)
    assert [abs(one.later) for one in most] == moved[:5]
    starts = {timed.action: timed.start for timed in difference.first.actions()}
    later = {timed.action: timed.start for timed in difference.second.actions()}
    assert all(one.later == later[one.action] - starts[one.action] for one in most)


def test_a_comparison_goes_into_json() -> None:
    schedule = cached_schedule("gpipe", 1, 1)
    difference = sl.compare(sl.simulate(schedule), sl.simulate(schedule, sl.Costs(forward=2)))
    assert json.loads(json.dumps(difference.to_json())) == {
        "makespan": 1,
        "span": 1,
        "bubble": 0,
        "actions": [
            {"action": "0F0", "later": 0, "longer": 1},
            {"action": "0B0", "later": 1, "longer": 0},
        ],
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("gpipe", 2, 4), ("gpipe", 2, 5)),
        (("1f1b", 2, 4), ("zb-h1", 2, 4)),
        (("gpipe", 2, 3), ("gpipe", 3, 2)),
    ],
    ids=["more microbatches", "split backwards", "as many actions of another shape"],
)
def test_timelines_of_different_work_are_not_compared(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    with pytest.raises(sl.ScheduleError, match="do not run the same actions"):
        sl.compare(sl.simulate(cached_schedule(*one)), sl.simulate(cached_schedule(*other)))


def test_a_timeline_goes_into_json() -> None:
    timeline = sl.simulate(cached_schedule("1f1b", 2, 1), sl.Costs(transfer=1))
    data = json.loads(json.dumps(timeline.to_json()))
    assert data["makespan"] == timeline.makespan == 8
    assert data["actions"][1] == [
        {"action": "1F0", "start": 2, "end": 3},
        {"action": "1B0", "start": 3, "end": 5},
    ]
    assert data["transfers"][0].items() >= {"sender": "1B0", "receiver": "0B0", "start": 5, "end": 6}.items()


# ---- Costs ----


@pytest.mark.parametrize(
    ("given_costs", "expected"),
    [
        ({}, {"F": 1, "B": 2, "I": 1, "W": 1}),
        ({"backward_input": 11, "backward_weight": 7}, {"B": 18, "I": 11, "W": 7}),
        ({"backward_input": 11}, {"B": 12, "I": 11, "W": 1}),
        ({"backward": 20}, {"B": 20, "I": 10, "W": 10}),
        ({"backward": 20, "backward_input": 12}, {"B": 20, "I": 12, "W": 8}),
        ({"backward": 20, "backward_input": 12, "backward_weight": 9}, {"B": 20, "I": 12, "W": 9}),
    ],
)
def test_a_backward_costs_what_is_given_or_its_two_halves(
    given_costs: dict[str, float], expected: dict[str, float]
) -> None:
    costs = sl.Costs(**given_costs)  # type: ignore[arg-type]
    assert {kind: costs.of(kind) for kind in expected} == expected


@pytest.mark.parametrize("values", [[10.0, 12.0], (10.0, 12.0), np.array([10.0, 12.0])], ids=["list", "tuple", "array"])
def test_costs_may_be_given_per_stage_in_any_sequence(values: Any) -> None:
    costs = sl.Costs(forward=values)
    assert (costs.of("F", 0), costs.of("F", 1)) == (10, 12)
    assert sl.simulate(cached_schedule("gpipe", 2, 1), costs).busy == (12, 14)


@given(
    st.lists(times, min_size=2, max_size=2),
    st.lists(times, min_size=2, max_size=2) | st.none(),
    st.lists(times, min_size=2, max_size=2) | st.none(),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=examples(50))
def test_the_parts_of_a_refined_stage_cost_what_the_stage_costs(
    forward: list[float], backward: list[float] | None, backward_input: list[float] | None, parts: int
) -> None:
    if backward is not None and backward_input is not None:
        backward_input = [time / 2 for time in backward]
    costs = sl.Costs(forward, backward_input, backward=backward, activation=[4, 8], residue=2, transient={"F": 4})
    cut = costs.refined(parts)
    for kind in "FBIW":
        for stage in range(2):
            pieces = [cut.of(kind, stage * parts + part) for part in range(parts)]
            assert len(set(pieces)) == 1
            assert sum(pieces) == costs.of(kind, stage)
    fine = sl.simulate(cached_schedule("looped-bfs", 1, 3, chunks=2 * parts), cut)
    whole = sl.simulate(cached_schedule("looped-bfs", 1, 3, chunks=2), costs)
    assert fine.busy == whole.busy
    assert fine.memory(0)[1][-1] == 0
    assert max(fine.peak_memory) <= max(whole.peak_memory)


def test_refining_leaves_messages_and_hops_as_they_are() -> None:
    costs = sl.Costs(transfer=3, bandwidth=2, message=[4, 6], scale=[1, 2])
    cut = costs.refined(2)
    assert (cut.transfer, cut.bandwidth, cut.message, cut.scale) == (3, 2, [4, 4, 6, 6], [1, 2])


@given(cases())
@settings(max_examples=examples(50))
def test_costs_go_through_json_unchanged(case: Case) -> None:
    again = sl.Costs.from_json(json.loads(json.dumps(case.costs.to_json())))
    assert again == case.costs


def test_costs_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [10, 12], "transfer": 1}')
    assert sl.Costs.read(path) == sl.Costs(forward=[10, 12], transfer=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "costs must be an object"),
        ('{"forward": NaN}', "not JSON: NaN is not allowed"),
        ('{"forward": 1e999}', "forward must be a number >= 0, got inf"),
        ('{"forward": ' + "9" * 400 + "}", "forward must be"),
        ('{"forward": null}', "forward must be"),
        ('{"message": null}', "message must be"),
        ('{"forward": "ten"}', "forward must be one number, or one per stage"),
        ('{"forwards": 10}', "did you mean 'forward'"),
    ],
)
def test_a_file_without_good_costs_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(sl.CostError, match=message) as caught:
        sl.Costs.read(path)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(sl.CostError, match=r"cannot read .*nowhere\.json: No such file"):
        sl.Costs.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("given_costs", "message"),
    [
        ({"forward": -1}, r"forward must be a number >= 0, got -1"),
        ({"forward": float("nan")}, r"forward must be .*nan"),
        ({"transfer": float("inf")}, r"transfer must be .*inf"),
        ({"forward": [1, -2]}, r"forward\[1\] must be a number >= 0, got -2"),
        ({"residue": [1, float("nan")]}, r"residue\[1\] must be .*nan"),
        ({"transfer": [[0, 1], [-1, 0]]}, r"transfer\[1\]\[0\] must be .*-1"),
        ({"transfer": [1, 2]}, r"transfer must be one number, or a square matrix with one row per rank"),
        ({"transfer": [[0, 1]]}, r"transfer must be one number, or a square"),
        ({"forward": [[1, 2], [3, 4]]}, r"forward must be one number, or one per stage"),
        ({"forward": []}, r"forward must be one number, or one per stage"),
        ({"forward": [1, [2]]}, r"forward must be one number, or one per stage"),
        ({"forward": True}, r"forward must be one number, or one per stage"),
        ({"forward": None}, r"forward must be"),
        ({"bandwidth": 0}, r"bandwidth must be above 0"),
        ({"transient": {"X": 1}}, r"transient has an entry for 'X'; actions are F, B, I and W"),
        ({"transient": {"F": -1}}, r"transient\['F'\] must be a number >= 0"),
        ({"scale": 2}, r"scale must have one factor per microbatch"),
        ({"scale": [1, -1]}, r"scale\[1\] must be"),
    ],
    ids=str,
)
def test_costs_that_no_step_can_have_are_refused_by_name(given_costs: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.CostError, match=message):
        sl.Costs(**given_costs)


@pytest.mark.parametrize(
    ("given_costs", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 values, but the schedule has 2 stages"),
        ({"backward_weight": [1]}, "backward_weight has 1 values, but the schedule has 2 stages"),
        ({"activation": [1, 2, 3]}, "activation has 3 values, but the schedule has 2 stages"),
        ({"transfer": [[0] * 3] * 3}, "transfer has 3 rows and columns, but the schedule has 2 ranks"),
        ({"scale": [1, 1]}, "scale has 2 factors for 4 microbatches"),
        ({"bandwidth": 1, "message": [1] * 5}, "message has 5 values, but the schedule has 2 stages"),
    ],
    ids=str,
)
def test_costs_that_do_not_fit_the_schedule_are_refused(given_costs: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.CostError, match=message):
        assert sl.simulate(cached_schedule("1f1b", 2, 4), sl.Costs(**given_costs)).peak_memory


def test_without_bandwidth_the_size_of_a_message_does_not_count() -> None:
    schedule = cached_schedule("1f1b", 3, 4)
    costs = sl.Costs(transfer=1, message=8)
    assert sl.simulate(schedule, costs).makespan == sl.simulate(schedule, sl.Costs(transfer=1)).makespan
    slower = replace(costs, bandwidth=8)
    assert sl.simulate(schedule, slower).makespan == sl.simulate(schedule, sl.Costs(transfer=2)).makespan


def test_inference_holds_an_activation_only_while_it_runs() -> None:
    schedule = sl.schedule("forward-only", 3, 5, chunks=2)
    assert sl.simulate(schedule, sl.Costs(activation=4, transient=0.5)).peak_memory == (4.5, 4.5, 4.5)
    assert sl.verify(schedule).peak_activations == sl.verify(schedule).peak_held == (1, 1, 1)


def test_what_a_rank_sends_to_itself_needs_no_bandwidth() -> None:
    costs = sl.Costs(bandwidth=[[0, 2], [4, 0]], message=8)
    schedule = sl.schedule("zb-v", 2, 1)
    hops = {
        (moved.source_rank, moved.target_rank): moved.end - moved.start
        for moved in sl.simulate(schedule, costs).messages()
    }
    assert hops == {(0, 1): 4.0, (1, 0): 2.0}


@pytest.mark.parametrize("parts", [0, -1])
def test_a_stage_is_not_cut_into_nothing(parts: int) -> None:
    with pytest.raises(sl.CostError, match="parts must be an integer from 1"):
        sl.Costs().refined(parts)


def test_half_a_backward_cannot_take_longer_than_the_whole() -> None:
    with pytest.raises(sl.CostError, match="backward_weight of stage 1 would be -2"):
        sl.simulate(cached_schedule("1f1b", 2, 2), sl.Costs(backward=5, backward_input=[4, 7]))


def test_every_family_does_the_same_work_however_its_backward_is_given() -> None:
    costs = sl.Costs(forward=10, backward=28, backward_input=11)
    assert (
        sl.simulate(cached_schedule("1f1b", 4, 8), costs).busy
        == sl.simulate(cached_schedule("zb-h2", 4, 8), costs).busy
    )


@pytest.mark.parametrize("name", ["message", "overlap", "residue"])
def test_a_list_of_the_wrong_length_is_refused_even_where_it_is_not_used(name: str) -> None:
    with pytest.raises(sl.CostError, match=f"{name} has 3 values, but the schedule has 2 stages"):
        sl.simulate(cached_schedule("gpipe", 2, 2), sl.Costs.from_json({name: [1, 2, 3]}))


def test_plain_mistakes_in_python_are_told_in_words() -> None:
    timeline = sl.simulate(cached_schedule("1f1b", 2, 2))
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: sl.simulate("1f1b"), sl.ScheduleError, "expected a Schedule"),  # type: ignore[arg-type]
        (lambda: sl.verify([["0F0"]]), sl.ScheduleError, "expected a Schedule"),  # type: ignore[arg-type]
        (lambda: sl.simulate(cached_schedule("1f1b", 2, 2), {"forward": 1}), sl.CostError, "expected sl.Costs"),  # type: ignore[arg-type]
        (lambda: timeline.memory(5), sl.ScheduleError, "rank 5 does not exist"),
        (lambda: timeline.memory(-1), sl.ScheduleError, "rank -1 does not exist"),
        (lambda: timeline.schedule.rank_of("0"), sl.ScheduleError, "stage '0' does not exist"),  # type: ignore[arg-type]
        (lambda: sl.compare(timeline, timeline).stage_time("Q"), sl.ScheduleError, "got 'Q'"),
    ]
    for mistake, kind, words in mistakes:
        with pytest.raises(kind, match=words):
            mistake()


@settings(max_examples=examples(60))
@given(schedule=st.one_of(of_families(), of_no_family()), window=st.integers(1, 9))
def test_windows_of_any_size_give_the_same_certificate_and_timeline(schedule: sl.Schedule, window: int) -> None:
    """Large schedules are verified and simulated in windows, and their walk is not stored."""
    costs = sl.Costs(forward=3, backward_input=2, backward_weight=1, transfer=0.5)

    def results() -> tuple[Any, Any, Any]:
        fresh = replace(schedule)  # nothing is cached
        timeline = sl.simulate(fresh, costs)
        return sl.verify(fresh).to_json(), timeline.to_json(), fresh.channels.sent.tolist()

    whole = results()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "WINDOW", window)
        patch.setattr(dependencies, "STORED", 0)
        assert results() == whole

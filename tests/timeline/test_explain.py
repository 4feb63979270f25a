"""Planned against measured: the parts add up, each has the right cause, and runs can be read back from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.app import run
from stageline.timeline.explain import Parts, typical_costs
from stageline.timeline.timeline import Transfers
from support.instances import examples, of_families, of_no_family

Capture = pytest.CaptureFixture[str]


def measured_like(schedule: sl.Schedule, seed: int) -> sl.Timeline:
    """A step as a runtime could have measured it, in whole numbers: random times, delays and transfers."""
    dice = np.random.default_rng(seed)
    graph = schedule.graph
    start, end = np.zeros(schedule.num_actions), np.zeros(schedule.num_actions)
    arrived = np.zeros(schedule.num_actions)
    entries = graph.actions_of_entries()
    free: dict[int, float] = {}
    for ranks, wave in graph.walk():
        for rank, entry in zip(ranks.tolist(), wave.tolist(), strict=True):
            actions = [int(slot[entry]) for slot in entries if slot[entry] >= 0]
            now = free.get(rank, 0.0)
            for action in actions:
                source = int(graph.source[action])
                if source >= 0:
                    there = end[source]
                    if graph.rank[source] != rank:
                        there += float(dice.integers(0, 4))
                        # A rank notices an input that it did not wait for only when it gets to it.
                        arrived[action] = max(there, now) if dice.random() < 0.5 else there
                    now = max(now, there)
            now += float(dice.integers(0, 3))
            start[actions] = now
            now += float(dice.integers(0, 9))
            end[actions] = now
            free[rank] = now
    receivers = np.flatnonzero((graph.source >= 0) & (graph.rank != graph.rank[graph.source]))
    transfers = Transfers(receivers, end[graph.source[receivers]], arrived[receivers])
    return sl.Timeline(schedule, start + 7, end + 7, Transfers(receivers, transfers.sent + 7, transfers.arrived + 7))


@settings(max_examples=examples(150))
@given(schedule=st.one_of(of_families(), of_no_family()), seed=st.integers(0, 2**32), costs=st.integers(0, 5))
def test_the_parts_of_every_rank_add_up_to_the_step(schedule: sl.Schedule, seed: int, costs: int) -> None:
    """Times are whole numbers, so sums are exact."""
    measured = measured_like(schedule, seed)
    planned = sl.simulate(schedule, sl.Costs(forward=costs, backward_input=3, backward_weight=2, transfer=1))
    explanation = sl.explain(planned, measured)
    assert [parts.total for parts in explanation.ranks] == [measured.makespan] * schedule.ranks
    assert [parts.total for parts in explanation.planned_ranks] == [planned.makespan] * schedule.ranks
    assert min(min(parts) for parts in (*explanation.ranks, *explanation.planned_ranks)) >= 0
    for rank, parts in enumerate(explanation.ranks):
        assert parts.compute + parts.slow == measured.busy[rank]
        assert sum(slow.extra for slow in explanation.slow if slow.rank == rank) == pytest.approx(parts.slow)


@settings(max_examples=examples(100))
@given(schedule=st.one_of(of_families(), of_no_family()), seed=st.integers(0, 2**32))
def test_without_a_plan_the_step_itself_says_what_was_planned(schedule: sl.Schedule, seed: int) -> None:
    measured = measured_like(schedule, seed)
    explanation = sl.explain(None, measured)
    assert explanation.planned.costs == typical_costs(measured)
    for parts in explanation.ranks:
        assert parts.total == pytest.approx(measured.makespan)
        assert min(parts) >= 0


@settings(max_examples=examples(100))
@given(schedule=of_families(training=True), forward=st.integers(1, 9), transfer=st.integers(0, 3))
def test_typical_costs_of_a_simulated_step_simulate_it_again(
    schedule: sl.Schedule, forward: int, transfer: int
) -> None:
    costs = sl.Costs(forward=forward, backward_input=4, backward_weight=2, transfer=transfer)
    first = sl.simulate(schedule, costs)
    again = sl.simulate(schedule, typical_costs(first))
    if not schedule.has_overlaps:  # a pair costs by the stage of its forward alone, whatever its backward
        assert np.array_equal(again.end - again.start, first.end - first.start)
    assert typical_costs(first).transfer in (transfer, 0)


def test_a_step_as_planned_is_compute_transfer_and_bubble() -> None:
    t = sl.simulate(sl.schedule("1f1b", 4, 8), sl.Costs(transfer=0.5))
    for parts in sl.explain(t, t).ranks:
        assert (parts.slow, parts.host, parts.late) == (0, 0, 0)
        assert parts.bubble > 0
    assert sl.explain(t, t).slow == ()


def test_each_fault_is_found_in_its_own_part() -> None:
    s = sl.schedule("1f1b", 4, 8)
    plan = sl.simulate(s)
    slow = sl.explain(plan, sl.simulate(s, sl.Costs(forward=[1, 1, 3, 1])))
    assert [parts.slow for parts in slow.ranks] == [0, 0, 16, 0]
    assert [(group.kind, group.stage, group.rank, group.extra) for group in slow.slow] == [("F", 2, 2, 16)]
    assert min(slow.ranks[rank].late for rank in (0, 1, 3)) > 0
    assert slow.ranks[2].late == 0
    far = sl.explain(plan, sl.simulate(s, sl.Costs(transfer=1)))
    assert all(parts.transfer > 0 and parts.slow == 0 and parts.host == 0 for parts in far.ranks)
    # Rank 3 comes to every action half a unit late.
    lazy = _delayed(s, rank=3, by=0.5)
    blamed = sl.explain(plan, lazy)
    assert [parts.host for parts in blamed.ranks] == [0, 0, 0, 8]
    assert sum(parts.transfer for parts in blamed.ranks) == 0


def _delayed(schedule: sl.Schedule, rank: int, by: float) -> sl.Timeline:
    """Simulate actions of a rank that take longer, and say that the rank only came to them late."""
    longer = [1.0 + by * (stage == rank) for stage in range(schedule.stages)]
    backward = [2.0 + by * (stage == rank) for stage in range(schedule.stages)]
    t = sl.simulate(schedule, sl.Costs(forward=longer, backward=backward))
    own = schedule.graph.rank == rank
    return sl.Timeline(schedule, t.start + by * own, t.end, t.transfers)


def test_a_plan_of_another_schedule_is_refused() -> None:
    with pytest.raises(sl.ScheduleError, match=r"the plan uses <Schedule gpipe.*measured step <Schedule 1f1b"):
        sl.explain(sl.simulate(sl.schedule("gpipe", 2, 4)), sl.simulate(sl.schedule("1f1b", 2, 4)))


def test_a_measured_step_of_the_runtime_is_explained() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4)
    pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    pipe.timeline.write("run.json")
    back = sl.read_timeline("run.json")
    for parts in sl.explain(None, back).ranks:
        assert parts.total == pytest.approx(back.makespan)


# Files.


@settings(max_examples=examples(60))
@given(schedule=st.one_of(of_families(), of_no_family()), seed=st.integers(0, 2**32), planned=st.booleans())
def test_a_timeline_comes_back_as_it_was_written(schedule: sl.Schedule, seed: int, planned: bool) -> None:
    costs = sl.Costs(forward=1 / 3, transient={"F": 2.0})
    t = sl.simulate(schedule, costs) if planned else measured_like(schedule, seed)
    t.write("run.json")
    back = sl.read_timeline("run.json")
    assert back.schedule == t.schedule
    assert (back.schedule.name, back.schedule.options) == (t.schedule.name, t.schedule.options)
    assert back.costs == t.costs
    for mine, theirs in (
        (t.start, back.start),
        (t.end, back.end),
        (t.transfers.receivers, back.transfers.receivers),
        (t.transfers.sent, back.transfers.sent),
        (t.transfers.arrived, back.transfers.arrived),
    ):
        assert np.array_equal(mine, theirs)


@settings(max_examples=examples(100))
@given(schedule=st.one_of(of_families(ranks=5), of_no_family(ranks=5)), data=st.data())
def test_a_timeline_of_any_costs_is_read_as_it_was_written(schedule: sl.Schedule, data: st.DataObject) -> None:
    """Nothing, tiny, huge, or as they come: rounding never makes a file that is refused, nor a figure below 0."""
    any_size = st.one_of(
        st.sampled_from([0.0, 1e-300, 5e-324, 1e100, 0.1, 1 / 3]), st.floats(0.0, 1.0), st.floats(0.0, 1e100)
    )
    rows = st.one_of(any_size, st.lists(any_size, min_size=schedule.stages, max_size=schedule.stages))
    names = ("forward", "backward_input", "backward_weight", "overlap", "activation", "residue", "transient")
    drawn: dict[str, Any] = {name: data.draw(rows, name) for name in names}
    costs = sl.Costs(**drawn, transfer=data.draw(any_size, "transfer"))
    t = sl.simulate(schedule, costs)
    t.write("run.json")
    back = sl.read_timeline("run.json")
    assert back.to_json() == t.to_json()
    assert t.bubble is not None
    assert 0.0 <= t.bubble <= 1.0
    assert 0.0 <= t.span_bubble <= 1.0
    assert min(min(idle) for idle in t.idle) >= 0.0
    assert min(float(t.memory(rank)[1].min(initial=0.0)) for rank in range(schedule.ranks)) >= 0.0
    assert min(min(parts) for parts in sl.explain(None, t).ranks) >= 0.0


def _written() -> dict[str, Any]:
    sl.simulate(sl.schedule("1f1b", 2, 2)).write("good.json")
    data: dict[str, Any] = json.loads(Path("good.json").read_text())
    return data


WRONG: dict[str, tuple[list[Any], Any, str]] = {
    "another format": (["format"], "stageline-schedule", "not a timeline"),
    "a later version": (
        ["version"],
        2,
        "version 2 of the timeline format is not supported",
    ),
    "no costs": (["costs"], ..., "'costs' is missing"),
    "bad costs": (["costs"], {"forward": -1}, "forward must be a number >= 0"),
    "costs of other stages": (["costs"], {"forward": [1, 2, 3]}, "forward has 3 values"),
    "no schedule": (["schedule"], ..., "not a schedule"),
    "an incomplete schedule": (["schedule", "programs", 0], ["0F0", "0F1", "0B0"], "never runs B .* for microbatch 1"),
    "no times": (["end"], ..., "'end' is missing"),
    "times of one rank": (["start"], [[0.0, 1.0, 2.0, 3.0]], "'start' has 1 lists of times for 2 ranks"),
    "a time too few": (["start", 1], [0.0], "'start' of rank 1 has 1 times for its 4 actions"),
    "a message too many": (["sent", 0], [0.0] * 9, "'sent' of rank 0 has 9 times for its 2 messages"),
    "a word for a time": (["arrived", 0, 1], "soon", "'arrived' of rank 0, position 1, must be a time, got 'soon'"),
    "truth for a time": (["end", 0, 0], True, "must be a time, got True"),
    "a time without end": (["end", 0, 0], 1e300, "must be a time, got 1e\\+300"),
    "an end before its start": (["end", 0, 0], -1.0, "rank 0, position 0: 0F0 ends before it starts"),
    "two things at once": (["end", 1, 0], 2.5, "rank 1, position 1: starts at 2, before position 0 ends at 2.5"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_broken_file_is_one_clear_error(what: str) -> None:
    data = _written()
    (*way, last), value, message = WRONG[what]
    inside: Any = data
    for key in way:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    Path("bad.json").write_text(json.dumps(data))
    with pytest.raises(sl.ScheduleError, match=message) as caught:
        sl.read_timeline("bad.json")
    assert str(caught.value).startswith("bad.json: ")
    assert len(str(caught.value)) < 400


def test_files_that_are_none_are_named() -> None:
    with pytest.raises(sl.ScheduleError, match=r"cannot read nowhere\.json: No such file"):
        sl.read_timeline("nowhere.json")
    with pytest.raises(sl.ScheduleError, match=r"must end in \.json"):
        sl.simulate(sl.schedule("1f1b", 2, 2)).write("run.txt")
    Path("bad.json").write_text('{"format": NaN}')
    with pytest.raises(sl.ScheduleError, match=r"bad\.json: not JSON"):
        sl.read_timeline("bad.json")


# The command.


def call(words: str, capsys: Capture, code: int = 0) -> str:
    assert run(words.split()) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out if code == 0 else err


def in_seconds() -> sl.Timeline:
    """As if measured: F of stage 2 takes 13 ms where others take 10."""
    s = sl.schedule("1f1b", 4, 8)
    forward = [0.010, 0.010, 0.013, 0.010]
    t = sl.simulate(s, sl.Costs(forward=forward, backward=0.02, transfer=0.001))
    return sl.Timeline(s, t.start, t.end, t.transfers)


def test_trace_explains_and_draws_both_on_one_axis(capsys: Capture) -> None:
    in_seconds().write("run.json")
    out = call("trace run.json --forward 0.01 --width 100", capsys)
    lines = out.splitlines()
    assert lines[0] == "1f1b, planned"
    assert lines[5] == "1f1b, measured"
    assert max(map(len, lines[1:10])) <= 100
    assert max(map(len, lines[1:5])) < max(map(len, lines[6:10]))  # the plan is shorter on the same axis
    assert "slow: F of stage 2 on rank 2: 13 ms instead of 10 ms, 8 times: 24 ms in all" in out
    table = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"], ["3"], ["mean"], ["plan"])]
    assert [row[0] for row in table] == ["0", "1", "2", "3", "mean", "plan"]
    step = f"{1e3 * in_seconds().makespan:.2f}"
    assert {row[-1] for row in table[:5]} == {step}
    assert [row[2] for row in table[:4]] == ["0.00", "0.00", "24.00", "0.00"]


def test_trace_without_costs_plans_with_what_was_typical(capsys: Capture) -> None:
    in_seconds().write("run.json")
    report = json.loads(call("trace run.json --json", capsys))
    assert report["planned_makespan"] == pytest.approx(report["measured_makespan"])
    assert report["costs"]["forward"] == pytest.approx([0.010, 0.010, 0.013, 0.010])
    assert set(report["ranks"][0]) == set(Parts._fields)
    assert report["slow"] == [] or max(group["extra"] for group in report["slow"]) < 1e-9


def test_trace_writes_pictures_of_both(tmp_path: Path, capsys: Capture) -> None:
    in_seconds().write("run.json")
    call("trace run.json --forward 0.01 --svg a.svg --html a.html --chrome a.trace.json", capsys)
    picture = ElementTree.fromstring(Path("a.svg").read_text())
    words = "".join(picture.itertext())
    assert "1f1b, planned, 4 ranks" in words
    assert "1f1b, measured, 4 ranks" in words
    assert '"name":"1f1b, measured"' in Path("a.html").read_text()
    events = json.loads(Path("a.trace.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "1f1b, planned", 1: "1f1b, measured"}
    ends = [max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)]
    assert ends[1] == pytest.approx(1e6 * in_seconds().makespan)
    assert ends[0] < ends[1]
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows))


def test_trace_of_a_run_is_that_of_its_newest_measured_step(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run" / "timeline"
    folder.mkdir(parents=True)
    assert "run has no measured step: no file in" in call("trace run", capsys, code=2)
    in_seconds().write(folder / "step-00000100.json")
    sl.simulate(sl.schedule("gpipe", 2, 2)).write(folder / "step-00000050.json")
    in_seconds().write(folder / "planned.json")
    assert call("trace run", capsys) == call("trace run/timeline/step-00000100.json", capsys)


@pytest.mark.parametrize(("ranks", "rest"), [(3, "1 more kind of action"), (4, "3 more kinds of action")])
def test_trace_counts_the_kinds_of_action_that_it_leaves_out(ranks: int, rest: str, capsys: Capture) -> None:
    schedule = sl.schedule("1f1b", ranks, 4)
    sl.simulate(schedule).write("planned.json")
    sl.simulate(schedule, sl.Costs(forward=2, backward=4)).write("run.json")
    assert f"slow: and {rest} with smaller delays" in call("trace run.json", capsys)


def test_trace_says_what_is_wrong_in_one_line(capsys: Capture) -> None:
    sl.schedule("1f1b", 2, 2).write("schedule.json")
    assert "schedule.json: not a timeline" in call("trace schedule.json", capsys, code=2)
    assert "cannot read nowhere.json" in call("trace nowhere.json", capsys, code=2)
    in_seconds().write("run.json")
    assert "forward has 2 values" in call("trace run.json --forward 1,2", capsys, code=2)
    assert "cannot write the page" in call("trace run.json --html /no/such/a.html", capsys, code=2)

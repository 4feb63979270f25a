"""Shard actions: where lowering puts them, what the rule accepts, and what they cost in memory and time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.schedules import action as kinds
from stageline.schedules.sharding import RESHARD_AFTER_FORWARD, Sharding, lower_sharding

FAMILIES = sorted(sl.families())


@st.composite
def lowered(draw: st.DrawFn) -> tuple[sl.Schedule, str]:
    """A family's schedule with the shard actions of some of its stages, and when they free parameters."""
    family, ranks = draw(st.sampled_from(FAMILIES)), draw(st.integers(1, 4))
    try:
        schedule = sl.schedule(family, ranks, draw(st.integers(1, 6)))
    except sl.ScheduleError:
        schedule = sl.schedule(family, 2, 4)
    stages = draw(st.sets(st.integers(0, schedule.stages - 1), min_size=1))
    how = draw(st.sampled_from(RESHARD_AFTER_FORWARD))
    return lower_sharding(schedule, stages, reshard_after_forward=how, prefetch=draw(st.integers(0, 3))), how  # type: ignore[arg-type]


def without(schedule: sl.Schedule, index: int) -> sl.Schedule:
    """The schedule without one of its shard actions."""
    sharding = schedule.sharding
    assert sharding is not None
    rows = [
        [(int(sharding.places[i]), int(sharding.kinds[i]), int(sharding.stage_ids[i])) for i in own if i != index]
        for own in map(sharding.of_rank, range(schedule.ranks))
    ]
    return replace(schedule, sharding=Sharding.of(rows))


@settings(max_examples=60, deadline=None)
@given(lowered(), st.data())
def test_lowered_families_pass_the_rule_and_fail_it_without_any_one_shard_action(
    case: tuple[sl.Schedule, str], data: st.DataObject
) -> None:
    schedule, how = case
    sharding = schedule.sharding
    assert sharding is not None
    assert "sharding" in sl.verify(schedule).rules
    held = {(rank, stage) for rank in range(schedule.ranks) for stage in sharding.stages
            if (schedule.stage_ids[schedule.bounds[rank]:schedule.bounds[rank + 1]] == stage).any()}  # fmt: skip
    assert sharding.count("REDUCE_GRAD") == (len(held) if schedule.training else 0)
    if how == "always":  # once for every entry with an F, B or I of the stage
        assert sharding.count("UNSHARD") <= (schedule.action_kinds != kinds.W).sum()
        assert sharding.count("UNSHARD") >= schedule.microbatches * len(sharding.stages)
    else:
        assert sharding.count("UNSHARD") == len(held)
    assert sharding.count("RESHARD") == sharding.count("UNSHARD")
    with pytest.raises(sl.ScheduleError) as caught:
        sl.verify(without(schedule, data.draw(st.integers(0, len(sharding) - 1))))
    assert caught.value.rule == "sharding"


@settings(max_examples=40, deadline=None)
@given(lowered())
def test_shard_actions_that_cost_nothing_change_no_time_and_more_frees_take_no_more_memory(
    case: tuple[sl.Schedule, str],
) -> None:
    schedule, _ = case
    plain = sl.simulate(replace(schedule, sharding=None), sl.Costs(transfer=0.25))
    timed = sl.simulate(schedule, sl.Costs(transfer=0.25))
    assert np.array_equal(plain.start, timed.start)
    assert np.array_equal(plain.end, timed.end)
    assert timed.peak_memory == plain.peak_memory
    costs = sl.Costs(gather=0.5, reduce=0.75, gathered=3.0, unreduced=2.0, transfer=0.25)
    slower = sl.simulate(schedule, costs)
    assert slower.makespan >= plain.makespan
    assert slower.shards is not None
    assert float(slower.shards.end.max()) <= slower.last_end
    stages = None if schedule.sharding is None else schedule.sharding.stages
    peaks = {
        how: sl.simulate(lower_sharding(schedule, stages, reshard_after_forward=how, prefetch=0), costs).peak_memory  # type: ignore[arg-type]
        for how in RESHARD_AFTER_FORWARD
    }
    assert peaks["never"] == peaks["default"]
    assert all(often <= once for often, once in zip(peaks["always"], peaks["default"], strict=True))


@pytest.mark.parametrize("ending", ["json", "csv"])
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "dualpipe-v"])
def test_files_keep_shard_actions(family: str, ending: str, tmp_path: Path) -> None:
    schedule = lower_sharding(sl.schedule(family, 2, 4), reshard_after_forward="always")
    schedule.write(tmp_path / f"a.{ending}")
    copy = sl.read_schedule(tmp_path / f"a.{ending}")
    assert copy == schedule
    assert copy.sharding == schedule.sharding


def test_the_program_as_text() -> None:
    schedule = lower_sharding(sl.schedule("zb-h1", 1, 2))
    assert " ".join(map(str, schedule.lowered_program(0))) == ("0UNSHARD 0F0 0I0 0W0 0F1 0I1 0RESHARD 0W1 0REDUCE_GRAD")
    schedule = lower_sharding(sl.schedule("1f1b", 1, 2), reshard_after_forward="always")
    assert " ".join(map(str, schedule.lowered_program(0))) == (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0UNSHARD 0F1 0RESHARD 0UNSHARD 0B1 0RESHARD 0REDUCE_GRAD"
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", "0F0 needs the parameters of stage 0 gathered"),
        ("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD", "0B0 needs the parameters of stage 0 gathered"),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", "gathers parameters that are already gathered"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", "never frees the parameters of stage 0"),
        ("0UNSHARD 0F0 0B0 0RESHARD", "never reduces the gradients of stage 0"),
        ("0UNSHARD 0F0 0REDUCE_GRAD 0B0 0RESHARD", "reduces gradients before the last action that adds to them, 0B0"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD 0REDUCE_GRAD", "reduces the gradients a second time"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0UNSHARD 0RESHARD 0REDUCE_GRAD", "that no action has used since"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD 0REDUCE_GRAD", "frees parameters that are not gathered"),
        ("1UNSHARD 0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD", "gathers a stage that rank 0 does not run"),
        (
            "0UNSHARD 0F0 0I0 0REDUCE_GRAD 0W0 0RESHARD",
            "before the last action that adds to them, 0W0",
        ),
    ],
)
def test_each_mistake_is_named(program: str, words: str) -> None:
    with pytest.raises(sl.ScheduleError, match=words) as caught:
        sl.verify(sl.Schedule.from_programs([program.split()]))
    assert (caught.value.rule, caught.value.rank) == ("sharding", 0)


def test_a_prefetch_hides_a_gather_behind_the_entry_before() -> None:
    schedule, costs = sl.schedule("interleaved", 1, 2, chunks=2), sl.Costs(gather=1.0)
    late, early = (sl.simulate(lower_sharding(schedule, prefetch=count), costs) for count in (0, 1))
    assert (late.makespan, early.makespan) == (14.0, 13.0)  # 12 of compute, and one gather or two that are waited for
    actions = [(str(timed.action), timed.start, timed.end) for timed in early.shard_actions(0)]
    assert actions[:2] == [("0UNSHARD", 0.0, 1.0), ("1UNSHARD", 1.0, 2.0)]


def test_memory_counts_what_is_gathered_and_not_reduced() -> None:
    schedule = sl.schedule("zb-v", 2, 2)
    costs = sl.Costs(activation=0, residue=0, gathered=10, unreduced=100)
    once, often = (
        sl.simulate(lower_sharding(schedule, reshard_after_forward=how), costs) for how in ("default", "always")
    )
    assert once.peak_memory == (120.0, 220.0)
    assert often.peak_memory == (110.0, 210.0)
    assert sl.verify(once.schedule).peak_gathered == (2, 2)
    for timeline in (once, often):
        assert timeline.memory(0)[1][-1] == 0.0


def test_options_are_checked() -> None:
    schedule = sl.schedule("1f1b", 2, 2)
    with pytest.raises(sl.ScheduleError, match=r"default, always or never, got 'sometimes'"):
        lower_sharding(schedule, reshard_after_forward="sometimes")  # type: ignore[arg-type]
    with pytest.raises(sl.ScheduleError, match=r"prefetch must be an integer >= 0, got -1"):
        lower_sharding(schedule, prefetch=-1)
    with pytest.raises(sl.ScheduleError, match=r"stage 2 does not exist; there are 2"):
        lower_sharding(schedule, [2])
    assert lower_sharding(schedule, []).sharding is None

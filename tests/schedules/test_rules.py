"""Each rule of `verify`: what breaks it, where it says the fault lies, and what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

import stageline as sl
from stageline.schedules.rules import RULES

TWO_RANKS = sl.Placement.loop(ranks=2, microbatches=2)

GOOD = [
    ["0F0", "0F1", "0B0", "0B1"],
    ["1F0", "1B0", "1F1", "1B1"],
]


def scheduled(
    programs: Sequence[Sequence[str]],
    placement: sl.Placement | None = TWO_RANKS,
    training: bool | None = True,
) -> sl.Schedule:
    return sl.Schedule.from_programs(programs, placement=placement, training=training)


def fault(schedule: sl.Schedule) -> sl.ScheduleError:
    with pytest.raises(sl.ScheduleError) as caught:
        sl.verify(schedule)
    return caught.value


def place(error: sl.ScheduleError) -> tuple[str, int | None, int | None]:
    return error.rule, error.rank, error.position


def test_a_good_schedule_passes_every_rule() -> None:
    expected = ("placement", "known", "owner", "overlap", "complete", "progress", "channels")
    assert sl.verify(scheduled(GOOD)).rules == expected == tuple(rule for rule in RULES if rule != "sharding")


# ---- placement ----


def test_placement_a_stage_that_no_rank_holds() -> None:
    error = fault(scheduled([["0F0", "0B0"], ["2F0", "2B0"]], placement=None))
    assert place(error) == ("placement", None, None)
    assert "stage 1 is on no rank" in str(error)
    assert "ranks 0 to 1" in str(error)


def test_placement_a_rank_that_does_not_exist() -> None:
    error = fault(scheduled(GOOD, sl.Placement.of(2, [0, 7], [0, 0])))
    assert place(error) == ("placement", None, None)
    assert "stage 1 is on rank 7" in str(error)


def test_placement_a_direction_that_does_not_exist() -> None:
    error = fault(scheduled(GOOD, sl.Placement.of(2, [0, 1], [0, 1])))
    assert place(error) == ("placement", None, None)
    assert "microbatch 1 has direction 1" in str(error)


def test_placement_without_stages_or_microbatches() -> None:
    no_stages = sl.Placement(2, np.zeros((1, 0), dtype=np.int32), np.zeros(2, dtype=np.int8))
    for placement in (no_stages, sl.Placement.loop(2, microbatches=0)):
        error = fault(scheduled(GOOD, placement))
        assert place(error) == ("placement", None, None)
        assert "at least one rank, stage and microbatch" in str(error)


# ---- known ----


def test_known_a_stage_that_does_not_exist() -> None:
    error = fault(scheduled([["0F0", "0F1", "2F0", "0B0", "0B1"], GOOD[1]]))
    assert place(error) == ("known", 0, 2)
    assert "rank 0, position 2: 2F0 refers to a stage that does not exist; there are 2" in str(error)


def test_known_a_microbatch_that_does_not_exist() -> None:
    error = fault(scheduled([GOOD[0], ["1F0", "1B0", "1F1", "1B2"]]))
    assert place(error) == ("known", 1, 3)
    assert "1B2 refers to a microbatch that does not exist; there are 2" in str(error)


# ---- owner ----


def test_owner_an_action_on_a_rank_that_does_not_hold_its_stage() -> None:
    error = fault(scheduled([["0F0", "1F1", "0B0", "0B1"], ["1F0", "1B0", "0F1", "1B1"]]))
    assert place(error) == ("owner", 0, 1)
    assert "rank 0, position 1: 1F1 belongs on rank 1" in str(error)


def test_owner_knows_the_direction_of_the_microbatch() -> None:
    """With two directions both ranks hold both stages, each for its own microbatches."""
    good = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    two_way = sl.Placement.two_way(2, [0, 1])
    sl.verify(scheduled(good, two_way))
    error = fault(scheduled([["0F1", *good[0][1:]], ["0F0", *good[1][1:]]], two_way))
    assert place(error) == ("owner", 0, 0)
    assert "0F1 belongs on rank 1" in str(error)


# ---- overlap ----


@pytest.mark.parametrize("pair", ["(0F0;0F1)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B", "(0F0;0W0)OVERLAP_F_B"])
def test_overlap_a_pair_that_is_not_a_forward_and_a_backward(pair: str) -> None:
    error = fault(scheduled([["0F0", pair, "0B1"], GOOD[1]]))
    assert place(error) == ("overlap", 0, 1)
    assert pair[1:4] in str(error)
    assert pair[5:8] in str(error)
    assert "one F and one B or I" in str(error)


def test_overlap_counts_positions_in_entries() -> None:
    """A pair is one entry, so what follows a pair at position 1 is at position 2."""
    programs = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0F9", "0B1"], GOOD[1]]
    assert place(fault(scheduled(programs))) == ("known", 0, 2)


def test_overlap_a_forward_marked_as_paired_with_nothing_behind_it() -> None:
    schedule = scheduled([["0F0", "0B0"]], sl.Placement.loop(1))
    kinds = schedule.kinds.copy()
    kinds[-1] += 8
    broken = sl.Schedule(kinds, schedule.stage_ids, schedule.microbatch_ids, schedule.bounds, schedule.placement)
    error = fault(broken)
    assert place(error) == ("overlap", 0, 1)
    assert "without a backward" in str(error)


# ---- complete ----


def test_complete_an_action_that_never_runs() -> None:
    error = fault(scheduled([GOOD[0], ["1F0", "1F1", "1B1"]]))
    assert place(error) == ("complete", 1, None)
    assert "stage 1 never runs B (or I and W) for microbatch 0" in str(error)


def test_complete_an_action_that_runs_twice() -> None:
    error = fault(scheduled([["0F0", "0F1", "0F1", "0B0", "0B1"], GOOD[1]]))
    assert place(error) == ("complete", 0, 2)
    assert "stage 0 runs F of microbatch 1 twice (positions 1 and 2)" in str(error)


def test_complete_one_twice_and_another_never_is_said_in_one_sentence() -> None:
    error = fault(scheduled([["0F0", "0F0", "0B0", "0B1"], GOOD[1]]))
    assert place(error) == ("complete", 0, 1)
    assert "F of microbatch 0 twice (positions 0 and 1), and that of microbatch 1 never" in str(error)


@pytest.mark.parametrize("half", ["I", "W"])
def test_complete_a_whole_backward_and_half_of_one(half: str) -> None:
    error = fault(scheduled([["0F0", "0F1", "0B0", f"0{half}0", "0B1"], GOOD[1]]))
    assert place(error) == ("complete", 0, 2)
    assert f"0B0 is a whole backward, but the same stage and microbatch also run {half}" in str(error)


@pytest.mark.parametrize(("half", "other"), [("I", "W"), ("W", "I")])
def test_complete_half_a_backward(half: str, other: str) -> None:
    error = fault(scheduled([["0F0", "0F1", f"0{half}0", "0B1"], GOOD[1]]))
    assert place(error) == ("complete", 0, None)
    assert f"stage 0 never runs {other}, although it runs {half} for microbatch 0" in str(error)


def test_complete_a_split_backward_is_a_backward() -> None:
    sl.verify(scheduled([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], GOOD[1]]))


def test_complete_a_forward_only_schedule_has_no_backward() -> None:
    sl.verify(scheduled([["0F0", "0F1"], ["1F0", "1F1"]], training=False))
    error = fault(scheduled([["0F0", "0F1"], ["1F0", "1B0", "1F1"]], training=False))
    assert place(error) == ("complete", 1, 1)
    assert "1B0 is a backward in a forward-only schedule" in str(error)


def test_complete_a_training_schedule_without_any_backward() -> None:
    error = fault(scheduled([["0F0", "0F1"], ["1F0", "1F1"]]))
    assert place(error) == ("complete", 0, None)


# ---- progress ----


@pytest.mark.parametrize(
    ("program", "action", "needs", "position"),
    [
        (["0B0", "0F0", "0F1", "0B1"], "0B0", "0F0", (0, 1)),
        (["0F0", "0F1", "0W0", "0I0", "0B1"], "0W0", "0I0", (2, 3)),
    ],
)
def test_progress_an_action_before_what_it_needs_on_its_own_rank(
    program: list[str], action: str, needs: str, position: tuple[int, int]
) -> None:
    error = fault(scheduled([program, GOOD[1]]))
    assert place(error) == ("progress", 0, position[0])
    assert f"{action} needs {needs}, which the rank runs only at position {position[1]}" in str(error)


def test_progress_a_pair_cannot_overlap_a_forward_with_its_own_backward() -> None:
    error = fault(scheduled([["(0F0;0B0)OVERLAP_F_B"]], sl.Placement.loop(1)))
    assert place(error) == ("progress", 0, 0)


def test_progress_ranks_that_wait_for_one_another_in_a_circle() -> None:
    """Rank 0 waits for the gradient of microbatch 0 before it starts 1; rank 1 waits for 1 before it returns 0."""
    error = fault(scheduled([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]))
    assert error.rule == "progress"
    assert (error.rank, error.position) in {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert "deadlock" in str(error)
    assert "rank 0 at 0B0 (position 1) waits for 1B0 (position 2) of rank 1" in str(error)
    assert "rank 1 at 1F1 (position 1) waits for 0F1 (position 2) of rank 0" in str(error)


def test_progress_pairs_that_wait_for_one_another() -> None:
    """A pair starts when both of its inputs have arrived, and each pair produces an input of the other."""
    programs = [
        ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"],
        ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"],
    ]
    error = fault(scheduled(programs))
    assert error.rule == "progress"
    assert error.position == 1
    assert "(0F1;0B0)OVERLAP_F_B (position 1)" in str(error)


def test_progress_a_long_circle_is_cut_short() -> None:
    """Six ranks that each wait for the next one: the message names some of them and says that there are more."""
    ranks = 6
    backward_first = [[f"{r}F0", f"{r}B0", f"{r}F1", f"{r}B1"] for r in range(ranks - 1)]
    programs = [*backward_first, [f"{ranks - 1}{a}" for a in ("F0", "F1", "B0", "B1")]]
    error = fault(scheduled(programs, sl.Placement.loop(ranks, microbatches=2)))
    assert error.rule == "progress"
    assert "and so on, in a cycle" in str(error)
    assert len(str(error)) < 500


# ---- channels ----


def test_channels_messages_may_be_taken_in_another_order_than_sent_and_the_certificate_says_so() -> None:
    certificate = sl.verify(scheduled([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]))
    assert not certificate.in_channel_order
    assert "channels" not in certificate.rules
    assert [str(channel) for channel in certificate.reordered_channels] == ["0 → 1 forward: 0F0 0F1, taken as 0F1 0F0"]
    assert "those of 1 taken out of order: 0 → 1 forward" in str(certificate)
    data = certificate.to_json()
    assert data["in_channel_order"] is False
    assert data["channels"][1]["messages"] == ["0F0", "0F1"]
    assert data["channels"][1]["taken"] == ["0F1", "0F0"]
    # Both outputs must have arrived before the first is taken, so both receives are posted at once.
    assert certificate.receive_buffers[1] == 2


def test_channels_backward_traffic_may_be_reordered_too() -> None:
    certificate = sl.verify(scheduled([["0F0", "0F1", "0B1", "0B0"], GOOD[1]]))
    assert [str(channel) for channel in certificate.reordered_channels] == ["1 → 0 backward: 1B0 1B1, taken as 1B1 1B0"]
    assert not certificate.in_order


def test_channels_the_rule_itself_names_the_place() -> None:
    with pytest.raises(sl.ScheduleError) as caught:
        RULES["channels"](scheduled([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]))
    assert place(caught.value) == ("channels", 1, 0)
    assert "takes the output of 0F1 before that of 0F0" in str(caught.value)
    assert "rank 0 sends 0F0 first" in str(caught.value)


def test_channels_forward_and_backward_traffic_do_not_mix() -> None:
    """With both stages' copies on both ranks, forwards and gradients go the same way, each in its own order."""
    programs = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    certificate = sl.verify(scheduled(programs, sl.Placement.two_way(2, [0, 1])))
    assert [str(channel) for channel in certificate.channels if channel.source == 0] == [
        "0 → 1 forward: 0F0",
        "0 → 1 backward: 1B1",
    ]


def test_channels_between_stages_of_one_rank_there_is_none() -> None:
    """What a rank hands to itself may be taken in any order."""
    programs = [["0F0", "0F1", "1F1", "1F0", "1B0", "1B1", "0B1", "0B0"]]
    certificate = sl.verify(scheduled(programs, sl.Placement.loop(1, chunks=2, microbatches=2)))
    assert len(certificate.channels) == 0
    assert not certificate.in_order


# ---- the certificate is data ----


def test_the_certificate_prints_and_goes_into_json() -> None:
    certificate = sl.verify(scheduled(GOOD))
    data = json.loads(json.dumps(certificate.to_json()))
    assert data["rules"] == [rule for rule in RULES if rule != "sharding"]
    assert data["look_ahead"] == certificate.look_ahead
    assert data["channels"] == [
        {"source": 1, "target": 0, "traffic": "backward", "messages": ["1B0", "1B1"]},
        {"source": 0, "target": 1, "traffic": "forward", "messages": ["0F0", "0F1"]},
    ]
    assert "in order          yes" in str(certificate)
    assert f"look-ahead        {certificate.look_ahead}" in str(certificate)

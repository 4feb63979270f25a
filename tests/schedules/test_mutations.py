"""`verify` against brute force: it rejects exactly the schedules that break, for the right reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import stageline as sl
from support import oracle
from support.instances import (
    TRAINING,
    VARIANTS,
    allows,
    cached_certificate,
    cached_schedule,
    examples,
    of_families,
    of_no_family,
)

Programs = list[list[sl.Action | sl.Overlap]]
Change = Callable[[sl.Action], sl.Action]


def rule_broken(schedule: sl.Schedule) -> str | None:
    try:
        sl.verify(schedule)
    except sl.ScheduleError as error:
        return error.rule
    return None


def mutant(schedule: sl.Schedule, programs: Programs) -> sl.Schedule:
    """The same stages on the same ranks, with other programs."""
    return sl.Schedule.from_programs(programs, placement=schedule.placement, training=schedule.training)


def programs_of(schedule: sl.Schedule) -> Programs:
    return [list(program) for program in schedule.programs]


def check(schedule: sl.Schedule, programs: Programs) -> None:
    assume(any(programs))
    mutated = mutant(schedule, programs)
    reason = oracle.judge(mutated)
    event(str(reason))
    assert rule_broken(mutated) == reason


# ---- Mutants ----


@given(of_families(), st.data())
@settings(max_examples=examples(100))
def test_a_schedule_with_an_entry_dropped(schedule: sl.Schedule, data: st.DataObject) -> None:
    programs = programs_of(schedule)
    program = data.draw(st.sampled_from(programs))
    del program[data.draw(st.integers(0, len(program) - 1))]
    check(schedule, programs)


@given(of_families(), st.data())
@settings(max_examples=examples(100))
def test_a_schedule_with_an_entry_twice(schedule: sl.Schedule, data: st.DataObject) -> None:
    programs = programs_of(schedule)
    program = data.draw(st.sampled_from(programs))
    entry = data.draw(st.sampled_from(program))
    program.insert(data.draw(st.integers(0, len(program))), entry)
    check(schedule, programs)


@given(of_families(), st.integers(1, 3), st.data())
@settings(max_examples=examples(1000))
def test_a_schedule_with_entries_of_a_rank_swapped(schedule: sl.Schedule, swaps: int, data: st.DataObject) -> None:
    programs = programs_of(schedule)
    for _ in range(swaps):
        program = data.draw(st.sampled_from(programs))
        one = data.draw(st.integers(0, len(program) - 1))
        two = min(len(program) - 1, one + data.draw(st.integers(1, 6)))
        program[one], program[two] = program[two], program[one]
    check(schedule, programs)


@given(of_families(), st.data())
@settings(max_examples=examples(200))
def test_a_schedule_with_one_order_changed_on_all_ranks(schedule: sl.Schedule, data: st.DataObject) -> None:
    """Two microbatches change places everywhere: the messages still match, whatever else breaks."""
    one, two = (data.draw(st.integers(0, schedule.microbatches - 1)) for _ in range(2))
    other = {one: two, two: one}

    def renamed(action: sl.Action) -> sl.Action:
        return action._replace(microbatch=other.get(action.microbatch, action.microbatch))

    check(schedule, [[_changed(entry, renamed) for entry in program] for program in programs_of(schedule)])


@given(of_families(), st.data())
@settings(max_examples=examples(100))
def test_a_schedule_with_an_entry_on_another_rank(schedule: sl.Schedule, data: st.DataObject) -> None:
    assume(schedule.ranks > 1)
    programs = programs_of(schedule)
    source, target = data.draw(st.permutations(programs))[:2]
    entry = source.pop(data.draw(st.integers(0, len(source) - 1)))
    target.insert(data.draw(st.integers(0, len(target))), entry)
    check(schedule, programs)


@pytest.mark.parametrize("what", ["kind", "stage", "microbatch"])
@given(schedule=of_families(), data=st.data())
@settings(max_examples=examples(100))
def test_a_schedule_with_an_action_changed(what: str, schedule: sl.Schedule, data: st.DataObject) -> None:
    """Another kind, stage or microbatch; one stage and one microbatch more than there are included."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.sampled_from("FBIW"),
        "stage": st.integers(0, schedule.stages),
        "microbatch": st.integers(0, schedule.microbatches),
    }
    programs = programs_of(schedule)
    program = data.draw(st.sampled_from(programs))
    at = data.draw(st.integers(0, len(program) - 1))
    entry = program[at]
    value = data.draw(values[what])
    if isinstance(entry, sl.Overlap):
        side = data.draw(st.sampled_from(["forward", "backward"]))
        program[at] = entry._replace(**{side: getattr(entry, side)._replace(**{what: value})})
    else:
        program[at] = entry._replace(**{what: value})
    assume(program[at] != entry)
    check(schedule, programs)


@given(of_families(ranks=3, microbatches=3, training=True), st.data())
@settings(max_examples=examples(150))
def test_a_schedule_with_two_entries_joined_into_a_pair(schedule: sl.Schedule, data: st.DataObject) -> None:
    programs = programs_of(schedule)
    program = data.draw(st.sampled_from(programs))
    at = data.draw(st.integers(0, len(program) - 2))
    one, two = program[at : at + 2]
    assume(isinstance(one, sl.Action) and isinstance(two, sl.Action))
    assert isinstance(one, sl.Action)
    assert isinstance(two, sl.Action)
    program[at : at + 2] = [sl.Overlap(two, one) if two.kind == "F" else sl.Overlap(one, two)]
    check(schedule, programs)


@given(of_no_family())
@settings(max_examples=examples(200))
def test_a_random_schedule(schedule: sl.Schedule) -> None:
    check(schedule, programs_of(schedule))


def _changed(entry: sl.Action | sl.Overlap, change: Change) -> sl.Action | sl.Overlap:
    if isinstance(entry, sl.Overlap):
        return sl.Overlap(change(entry.forward), change(entry.backward))
    return change(entry)


def _all_swaps(schedule: sl.Schedule) -> Iterator[sl.Schedule]:
    for rank, program in enumerate(schedule.programs):
        for one, two in combinations(range(len(program)), 2):
            programs = programs_of(schedule)
            programs[rank][one], programs[rank][two] = program[two], program[one]
            yield mutant(schedule, programs)


def test_every_swap_in_tiny_schedules_of_every_family() -> None:
    """Every mutant, so that valid ones and every kind of broken one are certainly included."""
    outcomes: Counter[str | None] = Counter()
    for name, options in TRAINING:
        if options.get("chunks", 2) == 2 and options.get("waves", 1) == 1:
            for mutated in _all_swaps(cached_schedule(name, 2, 4 if name.startswith("dualpipe") else 2, **options)):
                reason = oracle.judge(mutated)
                assert rule_broken(mutated) == reason, [list(map(str, program)) for program in mutated.programs]
                outcomes[reason] += 1
                if reason is None:
                    outcomes["reordered" if sl.verify(mutated).reordered_channels else "in the order sent"] += 1
    assert outcomes.keys() == {None, "progress", "reordered", "in the order sent"}
    assert min(outcomes.values()) > 20


# ---- What the certificate says ----


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_the_least_look_ahead_is_the_first_that_brute_force_finds_safe(name: str, options: dict[str, int]) -> None:
    for ranks in range(1, 5):
        for microbatches in (*range(1, 7), 8):
            if allows(name, ranks, microbatches):
                certificate = cached_certificate(name, ranks, microbatches, **options)
                assert certificate.look_ahead == oracle.least_look_ahead(certificate.schedule)


@st.composite
def certificates(draw: st.DrawFn) -> sl.Certificate:
    """Small schedules of families, some with swapped entries, and random ones; all valid."""
    schedule = draw(st.one_of(of_families(training=True), of_no_family()))
    if draw(st.booleans()):
        programs = programs_of(schedule)
        for program in programs:
            if len(program) > 1:
                at = draw(st.integers(0, len(program) - 2))
                program[at : at + 2] = program[at + 1], program[at]
        swapped = mutant(schedule, programs)
        schedule = swapped if oracle.judge(swapped) is None else schedule
    assume(oracle.judge(schedule) is None)
    return sl.verify(schedule)


@given(certificates())
@settings(max_examples=examples(200))
def test_the_least_look_ahead_of_any_valid_schedule(certificate: sl.Certificate) -> None:
    event(str(certificate.look_ahead))
    assert certificate.look_ahead == oracle.least_look_ahead(certificate.schedule)


@given(certificates())
@settings(max_examples=examples(60))
def test_the_receive_buffers_are_those_that_the_look_ahead_fills(certificate: sl.Certificate) -> None:
    expected = oracle.posted_at_once(certificate.schedule, certificate.look_ahead)
    assert list(certificate.receive_buffers) == expected


@given(certificates())
@settings(max_examples=examples(100))
def test_the_channels_carry_what_is_sent_in_the_order_in_which_it_is_sent(certificate: sl.Certificate) -> None:
    orders = {
        (channel.source, channel.target, "F" if channel.traffic == "forward" else "B"): [
            oracle.Task(*message) for message in channel.messages
        ]
        for channel in certificate.channels
    }
    assert len(orders) == len(certificate.channels)
    assert orders == oracle.channel_orders(certificate.schedule)


@given(certificates())
@settings(max_examples=examples(200))
def test_the_certificate_says_which_channels_are_read_in_another_order(certificate: sl.Certificate) -> None:
    schedule = certificate.schedule
    event(str(certificate.in_channel_order))
    assert certificate.in_channel_order == oracle.keeps_channel_order(schedule)
    assert ("channels" in certificate.rules) == certificate.in_channel_order
    sent, taken = oracle.channel_orders(schedule), oracle.taking_orders(schedule)
    for channel in certificate.channels:
        ends = (channel.source, channel.target, "F" if channel.traffic == "forward" else "B")
        assert [oracle.Task(*message) for message in channel.taken] == taken[ends]
        assert channel.is_reordered == (sent[ends] != taken[ends])
    assert list(certificate.reordered_channels) == [channel for channel in certificate.channels if channel.is_reordered]


@given(certificates())
@settings(max_examples=examples(100))
def test_the_peaks_are_what_the_programs_hold(certificate: sl.Certificate) -> None:
    held = oracle.most_held(certificate.schedule)
    assert certificate.peak_activations == tuple(peak.activations for peak in held)
    assert certificate.peak_residues == tuple(peak.residues for peak in held)
    assert certificate.peak_held == tuple(peak.both for peak in held)


@given(certificates())
@settings(max_examples=examples(150))
def test_in_order_says_whether_every_stage_goes_back_by_rising_microbatch(certificate: sl.Certificate) -> None:
    expected = oracle.in_order(certificate.schedule)
    event(str(expected))
    assert certificate.in_order == expected


def orders_of_backwards(microbatches: int) -> Iterator[list[str]]:
    """All programs of one rank and stage: the forwards, then backwards whole or split, in every order that runs."""

    def continued(begun: list[str], ready: list[str]) -> Iterator[list[str]]:
        if not ready:
            yield begun
        for action in ready:
            others = [other for other in ready if other != action]
            if action[1] == "I":
                others.append(f"0W{action[2]}")
            yield from continued([*begun, action], others)

    forwards = [f"0F{microbatch}" for microbatch in range(microbatches)]
    for kinds in product("BI", repeat=microbatches):
        yield from continued(forwards, [f"0{kind}{microbatch}" for microbatch, kind in enumerate(kinds)])


def test_in_order_where_one_stage_mixes_whole_and_split_backwards() -> None:
    """A W adds where it stands, not where its I stands: a B between the two comes first."""
    verdicts: Counter[bool] = Counter()
    for program in orders_of_backwards(3):
        schedule = sl.Schedule.from_programs([program], placement=sl.Placement.loop(1, microbatches=3))
        expected = oracle.in_order(schedule)
        assert sl.verify(schedule).in_order == expected, program
        verdicts[expected] += 1
    assert min(verdicts.values()) > 10


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1", False),
        ("0F0,0F1,0F2,0I0,0I1,0W0,0W1,0B2", True),
        ("0F0,0F1,0B0,0I1,0W1", True),
        ("0F0,0F1,0I0,0B1,0W0", False),
        ("0F0,0F1,0I0,(0F2;0B1)OVERLAP_F_B,0W0,0B2", False),
        ("0F0,0F1,0I0,(0F2;0I1)OVERLAP_F_B,0W0,0W1,0B2", True),
        ("0F0,0F1,0I1,0I0,0W0,0W1", False),
    ],
)
def test_in_order_of_a_program_of_one_rank(program: str, expected: bool) -> None:
    assert sl.verify(sl.Schedule.from_programs([program.split(",")])).in_order == expected


def test_verifying_twice_gives_the_same_and_forgets_nothing() -> None:
    """Cached properties of a schedule are not copied to one made from it."""
    schedule = cached_schedule("1f1b", 3, 4)
    first, again = sl.verify(schedule), sl.verify(schedule)
    assert first.to_json() == again.to_json()
    broken = replace(schedule, placement=sl.Placement.loop(3, microbatches=5))
    with pytest.raises(sl.ScheduleError, match="microbatch 4"):
        sl.verify(broken)

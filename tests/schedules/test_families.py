"""Every family: its order, its figures, its memory, and every size that its definition allows."""

from __future__ import annotations

import re
import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from support.instances import ONE_WAY, TWO_WAY, VARIANTS, allows, cached_certificate, cached_schedule, examples

UNIT = sl.Costs()
"""F = I = W = 1, and nothing for a hop."""
USUAL = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)

RANKS = range(1, 9)
MICROBATCHES = range(1, 19)

sizes = st.integers(1, 8)
counts = st.integers(1, 18)
times = st.integers(1, 9)


def simulated(name: str, ranks: int, microbatches: int, costs: sl.Costs = UNIT, **options: Any) -> sl.Timeline:
    return sl.simulate(cached_schedule(name, ranks, microbatches, **options), costs)


def priced(forward: float, backward_input: float, backward_weight: float, transfer: float = 0) -> sl.Costs:
    return sl.Costs(forward, backward_input, backward_weight, transfer=transfer)


# ---- The order, as a picture ----
#
# A row is a rank, time runs to the right. A digit is the microbatch of an F, a small letter that of a B or I
# (a for 0, b for 1, …), a capital that of a W, and a dot is idle time. Everything takes one unit.

PICTURES = {
    ("gpipe", 3, 3): """
        012....abc
        .012..abc.
        ..012abc..
    """,
    ("1f1b", 4, 6): """
        0123...a4b5c.d.e.f
        .012..a3b4c5d.e.f.
        ..01.a2b3c4d5e.f..
        ...0a1b2c3d4e5f...
    """,
    ("1f1b", 3, 1): """
        0....a
        .0..a.
        ..0a..
    """,
    ("eager-1f1b", 3, 5): """
        01234a.b.c.d.e
        .012a3b4c.d.e.
        ..0a1b2c3d4e..
    """,
    ("zb-h1", 4, 5): """
        0123...aA4bBcCdDeE
        .012..a3bA4cBdCeDE
        ..01.a2b3cA4dBeCDE
        ...0a1b2c3dA4eBCDE
    """,
    ("zb-h1", 3, 2): """
        01...aAbB
        .01.a.bAB
        ..0a1bAB.
    """,
    ("zb-h2", 3, 5): """
        01234aAbBcCdDeE..
        .012a3b4cAdBeCDE.
        ..0a1b2c3d4eABCDE
    """,
    ("chimera", 4, 4): """
        01.2c3da.b
        .0213cadb.
        .2031acbd.
        23.0a1bc.d
    """,
    ("forward-only", 3, 4): """
        0123..
        .0123.
        ..0123
    """,
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PICTURES)
def test_a_step_looks_like_its_picture(name: str, ranks: int, microbatches: int) -> None:
    every_unit = sl.Costs(forward=1, backward=1, backward_input=1, backward_weight=1)
    timeline = simulated(name, ranks, microbatches, every_unit)
    letters = {"F": "0123456789", "B": "abcdefghij", "I": "abcdefghij", "W": "ABCDEFGHIJ"}
    rows = [["."] * int(timeline.makespan) for _ in range(ranks)]
    for rank, action, start, _ in timeline.actions():
        rows[rank][int(start)] = letters[action.kind][action.microbatch]
    drawn = "\n".join("".join(row) for row in rows)
    assert drawn == dedent(PICTURES[name, ranks, microbatches]).strip()


# Several stages a rank: the programs, with the stage before each letter; brackets hold an overlapped pair.

PROGRAMS: dict[str, tuple[int, int, dict[str, int], str]] = {
    "interleaved, two groups of two": (2, 4, {}, """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """),
    "interleaved, a short last group folded into the one before": (2, 3, {}, """
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
    """),
    "interleaved-zb": (2, 2, {}, """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """),
    "looped-bfs": (2, 2, {}, """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """),
    "zb-v": (2, 3, {}, """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """),
    "zb-v, made for three and cut to one": (2, 1, {}, """
        0F0 3F0 3I0 3W0 0I0 0W0
        1F0 2F0 2I0 2W0 1I0 1W0
    """),
    "dualpipe": (4, 8, {}, """
        0F0 0F1 0F2 3F4 3I4 3W4 3F5 [0F3 3B5] [3F6 0B0] 3B6 [3F7 0B1] 3B7 0I2 0W2 0I3 0W3
        1F0 2F4 1F1 2F5 1F2 2B4 [2F6 1B0] [1F3 2B5] [2F7 1B1] 2B6 1B2 2I7 1I3 2W7 1W3
        1F4 2F0 1F5 2F1 1F6 2B0 [2F2 1B4] [1F7 2B1] [2F3 1B5] 2B2 1B6 2I3 1I7 2W3 1W7
        0F4 0F5 0F6 3F0 3I0 3W0 3F1 [0F7 3B1] [3F2 0B4] 3B2 [3F3 0B5] 3B3 0I6 0W6 0I7 0W7
    """),
    "dualpipe-v": (2, 4, {}, """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 [0F3 3B1] [3F2 0B0] 3B2 [3F3 0B1] 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 [2F2 1B0] [1F3 2B1] [2F3 1B1] 2B2 1B2 2I3 1I3 2W3 1W3
    """),
    "hanayo, two waves": (2, 2, {"waves": 2}, """
        0F0 0F1 3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1
    """),
}  # fmt: skip


@pytest.mark.parametrize("which", PROGRAMS)
def test_the_programs_of_families_with_several_stages_a_rank(which: str) -> None:
    ranks, microbatches, options, expected = PROGRAMS[which]
    schedule = cached_schedule(which.split(",")[0], ranks, microbatches, **options)

    def text(entry: sl.Action | sl.Overlap) -> str:
        return f"[{entry.forward} {entry.backward}]" if isinstance(entry, sl.Overlap) else str(entry)

    drawn = "\n".join(" ".join(map(text, program)) for program in schedule.programs)
    assert drawn == dedent(expected).strip()


# ---- The figures of schedules.md ----


@pytest.mark.parametrize(
    ("name", "makespan", "span"),
    [
        ("gpipe", 33, 33),
        ("1f1b", 33, 33),
        ("zb-h1", 27, 27),
        ("zb-h2", 27, 24),
        ("interleaved", 57, 57),
        ("zb-v", 51, 48),
        ("dualpipe-v", 54, 54),
    ],
)
def test_known_figures_at_unit_costs_for_4_ranks_and_8_microbatches(name: str, makespan: float, span: float) -> None:
    timeline = simulated(name, 4, 8)
    assert (timeline.makespan, timeline.span) == (makespan, span)


@pytest.mark.parametrize(
    ("name", "makespan", "span"),
    [
        ("gpipe", 314, 314),
        ("eager-1f1b", 314, 314),
        ("1f1b", 324, 324),
        ("zb-h1", 278, 278),
        ("zb-h2", 257, 251),
    ],
)
def test_known_figures_at_usual_costs_for_4_ranks_and_8_microbatches(name: str, makespan: float, span: float) -> None:
    timeline = simulated(name, 4, 8, USUAL)
    assert (timeline.makespan, timeline.span) == (makespan, span)


def test_known_figure_of_dualpipe() -> None:
    assert simulated("dualpipe", 8, 20).makespan == 66


@pytest.mark.parametrize(("backward", "makespan"), [(1, 10), (2, 16)])
def test_known_figures_of_chimera(backward: float, makespan: float) -> None:
    assert simulated("chimera", 4, 4, sl.Costs(forward=1, backward=backward)).makespan == makespan


def test_known_figures_of_v_min() -> None:
    timeline = simulated("v-min", 4, 8)
    assert timeline.span <= 59
    assert max(timeline.peak_memory) == 2 * 2


@pytest.mark.parametrize(("ranks", "microbatches", "span", "peak"), [(4, 8, 57, 3), (8, 24, 165, 5), (16, 32, 237, 9)])
def test_v_half_is_no_worse_than_its_slots_filled_greedily(
    ranks: int, microbatches: int, span: float, peak: float
) -> None:
    timeline = simulated("v-half", ranks, microbatches)
    assert timeline.span <= span
    assert max(timeline.peak_memory) <= 2 * peak


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_beats_1f1b(waves: int) -> None:
    same_work = UNIT.refined(2 * waves)
    assert simulated("hanayo", 4, 8, same_work, waves=waves).makespan < simulated("1f1b", 4, 8).makespan


# ---- The closed forms of schedules.md, where it says that they hold ----


@given(sizes, counts, times, times, times, st.integers(0, 9))
@settings(max_examples=examples(60))
def test_gpipe_takes_what_its_formula_says(p: int, m: int, f: int, i: int, w: int, c: int) -> None:
    extra = (p - 1) * (f + i + w) + 2 * (p - 1) * c
    assert simulated("gpipe", p, m, priced(f, i, w, c)).makespan == m * (f + i + w) + extra


@given(st.sampled_from(["1f1b", "eager-1f1b"]), sizes, counts, times, times, times)
@settings(max_examples=examples(60))
def test_1f1b_takes_what_its_formula_says(name: str, p: int, m: int, f: int, i: int, w: int) -> None:
    assert simulated(name, p, m, priced(f, i, w)).makespan == (m + p - 1) * (f + i + w)


@given(st.integers(2, 8), st.integers(1, 4), times, times, times)
@settings(max_examples=examples(40))
def test_transfers_cost_1f1b_what_its_formula_says(p: int, units: int, f: int, i: int, w: int) -> None:
    c, m = 1 / 16, p * units
    extra = (p - 1) * (f + i + w) + c * (2 * (p - 1) * m / p + 2 * (p - 2))
    assert simulated("1f1b", p, m, priced(f, i, w, c)).makespan == pytest.approx(m * (f + i + w) + extra)


@given(sizes, counts, times, times, times)
@settings(max_examples=examples(40))
def test_eager_1f1b_hides_all_transfers_but_those_of_the_ends(p: int, m: int, f: int, i: int, w: int) -> None:
    c = 1 / 16
    extra = (p - 1) * (f + i + w) + 2 * (p - 1) * c
    assert simulated("eager-1f1b", p, m, priced(f, i, w, c)).makespan == m * (f + i + w) + extra


@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 4), times, times, times, st.sampled_from([0, 1 / 16]))
@settings(max_examples=examples(60))
def test_interleaved_takes_what_its_formula_says(p: int, units: int, v: int, f: int, i: int, w: int, c: float) -> None:
    m = p * units
    extra = (p - 1) * (f + i + w) + 2 * (p * v - 1) * c
    timeline = simulated("interleaved", p, m, priced(f, i, w, c), chunks=v)
    assert timeline.makespan == m * v * (f + i + w) + extra


@given(sizes, counts, st.integers(1, 4), times, times, times)
@settings(max_examples=examples(40))
def test_looped_bfs_takes_what_its_formula_says(p: int, m: int, v: int, f: int, i: int, w: int) -> None:
    m = max(m, p)
    timeline = simulated("looped-bfs", p, m, priced(f, i, w), chunks=v)
    assert timeline.makespan == (m * v + p - 1) * (f + i + w)


@st.composite
def zero_bubble_times(draw: st.DrawFn) -> tuple[int, int, int]:
    f, i = draw(times), draw(times)
    return f, i, draw(st.integers(1, min(f, i)))


@given(sizes, st.integers(0, 6), zero_bubble_times(), st.sampled_from([0, 1 / 16]))
@settings(max_examples=examples(60))
def test_zb_h1_takes_what_its_formula_says(p: int, more: int, fiw: tuple[int, int, int], c: float) -> None:
    (f, i, w), m = fiw, 2 * p - 1 + more
    extra = (p - 1) * (f + i - w) + 4 * (p - 1) * c
    assert simulated("zb-h1", p, m, priced(f, i, w, c)).makespan == m * (f + i + w) + extra


@given(sizes, st.integers(0, 6), zero_bubble_times())
@settings(max_examples=examples(60))
def test_zb_h2_takes_what_its_formula_says(p: int, more: int, fiw: tuple[int, int, int]) -> None:
    (f, i, w), m = fiw, 2 * p - 1 + more
    extra = (p - 1) * max(f, f + i - 2 * w)
    assert simulated("zb-h2", p, m, priced(f, i, w)).makespan == m * (f + i + w) + extra


@given(sizes, st.integers(0, 6), zero_bubble_times(), st.sampled_from([0, 1 / 16]))
@settings(max_examples=examples(60))
def test_the_span_of_zb_h2_is_what_its_formula_says(p: int, more: int, fiw: tuple[int, int, int], c: float) -> None:
    (f, i, w), m = fiw, 2 * p - 1 + more
    extra = (p - 1) * (f + i - 2 * w + 2 * c)
    assert simulated("zb-h2", p, m, priced(f, i, w, c)).span == m * (f + i + w) + extra


@given(sizes, st.integers(0, 6), times)
@settings(max_examples=examples(30))
def test_zb_h2_and_zb_v_have_no_bubble_in_the_span_when_all_take_the_same(p: int, more: int, unit: int) -> None:
    m = 2 * p - 1 + more
    for name in ("zb-h2", "zb-v"):
        assert simulated(name, p, m, priced(unit, unit, unit)).span_bubble == 0


@given(sizes, st.integers(0, 6), times)
@settings(max_examples=examples(30))
def test_zb_v_takes_what_its_formula_says(p: int, more: int, unit: int) -> None:
    m = 2 * p - 1 + more
    assert simulated("zb-v", p, m, priced(unit, unit, unit)).makespan == 6 * m * unit + (p - 1) * unit


@given(st.integers(1, 4), st.integers(0, 4), times, times)
@settings(max_examples=examples(40))
def test_dualpipe_takes_what_its_formula_says(half: int, more: int, f: int, less: int) -> None:
    p, w = 2 * half, min(f, less)
    m = 2 * p + 2 * more
    both = f + f + w  # an overlapped pair takes F + B
    extra = (half - 1) * (both + f + w - 3 * w)
    assert simulated("dualpipe", p, m, priced(f, f, w)).makespan == m * (f + f + w) + extra


@given(st.integers(1, 6), st.integers(0, 6), times, times)
@settings(max_examples=examples(40))
def test_dualpipe_v_takes_what_its_formula_says(p: int, more: int, f: int, less: int) -> None:
    w, m = min(f, less), 2 * p + more
    both = f + f + w
    extra = (p - 1) * (both + f + w - 3 * w)
    assert simulated("dualpipe-v", p, m, priced(f, f, w)).makespan == 2 * m * (f + f + w) + extra


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize(("backward", "unit"), [(1, 2), (2, 1.5)])
def test_chimera_has_the_bubble_that_its_formula_says(p: int, backward: float, unit: float) -> None:
    bubble = simulated("chimera", p, p, sl.Costs(forward=1, backward=backward)).bubble
    assert bubble == pytest.approx((p - 2) / (unit * p + p - 2))


@given(sizes, st.integers(1, 3), st.integers(1, 3), times)
@settings(max_examples=examples(30))
def test_every_wave_of_hanayo_cuts_the_bubble_of_1f1b_when_f_and_b_take_the_same(
    p: int, units: int, waves: int, f: int
) -> None:
    m = units * p
    timeline = simulated("hanayo", p, m, sl.Costs(forward=f, backward=f), waves=waves)
    assert timeline.makespan == m * 2 * waves * 2 * f + (p - 1) * 2 * f


@given(sizes, counts, st.integers(1, 3), times)
@settings(max_examples=examples(30))
def test_forward_only_waits_only_for_the_pipeline_to_fill(p: int, m: int, v: int, f: int) -> None:
    m = max(m, p)
    assert simulated("forward-only", p, m, sl.Costs(forward=f), chunks=v).makespan == (m * v + p - 1) * f


@given(st.sampled_from([v for v in ONE_WAY if v[0] != "forward-only"]), sizes, counts, times, times, times)
@settings(max_examples=examples(150))
def test_no_family_beats_the_lower_bound(
    variant: tuple[str, dict[str, int]], p: int, m: int, f: int, i: int, w: int
) -> None:
    name, options = variant
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = cached_schedule(name, p, m, **options)
    c = 1 / 16
    timeline = sl.simulate(schedule, priced(f, i, w, c))
    assert timeline.makespan >= m * schedule.chunks * (f + i + w) + (p - 1) * (f + c)


# ---- Memory, where schedules.md says what it is ----


@given(sizes, counts)
@settings(max_examples=examples(40))
def test_gpipe_and_looped_bfs_hold_every_microbatch(p: int, m: int) -> None:
    assert cached_certificate("gpipe", p, m).peak_activations == (m,) * p
    assert cached_certificate("looped-bfs", p, m, chunks=3).peak_activations == (3 * m,) * p


@given(sizes, counts)
@settings(max_examples=examples(40))
def test_1f1b_holds_one_microbatch_for_each_rank_behind_it(p: int, m: int) -> None:
    assert cached_certificate("1f1b", p, m).peak_activations == tuple(min(p - r, m) for r in range(p))


@given(sizes, counts)
@settings(max_examples=examples(40))
def test_eager_1f1b_holds_nearly_twice_what_1f1b_holds(p: int, m: int) -> None:
    assert cached_certificate("eager-1f1b", p, m).peak_activations == tuple(min(2 * (p - r) - 1, m) for r in range(p))


@given(sizes, st.integers(0, 8), st.integers(1, 4), st.sampled_from(["interleaved", "interleaved-zb"]))
@settings(max_examples=examples(40))
def test_interleaved_holds_its_warm_up_and_one_more(p: int, more: int, v: int, name: str) -> None:
    m = 2 * p + more
    largest = p + m % p  # the last group takes in what is left over
    expected = tuple(2 * (p - 1 - r) + (v - 1) * largest + 1 for r in range(p))
    assert cached_certificate(name, p, m, chunks=v).peak_activations == tuple(min(n, m * v) for n in expected)


@given(st.sampled_from([1, 2]), sizes, st.integers(0, 6), st.sampled_from([0.0, 0.25, 1.0]))
@settings(max_examples=examples(60))
def test_zb_h_holds_what_its_formula_says(k: int, p: int, more: int, residue: float) -> None:
    m = 2 * p - 1 + more
    held = simulated(f"zb-h{k}", p, m, sl.Costs(activation=1, residue=residue)).peak_memory
    assert held == tuple(k * (p - 1 - r) + 1 + k * r * residue for r in range(p))


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_holds_no_more_than_the_first_rank_of_1f1b(p: int) -> None:
    in_halves = sl.Costs(activation=0.5, residue=0.5)
    for m in MICROBATCHES:
        most = max(simulated("zb-v", p, m, in_halves).peak_memory)
        assert most == p if m >= 2 * p - 1 else most <= min(p, m)


@pytest.mark.parametrize(("name", "asks"), [("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)])
@pytest.mark.parametrize("p", RANKS)
def test_v_half_and_v_min_keep_to_their_memory(name: str, asks: Any, p: int) -> None:
    in_halves = sl.Costs(activation=0.5, residue=0.5)
    for m in MICROBATCHES:
        assert max(simulated(name, p, m, in_halves).peak_memory) <= asks(p)


@given(st.integers(1, 4), st.integers(0, 4))
@settings(max_examples=examples(20))
def test_dualpipe_holds_one_microbatch_more_than_ranks(half: int, more: int) -> None:
    p = 2 * half
    assert max(simulated("dualpipe", p, 2 * p + 2 * more).peak_memory) == p + 1


@given(sizes, st.integers(0, 6))
@settings(max_examples=examples(20))
def test_dualpipe_v_holds_one_half_more_than_stages(p: int, more: int) -> None:
    assert max(simulated("dualpipe-v", p, 2 * p + more).peak_memory) == 2 * p + 1


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera_holds_between_half_and_all_of_a_unit(p: int) -> None:
    for units in (1, 2, 3):
        held = cached_certificate("chimera", p, units * p).peak_activations
        assert min(held) == p // 2 + 1
        assert max(held) == p


@given(sizes, counts, st.integers(2, 3))
@settings(max_examples=examples(30))
def test_hanayo_holds_no_more_than_gpipe(p: int, m: int, waves: int) -> None:
    assert max(cached_certificate("hanayo", p, m, waves=waves).peak_activations) <= 2 * waves * m


@given(sizes, counts)
@settings(max_examples=examples(30))
def test_one_wave_of_hanayo_holds_no_more_than_the_first_rank_of_1f1b(p: int, m: int) -> None:
    assert max(cached_certificate("hanayo", p, m).peak_activations) <= 2 * min(p, m)


# ---- Every size that the definition allows ----


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_every_allowed_size_verifies(name: str, options: dict[str, int], p: int) -> None:
    for m in MICROBATCHES:
        if allows(name, p, m):
            certificate = cached_certificate(name, p, m, **options)
            assert certificate.schedule.ranks == p
            assert certificate.schedule.microbatches == m
            assert certificate.in_order or name in TWO_WAY


@given(
    st.sampled_from(["interleaved", "interleaved-zb", "forward-only"]),
    sizes,
    counts,
    st.integers(1, 4),
    st.integers(0, 12),
)
@settings(max_examples=examples(80))
def test_every_group_from_the_least_on_verifies(name: str, p: int, m: int, v: int, more: int) -> None:
    schedule = cached_schedule(name, p, m, chunks=v, group=min(p, m) + more)
    assert schedule.stages == p * v
    assert sl.verify(schedule).in_order


@given(sizes, counts, st.integers(1, 4))
@settings(max_examples=examples(30))
def test_every_number_of_waves_verifies(p: int, m: int, waves: int) -> None:
    schedule = cached_schedule("hanayo", p, m, waves=waves)
    assert schedule.chunks == 2 * waves
    assert sl.verify(schedule).in_order


@pytest.mark.parametrize("name", TWO_WAY)
def test_two_directions_have_no_one_order_of_backwards(name: str) -> None:
    assert not cached_certificate(name, 4, 8).in_order


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 4, 8), ("chimera", 4, 8), ("chimera", 4, 7)])
def test_two_directions_run_each_copy_of_a_stage_in_order(name: str, p: int, m: int) -> None:
    for program in cached_schedule(name, p, m).programs:
        actions = [a for e in program for a in ((e.forward, e.backward) if isinstance(e, sl.Overlap) else (e,))]
        for stage in range(p):
            for some in ("F", "BI", "W"):
                order = [a.microbatch for a in actions if a.stage == stage and a.kind in some]
                assert order == sorted(order)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_one_receive_posted_ahead_frees_what_would_deadlock(name: str) -> None:
    assert cached_certificate(name, 4, 8).look_ahead == 1


# ---- What a definition does not allow ----


def refusal(name: str, ranks: int, microbatches: int, **options: int) -> str:
    with pytest.raises(sl.ScheduleError) as caught:
        sl.schedule(name, ranks, microbatches, **options)
    return str(caught.value)


def nearest_in(message: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", message.rsplit("nearest:", 1)[1])]


@pytest.mark.parametrize("name", TWO_WAY)
@pytest.mark.parametrize("p", [1, 3, 5, 7])
def test_an_odd_number_of_ranks_is_refused_with_the_nearest_even_ones(name: str, p: int) -> None:
    message = refusal(name, p, 24)
    assert f"even number of ranks, got {p}" in message
    assert nearest_in(message) == [n for n in (p - 1, p + 1) if n > 0]
    for n in nearest_in(message):
        sl.verify(sl.schedule(name, n, 24))


@given(st.integers(1, 4), st.integers(1, 25))
@settings(max_examples=examples(60))
def test_dualpipe_refuses_microbatches_with_the_nearest_number_that_works(half: int, m: int) -> None:
    p = 2 * half
    if allows("dualpipe", p, m):
        sl.verify(sl.schedule("dualpipe", p, m))
        return
    message = refusal("dualpipe", p, m)
    assert f"got {m}" in message
    works = [n for n in range(1, 60) if allows("dualpipe", p, n)]
    for n in nearest_in(message):
        assert abs(n - m) == min(abs(other - m) for other in works)
        sl.verify(sl.schedule("dualpipe", p, n))


@given(sizes, st.integers(1, 15))
@settings(max_examples=examples(60))
def test_dualpipe_v_refuses_with_nearest_sizes_that_all_work(p: int, m: int) -> None:
    if m >= 2 * p:
        sl.verify(sl.schedule("dualpipe-v", p, m))
        return
    message = refusal("dualpipe-v", p, m)
    assert f"got {m}" in message
    microbatches = re.search(r"nearest: (\d+) microbatches", message)
    ranks = re.search(r"(\d+) ranks?$", message)
    assert microbatches is not None
    assert int(microbatches[1]) == 2 * p
    sl.verify(sl.schedule("dualpipe-v", p, int(microbatches[1])))
    assert (ranks is not None) == (m >= 2), "one microbatch is too few for any number of ranks"
    if ranks is not None:
        assert int(ranks[1]) == m // 2
        sl.verify(sl.schedule("dualpipe-v", int(ranks[1]), m))


@given(st.sampled_from(["interleaved", "interleaved-zb"]), st.integers(2, 8), counts, st.data())
@settings(max_examples=examples(40))
def test_a_group_that_would_deadlock_is_refused_with_the_least_that_works(
    name: str, p: int, m: int, data: st.DataObject
) -> None:
    m = max(2, m)
    group = data.draw(st.integers(1, min(p, m) - 1))
    message = refusal(name, p, m, chunks=2, group=group)
    assert f"group of {group} " in message
    assert nearest_in(message) == [min(p, m)]
    sl.verify(sl.schedule(name, p, m, chunks=2, group=min(p, m)))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_inference_takes_groups_of_any_size(group: int) -> None:
    assert sl.verify(sl.schedule("forward-only", 4, 7, chunks=2, group=group)).in_order


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "4", None, True, 10**12])
@pytest.mark.parametrize("which", ["ranks", "microbatches", "chunks"])
def test_a_size_that_is_no_whole_number_from_1_is_refused_by_name(which: str, wrong: Any) -> None:
    given_sizes: dict[str, Any] = {"ranks": 4, "microbatches": 8, which: wrong}
    if which == "chunks" and wrong is None:
        assert sl.schedule("interleaved", **given_sizes).chunks == 2  # as if it were not given
        return
    with pytest.raises(sl.ScheduleError, match=rf"interleaved needs {which} to be a whole number"):
        sl.schedule("interleaved", **given_sizes)


def test_an_option_a_family_does_not_have_is_refused_with_those_it_has() -> None:
    assert "did you mean 'chunks'" in refusal("interleaved", 4, 8, chunk=2)
    assert "1f1b has no option 'chunks'; it accepts no options" in refusal("1f1b", 4, 8, chunks=2)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    message = refusal("zb-w", 4, 8)
    assert "did you mean 'zb-v'?" in message
    assert "did you mean 'zb-v'?" in refusal("zbv1", 4, 8)  # a name that the message lists, not an alias
    assert "did you mean 'zbvzerobubble'?" in refusal("ZBVZeroBubbl", 4, 8)  # no listed name is near
    assert all(name in message for name in sl.families())


# ---- Names ----


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved"),
        ("GPipe", "gpipe"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
    ],
)
def test_the_names_of_torch_are_accepted_in_any_case(torch_name: str, name: str) -> None:
    ours = sl.schedule(name, 2, 4)
    for spelled in (torch_name, torch_name.lower(), torch_name.upper(), name.upper()):
        theirs = sl.schedule(spelled, 2, 4)
        assert theirs == ours
        assert theirs.name == name


def test_the_list_of_families_says_what_each_is_and_asks() -> None:
    listed = sl.families()
    assert {name for name, _ in VARIANTS} <= set(listed)
    assert all(one.name == name and one.description for name, one in listed.items())
    assert listed["dualpipe"].constraints == "P even, M even, M ≥ 2P"
    assert set(listed["interleaved"].options) == {"chunks", "group"}


# ---- A family of one's own ----


def test_a_user_declares_a_family_with_a_decorated_function() -> None:
    @sl.family("my-own", "each microbatch alone", aliases=["Serial"])
    def serial(ranks: int, microbatches: int, *, swap: bool = False) -> list[list[str]]:
        kinds = ("F", "B")
        return [[f"{r}{k}{m}" for m in range(microbatches) for k in kinds] for r in range(ranks)]

    schedule = sl.schedule("SERIAL", ranks=3, microbatches=2, swap=True)
    assert schedule.name == "my-own"
    assert schedule.options == {"swap": True}
    assert [str(entry) for entry in schedule.programs[2]] == ["2F0", "2B0", "2F1", "2B1"]
    assert sl.verify(schedule).peak_activations == (1, 1, 1)
    assert sl.families()["my-own"].description == "each microbatch alone"


def test_a_name_that_is_taken_is_refused_and_changes_nothing() -> None:
    def gpipe(ranks: int, microbatches: int) -> list[list[str]]:
        return [["0F0", "0B0"]]

    gpipe.__qualname__ = "gpipe"  # as it would be at the top of the user's own module
    before = sl.families()
    with pytest.raises(sl.ScheduleError, match="'GPipe' already exists"):
        sl.family("GPipe", "not the real one")(gpipe)
    with pytest.raises(sl.ScheduleError, match="'1f1b' already exists"):
        sl.family("mine", "takes the name of another as its second name", aliases=["1f1b"])(gpipe)
    assert sl.families() == before


def test_a_name_that_is_taken_is_refused_before_any_family_was_used() -> None:
    """The package's own families are loaded on first use; a user's declaration may come before that."""
    script = """
        import stageline as sl
        try:
            @sl.family("gpipe", "not the real one")
            def mine(ranks, microbatches):
                return [["0F0", "0B0"]]
        except sl.ScheduleError as error:
            print(error)
        print(sl.schedule("1f1b", 2, 2))
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("a family named 'gpipe' already exists")
    assert done.returncode == 0, done.stderr


RETURNS: dict[str, tuple[Any, str]] = {
    "too few microbatches": ([["0F0", "0B0"], ["1F0", "1B0"]], "stage 0 never runs F for microbatch 1"),
    "no backwards": ([["0F0", "0F1"], ["1F0", "1F1"]], "never runs B"),
    "one rank": (
        [["0F0", "0B0", "0F1", "0B1"]],
        "called for 2 ranks and 2 microbatches, but returned a schedule for 1 and 2",
    ),
    "another schedule": (sl.schedule("1f1b", 3, 5), "returned a schedule for 3 and 5"),
    "nothing": (None, "expected one list of actions per rank, got None"),
    "a number": (42, "expected one list of actions per rank, got 42"),
    "numbers": ([1, 2], "rank 0: expected a list of actions, got 1"),
    "no actions": ([["0F0"], [None]], "rank 1, position 0: expected an Action"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_a_family_is_held_to_what_it_was_asked_for(what: str) -> None:
    returned, message = RETURNS[what]

    @sl.family("odd-one", "for this test")
    def odd_one(ranks: int, microbatches: int) -> Any:
        return returned

    with pytest.raises(sl.ScheduleError, match=message):
        sl.verify(sl.schedule("odd-one", 2, 2))


def test_a_family_that_fails_is_named_with_its_reason() -> None:
    @sl.family("failing", "for this test")
    def failing(ranks: int, microbatches: int, *, depth: int) -> Any:
        return [[depth / 0]]

    with pytest.raises(sl.ScheduleError, match="failing requires a value for its option 'depth'"):
        sl.schedule("failing", 2, 2)
    with pytest.raises(sl.ScheduleError, match="the family failing failed: ZeroDivisionError") as caught:
        sl.schedule("failing", 2, 2, depth=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_family_for_inference_says_so() -> None:
    @sl.family("just-forward", "for this test", training=False)
    def just_forward(ranks: int, microbatches: int) -> Any:
        return [[f"{rank}F{m}" for m in range(microbatches)] for rank in range(ranks)]

    assert not sl.verify(sl.schedule("just-forward", 2, 2)).schedule.training


def test_names_of_version_0_1_0_still_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"use Placement\.v"):
        assert sl.Placement.vee(3, 2).table.tolist() == sl.Placement.v(3).table.tolist()
    with pytest.warns(DeprecationWarning, match=r"use Placement\.v"):
        assert sl.Placement.snake(2, 4).table.tolist() == [[0, 1, 1, 0, 0, 1, 1, 0]]
    with pytest.warns(DeprecationWarning, match='use placement="v"'):
        assert sl.synthesize(sl.Costs(), 2, 2, chunks=2, placement="vee").schedule.placement.pattern == "v"

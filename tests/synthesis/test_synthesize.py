"""Schedules made for their costs: valid, within memory, in order, and never worse than a named family."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.app import run
from stageline.synthesis.search import SearchProgress
from support.instances import examples


def measured(residue: float = 1.0) -> sl.Costs:
    """Costs as they are measured: I takes a little longer than F, W less."""
    return sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1, residue=residue)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid request: unequal stages, ranks, memory, transfers and microbatches, in any placement."""
    dice = random.Random(draw(st.integers(0, 2**32 - 1)))
    ranks, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    chunks = draw(st.sampled_from([1, 1, 2, 3]))
    stages = ranks * chunks

    def some(low: float = 0.0, high: float = 4.0) -> Any:
        return dice.choice([dice.uniform(low, high), [dice.uniform(low, high) for _ in range(stages)]])

    pairs: list[Any] = [0, 0.3, [[dice.uniform(0, 2) for _ in range(ranks)] for _ in range(ranks)]]
    costs = sl.Costs(
        forward=some(),
        backward_input=some(),
        backward_weight=some(),
        backward=dice.choice([None, None, 8.0]),
        transfer=dice.choice(pairs),
        activation=some(0.5),
        residue=some(0, 2),
        transient=dice.choice([0, some(0, 1), {"I": some(0, 1), "B": some(0, 1)}]),
        scale=dice.choice([None, [dice.choice([0.5, 1, 1, 2]) for _ in range(count)]]),
    )
    return {
        "costs": costs,
        "ranks": ranks,
        "microbatches": count,
        "chunks": chunks,
        "placement": dice.choice(["loop", "v"]),
        "objective": dice.choice(["makespan", "span"]),
        "split": dice.choice([True, False, None]),
        "memory": dice.choice([None, math.inf, 0.0, 0.0, 1.0, 3.0, 8.0]),
    }


def caps_for(request: dict[str, Any]) -> Any:
    """Turn the drawn slack into caps: this much above the minimum of every rank."""
    room = request["memory"]
    if room is None or room == math.inf:
        return room
    least = least_memory({**request, "memory": None})
    return [need + room for need in least]


def least_memory(request: dict[str, Any]) -> tuple[float, ...]:
    try:
        sl.synthesize(**{**request, "memory": 0.0}, time_limit=0.01)
    except sl.MemoryCapError as error:
        return error.least
    return (0.0,) * int(request["ranks"])


def in_order(schedule: sl.Schedule) -> bool:
    """Whether every stage runs its F, its I or B, and its W or B, in the order of the microbatches."""
    for program in schedule.programs:
        for kinds in ("F", "BI", "BW"):
            seen: dict[int, int] = {}
            for action in program:
                assert isinstance(action, sl.Action)
                if action.kind in kinds:
                    if action.microbatch < seen.get(action.stage, -1):
                        return False
                    seen[action.stage] = action.microbatch
    return True


def options_of(known: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All options of a family that give a rank the requested number of stages."""
    if "waves" in known:
        return [{"waves": max(1, request["chunks"] // 2)}]
    if "chunks" not in known:
        return [{}]
    groups = range(1, request["microbatches"] + 1) if "group" in known else ()
    return [{"chunks": request["chunks"]}, *({"chunks": request["chunks"], "group": group} for group in groups)]


def best_family(request: dict[str, Any], caps: Any, placement: sl.Placement) -> float:
    """The best of all families in this placement, built without the synthesis."""
    best = math.inf
    choices = [
        (name, options) for name, family in sl.families().items() for options in options_of(family.options, request)
    ]
    for name, options in choices:
        try:
            schedule = sl.schedule(name, request["ranks"], request["microbatches"], **options)
            certificate = sl.verify(schedule)
        except sl.ScheduleError:
            continue
        kinds = {action.kind for program in schedule.programs for action in program if isinstance(action, sl.Action)}
        wrong = {True: "B", False: "I", None: "-"}[request["split"]]
        same = schedule.training and schedule.placement.table.tolist() == placement.table.tolist()
        if not same or wrong in kinds or not certificate.in_order or schedule.has_overlaps:
            continue
        timeline = sl.simulate(schedule, request["costs"])
        limits = np.broadcast_to(np.inf if caps is None else caps, (schedule.ranks,))
        if (np.asarray(timeline.peak_memory) <= limits).all():
            best = min(best, timeline.makespan if request["objective"] == "makespan" else timeline.span)
    return best


@given(requests())
@settings(max_examples=examples(60))
def test_whatever_is_asked_for_is_valid_in_order_within_memory_and_not_worse_than_a_family(
    request: dict[str, Any],
) -> None:
    caps = caps_for(request)
    r = sl.synthesize(**{**request, "memory": caps}, time_limit=0.05)
    sl.verify(r.schedule)
    assert in_order(r.schedule)
    timeline = sl.simulate(r.schedule, request["costs"])
    limits = np.broadcast_to(np.inf if caps is None else caps, (request["ranks"],))
    assert (np.asarray(timeline.peak_memory) <= limits * (1 + 1e-9)).all()
    achieved = timeline.makespan if request["objective"] == "makespan" else timeline.span
    assert r.achieved == achieved
    assert 0 <= r.lower_bound <= achieved
    assert r.gap == pytest.approx((achieved - r.lower_bound) / r.lower_bound if r.lower_bound else 0.0, abs=1e-8)
    kinds = {action.kind for program in r.schedule.programs for action in program if isinstance(action, sl.Action)}
    assert not (request["split"] is True and "B" in kinds)
    assert not (request["split"] is False and kinds & {"I", "W"})
    assert achieved <= best_family(request, caps, r.schedule.placement) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cap", "residue", "optimum"), [(4, 0.5, 278), (5, 0.5, 258), (None, 0.5, 257), (4, 1, 278), (5, 1, 265)]
)
def test_the_known_optima_are_found_and_proven(cap: float | None, residue: float, optimum: float) -> None:
    r = sl.synthesize(measured(residue), 4, 8, memory=cap, time_limit=60)
    assert r.achieved == optimum
    assert r.lower_bound == optimum
    assert r.gap == 0
    assert not r.was_cut


def test_unequal_stages_under_the_memory_of_1f1b_are_shorter_than_1f1b() -> None:
    costs = sl.Costs(forward=[8, 12, 10, 9], backward_input=[9, 13, 11, 10], backward_weight=[6, 8, 7, 6], transfer=1)
    r = sl.synthesize(costs, 4, 8, memory=[4, 3, 2, 1])
    assert r.named["1f1b"] == sl.simulate(sl.schedule("1f1b", 4, 8), costs).makespan
    assert r.achieved < 0.95 * r.named["1f1b"]


@pytest.mark.parametrize(("chunks", "placement"), [(1, "loop"), (2, "loop"), (2, "v")])
def test_the_same_seed_gives_the_same_schedule(chunks: int, placement: str) -> None:
    costs = sl.Costs(forward=[3, 5, 4] * chunks, backward_input=4, backward_weight=[2, 3, 2] * chunks, transfer=0.5)
    results = [
        sl.synthesize(costs, 3, 6, memory=4 * chunks, chunks=chunks, placement=placement, seed=7, time_limit=20)
        for _ in range(2)
    ]
    assert not any(r.was_cut for r in results)
    assert results[0].schedule == results[1].schedule


def test_without_a_cap_many_microbatches_leave_no_gap() -> None:
    dice = random.Random(1)
    sizes = [dice.uniform(0.7, 1.3) for _ in range(8)]
    costs = sl.Costs(
        forward=[10 * size for size in sizes],
        backward_input=[10.5 * size for size in sizes],
        backward_weight=[8 * size for size in sizes],
        transfer=0.5,
    )
    assert sl.synthesize(costs, 8, 32, time_limit=20).gap <= 0.01


@pytest.mark.parametrize(("residue", "cap"), [(0.5, 10), (0.3, 10)])
def test_ranks_that_idle_no_longer_than_they_must_reach_the_bound_under_a_cap(residue: float, cap: float) -> None:
    costs = sl.Costs(forward=11.347, backward_input=11.248, backward_weight=8.132, transfer=0.377, residue=residue)
    r = sl.synthesize(costs, 8, 24, memory=cap, objective="span", time_limit=20, tolerance=0.002)
    assert r.gap <= 0.002
    assert max(r.timeline.peak_memory) <= cap


def test_a_search_with_an_open_gap_uses_its_time_and_stops_at_the_tolerance() -> None:
    costs = sl.Costs(forward=11.347, backward_input=11.248, backward_weight=8.132, transfer=0.377, residue=0.3)
    open_gap = sl.synthesize(costs, 6, 24, memory=3, time_limit=1)
    assert open_gap.gap > 0
    assert open_gap.was_cut
    assert open_gap.seconds >= 0.5  # it ends early enough for what a busy machine delays
    tolerant = sl.synthesize(costs, 6, 24, memory=3, time_limit=60, tolerance=0.5)
    assert 0 < tolerant.gap <= 0.5
    assert not tolerant.was_cut


def test_a_family_of_the_users_own_is_one_to_start_from() -> None:
    @sl.family("all-halves", "all F, all I, all W")
    def all_halves(ranks: int, microbatches: int) -> list[list[str]]:
        return [[f"{rank}{kind}{m}" for kind in "FIW" for m in range(microbatches)] for rank in range(ranks)]

    r = sl.synthesize(measured(), 3, 4, time_limit=0.1)
    assert r.named["all-halves"] == sl.simulate(sl.schedule("all-halves", 3, 4), measured()).makespan
    assert r.achieved <= min(r.named.values())
    assert "all-halves" not in sl.synthesize(measured(), 3, 4, memory=3, time_limit=0.1).named


def test_progress_is_told_and_never_gets_worse() -> None:
    states: list[SearchProgress] = []
    r = sl.synthesize(measured(), 4, 8, memory=5, progress=states.append)
    assert states
    assert all(one.achieved >= two.achieved for one, two in pairwise(states))
    assert states[-1].achieved == r.achieved
    assert all(step.lower_bound <= step.achieved for step in states)


def test_an_interrupt_keeps_the_best_so_far() -> None:
    def interrupt(progress: SearchProgress) -> None:
        if progress.step == "lower bound":
            raise KeyboardInterrupt

    r = sl.synthesize(measured(), 4, 8, memory=5, progress=interrupt)
    assert r.was_cut
    assert r.achieved == 278
    assert r.how == "zb-h1"
    assert r.lower_bound <= 265


def test_without_ortools_heuristics_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from stageline.synthesis import cp_sat

    monkeypatch.setattr(cp_sat, "is_available", lambda: False)
    r = sl.synthesize(measured(0.5), 4, 8, memory=5)
    assert r.lower_bound < 258 <= r.achieved <= r.named["zb-h1"]


def test_a_backward_stays_whole_where_splitting_it_gains_nothing() -> None:
    r = sl.synthesize(sl.Costs(), 1, 4)
    assert {action.kind for action in r.schedule.programs[0]} == {"F", "B"}  # type: ignore[union-attr]


def test_where_splitting_costs_time_only_some_backwards_are_split() -> None:
    costs = sl.Costs(forward=10, backward_input=12, backward_weight=12, backward=15, transfer=1)
    either, always, never = (
        sl.synthesize(costs, 4, 8, split=split, time_limit=60).achieved for split in (None, True, False)
    )
    assert (always, never) == (305, 281)  # both proven to be the best of their kind
    assert either <= 266


def test_a_cap_that_nothing_fits_is_said_to_be_so_with_the_smallest_that_works() -> None:
    costs = sl.Costs(activation=[1, 2, 1, 3], residue=1, transient=0.5)
    with pytest.raises(sl.MemoryCapError) as caught:
        sl.synthesize(costs, 2, 4, chunks=2, memory=4)
    assert caught.value.rank == 1
    assert caught.value.least == (2.5, 5.5)
    assert "rank 1 needs a memory of 5.5" in str(caught.value)
    assert "the smallest cap that works is 5.5" in str(caught.value)
    assert max(sl.synthesize(costs, 2, 4, chunks=2, memory=5.5).timeline.peak_memory) == 5.5


def test_caps_of_their_own_are_answered_with_caps_that_work() -> None:
    costs = sl.Costs(activation=[1, 2, 4, 3])
    with pytest.raises(
        sl.MemoryCapError, match=r"rank 1 needs a memory of 2 .* \(ranks 2, 3 also need more\)"
    ) as caught:
        sl.synthesize(costs, 4, 4, memory=[9, 1, 1, 2])
    works = str(caught.value).rpartition("the smallest cap that works is ")[2]
    assert works == "9,2,4,3"
    r = sl.synthesize(costs, 4, 4, memory=[float(cap) for cap in works.split(",")])
    assert r.timeline.peak_memory[1:] == (2, 4, 3)


@given(requests())
@settings(max_examples=examples(60))
def test_the_smallest_cap_works_and_a_smaller_one_does_not(request: dict[str, Any]) -> None:
    request = {**request, "memory": None}
    least = least_memory(request)
    peaks = sl.synthesize(**{**request, "memory": list(least)}, time_limit=0.01).timeline.peak_memory
    assert peaks == pytest.approx(least)
    rank = int(np.argmax(least))
    if least[rank] > 0:
        tighter = [0.999 * need if at == rank else need for at, need in enumerate(least)]
        with pytest.raises(sl.MemoryCapError):
            sl.synthesize(**{**request, "memory": tighter}, time_limit=0.01)


def test_no_search_goes_on_for_ever_where_delays_do_not_fit() -> None:
    costs = sl.Costs(residue=[1.5, 1, 0.25, 4.3], backward_input=[2.7, 2.7, 7.2, 5], backward=[18, 4, 14, 11])
    r = sl.synthesize(costs, 2, 5, chunks=2, memory=[3, 2], time_limit=0.3)
    assert max(r.timeline.peak_memory) <= 3


def test_groups_of_all_sizes_are_among_the_families() -> None:
    costs = sl.Costs(forward=10, backward=18, transfer=1)
    uneven, even = (sl.simulate(sl.schedule("interleaved", 5, 12, chunks=3, group=group), costs) for group in (5, 6))
    assert max(even.peak_memory) < max(uneven.peak_memory)
    r = sl.synthesize(costs, 5, 12, chunks=3, memory=even.peak_memory, split=False, time_limit=0.01)
    assert r.named["interleaved"] == even.makespan
    assert r.achieved <= even.makespan


@pytest.mark.parametrize(
    ("chunks", "placement", "cap"), [(2, "v", 6), (3, "v", 9), (3, "loop", 9), (4, "v", 16), (4, "loop", 12)]
)
def test_several_microbatches_are_under_way_at_once_where_memory_holds_few(
    chunks: int, placement: str, cap: int
) -> None:
    costs = sl.Costs(residue=0.5)
    r = sl.synthesize(costs, 8, 16, chunks=chunks, placement=placement, memory=cap, time_limit=0.2)
    alone = sl.synthesize(costs, 8, 1, chunks=chunks, placement=placement, memory=cap, time_limit=0.2).achieved
    assert r.achieved <= 16 * alone / (0.6 * cap // chunks)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"memory": [1, 2, 3]}, "one for each of the 2 ranks"),
        ({"memory": -1}, "must be a number >= 0"),
        ({"memory": "much"}, "must be a number >= 0"),
        ({"placement": "ring"}, "placement must be 'loop' or 'v', got 'ring'"),
        ({"objective": "bubble"}, "objective must be 'makespan' or 'span'"),
        ({"split": "yes"}, "split must be True, False or None"),
        ({"time_limit": 0}, "time_limit must be a number of seconds above 0"),
        ({"time_limit": math.inf}, "time_limit must be a number of seconds above 0"),
        ({"memory": math.nan}, "must be a number >= 0"),
        ({"seed": -1}, "seed must be an integer"),
        ({"tolerance": 1}, "tolerance must be a number from 0 up to 1"),
        ({"ranks": 0}, "synthesize needs ranks to be a whole number from 1"),
        ({"costs": sl.Costs(forward=[1, 2, 3])}, "forward has 3 values, but the schedule has 2 stages"),
        ({"costs": 3}, "expected sl.Costs"),
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any], says: str) -> None:
    request: dict[str, Any] = {"costs": sl.Costs(), "ranks": 2, "microbatches": 4, **wrong}
    with pytest.raises(sl.StagelineError, match=says):
        sl.synthesize(**request)


def test_gradients_are_those_of_one_process() -> None:
    import torch

    r = sl.synthesize(sl.Costs(forward=[1, 2, 1], transfer=0.2), 3, 5, memory=3)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    x, y = torch.randn(10, 8), torch.randn(10, 8)
    gradients = []
    for schedule in (r.schedule, "gpipe"):
        model.zero_grad()
        pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule=schedule, ranks=3, microbatches=5)
        pipe.step(x, y)
        gradients.append([parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_the_command_shows_what_was_achieved_and_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = "--forward 10 --backward-input 11 --backward-weight 7 --transfer 1"
    out = called(f"synthesize -p 4 -m 8 {costs} --memory 4 --width 100", capsys)
    assert "achieved     makespan 278, found by zb-h1" in out
    assert "lower bound  278: no schedule here takes less" in out
    assert "gap          0%: this is optimal" in out
    assert "best family  zb-h1: 278 (the same)" in out
    assert "peak memory" in out
    files = f"-o {tmp_path / 'a.json'} --svg {tmp_path / 'a.svg'} --html {tmp_path / 'a.html'}"
    data = json.loads(called(f"synthesize -p 2 -m 3 --chunks 2 --placement v --split --seed 3 {files} --json", capsys))
    assert data["achieved"] == data["makespan"]
    assert data["gap"] == 0
    assert "2F0" in data["programs"][1]
    schedule = sl.read_schedule(tmp_path / "a.json")
    assert schedule.placement.table.tolist() == [[0, 1, 1, 0]]
    assert [[str(entry) for entry in program] for program in schedule.programs] == data["programs"]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_the_command_draws_what_takes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    out = called("synthesize -p 2 -m 3 --forward 0 --backward 0", capsys)
    assert "achieved     makespan 0" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-p 2 -m 4 --memory much", "--memory must be a number >= 0 or a size like 24GiB"),
        ("-p 2 -m 4 --memory 0.5", "the smallest cap that works is 1"),
        ("-p 2 -m 4 --memory 1,2,3", "one for each of the 2 ranks"),
        ("-p 2 -m 4 --objective bubble", "objective must be 'makespan' or 'span'"),
        ("-p 2 -m 4 --placement ring", "placement must be 'loop' or 'v'"),
        ("-m 4", "-p"),
    ],
)
def test_the_command_refuses_in_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"synthesize {words}".split()) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def called(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line; return what it printed."""
    assert run(words.split()) == 0
    return capsys.readouterr().out

"""Memory against time: a curve that never rises, and the families beside it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import stageline as sl
from stageline.cli.app import run

COSTS = sl.Costs(forward=[9, 12, 10, 11], backward_input=11, backward_weight=7, transfer=1, residue=0.5)


def test_more_memory_never_takes_longer_and_no_family_of_the_placement_is_below_the_curve() -> None:
    curve = sl.pareto(COSTS, 4, 12, time_limit=0.05)
    assert len(curve.points) >= 5
    for smaller, larger in pairwise(curve.points):
        assert smaller.cap < larger.cap
        assert smaller.synthesis.achieved >= larger.synthesis.achieved
        assert smaller.synthesis.lower_bound >= larger.synthesis.lower_bound
    for point in curve.points:
        assert max(point.synthesis.timeline.peak_memory) <= point.cap * (1 + 1e-9)
        assert point.synthesis.lower_bound <= point.synthesis.achieved
    families = {family.name: family for family in curve.families}
    assert {"1f1b", "zb-h1", "zb-v", "v-min", "dualpipe"} <= set(families)
    assert families["zb-v"].chunks == 2
    assert families["dualpipe"].weight_copies == 2
    for family in curve.families:
        value = curve.value_at(family.memory)
        if family.in_placement and value is not None and family.memory <= curve.points[-1].cap:
            assert value <= family.value * (1 + 1e-9)


def test_a_search_starts_from_a_schedule_and_is_never_longer() -> None:
    known = sl.synthesize(COSTS, 4, 12, memory=3, time_limit=0.5)
    again = sl.synthesize(COSTS, 4, 12, memory=3, time_limit=0.01, start=known.schedule)
    assert again.achieved <= known.achieved


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("1f1b", "start must be a schedule, got '1f1b'"),
        (sl.schedule("1f1b", 4, 6), "build it for the same ones"),
        (sl.schedule("gpipe", 4, 12), "start needs 12 memory on rank 0; the cap is 5"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start: sl.Schedule, says: str) -> None:
    with pytest.raises(sl.StagelineError, match=says):
        sl.synthesize(COSTS, 4, 12, memory=5, start=start)


def test_the_command_draws_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"synthesize -p 3 -m 6 --pareto --time-limit 0.05 --svg {tmp_path / 'a.svg'} --html {tmp_path / 'a.html'}"
    assert run(words.split()) == 0
    out = capsys.readouterr().out
    assert "lower bound" in out
    assert "zb-v, another placement" in out
    picture = (tmp_path / "a.svg").read_text()
    assert picture.startswith("<svg")
    assert "zb-h1" in picture
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert run([*words.split(), "--caps", "2,3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [point["cap"] for point in data["points"]] == [2, 3]
    assert {"name", "memory", "value", "in_placement"} <= set(data["families"][0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--memory 4", "pass --caps instead of --memory"),
        ("--caps much", "--caps must be memory sizes like 4,6,8"),
        ("--caps 0.5,2", "the smallest cap that works is 1"),
    ],
)
def test_the_command_refuses_a_curve_in_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"synthesize -p 2 -m 4 --pareto {words}".split()) == 2
    assert says in capsys.readouterr().err

"""The report of a run: one page that is correct, self-contained and robust."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.app import run as command
from stageline.common.errors import StagelineError
from stageline.timeline.explain import Parts
from stageline.timeline.timeline import Transfers
from stageline.train.events import MetricsFile
from stageline.train.report import make_comparison, make_report, read_run
from stageline.train.report.charts import MAX_FINITE, Axis, Series, axis_of
from stageline.train.report.page import html
from support.instances import examples

Capture = pytest.CaptureFixture[str]
Rows = list[dict[str, Any]]
START = 1_731_670_000.0
HOSTILE = "</script><script>alert(1)</script><!-- ' \" & {{data}}"


class Page(HTMLParser):
    """What a browser finds in a page: elements with their attributes, and their text."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[int, str] = {}
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, "an element is left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.EMPTY:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.texts[place] = self.texts.get(place, "") + data

    def all(self, tag: str, **wanted: str) -> list[str]:
        """The texts of the elements of this kind, with these attributes."""
        return [
            self.texts.get(at, "")
            for at, (name, attributes) in enumerate(self.elements)
            if name == tag and all(attributes.get(key) == value for key, value in wanted.items())
        ]

    def attributes(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and all(attributes.get(key) == value for key, value in wanted.items())
        ]

    @property
    def body(self) -> str:
        return " ".join(" ".join(self.all("body")).split())

    @property
    def data(self) -> dict[str, Any]:
        """What the page's own script reads; strict JSON."""
        points: dict[str, Any] = json.loads(self.all("script", id="data")[0], parse_constant=refuse)
        return points


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


def step_rows(count: int) -> Rows:
    return [
        {
            "event": "step", "step": step, "loss": 4.0 - step / 100, "grad_norm": 0.8, "lr": 0.001, "tokens": 2048,
            "tokens_per_s": 15234.0, "seconds": 0.5, "bubble": 0.213, "planned_bubble": 0.18, "memory": 1288490189,
            "skipped": False, "time": START + step,
        }
        for step in range(1, count + 1)
    ]  # fmt: skip


def make(folder: Path, rows: Rows, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsFile(folder / "metrics.jsonl") as file:
        for row in rows:
            file.write(row)
    if tail:
        with (folder / "metrics.jsonl").open("a") as more:
            more.write(tail)
    return folder


def slower(planned: sl.Timeline, times: float) -> sl.Timeline:
    """A step as it could have been measured: everything took longer."""
    moved = Transfers(planned.transfers.receivers, planned.transfers.sent * times, planned.transfers.arrived * times)
    return sl.Timeline(planned.schedule, planned.start * times, planned.end * times, moved, None)


def keep(folder: Path, timelines: dict[str, sl.Timeline]) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    for name, timeline in timelines.items():
        timeline.write(folder / "timeline" / f"{name}.json")


def plan(family: str = "1f1b", ranks: int = 2, microbatches: int = 4) -> sl.Timeline:
    return sl.simulate(
        sl.schedule(family, ranks, microbatches),
        sl.Costs(forward=0.010, backward_input=0.011, backward_weight=0.007, transfer=0.001),
    )


def page_of(folder: Path) -> Page:
    return Page(make_report(folder).read_text(encoding="utf-8"))


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_finished_run_has_its_figures_charts_and_end(tmp_path: Path) -> None:
    rows: Rows = [{"event": "start", "step": 0, "time": START}, *step_rows(30)]
    rows += [
        {"event": "validation", "step": step, "loss": 3.0 - step / 100, "time": START + 30} for step in (10, 20, 30)
    ]
    rows += [{"event": "checkpoint", "step": 30, "bytes": 19_800_000, "seconds": 0.21, "blocked": 0.012}]
    rows += [{"event": "end", "step": 30, "why": "finished", "time": START + 40}]
    folder = make(tmp_path / "first", rows)
    (folder / "config.toml").write_text('[job]\ndescription = "a first try"\n[training]\nsteps = 30\n')
    (folder / "environment.json").write_text('{"host": "node-7", "parameters": 1650000, "gpus": []}')
    page = page_of(folder)
    assert page.all("h1") == ["first"]
    assert "a first try" in page.body
    assert "Finished, at step 30" in page.all("p", **{"class": "status good"})[0]
    figures = dict(zip(page.all("dt"), page.all("dd"), strict=False))
    assert figures["Steps"] == "30of 30"
    assert figures["Best validation loss"] == "2.7000at step 30"
    assert figures["Tokens per second"] == "15.2kmedian; 61.4k in all"
    assert figures["Makespan bubble"] == "21.3%median; planned 18.0%"
    assert figures["Time"].startswith("0:40")
    titles = [title.split(":")[0] for title in page.all("title")[1:]]
    wanted = ["Loss", "Learning rate", "Gradient norm", "Tokens per second", "Bubble of the makespan", "Memory"]
    assert titles == wanted
    assert [line["name"] for line in page.data["charts"][0]["lines"]] == ["training", "smoothed", "validation"]
    assert "3018.9 MiB0.21 s12 ms" in "".join(page.all("tr"))
    assert "node-7" in page.body
    assert "1,650,000" in page.body
    assert "gpusnone" in "".join(page.all("tr"))


def test_the_points_that_can_be_read_out_are_those_of_the_run(tmp_path: Path) -> None:
    rows = step_rows(50)
    [line, *_] = page_of(make(tmp_path / "run", rows)).data["charts"][0]["lines"]
    assert np.cumsum(line["steps"]).tolist() == [row["step"] for row in rows]
    assert line["values"] == [pytest.approx(row["loss"], rel=1e-4) for row in rows]


def test_what_a_chart_reads_out_says_the_step_that_it_is_of(tmp_path: Path) -> None:
    rows: Rows = [*step_rows(12), {"event": "validation", "step": 10, "loss": 2.5}]
    page = page_of(make(tmp_path / "run", rows))
    assert page.all("output")[0].startswith("step 12: training 3.8800, ")
    assert page.all("output")[0].endswith(", validation 2.5000 at 10")
    assert page.all("output")[3] == "step 12: each step 15.2k, smoothed 15.2k"


def test_the_parts_of_every_rank_are_those_of_explain(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(3))
    planned, measured = plan("zb-h1", 4, 8), slower(plan("zb-h1", 4, 8), 1.5)
    keep(folder, {"planned": planned, "step-00000002": planned, "step-00000010": measured})
    explanation = sl.explain(planned, measured)
    page = page_of(folder)
    rows = re.findall(r"(rank \d|mean|plan)((?:\d+\.\d\d)+)", "\n".join(page.all("tr")))
    table = {name: re.findall(r"\d+\.\d\d", cells) for name, cells in rows}
    for rank, parts in enumerate(explanation.ranks):
        assert table[f"rank {rank}"] == [f"{1000 * value:.2f}" for value in (*parts, parts.total)]
    assert table["mean"] == [f"{1000 * value:.2f}" for value in (*explanation.mean, explanation.mean.total)]
    assert "Step 10 took" in page.body
    assert "(1.50 times)" in page.body
    bars = (*explanation.ranks, explanation.mean, explanation.planned_mean)
    for part in Parts._fields:
        drawn = [float(box["width"]) for box in page.attributes("rect", **{"class": part})]
        wanted = [1000 * getattr(parts, part) / measured.makespan for parts in bars]
        assert drawn == pytest.approx([wide for wide in wanted if wide > 0.05], abs=0.06)


def test_both_timelines_are_drawn_as_trace_draws_them(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(3))
    planned, measured = plan(), slower(plan(), 2)
    keep(folder, {"planned": planned, "step-00000003": measured})
    [frame] = page_of(folder).attributes("iframe")
    inner = Page(frame["srcdoc"]).data
    assert [panel["name"] for panel in inner["panels"]] == ["planned", "measured, step 3"]
    assert inner["seconds"] is True
    assert [panel["makespan"] for panel in inner["panels"]] == [planned.makespan, measured.makespan]
    assert inner["until"] == measured.makespan
    assert [panel["memory"] for panel in inner["panels"]] == ["2, 1 microbatches"] * 2


def test_without_a_plan_the_step_itself_says_what_is_typical(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(3))
    keep(folder, {"step-00000003": slower(plan(), 2)})
    assert "if every action took its typical time" in page_of(folder).body
    keep(folder, {"planned": plan("gpipe")})  # of another schedule: no plan of this step
    page = page_of(folder)
    assert "if every action took its typical time" in page.body
    assert "gpipe" in " ".join(page.all("li"))


def test_timelines_of_an_earlier_life_do_not_stand_for_the_last_step(tmp_path: Path) -> None:
    rows: Rows = [*step_rows(4), {"event": "timeline", "step": 4, "file": "timeline/step-00000004.json"}]
    folder = make(tmp_path / "run", rows)
    keep(folder, {"step-00000004": slower(plan(), 2), "step-00000009": slower(plan(), 3)})
    assert read_run(folder).measured_step == 4
    (folder / "timeline/step-00000004.json").write_text("torn")
    run = read_run(folder)
    assert run.measured_step == 9
    assert "step-00000004.json" in run.notes[0]


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        ("[training]\nsteps = 800\nseed = 7 # mine\n", ["seed = 7 # mine"]),
        ("[training]\nsteps = 301\n[model]\nname = 'gpt'\n", ["steps = 301"]),
        ("[activation_checkpoint]\nmodules = []\n[checkpoint]\nenable = true\n", []),
        ("[optimizer]\nlr = 1e-2\nname = 'SGD'\n[mine]\nlr = 5\n", ["name = 'SGD'"]),
    ],
)
def test_settings_that_differ_from_the_defaults_are_marked(options: str, marked: list[str], tmp_path: Path) -> None:
    folder = make(tmp_path / "run", [])
    (folder / "config.toml").write_text(options)
    page = page_of(folder)
    assert page.all("mark") == marked
    assert page.all("pre") == [options.rstrip("\n")]


# --- incomplete runs --------------------------------------------------------------------------------------------------


def test_a_run_that_is_running_or_was_killed_has_no_known_end(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(7), tail='{"event": "step", "ste')
    page = page_of(folder)
    assert "Still running, or killed" in page.body
    assert not page.all("ul", **{"class": "notes"})
    assert page.all("dd")[0].startswith("7")


def test_a_resumed_run_is_not_at_its_old_end(tmp_path: Path) -> None:
    first: Rows = [{"event": "start", "step": 0, "time": 0.0}, *({**row, "time": 1.0} for row in step_rows(5))]
    rows = [*first, {"event": "end", "step": 5, "why": "time limit", "time": 2.0}]
    assert "Time limit, at step 5" in page_of(make(tmp_path / "a", rows)).body
    again: Rows = [*rows, {"event": "start", "step": 5, "resumed": True, "time": 1000.0}]
    again += [{**row, "step": row["step"] + 5, "time": 1001.0} for row in step_rows(2)]
    page = page_of(make(tmp_path / "b", again))
    assert "Still running, or killed" in page.body
    assert "Resumed from step 5" in page.body
    assert dict(zip(page.all("dt"), page.all("dd"), strict=False))["Time"].startswith("0:03")


@pytest.mark.parametrize("text", ["", "\n", '{"event": "st'])
def test_an_empty_file_of_events_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    page = page_of(tmp_path)
    assert "No event is recorded yet" in page.body
    assert page.data["charts"] == []


def test_a_run_that_has_only_begun_shows_its_plan(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nsteps = 5\n")
    keep(tmp_path, {"planned": plan()})
    page = page_of(tmp_path)
    [frame] = page.attributes("iframe")
    assert [panel["name"] for panel in Page(frame["srcdoc"]).data["panels"]] == ["planned"]
    assert "There is no metrics.jsonl." in page.body


def test_one_step_is_a_point(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", step_rows(1)))
    assert all("h0" in path["d"] for path in page.attributes("path", **{"class": "strong dots"}))
    assert len(page.attributes("path", **{"class": "strong dots"})) == 6


def test_broken_neighbours_are_notes_and_not_the_end(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(2), tail="noise\nnoise\n")
    (folder / "config.toml").write_text("[job\n")
    (folder / "environment.json").write_text("[1]")
    (folder / "timeline").mkdir()
    (folder / "timeline/planned.json").write_text("{}")
    notes = page_of(folder).all("ul", **{"class": "notes"})[0]
    for sentence in (
        "2 lines of metrics.jsonl",
        "config.toml is not valid TOML",
        "environment.json is not a JSON object",
        "planned.json",
    ):
        assert sentence in notes


def test_what_is_no_run_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(StagelineError, match="no such folder"):
        make_report(tmp_path / "nowhere")
    with pytest.raises(StagelineError, match=r"neither metrics.jsonl nor config.toml"):
        make_report(tmp_path)
    make(tmp_path / "inner", step_rows(1))
    with pytest.raises(StagelineError, match="it contains the runs inner"):
        make_report(tmp_path)
    with pytest.raises(StagelineError, match="is a file"):
        make_report(tmp_path / "inner/metrics.jsonl")
    with pytest.raises(StagelineError, match="it is a folder"):
        make_report(tmp_path / "inner", tmp_path)
    with pytest.raises(StagelineError, match="cannot write"):
        make_report(tmp_path / "inner", tmp_path / "no/such/report.html")
    assert sorted(path.name for path in (tmp_path / "inner").iterdir()) == ["metrics.jsonl"]


# --- hostile content --------------------------------------------------------------------------------------------------


def test_nothing_in_a_run_can_break_out_of_the_page(tmp_path: Path) -> None:
    rows: Rows = [*step_rows(3), {"event": "end", "step": 3, "why": f"failed: {HOSTILE}"}]
    folder = make(tmp_path / "run <b>", rows)
    (folder / "config.toml").write_text(f"[job]\ndescription = '''{HOSTILE}'''\n# {HOSTILE}\n")
    (folder / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: None}]}))
    (folder / "sample.txt").write_text(HOSTILE)
    programs = [["0F0", "0B0"], ["1F0", "1B0"]]
    keep(folder, {"step-00000003": sl.simulate(sl.Schedule.from_programs(programs, name=HOSTILE))})
    page = page_of(folder)
    assert len(page.attributes("script")) == 2
    assert page.all("h1") == ["run <b>"]
    assert page.all("header")[0].count(HOSTILE) == 2
    assert page.all("pre")[-1].count(HOSTILE) == 2  # in a setting and in a comment
    assert HOSTILE in page.all("pre")
    assert page.all("table", **{"class": "pairs"})[0].count("<!--") == 4
    inner = Page(page.attributes("iframe")[0]["srcdoc"])
    assert len(inner.attributes("script")) == 2


def test_values_that_are_not_finite_are_marked_where_they_are(tmp_path: Path) -> None:
    rows = step_rows(20)
    for step in (5, 6, 12):
        rows[step - 1]["loss"] = math.nan
    rows[19]["grad_norm"], rows[0]["grad_norm"], rows[3]["bubble"] = math.inf, -1e300, None
    page = page_of(make(tmp_path / "run", rows))
    loss, norm = (page.data["charts"][at]["lines"][0] for at in (0, 2))
    assert [step for step, value in zip(np.cumsum(loss["steps"]), loss["values"], strict=True) if value == "nan"] == [
        5,
        6,
        12,
    ]
    assert (norm["values"][-1], norm["values"][0]) == ("inf", "-inf")
    marks = [path["d"].count("M") for path in page.attributes("path", **{"class": "broken"})]
    assert marks == [3, 2]
    assert "3 not finite" in page.body
    thin = page.attributes("path", **{"class": "thin"})[0]["d"]
    assert thin.count("M") == 3  # broken twice


def test_a_run_with_no_finite_value_at_all_is_drawn(tmp_path: Path) -> None:
    rows = [{**row, "loss": math.nan, "grad_norm": math.inf, "memory": math.inf} for row in step_rows(4)]
    page = page_of(make(tmp_path / "run", rows))
    assert "4 not finite" in page.body


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=5), st.lists(st.floats())
)
names = ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds", "bubble", "planned_bubble", "memory", "scale")
any_rows = st.fixed_dictionaries(
    {
        "event": st.sampled_from(["step", "validation", "checkpoint", "start", "end", "timeline", "else"]),
        "step": st.integers(0, 20) | st.integers(0, 10**12),
    },
    optional=dict.fromkeys((*names, "time", "why", "bytes", "resumed", "blocked"), values),
)


@settings(max_examples=examples(60))
@given(rows=st.lists(any_rows, max_size=12))
def test_no_event_can_break_the_page(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    folder = make(tmp_path_factory.mktemp("run"), rows)
    page = Page(html(read_run(folder)))
    assert len(page.data["charts"]) <= 7


# --- size, and what it needs ------------------------------------------------------------------------------------------


def test_a_run_of_ten_thousand_steps_is_a_small_page_that_needs_nothing_else(tmp_path: Path) -> None:
    dice = random.Random(0)
    rows: Rows = []
    for row in step_rows(10_000):
        noise = {name: value * dice.lognormvariate(0, 1) for name, value in row.items() if isinstance(value, float)}
        rows.append({**row, **noise, "scale": 2.0 ** dice.randrange(20), "loss": dice.choice([1.0, 2.0, math.nan])})
        if row["step"] % 50 == 0:
            rows.append({"event": "validation", "step": row["step"], "loss": dice.random()})
            rows.append({"event": "checkpoint", "step": row["step"], "bytes": 10**9, "seconds": 1.0})
    folder = make(tmp_path / "run", rows)
    keep(folder, {"planned": plan("zb-v", 8, 32), "step-00010000": slower(plan("zb-v", 8, 32), 1.3)})
    path = make_report(folder)
    assert path == folder / "report.html"
    assert path.stat().st_size < 500_000
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|\b(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", text)


def test_timelines_too_large_for_the_page_are_left_to_trace(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(3))
    keep(folder, {"step-00000003": slower(plan("1f1b", 96, 200), 1)})
    path = make_report(folder)
    page = Page(path.read_text())
    assert not page.attributes("iframe")
    assert "stageline trace timeline/step-00000003.json" in page.body
    assert "rank 31" in page.all("tr")[32]
    assert page.all("tr")[33] == "…"
    assert path.stat().st_size < 500_000


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400),
    places=st.integers(1, 40),
    gap=st.integers(1, 9),
)
def test_thinning_keeps_the_extremes_the_ends_and_every_kind_of_trouble(
    values: list[float], places: int, gap: int
) -> None:
    rows = [{"step": gap * at, "x": value} for at, value in enumerate(values)]
    series = Series.of(rows, "x")
    thin = series.thinned(places)
    assert len(thin) <= max(2 * places, 4 * places + 2)
    assert set(thin.steps.tolist()) <= set(series.steps.tolist())
    assert (thin.steps[0], thin.steps[-1]) == (series.steps[0], series.steps[-1])
    assert np.all(np.diff(thin.steps) > 0)
    if len(series.finite):
        assert (thin.finite.min(), thin.finite.max()) == (series.finite.min(), series.finite.max())
    assert len(thin.finite) < len(thin) or len(series.finite) == len(series)


@given(
    values=st.lists(st.floats(-MAX_FINITE, MAX_FINITE), min_size=1, max_size=30),
    zero=st.booleans(),
    skewed=st.booleans(),
)
def test_an_axis_holds_all_values_and_its_ticks_are_on_it(values: list[float], zero: bool, skewed: bool) -> None:
    axis = axis_of([np.array(values)], zero=zero, skewed=skewed)
    places = axis.position(np.array(values))
    assert places.min() >= 0
    assert places.max() <= 1
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert len(set(ticks)) == len(ticks)
    room = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - room <= tick <= axis.high + room for tick in ticks)


def test_skewed_values_get_a_logarithmic_axis_and_others_do_not() -> None:
    assert axis_of([np.array([1.0, 2.0, 1.5, 900.0])], skewed=True).log
    assert not axis_of([np.array([1.0, 2.0, 1.5, 9.0])], skewed=True).log
    assert not axis_of([np.array([0.0, 0.0, 0.0, 900.0])], skewed=True).log
    assert Axis(1e-7, 1e9, log=True).ticks()[0] == pytest.approx(1e-7)


def test_smoothing_follows_the_values_and_forgets() -> None:
    steps = np.arange(200)
    smooth = Series(steps, np.where(steps < 100, 5.0, 1.0)).smoothed()
    assert smooth.values[:100] == pytest.approx(5.0)
    assert smooth.values[-1] == pytest.approx(1.0, abs=1e-3)
    assert np.all(np.diff(smooth.values) <= 1e-12)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_where_asked_and_opens_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "run", step_rows(2))
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    assert command(["report", str(folder)]) == 0
    assert (folder / "report.html").is_file()
    assert opened == []
    for option in ("--out", "--output"):
        assert command(["report", str(folder), option, f"{option}.html"]) == 0
        assert Path(f"{option}.html").is_file()
    assert command(["report", str(folder), "-o", "mine.html", "--open"]) == 0
    assert opened == [Path("mine.html").resolve().as_uri()]
    assert capsys.readouterr().err.splitlines()[-1] == "wrote the report to mine.html"
    assert command(["report", "nowhere"]) == 2
    assert "cannot read nowhere: no such folder" in capsys.readouterr().err


def test_the_command_compares_several_runs(tmp_path: Path, capsys: Capture) -> None:
    folders = [make(tmp_path / name, step_rows(3)) for name in ("a", "b")]
    (folders[1] / "config.toml").write_text("[training]\nsteps = 7\n")
    assert command(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "wrote the comparison to comparison.html"
    page = Path("comparison.html").read_text()
    assert "a and b" in page
    assert 'class="run0"' in page
    assert 'class="run1"' in page
    assert '<th scope="row">training.steps</th>' in page
    assert "https://" not in page
    assert command(["report", str(folders[0]), "nowhere"]) == 2


def test_a_config_that_cannot_be_read_is_unknown_in_a_comparison(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, step_rows(3)) for name in ("a", "b", "c")]
    for folder, text in zip(folders, ("training]", "[training]\nsteps = 7", "[training]\nsteps = 8"), strict=True):
        (folder / "config.toml").write_text(text)
    page = make_comparison(folders, tmp_path / "comparison.html").read_text()
    assert '<th scope="row">training.steps</th><td>unknown</td><td>7</td><td>8</td>' in page
    assert "config.toml is not valid TOML" in page


def test_the_page_of_a_running_job_loads_itself_again(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", step_rows(2))
    running = make_report(folder).read_text()
    assert re.search(r'"lastEvent":[0-9]', running)
    assert '"lastEvent":null' in make_report(folder, tmp_path / "copy.html").read_text()  # nobody writes it again


def test_the_command_leaves_torch_alone(tmp_path: Path) -> None:
    make(tmp_path / "run", step_rows(2))
    code = "import sys; from stageline.cli.app import run; print(run(['report', 'run']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "0 False\n"

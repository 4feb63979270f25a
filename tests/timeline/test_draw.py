"""Pictures: they show every action where it runs, fit, and stay small."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.schedules.sharding import lower_sharding
from stageline.timeline import draw
from stageline.timeline.draw.palette import LOOKS
from stageline.timeline.draw.terminal import chart, strip
from support.instances import examples

NAMES = sorted(sl.families())


def timeline(name: str = "zb-v", ranks: int = 4, microbatches: int = 8, **costs: Any) -> sl.Timeline:
    return sl.simulate(sl.schedule(name, ranks, microbatches), sl.Costs(**costs))


def brightness(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((brightness(first), brightness(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_terminal_chart_shows_the_order_of_1f1b() -> None:
    lines = draw.text(timeline("1f1b", 3, 4, backward=1), width=8 + 2 * 12).splitlines()
    assert lines[:3] == [
        "rank 0 F0F1F2....B0F3B1..B2..B3",
        "rank 1 ..F0F1..B0F2B1F3B2..B3..",
        "rank 2 ....F0B0F1B1F2B2F3B3....",
    ]


@settings(max_examples=examples(60))
@given(name=st.sampled_from(NAMES), width=st.integers(30, 240), half=st.integers(1, 4), forward=st.floats(0.01, 100))
def test_the_terminal_chart_never_exceeds_its_width(name: str, width: int, half: int, forward: float) -> None:
    t = timeline(name, 2 * half, 8 * half, forward=forward)
    lines = ["".join(segment.text for segment in line) for line in chart(t, width)]
    assert len(lines) == 2 * half
    assert max(map(len, lines)) <= width
    assert len({len(line) for line in lines}) == 1


def test_crowded_columns_show_what_a_rank_does_most() -> None:
    """In the steady state of 1f1b a rank spends twice as long in B as in F, so B fills every column of it."""
    lines = ["".join(segment.text for segment in line) for line in chart(timeline("1f1b", 8, 256), 60)]
    assert all(set(line[12:48]) == {"B"} for line in lines)


def test_many_ranks_are_shortened_in_the_terminal() -> None:
    lines = chart(timeline("gpipe", 200, 2), 100, most_ranks=10)
    assert len(lines) == 11
    assert "190 ranks not shown" in lines[5][0].text


def test_the_strip_is_full_where_all_ranks_compute() -> None:
    t = timeline("zb-h2", 4, 8)
    assert strip(t, 27, t.makespan) == "▂▄▆" + "█" * 21 + "▆▄▂"


@pytest.mark.parametrize("name", NAMES)
def test_the_svg_has_one_box_for_every_entry(name: str) -> None:
    t = timeline(name)
    root = ElementTree.fromstring(draw.svg(t))
    titles = [element for element in root.iter() if element.tag.endswith("title")]
    assert len(titles) == sum(len(program) for program in t.schedule.programs)


@pytest.mark.parametrize(("ranks", "title"), [(4, "1f1b"), (4, "1f1b, cut by layers, of a run"), (16, "1f1b")])
def test_the_heading_of_an_svg_fits_its_width(ranks: int, title: str) -> None:
    t = timeline("1f1b", ranks, 2 * ranks, forward=(1.0,) * (ranks - 1) + (1.1,), activation=2.5e7, in_seconds=True)
    root = ElementTree.fromstring(draw.svg(t, names=[title]))
    heading = next(element for element in root.iter() if element.tag.endswith("text"))
    lines: list[str] = []
    for span in heading:
        if span.get("x") or not lines:
            lines.append("")
        lines[-1] += span.text or ""
    assert all(64 + 6.4 * len(line) <= 1000 for line in lines), lines
    assert all(words in "".join(lines) for words in (title, "makespan", "imbalance", "MiB"))
    top = min(float(box.get("y", 0)) for box in root.iter() if box.tag.endswith("rect") and box.get("x"))
    assert top > float(heading.get("y", 0)) + 17 * (len(lines) - 1)


def test_large_svgs_draw_outlines() -> None:
    t = timeline("1f1b", 16, 200)
    root = ElementTree.fromstring(draw.svg(t))
    paths = [element.get("d", "") for element in root.iter() if element.tag.endswith("path")]
    assert sum(path.count("z") for path in paths) == t.schedule.num_actions


def unpack(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data = json.loads(match.group(1))
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_every_start_and_end(name: str) -> None:
    t = timeline(name, forward=1.37, transfer=0.21)
    data = unpack(draw.html(t))
    (panel,) = data["panels"]
    step = data["step"]
    for rank, row in enumerate(panel["ranks"]):
        clock, drawn = 0, []
        for gap, time in zip(row["gap"], row["time"], strict=True):
            drawn.append((clock + gap, clock + gap + time))
            clock += gap + time
        boxes = sorted({(timed.start, timed.end) for timed in t.actions(rank)})
        assert len(drawn) == len(t.schedule.programs[rank])
        for (start, end), (first, last) in zip(drawn, boxes, strict=True):
            assert start * step == pytest.approx(first, abs=2 * step)
            assert end * step == pytest.approx(last, abs=2 * step)


def test_a_page_of_ten_thousand_actions_is_small_and_needs_no_network() -> None:
    t = timeline("zb-v", 16, 104, forward=10.3, backward_input=11.1, backward_weight=7.7, transfer=1.3)
    assert t.schedule.num_actions > 9900
    page = draw.html(t)
    assert len(page.encode()) < 300_000
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", page)


def test_a_page_does_not_run_what_a_name_says() -> None:
    s = sl.Schedule.from_programs([["0F0", "0B0"]], name="</script><img src=x onerror=alert(1)>")
    page = draw.html(sl.simulate(s))
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "<img" not in draw.svg(sl.simulate(s))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "1f1b"])
def test_the_trace_has_every_action_and_an_arrow_for_every_transfer(name: str) -> None:
    t = timeline(name, transfer=0.5)
    events = json.loads(draw.trace(t))["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == t.schedule.num_actions
    assert {event["tid"] for event in boxes} == set(range(4))
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    assert tails.keys() == heads.keys() == set(range(len(list(t.messages()))))
    assert all(tail["args"]["arrived"] - tail["args"]["sent"] == pytest.approx(500.0) for tail in tails.values())
    for key, tail in tails.items():
        sender, receiver = tail["name"].split(" to ")
        for arrow, name in ((tail, sender), (heads[key], receiver)):
            (slice_,) = (box for box in boxes if box["name"] == name)
            assert arrow["tid"] == slice_["tid"]
            assert slice_["ts"] < arrow["ts"] < slice_["ts"] + slice_["dur"], "an arrow hangs on the box it belongs to"


def test_every_drawing_shows_what_is_gathered_freed_and_reduced() -> None:
    schedule = lower_sharding(sl.schedule("zb-v", 2, 3))
    timeline = sl.simulate(schedule, sl.Costs(gather=2, reduce=1, transfer=1))
    lines = draw.text(timeline, 110).splitlines()
    assert lines[0].startswith("rank 0 ......F0-")
    assert lines[1].startswith("       U>>>>>")
    assert [line.count("G") for line in (lines[1], lines[3])] == [2, 2]
    assert "gather of parameters" in "".join(lines[4:])
    shards = list(timeline.shard_actions())
    assert draw.svg(timeline).count("<title>") == schedule.num_actions + len(shards)
    ElementTree.fromstring(draw.svg(timeline))
    page = json.loads(re.search(r'id="data">(.*?)</script>', draw.html(timeline))[1])  # type: ignore[index]
    assert [(rank, start, end) for rank, _, _, start, end in page["panels"][0]["shards"]] == [
        (timed.rank, timed.start, timed.end) for timed in shards
    ]
    events = json.loads(draw.trace(timeline, 1.0))["traceEvents"]
    drawn = [(e["tid"] - 2, e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] >= 2]
    assert drawn == [(timed.rank, timed.start, timed.end) for timed in shards]
    timeline.write("run.json")
    copy = sl.read_timeline("run.json")
    assert list(copy.shard_actions()) == shards
    assert copy.idle == timeline.idle


def test_kinds_differ_in_brightness_and_words_can_be_read() -> None:
    """In greyscale the kinds stay distinguishable, and every label has a contrast of at least 4.5 to 1."""
    steps = sorted((brightness(look.fill) for letter, look in LOOKS.items() if letter != "&"), reverse=True)
    assert all((high + 0.05) / (low + 0.05) > 1.35 for high, low in pairwise(steps))
    assert len({look.line for look in LOOKS.values()}) == len(LOOKS)
    for look in LOOKS.values():
        assert contrast(look.fill, look.ink) >= 4.5
        assert contrast(look.pale, "#000000") >= 4.5


def test_ranks_on_several_machines_are_grouped_by_machine(tmp_path: Path) -> None:
    step = sl.simulate(sl.schedule("1f1b", ranks=3, microbatches=2), sl.Costs(transfer=0.25))
    step = replace(step, hosts=("10.0.0.1", "10.0.0.2", "10.0.0.1"), uncertainty=0.004)
    lines = draw.text(step, 60).splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [
        ["on", "10.0.0.1:"],
        ["rank", "0"],
        ["rank", "2"],
        ["on", "10.0.0.2:"],
        ["rank", "1"],
    ]
    assert "clocks of the ranks agree within 0.004" in lines
    events = json.loads(draw.trace(step))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["stageline 1f1b on 10.0.0.1", "stageline 1f1b on 10.0.0.2"]
    assert {names[event["pid"]][-8:] for event in events if event["ph"] == "X" and event["tid"] == 1} == {"10.0.0.2"}
    labels = {event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    assert labels == {"clocks agree within 0.004 ms"}
    assert ">10.0.0.2</text>" in draw.svg(step)
    assert '"hosts":["10.0.0.1","10.0.0.2","10.0.0.1"]' in draw.html(step)
    step.write(tmp_path / "step.json")
    assert sl.read_timeline(tmp_path / "step.json").hosts == step.hosts
    assert set(step.transfer_times.values()) == {0.25}
    assert step.figures()["hosts"] == list(step.hosts)

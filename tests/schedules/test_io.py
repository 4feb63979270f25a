"""Schedules on disk: what is written reads back, and a broken file gives one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stageline as sl

SMALL = {name: sl.schedule(name, ranks=2, microbatches=4) for name in sl.families()}


@pytest.mark.parametrize("name", SMALL)
def test_json_brings_back_the_same_schedule(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    SMALL[name].write(path)
    back = sl.read_schedule(path)
    assert back == SMALL[name]
    assert (back.name, back.options) == (name, SMALL[name].options)
    assert json.loads(path.read_text())["version"] == 1


def test_json_keeps_the_options_and_one_line_per_rank(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    sl.schedule("interleaved", 3, 5, chunks=3).write(path)
    assert sl.read_schedule(path).options == {"chunks": 3}
    assert sum('"0F0"' in line for line in path.read_text().splitlines()) == 1


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(sl.ScheduleError, match=r"two ranks.*json"):
        SMALL["chimera"].write(path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.json.gz"])
def test_an_unknown_ending_names_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(sl.ScheduleError, match=r"\.json or \.csv"):
        SMALL["1f1b"].write(tmp_path / name)
    with pytest.raises(sl.ScheduleError, match=r"\.json or \.csv"):
        sl.read_schedule(tmp_path / name)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(sl.ScheduleError, match=r"no/such/a\.json.*No such file"):
        SMALL["1f1b"].write(tmp_path / "no/such/a.json")
    with pytest.raises(sl.ScheduleError, match=r"b\.csv.*No such file"):
        sl.read_schedule(tmp_path / "b.csv")


CSV_ERRORS = {
    "": "at least one rank",
    "\n\n": "at least one rank",
    "0F0,hello\n": "rank 0, position 1: cannot read 'hello'",
    "0F0,0X0\n": "cannot read '0X0'",
    "0F0,-1F0\n": "cannot read '-1F0'",
    "0F0,0F99999999999\n": "above the maximum, 2147483647",
    "0F0," + "9" * 5000 + "F0\n": "cannot read",
    "7F0,0B0\n": "stage 7 cannot exist",
    "0F0,0B1000000\n": "microbatch 1000000 cannot exist",
    "(0F0;0B0;0B1)OVERLAP_F_B\n": "cannot read",
    "((0F0;0B0)OVERLAP_F_B;0B1)OVERLAP_F_B\n": "cannot read",
    '"0F0\n': "not a CSV file",
    "0F0\x00,0B0\n": "cannot read|NUL",
}


@pytest.mark.parametrize("text", CSV_ERRORS)
def test_broken_csv_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(sl.ScheduleError, match=CSV_ERRORS[text]) as caught:
        sl.verify(sl.read_schedule(path))
    assert len(str(caught.value)) < 400


def test_a_million_columns_are_read_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(["0F0"] * 1_000_000) + "\n")
    with pytest.raises(sl.ScheduleError, match="twice") as caught:
        sl.verify(sl.read_schedule(path))
    assert caught.value.rule == "complete"


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "a.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00\x01")
        with pytest.raises(sl.ScheduleError, match="invalid UTF-8"):
            sl.read_schedule(tmp_path / name)


def good() -> dict[str, Any]:
    return {
        "format": "stageline-schedule",
        "version": 1,
        "name": "mine",
        "options": {},
        "training": True,
        "ranks": 1,
        "stages": 1,
        "microbatches": 1,
        "placement": [[0]],
        "direction": None,
        "programs": [["0F0", "0B0"]],
    }


JSON_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"format": "other"}, "not a schedule"),
    ({"version": 2}, "version 2"),
    ({"version": None}, "version None"),
    ({"programs": "0F0"}, "'programs' must be a list"),
    ({"programs": [["0F0", 7]]}, r"programs\[0\]\[1\] must be a string, got 7"),
    ({"programs": []}, "'ranks' is 1, but 'programs' has 0"),
    ({"programs": [["0F0", "0Q0"]]}, "cannot read '0Q0'"),
    ({"ranks": 2}, "'ranks' is 2"),
    ({"ranks": True}, "'ranks' must be an integer"),
    ({"stages": 10**12}, "'stages' is 1000000000000"),
    ({"microbatches": 10**12}, "'microbatches' is"),
    ({"microbatches": 0}, "'microbatches' is 0"),
    ({"placement": [[5]]}, r"placement\[0\]\[0\] must be an integer from 0 to 0"),
    ({"placement": [[0, 0]]}, "for each of the 1 stages"),
    ({"placement": []}, "one list per direction"),
    ({"placement": [["0"]]}, "must be an integer, got '0'"),
    ({"direction": [0, 0]}, "one number for each of the 1 microbatches"),
    ({"direction": [3]}, "direction.* from 0 to 0, got"),
    ({"training": "yes"}, "'training' must be true or false"),
    ({"name": None}, "'name' must be a string"),
]


@pytest.mark.parametrize(("change", "words"), JSON_ERRORS)
def test_broken_json_is_one_clear_error(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(good()))
    assert sl.verify(sl.read_schedule(path)).in_order
    path.write_text(json.dumps(good() | change))
    with pytest.raises(sl.ScheduleError, match=words):
        sl.read_schedule(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '"x"', "[" * 100_000, '{"ranks": NaN}', "{'a': 1}", '{"ranks": 1e999}']
)
def test_what_is_no_schedule_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(sl.ScheduleError, match=r"not JSON|not a schedule") as caught:
        sl.read_schedule(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("field", [field for field in good() if field != "direction"])
def test_every_field_of_the_format_is_needed(field: str, tmp_path: Path) -> None:
    data = good()
    del data[field]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(sl.ScheduleError, match=field):
        sl.read_schedule(path)


def test_an_idle_rank_has_no_csv_form(tmp_path: Path) -> None:
    idle = sl.Schedule.from_programs([["0F0", "0B0"], []])
    with pytest.raises(sl.ScheduleError, match=r"rank 1 runs nothing.*json"):
        idle.write(tmp_path / "a.csv")
    idle.write(tmp_path / "a.json")
    assert sl.read_schedule(tmp_path / "a.json") == idle


def test_files_of_spreadsheets_and_foreign_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufeff0F0,0B0\n")
    assert sl.verify(sl.read_schedule(path)).in_order
    path.write_text("0F\u0663,0B0\n")
    with pytest.raises(sl.ScheduleError, match="cannot read"):
        sl.read_schedule(path)


@pytest.mark.parametrize("name", ["\ud800", "\x1b[31mred", "two\nlines"])
def test_names_that_cannot_be_printed_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(good() | {"name": name}))
    with pytest.raises(sl.ScheduleError, match="must be printable"):
        sl.read_schedule(path)


def test_two_directions_need_a_direction_for_every_microbatch(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(good() | {"placement": [[0], [0]]}))
    with pytest.raises(sl.ScheduleError, match="several directions"):
        sl.read_schedule(path)

"""What a job shows while it runs: the line for people, the file for programs, and TensorBoard."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import resource
import select
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stageline.common.errors import StagelineError
from stageline.common.units import format_count, format_size
from stageline.train.config.config import Config, Metrics
from stageline.train.events import Logs, MetricsFile, read_metrics
from stageline.train.screen import Pace, Part, fit, parts_of

Capture = pytest.CaptureFixture[str]
START = 1_731_670_000.0


def step_row(step: int, **more: Any) -> dict[str, Any]:
    row = {
        "event": "step", "step": step, "loss": 4.0 - step / 100, "grad_norm": 0.8, "lr": 0.001, "tokens": 2048,
        "tokens_per_s": 15234.0, "seconds": 0.5, "bubble": 0.213, "planned_bubble": 0.18, "memory": 1288490189,
        "skipped": False, "time": START + step,
    }  # fmt: skip
    return row | more


def config(**metrics: Any) -> Config:
    return Config(metrics=Metrics(**metrics))


def screen(width: int = 80) -> tuple[Console, io.StringIO]:
    """A terminal that can be read."""
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, color_system="truecolor", legacy_windows=False), file


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_event_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    logs = Logs(Config(), tmp_path, main=True, total_steps=9)
    for number in range(1, 4):
        logs.event(**step_row(number))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, number + 1))
    logs.close()


def test_the_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: Capture) -> None:
    with Logs(config(enable_tensorboard=True), tmp_path / "run", main=False, total_steps=9) as logs:
        logs.event("start", step=0)
        logs.event(**step_row(1))
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_lines_are_json_for_every_reader_whatever_the_numbers(tmp_path: Path) -> None:
    with Logs(Config(), tmp_path, main=True, total_steps=9) as logs:
        logs.event(**step_row(1, loss=math.nan, grad_norm=math.inf, scale=-math.inf))
        logs.event(**step_row(2, loss=np.float32(0.5), tokens=np.int64(7), extra=Path("somewhere")))

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    first, second = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (first["loss"], first["grad_norm"], first["scale"]) == ("NaN", "Infinity", "-Infinity")
    assert (second["loss"], second["tokens"], second["extra"]) == (0.5, 7, "somewhere")
    row = read_metrics(tmp_path / "metrics.jsonl").rows[0]
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["scale"]) == (math.inf, -math.inf)


def write(path: Path, *rows: dict[str, Any], tail: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_a_resume_cuts_the_file_back_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = {"event": "start", "step": 0, "resumed": False}
    late = {"event": "validation", "step": 4, "loss": 1.0}
    write(path, first, *(step_row(step) for step in range(1, 6)), late, tail='{"event": "step", "st')
    with Logs(Config(), tmp_path, main=True, total_steps=9) as logs:
        logs.event("start", step=3, resumed=True)
        logs.event(**step_row(4, loss=7.0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("start", 3), ("step", 4),
    ]  # fmt: skip
    assert rows[-1]["loss"] == 7.0
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_cut_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(step_row(step) for step in range(1, 6)))
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StagelineError, match="No space left on device"):
        MetricsFile(path, resume_step=2)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_that_cannot_be_written_leaves_no_part_and_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit of the size of a file stands for a full disk: the first bytes of a line still fit."""
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    logs = Logs(Config(), tmp_path, main=True, total_steps=2)
    logs.event("start", step=0, resumed=False)
    before = path.read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))
        for row in (step_row(1), {"event": "end", "step": 1, "why": "failed: the disk is full"}):
            with pytest.raises(StagelineError, match=r"^cannot write .*metrics\.jsonl: File too large$"):
                logs.event(**row)
        logs.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert capsys.readouterr().out.endswith("ended after 1 of 2 steps: failed: the disk is full\n")


def test_going_on_without_a_step_keeps_all_but_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step_row(1), step_row(2), tail='{"event": "step", "step": 3, "lo')
    with MetricsFile(path) as file:
        file.write(step_row(3))
    assert [row["step"] for row in read_metrics(path).rows] == [1, 2, 3]
    assert read_metrics(path).broken == 0
    path.write_text(path.read_text().rstrip("\n"))  # complete, but its line break never reached the disk
    with MetricsFile(path) as file:
        file.write(step_row(4))
    assert [row["step"] for row in read_metrics(path).rows] == [1, 2, 3, 4]


events = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("validation"), st.integers(1, 12)),
    st.tuples(st.just("start"), st.integers(0, 12)),
)


@given(lives=st.lists(events, max_size=40), torn=st.sampled_from(["", "{", '{"event": "step", "step": 1']))
def test_the_later_line_of_a_step_wins_and_a_resume_forgets_what_came_after_it(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[str, int]], torn: str
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, *({"event": event, "step": step, "at": at} for at, (event, step) in enumerate(lives)), tail=torn)
    wanted: dict[tuple[str, int], int] = {}
    for at, (event, step) in enumerate(lives):
        if event == "start":
            wanted = {key: value for key, value in wanted.items() if key[1] <= step}
        else:
            wanted[event, step] = at
    history = read_metrics(path)
    got = {(row["event"], row["step"]): row["at"] for row in history.rows if row["event"] != "start"}
    assert got == wanted
    assert history.broken == 0
    assert len(history.of("step")) == sum(key[0] == "step" for key in wanted)


def test_lines_that_say_nothing_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    noise = [
        "[]",
        '{"event": 3, "step": 1}',
        '{"event": "step"}',
        '{"event": "step", "step": -1}',
        "\0\0\0",
        "[" * 9999,
    ]
    path.write_bytes("\n".join(noise).encode() + b"\n\xff\xfe\n\n" + json.dumps(step_row(1)).encode() + b"\n")
    assert [row["step"] for row in read_metrics(path).rows] == [1]
    assert read_metrics(path).broken == 7


@pytest.mark.parametrize("row", [{}, {"step": -1}, {"step": "3"}, {"step": 1.5}, {"step": True}])
def test_an_event_without_its_step_is_refused_and_costs_nothing(row: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", step_row(1))
    with (
        Logs(Config(), tmp_path, main=True, total_steps=9) as logs,
        pytest.raises(StagelineError, match="an integer >= 0"),
    ):
        logs.event("start", **row)
    assert len(read_metrics(tmp_path / "metrics.jsonl").rows) == 1


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    logs = Logs(Config(), tmp_path, main=True, total_steps=9)
    logs.close()
    logs.close()
    with pytest.raises(StagelineError, match="closed"):
        logs.event(**step_row(1))


def test_threads_may_report_at_once(tmp_path: Path) -> None:
    logs = Logs(Config(), tmp_path, main=True, total_steps=200)
    logs.event("start", step=0)

    def report(which: int) -> None:
        for step in range(1, 51):
            logs.event("checkpoint", step=4 * step + which, bytes=10**6, seconds=0.1)

    threads = [threading.Thread(target=report, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.close()
    history = read_metrics(tmp_path / "metrics.jsonl")
    assert (len(history.of("checkpoint")), history.broken) == (200, 0)


# --- lines for people -------------------------------------------------------------------------------------------------


def run_of(logs: Logs, steps: range) -> None:
    for step in steps:
        logs.event(**step_row(step))


def test_into_a_pipe_come_plain_lines_the_first_the_last_and_every_tenth(tmp_path: Path, capsys: Capture) -> None:
    with Logs(config(log_freq=10), tmp_path, main=True, total_steps=25) as logs:
        logs.event("start", step=0, time=START)
        run_of(logs, range(1, 26))
        logs.event("validation", step=25, loss=2.2, samples=1200, seconds=0.4)
        logs.event("checkpoint", step=25, seconds=0.2, blocked=0.01, bytes=123456)
        logs.event("timeline", step=25, file="timeline/step-00000025.json")
        logs.event("end", step=25, why="finished")
    assert capsys.readouterr().out.splitlines() == [
        "started: 25 steps",
        " 1/25  loss 3.9900  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  0:12 left",
        "10/25  loss 3.9000  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  0:15 left",
        "20/25  loss 3.8000  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  0:05 left",
        "25/25  loss 3.7500  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  took 0:25",
        "validation at step 25: loss 2.2000 on 1,200 samples, 0.40 s",
        "checkpoint of step 25: 121 KiB, written in 0.20 s, training waited 10 ms",
        "finished: 25 of 25 steps",
    ]


def test_an_early_end_still_shows_the_last_step_and_why(tmp_path: Path, capsys: Capture) -> None:
    with Logs(config(log_freq=10), tmp_path, main=True, total_steps=25) as logs:
        logs.event("start", step=10, resumed=True, time=START)
        run_of(logs, range(11, 14))
        logs.event("end", step=13, why="failed: RuntimeError: boom\n\x1b[2Jat rank 3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resumed from step 10: 15 of 25 steps to go"
    assert [line.split()[0] for line in lines[1:3]] == ["11/25", "13/25"]
    assert lines[3] == "ended after 13 of 25 steps: failed: RuntimeError: boom �[2Jat rank 3"


def test_a_job_that_stops_without_an_end_has_shown_its_last_step(tmp_path: Path, capsys: Capture) -> None:
    with Logs(config(log_freq=10), tmp_path, main=True, total_steps=25) as logs:
        run_of(logs, range(1, 5))
    assert capsys.readouterr().out.splitlines()[-1].startswith(" 4/25")


numbers = st.one_of(st.floats(), st.integers(0, 10**18), st.none(), st.text(max_size=3))


@given(
    values=st.fixed_dictionaries(
        dict.fromkeys(("loss", "tokens_per_s", "bubble", "planned_bubble", "memory", "seconds"), numbers)
    ),
    step=st.integers(0, 10**9),
    left=st.none() | st.floats(),
    width=st.integers(1, 120),
)
def test_the_line_never_exceeds_its_width_whatever_the_numbers(
    values: dict[str, Any], step: int, left: float | None, width: int
) -> None:
    line = fit(parts_of({"step": step, "skipped": True, **values}, 10**9, left), width)
    assert len(line) <= width
    assert line.isprintable()


def test_the_least_important_parts_go_first() -> None:
    parts = parts_of(step_row(12), 300, 151.0)
    seen = [fit(parts, width) for width in range(90, 6, -1)]
    lost: list[str] = []
    for line in seen:
        lost += [part.text for part in parts if part.text not in line and part.text not in lost]
    assert lost == ["1.2 GiB", "(plan 18%)", "15.2k tok/s", "bubble 21%", "2:31 left", "loss 3.8800"]


@pytest.mark.parametrize("width", [50, 80, 160])
def test_on_a_terminal_one_line_updates_and_the_rest_is_above_it(width: int, tmp_path: Path) -> None:
    console, file = screen(width)
    with Logs(config(log_freq=10), tmp_path, main=True, total_steps=100_000, console=console) as logs:
        logs.event("start", step=0)
        run_of(logs, range(1, 4))
        logs.event("validation", step=3, loss=2.2)
        run_of(logs, range(4, 6))
        logs.event("end", step=5, why="time limit")
    text = file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
    lines = screen_after(text)
    last = lines[-2]  # the last progress line stands above the end
    assert [line.split()[0] for line in lines if line] == ["started:", "validation", last.split()[0], "ended"]
    assert "     5/100000" in last
    for line in re.split(r"[\r\n]", plain(text)):
        if "/100000" in line:
            assert len(line) < width
    assert ("━" in last) == (width == 160)


def test_the_line_of_a_step_looks_the_same_whatever_was_said_above_it(tmp_path: Path) -> None:
    console, file = screen(160)
    with Logs(config(), tmp_path, main=True, total_steps=100, console=console) as logs:
        logs.event("start", step=0)
        run_of(logs, range(1, 2))
        logs.event("validation", step=1, loss=2.2)
        logs.event("checkpoint", step=1, bytes=10)
        logs.event("end", step=1, why="failed: everything")
    text = file.getvalue().replace("\x1b[?25l", "")  # the cursor is hidden with the first one
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[2K", text) if "1/100" in plain(line)]
    assert len(drawn) >= 4
    assert len(set(drawn)) == 1
    assert "\x1b[35mvalidation at step 1: loss 2.2000\x1b[0m" in text


def screen_after(text: str) -> list[str]:
    """The lines that a terminal shows in the end: what is erased and written again counts once."""
    lines, row = [""], 0
    for code, letters in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r)|([^\x1b\r]+)", text):
        if code == "\x1b[2K":
            lines[row] = ""
        elif code.endswith("A") and code.startswith("\x1b["):
            row -= int(code[2:-1] or 1)
        elif code == "\r" or code:
            continue
        for at, part in enumerate(letters.split("\n")):
            if at:
                row += 1
                if row == len(lines):
                    lines.append("")
            lines[row] += part
    return [line for line in lines if line.strip()]


def test_colour_is_left_out_where_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert colour.search(in_a_terminal(tmp_path / "a", ""))
    assert not colour.search(in_a_terminal(tmp_path / "b", "disable_color_printing=True"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(in_a_terminal(tmp_path / "c", ""))


JOB = """
import sys
from stageline.train.config.config import Config, Metrics
from stageline.train.events import Logs
logs = Logs(Config(metrics=Metrics({settings})), {folder!r}, main=True, total_steps=3)
logs.event("start", step=0, resumed=False)
for step in range(1, 4):
    logs.event("step", step=step, loss=2.5, tokens_per_s=15234.0, seconds=0.1)
print("a word of the user's own")
{last}
"""


def in_a_terminal(folder: Path, settings: str, last: str = "logs.close()") -> str:
    """What a job of its own process writes to a real terminal."""
    main, other = pty.openpty()
    code = JOB.format(settings=settings, folder=str(folder), last=last)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "PYTHON_COLORS": "0"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=other, stderr=other, env=environment):
        os.close(other)
        output = b""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and select.select([main], [], [], 300)[0]:
            try:
                output += os.read(main, 65536)
            except OSError:  # the other end is closed
                break
    os.close(main)
    return output.decode()


def test_a_process_that_dies_gives_the_terminal_back(tmp_path: Path) -> None:
    text = in_a_terminal(tmp_path, "", last="raise RuntimeError('boom')")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "RuntimeError: boom" in text
    assert "a word of the user's own" in text


@pytest.mark.parametrize("missing", [False, True])
def test_a_pipe_gets_no_control_characters_with_or_without_rich(missing: bool, tmp_path: Path) -> None:
    code = ("import sys; sys.modules['rich'] = None\n" if missing else "") + JOB
    code = code.format(settings="", folder=str(tmp_path), last="logs.close()")
    environment = {**os.environ, "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=True, env=environment)
    lines = done.stdout.decode("ascii").splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() and len(line) <= 80 for line in lines)


def test_a_reader_who_leaves_does_not_end_the_job(tmp_path: Path) -> None:
    last = "for step in range(4, 2000): logs.event('step', step=step, loss=1.0)\nlogs.close()"
    job = JOB.replace("total_steps=3", "total_steps=9999").replace('print("a word of the user\'s own")\n', "")
    code = job.format(settings="log_freq=1", folder=str(tmp_path), last=last)
    line = f'{sys.executable} -c {json.dumps("import sys; exec(sys.argv[1])")} "$1" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line, "-", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_metrics(tmp_path / "metrics.jsonl").rows[-1]["step"] == 1999


# --- time left and figures --------------------------------------------------------------------------------------------


@given(slow=st.lists(st.floats(10, 1000), max_size=2), hiccups=st.integers(0, 15))
def test_the_time_left_ignores_the_warm_up_and_single_slow_steps(slow: list[float], hiccups: int) -> None:
    pace, now = Pace(), START
    for step in range(1, 60):
        now += slow[step - 1] if step <= len(slow) else 50.0 if 20 < step <= 20 + hiccups else 1.0
        pace.add({"event": "step", "step": step, "seconds": 0.25, "time": now})
    assert pace.left(60, 160) == pytest.approx(100.0)


def test_the_pace_counts_from_step_to_step_but_not_across_a_gap() -> None:
    pace = Pace()
    for step, now in [(1, 0.0), (2, 5.0), (3, 10.0), (4, 15.0), (90, 900.0)]:
        pace.add({"event": "step", "step": step, "seconds": 4.0, "time": START + now})
    assert pace.seconds == 5.0  # 5, 5, and the step's own 4 after the gap
    assert pace.left(100, 100) == 0.0
    assert Pace().left(1, 100) is None


def test_the_first_steps_count_only_until_there_are_others() -> None:
    pace = Pace()
    seen = []
    for step, own in enumerate([60.0, 20.0, 2.0, 4.0], start=1):
        pace.add({"event": "step", "step": step, "seconds": own})
        seen.append(pace.seconds)
    assert seen == [60.0, 40.0, 2.0, 3.0]


@given(value=st.floats(1e-3, 1e15))
def test_counts_and_sizes_are_within_a_twentieth_of_what_they_stand_for(value: float) -> None:
    unit = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    text = format_count(value)
    assert float(text.rstrip("kMGTP")) * unit[text.lstrip("0123456789.e-")] == pytest.approx(value, rel=0.05)
    number, name = format_size(value * 1000).split()
    powers = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    assert float(number) * 1024 ** powers.index(name) == pytest.approx(value * 1000, rel=0.05, abs=0.51)


def test_parts_stand_in_their_order_and_the_heaviest_stays() -> None:
    assert fit([Part("abcdef", 1), Part("ghi", 2)], 3) == "ghi"
    assert fit([Part("abcdef", 1)], 3) == "abc"


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class Writer:
    writers: list[Writer] = []  # noqa: RUF012

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        Writer.writers.append(self)

    def add_scalar(self, tag: str, value: float, step: int, walltime: float | None = None) -> None:
        self.scalars.append((tag, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_every_number_and_forgets_what_a_resume_takes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr(Writer, "writers", [])
    with Logs(config(enable_tensorboard=True), tmp_path, main=True, total_steps=9) as logs:
        logs.event("start", step=3, resumed=True)
        logs.event(**step_row(4))
        logs.event("validation", step=4, loss=2.0, note="words")
    [writer] = Writer.writers
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "tb"), 4, True)
    assert ("train/loss", 3.96, 4) in writer.scalars
    assert ("validation/loss", 2.0, 4) in writer.scalars
    assert {tag for tag, *_ in writer.scalars} == {
        *(f"train/{name}" for name in step_row(4) if name not in ("event", "step", "time", "skipped")),
        "validation/loss",
    }


def test_without_tensorboard_the_job_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(StagelineError, match=r"pip install 'stageline\[tensorboard\]'"):
        Logs(config(enable_tensorboard=True), tmp_path, main=True, total_steps=9)


def test_what_tensorboard_reads_is_what_was_logged(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Logs(config(enable_tensorboard=True), tmp_path, main=True, total_steps=9) as logs:
        run_of(logs, range(1, 5))
    accumulator = reader.EventAccumulator(str(tmp_path / "tb"))
    accumulator.Reload()
    assert [(scalar.step, scalar.value) for scalar in accumulator.Scalars("train/loss")] == [
        (step, pytest.approx(4.0 - step / 100)) for step in range(1, 5)
    ]

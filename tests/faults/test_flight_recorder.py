"""The flight record and what `stageline doctor` reads from it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import stageline as sl
from stageline.cli.app import run
from stageline.common.errors import FlightError
from stageline.faults.diagnosis import diagnose
from stageline.faults.flight_recorder import FlightRecorder, find_flights, flight_folder, merge, read_flight
from stageline.faults.monitor import EVERYONE, RankSnapshot, Verdict
from stageline.testing import FaultyTransport, SleepStage, run_ranks
from support.pipelines import linear_pipeline

Capture = pytest.CaptureFixture[str]

DIED = Verdict(
    culprit=2,
    kind="died",
    where="pid 77 on node7",
    doing="B of stage 2, microbatch 1",
    silence=0.1,
    ranks=tuple(
        RankSnapshot(
            rank, "died" if rank == 2 else "here", "B of stage 2, microbatch 1" if rank == 2 else "", None, 0.1, 9
        )
        for rank in range(4)
    ),
)


def flights(tmp_path: Path, verdict: Verdict | None = DIED, job: str = "job1") -> list[Path]:
    """A 1F1B step of four ranks in which rank 2 died in the backward of microbatch 1; it wrote nothing."""
    now = time.perf_counter()
    paths = []
    for rank in (0, 1, 3):
        flight = FlightRecorder(rank, 4, job)
        flight.schedule = {"name": "1f1b", "ranks": 4, "stages": 4, "microbatches": 8}
        for microbatch in range(3):
            flight.actions.append(("F", rank, microbatch, 5, now - 9 + microbatch, now - 8.5 + microbatch))
            if rank < 3:
                flight.sent.append((rank + 1, "forward", rank, microbatch, 5, now - 8 + microbatch, 4096))
            if rank > 0:
                flight.received.append((rank - 1, "forward", rank - 1, microbatch, 5, now - 8.5 + microbatch, 4096))
        if rank == 3:
            flight.sent.append((2, "backward", 3, 1, 5, now - 5.0, 4096))
        if rank == 1:
            flight.sent.append((2, "forward", 1, 3, 5, now - 4.0, 4096))
            flight.received.append((2, "backward", 2, 0, 5, now - 4.5, 4096))
        if rank == 0:
            flight.sent.append((1, "forward", 0, 3, 5, now - 4.0, 4096))
        waits = {0: 1, 1: 2, 3: 2}[rank]
        awaited = f"the {'output' if rank == 3 else 'gradient'} of stage {waits}, microbatch 1"
        what = ("F" if rank == 3 else "B", rank, 1)
        paths.append(flight.write(tmp_path, verdict=verdict, doing=what, waits=waits, awaited=awaited, since=now - 3.0))
    return paths


def call(words: list[str], capsys: Capture, code: int = 0) -> str:
    assert run(words) == code
    out, err = capsys.readouterr()
    assert "Traceback (most" not in err
    return " ".join((out if code == 0 else err).split())


def test_a_record_holds_the_last_actions(tmp_path: Path) -> None:
    flight = FlightRecorder(1, 2, "a/b ../c", size=4)
    start = time.perf_counter()
    for microbatch in range(10):
        flight.actions.append(("F", 1, microbatch, 0, start, start + 1.0))
    before = time.time()
    path = flight.write(tmp_path, doing=("B", 1, 0))
    assert path == tmp_path / "stageline-flight-a_b_.._c-rank1.json"
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"
    record = read_flight(path)
    assert [done.microbatch for done in record.actions] == [6, 7, 8, 9]
    assert record.job == "a/b ../c"
    assert abs(record.actions[0].start - before) < 3600, "times are of the wall clock"
    assert math.isclose(record.actions[0].end - record.actions[0].start, 1.0, abs_tol=1e-5)
    assert record.versions["stageline"]
    assert record.verdict is None


def test_a_failed_write_keeps_the_earlier_record(tmp_path: Path) -> None:
    flight = FlightRecorder(0, 1, "job")
    path = flight.write(tmp_path)
    text = path.read_text()
    flight.schedule = {"name": object()}
    with pytest.raises(TypeError):
        flight.write(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == text


def test_a_record_is_written_while_the_rank_keeps_recording(tmp_path: Path) -> None:
    """The control thread writes when the main thread may be in the middle of a step."""
    flight = FlightRecorder(0, 1, "job")
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            flight.actions.append(("F", 0, 0, 0, 0.0, 0.0))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(50):
            assert len(read_flight(flight.write(tmp_path)).actions) <= 256
    finally:
        stop.set()
        thread.join()


def test_the_folder_comes_from_the_argument_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_folder() == Path("stageline-flight")
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", str(tmp_path / "flights"))
    assert FlightRecorder(0, 1, "job").write().parent == tmp_path / "flights"
    assert flight_folder("given") == Path("given")


def test_doctor_needs_no_record_of_the_killed_rank(tmp_path: Path, capsys: Capture) -> None:
    flights(tmp_path)
    out = call(["doctor", str(tmp_path)], capsys)
    assert out.startswith("job job1: 1f1b, 4 ranks, 4 stages, 8 microbatches rank 2 died (its process exited")
    assert "while it was in B of stage 2, microbatch 1" in out
    assert (
        "rank 2 wrote no record (a killed process cannot); the last message received from it is the gradient of stage 2"
        in out
    )
    assert "microbatch 0, step 5, at rank 1, 4.5 s before" in out
    chain = "rank 0 waits 3.0 s for the gradient of stage 1, microbatch 1 of rank 1 → rank 1 waits 3.0 s for the"
    assert f"{chain} gradient of stage 2, microbatch 1 of rank 2 → rank 2 died" in out
    assert "rank 0 → rank 1, forward: the output of stage 0, microbatch 3, step 5 (1 message, 4,096 bytes)" in out
    assert "rank 3 → rank 2, backward: the gradient of stage 3, microbatch 1, step 5" in out
    assert "so it may have arrived" in out
    assert "dmesg" in out
    assert "pid 77 on node7" in out


def test_doctor_finds_the_records_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    flights(tmp_path / "run" / "flight")
    assert call(["doctor", str(tmp_path / "run")], capsys).startswith("job job1: 1f1b, 4 ranks")


def test_doctor_shows_the_schedule_of_a_pipeline_that_failed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", str(tmp_path / "flights"))
    stages = [SleepStage(0.0, 0.0, 0.0, width=2) for _ in range(4)]
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, ranks=2, schedule="interleaved", microbatches=6)
    with pytest.raises(sl.PipelineError):
        pipe.step(torch.ones(6, 3), torch.ones(6, 3))
    out = call(["doctor", str(tmp_path / "flights")], capsys)
    assert out.startswith(f"job alone: {pipe.schedule.name}, 2 ranks, 4 stages, 6 microbatches rank 0 failed")


def test_doctor_reads_single_files_and_prints_json(tmp_path: Path, capsys: Capture) -> None:
    paths = flights(tmp_path)
    assert run(["doctor", *map(str, paths), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["verdict"]["culprit"] == 2
    assert diagnosis["verdict"]["sentence"].startswith("rank 2 died")
    assert [row["wrote"] for row in diagnosis["rows"]] == [True, True, False, True]
    assert diagnosis["rows"][2]["state"] == "died"
    assert diagnosis["rows"][0]["last"] == "F of stage 0, microbatch 2, step 5"
    assert [(channel["source"], channel["target"], channel["known"]) for channel in diagnosis["underway"]] == [
        (0, 1, True),
        (1, 2, False),
        (3, 2, False),
    ]
    assert diagnosis["other_jobs"] == []


def test_doctor_reads_the_newest_job_and_names_the_others(tmp_path: Path, capsys: Capture) -> None:
    flights(tmp_path, job="old")
    flights(tmp_path, job="new")
    out = call(["doctor", str(tmp_path)], capsys)
    assert out.startswith("job new:")
    assert "left out: records of 1 earlier jobs: old" in out


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(2, "frozen", doing="F", silence=61.0, deadline=60.0), ["rank 2 froze", "py-spy", "deadline="]),
        (
            Verdict(2, "raised", text="ValueError: [bold]x", traceback="Traceback\n  line 3\nValueError"),
            ["rank 2 failed: ValueError: [bold]x", "traceback of rank 2", "line 3", "zero_grad()"],
        ),
        (Verdict(2, "absent", deadline=30.0), ["rank 2 never started: it did not connect within 30 s", "was started"]),
        (Verdict(2, "left", text="SystemExit: 3", waiter=1), ["rank 2 left (SystemExit: 3)", "same number of steps"]),
        (None, ["no record states which rank failed", "start with the ranks that wrote no record: 2"]),
    ],
)
def test_every_kind_of_failure_gets_its_advice(
    tmp_path: Path, capsys: Capture, verdict: Verdict | None, words: list[str]
) -> None:
    flights(tmp_path, verdict)
    out = call(["doctor", str(tmp_path)], capsys)
    for word in words:
        assert word in out


def test_a_circle_of_waiting_ranks_is_one_chain(tmp_path: Path) -> None:
    paths = [
        FlightRecorder(rank, 3, "job").write(tmp_path, waits=(rank + 1) % 3, awaited=f"news of rank {(rank + 1) % 3}")
        for rank in range(3)
    ]
    diagnosis = diagnose({rank: read_flight(path) for rank, path in enumerate(paths)})
    links = [f"rank {rank} waits for news of rank {(rank + 1) % 3}" for rank in range(3)]
    chain = " → ".join([*links, "rank 0 again: a cycle"])
    assert diagnosis.chains == (chain,)
    assert any("stageline verify" in advice for advice in diagnosis.advice)


def test_a_rank_in_a_collective_waits_for_the_culprit(tmp_path: Path) -> None:
    froze = Verdict(1, "frozen", silence=5.0, deadline=5.0)
    paths = [FlightRecorder(rank, 3, "job").write(tmp_path, verdict=froze, waits=EVERYONE) for rank in (0, 2)]
    diagnosis = diagnose({record.rank: record for record in map(read_flight, paths)})
    assert set(diagnosis.chains) == {f"rank {rank} waits for all ranks → rank 1 froze" for rank in (0, 2)}


def test_received_messages_are_not_under_way_even_if_the_record_dropped_them(tmp_path: Path) -> None:
    sender, receiver = FlightRecorder(0, 2, "job", size=8), FlightRecorder(1, 2, "job", size=8)
    for step in range(10):
        for microbatch in range(4):
            sender.sent.append((1, "forward", 0, microbatch, step, 0.0, 8))
            if (step, microbatch) < (9, 2):
                receiver.received.append((0, "forward", 0, microbatch, step, 0.0, 8))
    records = {0: read_flight(sender.write(tmp_path)), 1: read_flight(receiver.write(tmp_path))}
    (channel,) = diagnose(records).underway
    assert channel.messages == (
        "the output of stage 0, microbatch 2, step 9",
        "the output of stage 0, microbatch 3, step 9",
    )


def test_a_minority_verdict_is_mentioned(tmp_path: Path, capsys: Capture) -> None:
    paths = flights(tmp_path)
    data = json.loads(paths[2].read_text())
    data["verdict"] = Verdict(3, "raised", text="ValueError: planted", final=False).to_json()
    paths[2].write_text(json.dumps(data))
    out = call(["doctor", str(tmp_path)], capsys)
    assert "but some ranks received a different verdict: rank 3 failed: ValueError: planted" in out


def damaged(text: str, change: Any) -> str:
    data = json.loads(text)
    data.update(change)
    return json.dumps(data)


BAD: dict[str, tuple[Any, str]] = {
    "empty": ("", "not JSON"),
    "binary": (b"\x00\xff\x01", "invalid UTF-8"),
    "deep": ("[" * 100_000, "not JSON"),
    "another": ('{"format": "stageline-schedule"}', "'format' is 'stageline-schedule', expected 'stageline-flight'"),
    "a list": ("[]", "expected an object, got []"),
    "newer": ({"version": 9}, "version 9 of the flight record format is not supported"),
    "no such rank": ({"rank": 7}, "'rank' is 7 of 4"),
    "too many": ({"ranks": 10**9}, "of 1000000000"),
    "actions": ({"actions": [[1, 2]]}, "actions[0] must have 6 elements"),
    "sent": ({"sent": [[0, "forward", "x", 0, 0, 0.0, 0]]}, "sent[0][2] must be an integer, got 'x'"),
    "time": ({"written": "noon"}, "'written' must be a number, got 'noon'"),
    "no time": ({"written": float("nan")}, "'written' must be a number, got nan"),
    "verdict": ({"verdict": {"culprit": 1, "kind": "bored"}}, "verdict.kind must be one of 'died'"),
    "list in verdict": ({"verdict": {"culprit": 1, "kind": "died", "action": []}}, "verdict.action must be a string"),
    "waits": ({"waits": "rank 2"}, "'waits' must be an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_one_clear_error(tmp_path: Path, capsys: Capture, name: str) -> None:
    path = flights(tmp_path)[0]
    content, expected = BAD[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else damaged(path.read_text(), content))
    assert expected in call(["doctor", str(path)], capsys, code=2)


def test_text_from_a_file_cannot_control_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    flight = FlightRecorder(0, 1, "job")
    flight.write(tmp_path, verdict=Verdict(0, "raised", text="\x1b[2J[red]planted[/red]"), doing="\x1b[31m")
    assert run(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]planted[/red]" in out


def test_inconsistent_records_are_refused(tmp_path: Path) -> None:
    first = read_flight(FlightRecorder(0, 2, "job").write(tmp_path))
    with pytest.raises(FlightError, match=r"disagree on its number of ranks: \[2, 3\]"):
        merge([first, replace(first, rank=1, ranks=3)])
    with pytest.raises(FlightError, match="no flight record"):
        merge([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlightError, match="has no flight records"):
        find_flights([tmp_path / "empty"])


def test_doctor_does_not_import_torch(tmp_path: Path) -> None:
    flights(tmp_path)
    code = "import sys; from stageline.cli.app import run; print(run(['doctor', sys.argv[1]]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("0 False\n"), done.stderr


def wrong_loss(output: Tensor, target: Tensor) -> Any:
    return output.no_such_method(target)  # type: ignore[attr-defined]


def test_an_exception_in_user_code_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback explains it; the same holds for a non-finite loss, and in a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGELINE_FLIGHT_DIR", raising=False)
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    nan: Any = lambda output, target: output.sum() * float("nan")  # noqa: E731
    for loss_fn in (wrong_loss, nan):
        for ranks in (1, 2):
            pipe = linear_pipeline(loss_fn=loss_fn, ranks=ranks)
            with pytest.raises(sl.PipelineError, match=r"no_such_method|nan") as failed:
                pipe.step(x, y)
            assert not any("stageline doctor" in note for note in getattr(failed.value, "__notes__", []))
            with pytest.raises(sl.PipelineError):
                list(pipe.run([(x, y)], optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1)))
    with pytest.raises(sl.PipelineError):
        linear_pipeline(loss_fn=lambda output: output).step(x, y)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", "chosen")
    with pytest.raises(sl.PipelineError) as failed:
        linear_pipeline(loss_fn=wrong_loss).step(x, y)
    assert any("stageline doctor chosen" in note for note in failed.value.__notes__)


def test_a_lost_message_leaves_a_flight_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback explains that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGELINE_FLIGHT_DIR", raising=False)
    pipe = linear_pipeline(deadline=0.5)
    honest = pipe.runner.host.transport
    pipe.runner.host.transport = lambda rank: FaultyTransport(honest(rank), drop=lambda header: True)  # type: ignore[method-assign]
    with pytest.raises(sl.PipelineError) as failed:
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    assert any("stageline doctor stageline-flight" in note for note in failed.value.__notes__)
    assert len(list((tmp_path / "stageline-flight").iterdir())) == 2


def mistaken(rank: int, folder: str) -> tuple[str, str, list[str]]:
    os.chdir(folder)
    os.environ.pop("STAGELINE_FLIGHT_DIR", None)
    torch.manual_seed(0)
    pipe = linear_pipeline(loss_fn=wrong_loss)
    shown = repr(pipe)
    try:
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    except sl.PipelineError as error:
        return shown, str(error), list(getattr(error, "__notes__", []))
    return shown, "", []


def test_an_exception_on_processes_leaves_no_files_and_shows_its_traceback(tmp_path: Path) -> None:
    answers = run_ranks(mistaken, 2, str(tmp_path))
    for rank, (shown, text, notes) in enumerate(answers):
        assert f"ranks are processes, this one is rank {rank} with stage {rank} on cpu>" in shown
        assert "no_such_method" in text
        assert not any("stageline doctor" in note for note in notes)
    assert any("wrong_loss" in note for note in answers[0][2])
    assert not list(tmp_path.iterdir())

"""Faults planted for real, at the first, a middle and the last stage: every survivor names the culprit, in seconds.

The time limits only separate "seconds" from "the deadline"; `benchmarks/faults.py` measures the speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from stageline.cli.app import run
from stageline.faults.monitor.connection import NAME
from stageline.testing import Child, ForkServer
from support.ports import free_port

RANK = Path(__file__).parents[1] / "support" / "fault_rank.py"
RANKS = 3
LONG = 60.0
"""A deadline that no test waits for: an earlier verdict does not come from silence."""
SHORT = 5.0
PATIENCE = 240.0
"""Seconds allowed for what takes a few, on a busy machine."""
ZEROED = "no parameter was changed, and gradients may hold part of this step"
Answer = dict[str, Any]


def monitors(folder: Path) -> list[int]:
    """Monitors of jobs that wrote their records here."""
    jobs = {path.name.split("-")[2].encode() for path in folder.glob("flights-*/stageline-flight-*-rank*.json")}
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                words = set((process / "cmdline").read_bytes().split(b"\0"))
                if NAME.encode() in words and words & jobs:
                    pids.append(int(process.name))
    return pids


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


class Job:
    """Three ranks as processes that find each other by the environment, or one process with three threads."""

    def __init__(
        self,
        fork_server: ForkServer,
        folder: Path,
        plan: list[Answer],
        deadline: float = LONG,
        *,
        missing: int | None = None,
        threads: bool = False,
    ) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir(exist_ok=True)
        self.ranks: dict[int, Child] = {}
        ranks = [rank for rank in range(1 if threads else RANKS) if rank != missing]
        for rank in ranks:
            environment = {} if threads else self.environment(rank)
            arguments = [rank, str(folder), plan, deadline, 4, ranks]
            log = folder / f"log-{rank}"
            self.ranks[rank] = fork_server.start(RANK, "main", arguments, log=log, environment=environment)

    def environment(self, rank: int) -> dict[str, str]:
        common = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
        return {**common, "MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": "lo"}

    def answers(self, rank: int) -> list[Answer]:
        """Return all answers except that the rank is ready."""
        path = self.folder / f"answers-{rank}"
        answers = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [answer for answer in answers if "ready" not in answer]

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def planted(self) -> Path:
        """Wait for the fault."""
        end = time.monotonic() + PATIENCE
        while not (planted := list(self.folder.glob("planted-*"))):
            assert time.monotonic() < end, [self.log(rank) for rank in self.ranks]
            time.sleep(0.02)
        return planted[0]

    def wait(self, *lost: int) -> dict[int, Answer]:
        """Wait for the survivors to end; return the last answer of each."""
        survivors = [rank for rank in self.ranks if rank not in lost]
        for rank in survivors:
            code = self.ranks[rank].wait(PATIENCE)
            assert code == 0, (rank, code, self.log(rank))
        return {rank: self.answers(rank)[-1] for rank in survivors}

    def clean(self) -> None:
        """Kill the ranks, and check that no monitor and no port is left."""
        for child in self.ranks.values():
            child.signal(signal.SIGKILL)
            child.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while monitors(self.folder) and time.monotonic() < end:
            time.sleep(0.05)
        assert not monitors(self.folder)
        assert not listens(self.port)


Start = Callable[..., Job]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Start jobs; afterwards no process, no monitor and no port is left."""
    jobs: list[Job] = []

    def begin(plan: list[Answer], deadline: float = LONG, **options: Any) -> Job:
        jobs.append(Job(fork_server, tmp_path / f"job{len(jobs)}", plan, deadline, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean()


def doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `stageline doctor FOLDER --json`."""
    capsys.readouterr()
    assert run(["doctor", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def unharmed(answer: Answer) -> None:
    """A step that failed changed no parameter and no buffer, and says so."""
    assert answer["error"] == "PipelineError", answer
    assert ZEROED in answer["text"]
    assert answer["changed"] == []
    assert any("stageline doctor" in note for note in answer["notes"]), answer["notes"]


# Faults after which the job continues.

STEP = {"do": "step"}
FAULTS: dict[str, tuple[Answer, int, str, str]] = {}
"""Name: what to do, the rank that is named, where, and what is said."""
for stage in range(RANKS):
    FAULTS[f"exception in F of stage {stage}"] = (
        {**STEP, "plant": ["error", stage, "F", 2]}, stage, f"F of stage {stage}, microbatch 2", "planted"
    )  # fmt: skip
    FAULTS[f"exception in B of stage {stage}"] = (
        {**STEP, "plant": ["error", stage, "B", 1]}, stage, f"B of stage {stage}, microbatch 1", "planted"
    )  # fmt: skip
    for fault, word in (("nan", "nan"), ("infinity", "inf|nan")):
        where = "its inputs are finite" if stage == RANKS - 1 else "the first value that is not finite is an? .*"
        FAULTS[f"{fault} from stage {stage}"] = (
            {**STEP, "plant": [fault, stage, "F", 1]}, stage, f"F of stage {stage}, microbatch 1",
            f"the loss of microbatch 1 is ({word}) on stage 2, and {where}",
        )  # fmt: skip
for fault, kind in (("shape", r"float32 of shape \(1, 4\)"), ("dtype", r"float64 of shape \(4, 4\)")):
    for stage in range(RANKS - 1):
        FAULTS[f"{fault} of the output of stage {stage}"] = (
            {**STEP, "wire": [fault, "forward", stage]}, stage + 1, f"F of stage {stage + 1}, microbatch 2",
            rf"the output of stage {stage}, .* of rank {stage} as \[float32 of shape \(4, 4\)\], but got \[{kind}\]",
        )  # fmt: skip
        FAULTS[f"{fault} of the gradient of stage {stage + 1}"] = (
            {**STEP, "wire": [fault, "backward", stage + 1]}, stage, f"B of stage {stage}, microbatch 2",
            rf"the gradient of stage {stage + 1}, .* of rank {stage + 1} as .* but got \[{kind}\]",
        )  # fmt: skip
PLAN = [item for planted, *_ in FAULTS.values() for item in (planted, {"do": "right"})]


@pytest.fixture(scope="module", params=["threads", "processes"])
def lived(
    request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """One job with one fault after another, each followed by a correct step."""
    threads = request.param == "threads"
    odd = [] if threads else [{"do": "odd_one", "odd": rank, "deadline": LONG} for rank in range(RANKS)]
    job = Job(
        fork_server, tmp_path_factory.mktemp("lived"), [{"do": "right"}, *PLAN, *odd, {"do": "right"}], threads=threads
    )
    try:
        job.wait()
        yield job
    finally:
        job.clean()


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_report_a_fault_and_the_next_step_is_correct(
    lived: Job, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = list(FAULTS).index(name)
    _, culprit, place, words = FAULTS[name]
    for rank in lived.ranks:
        answer, after = lived.answers(rank)[1 + 2 * index : 3 + 2 * index]
        unharmed(answer)
        assert answer["text"].startswith(f"rank {culprit} failed in {place}: "), answer["text"]
        assert re.search(words, answer["text"]), answer["text"]
        assert "call zero_grad() before the next one" in answer["text"]
        # The origin's traceback: as the cause on the rank itself, as a note on the others.
        assert "Traceback (most recent call last)" in answer["trace"]
        assert "ArithmeticError: planted" in answer["trace"] or words != "planted"
        assert answer["threads"] == []
        assert after["right"]
    diagnosis = doctor(lived.folder / f"flights-{index + 1}", capsys)
    assert diagnosis["verdict"]["culprit"] == culprit
    assert f"{diagnosis['verdict']['action']} of stage {diagnosis['verdict']['stage']}" in place
    assert sum(row["wrote"] for row in diagnosis["rows"]) == RANKS


@pytest.mark.parametrize("odd", range(RANKS))
def test_all_ranks_name_a_rank_with_another_schedule(lived: Job, odd: int) -> None:
    if len(lived.ranks) < RANKS:
        pytest.skip("ranks that are threads have one schedule")
    for rank in lived.ranks:
        answer = lived.answers(rank)[1 + len(PLAN) + odd]
        assert answer["error"] == "PipelineError"
        assert answer["text"].startswith(
            f"rank {odd} and rank {0 if odd else 1} differ in the schedule: rank {odd} has"
        )
        assert lived.answers(rank)[-1]["right"]


# Faults that end the job.


def lost(job: Job, culprit: int, capsys: pytest.CaptureFixture[str], kind: str, words: str, step: int = 1) -> None:
    """Check that all survivors name the lost rank, and that the doctor does without a record of it."""
    for rank, answer in job.wait(culprit).items():
        unharmed(answer)
        assert answer["text"].startswith(f"rank {culprit} {words}"), answer["text"]
        assert "this job cannot continue; restart it" in answer["text"]
        assert f"stageline: rank {rank}: rank {culprit} {words}" in job.log(rank)
        assert answer["threads"] == [] or kind == "frozen", answer["threads"]
    diagnosis = doctor(job.folder / f"flights-{step}", capsys)
    assert (diagnosis["verdict"]["culprit"], diagnosis["verdict"]["kind"]) == (culprit, kind)
    assert diagnosis["advice"]


@pytest.mark.parametrize(("victim", "action", "microbatch"), [(0, "F", 0), (1, "B", 1), (2, "F", 3)])
def test_all_survivors_name_a_killed_rank(
    start: Start, victim: int, action: str, microbatch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start([{"do": "right"}, {**STEP, "plant": ["kill", victim, action, microbatch]}])
    lost(job, victim, capsys, "died", "died (its process exited without reporting an error)")
    assert job.ranks[victim].wait(PATIENCE) == -signal.SIGKILL


def test_frozen_ranks_are_named_within_the_deadline_and_slow_ranks_are_not(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs side by side: most of their time is the deadline's. The end of a step is a place to freeze in, too."""
    cases = [(0, "F", 1), (1, "F", 2), (2, "B", 3), (0, "B", 3)]
    hurry = {"do": "hurry", "deadline": SHORT}  # from the second step on: it is not about how fast they start
    jobs = [start([{"do": "right"}, hurry, {**STEP, "plant": ["stop", *case]}]) for case in cases]
    for job, (victim, _, _) in zip(jobs, cases, strict=True):
        job.planted()
        lost(job, victim, capsys, "frozen", "froze: no sign of life for")
        assert job.ranks[victim].poll() is None
    # Alone, and with a deadline that a heartbeat keeps on a busy machine.
    slow = start([{"do": "right"}, hurry, {**STEP, "plant": ["slow", 1, "B", 1]}])
    assert [slow.answers(rank)[2]["error"] for rank in slow.wait()] == [""] * RANKS
    # A rank that wakes up again learns that the others gave it up.
    jobs[1].ranks[1].signal(signal.SIGCONT)
    (answer,) = jobs[1].wait(0, 2).values()
    assert answer["error"] == "PipelineError", answer
    assert answer["changed"] == []


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_that_never_starts_is_named_by_the_others(
    start: Start, victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start([], 4.0, missing=victim)
    for answer in job.wait().values():
        assert answer["error"] == "PipelineError"
        assert answer["text"].startswith(f"rank {victim} never started: "), answer["text"]
        assert "restart the job with all ranks" in answer["text"]
    if victim:  # without rank 0, there is no control channel
        assert doctor(job.folder / "flights-0", capsys)["verdict"]["culprit"] == victim


def test_a_rank_that_dies_at_start_up_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start([{"dies_at_start": 1}])
    for answer in job.wait(1).values():
        assert answer["error"] == "PipelineError"
        assert answer["text"].startswith("rank 1 died (its process exited without reporting an error)"), answer["text"]
    assert doctor(job.folder / "flights-0", capsys)["verdict"]["culprit"] == 1


def test_a_rank_whose_gpu_fails_is_lost(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Its GPU sends nothing any more, so the others must not wait for the end of the step."""
    job = start([{"do": "right"}, {**STEP, "plant": ["broken_gpu", 1, "F", 2]}])
    lost(
        job,
        1,
        capsys,
        "raised",
        "failed in F of stage 1, microbatch 2: AcceleratorError: CUDA error: an illegal memory",
    )
    job.ranks[1].wait(PATIENCE)
    answer = job.answers(1)[-1]
    assert answer["error"] == "PipelineError"
    assert "this job cannot continue; restart it" in answer["text"]


def test_an_interrupted_rank_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start([{"do": "right"}, {**STEP, "plant": ["interrupt", 1, "F", 2]}])
    lost(job, 1, capsys, "raised", "failed in F of stage 1, microbatch 2: KeyboardInterrupt")
    job.ranks[1].wait(PATIENCE)
    answer = job.answers(1)[-1]
    assert answer["error"] == "KeyboardInterrupt"
    assert answer["changed"] == []


def interrupted_once(job: Job) -> None:
    """Wait for ranks on threads, whose second step of three was interrupted."""
    job.wait()
    _, answer, after = job.answers(0)
    assert answer["error"] == "KeyboardInterrupt"
    assert (answer["changed"], answer["threads"]) == ([], [])
    assert after["right"]


@pytest.mark.parametrize("action", ["F", "B"])
def test_an_interrupt_ends_a_step_on_threads_and_the_next_one_is_correct(start: Start, action: str) -> None:
    plan = [{"do": "right"}, {**STEP, "plant": ["interrupt", 1, action, 2]}, {"do": "right"}]
    job = start(plan, threads=True)
    interrupted_once(job)


def test_the_first_failure_is_named_even_if_a_later_one_is_reported_first(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, reports do not arrive in the order of the failures."""
    job = start([{"do": "right"}, {"do": "unheard"}, {"do": "right"}])
    for rank, after in job.wait().items():
        answer = job.answers(rank)[1]
        unharmed(answer)
        assert answer["text"].startswith("rank 1 failed in F of stage 1, microbatch 0: ArithmeticError: planted; ")
        assert "ArithmeticError: planted\n" in answer["trace"]
        assert after["right"]
    diagnosis = doctor(job.folder / "flights-1", capsys)
    assert diagnosis["verdict"]["sentence"] == "rank 1 failed in F of stage 1, microbatch 0: ArithmeticError: planted"
    assert diagnosis["others"] == []
    assert (diagnosis["verdict"]["action"], diagnosis["verdict"]["stage"], diagnosis["verdict"]["microbatch"]) == (
        "F",
        1,
        0,
    )
    assert f"pid {job.ranks[1].pid} on " in diagnosis["verdict"]["where"]


def test_a_rank_that_exits_between_steps_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start([{"do": "right"}, {"do": "leave", "who": 1}])
    lost(job, 1, capsys, "left", "left (its script ended)")
    assert job.ranks[1].wait(PATIENCE) == 7


def test_a_rank_that_is_ended_by_sigterm_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start([{"do": "right"}, {**STEP, "plant": ["stay", 1, "F", 2]}])
    job.planted()
    job.ranks[1].signal(signal.SIGTERM)
    lost(job, 1, capsys, "left", "left (ended by SIGTERM)")
    assert job.ranks[1].wait(PATIENCE) == -signal.SIGTERM
    assert "rank 1: ended by SIGTERM in F of stage 1, microbatch 2; no other rank is known to have failed" in job.log(1)


def test_ctrl_c_in_the_main_thread_stops_rank_threads(start: Start) -> None:
    job = start([{"do": "right"}, {**STEP, "plant": ["held", 1, "B", 0]}, {"do": "right"}], threads=True)
    job.planted()
    job.ranks[0].signal(signal.SIGINT)
    interrupted_once(job)


def test_survivors_write_the_verdict_before_torchrun_ends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [{"do": "right"}, {**STEP, "plant": ["kill", 1, "B", 1]}]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*torchrun, "--rdzv-endpoint", "127.0.0.1:0", str(RANK), str(tmp_path), json.dumps(plan), str(LONG)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    for rank in (0, 2):
        assert f"stageline: rank {rank}: rank 1 died (its process exited without reporting an error)" in done.stderr, (
            done.stderr
        )
    assert doctor(tmp_path / "flights-1", capsys)["verdict"]["culprit"] == 1
    end = time.monotonic() + PATIENCE
    while monitors(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert not monitors(tmp_path)


ENDS = {
    "number": 3,
    "text": 1,
    "thread": 4,
    "child": 12,
    "at once": 6,
    "interrupt": -signal.SIGINT,
    "uncaught": 1,
    "normal": 0,
    "nested": 5,
    "pytest": 1,
}
"""How a script ends after it lost a rank, and its exit code; the last two are not started by a path."""


def test_a_script_that_lost_a_rank_keeps_its_exit_code(fork_server: ForkServer, tmp_path: Path) -> None:
    """The collective that it waited in never ends, but neither delays the exit nor changes its code."""
    script = RANK.with_name("exit_rank.py")
    common = {"WORLD_SIZE": str(len(ENDS) + 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "STAGELINE_FLIGHT_DIR": str(tmp_path / "flights")}
    common |= {"PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])}
    commands = {
        "nested": ["exit_rank", "nested"],
        "pytest": ["pytest", "-q", "-s", "-p", "no:cacheprovider", str(script)],
    }
    started: dict[str, Child | subprocess.Popen[bytes]] = {}
    try:
        for rank, way in enumerate([*ENDS, "leave"]):
            environment = {**common, "RANK": str(rank)}
            if way in commands:
                with (tmp_path / way).open("wb") as log:
                    command = [sys.executable, "-m", *commands[way]]
                    started[way] = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
            else:
                started[way] = fork_server.start(script, "end", [way], log=tmp_path / way, environment=environment)
        codes = {way: started[way].wait(PATIENCE) for way in ENDS}
        logs = {way: (tmp_path / way).read_text() for way in ENDS}
        assert codes == ENDS, logs
        assert all("lost\n" in text and "kept in a buffer" in text for text in logs.values()), logs
        assert "the job is over\n" in logs["text"]
        assert "PipelineError: rank 10 failed" in logs["uncaught"]
        assert started["leave"].poll() is None
    finally:
        for process in started.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)


@pytest.mark.parametrize("script_makes_it", [False, True])
def test_a_new_rendezvous_in_the_same_process_is_independent_of_the_previous_one(
    fork_server: ForkServer, tmp_path: Path, script_makes_it: bool
) -> None:
    """A good round, one that a rank left, one in which a rank was killed, and two with a new process in its place."""
    script = RANK.with_name("rendezvous_rank.py")
    faults = ["", "leave", "kill", "", ""]
    rounds = [[number, free_port(), fault] for number, fault in enumerate(faults)]
    environment = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"STAGELINE_FLIGHT_DIR": str(tmp_path / "flights")}

    def begin(rank: int, first: int) -> Child:
        arguments = [rank, str(tmp_path), rounds[first:], script_makes_it]
        own = {**environment, "RANK": str(rank)}
        return fork_server.start(script, "main", arguments, log=tmp_path / f"log-{rank}", environment=own)

    started = [begin(rank, 0) for rank in range(RANKS)]
    try:
        assert started[-1].wait(PATIENCE) == -signal.SIGKILL, (tmp_path / f"log-{RANKS - 1}").read_text()
        started[-1] = begin(RANKS - 1, 3)
        for rank, child in enumerate(started):
            assert child.wait(PATIENCE) == 0, (tmp_path / f"log-{rank}").read_text()
    finally:
        for child in started:
            child.signal(signal.SIGKILL)
    for rank in range(RANKS):
        rounds_run = [json.loads(line) for line in (tmp_path / f"rounds-{rank}").read_text().splitlines()]
        errors = {entry["round"]: entry["error"] for entry in rounds_run}
        assert [errors.pop(number) for number in (0, 3, 4)] == ["", "", ""]
        if rank < RANKS - 1:
            assert errors[1].startswith(f"rank {RANKS - 1} failed"), errors
            assert errors[2].startswith(f"rank {RANKS - 1} died"), errors


def test_restarted_ranks_ignore_addresses_of_the_previous_attempt_in_the_store(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """torchrun keeps one store for all attempts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        plan = [{"do": "right"}, *([{**STEP, "plant": ["kill", attempt, "F", 1]}] if attempt < 2 else [])]
        environment = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        ranks = {}
        for rank in range(RANKS):
            arguments = [rank, str(folder), plan, LONG, 4, list(range(RANKS))]
            own = {**environment, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            ranks[rank] = fork_server.start(RANK, "main", arguments, log=folder / f"log-{rank}", environment=own)
        try:
            codes = {rank: child.wait(PATIENCE) for rank, child in ranks.items()}
        finally:
            for child in ranks.values():
                child.signal(signal.SIGKILL)
        lost_rank = {attempt: -signal.SIGKILL} if attempt < 2 else {}
        logs = [(folder / f"log-{rank}").read_text() for rank in range(RANKS)]
        assert codes == {**dict.fromkeys(range(RANKS), 0), **lost_rank}, logs
        answers = [json.loads(line) for line in (folder / "answers-2").read_text().splitlines()]
        assert answers[1]["right"]

"""The failure monitor on real processes: all ranks learn which one died, froze, raised, left or never started."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageline._version import __version__
from stageline.common.errors import JsonError
from stageline.common.trust import proof
from stageline.distributed.meeting import find_address
from stageline.faults.monitor import (
    Address,
    ControlError,
    Failure,
    MonitorClient,
    Verdict,
    share_by_store,
    start_monitor,
)
from stageline.faults.monitor.blame import GRACE, BlameRules
from stageline.faults.monitor.connection import NAME, Connection, control_host
from stageline.faults.monitor.server import Server
from stageline.testing import shared_gpu

RANK = Path(__file__).parents[1] / "support" / "control_rank.py"
LONG = 60.0
"""A deadline that no test waits for: an earlier verdict does not come from silence."""
PATIENCE = 200.0
"""Seconds allowed for what takes one, on a busy machine."""


class Rank:
    """One process, which evaluates the expressions that it is sent."""

    def __init__(self, rank: int, ranks: int, deadline: float, start_deadline: float, meeting: Path) -> None:
        numbers = [str(number) for number in (rank, ranks, deadline, start_deadline)]
        self.process = subprocess.Popen(
            [sys.executable, str(RANK), *numbers, str(meeting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the rank ended: {self.end()}")
        return json.loads(line)

    def do(self, words: str) -> Any:
        self.tell(words)
        return self.answer()

    def end(self) -> str:
        """Wait for the process to end; return its stderr."""
        _, stderr = self.process.communicate(timeout=PATIENCE)
        return stderr


class Job:
    """Some ranks, and the address of the monitor that they started."""

    def __init__(self, folder: Path, ranks: int, deadline: float, start_deadline: float, missing: int | None) -> None:
        self.meeting = folder / "address"
        self.ranks = {
            rank: Rank(rank, ranks, deadline, start_deadline, self.meeting) for rank in range(ranks) if rank != missing
        }

    def address(self) -> Address:
        return Address.parse(self.meeting.read_text())

    def survivors(self, *lost: int) -> list[Rank]:
        return [survivor for rank, survivor in self.ranks.items() if rank not in lost]

    def monitors(self) -> list[int]:
        return monitors(self.address().job)


def monitors(job: str) -> list[int]:
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if NAME.encode() in words and job.encode() in words:
                    pids.append(int(folder.name))
    return pids


def gone(job: str, within: float = PATIENCE) -> bool:
    end = time.monotonic() + within
    while monitors(job) and time.monotonic() < end:
        time.sleep(0.05)
    return not monitors(job)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Start jobs; afterwards, no rank and no monitor is left, whatever the test did."""
    started: list[Job] = []

    def start(
        ranks: int, deadline: float = LONG, start_deadline: float | None = None, missing: int | None = None
    ) -> Job:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Job(folder, ranks, deadline, deadline if start_deadline is None else start_deadline, missing))
        for survivor in started[-1].ranks.values():
            survivor.do("0")
        return started[-1]

    yield start
    for job in started:
        for survivor in job.ranks.values():
            survivor.process.kill()
            survivor.process.communicate()
        assert gone(job.address().job), "a monitor is left"


ASK = "control.verdict(timeout=200)"


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_all_survivors_learn_which_rank_was_killed(jobs: Any, victim: int) -> None:
    """Also rank 0, which started the monitor; and not by silence, for the deadline is far."""
    job = jobs(4)
    for rank, survivor in job.ranks.items():
        survivor.do(f"step(control, ('B', {rank}, 5), {(rank + 1) % 4})")
    os.kill(job.ranks[victim].process.pid, signal.SIGKILL)
    for survivor in job.survivors(victim):
        verdict = survivor.do(ASK)
        assert (verdict["culprit"], verdict["kind"]) == (victim, "died")
        assert f"rank {victim} died (its process exited without reporting an error)" in verdict["sentence"]
        assert f"while it was in B of stage {victim}, microbatch 5" in verdict["sentence"]
        assert f"rank {victim} died" in survivor.end(), "it is on stderr too, before any exception"


def test_a_child_of_a_killed_rank_does_not_hide_its_death(jobs: Any) -> None:
    """A child made by fork has all the files of its parent, connections too."""
    job = jobs(2)
    child = job.ranks[1].do("leave_a_child()")
    try:
        os.kill(job.ranks[1].process.pid, signal.SIGKILL)
        verdict = job.ranks[0].do(ASK)
        assert (verdict["culprit"], verdict["kind"]) == (1, "died")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_frozen_rank_is_blamed_and_a_slow_one_is_not(jobs: Any) -> None:
    """Liveness and progress are separate: rank 0 computes far beyond the deadline, and is not blamed."""
    job = jobs(3, deadline=5.0, start_deadline=LONG)
    job.ranks[0].do("step(control, 'loading data', None)")
    job.ranks[1].do("step(control, ('F', 1, 0), 2)")
    job.ranks[2].do("step(control, ('F', 2, 0), None)")
    job.ranks[0].do("sum(range(100)) and time.sleep(6.0)")
    assert job.ranks[0].do("control.verdict()") is None
    os.kill(job.ranks[2].process.pid, signal.SIGSTOP)
    for rank in (0, 1):
        verdict = job.ranks[rank].do(ASK)
        assert (verdict["culprit"], verdict["kind"]) == (2, "frozen")
        assert verdict["silence"] > 4.5  # of 5: all ranks know it within the deadline
        assert "rank 1 waits for rank 2" in verdict["sentence"]
        assert "in F of stage 2, microbatch 0" in verdict["sentence"]
    time.sleep(1.0)  # it is away for longer than the monitor may be silent
    os.kill(job.ranks[2].process.pid, signal.SIGCONT)
    assert job.ranks[2].do(ASK)["culprit"] == 2, "who thaws is told that the others have given it up"


def test_all_other_ranks_name_one_that_never_starts(jobs: Any) -> None:
    job = jobs(3, start_deadline=3.0, missing=1)
    for survivor in job.survivors():
        verdict = survivor.do("control.everyone(timeout=200)")
        assert (verdict["culprit"], verdict["kind"]) == (1, "absent")
        assert verdict["sentence"].startswith("rank 1 never started: it did not connect within 3 s")


def test_ranks_learn_that_all_have_come(jobs: Any) -> None:
    for survivor in jobs(3).survivors():
        assert survivor.do("control.everyone(timeout=200)") is None


def test_all_ranks_receive_an_exception_with_its_action_and_traceback(jobs: Any) -> None:
    """And the next step may be tried: what was raised in this one does not affect it."""
    job = jobs(3)
    for what in ("planted", "planted again"):
        for rank, survivor in job.ranks.items():
            survivor.do(f"step(control, ('B', {rank}, 7), None)")
            assert survivor.do("control.verdict()") is None
        job.ranks[1].do(f"fail(control, {what!r})")
        for survivor in job.survivors():
            verdict = survivor.do(ASK)
            assert (verdict["culprit"], verdict["kind"], verdict["final"]) == (1, "raised", False)
            assert (verdict["action"], verdict["stage"], verdict["microbatch"]) == ("B", 1, 7)
            assert verdict["sentence"] == f"rank 1 failed in B of stage 1, microbatch 7: ArithmeticError: {what}"
            assert "raise ArithmeticError(what)" in verdict["traceback"]


def test_a_rank_that_dies_after_a_failed_step_is_named_in_the_next(jobs: Any) -> None:
    job = jobs(2)
    for survivor in job.survivors():
        survivor.do("step(control, 'F', None)")
    job.ranks[1].do("fail(control, 'planted')")
    assert job.ranks[0].do(ASK)["kind"] == "raised"
    os.kill(job.ranks[1].process.pid, signal.SIGKILL)
    assert job.ranks[0].do("control.verdict()")["kind"] == "raised", "the first cause of this step stays"
    job.ranks[0].do("step(control, 'F', 1)")
    assert job.ranks[0].do(ASK)["kind"] == "died"


def test_a_death_wins_over_the_errors_that_it_causes(jobs: Any) -> None:
    """Neighbours report broken connections in the same milliseconds, some before the death is known."""
    for victim in range(4):
        job = jobs(4)
        for survivor in job.survivors():
            survivor.do("step(control, 'F', None)")
        (monitor,) = job.monitors()
        os.kill(monitor, signal.SIGSTOP)  # it reads all of this when it runs again
        for survivor in job.survivors(victim)[:victim]:
            survivor.do("fail(control, 'Connection reset by peer', secondary=True)")
        job.ranks[victim].process.kill()
        job.ranks[victim].process.wait()
        for survivor in job.survivors(victim)[victim:]:
            survivor.do("fail(control, 'Connection reset by peer', secondary=True)")
        os.kill(monitor, signal.SIGCONT)
        for survivor in job.survivors(victim):
            verdict = survivor.do(ASK)
            assert (verdict["culprit"], verdict["kind"]) == (victim, "died")


def test_a_secondary_error_is_reported_if_it_has_no_cause(jobs: Any) -> None:
    job = jobs(2)
    for survivor in job.survivors():
        survivor.do("step(control, 'F', None)")
    job.ranks[1].do("fail(control, 'Connection reset by peer', secondary=True)")
    for survivor in job.survivors():
        assert survivor.do(ASK)["sentence"] == "rank 1 failed in F: ArithmeticError: Connection reset by peer"


@pytest.mark.parametrize(
    ("end", "how"),
    [("raise_outside()", "KeyError: 'planted outside of a step'"), ("sys.exit(3)", "its script ended")],
)
def test_a_rank_that_left_is_blamed_once_another_waits_for_it(jobs: Any, end: str, how: str) -> None:
    job = jobs(3)
    job.ranks[2].tell(end)
    job.ranks[2].end()
    assert job.ranks[0].do("control.verdict(timeout=1)") is None, "nobody waits for it"
    job.ranks[0].do("step(control, 'F', 2)")
    for rank in (0, 1):
        verdict = job.ranks[rank].do(ASK)
        assert verdict["sentence"] == f"rank 2 left ({how}) while rank 0 waits for it"


def test_a_with_block_reports_how_it_ended() -> None:
    address = start_monitor(2, LONG, LONG)
    with MonitorClient.start(0, 2, lambda _: str(address), LONG) as first:
        with pytest.raises(SystemExit), MonitorClient.start(1, 2, lambda _: str(address), LONG):
            sys.exit(3)
        first.begin()
        first.waits = 1
        assert str(first.verdict(PATIENCE)) == "rank 1 left (SystemExit: 3) while rank 0 waits for it"
    assert gone(address.job)


@pytest.mark.parametrize("wait", ["time.sleep(500)", "collective()"])
def test_a_rank_ended_by_sigterm_first_writes_whom_it_blames(jobs: Any, wait: str) -> None:
    """As under torchrun, which ends the survivors a tenth of a second after a rank died: no waiting call is woken."""
    job = jobs(3)
    for survivor in job.survivors():
        survivor.do("step(control, ('F', 0, 1), 2)")
        survivor.tell(wait)
    job.ranks[2].process.kill()
    job.ranks[2].process.wait()
    for rank in (0, 1):
        job.ranks[rank].process.terminate()
    for rank in (0, 1):
        stderr = job.ranks[rank].end()
        assert f"rank {rank}: rank 2 died" in stderr
        assert f"rank {rank}: ended by SIGTERM in F of stage 0, microbatch 1; rank 2 is to blame" in stderr
        assert job.ranks[rank].process.returncode == -signal.SIGTERM


def test_a_rank_that_hangs_in_native_code_after_a_failure_is_ended(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATIENCE", "0.5")
    job = jobs(3)
    job.ranks[1].do("setattr(control, 'patience', 1000.0)")
    for rank in (0, 1):
        job.ranks[rank].do("step(control, ('F', 0, 1), EVERYONE)")
    job.ranks[0].tell("collective()")
    os.kill(job.ranks[2].process.pid, signal.SIGKILL)
    assert job.ranks[1].do(ASK)["culprit"] == 2
    job.ranks[1].do("control.end()")  # it has returned, and continues normally
    job.ranks[1].do("setattr(control, 'patience', 0.5)")
    stderr = job.ranks[0].end()
    assert "did not return from F of stage 0, microbatch 1 within 0.5 s after the failure of rank 2" in stderr
    assert job.ranks[0].process.returncode == 1
    assert job.ranks[1].do("time.sleep(1.0)") is None


TORCHRUN = """
import os, sys, time, pathlib
sys.path.insert(0, sys.argv[1])
from support.control_rank import share_by_file
from stageline.faults.monitor import MonitorClient, EVERYONE
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
control = MonitorClient.start(rank, ranks, lambda text: share_by_file(pathlib.Path(sys.argv[2]), rank, text))
assert control.everyone(200) is None
control.begin()
control.waits = EVERYONE
time.sleep(2 * control.interval)
if rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(500)
"""


def test_every_survivor_under_torchrun_writes_whom_it_blames(tmp_path: Path) -> None:
    """torchrun ends the survivors as soon as it sees a rank end; nothing of the monitor stays behind."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    meeting = tmp_path / "address"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", str(script), str(RANK.parents[1]), str(meeting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    for rank in (0, 2):
        assert f"stageline: rank {rank}: rank 1 died (its process exited without reporting an error)" in done.stderr
    assert gone(Address.parse(meeting.read_text()).job)


def test_sigterm_for_all_blames_nobody(jobs: Any) -> None:
    job = jobs(3)
    for survivor in job.survivors():
        survivor.do("step(control, 'F', None)")
        survivor.process.terminate()
    for survivor in job.survivors():
        stderr = survivor.end()
        assert "ended by SIGTERM in F; no other rank is known to have failed" in stderr
        assert survivor.process.returncode == -signal.SIGTERM


def test_sigterm_outside_a_step_ends_the_process_at_once(jobs: Any) -> None:
    job = jobs(2)
    job.ranks[1].process.terminate()
    assert job.ranks[1].end() == ""
    assert job.ranks[1].process.returncode == -signal.SIGTERM
    job.ranks[0].do("step(control, 'F', 1)")
    assert job.ranks[0].do(ASK)["sentence"] == "rank 1 left (ended by SIGTERM) while rank 0 waits for it"


def test_a_signal_handler_that_the_script_sets_later_is_kept(jobs: Any) -> None:
    job = jobs(1)
    job.ranks[0].do("step(control, 'F', None)")
    job.ranks[0].do("str(__import__('signal').signal(15, lambda *_: os._exit(7)))")
    job.ranks[0].process.terminate()
    job.ranks[0].end()
    assert job.ranks[0].process.returncode == 7


def test_a_signal_handler_that_the_script_set_before_is_kept() -> None:
    def mine(*_: Any) -> None:
        """What a script does on SIGTERM."""

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with MonitorClient.start(0, 1, lambda text: text, LONG) as control:
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert gone(control.job)


def test_losing_the_monitor_is_a_warning_and_training_continues(jobs: Any) -> None:
    job = jobs(2)
    (pid,) = job.monitors()
    os.kill(pid, signal.SIGKILL)
    for survivor in job.survivors():
        survivor.do("step(control, 'F', None)")
        assert survivor.do(ASK) is None
        assert survivor.do("control.lost") == "the failure monitor has exited"
        survivor.do("fail(control, 'planted')")
        survivor.tell("control.close()")
        assert (
            survivor.end().count("warning: no control channel: the failure monitor has exited; training continues") == 1
        )
        assert survivor.process.returncode == 0


def test_sigterm_ends_the_process_without_a_monitor(jobs: Any) -> None:
    job = jobs(1)
    (pid,) = job.monitors()
    os.kill(pid, signal.SIGKILL)
    job.ranks[0].do(ASK)
    job.ranks[0].process.terminate()
    job.ranks[0].end()
    assert job.ranks[0].process.returncode == -signal.SIGTERM


JUNK = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes(range(256)) * 8,
    b"x" * (1 << 20),
    b"[" * 900 + b"\n",
    b'\0\x60{"version": "", "facts": "{}", "nonce": "", "proof": "wrong", "where": "here and nowhere else now"}',
    b'\0\x10{"proof": TOKEN}',
    b'\0\x1a{"bye": "", "clean": true}',
    b"\0\4null",
    b"\0\6[1, 2]",
]


def challenged(address: Address) -> tuple[socket.socket, str]:
    """A connection to the monitor, and what it wants to see in a proof."""
    link = socket.create_connection((address.host, address.port), timeout=PATIENCE)
    return link, challenge_on(link)


def challenge_on(link: socket.socket) -> str:
    return str(frame_of(link)["challenge"])


def frame_of(link: socket.socket) -> dict[str, Any]:
    """The next message of a handshake."""
    file = link.makefile("rb", buffering=0)
    message: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(2) or b"", "big")) or b"{}")
    return message


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


def words(rank: int, challenge: str) -> tuple[str, str, str, str]:
    return __version__, json.dumps({"rank": rank, "where": "here"}), challenge, "nonce"


def hello(token: str, rank: int, challenge: str, proven_rank: int | None = None) -> bytes:
    version, facts, _, nonce = words(rank, challenge)
    claim = proof(token, "opener", *words(rank if proven_rank is None else proven_rank, challenge))
    return frame(json.dumps({"version": version, "facts": facts, "nonce": nonce, "proof": claim}).encode())


def is_turned_away(link: socket.socket) -> bool:
    """Whether the other end closes the connection, perhaps after it said why."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := link.recv(1000):
            data += more
    return b"answer" not in data


def test_a_proof_is_valid_for_one_rank_and_one_connection(jobs: Any) -> None:
    """A proof recorded on one connection is useless on another, and a rank cannot connect twice."""
    address = jobs(2, missing=1).address()
    earlier, challenge = challenged(address)
    for rank, seen, of in ((1, challenge, 1), (1, "", 0), (0, "", 0), (99, "", 99)):
        link, own = challenged(address)
        link.sendall(hello(address.token, rank, seen or own, of))
        with link:
            assert is_turned_away(link)
    earlier.sendall(hello(address.token, 1, challenge))
    with earlier:
        welcome = frame_of(earlier)
        assert welcome["proof"] == proof(address.token, "acceptor", *words(1, challenge), welcome["answer"])


def test_a_monitor_without_the_secret_is_refused() -> None:
    """An attacker that took its port, or changed its address in the store."""

    def pretend(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(frame(b'{"challenge": "x"}'))
            link.recv(4096)
            link.sendall(frame(b'{"answer": "{}", "proof": "x"}') + b'{"all": true}\n')
            with contextlib.suppress(ConnectionError):
                link.recv(4096)

    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}:secret"
        with MonitorClient.start(1, 2, lambda _: address, LONG, tell=warnings.append) as control:
            assert control.lost is not None
            assert control.lost.endswith("it does not know the secret of this job")
        thread.join(PATIENCE)


def test_a_message_that_the_rank_did_not_send_breaks_its_connection_and_is_not_heard() -> None:
    address = start_monitor(1, LONG, LONG)
    connection = Connection(address, 0, "here")
    connection.socket.send(b"0" * 32 + b'{"failed": {"text": "planted"}}\n')
    messages, end = list[Any](), time.monotonic() + PATIENCE
    while (more := connection.receive()) is not None:
        messages += more
        assert time.monotonic() < end
        time.sleep(0.005)
    assert not [message for message in messages if "verdict" in message]
    connection.close()
    assert gone(address.job)


def test_garbage_and_wrong_tokens_are_refused(jobs: Any) -> None:
    job = jobs(2, missing=1)
    address = job.address()
    for junk in [*JUNK, *JUNK]:
        link, _ = challenged(address)
        with link:
            with contextlib.suppress(OSError):
                link.sendall(junk.replace(b"TOKEN", address.token.encode()))
            if len(junk) > 2:
                assert is_turned_away(link)
    with contextlib.ExitStack() as open_links:
        for _ in range(100):
            open_links.enter_context(socket.create_connection((address.host, address.port), timeout=20))
        with MonitorClient.start(1, 2, lambda _: str(address), LONG) as late:
            assert late.lost is None
            assert late.everyone(timeout=200) is None
    job.ranks[0].do("step(control, 'F', 1)")
    assert job.ranks[0].do(ASK)["kind"] == "left", "the monitor does its work as before"


def test_idle_connections_do_not_keep_a_rank_out_when_file_descriptors_are_scarce() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    address = Address("127.0.0.1", listener.getsockname()[1], "secret")
    server = Server(listener, address.token, BlameRules(1, LONG, LONG, time.monotonic()))
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(150)]
    # Opened before the limit: here the rank and the server share the files of one process.
    link = socket.create_connection((address.host, address.port), timeout=PATIENCE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, limits[1]))
    thread = threading.Thread(target=server.serve)
    try:
        thread.start()
        link.sendall(hello(address.token, 0, challenge_on(link)))
        assert "answer" in frame_of(link)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for stranger in (*strangers, link):
            stranger.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    listener.close()


def test_a_rank_with_the_wrong_token_learns_that_it_was_refused(jobs: Any) -> None:
    address = jobs(2, missing=1).address()
    warnings: list[str] = []
    wrong = f"{address.host}:{address.port}:{'0' * 32}"
    with MonitorClient.start(1, 2, lambda _: wrong, LONG, tell=warnings.append) as control:
        assert control.lost is not None
        assert "it refused this rank" in control.lost
        assert control.verdict(timeout=PATIENCE) is None
    assert len(warnings) == 1
    assert address.token not in repr(address)


def test_closing_leaves_no_thread_socket_or_monitor(jobs: Any) -> None:
    job = jobs(3)
    for survivor in job.survivors():
        survivor.do("step(control, 'F', None)")
        survivor.do("control.end()")
        assert survivor.do("control.close()") is None
        assert survivor.do("[thread.name for thread in threading.enumerate()]") == ["MainThread"]
        assert survivor.do("int(__import__('signal').getsignal(15))") == signal.SIG_DFL
        assert survivor.do("__import__('signal').set_wakeup_fd(-1)") == -1
        assert not [name for name in survivor.do("files()") if "socket" in name]
    assert gone(job.address().job), "the monitor ends when the last rank has left, though the processes live"


def test_the_monitor_has_its_own_session_hides_its_secret_and_ends_when_nobody_comes() -> None:
    address = start_monitor(2, LONG, LONG)
    (pid,) = monitors(address.job)
    assert os.getsid(pid) not in (os.getsid(0), os.getpid()), "signals to the ranks' group do not reach it"
    assert address.token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert gone(address.job)


def test_training_continues_without_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setenv("STAGELINE_CONTROL_HOST", "192.0.2.1")
    with MonitorClient.start(0, 1, lambda text: text, LONG, tell=warnings.append) as control:
        assert control.lost is not None
        assert "the failure monitor cannot listen on 192.0.2.1" in control.lost
        assert control.begin() == 1
        control.report(Failure("planted"))
        assert control.verdict(timeout=1) is None
    assert len(warnings) == 1
    monkeypatch.delenv("STAGELINE_CONTROL_HOST")
    assert control_host() == "127.0.0.1"
    monkeypatch.setenv("STAGELINE_CONTROL_HOST", "node0")
    assert control_host() == "node0"
    monkeypatch.setenv("STAGELINE_CONTROL_HOST", "0.0.0.0")
    with pytest.raises(ControlError, match="which no rank can connect to"):
        control_host()


def test_ranks_that_share_a_gpu_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has LOCAL_WORLD_SIZE=1 and an NCCL_HOSTID, which makes a machine of it only for NCCL."""
    monkeypatch.delenv("STAGELINE_CONTROL_HOST", raising=False)
    for name, value in shared_gpu(1).items():
        monkeypatch.setenv(name, value)
    assert find_address(os.environ | {"MASTER_ADDR": "127.0.0.1"}, 4) == ("127.0.0.1", "")


class Pinboard:
    """A store as torch has them."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


def test_every_attempt_shares_a_new_address_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Pinboard()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(KeyError):
            share_by_store(store, 1)("")
        first = share_by_store(store, 0)
        assert first(f"address {attempt}") == f"address {attempt}"
        assert share_by_store(store, 1)("") == f"address {attempt}"
        first.done()
    assert share_by_store(store, 0, "none")("") == share_by_store(store, 1, "none")("") == ""
    assert not [value for value in store.kept.values() if "address" in value], "the store holds no secret"


def test_invalid_arguments_are_clear_errors() -> None:
    with pytest.raises(ControlError, match="rank must be from 0 to 1, got 2"):
        MonitorClient.start(2, 2, lambda text: text)
    with pytest.raises(ControlError, match="deadline must be a number of seconds above 0, got 0"):
        MonitorClient.start(0, 2, lambda text: text, deadline=0.0)
    with pytest.raises(ControlError, match="host:port:token"):
        Address.parse("nonsense")

    def nothing_comes(text: str) -> str:
        raise TimeoutError("nothing came")

    with pytest.raises(ControlError, match="rank 0 did not start or has ended: TimeoutError: nothing came"):
        MonitorClient.start(1, 2, nothing_comes)
    for bad in ({}, {"culprit": 1, "kind": "bored"}, {"culprit": "x", "kind": "died"}, {"culprit": 1, "kind": 3}):
        with pytest.raises(JsonError, match="verdict"):
            Verdict.from_json(bad)


def refuse(verdict: Verdict) -> None:
    raise ArithmeticError("planted")


def test_callbacks_receive_a_verdict_and_may_fail() -> None:
    warnings: list[str] = []
    heard: list[Verdict] = []
    came = threading.Event()
    with MonitorClient.start(0, 1, lambda text: text, LONG, tell=warnings.append) as control:
        control.on_verdict(refuse)
        control.on_verdict(heard.append)
        control.on_verdict(lambda _: came.set())
        control.report(Failure("planted"))
        assert came.wait(PATIENCE)
        control.on_verdict(heard.append)
        job = control.job
    assert [str(verdict) for verdict in heard] == ["rank 0 failed: planted"] * 2
    assert warnings == ["rank 0: a callback of the control channel failed: ArithmeticError: planted"]
    assert gone(job)


def test_many_ranks_hear_of_each_other_and_the_same_verdict() -> None:
    """As many as one process can play; a benchmark measures a thousand."""
    ranks = 200
    address = start_monitor(ranks, LONG, LONG)
    connections = [Connection(address, rank, f"pid {rank}") for rank in range(ranks)]

    def heard(connection: Connection, what: str) -> Any:
        end = time.monotonic() + PATIENCE
        messages: list[Any] = []
        while not (hits := [message[what] for message in messages if what in message]):
            assert time.monotonic() < end
            if not messages:
                time.sleep(0.005)
            messages = connection.receive() or []
        return hits[0]

    assert all(heard(connection, "all") for connection in connections)
    for connection in connections:
        connection.send({"beat": 1, "doing": "F", "waits": 150, "done": 0})
    connections[150].close()
    verdicts = [heard(connection, "verdict") for rank, connection in enumerate(connections) if rank != 150]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert (verdicts[0]["culprit"], verdicts[0]["kind"]) == (150, "died")
    for connection in connections:
        connection.close()
    assert gone(address.job)


# The rules alone, with times that the tests pass.


def joined_rules(ranks: int = 4, deadline: float = 5.0) -> BlameRules:
    rules = BlameRules(ranks, deadline, 10.0, now=100.0)
    for rank in range(ranks):
        assert rules.hello(rank, 100.0)
    return rules


def blamed(rules: BlameRules) -> tuple[int, str] | None:
    return None if rules.verdict is None else (rules.verdict["culprit"], rules.verdict["kind"])


def test_a_death_wins_over_secondary_errors_in_every_order() -> None:
    events = ["dies", "echo 0", "echo 1", "echo 3"]
    for order in itertools.permutations(events):
        rules = joined_rules()
        for position, event in enumerate(order):
            now = 101.0 + position * GRACE / 5
            if event == "dies":
                rules.closed(2, now)
            else:
                rules.failed(int(event[-1]), {"text": "reset", "secondary": True, "round": 1}, now)
            rules.tick(now)
        assert blamed(rules) == (2, "died"), order


def test_a_rank_that_names_its_cause_is_not_blamed_in_any_order() -> None:
    reports = {0: 2, 1: 2, 2: None, 3: 2}
    for order in itertools.permutations(reports):
        rules = joined_rules()
        for position, rank in enumerate(order):
            report = {"text": "a message is damaged", "secondary": True, "origin": reports[rank], "round": 1}
            rules.failed(rank, report, 101.0 + position * GRACE / 5)
            rules.tick(101.0 + position * GRACE / 5)
        assert blamed(rules) is None
        rules.tick(102.0)
        assert blamed(rules) == (2, "raised"), order


def test_a_rank_that_names_its_cause_is_blamed_if_the_cause_reports_nothing() -> None:
    rules = joined_rules()
    rules.failed(0, {"text": "rank 2 failed", "secondary": True, "origin": 2, "round": 1}, 101.0)
    rules.tick(101.1)
    assert blamed(rules) is None
    for rank in range(4):
        rules.beat(rank, "F", None, 1, 101.2)
    rules.tick(102.0)
    assert blamed(rules) == (0, "raised"), "rank 2 cannot say so itself"


def test_both_ends_of_a_connection_that_broke_are_named() -> None:
    """As when one of gloo or NCCL is reset, and both processes live."""
    rules = joined_rules()
    for rank in (1, 2):
        rules.failed(rank, {"text": "TransportError: rank lost another rank", "secondary": True, "round": 1}, 101.0)
    for rank in range(4):
        rules.beat(rank, "F", None, 1, 101.2)
    rules.tick(102.0)
    assert rules.verdict is not None
    sentence = str(Verdict.from_json(rules.verdict))
    assert sentence.startswith("rank 1 failed in F: TransportError: rank lost another rank; at the same time, rank 2 ")


def test_the_first_primary_cause_wins_whatever_follows() -> None:
    chance = random.Random(0)
    for _ in range(300):
        rules = joined_rules()
        causes = [("raised", 0), ("raised", 1), ("died", 2), ("died", 3)]
        chance.shuffle(causes)
        now = 101.0
        for kind, rank in causes:
            for echo in chance.sample(range(4), chance.randint(0, 3)):
                if rules.ranks[echo].state == "here":
                    rules.failed(echo, {"text": "reset", "secondary": True, "round": 1}, now)
            if kind == "died":
                rules.closed(rank, now)
            else:
                rules.failed(rank, {"text": "planted", "round": 1}, now)
            now += chance.random() * GRACE / 4
            if kind == causes[0][0] == "raised" and rank == causes[0][1]:
                assert blamed(rules) == (rank, "raised")
        finals = [(rank, kind) for kind, rank in causes if kind == "died"]
        assert blamed(rules) == finals[0], "a death after an exception is told for the steps to come"
        assert rules.verdicts == (1 if causes[0][0] == "died" else 2)


def test_silence_counts_only_while_the_monitor_runs() -> None:
    rules = joined_rules()
    for second in range(1, 5):
        for rank in (0, 1, 3):
            rules.beat(rank, "F", 2, second, 100.0 + second)
    rules.tick(104.6)
    assert blamed(rules) is None
    rules.forgive(60.0, 165.0)
    rules.tick(165.2)
    assert blamed(rules) == (2, "frozen"), "four of its five seconds had passed before"
    rules = joined_rules()
    for rank in range(4):
        rules.beat(rank, "F", None, 1, 104.0)
    rules.forgive(60.0, 165.0)
    rules.tick(165.2)
    assert blamed(rules) is None
    rules.tick(169.1)
    assert blamed(rules) == (0, "frozen")


def test_a_rank_that_leaves_while_being_ended_is_not_blamed() -> None:
    rules = joined_rules(ranks=2)
    for rank in range(2):
        rules.terminated(rank, 101.0)
    rules.bye(0, "its script ended", True, 101.1)
    rules.tick(101.2)
    assert blamed(rules) is None
    assert rules.all_terminated(101.3)
    rules.beat(1, "F", 0, 1, 101.3)
    rules.tick(103.0)
    assert blamed(rules) is None, "nor by who waits for it, for that one is being ended too"


def test_a_silent_rank_is_blamed_before_one_that_waited_for_it() -> None:
    rules = joined_rules(deadline=5.0)
    for rank in (0, 1, 3):
        rules.beat(rank, "F", 2, 1, 104.5)
    rules.failed(1, {"text": "waited 4 s for rank 2", "secondary": True}, 104.5)
    rules.tick(104.5 + 1.01 * GRACE)
    assert blamed(rules) == (2, "frozen")


def test_a_short_silence_is_not_blamed_for_the_error_of_another_rank() -> None:
    rules = joined_rules(deadline=5.0)
    for rank in (0, 1, 3):
        rules.beat(rank, "F", 2, 1, 102.0)
    rules.failed(1, {"text": "a message is damaged", "secondary": True}, 102.0)
    for rank in (0, 1, 3):
        rules.beat(rank, "F", 2, 1, 102.2)
    rules.tick(102.5)
    assert blamed(rules) is None, "rank 2 may be dead: its connection closes when its GPU is released"
    rules.beat(2, "F", None, 1, 102.6)
    rules.tick(102.6)
    assert blamed(rules) == (1, "raised")


def test_a_killed_rank_whose_connection_closes_late_is_blamed_for_the_errors_of_others() -> None:
    rules = joined_rules(deadline=60.0)
    for rank in range(4):
        rules.beat(rank, "F", None, 1, 101.0)
    for rank in (0, 3):
        rules.failed(rank, {"text": "lost another rank", "secondary": True}, 101.1)
    for tenth in range(25):
        now = 101.1 + tenth / 10
        for rank in (0, 1, 3):
            rules.beat(rank, "F", 2, 1, now)
        rules.tick(now)
        assert blamed(rules) is None
    rules.closed(2, 103.6)
    assert blamed(rules) == (2, "died")


def test_a_leaver_is_blamed_only_after_a_rank_waited_long_enough_for_it() -> None:
    rules = joined_rules()
    rules.bye(2, "", True, 101.0)
    for tenth in range(20):
        now = 101.0 + tenth / 10
        rules.beat(0, "F", 2, tenth, now)  # it makes progress: what it waits for was sent before rank 2 left
        rules.tick(now)
        assert blamed(rules) is None
    rules.tick(104.5)
    assert blamed(rules) is None, "rank 0 said nothing since: it may have what it waited for"
    rules.beat(0, "F", 2, 19, 104.6)
    rules.tick(104.6)
    assert blamed(rules) == (2, "left")
    assert rules.verdict is not None
    assert rules.verdict["waiter"] == 0


def test_a_verdict_reports_only_the_ranks_nearest_to_the_culprit() -> None:
    rules = joined_rules(ranks=1000)
    rules.closed(500, 101.0)
    assert rules.verdict is not None
    reported = [state["rank"] for state in rules.verdict["ranks"]]
    assert len(reported) == 64
    assert 500 in reported
    assert reported == sorted(reported)


def test_waiting_continues_while_a_rank_down_the_line_works() -> None:
    rules = BlameRules(ranks=3, deadline=5.0, start_deadline=5.0, now=0.0)
    for rank in range(3):
        rules.hello(rank, 0.0)
    rules.beat(0, "B of stage 0, microbatch 0", 1, 3, 1.0)
    rules.beat(1, "F of stage 1, microbatch 4", None, 3, 1.0)
    assert rules.busy(0, 20.0), "rank 0 waits for rank 1, which computes, however long"
    rules.beat(1, "B of stage 1, microbatch 0", 2, 4, 20.0)
    assert rules.busy(0, 30.0), "rank 2 is outside of a step: it loads its batch"
    rules.beat(2, "B of stage 2, microbatch 0", 0, 4, 30.0)
    assert rules.busy(0, 31.0), "they seem to wait for each other, and may have come out of it since"
    assert not rules.busy(0, 36.0), "nobody has done anything for the deadline"
    rules.beat(2, "after its last action", -1, 4, 36.0)
    assert not rules.busy(0, 42.0)
    rules.bye(2, "", True, 43.0)
    assert not rules.busy(2, 43.0)

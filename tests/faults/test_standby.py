"""The standby of the failure monitor: what the ranks learn when a machine, its network or the first monitor is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stageline.faults.monitor import Address
from stageline.faults.monitor.blame import RECONNECT, BlameRules
from stageline.faults.monitor.connection import NAME
from support.hosts import Network

RANK = Path(__file__).parents[1] / "support" / "control_rank.py"
PATIENCE = 200.0
ASK = "control.verdict(timeout=200)"
Command = Callable[..., list[str]]


class Rank:
    """A process on some host that evaluates the expressions that it is sent."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, words: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the rank ended: {self.process.communicate()[1]}")
        return json.loads(line)

    def wait_until(self, words: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.do(words):
            assert time.monotonic() < end, words
            time.sleep(0.02)


class Job:
    """Ranks on several hosts: the command that runs a program on the host of each rank, and its address."""

    def __init__(self, folder: Path, places: Sequence[tuple[Command, str]], deadline: float) -> None:
        self.meeting = folder / "address"
        self.ranks: list[Rank] = []
        for rank, (command, host) in enumerate(places):
            numbers = [str(number) for number in (rank, len(places), deadline, PATIENCE)]
            words = command(sys.executable, str(RANK), *numbers, str(self.meeting))
            self.ranks.append(Rank(words, {"STAGELINE_CONTROL_HOST": places[0][1], "STAGELINE_HOST": host}))
        for survivor in self.ranks:
            survivor.wait_until("control.has_standby")
        for number, survivor in enumerate(self.ranks):
            survivor.do(f"step(control, ('F', {number}, 0), EVERYONE)")

    def monitors(self) -> dict[str, int]:
        """The processes of the monitors of this job, the standby under its own name."""
        job, pids = Address.parse(self.meeting.read_text()).job.encode(), []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    if NAME.encode() in words and job in words:
                        pids.append(int(folder.name))
        by_start = sorted(
            pids, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        )
        return dict(zip(["first", "standby"], by_start, strict=False))

    def close(self) -> None:
        for survivor in self.ranks:
            survivor.process.kill()
            survivor.process.communicate()
        end = time.monotonic() + PATIENCE
        while self.monitors():
            assert time.monotonic() < end, "a monitor is left"
            time.sleep(0.05)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Start jobs; afterwards, no rank and no monitor is left."""
    started: list[Job] = []

    def start(places: Sequence[tuple[Command, str]], deadline: float = 60.0) -> Job:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        started.append(Job(folder, places, deadline))
        return started[-1]

    yield start
    for job in started:
        job.close()


def here(*words: str) -> list[str]:
    return list(words)


LOOPBACK = [(here, "127.0.0.1"), (here, "127.0.0.1"), (here, "127.0.0.2"), (here, "127.0.0.3")]
"""Two ranks on one host, and one on each of two others; all of them are this machine."""


def test_a_standby_takes_over_when_the_first_monitor_is_killed(jobs: Any) -> None:
    """Twice: training continues, and the next failure is named as before, an exception, and then a death."""
    job = jobs(LOOPBACK)
    for host in ("127.0.0.2", "127.0.0.1"):
        os.kill(job.monitors()["first"], signal.SIGKILL)
        for survivor in job.ranks:
            survivor.wait_until(f"control.has_standby and control._channel.address.host == {host!r}")
    job.ranks[1].do("fail(control, 'planted')")
    for survivor in job.ranks:
        assert survivor.do(ASK)["sentence"] == "rank 1 failed in F of stage 1, microbatch 0: ArithmeticError: planted"
    for survivor in job.ranks:
        survivor.do("step(control, 'F', None)")
        assert survivor.do("control.lost") is None
    os.kill(job.ranks[0].process.pid, signal.SIGKILL)
    for survivor in job.ranks[1:]:
        verdict = survivor.do(ASK)
        assert (verdict["culprit"], verdict["kind"]) == (0, "died")
        survivor.process.kill()
        warning = "warning: the failure monitor has exited; the standby on 127.0.0.2 takes over"
        assert warning in survivor.process.communicate()[1]


def test_the_first_machine_is_named_when_all_its_processes_die(jobs: Any) -> None:
    """Its ranks and the first monitor, as when a container ends."""
    job = jobs(LOOPBACK)
    for pid in (job.monitors()["first"], job.ranks[0].process.pid, job.ranks[1].process.pid):
        os.kill(pid, signal.SIGKILL)
    verdicts = [survivor.do(ASK) for survivor in job.ranks[2:]]
    assert {(verdict["culprit"], verdict["kind"]) for verdict in verdicts} <= {(0, "died"), (1, "died")}
    assert len({verdict["sentence"] for verdict in verdicts}) == 1


def test_losing_the_standby_costs_a_warning(jobs: Any) -> None:
    job = jobs(LOOPBACK)
    os.kill(job.monitors()["standby"], signal.SIGKILL)
    for survivor in job.ranks:
        survivor.wait_until("not control.has_standby")
    os.kill(job.ranks[2].process.pid, signal.SIGKILL)
    for survivor in (job.ranks[0], job.ranks[3]):
        assert survivor.do(ASK)["culprit"] == 2


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "network", 3) as network:
        yield network


def places(network: Network, *hosts: int) -> list[tuple[Command, str]]:
    return [(network.hosts[host].command, network.hosts[host].address) for host in hosts]


def test_both_sides_of_a_cut_name_a_machine_on_the_other(jobs: Any, three_hosts: Network) -> None:
    """The machine of the first monitor is cut off. The two others name it, and it names one of theirs."""
    job = jobs(places(three_hosts, 0, 0, 1, 2), deadline=3.0)
    three_hosts.hosts[0].cut()
    verdicts = [survivor.do(ASK) for survivor in job.ranks]
    for verdict in verdicts[2:]:
        assert (verdict["culprit"], verdict["kind"], verdict["host"]) == (0, "frozen", "10.77.0.1")
        assert "; its machine 10.77.0.1 is not reached, nor is rank 1" in verdict["sentence"]
        assert verdict["sentence"] == verdicts[2]["sentence"]
    for verdict in verdicts[:2]:
        assert (verdict["culprit"], verdict["kind"]) in ((2, "frozen"), (3, "frozen"))


@pytest.mark.host_matrix
def test_a_machine_without_a_monitor_learns_that_it_is_cut_off(jobs: Any, three_hosts: Network) -> None:
    job = jobs(places(three_hosts, 0, 1, 2), deadline=3.0)
    three_hosts.hosts[2].cut()
    for rank in (0, 1):
        assert job.ranks[rank].do(ASK)["culprit"] == 2
    verdict = job.ranks[2].do(ASK)
    assert (verdict["culprit"], verdict["kind"], verdict["host"]) == (0, "frozen", "10.77.0.1")


@pytest.mark.host_matrix
def test_both_of_two_machines_name_the_other_after_a_cut(jobs: Any, three_hosts: Network) -> None:
    job = jobs(places(three_hosts, 0, 1), deadline=3.0)
    three_hosts.hosts[1].cut()
    for rank in (0, 1):
        verdict = job.ranks[rank].do(ASK)
        assert (verdict["culprit"], verdict["kind"]) == (1 - rank, "frozen")


@pytest.mark.host_matrix
def test_a_cut_that_ends_before_the_deadline_costs_nothing(jobs: Any, three_hosts: Network) -> None:
    """Although TCP would send again only after twice the time of the cut."""
    job = jobs(places(three_hosts, 0, 1), deadline=12.0)
    three_hosts.hosts[1].cut()
    time.sleep(8.0)
    three_hosts.hosts[1].restore()
    time.sleep(8.0)
    for survivor in job.ranks:
        assert survivor.do("control.verdict()") is None
        assert survivor.do("control.lost") is None
    os.kill(job.ranks[1].process.pid, signal.SIGKILL)
    assert job.ranks[0].do(ASK)["kind"] == "died"


# The rules alone, with times that the tests pass.


def joined_rules(hosts: str = "aabc", *, standby: bool = False) -> BlameRules:
    rules = BlameRules(len(hosts), 5.0, 10.0, now=100.0, standby=standby)
    for rank, host in enumerate(hosts):
        assert rules.hello(rank, 100.0, f"pid {rank}")
        rules.ranks[rank].host = host
    return rules


def blamed(rules: BlameRules) -> tuple[int, str] | None:
    return None if rules.verdict is None else (rules.verdict["culprit"], rules.verdict["kind"])


def test_a_rank_of_another_machine_may_connect_again_before_it_counts_as_dead() -> None:
    rules = joined_rules()
    rules.disconnected(2, 101.0)
    rules.tick(101.0 + 0.9 * RECONNECT)
    assert blamed(rules) is None
    assert not rules.rejoin(2, 102.0, "another process")
    assert rules.rejoin(2, 102.0, "pid 2")
    rules.tick(104.0)
    assert blamed(rules) is None
    rules.disconnected(2, 104.0)
    rules.tick(104.1 + RECONNECT)
    assert blamed(rules) == (2, "died")


def test_a_standby_blames_nobody_until_it_leads_and_then_the_first() -> None:
    rules = joined_rules(standby=True)
    rules.closed(3, 101.0)
    rules.closed(1, 102.0)
    rules.tick(120.0)
    assert blamed(rules) is None
    rules.lead(120.0)
    assert blamed(rules) == (3, "died")


def test_a_standby_adopts_the_verdict_of_the_first_monitor() -> None:
    rules = joined_rules(standby=True)
    rules.adopt({"culprit": 2, "kind": "frozen", "final": True, "round": 0})
    rules.lead(120.0)
    rules.tick(120.0)
    assert blamed(rules) == (2, "frozen")

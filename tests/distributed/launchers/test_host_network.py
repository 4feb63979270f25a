"""The launchers of several hosts: who is there, who leads, who stops; and states in the memory of other hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stageline.cli.app import run
from stageline.common.errors import StagelineError
from stageline.distributed.launchers import hosts
from stageline.distributed.launchers.hosts import HostNetwork, HostPlace
from stageline.distributed.state_memory import (
    HEAD,
    StateCopies,
    StateMemory,
    fetch_state,
    forget_states,
    host_memory,
    list_states,
)
from support.ports import free_port, free_ports

pytestmark = pytest.mark.timeout(60)
SECRET = "a secret of sufficient length"


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def meet(networks: list[HostNetwork]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda network: network.meet(20), networks))


class Fleet:
    """Launchers of several hosts in this process."""

    def __init__(self) -> None:
        self.port, self._stack = free_port(), ExitStack()

    def start(
        self,
        number: int,
        count: int = 3,
        secret: str = SECRET,
        timeout: float = 20.0,
        recovery: str = "",
        spares: int | None = None,
    ) -> HostNetwork:
        place = HostPlace(count, number, "127.0.0.1", self.port, timeout)
        facts = {"ranks": 1, "spares": number if spares is None else spares, "store": 1000 + number}
        return self._stack.enter_context(HostNetwork(place, secret, facts, recovery))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def test_the_next_host_leads_when_the_first_is_lost_and_a_minority_stops(fleet: Fleet) -> None:
    networks = [fleet.start(number) for number in range(3)]
    meet(networks)
    assert networks[0].table == networks[1].table == networks[2].table
    assert [entry.spares for entry in networks[2].table.values()] == [0, 1, 2]
    networks[1].tell({"news": 7})
    until(lambda: all(networks[number].statuses.get(1) == {"news": 7} for number in (0, 2)))
    assert [network.leader for network in networks] == [0, 0, 0]
    networks[0].close()
    until(lambda: [network.leader for network in networks[1:]] == [1, 1])
    assert networks[2].lost == {0: "its launcher ended"}
    assert [network.cut_off for network in networks[1:]] == ["", ""], "two of three"
    networks[1].members = networks[2].members = {1, 2}
    networks[1].close()
    until(lambda: networks[2].lost.keys() == {0, 1})
    assert networks[2].cut_off == (
        "host 1 (127.0.0.1) cannot be reached from host 2, and a job needs most of its hosts to continue"
    )


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_launcher_that_is_started_again_comes_back_when_the_one_that_leads_lets_it(fleet: Fleet, lost: int) -> None:
    networks = [fleet.start(number) for number in range(3)]
    meet(networks)
    first = networks[lost]
    first.close()
    others = [network for network in networks if network is not first]
    until(lambda: all(lost in network.lost for network in others))
    leader = others[0]
    networks[lost] = back = fleet.start(lost)
    until(lambda: any(lost in network.returning for network in others))
    assert not back.table, "nobody has let it in"
    (entry,) = {network.returning[lost] for network in others if network.returning}
    table = {**leader.table, lost: entry._replace(since=1)}
    for network in others:
        network.tell({"order": {"table": table, "members": [network.number for network in others]}})
        network.readmit(table)
    back.meet(20)
    assert back.order is not None
    until(lambda: all(not network.lost and lost in network._links for network in others))
    assert {network.leader for network in networks} == {leader.number}, "the one that came back does not lead"
    assert [network.table == table for network in networks] == [True] * 3
    others[1].close()
    until(lambda: leader.lost and back.lost)
    assert {leader.leader, back.leader} == {leader.number}


def test_a_launcher_that_comes_back_with_other_options_is_refused(fleet: Fleet) -> None:
    networks = [fleet.start(number, 2) for number in range(2)]
    meet(networks)
    networks[1].close()
    until(lambda: networks[0].lost)
    with pytest.raises(StagelineError, match="it came back with other options; it had -n 1 --spares 1"):
        fleet.start(1, 2, spares=4).meet(20)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_launcher_that_did_not_run_while_the_others_declared_it_lost_stops(fleet: Fleet, lost: int) -> None:
    networks = [fleet.start(number) for number in range(3)]
    meet(networks)
    for network in networks:
        if network.number != lost:
            network.lose(lost, "not heard for 39 s")
    until(lambda: networks[lost].cut_off)
    assert "declared" in networks[lost].cut_off
    assert "lost: not heard for 39 s" in networks[lost].cut_off
    assert [network.cut_off for network in networks if network.number != lost] == ["", ""]


def test_the_first_host_continues_if_only_one_of_two_others_declared_it_lost(fleet: Fleet) -> None:
    networks = [fleet.start(number) for number in range(3)]
    meet(networks)
    networks[2].lose(0, "not heard for 39 s")
    until(lambda: 2 in networks[0]._given_up)
    assert not networks[0].cut_off


def test_of_two_hosts_the_first_continues(fleet: Fleet) -> None:
    networks = [fleet.start(number, 2) for number in range(2)]
    meet(networks)
    networks[1].close()
    until(lambda: networks[0].lost)
    assert not networks[0].cut_off


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"secret": "another secret of that length"}, "it has a different secret"),
        ({"recovery": "--max-restarts 1"}, "it has --max-restarts 1, and host 0 has "),
        ({"count": 3}, "it has --nnodes 3, and host 0 has 2"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(fleet: Fleet, options: dict[str, Any], error: str) -> None:
    fleet.start(0, 2)
    with pytest.raises(StagelineError, match=error):
        fleet.start(1, **({"count": 2} | options)).meet(20)


def test_a_second_launcher_with_the_same_number_is_refused(fleet: Fleet) -> None:
    networks = [fleet.start(number, 2) for number in range(2)]
    meet(networks)
    with pytest.raises(StagelineError, match="another launcher also has --node-rank 1"):
        fleet.start(1, 2).meet(20)
    assert not networks[0].lost
    with pytest.raises(StagelineError, match=f"cannot listen on --master-port {fleet.port}; another job"):
        fleet.start(0, 2)


def test_a_host_that_does_not_start_is_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "NOTE", 0.0)
    with pytest.raises(StagelineError, match=r"host 1 never started: its launcher did not connect .* within 0.2 s"):
        fleet.start(0, 2).meet(0.2)
    with pytest.raises(StagelineError, match=r"host 0 never started: nothing answers at --master-addr 127.0.0.1"):
        Fleet().start(1, 2).meet(0.2)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nnodes", "2"], "--nnodes above 1 requires --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "10.0.0.1"], "--node-rank must be from 0 to 1"),
        (["--node-rank", "1"], "require --nnodes, the number of hosts"),
        (["--logs", "script.py"], "--logs must be a folder for the output of the ranks, but script.py is a file"),
        (["-n", "0"], "-n 0 is only for a host of spare processes"),
        (
            ["--nnodes", "2", "--master-addr", "10.0.0.1", "--launcher", "ray"],
            "--nnodes requires --launcher processes",
        ),
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], "need a shared secret; set STAGELINE_SECRET"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STAGELINE_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    assert run(["launch", *words, "script.py"]) == 2
    assert error in " ".join(capfd.readouterr().err.split())


# ---- states ----


def write_state(path: str, step: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(HEAD.pack(step + 1, 0) + data)


def test_states_are_kept_on_another_host_and_fetched_from_there(fleet: Fleet) -> None:
    network = fleet.start(0, 2)
    address, data = ("127.0.0.1", fleet.port), os.urandom(3_000_000)
    with host_memory(2) as here, host_memory(2) as there, host_memory(2) as elsewhere:
        own, network.memory = StateMemory(here), StateMemory(there)
        copies = StateCopies([("127.0.0.1", free_port()), address], SECRET, seat=1)  # the first is not there
        for step in (4, 5, 6):
            path = own.next_file(1, step)
            write_state(path, step, data)
            copies.send(path, step)
            until(lambda: not copies.pending)
        assert list_states(address, SECRET) == {1: [5, 6]}
        other = StateMemory(elsewhere)
        fetch_state(address, SECRET, 1, 5, other)
        assert Path(other.find(1, 5) or "").read_bytes() == HEAD.pack(6, 0) + data
        with pytest.raises(StagelineError, match="there is no state of rank 1 after step 4"):
            fetch_state(address, SECRET, 1, 4, other)
        forget_states(address, SECRET, 5)
        assert list_states(address, SECRET) == {1: [5]}


def test_a_copy_that_ends_halfway_does_not_count(fleet: Fleet) -> None:
    network = fleet.start(0, 2)
    with host_memory(1) as here, host_memory(1) as there:
        network.memory = StateMemory(there)
        for path, step in zip(there, (1, 2), strict=True):
            write_state(path, step, b"before")
        os.truncate(here[0], 1 << 30)  # takes long enough to be abandoned
        with open(here[0], "r+b") as file:
            file.write(HEAD.pack(4, 0))
        copies = StateCopies([("127.0.0.1", fleet.port)], SECRET, seat=0)
        copies.send(here[0], 3)
        until(lambda: network.memory is not None and network.memory.steps() == {0: [2]})
        copies.close()
        assert list_states(("127.0.0.1", fleet.port), SECRET) == {0: [2]}
        assert copies.pending


# ---- the command ----

SCRIPT = """
import os, sys, time
import torch
from torch import nn
import stageline as sl

torch.set_num_threads(1)
print("runs", flush=True)
if sys.argv[1] == "wait" or (sys.argv[1] == "lose" and os.environ["STAGELINE_ATTEMPT"] == "0" < os.environ["RANK"]):
    time.sleep(600)
stages = [nn.Linear(3, 3) for _ in range(2)]
pipe = sl.Pipeline(stages, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2, deadline=60)
pipe.step(torch.ones(4, 3), torch.zeros(4, 3))
if os.environ["RANK"] == "1" and sys.argv[1] == "fail":
    raise KeyError("planted")
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[str], list[subprocess.Popen[str]]]]:
    """Start the launchers of two hosts, with a rank each and a spare on the first."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "STAGELINE_SECRET": SECRET, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def start(word: str) -> list[subprocess.Popen[str]]:
        first = free_ports(12)
        environment["STAGELINE_PORTS"] = f"{first}-{first + 11}"  # of both hosts, as they are one machine
        words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(first), "-n", "1"]
        for number in range(2):
            own = ["--node-rank", str(number), "--spares", str(1 - number), "--max-restarts", "1", "--on-loss", "spare"]
            launch = [sys.executable, "-m", "stageline", "launch", *words, *own, str(tmp_path / "script.py"), word]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(launch, env=environment, text=True, start_new_session=True, **pipes))  # type: ignore[call-overload]
        for launcher in started:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "runs\n", launcher.communicate()[1]
        return started

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


@pytest.mark.host_matrix
@pytest.mark.timeout(200)
def test_an_error_on_one_host_ends_the_job_on_all(command: Any) -> None:
    launchers = command("fail")
    for launcher in launchers:
        assert "stageline launch: rank 1 of 2 failed: KeyError: 'planted'" in launcher.communicate(timeout=100)[1]
    assert [launcher.returncode for launcher in launchers] == [1, 1]


@pytest.mark.host_matrix
@pytest.mark.timeout(200)
@pytest.mark.parametrize("host", [0, 1])
def test_ctrl_c_on_one_host_ends_the_job_on_all(command: Any, host: int) -> None:
    launchers = command("wait")
    os.killpg(launchers[host].pid, signal.SIGINT)
    texts = [launcher.communicate(timeout=100)[1] for launcher in launchers]
    assert launchers[host].returncode == 130
    assert f"error: the job was interrupted on host {host}" in texts[1 - host]


@pytest.mark.host_matrix
@pytest.mark.timeout(200)
def test_a_spare_takes_the_rank_of_a_launcher_that_is_killed(command: Any) -> None:
    first, second = command("lose")
    second.kill()
    text = first.communicate(timeout=150)[1]
    assert first.returncode == 0, text

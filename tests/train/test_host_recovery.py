"""Jobs on several hosts that lose ranks and hosts, and end with the bits of a job that lost none."""

from __future__ import annotations

import importlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stageline.testing import Child, ForkServer
from stageline.train.checkpoint import newest
from stageline.train.events import read_metrics
from support.hosts import Network
from support.jobs import losses, weights
from support.recovery_rank import run, settings_of, write_tokens

LAUNCHER = Path(__file__).parents[1] / "support" / "launcher_host.py"
SECRET = {"STAGELINE_SECRET": "a secret of sufficient length", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return write_tokens(tmp_path)


def start_launchers(
    network: Network,
    server: ForkServer,
    tokens: Path,
    hosts: Sequence[tuple[int, int]],
    *,
    on_loss: Sequence[str] = ("spare",),
    kills: Sequence[tuple[int, int, str, int]] = (),
    pauses: Sequence[tuple[int, int, int, Path]] = (),
    more: Sequence[str] = (),
    only: int | None = None,
) -> list[Child]:
    """Start a launcher on every host, or on one, with so many ranks and spares."""
    words = [*settings_of(tokens, "parts", sum(own for own, _ in hosts)), "comm.train_timeout_seconds=8", *more]
    waits = [[*where, str(mark)] for *where, mark in pauses]
    launchers = []
    for number, (own, spares) in enumerate(hosts):
        if only in (None, number):
            place = [len(hosts), number, network.hosts[0].address, 29400, 4.0]
            arguments: list[Any] = [place, own, spares, list(on_loss), words, list(kills), waits]
            log = network.log(number)
            launchers.append(
                network.hosts[number].start(server, LAUNCHER, "launch", arguments, log=log, environment=SECRET)
            )
    return launchers


def wait_for(mark: Path, network: Network) -> None:
    end = time.monotonic() + 150
    while not mark.exists():
        assert time.monotonic() < end, logs(network, 3)
        time.sleep(0.05)


def logs(network: Network, count: int) -> str:
    return "\n".join(network.log(number).read_text()[-3000:] for number in range(count))


def end_without(lost: int, launchers: Sequence[Child], network: Network) -> list[str]:
    """Wait for all launchers; that of the lost host says so by its exit code. Return what they wrote."""
    outputs = network.wait(launchers, 200)
    codes = [launcher.code for launcher in launchers]
    assert codes.pop(lost) == 3, outputs
    assert codes == [0, 0], outputs
    return outputs


def assert_same(tokens: Path) -> None:
    assert losses(tokens, "parts") == losses(tokens, "whole")
    assert weights(tokens, "parts", 16) == weights(tokens, "whole", 16)


@pytest.mark.host_matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_on_another_host_takes_the_place_of_a_killed_rank(
    rank: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(tokens, "whole", [])
    monkeypatch.chdir(tmp_path)
    with Network(tmp_path / "network", 3, separate=False) as network:
        kills = [(0, rank, "step", 7)]
        launchers = start_launchers(network, fork_server, tokens, [(1, 0), (1, 0), (0, 1)], kills=kills)
        outputs = network.wait(launchers, 200)
        assert [launcher.code for launcher in launchers] == [0, 0, 0], outputs
    assert_same(tokens)
    (row,) = read_metrics(tokens.parent / "parts" / "metrics.jsonl").of("recovery")
    assert (row["action"], row["state"], row["lost"]) == ("spare", "memory", [f"rank {rank} was killed by SIGKILL"])


@pytest.mark.host_matrix
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_cut_off_is_replaced_by_spares_of_another(
    lost: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host 0 leads, keeps the store and the failure monitor, and writes the files of the run."""
    run(tokens, "whole", [])
    monkeypatch.chdir(tmp_path)
    cut = tmp_path / "cut"
    with Network(tmp_path / "network", 3, separate=False) as network:
        pauses = [(0, 1, 8, cut)]
        launchers = start_launchers(network, fork_server, tokens, [(1, 0), (1, 0), (0, 1)], pauses=pauses)
        wait_for(Path(f"{cut}-ready"), network)
        network.hosts[lost].cut()
        cut.touch()
        outputs = end_without(lost, launchers, network)
        assert "cannot be reached from host" in outputs[lost]
    assert_same(tokens)
    (row,) = read_metrics(tokens.parent / "parts" / "metrics.jsonl").of("recovery")
    assert (row["action"], row["state"]) == ("spare", "memory")
    assert f"rank {lost} was on host {lost} (10.77.0.{lost + 1}), which is lost: not heard for" in row["lost"][0]


@pytest.mark.host_matrix
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_was_paused_is_replaced_and_stops_when_it_continues(
    lost: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 holds the lock of the run folder while it is paused."""
    run(tokens, "whole", [])
    monkeypatch.chdir(tmp_path)
    paused, replaced = tmp_path / "paused", tmp_path / "replaced"
    with Network(tmp_path / "network", 3, separate=False) as network:
        pauses = [(0, 1, 8, paused), (1, 1 - lost, 3, replaced)]
        launchers = start_launchers(network, fork_server, tokens, [(1, 0), (1, 0), (0, 1)], pauses=pauses)
        wait_for(Path(f"{paused}-ready"), network)
        network.hosts[lost].signal(signal.SIGSTOP)
        paused.touch()
        wait_for(Path(f"{replaced}-ready"), network)
        network.hosts[lost].signal(signal.SIGCONT)
        launchers[lost].wait(60)  # long before the job ends
        replaced.touch()
        outputs = end_without(lost, launchers, network)
        assert "lost: not heard for" in outputs[lost]
    assert_same(tokens)
    (row,) = read_metrics(tokens.parent / "parts" / "metrics.jsonl").of("recovery")
    assert (row["action"], row["state"]) == ("spare", "memory")


@pytest.mark.host_matrix
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("replan", ()),
        (
            "shrink_replicas",
            ("parallelism.pipeline_parallel_degree=1", "parallelism.data_parallel_replicate_degree=3"),
        ),
    ],
)
def test_the_job_continues_on_the_hosts_that_are_left(
    action: str,
    more: tuple[str, ...],
    lost: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 describes the job to the launcher of host 0 only, and the others have to know it, too."""
    monkeypatch.chdir(tmp_path)
    killed = tmp_path / "killed"
    with Network(tmp_path / "network", 3, separate=False) as network:
        options: dict[str, Any] = {"on_loss": [action], "pauses": [(0, 1, 8, killed)], "more": more}
        launchers = start_launchers(network, fork_server, tokens, [(1, 0), (1, 0), (1, 0)], **options)
        wait_for(Path(f"{killed}-ready"), network)
        launchers[lost].signal(signal.SIGKILL)
        killed.touch()
        del launchers[lost]
        outputs = network.wait(launchers, 200)
        assert [launcher.code for launcher in launchers] == [0, 0], outputs
    history = read_metrics(tokens.parent / "parts" / "metrics.jsonl")
    (row,) = history.of("recovery")
    assert (row["action"], row["state"]) == (action, "memory")
    assert [row["step"] for row in history.of("step")] == list(range(1, 17))


@pytest.mark.host_matrix
@pytest.mark.parametrize("lost", [0, 1])
def test_processes_of_a_host_that_comes_back_are_spares(
    lost: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(tokens, "whole", [])
    monkeypatch.chdir(tmp_path)
    killed, back = tmp_path / "killed", tmp_path / "back"
    with Network(tmp_path / "network", 3, separate=False) as network:
        options: dict[str, Any] = {
            "pauses": [(0, 1, 8, killed), (1, 1, 4, back)],
            "kills": [(1, lost, "step", 9)],  # of the process that took its place
        }
        counts = [(1, 0), (1, 0), (0, 1)]
        launchers = start_launchers(network, fork_server, tokens, counts, **options)
        wait_for(Path(f"{killed}-ready"), network)
        launchers[lost].signal(signal.SIGKILL)
        killed.touch()
        wait_for(Path(f"{back}-ready"), network)
        [launchers[lost]] = start_launchers(network, fork_server, tokens, counts, only=lost, **options)
        wait_for(tmp_path / f"host{lost}-logs" / "rank-3.log", network)  # its process, as the next spare one
        time.sleep(1.0)  # until the one that leads has heard of it
        back.touch()
        outputs = network.wait(launchers, 200)
        assert [launcher.code for launcher in launchers] == [0, 0, 0], outputs
        assert f"stageline: host {lost} (10.77.0.{lost + 1}) is back" in outputs[1 - lost]
    assert_same(tokens)
    rows = read_metrics(tokens.parent / "parts" / "metrics.jsonl").of("recovery")
    assert [row["action"] for row in rows] == ["spare", "spare"]


@pytest.mark.host_matrix
def test_the_replica_of_a_host_that_comes_back_joins_again(
    tokens: Path, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed, never = tmp_path / "killed", tmp_path / "never"
    with Network(tmp_path / "network", 3, separate=False) as network:
        options: dict[str, Any] = {
            "pauses": [(0, 1, 8, killed), (1, 0, 4, never)],  # until the replica is announced
            "more": ["parallelism.pipeline_parallel_degree=1", "parallelism.data_parallel_replicate_degree=2"],
            "on_loss": ["shrink_replicas"],
        }
        counts = [(1, 0), (1, 0), (0, 0)]
        launchers = start_launchers(network, fork_server, tokens, counts, **options)
        wait_for(Path(f"{killed}-ready"), network)
        launchers[1].signal(signal.SIGKILL)
        wait_for(Path(f"{never}-ready"), network)
        [launchers[1]] = start_launchers(network, fork_server, tokens, counts, only=1, **options)
        outputs = network.wait(launchers, 200)
        assert [launcher.code for launcher in launchers] == [0, 0, 0], outputs
    history = read_metrics(tokens.parent / "parts" / "metrics.jsonl")
    assert [row["action"] for row in history.of("recovery")] == ["shrink_replicas", "return"]
    assert [row["step"] for row in history.of("step")] == list(range(1, 17))


@pytest.mark.host_matrix
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_on_a_host_with_its_own_folder_gets_its_state_from_an_object_store(
    lost: int,
    tokens: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fsspec")
    run(tokens, "whole", [])
    monkeypatch.chdir(tmp_path)
    killed, store = tmp_path / "killed", tmp_path / "store"
    with Network(tmp_path / "network", 3, separate=True) as network:
        pauses = [(0, 1, 8, killed)]
        more = [f"job.dump_folder={network.shared_path}/run", f"checkpoint.folder=objects://{store}"]
        counts = [(1, 0), (1, 0), (0, 1)]
        launchers = start_launchers(network, fork_server, tokens, counts, pauses=pauses, more=more)
        wait_for(Path(f"{killed}-ready"), network)
        wait_for(store / "step-00000005" / "manifest.json", network)
        launchers[lost].signal(signal.SIGKILL)
        killed.touch()
        del launchers[lost]
        outputs = network.wait(launchers, 200)
        assert [launcher.code for launcher in launchers] == [0, 0], outputs
        main = network.hosts[2 if lost == 0 else 0].folder / "run"
        (row,) = read_metrics(main / "metrics.jsonl").of("recovery")
        assert (row["action"], row["state"], row["step"]) == ("spare", "a checkpoint", 5)
    importlib.import_module("support.object_store")
    with newest(f"objects://{store}") as checkpoint:  # type: ignore[union-attr]
        assert checkpoint is not None
        assert checkpoint.step == 16
        ours = {name: value.flatten().tolist() for name, value in sorted(checkpoint.read_model().items())}
    assert ours == weights(tokens, "whole", 16)

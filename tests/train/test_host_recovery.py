"""Jobs on several hosts that lose ranks and hosts, and end with the bits of a job that lost none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stageline.testing import Child, ForkServer
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
    cut: str = "",
) -> list[Child]:
    """Start a launcher on every host, with so many ranks and spares."""
    words = [*settings_of(tokens, "parts", sum(own for own, _ in hosts)), "comm.train_timeout_seconds=8"]
    launchers = []
    for number, (own, spares) in enumerate(hosts):
        place = [len(hosts), number, network.hosts[0].address, 29400, 4.0]
        arguments: list[Any] = [place, own, spares, list(on_loss), words, list(kills), cut]
        log = network.log(number)
        launchers.append(
            network.hosts[number].start(server, LAUNCHER, "launch", arguments, log=log, environment=SECRET)
        )
    return launchers


def logs(network: Network, count: int) -> str:
    return "\n".join(network.log(number).read_text()[-3000:] for number in range(count))


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
        launchers = start_launchers(network, fork_server, tokens, [(1, 0), (1, 0), (0, 1)], cut=str(cut))
        end = time.monotonic() + 100
        while not Path(f"{cut}-ready").exists():
            assert time.monotonic() < end, logs(network, 3)
            time.sleep(0.05)
        network.hosts[lost].cut()
        cut.touch()
        outputs = network.wait(launchers, 200)
        codes = [launcher.code for launcher in launchers]
        assert codes.pop(lost) == 3, outputs
        assert codes == [0, 0], outputs
        assert "cannot be reached from host" in outputs[lost]
    assert_same(tokens)
    (row,) = read_metrics(tokens.parent / "parts" / "metrics.jsonl").of("recovery")
    assert (row["action"], row["state"]) == ("spare", "memory")
    assert f"rank {lost} was on host {lost} (10.77.0.{lost + 1}), which is lost: not heard for" in row["lost"][0]

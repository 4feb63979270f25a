"""`stageline selftest`, alone and under launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stageline as sl
from stageline.cli.app import run
from stageline.selftest.selftest import run_selftest
from support.ports import free_ports

pytestmark = pytest.mark.timeout(300)


def test_ranks_compare_bits_and_measure_links(tmp_path: Path) -> None:
    results = sl.launch(run_selftest, 30.0, ["1f1b", "zb-v", "forward-only"], False, processes=2)
    assert (results[0].ranks, results[0].pairs) == (results[1].ranks, results[1].pairs)
    page, data = results[0].write(tmp_path / "out")
    facts = json.loads(data.read_text())
    assert facts["ok"]
    assert [family["verdict"] for family in facts["families"]] == ["equal", "equal", "skipped"]
    [pair] = facts["pairs"]
    assert pair["latency_us"] > 0
    assert pair["gbytes_per_s"] > 0
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert not any("SECRET" in name for rank in facts["ranks"] for name in rank["variables"])
    assert "All checks passed" in page.read_text()


def test_too_few_ranks_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sl.StagelineError, match="needs at least 2 ranks, but this job has 1"):
        run_selftest()
    assert run(["selftest", "--launcher", "rai"]) == 2
    assert "unknown launcher 'rai' (did you mean 'ray'?)" in capsys.readouterr().err


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["selftest", "--families", "zb-v,zbv-h1"]) == 2
    assert "no schedule family is named 'zbv-h1'" in capsys.readouterr().err


@pytest.mark.host_matrix
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_under_torchrun(rendezvous: str, tmp_path: Path) -> None:
    """Two agents, as on two hosts, each with one rank; every check, with the planted kill."""
    port = free_ports(1)
    options = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "selftest"],
    }[rendezvous]
    agents = []
    for node in range(2):
        own = ["--node-rank", str(node), *options] if rendezvous == "static" else options
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *own]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        agents.append(subprocess.Popen([*command, "-m", "stageline", "selftest"], env=environment, cwd=tmp_path))
    try:
        assert [agent.wait(280) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    _check(json.loads((tmp_path / "stageline-selftest.json").read_text()), "torchrun")


@pytest.mark.host_matrix
def test_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["selftest", "-n", "4"]) == 0
    assert "wrote stageline-selftest.html" in capfd.readouterr().out
    _check(json.loads(Path("stageline-selftest.json").read_text()), "processes")


def _check(facts: dict[str, Any], launcher: str) -> None:
    assert facts["problems"] == []
    assert facts["launcher"] == launcher
    ranks = len(facts["ranks"])
    assert facts["kill"]["killed"] == ranks - 1
    assert all(f"rank {ranks - 1} died" in text for text in facts["kill"]["errors"][:-1])
    assert {"1f1b", "zb-v", "dualpipe-v"} <= {row["name"] for row in facts["families"] if row["verdict"] == "equal"}
    assert len(facts["pairs"]) == ranks * (ranks - 1) // 2

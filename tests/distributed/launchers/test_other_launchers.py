"""Launchers of others: Kubernetes, SLURM, Lightning Fabric and accelerate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import stageline
from stageline.cli.train import as_settings
from stageline.common.machine import check_ports, port_range
from stageline.distributed.launchers.slurm import host_names
from stageline.train.config.config import Config

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(300)


def test_the_manifest_of_kubernetes_fits_our_variables_and_ports() -> None:
    yaml = pytest.importorskip("yaml")
    job_set, policy = yaml.safe_load_all((ROOT / "docs" / "jobset.yaml").read_text())
    [job] = job_set["spec"]["replicatedJobs"]
    indexed, pod = job["template"]["spec"], job["template"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    sources = "".join(path.read_text() for path in Path(stageline.__file__).parent.rglob("*.py"))
    assert all(name in sources for name in variables if name.startswith("STAGELINE_"))
    command = container["command"]
    options = dict(word.lstrip("-").split("=", 1) for word in command if re.match("--[a-z-]+=", word))
    assert int(options["nnodes"]) == indexed["parallelism"] == indexed["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    first = f"{job_set['metadata']['name']}-{job['name']}-0-0.{job_set['spec']['network']['subdomain']}"
    assert options["master-addr"] == first
    ranks = {"LOCAL_WORLD_SIZE": options["nproc-per-node"], "MASTER_PORT": options["master-port"]}
    check_ports(variables | ranks)
    ports = port_range(variables)
    assert ports is not None
    assert container["ports"][0]["containerPort"] == int(options["master-port"]) == ports[0]
    [sysctl] = pod["spec"]["securityContext"]["sysctls"]
    opened = {(rule["port"], rule["endPort"]) for rule in policy["spec"]["ingress"][0]["ports"]}
    assert opened == {(ports[0], ports[-1]), tuple(map(int, sysctl["value"].split()))}
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    settings = command[command.index("/job/job.toml") + 1 :]
    flags = [word.removeprefix("--set=--") for word in as_settings(settings)]
    assert Config.read(None, *flags).checkpoint.folder.startswith("s3://")


def test_host_lists_with_hard_cases() -> None:
    assert host_names("r[1-2]c[01-02]n[7,9]") == [f"r{r}c{c}n{n}" for r in (1, 2) for c in ("01", "02") for n in (7, 9)]
    assert host_names("a[008-010,100],b,c[1]-ib") == ["a008", "a009", "a010", "a100", "b", "c1-ib"]
    assert host_names("cloud-[0-1].zone-a[2-3].example") == [
        f"cloud-{first}.zone-a{second}.example" for first in (0, 1) for second in (2, 3)
    ]
    assert host_names("n[9-11]") == ["n9", "n10", "n11"]
    for text in ("n[1-", "n1]", "n[3-1]", "n[]", "n[1,,2]"):
        with pytest.raises(stageline.StagelineError, match="SLURM host list"):
            host_names(text)


def test_the_job_script_of_slurm_runs_as_it_is(tmp_path: Path) -> None:
    """With an `srun` that starts one task on each of two hosts, which are this machine."""
    page = (ROOT / "docs" / "launch.md").read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    assert script is not None
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} {tmp_path / "task.py"} "$@"\n'
    srun.write_text(python)
    srun.chmod(0o755)
    (tmp_path / "task.py").write_text(
        "import os, sys\n"
        "assert sys.argv[1:5] == ['python', '-m', 'stageline', 'train'], sys.argv\n"
        "assert len(os.environ['STAGELINE_SECRET']) == 64\n"
        "from stageline.distributed.launchers.slurm import slurm_place\n"
        "for rank in range(8):\n"
        "    place = slurm_place(os.environ | {'SLURM_PROCID': str(rank), 'SLURM_LOCALID': str(rank % 4),\n"
        "                                      'SLURM_NODEID': str(rank // 4)})\n"
        "    assert (place['RANK'], place['MASTER_ADDR']) == (str(rank), 'gpu07'), place\n"
        "print('placed')\n"
    )
    task = {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | task
    done = subprocess.run(["bash", "-c", script[1]], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "placed\n", done.stderr


def start(command: Sequence[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.host_matrix
def test_lightning_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    output = start([sys.executable, str(ROOT / "examples" / "fabric.py")], tmp_path)
    assert re.findall(r"step (\d): loss [\d.]+ on 2 ranks", output) == ["0", "1", "2"]


@pytest.mark.host_matrix
def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    output = start([*torchrun, str(ROOT / "examples" / "accelerated.py")], tmp_path)
    assert re.findall(r"step (\d): loss [\d.]+ on 2 ranks", output) == ["0", "1", "2"]

"""The place of a rank that `srun` started, from SLURM's environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stageline.common.errors import StagelineError, shorten
from stageline.common.machine import port_range

_PORTS = range(20000, 30000)
"""Of the store of rank 0; the job's number selects one, so that two jobs on a host do not meet."""


def slurm_place(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for a task of a SLURM job step; empty outside of one, and under torchrun.

    A batch script itself is not a task: only `srun` starts them.

    >>> place = slurm_place({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "71", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    ...     "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    ...     "SLURM_STEP_NODELIST": "gpu[07-08]"})
    >>> place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"], place["MASTER_ADDR"]
    ('3', '4', '1', '2', 'gpu07')
    """
    if environment.get("WORLD_SIZE") or not environment.get("SLURM_STEP_ID"):
        return {}
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    if tasks == "1" or not environment["SLURM_STEP_ID"].isdecimal():
        return {}
    missing = [name for name in names if not environment.get(name, "").isdecimal()]
    if missing or not tasks.isdecimal():
        raise StagelineError(
            f"this is a task of a SLURM job step with {shorten(tasks)} tasks, but {(*missing, 'their number')[0]} is "
            "not an integer; start the ranks with srun or torchrun"
        )
    hosts = host_names(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    per_node = tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    node = int(environment["SLURM_NODEID"])
    if not hosts or node >= len(per_node):
        raise StagelineError(
            f"SLURM lists {len(hosts)} hosts, and tasks on {len(per_node)} of them, but this is a task on host "
            f"{node}; start the ranks with srun or torchrun"
        )
    ports = port_range(environment)
    job = int(environment.get("SLURM_JOB_ID", "0")) * 7 + int(environment["SLURM_STEP_ID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or ("127.0.0.1" if len(hosts) == 1 else hosts[0]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(ports[0] if ports else _PORTS[job % len(_PORTS)]),
    }


def host_names(text: str) -> list[str]:
    """The hosts of a SLURM host list.

    >>> host_names("gpu[07-09,12],login1,rack[1-2]n[0-1]")
    ['gpu07', 'gpu08', 'gpu09', 'gpu12', 'login1', 'rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    hosts: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise StagelineError(f"the SLURM host list {shorten(text)} has brackets that do not match")
    for pattern in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for literal, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", pattern):
            endings = [literal] if literal else _numbers(numbers, text)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers of `07-09,12`, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise StagelineError(
                f"the SLURM host list {shorten(text)} contains {shorten(part)}, expected a range like 07-09"
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on every host.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise StagelineError(f"SLURM's tasks per node are {shorten(text)}, expected numbers like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts

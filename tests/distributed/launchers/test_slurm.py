"""Places of SLURM tasks."""

from __future__ import annotations

import pytest

from stageline.common.errors import StagelineError
from stageline.distributed.launchers.slurm import host_names, slurm_place, tasks_per_node

TASK = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "n[9-10]",
}  # fmt: skip


def test_a_task_takes_its_place() -> None:
    place = slurm_place(TASK)
    assert place | {"MASTER_PORT": ""} == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n9",
        "MASTER_PORT": "",
    }  # fmt: skip
    assert place["MASTER_PORT"] == slurm_place(TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})["MASTER_PORT"]
    assert place["MASTER_PORT"] != slurm_place(TASK | {"SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert place["MASTER_PORT"] != slurm_place(TASK | {"SLURM_JOB_ID": "18"})["MASTER_PORT"]


def test_the_user_may_set_the_address() -> None:
    place = slurm_place(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "4000")
    assert slurm_place(TASK | {"STAGELINE_PORTS": "29600-29609"})["MASTER_PORT"] == "29600"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "WORLD_SIZE": "4"},  # under torchrun, which srun started
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # in a batch script
        {**TASK, "SLURM_STEP_ID": "interactive"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_other_processes_have_no_place(environment: dict[str, str]) -> None:
    assert slurm_place(environment) == {}


def test_one_host_meets_on_loopback() -> None:
    here = {"SLURM_STEP_NODELIST": "n9", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    assert slurm_place(TASK | here)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not an integer"),
        ({"SLURM_STEP_NODELIST": "n[a-b]"}, "expected a range"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "expected numbers like"),
        ({"SLURM_NODEID": "5"}, "this is a task on host 5"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, str], text: str) -> None:
    with pytest.raises(StagelineError, match=text):
        slurm_place(TASK | changed)


def test_host_lists() -> None:
    assert host_names("") == []
    assert host_names("a") == ["a"]
    assert host_names("a-b[1]c,d") == ["a-b1c", "d"]
    assert host_names("n[098-101]") == ["n098", "n099", "n100", "n101"]
    assert tasks_per_node("4") == [4]

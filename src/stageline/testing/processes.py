"""Processes for tests: run a function on several ranks, and test a launcher."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from stageline.common.errors import StagelineError
from stageline.distributed.launchers.launcher import Job, Launcher, Outcome, first_failure
from stageline.distributed.launchers.processes import ProcessLauncher


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    backend: Literal["gloo", "nccl"] = "gloo",
    share_gpu: bool = False,
) -> list[Any]:
    """Call `function(rank, *arguments)` in `ranks` processes joined by torch.distributed; return their results by rank.

    The function must be importable by name. The processes find each other through a file and communicate over loopback
    alone. If a rank raises, dies or does not end in time, the call fails with its traceback. No process is left.

    With `backend="nccl"`, the default group has NCCL for tensors of GPUs beside gloo, and the rank's current device is
    its own GPU. With `share_gpu`, all ranks use GPU 0 over real NCCL: each gets the environment of a machine of its own
    (see `shared_gpu`), so that one GPU is enough to test what several would do.

    >>> import operator
    >>> run_ranks(operator.add, 2, 10)
    [10, 11]
    """
    if backend not in ("gloo", "nccl") or (share_gpu and backend != "nccl"):
        raise StagelineError(
            f'backend must be "gloo" or "nccl", share_gpu needs "nccl"; got backend={backend!r}, share_gpu={share_gpu}'
        )
    variables = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
    call = (function, arguments, timeout, backend, share_gpu)
    outcomes = ProcessLauncher(patience=0.0, share_gpus=True).run(
        Job(_run_in_group, call, processes=ranks, environment=variables, timeout=timeout)
    )
    failures = [outcome for outcome in outcomes if outcome.failure and outcome.code != -signal.SIGTERM]
    if failures:
        failures.sort(key=lambda outcome: outcome.rank)
        raise AssertionError("\n".join(_failure_text(outcome) for outcome in failures))
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def _failure_text(outcome: Outcome) -> str:
    traceback = outcome.is_traceback
    return f"rank {outcome.rank} failed:\n{outcome.failure}" if traceback else f"rank {outcome.rank} {outcome.failure}"


def shared_gpu(rank: int) -> dict[str, str]:
    """The environment in which several ranks use GPU 0 over NCCL, which refuses that to ranks of one machine.

    >>> shared_gpu(3)["NCCL_HOSTID"]
    'stageline-3'
    """
    return {
        "NCCL_HOSTID": f"stageline-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }


def _run_in_group(
    function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, backend: str, share_gpu: bool
) -> Any:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if share_gpu:
        os.environ.update(shared_gpu(rank))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    value = function(rank, *arguments)
    dist.all_reduce(torch.zeros(1))  # a barrier on the host
    dist.destroy_process_group()
    return value


def exercise_launcher(launcher: Launcher, processes: int = 2, timeout: float = 120.0) -> None:
    """Test what every launcher must do: places, results, a group, exceptions, dead ranks.

    >>> exercise_launcher(ProcessLauncher(patience=1.0))
    """

    def run(function: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        outcomes = launcher.run(Job(function, arguments, processes, {"STAGELINE_EXERCISE": "yes"}, timeout))
        ranks = sorted(outcome.rank for outcome in outcomes)
        assert ranks == list(range(processes)), f"{processes} ranks were started, and outcomes came from {ranks}"
        return outcomes

    places = {outcome.rank: outcome.value for outcome in run(_place)}
    for rank, place in places.items():
        expected = {"RANK": str(rank), "WORLD_SIZE": str(processes), "STAGELINE_EXERCISE": "yes"}
        differing = {name: place.get(name) for name, value in expected.items() if place.get(name) != value}
        assert not differing, f"rank {rank} was started with {differing}, expected {expected}"
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            assert place.get(name), f"rank {rank} was started without {name}"
    sums = [outcome.value for outcome in run(_sum_of_ranks, timeout)]
    assert sums == [sum(range(processes))] * processes, f"the sum over all ranks is {sums}"
    last = processes - 1
    failure = first_failure(run(_raise_on, last))
    assert failure is not None and failure.rank == last, f"rank {last} raised an exception, but {failure} was reported"
    assert "planted" in failure.failure, f"the traceback of rank {last} is missing: {failure.failure}"
    death = first_failure(run(_die_on, last))
    assert death is not None and death.rank == last, f"rank {last} died, but {death} was reported"


def _place() -> dict[str, str]:
    return dict(os.environ)


def _sum_of_ranks(timeout: float) -> float:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def _raise_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise ValueError("planted")


def _die_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)

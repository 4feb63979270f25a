"""Running a function on several real processes in a test: started, bounded in time, and gone afterwards."""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Call `function(rank, *arguments)` in so many processes joined by gloo; give back what each returned, by rank.

    The function must be importable by name. Processes find each other through a file and talk over loopback alone. A
    rank that raises, dies or does not end in time fails the call with its traceback, and no process is left.
    """
    # Forked from a server that has imported torch once: importing it anew takes seconds for every process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stageline.runtime.pipeline", "stageline.testing.conformance"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="stageline-") as folder:
        meeting = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_child,
                args=(function, rank, ranks, meeting, timeout, answers, arguments, dict(os.environ)),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        try:
            while len(found) < ranks and time.monotonic() < end and all(ok for ok, _ in found.values()):
                while not answers.empty():
                    rank, ok, value = answers.get()
                    found[rank] = (ok, value)
                dead = [rank for rank, process in enumerate(processes) if not process.is_alive() and rank not in found]
                if dead and answers.empty():
                    codes = {rank: processes[rank].exitcode for rank in dead}
                    raise AssertionError(f"ranks died without an answer, with exit codes {codes}")
                time.sleep(0.01)
        finally:
            for process in processes:
                process.join(timeout=2.0 if len(found) == ranks else 0.0)
                if process.is_alive():
                    process.kill()
                process.join()
    failed = {rank: value for rank, (ok, value) in found.items() if not ok}
    if failed:
        raise AssertionError("\n".join(f"rank {rank} failed:\n{value}" for rank, value in sorted(failed.items())))
    if len(found) < ranks:
        missing = sorted(set(range(ranks)) - set(found))
        raise AssertionError(f"ranks {missing} did not end within {timeout:g} s")
    return [pickle.loads(found[rank][1]) for rank in range(ranks)]


def _child(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    meeting: str,
    timeout: float,
    answers: Any,
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the server that this process comes from may have an older one
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(meeting, ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        # As bytes: tensors put into a queue as they are travel by handles that end with this process.
        answers.put((rank, True, pickle.dumps(function(rank, *arguments))))
        dist.barrier()
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # a forked process ends without them, and others would take it for one that died
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        answers.close()
        answers.join_thread()
        os._exit(1)

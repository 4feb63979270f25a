"""Running a function on several processes in a test, with a timeout and no process left behind."""

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
    """Call `function(rank, *arguments)` in `ranks` processes joined by gloo; return their results by rank.

    The function must be importable by name. The processes find each other through a file and communicate over loopback
    alone. If a rank raises, dies or does not end in time, the call fails with its traceback. No process is left.
    """
    # Forked from a server that has imported torch: importing it again takes seconds for every process.
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
        results: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        try:
            while len(results) < ranks and time.monotonic() < end and all(ok for ok, _ in results.values()):
                while not answers.empty():
                    rank, ok, value = answers.get()
                    results[rank] = (ok, value)
                dead = [
                    rank for rank, process in enumerate(processes) if not process.is_alive() and rank not in results
                ]
                if dead and answers.empty():
                    codes = {rank: processes[rank].exitcode for rank in dead}
                    raise AssertionError(f"ranks died without an answer, with exit codes {codes}")
                time.sleep(0.01)
        finally:
            for process in processes:
                process.join(timeout=2.0 if len(results) == ranks else 0.0)
                if process.is_alive():
                    process.kill()
                process.join()
    failed = {rank: value for rank, (ok, value) in results.items() if not ok}
    if failed:
        raise AssertionError("\n".join(f"rank {rank} failed:\n{value}" for rank, value in sorted(failed.items())))
    if len(results) < ranks:
        missing = sorted(set(range(ranks)) - set(results))
        raise AssertionError(f"ranks {missing} did not end within {timeout:g} s")
    return [pickle.loads(results[rank][1]) for rank in range(ranks)]


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
    os.environ.update(environment)  # the server's environment may be older
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
        # Pickled here: a queue would pass tensors as handles, which end with this process.
        answers.put((rank, True, pickle.dumps(function(rank, *arguments))))
        dist.barrier()
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # a forked process ends without them, and others would consider it dead
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        answers.close()
        answers.join_thread()
        os._exit(1)

"""Processes for tests: run a function on several ranks, or start processes that a test may kill."""

from __future__ import annotations

import atexit
import datetime
import importlib.util
import json
import multiprocessing
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from stageline.common.errors import StagelineError


class Child:
    """A process that a fork server started."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        """The exit code, as in `subprocess`: negative for a signal; None while it runs."""
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        self._server.read_events(0.0)
        return self.code

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, and return the exit code."""
        end = time.monotonic() + timeout
        while self.code is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
            self._server.read_events(0.05)
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """Starts functions of a script in new processes, within milliseconds.

    >>> _ = Path("job.py").write_text("import sys\\ndef work(code): sys.exit(code)")
    >>> with ForkServer() as server:
    ...     child = server.start("job.py", "work", [3], log="job.log")
    ...     child.wait(timeout=60)
    3
    """

    def __init__(self) -> None:
        """Start the server; it ends with this process, and all its children with it."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from stageline.testing.processes import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._children: dict[int, Child] = {}
        self._started: list[int] = []
        self._buffer = b""

    def start(
        self,
        script: str | Path,
        function: str,
        arguments: Sequence[Any] = (),
        *,
        log: str | Path,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Call a function of a script in a new process, whose output goes to the log."""
        order = {
            "script": str(Path(script).resolve()),
            "function": function,
            "arguments": list(arguments),
            "environment": dict(environment or {}),
            "log": str(Path(log).resolve()),
            "folder": os.getcwd(),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        end = time.monotonic() + 60
        while not self._started:
            if time.monotonic() > end:
                raise TimeoutError("the fork server did not start a process within 60 s")
            self.read_events(0.1)
        return self._children[self._started.pop(0)]

    def close(self) -> None:
        """Kill all processes, and end the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read_events(self, timeout: float) -> None:
        """Handle what the server reports within this many seconds."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], timeout)[0]:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise RuntimeError(f"the fork server ended by itself, with code {self._process.wait()}")
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                pid, code = json.loads(line)
                if code is None:
                    self._children[pid] = Child(self, pid)
                    self._started.append(pid)
                else:
                    self._children[pid].code = code
            timeout = 0.0


def main() -> None:
    """Read a line for every process to start; write a line when it has started and when it has ended."""
    importlib.import_module("stageline.runtime.pipeline")  # what every rank will need
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno())
    running: set[int] = set()
    functions: dict[str, Any] = {}
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(reader, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if reader.fileno() in ready:
                reader.recv(4096)
                _reap(running)
            if 0 not in ready:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                work = _fork(json.loads(line), running, functions)
                if work is not None:
                    selector.close()
                    return work()  # and end as an interpreter does
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _reap(running: set[int]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            _report(pid, os.waitstatus_to_exitcode(status))


def _report(pid: int, code: int | None) -> None:
    os.write(1, json.dumps([pid, code]).encode() + b"\n")


def _fork(order: dict[str, Any], running: set[int], functions: dict[str, Any]) -> Callable[[], None] | None:
    """Fork; return None in the server, and the function to call in the child."""
    script = order["script"]
    if script not in functions:
        spec = importlib.util.spec_from_file_location(Path(script).stem, script)
        assert spec is not None and spec.loader is not None
        functions[script] = sys.modules[Path(script).stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(functions[script])
    pid = os.fork()
    if pid:
        running.add(pid)
        _report(pid, None)
        return None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    return lambda: getattr(functions[script], order["function"])(*order["arguments"])


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
            f'backend is "gloo" or "nccl", and share_gpu needs "nccl"; got backend={backend!r}, share_gpu={share_gpu}'
        )
    # Forked from a server that has imported torch: importing it again takes seconds for every process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stageline.runtime.pipeline", "stageline.testing.conformance"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="stageline-") as folder:
        meeting = str(Path(folder) / "store")
        common = (ranks, meeting, timeout, backend, answers, arguments)
        processes = [
            context.Process(
                target=_child,
                args=(function, rank, _environment(rank, share_gpu), *common),
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


def _environment(rank: int, share_gpu: bool) -> dict[str, str]:
    return {**os.environ, **(shared_gpu(rank) if share_gpu else {})}


def _child(
    function: Callable[..., Any],
    rank: int,
    environment: dict[str, str],
    ranks: int,
    meeting: str,
    timeout: float,
    backend: str,
    answers: Any,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the server's environment may be older
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=dist.FileStore(meeting, ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        # Pickled here: a queue would pass tensors as handles, which end with this process.
        answers.put((rank, True, pickle.dumps(function(rank, *arguments))))
        dist.all_reduce(torch.zeros(1))  # a barrier on the host
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # a forked process ends without them, and others would consider it dead
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        answers.close()
        answers.join_thread()
        os._exit(1)

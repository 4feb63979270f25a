"""A process that has imported torch and Stageline, and forks ranks within milliseconds."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stageline.common import interrupts
from stageline.common.errors import StagelineError
from stageline.distributed.launchers.remote_calls import write_call

START = 300.0
"""Seconds in which the server must start a process; a busy machine imports torch for minutes."""
SERVER = "stageline.distributed.launchers.fork_server_process"
"""The module that runs in the server; importing it here would import torch."""


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
    """Starts functions in new processes, within milliseconds.

    >>> _ = Path("job.py").write_text("import sys\\ndef work(code): sys.exit(code)")
    >>> with ForkServer() as server:
    ...     child = server.start("job.py", "work", [3], log="job.log")
    ...     child.wait(timeout=60)
    3
    """

    def __init__(self) -> None:
        """Start the server; it ends with this process, and all its children with it."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # Signals of a terminal reach the ranks and the launcher, not an import in the server.
                [
                    sys.executable,
                    "-c",
                    "import signal; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, "
                    f"signal.SIGTERM)]; from {SERVER} import main; main({theirs.fileno()})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.ended = ""
        """How the server ended, if it was killed."""
        self._children: dict[int, Child] = {}
        self._started: list[Child] = []
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
        """Call a function of a script in a new process, whose output goes to the log.

        The environment is that of this process, with these variables.
        """
        work = {"script": str(Path(script).resolve()), "function": function, "arguments": list(arguments)}
        return self._order(work | {"log": str(Path(log).resolve())}, {**os.environ, **(environment or {})})

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in the server, so that processes that start later need not."""
        if modules:
            self._socket.sendall(json.dumps({"import": list(modules)}).encode() + b"\n")

    def remove_at_end(self, folder: Path) -> None:
        """Let the server remove a folder when it ends, which it does when this process is killed."""
        self._socket.sendall(json.dumps({"remove": str(folder)}).encode() + b"\n")

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: str | Path | None = None,
        answers: bool = True,
    ) -> Child:
        """Call a function that can be imported by name in a new process with this whole environment.

        The process reads the call from `folder`, and writes its answer there (see `read_answer`). Without a log, its
        output goes to the output of this process. Without `answers`, it ends as an interpreter does: an exception is
        printed, too.
        """
        write_call(folder, function, arguments)
        order = {"call": str(folder), "answers": answers, "log": None if log is None else str(Path(log).resolve())}
        return self._order(order, environment)

    def _order(self, work: Mapping[str, Any], environment: Mapping[str, str]) -> Child:
        order = {**work, "environment": dict(environment), "folder": os.getcwd()}
        sys.stdout.flush()
        sys.stderr.flush()
        line = json.dumps(order).encode() + b"\n"
        with suppress(BrokenPipeError):
            sent = socket.send_fds(self._socket, [line], [1, 2])
            self._socket.sendall(line[sent:])
        end = time.monotonic() + START
        while not self._started:
            if self.ended:
                raise StagelineError(f"{self.ended}: start the job again")
            if time.monotonic() > end:
                raise StagelineError(
                    f"the process that starts the ranks did not finish its imports within {START:g} s: start the job "
                    "again when this machine is less busy"
                )
            self.read_events(0.1)
        return self._started.pop(0)  # it may have ended already

    def close(self) -> None:
        """Kill all processes, and end the server."""
        self._kill_idle()
        self._socket.close()
        self._process.wait(60)

    def _kill_idle(self) -> None:
        """Kill a server without processes, which may be in the middle of its imports."""
        if not self._children:
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read_events(self, timeout: float) -> None:
        """Handle what the server reports within this many seconds."""
        while not self.ended and select.select([self._socket], [], [], timeout)[0]:
            data = b""
            with suppress(ConnectionError):
                data = self._socket.recv(1 << 16)
            if not data:
                self._end_with_server()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                pid, code = json.loads(line)
                if code is None:
                    self._children[pid] = Child(self, pid)
                    self._started.append(self._children[pid])
                else:
                    self._children.pop(pid).code = code
            timeout = 0.0

    def _end_with_server(self) -> None:
        """Note that the server was killed, perhaps for lack of memory, and its processes with it."""
        self.ended = f"the process that starts the ranks ended by itself, with code {self._process.wait()}"
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.code = -signal.SIGKILL
        self._children.clear()


def shared_server() -> ForkServer:
    """The fork server of this process: started when it is first needed, closed at exit."""
    server = _shared_server()
    server.read_events(0.0)
    if server.ended:
        _shared_server.cache_clear()
        server = _shared_server()
    return server


@cache
def _shared_server() -> ForkServer:
    server, owner = ForkServer(), os.getpid()

    def close() -> None:
        if os.getpid() == owner:
            server.close()

    atexit.register(close)
    interrupts.at_end(server._kill_idle)
    return server

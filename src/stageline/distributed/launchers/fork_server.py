"""A process that has imported torch and Stageline, and forks ranks within milliseconds."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import multiprocessing.spawn
import os
import pickle
import pickletools
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from stageline.common import interrupts
from stageline.common.errors import StagelineError, shorten
from stageline.common.files import atomic_file

START = 300.0
"""Seconds in which the server must start a process; a busy machine imports torch for minutes."""
PR_SET_PDEATHSIG = 1
"""The operation of Linux' prctl that sets which signal a process gets when its parent ends."""
PRELOADED = ("stageline.runtime.pipeline", "torch._dynamo")
"""What every rank will need, the latter when an optimizer first steps; importing it takes seconds."""


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
                    f"signal.SIGTERM)]; from {__name__} import main; main({theirs.fileno()})",
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
        # What `multiprocessing` sends to a process that it spawns: the module search path, and the main module.
        work = pickle.dumps((function, tuple(arguments)))
        main = ("init_main_from_name", "init_main_from_path") if _in_main(work) else ()
        everything = multiprocessing.spawn.get_preparation_data("stageline")
        preparation = {name: everything[name] for name in ("sys_path", "sys_argv", *main) if name in everything}
        with atomic_file(folder / "call") as file:
            pickle.dump(preparation, file)
            file.write(work)
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


def check_call(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuse a function that processes cannot import, and arguments that cannot be sent to them."""
    if _imports_main:
        raise StagelineError(
            "ranks import the main program, and this one starts ranks when it is imported; put that call under "
            'if __name__ == "__main__":'
        )
    name = getattr(function, "__qualname__", None) or shorten(function)
    try:
        pickle.dumps(function)
    except Exception as error:
        raise StagelineError(
            f"ranks cannot import {name} ({error}); define it with def at the top level of a module, and pass what it "
            "needs as arguments"
        ) from error
    try:
        work = pickle.dumps((function, tuple(arguments)))
    except Exception as error:
        raise StagelineError(
            f"the arguments of {name} cannot be sent to the ranks ({error}); pass values that can be pickled"
        ) from error
    main = sys.modules["__main__"]
    if _in_main(work) and main.__spec__ is None and not Path(getattr(main, "__file__", None) or "").is_file():
        raise StagelineError(
            f"ranks cannot import {name} or its arguments from the main program, which is not a file but a session, "
            "standard input or python -c; save it as a file, or define them in a module"
        )


def _in_main(work: bytes) -> bool:
    """Whether the main module has to be imported to read a call; in a process that was started so, it has two names."""
    names = ("__main__", "__mp_main__")
    if not any(name.encode() in work for name in names):
        return False
    return any(argument in names for _, argument, _ in pickletools.genops(work))


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


class Answer(NamedTuple):
    """How a call ended."""

    value: Any
    error: BaseException | None
    """Its exception, if it can be pickled."""
    failure: str
    """The traceback of its exception; empty if it returned."""
    moment: float
    """When, by the monotonic clock that all processes of a machine share."""


def read_answer(folder: Path) -> Answer | None:
    """The answer of a call; None if the process has not written one."""
    try:
        return Answer(*pickle.loads((folder / "answer").read_bytes()))
    except FileNotFoundError:
        return None


_imports_main = False
"""Whether this process was started for a call, and imports the main program of its launcher."""


def main(descriptor: int) -> None:
    """Read a line for every process to start; write a line when it has started and when it has ended."""
    for name in PRELOADED:
        importlib.import_module(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process would wait forever for threads that computed in the server
    orders = socket.socket(fileno=descriptor)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno())
    running: set[int] = set()
    folders: set[str] = set()
    modules: dict[str, Any] = {}
    buffer, outputs = b"", [0, 0]
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(reader, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if reader.fileno() in ready:
                reader.recv(4096)
                _reap(running, orders)
            if descriptor not in ready:
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 2)
            except ConnectionError:
                break
            outputs = descriptors or outputs
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "import" in order:
                    _preload(order["import"])
                    continue
                if "remove" in order:
                    folders.add(order["remove"])
                    continue
                work = _fork(order, running, modules, orders, outputs)
                if work is not None:
                    selector.close()
                    torch.set_num_threads(_threads_of(order["environment"]) or threads)
                    return work()  # and end as an interpreter does
                for output in outputs:
                    os.close(output)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without tearing the interpreter down, which takes long with torch


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        with suppress(Exception):  # a process that needs it reports why it fails
            importlib.import_module(name)


def _reap(running: set[int], orders: socket.socket) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            _report(orders, pid, os.waitstatus_to_exitcode(status))


def _report(orders: socket.socket, pid: int, code: int | None) -> None:
    with suppress(ConnectionError):  # the launcher was killed: there is no next order either
        orders.sendall(json.dumps([pid, code]).encode() + b"\n")


def _fork(
    order: dict[str, Any], running: set[int], modules: dict[str, Any], orders: socket.socket, outputs: Sequence[int]
) -> Callable[[], None] | None:
    """Fork; return None in the server, and the function to call in the child."""
    script = order.get("script")
    if script is not None and script not in modules:
        spec = importlib.util.spec_from_file_location(Path(script).stem, script)
        assert spec is not None
        assert spec.loader is not None
        modules[script] = sys.modules[Path(script).stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[script])
    pid = os.fork()
    if pid:
        running.add(pid)
        _report(orders, pid, None)
        return None
    _die_with_parent()
    gc.freeze()  # what the server imported stays: to collect it at the end would take each process a second
    orders.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    nothing, (out, error) = os.open(os.devnull, os.O_RDONLY), outputs
    if order["log"] is not None:
        out = error = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (out, 1), (error, 2)):
        os.dup2(source, target)
    for descriptor in {nothing, out, error, *outputs} - {0, 1, 2}:
        os.close(descriptor)
    if script is not None:
        return lambda: getattr(modules[script], order["function"])(*order["arguments"])
    return lambda: _called(Path(order["call"]), answers=order["answers"])


def _die_with_parent() -> None:
    """Let the kernel kill this process when the server is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _threads_of(environment: Mapping[str, str]) -> int:
    """The number of threads that a new interpreter would compute with by this environment; 0 if it says nothing."""
    threads = environment.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else 0


def _called(folder: Path, *, answers: bool) -> None:
    """Run a call, and write its answer."""
    failed: Exception | None = None
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the function runs, Ctrl-C is not worth a traceback
        function, arguments = _read_call(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        value = function(*arguments)
        answer = _success(value if answers else None)
    except Exception as error:
        answer, failed = _failure(error), error
    with atomic_file(folder / "answer") as file:
        file.write(answer)
    if failed is not None and not answers:
        sys.last_value = failed  # as the interpreter does
        sys.excepthook(type(failed), failed.with_traceback(_users_traceback(failed)), failed.__traceback__)
        sys.exit(1)
    if answers:  # without tearing the interpreter down, which takes long with torch
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    global _imports_main
    with (folder / "call").open("rb") as file:
        _imports_main = True
        multiprocessing.spawn.prepare(pickle.load(file))
        _imports_main = False
        function, arguments = pickle.load(file)
    return function, arguments


def _success(value: Any) -> bytes:
    now = time.monotonic()
    try:
        return pickle.dumps((value, None, "", now))
    except Exception as error:
        raise StagelineError(
            f"the result of the function, a {type(value).__name__}, cannot be sent back ({error}); return a value that "
            "can be pickled"
        ) from error


def _failure(error: Exception) -> bytes:
    text, now = traceback.format_exc(), time.monotonic()
    for sent in (error, ExceptionParts(error, vars(error)), ExceptionParts(error, {})):
        with suppress(Exception):  # whatever a user's exception does when it is pickled
            answer = pickle.dumps((None, sent, text, now))
            pickle.loads(answer)
            return answer
    return pickle.dumps((None, None, text, now))


class ExceptionParts:
    """An exception that arrives whole although its class cannot be called with `args`, as pickle would call it.

    >>> error = UnicodeError("text")
    >>> pickle.loads(pickle.dumps(ExceptionParts(error, vars(error))))
    UnicodeError('text')
    """

    def __init__(self, error: BaseException, attributes: Mapping[str, Any]) -> None:
        self._error, self._attributes = error, dict(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make the exception."""
        return _exception, (type(self._error), self._error.args, self._attributes)


def _exception(kind: type[BaseException], arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


def _users_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an exception without the frames that called the user's code."""
    ours = ("stageline.distributed.launchers.", "stageline.cli.", "runpy")
    at = error.__traceback__
    while at is not None and at.tb_next is not None and str(at.tb_frame.f_globals.get("__name__")).startswith(ours):
        at = at.tb_next
    return at

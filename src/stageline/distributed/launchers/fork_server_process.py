"""The process of a fork server: it has imported torch and Stageline, and forks when it is told to."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stageline.distributed.launchers.remote_calls import run_call

PR_SET_PDEATHSIG = 1
"""The operation of Linux' prctl that sets which signal a process gets when its parent ends."""
PRELOADED = ("stageline.runtime.pipeline", "torch._dynamo")
"""What every rank will need, the latter when an optimizer first steps; importing it takes seconds."""


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
    return lambda: run_call(Path(order["call"]), answers=order["answers"])


def _die_with_parent() -> None:
    """Let the kernel kill this process when the server is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _threads_of(environment: Mapping[str, str]) -> int:
    """The number of threads that a new interpreter would compute with by this environment; 0 if it says nothing."""
    threads = environment.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else 0

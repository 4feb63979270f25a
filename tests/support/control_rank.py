"""A rank for tests of the failure monitor: a process that evaluates lines from stdin.

A line is a Python expression with `control` in scope; the answer is its value as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stageline.faults.monitor import EVERYONE, Failure, MonitorClient


def share_by_file(path: Path, rank: int, text: str) -> str:
    """Rank 0 writes the address, and the others wait for it."""
    if rank == 0:
        aside = path.with_suffix(".aside")
        aside.write_text(text)
        aside.rename(path)
    end = time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError("no address came")
        time.sleep(0.01)
    return path.read_text()


def fail(control: MonitorClient, what: str, secondary: bool = False) -> None:
    """Raise, and report it."""
    try:
        raise ArithmeticError(what)
    except ArithmeticError as error:
        control.report(Failure.of(error, control.doing, secondary=secondary))


def leave_a_child() -> int:
    """Fork a child that outlives this process, as a data loader may."""
    child = os.fork()
    if child == 0:
        os.close(0)
        os.close(1)
        time.sleep(600)
        os._exit(0)
    return child


def raise_outside() -> None:
    """End this script by an exception that nobody catches."""
    raise KeyError("planted outside of a step")


def step(control: MonitorClient, doing: Any, waits: int | None) -> None:
    """Begin a step, and send a heartbeat at once."""
    control.begin()
    control.doing, control.waits = doing, waits
    control.beat()


def collective() -> None:
    """Block the main thread endlessly in native code that no signal interrupts, as a collective does."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # all zeros is a mutex that nobody holds
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def files() -> list[str]:
    """The open files of this process."""
    with os.scandir("/proc/self/fd") as entries:
        return [os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path)]


def main() -> None:
    rank, ranks, deadline, start_deadline = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    meeting = Path(sys.argv[5])
    control = MonitorClient.start(
        rank,
        ranks,
        lambda text: share_by_file(meeting, rank, text),
        deadline,
        start_deadline=start_deadline,
        patience=float(os.environ.get("PATIENCE", "inf")),
    )
    scope = {
        **{function.__name__: function for function in (fail, leave_a_child, raise_outside, step, collective, files)},
        "control": control,
        "EVERYONE": EVERYONE,
        "sys": sys,
        "os": os,
        "time": time,
        "threading": threading,
        "subprocess": subprocess,
    }
    for line in sys.stdin:
        value: Any = eval(line, scope)
        if hasattr(value, "to_json"):
            value = {**value.to_json(), "sentence": str(value)}
        print(json.dumps(value, default=str), flush=True)


if __name__ == "__main__":
    main()

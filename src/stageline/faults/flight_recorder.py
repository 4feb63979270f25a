"""The flight recorder: the last actions and messages of a rank, written to one file when a step fails.

It costs a tuple and an append for each action and message. `stageline doctor` reads the files; `docs/faults.md`
describes the format.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stageline._version import __version__
from stageline.common.checked_json import check_format, from_json, parse_json
from stageline.common.errors import FlightError, JsonError
from stageline.common.files import atomic_file, read_text
from stageline.faults.monitor.verdict import Verdict, describe

FORMAT = "stageline-flight"
VERSION = 1
MAX_FILE_SIZE = 64 * 2**20
MAX_RANKS = 2**20
KEPT = 256
"""How many actions, sent messages and received messages a recorder keeps."""


class FinishedAction(NamedTuple):
    """An action that a rank finished. Times are from `time.perf_counter` in memory and from the wall clock in files."""

    kind: str
    stage: int
    microbatch: int
    step: int
    start: float
    end: float

    def __str__(self) -> str:
        return f"{describe((self.kind, self.stage, self.microbatch))}, step {self.step}"


class PassedMessage(NamedTuple):
    """A message that a rank sent or received."""

    peer: int
    traffic: str
    stage: int
    """The stage that it comes from."""
    microbatch: int
    step: int
    time: float
    bytes: int

    def __str__(self) -> str:
        what = "output" if self.traffic == "forward" else "gradient"
        return f"the {what} of stage {self.stage}, microbatch {self.microbatch}, step {self.step}"


class FlightRecorder:
    """Keeps the last actions and messages of one rank: append tuples of `FinishedAction` and `PassedMessage` fields.

    >>> flight = FlightRecorder(rank=0, ranks=2, job="example")
    >>> flight.actions.append(("F", 0, 3, 7, 1.0, 1.5))
    >>> flight.sent.append((1, "forward", 0, 3, 7, 1.5, 4096))
    >>> path = flight.write("flights", doing=("B", 0, 0), waits=1, awaited="the gradient of stage 1")
    >>> path.name
    'stageline-flight-example-rank0.json'
    >>> record = read_flight(path)
    >>> str(record.actions[-1]), record.doing, record.waits
    ('F of stage 0, microbatch 3, step 7', 'B of stage 0, microbatch 0', 1)
    """

    def __init__(self, rank: int, ranks: int, job: str = "alone", size: int = KEPT) -> None:
        """`job` is a name that all ranks of a run share: see `MonitorClient.job`."""
        self.rank = rank
        self.ranks = ranks
        self.job = job
        self.schedule: dict[str, Any] = {}
        """The name and the sizes of the schedule."""
        self.actions: deque[tuple[str, int, int, int, float, float]] = deque(maxlen=size)
        self.sent: deque[tuple[int, str, int, int, int, float, int]] = deque(maxlen=size)
        self.received: deque[tuple[int, str, int, int, int, float, int]] = deque(maxlen=size)

    def write(
        self,
        folder: str | Path | None = None,
        *,
        verdict: Verdict | None = None,
        doing: object = None,
        waits: int | None = None,
        awaited: str = "",
        since: float | None = None,
        lost: str | None = None,
    ) -> Path:
        """Write the record atomically, replacing an earlier one of this job and rank; any thread may call this.

        `waits` is the rank that this one waits for, `awaited` what it waits for, `since` when that began
        (`time.perf_counter`), and `lost` why there is no control channel. Raises OSError if it cannot write.
        """
        target = flight_folder(folder) / f"{FORMAT}-{_file_name(self.job)}-rank{self.rank}.json"
        wall = time.time() - time.perf_counter()
        torch = sys.modules.get("torch")
        data = {
            "format": FORMAT,
            "version": VERSION,
            "job": self.job,
            "rank": self.rank,
            "ranks": self.ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written": time.time(),
            "versions": {
                "stageline": __version__,
                "python": platform.python_version(),
                "torch": None if torch is None else str(getattr(torch, "__version__", None)),
            },
            "schedule": self.schedule,
            "doing": describe(doing),
            "waits": waits,
            "awaited": awaited,
            "since": None if since is None else since + wall,
            "control_lost": lost,
            "verdict": None if verdict is None else verdict.to_json(),
            "actions": [[*place, start + wall, end + wall] for *place, start, end in _copy(self.actions)],
            "sent": [[*place, moment + wall, size] for *place, moment, size in _copy(self.sent)],
            "received": [[*place, moment + wall, size] for *place, moment, size in _copy(self.received)],
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file:
            file.write(json.dumps(data).encode())
        return target


_folders: list[str | Path] = ["stageline-flight"]
"""The default folder, and those of `flights_into` blocks around the caller."""


def flight_folder(folder: str | Path | None = None) -> Path:
    """Return where records go: `folder`, STAGELINE_FLIGHT_DIR, the folder of `flights_into`, or `stageline-flight`."""
    return Path(folder or os.environ.get("STAGELINE_FLIGHT_DIR") or _folders[-1])


def worth_writing(verdict: Verdict | None) -> bool:
    """Whether to write records of a failure.

    If STAGELINE_FLIGHT_DIR or a training job chose a folder, every failure has records. Otherwise a failure that its
    traceback explains leaves none in the working directory.
    """
    chosen = bool(os.environ.get("STAGELINE_FLIGHT_DIR")) or len(_folders) > 1
    return chosen or verdict is None or not verdict.explained


@contextmanager
def flights_into(folder: str | Path) -> Iterator[None]:
    """Write the records of this process, from all its threads, into a folder, unless STAGELINE_FLIGHT_DIR names one.

    >>> with flights_into("outputs/flight"):
    ...     flight_folder().as_posix()
    'outputs/flight'
    """
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".")[:80] or "alone"


Item = TypeVar("Item")


def _copy(ring: deque[Item]) -> list[Item]:
    """Copy a ring that another thread may be appending to."""
    while True:
        try:
            return list(ring)
        except RuntimeError:
            continue


@dataclass(frozen=True)
class FlightRecord:
    """One rank's flight record, as it was read."""

    job: str
    rank: int
    ranks: int
    host: str
    pid: int
    written: float
    doing: str
    waits: int | None
    awaited: str
    since: float | None
    control_lost: str | None
    verdict: Verdict | None
    versions: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[FinishedAction, ...] = ()
    sent: tuple[PassedMessage, ...] = ()
    received: tuple[PassedMessage, ...] = ()


def read_flight(path: str | Path) -> FlightRecord:
    """Read the flight record of one rank."""
    source = Path(path)
    text = read_text(source, "flight record", FlightError, MAX_FILE_SIZE)
    try:
        data = check_format(parse_json(text, allow_nan=True), FORMAT, VERSION, "flight record")
        flight = from_json(FlightRecord, data, "flight record", prefix="")
        if not 0 <= flight.rank < flight.ranks <= MAX_RANKS:
            raise JsonError(f"'rank' is {flight.rank} of {flight.ranks}")
    except JsonError as error:
        raise FlightError(f"{source}: {error}") from None
    return flight


def find_flights(paths: Iterable[str | Path]) -> list[Path]:
    """Return the given files, and the records in the given folders."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob(f"{FORMAT}-*-rank*.json"))
            if not inside:
                raise FlightError(
                    f"{path} has no flight records: no file is named {FORMAT}-JOB-rankN.json; ranks write them when a "
                    "step fails"
                )
            files += inside
        else:
            files.append(path)
    return files


def merge(records: Iterable[FlightRecord]) -> tuple[dict[int, FlightRecord], list[str]]:
    """Return the newest job's records by rank, and the names of the other jobs."""
    jobs: dict[str, dict[int, FlightRecord]] = {}
    for record in sorted(records, key=lambda record: record.written):
        jobs.setdefault(record.job, {})[record.rank] = record
    if not jobs:
        raise FlightError("no flight records were passed")
    newest = max(jobs, key=lambda job: max(record.written for record in jobs[job].values()))
    sizes = {record.ranks for record in jobs[newest].values()}
    if len(sizes) > 1:
        raise FlightError(f"records of job {newest} disagree on its number of ranks: {sorted(sizes)}")
    return dict(sorted(jobs[newest].items())), sorted(set(jobs) - {newest})

"""The flight record: the last things that a rank did, sent and received, written to one file when a step fails.

Keeping it costs a tuple and an append for each action and message. `stageline doctor` reads the files; see
`docs/faults.md` for the format. Nothing here imports torch.
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
"""Actions, and messages each way, that are kept."""


class Done(NamedTuple):
    """An action that a rank finished; times are of `time.perf_counter` in memory and of the wall clock in a file."""

    kind: str
    stage: int
    microbatch: int
    step: int
    start: float
    end: float

    def __str__(self) -> str:
        """Say it as an error would."""
        return f"{describe((self.kind, self.stage, self.microbatch))}, step {self.step}"


class Passed(NamedTuple):
    """A message that a rank sent or received."""

    peer: int
    traffic: str
    stage: int
    """The stage that it is from."""
    microbatch: int
    step: int
    time: float
    bytes: int

    def __str__(self) -> str:
        """Say it as an error would."""
        what = "output" if self.traffic == "forward" else "gradient"
        return f"the {what} of stage {self.stage}, microbatch {self.microbatch}, step {self.step}"


class Flight:
    """What one rank remembers of its last actions and messages; append plain tuples in the order of the fields.

    >>> flight = Flight(rank=0, ranks=2, job="example")
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
        """`job` is a name that all ranks of a run share: see `Control.job`."""
        self.rank = rank
        self.ranks = ranks
        self.job = job
        self.schedule: dict[str, Any] = {}
        """Its name and sizes, as they shall be written."""
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
        """Write the record, whole or not at all; a later one of this job and rank takes the place of the earlier.

        `waits` is the rank that is waited for, `awaited` what for, `since` when that began (`time.perf_counter`), and
        `lost` why there is no control channel. May be called from any thread. Raises OSError where it cannot write.
        """
        target = flight_folder(folder) / f"{FORMAT}-{_plain(self.job)}-rank{self.rank}.json"
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
            "actions": [[*each[:4], each[4] + wall, each[5] + wall] for each in _copy(self.actions)],
            "sent": [[*each[:5], each[5] + wall, each[6]] for each in _copy(self.sent)],
            "received": [[*each[:5], each[5] + wall, each[6]] for each in _copy(self.received)],
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file:
            file.write(json.dumps(data).encode())
        return target


_usual: list[str | Path] = ["stageline-flight"]


def flight_folder(folder: str | Path | None = None) -> Path:
    """Where records are written: the folder given, that of STAGELINE_FLIGHT_DIR, or `stageline-flight` here.

    Inside of `flights_into`, its folder takes the place of the last.
    """
    return Path(folder or os.environ.get("STAGELINE_FLIGHT_DIR") or _usual[-1])


def worth_writing(verdict: Verdict | None) -> bool:
    """Whether a failure deserves records; one that its traceback explains leaves none in the working directory.

    Where a folder for records was chosen, by STAGELINE_FLIGHT_DIR or by a training job, every failure has them.
    """
    chosen = bool(os.environ.get("STAGELINE_FLIGHT_DIR")) or len(_usual) > 1
    return chosen or verdict is None or not verdict.explained


@contextmanager
def flights_into(folder: str | Path) -> Iterator[None]:
    """Write the records of this process into a folder, on all its threads, unless STAGELINE_FLIGHT_DIR names one.

    >>> with flights_into("outputs/flight"):
    ...     flight_folder().as_posix()
    'outputs/flight'
    """
    _usual.append(folder)
    try:
        yield
    finally:
        _usual.remove(folder)


def _plain(name: str) -> str:
    """A name that is safe in a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".")[:80] or "alone"


Item = TypeVar("Item")


def _copy(ring: deque[Item]) -> list[Item]:
    """A copy of what another thread may be appending to."""
    while True:
        try:
            return list(ring)
        except RuntimeError:
            continue


@dataclass(frozen=True)
class Record:
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
    actions: tuple[Done, ...] = ()
    sent: tuple[Passed, ...] = ()
    received: tuple[Passed, ...] = ()


def read_flight(path: str | Path) -> Record:
    """Read the flight record of one rank."""
    source = Path(path)
    text = read_text(source, "flight record", FlightError, MAX_FILE_SIZE)
    try:
        data = check_format(parse_json(text, allow_nan=True), FORMAT, VERSION, "flight record")
        flight = from_json(Record, data, "flight record", prefix="")
        if not 0 <= flight.rank < flight.ranks <= MAX_RANKS:
            raise JsonError(f"'rank' is {flight.rank} of {flight.ranks}")
    except JsonError as error:
        raise FlightError(f"{source}: {error}") from None
    return flight


def find_flights(paths: Iterable[str | Path]) -> list[Path]:
    """The records named, and those in the folders named."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob(f"{FORMAT}-*-rank*.json"))
            if not inside:
                raise FlightError(f"{path} has no flight records: no file is named {FORMAT}-JOB-rankN.json")
            found += inside
        else:
            found.append(path)
    return found


def merge(records: Iterable[Record]) -> tuple[dict[int, Record], list[str]]:
    """The newest job's records by rank, and the names of the other jobs, which are left out."""
    jobs: dict[str, dict[int, Record]] = {}
    for record in sorted(records, key=lambda each: each.written):
        jobs.setdefault(record.job, {})[record.rank] = record
    if not jobs:
        raise FlightError("no flight record was given")
    newest = max(jobs, key=lambda job: max(record.written for record in jobs[job].values()))
    sizes = {record.ranks for record in jobs[newest].values()}
    if len(sizes) > 1:
        raise FlightError(f"records of job {newest} disagree on its number of ranks: {sorted(sizes)}")
    return dict(sorted(jobs[newest].items())), sorted(set(jobs) - {newest})

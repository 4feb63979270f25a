"""Ranks as processes of this machine, forked from a server that has imported torch."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stageline.common.errors import StagelineError
from stageline.common.handshake import check_tls
from stageline.common.machine import check_ports, cores
from stageline.common.temporary_folder import TemporaryFolder
from stageline.common.trust import job_secret, secret_variables
from stageline.distributed._torch_private import TCPStore
from stageline.distributed.attempts import MEMORY, NUMBER, SEAT, Announcements, Attempt, take_place
from stageline.distributed.launchers.fork_server import Child, ForkServer, shared_server
from stageline.distributed.launchers.launcher import Job, Outcome
from stageline.distributed.launchers.remote_calls import check_call, read_answer
from stageline.distributed.launchers.replacements import Replacements
from stageline.distributed.state_memory import host_memory
from stageline.faults.monitor.client import COLLECTED

PATIENCE = 10.0
"""Seconds that the other ranks have to end by themselves when one has failed; then they are asked, and then killed."""


class ProcessLauncher:
    """Starts one process per rank on this machine.

    Every rank gets an equal share of the cores for its threads, unless OMP_NUM_THREADS is set.

    >>> job = Job(os.getenv, ("LOCAL_RANK",), processes=2)
    >>> sorted(outcome.value for outcome in ProcessLauncher().run(job))
    ['0', '1']
    """

    def __init__(
        self,
        *,
        logs: str | Path | None = None,
        patience: float = PATIENCE,
        share_gpus: bool = False,
        forwards: Sequence[signal.Signals] = (),
    ) -> None:
        """`logs` is a folder for the output of the ranks, `rank-0.log` and so on; by default it is not redirected.

        On a machine with GPUs, there must be one for every rank, unless `share_gpus` is true. While the job runs, the
        signals in `forwards` are passed on to the ranks, which decide what becomes of the job; `run` is then called in
        the main thread.
        """
        self._logs = None if logs is None else Path(logs)
        self._patience, self._share_gpus = patience, share_gpus
        self._forwards = forwards
        self.forwarded: list[int] = []
        """The signals that were passed on."""

    def run(self, job: Job) -> list[Outcome]:
        """Run the job, and return the outcomes in the order in which the ranks ended."""
        if not self._share_gpus:
            _refuse_too_many(job.processes)
        check_call(job.function, job.arguments)
        check_variables(job)
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        server = shared_server()  # imports torch while this process opens the store
        server.preload(job.modules)
        # The ranks meet at a store of this process, so no port can be taken by others before rank 0 listens.
        store = TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=300), wait_for_workers=False)
        recovers = job.recovery.enabled
        with (
            job_folder(server) as folder,
            host_memory(job.processes if recovers else 0) as memory,
        ):
            replacements = Replacements(job.recovery, job.processes, Announcements(store)) if recovers else None
            ranks = Ranks(job, folder, server, self._logs, self._patience, replacements)
            variables = {NUMBER: "0", MEMORY: os.pathsep.join(memory)} if recovers else {}
            try:
                with self._forward(ranks):
                    ranks.start([{**place, **variables} for place in place_variables(job, store.port)])
                    ranks.start_spares(job.recovery.spares if recovers else 0)
                    return ranks.wait()
            finally:
                ranks.kill()
                del store

    @contextmanager
    def _forward(self, ranks: Ranks) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {}

        def forward(number: int, frame: FrameType | None) -> None:
            if not ranks.started:  # there is nobody to pass it on to
                handler = before[signal.Signals(number)]
                if callable(handler):
                    handler(number, frame)
                raise SystemExit(128 + number)
            self.forwarded.append(number)
            ranks.signal(number)

        for number in self._forwards:
            before[number] = signal.getsignal(number)
            signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def job_folder(server: ForkServer) -> Iterator[Path]:
    """A folder for the calls and answers of ranks; the server removes it if this process is killed."""
    with TemporaryFolder("job-") as folder:
        server.remove_at_end(folder)
        yield folder


def place_variables(job: Job, port: int) -> list[dict[str, str]]:
    """The environment of every rank of a job on this machine."""
    common = {
        "OMP_NUM_THREADS": str(max(1, cores() // job.processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.processes),
        "LOCAL_WORLD_SIZE": str(job.processes),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is open: no rank has to host it
        **({COLLECTED: "1"} if job.returns else {}),
        **job.environment,
    }
    common |= secret_variables(common)
    if not torch.cuda.is_available():
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(job.processes)]


def check_variables(job: Job) -> None:
    """Refuse variables of the environment that every rank would refuse."""
    variables = {**os.environ, **job.environment, "LOCAL_WORLD_SIZE": str(job.processes), "MASTER_PORT": ""}
    check_ports(variables)
    job_secret(variables)
    check_tls(variables)


def _refuse_too_many(processes: int) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and processes > gpus:
        raise StagelineError(
            f"{processes} ranks need {processes} GPUs, but this machine has {gpus}; start at most {gpus} ranks, or "
            "set CUDA_VISIBLE_DEVICES to an empty value to run on the CPU"
        )


class Ranks:
    """The processes of one job."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        server: ForkServer,
        logs: Path | None,
        patience: float,
        replacements: Replacements | None = None,
    ) -> None:
        self._job, self._folder, self._server = job, folder, server
        self._logs, self._patience, self._replacements = logs, patience, replacements
        self._environments: list[Mapping[str, str]] = []
        self._folders: dict[int, Path] = {}
        self._running: dict[int, Child] = {}
        self._spares: dict[int, Child] = {}
        self._outcomes: list[Outcome] = []
        self._late = ""
        self.started = False
        """Whether all ranks have been started."""

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start all ranks."""
        self._environments = list(environments)
        for rank in range(len(environments)):
            self._start(rank)
        self.started = True

    def start_spares(self, count: int) -> None:
        """Start processes that wait for the place of a lost rank; they are numbered after the ranks."""
        for number in range(self._job.processes, self._job.processes + count):
            place = ("RANK", "LOCAL_RANK")
            environment = {name: value for name, value in self._environments[0].items() if name not in place}
            self._spares[number] = self._call(number, {**environment, SEAT: str(number)})
            self._replacements.spares.append(number)  # type: ignore[union-attr]

    def _start(self, rank: int, attempt: int = 0) -> None:
        variables = {} if self._replacements is None else {NUMBER: str(attempt), SEAT: str(rank)}
        self._running[rank] = self._call(rank, {**self._environments[rank], **variables})

    def _call(self, number: int, environment: Mapping[str, str]) -> Child:
        folder = self._folders[number] = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=self._folder))
        return self._server.call(
            run_rank,
            (self._job.function, self._job.arguments),
            environment=environment,
            folder=folder,
            log=None if self._logs is None else self._logs / f"rank-{number}.log",
            answers=self._job.returns,
        )

    def wait(self) -> list[Outcome]:
        """Wait until all ranks have ended; replace those that are lost, if the job recovers."""
        end = None if self._job.timeout is None else time.monotonic() + self._job.timeout
        kill_at: float | None = None
        while self._running:
            self._server.read_events(0.05)
            self._collect()
            if self._recover():
                kill_at = None
            now = time.monotonic()
            if end is not None and now > end:
                self._time_out()
            elif kill_at is None and any(outcome.failure for outcome in self._outcomes):
                kill_at = now + self._patience
            elif kill_at is not None and now > kill_at:
                self._end(signal.SIGTERM)
                self._server.read_events(2.0)
                self._collect()
                self.kill()
        missing = set(range(self._job.processes)) - {outcome.rank for outcome in self._outcomes}
        self._outcomes += [Outcome(rank, moment=time.monotonic()) for rank in missing]  # the job went on without it
        if self._replacements is not None:
            self._outcomes = self._replacements.explain(self._outcomes)
        return sorted(self._outcomes, key=lambda outcome: outcome.moment)

    def _recover(self) -> bool:
        """Start ranks that were lost again; return whether there were any."""
        if self._replacements is None:
            return False
        blamed = self._replacements.blamed()
        if blamed in self._running:
            self._running[blamed].signal(signal.SIGKILL)
        for number in [number for number, child in self._spares.items() if child.poll() is not None]:
            del self._spares[number]
            self._replacements.spares = [spare for spare in self._replacements.spares if spare != number]
        attempt = self._replacements.next(self._outcomes, self._running)
        if attempt is not None:
            self._follow(attempt)
        elif self._running and not self._running.keys() & self._replacements.active:
            self.kill()  # those that wait for a place in a job that has ended
            self._outcomes = [outcome for outcome in self._outcomes if outcome.rank in self._replacements.active]
        return attempt is not None

    def _follow(self, attempt: Attempt) -> None:
        """Start the processes of an attempt; spare ones are there already."""
        kept = attempt.ranks.keys() - set(attempt.replaced)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.rank in kept]
        for spare, rank in attempt.spares.items():
            self._running[rank], self._folders[rank] = self._spares.pop(spare), self._folders[spare]
        for rank in attempt.replaced:
            if rank not in attempt.spares.values():
                self._start(rank, attempt.number)

    def _collect(self) -> None:
        for rank, child in list(self._running.items()):
            if child.code is not None:
                del self._running[rank]
                self._outcomes.append(self._outcome(rank, child.code))

    def _outcome(self, rank: int, code: int) -> Outcome:
        answer = read_answer(self._folders[rank])
        if answer is not None:
            return Outcome(rank, answer.value, answer.error, answer.failure, code, answer.moment)
        failure = self._late or _ending(code) or ("ended before the function returned" if self._job.returns else "")
        return Outcome(rank, failure=failure, code=code, moment=time.monotonic())

    def _time_out(self) -> None:
        self._late = f"did not end within {self._job.timeout:g} s"
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for child in list(self._running.values()):
            child.signal(number)

    def _end(self, number: int) -> None:
        self.signal(signal.SIGCONT)  # a stopped process ends only after it continues
        self.signal(number)

    def kill(self) -> None:
        """Kill what still runs."""
        self._end(signal.SIGKILL)
        for child in self._spares.values():
            child.signal(signal.SIGKILL)
        for child in (*self._running.values(), *self._spares.values()):
            child.wait(timeout=60)
        self._collect()


def run_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a forked rank does before the function: what a new interpreter would have read or drawn for itself."""
    if not take_place():  # a spare one that nobody needed
        return None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    return function(*arguments)


def _ending(code: int) -> str:
    if code == 0:
        return ""
    if code > 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def default_processes() -> int:
    """One rank per GPU; without GPUs, one per core that this process may use, up to 4.

    >>> 1 <= default_processes()
    True
    """
    return torch.cuda.device_count() if torch.cuda.is_available() else min(4, cores())

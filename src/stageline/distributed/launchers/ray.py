"""Ranks as actors of a Ray cluster, in a placement group; lost ones are started again through Ray."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stageline._version import __version__
from stageline.common.errors import PipelineError, StagelineError, TransportError
from stageline.common.imports import require
from stageline.common.trust import secret_variables
from stageline.distributed.launchers.launcher import Job, Outcome, describe, first_failure

PATIENCE = 10.0
"""Seconds that the other ranks have to end by themselves when one has failed; then they are killed."""
OWN_VARIABLES = ("STAGELINE_HOST", "STAGELINE_CONTROL_HOST", "STAGELINE_RANKS", "STAGELINE_SECRET_FILE")
"""Variables of a single process; ranks get the other STAGELINE_ variables of the caller."""


class RayLauncher:
    """Starts one actor per rank in a placement group of a Ray cluster.

    It uses the cluster that this process is connected to, or connects to one as `ray.init` does, and disconnects at
    the end. Each rank has `cpus` CPUs and, if the cluster has any GPUs, one of them. If a rank dies or a host is lost,
    all ranks are started again, up to `max_restarts` times, on what is left of the cluster: the function resumes from
    its own checkpoints, as `sl.Trainer` does.
    """

    def __init__(
        self,
        *,
        cpus: int = 1,
        gpus: int | None = None,
        max_restarts: int = 0,
        patience: float = PATIENCE,
        wait: float = 60.0,
        strategy: str = "PACK",
        on_report: Callable[[Any], object] | None = None,
    ) -> None:
        """Options of the placement.

        `gpus` is the number of GPUs of each rank, 0 or 1. `wait` is how many seconds busy slots may take to become
        free. `strategy` is Ray's: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD. `on_report` is called in this process
        with every value that a rank passes to `report`.
        """
        self._ray = require("ray", "the launcher ray", "'stageline[ray]'")
        self._cpus, self._gpus, self._max_restarts = cpus, gpus, max_restarts
        self._patience, self._wait, self._strategy, self._on_report = patience, wait, strategy, on_report

    def slots(self) -> int:
        """The number of ranks that the cluster has room for."""
        with self._cluster():
            return sum(count for _, count in self._slots_of_hosts())

    def run(self, job: Job) -> list[Outcome]:
        """Run the job, and return the outcomes of its last start in the order in which the ranks ended."""
        with self._cluster(), self._placement(job.processes) as group, self._reports() as reports:
            end = None if job.timeout is None else time.monotonic() + job.timeout
            restarts = max(self._max_restarts, job.recovery.max_restarts)
            for restart in range(restarts + 1):
                # Ray may not know yet that a host is lost: its placement is tried until that host's ranks are moved.
                outcomes = self._start(job, group, end, reports, until=time.monotonic() + self._wait * bool(restart))
                culprit = first_failure(outcomes)
                if culprit is None or restart == restarts or not _worth_a_restart(culprit):
                    return outcomes
                line = describe(culprit, job.processes).splitlines()[0]
                print(f"stageline: {line}; restart {restart + 1} of {restarts}", file=sys.stderr, flush=True)
        raise AssertionError("the last start returns")

    def _start(self, job: Job, group: Any, end: float | None, reports: _Reports | None, until: float) -> list[Outcome]:
        while True:
            self._await_placement(group, job.processes)
            ranks = _Ranks(self._ray, job, self._patience, end, reports)
            try:
                ranks.create(group, self._options(job.processes))
                lost = ranks.prepare()
                if not lost:
                    return ranks.run()
            finally:
                ranks.kill()
            if time.monotonic() > until:
                return lost
            time.sleep(1.0)

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        if self._ray.is_initialized():
            yield
            return
        try:
            self._ray.init(logging_level="WARNING")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StagelineError(f"no connection to a Ray cluster: {_first_line(error)}; check RAY_ADDRESS") from error
        try:
            yield
        finally:
            self._ray.shutdown()

    def _options(self, processes: int) -> dict[str, int]:
        """The resources of a rank."""
        gpus = self._gpus
        if gpus is None:
            gpus = int(any(host["Resources"].get("GPU", 0) >= 1 for host in self._hosts()))
        return {"CPU": self._cpus, "GPU": gpus} if gpus else {"CPU": self._cpus}

    def _hosts(self) -> list[dict[str, Any]]:
        return [host for host in self._ray.nodes() if host["Alive"]]

    def _slots_of_hosts(self) -> list[tuple[str, int]]:
        needs = self._options(1)
        return [
            (
                str(host["NodeManagerAddress"]),
                min(int(host["Resources"].get(name, 0) // count) for name, count in needs.items() if count),
            )
            for host in self._hosts()
        ]

    @contextmanager
    def _placement(self, processes: int) -> Iterator[Any]:
        self._refuse_too_many(processes)
        group = self._ray.util.placement_group([self._options(processes)] * processes, strategy=self._strategy)
        try:
            yield group
        finally:
            self._ray.util.remove_placement_group(group)

    def _refuse_too_many(self, processes: int) -> None:
        hosts = self._slots_of_hosts()
        slots = sum(count for _, count in hosts)
        if processes > slots:
            need = " and ".join(f"{count} {name}" for name, count in self._options(1).items())
            raise StagelineError(
                f"{processes} ranks need {need} each, but the Ray cluster has {slots} such slots on {len(hosts)} "
                f"host{'s' if len(hosts) != 1 else ''}; start at most {slots}, or add hosts"
            )

    def _await_placement(self, group: Any, processes: int) -> None:
        if not group.wait(self._wait):
            self._refuse_too_many(processes)
            raise StagelineError(
                f"the Ray cluster did not have {processes} free slots within {self._wait:g} s: other jobs are using "
                f"them, or the strategy {self._strategy} cannot place the ranks; wait until they are free, or start "
                "fewer ranks"
            )

    @contextmanager
    def _reports(self) -> Iterator[_Reports | None]:
        if self._on_report is None:
            yield None
            return
        reports = _Reports(self._ray, self._on_report)
        try:
            yield reports
        finally:
            reports.close()


def _worth_a_restart(culprit: Outcome) -> bool:
    """Whether a rank failed otherwise than by a refusal, which would only be repeated."""
    return not isinstance(culprit.error, StagelineError) or isinstance(culprit.error, PipelineError | TransportError)


class _Ranks:
    """The actors of one start of a job."""

    def __init__(self, ray: Any, job: Job, patience: float, end: float | None, reports: _Reports | None) -> None:
        self._ray, self._job, self._patience, self._end, self._reports = ray, job, patience, end, reports
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}
        self._outcomes: list[Outcome] = []
        self._hosts: list[str] = []
        self._port = 0

    def create(self, group: Any, resources: Mapping[str, int]) -> None:
        """Create the actors: those of a host have consecutive ranks."""
        scheduling = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        host_of = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        hosts = list(dict.fromkeys(host_of.values()))
        remote = self._ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_restarts=0)(RayRank)
        for bundle in sorted(host_of, key=lambda bundle: (hosts.index(host_of[bundle]), bundle)):
            strategy = scheduling(group, placement_group_bundle_index=bundle)
            variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if resources.get("GPU") else {}
            environment = {"runtime_env": {"env_vars": variables}} if variables else {}
            self._actors.append(remote.options(scheduling_strategy=strategy, **environment).remote())

    def prepare(self) -> list[Outcome]:
        """Give the actors their places; return the outcome of one that could not be started."""
        job = self._job
        try:
            places: list[Place] = self._ray.get([actor.place.remote() for actor in self._actors], timeout=self._left())
            _refuse_other_versions(places)
            self._hosts = [place.host for place in places]
            pairs = zip(self._actors, place_variables(job, places), strict=True)
            self._ray.get([actor.prepare.remote(variables) for actor, variables in pairs], timeout=self._left())
            self._port = self._ray.get(self._actors[0].open_store.remote(places[0].host), timeout=self._left())
        except self._ray.exceptions.GetTimeoutError:
            return [Outcome(rank, failure=self._late(), code=1) for rank in range(job.processes)]
        except self._ray.exceptions.RayActorError as error:
            ids = [actor._actor_id.hex() for actor in self._actors]
            lost = ids.index(error.actor_id) if error.actor_id in ids else 0
            return [Outcome(lost, failure=f"was lost before it started: {_first_line(error)}", code=1)]
        return []

    def run(self) -> list[Outcome]:
        """Call the function on every rank."""
        job, reports = self._job, self._reports and self._reports.actor
        call = self._ray.put((job.function, job.arguments))
        for rank, actor in enumerate(self._actors):
            self._running[actor.call.remote(call, self._port, os.getcwd(), job.returns, reports)] = rank
        return self._wait()

    def _wait(self) -> list[Outcome]:
        kill_at: float | None = None
        while self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=0.1)
            for answer in ready:
                self._outcomes.append(self._outcome(answer))
            if self._reports is not None:
                self._reports.pass_on()
            now = time.monotonic()
            if self._end is not None and now > self._end:
                self._give_up(self._late())
            elif kill_at is None and any(outcome.failure for outcome in self._outcomes):
                kill_at = now + self._patience
            elif kill_at is not None and now > kill_at:
                self._give_up("was terminated because another rank failed")
        return sorted(self._outcomes, key=lambda outcome: outcome.moment)

    def _outcome(self, answer: Any) -> Outcome:
        rank = self._running.pop(answer)
        try:
            outcome: Outcome = self._ray.cloudpickle.loads(self._ray.get(answer))
        except self._ray.exceptions.RayError as error:
            failure = f"was lost on host {self._hosts[rank]}: {_first_line(error)}"
            return Outcome(rank, failure=failure, code=1, moment=time.time())
        except Exception:  # whatever a user's class does when it is unpickled
            return Outcome(rank, failure=traceback.format_exc(), code=1, moment=time.time())
        self._actors[rank].leave.remote()  # from now on, a rank that waits for it learns that it has left
        return replace(outcome, rank=rank)

    def _late(self) -> str:
        return f"did not end within {self._job.timeout:g} s"

    def _left(self) -> float | None:
        return None if self._end is None else max(0.1, self._end - time.monotonic())

    def _give_up(self, why: str) -> None:
        """Kill the ranks that still run."""
        for rank in self._running.values():
            self._ray.kill(self._actors[rank])
            self._outcomes.append(Outcome(rank, failure=why, code=1, moment=time.time()))
        self._running.clear()

    def kill(self) -> None:
        """Kill what still runs, and wait until nothing does."""
        gone = [actor.leave.remote() for actor in self._actors]
        self._ray.wait(gone, num_returns=len(gone), timeout=0.0 if self._running else 5.0)
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


class Place(NamedTuple):
    """Where an actor runs."""

    node: str
    """Ray's number of the host."""
    host: str
    name: str
    gpus: tuple[str, ...]
    versions: dict[str, str]


def place_variables(job: Job, places: Sequence[Place]) -> list[dict[str, str]]:
    """The environment of every rank of a job, except the port of the store.

    >>> here = [Place("a", "10.0.0.1", "n1", ("2",), {}), Place("a", "10.0.0.1", "n1", ("0",), {})]
    >>> first, _, last = place_variables(Job(print, processes=3), [*here, Place("b", "10.0.0.2", "n2", ("1",), {})])
    >>> first["LOCAL_WORLD_SIZE"], first["CUDA_VISIBLE_DEVICES"], last["GROUP_RANK"], last["MASTER_ADDR"]
    ('2', '2,0', '1', '10.0.0.1')
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    common = {
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith("STAGELINE_") and name not in OWN_VARIABLES
        },
        "MASTER_ADDR": places[0].host,
        "WORLD_SIZE": str(len(places)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the actor of rank 0 keeps the store
        **job.environment,
    }
    common |= secret_variables(common)
    environments: list[dict[str, str]] = []
    for rank, place in enumerate(places):
        neighbours = [other for other in places if other.node == place.node]
        environment = {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(sum(other.node == place.node for other in places[:rank])),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "GROUP_RANK": str(nodes.index(place.node)),
        }
        if len(nodes) > 1:
            environment = {"STAGELINE_HOST": place.host, **environment}
        if place.gpus:  # all GPUs of the ranks of a host, so that NCCL can use the links between them
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for other in neighbours for gpu in other.gpus)
        environments.append(environment)
    return environments


def _refuse_other_versions(places: Sequence[Place]) -> None:
    for rank, place in enumerate(places):
        for name, version in places[0].versions.items():
            if place.versions[name] != version:
                raise StagelineError(
                    f"rank {rank} on host {place.name} runs {name} {place.versions[name]}, and rank 0 on host "
                    f"{places[0].name} runs {name} {version}; install the same versions on all hosts"
                )


class RayRank:
    """The actor of one rank."""

    def place(self) -> Place:
        """Where it runs, and with what."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        versions = {"stageline": __version__, "python": platform.python_version()}
        versions["torch"] = importlib.metadata.version("torch")
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname(), gpus, versions)

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Set the environment, before torch reads it; and import torch while other ranks do so."""
        os.environ.update(environment)
        importlib.import_module("torch")

    def open_store(self, host: str) -> int:
        """Keep the store at which the ranks meet; return its port."""
        import datetime

        from stageline.common.machine import listen
        from stageline.distributed._torch_private import TCPStore

        listener = listen(host)
        port = int(listener.getsockname()[1])
        minutes = datetime.timedelta(seconds=300)
        self._store = TCPStore(
            host, port, None, True, minutes, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def call(
        self,
        call: tuple[Callable[..., Any], tuple[Any, ...]],
        port: int,
        folder: str,
        returns: bool,
        reports: Any,
    ) -> bytes:
        """Call the function of the job; return a pickled `Outcome`."""
        global _collector
        import ray

        _collector = reports
        os.environ["MASTER_PORT"] = str(port)
        with suppress(OSError):  # another host may not have the folder
            os.chdir(folder)
        function, arguments = call
        try:
            value = function(*arguments)
            return bytes(ray.cloudpickle.dumps(Outcome(0, value if returns else None, moment=time.time())))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            ended = "ended before the function returned" if returns else ""
            failure = f"ended with exit code {code}" if code else ended
            return bytes(ray.cloudpickle.dumps(Outcome(0, failure=failure, code=code, moment=time.time())))
        except Exception as error:
            sys.last_value = error  # as the interpreter does: the failure monitor hears why this rank leaves
            if not returns:
                traceback.print_exc()
            return _failure(error)

    def leave(self) -> None:
        """End the process as an interpreter ends, with what it registered at exit."""
        import ray

        ray.actor.exit_actor()


def _failure(error: Exception) -> bytes:
    import ray

    outcome = Outcome(0, None, error, traceback.format_exc(), 1, time.time())
    try:
        data = bytes(ray.cloudpickle.dumps(outcome))
        ray.cloudpickle.loads(data)
    except Exception:  # whatever a user's exception does when it is pickled
        return bytes(ray.cloudpickle.dumps(replace(outcome, error=None)))
    return data


_collector: Any = None


def report(value: Any) -> None:
    """In a rank that a `RayLauncher` with `on_report` started: send a value to the process that launched it."""
    if _collector is None:
        raise StagelineError("report() sends a value to the launcher of this rank, which has no on_report")
    import ray

    _collector.put.remote(ray.cloudpickle.dumps(value))


class Collector:
    """An actor that keeps what ranks report until the launcher asks for it."""

    def __init__(self) -> None:
        self._values: list[bytes] = []

    def put(self, value: bytes) -> None:
        """Keep a value."""
        self._values.append(value)

    def take(self) -> list[bytes]:
        """Return the values, and forget them."""
        values, self._values = self._values, []
        return values


@dataclass
class _Reports:
    """The values that ranks report."""

    ray: Any
    on_report: Callable[[Any], object]

    def __post_init__(self) -> None:
        # On the host of this process: Ray would choose any host, and values would be lost with it.
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        strategy = affinity(self.ray.get_runtime_context().get_node_id(), soft=False)
        remote = self.ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)
        self.actor = remote(Collector).remote()
        self._request = self.actor.take.remote()

    def pass_on(self, timeout: float = 0.0) -> None:
        """Call the function with what has arrived."""
        ready, _ = self.ray.wait([self._request], timeout=timeout)
        if not ready:
            return
        values: list[bytes] = []
        with suppress(self.ray.exceptions.RayError):  # lost with its host
            values = self.ray.get(self._request)
        self._request = self.actor.take.remote()
        for value in values:
            self.on_report(self.ray.cloudpickle.loads(value))

    def close(self) -> None:
        """Pass on the last values, and end the actor."""
        for _ in range(2):  # the request on its way may have been answered before the last value
            self.pass_on(timeout=5.0)
        self.ray.kill(self.actor)


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

"""The protocols of a place where ranks live: collectives, hosting ranks, and what a host runs on its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import PeerFailed, StagelineError
from stageline.distributed.failures import Change
from stageline.distributed.layout import Layout
from stageline.faults.flight_recorder import FlightRecorder
from stageline.faults.monitor.verdict import Verdict
from stageline.schedules.schedule import Schedule
from stageline.transport.clock_alignment import Alignment
from stageline.transport.protocol import Transport

if TYPE_CHECKING:
    from stageline.distributed.collectives import ReplicaGroup


Floats = NDArray[np.float64]


class RankProgress(Protocol):
    """What a rank is doing right now; others read it at any time. Cheap enough to set for every action."""

    doing: object
    """(letter, stage, microbatch), or text; None outside of a step."""
    waits: int | None
    """The rank that it waits for; None while it waits for nobody."""
    done: int
    """How many actions it has finished."""


class RankRunner(Protocol):
    """What a host runs on one rank, step after step."""

    rank: int
    """Its rank in the schedule."""
    process: int
    """Its process, as the transport addresses it."""
    processes: list[int]
    """The processes of all ranks of the schedule."""
    device: int | None
    """The GPU that it runs on."""
    progress: RankProgress
    stopped: PeerFailed | None
    """Set from another thread: the failure of another rank, after which no action is started."""
    step: int
    """The step that it runs or ran last."""

    @property
    def doing(self) -> str:
        """The action that it is running, as text."""

    @property
    def changes(self) -> Sequence[Change]:
        """Outputs of its stages that changed their form."""

    def run(self, request: Any, ready: Callable[[int], None] | None = None) -> Any:
        """Run one step; `ready` is called with every stage whose gradients are complete."""

    def record(self, verdict: Verdict | None, lost: str | None = None) -> Path | None:
        """Write the flight record."""

    def forget(self) -> None:
        """Drop what a failed step left behind."""


class GradientReducer(Protocol):
    """Adds up gradients over replicas while a step runs."""

    def begin(self) -> None:
        """Start a step."""

    def ready(self, stage: int) -> None:
        """The gradients of a stage are complete on this rank."""

    def finish(self, succeeded: bool) -> None:
        """Wait for all sums; `succeeded` is False where the step failed on this rank."""


Runner = TypeVar("Runner", bound=RankRunner)


@dataclass(frozen=True)
class RankExecutors(Generic[Runner]):
    """A schedule, and the executors of the ranks of this process."""

    schedule: Schedule
    executors: list[Runner]


@dataclass(frozen=True)
class HostedStep:
    """One step as a host runs it on the ranks of this process."""

    executors: RankExecutors[Any]
    request: Any
    """What every executor runs; None if this process cannot take part."""
    refused: Exception | None = None
    """Why it cannot: it takes part only to tell the others."""
    make_record: Callable[[list[Any]], Floats] = lambda results: np.zeros(0)
    """From the results of the ranks of this process to the numbers that are added up over the ranks of a replica."""
    size: int = 0
    """The length of the step record."""
    reducer: GradientReducer | None = None
    issued: Callable[[], object] = lambda: None
    """Called once the actions of this process are issued or have failed, before the ranks end the step together."""


class Collectives(Protocol):
    """What the processes of a job do together. Every process must make the same calls in the same order."""

    here: list[int]
    """The ranks of this process."""
    layout: Layout
    """The process of each rank of each replica."""
    replica: int
    """The replica of this process."""
    replica_group: ReplicaGroup | None
    """This rank in all replicas; None if there is only one replica."""

    @property
    def single_process(self) -> bool:
        """Whether all ranks of this replica are in this process."""

    def check_same(self, facts: dict[str, str]) -> None:
        """Raise, on all processes, if a fact is not the same on all of them."""

    def all_gather(self, row: Floats) -> Floats:
        """The rows of all processes, by replica and rank."""

    def all_gather_async(self, row: Floats) -> Callable[[], Floats]:
        """Start an `all_gather`; call the result to wait for it."""

    def all_reduce(self, values: Floats) -> Floats:
        """Add up arrays of equal length over the ranks of this replica."""

    def all_reduce_async(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """Start an `all_reduce`; call the result to wait for it."""

    def broadcast(self, text: str, owner: int) -> str:
        """The text of one rank, on all ranks of this replica."""

    def broadcast_to_all(self, text: str, process: int) -> str:
        """The text of one process, on all processes of all replicas."""

    def broadcast_tensor(self, tensor: Tensor, owner: int) -> None:
        """Copy the tensor of one rank to all ranks of this replica, in place."""


class RankHost(Collectives, Protocol):
    """Where the ranks of a pipeline live: threads of this process, or processes of a job."""

    deadline: float
    """How many seconds a rank may be silent before a step fails."""
    clocks: Alignment | None
    """The offsets between the clocks of the ranks of this replica; None if they are not known."""

    def transport(self, rank: int) -> Transport:
        """The transport of a rank of this process."""

    def progress(self, rank: int) -> RankProgress:
        """Where the rank says what it is doing."""

    def flight(self, rank: int) -> FlightRecorder:
        """The flight recorder of the rank."""

    def begin(self) -> None:
        """Begin a step, on every rank."""

    def run(self, step: HostedStep) -> tuple[list[Any], Floats]:
        """Run one step: the results of the ranks of this process, and the sum of all step records.

        Returns when all ranks of all replicas have finished. If one fails, all raise.
        """

    def end(self) -> None:
        """End a step, failed or not."""

    def abandon(self, error: BaseException) -> None:
        """Leave a step permanently, for an error that is not a failure of the step, such as Ctrl-C."""


def decide_together(host: Collectives, choose: Callable[[], Any]) -> Any:
    """Call `choose` on rank 0 of the first replica; return its answer, which JSON can hold, on all processes.

    An exception there is raised on all processes: as it is on rank 0, and as a `StagelineError` elsewhere.
    """
    answer, error = {"value": None, "error": ""}, None
    if host.replica == 0 and 0 in host.here:
        try:
            answer["value"] = choose()
        except Exception as failure:
            error = failure
            kind = "" if isinstance(failure, StagelineError) else f"{type(failure).__name__}: "
            answer["error"] = f"{kind}{failure}"
    answer = json.loads(host.broadcast_to_all(json.dumps(answer), host.layout.rows[0][0]))
    if error is not None:
        raise error
    if answer["error"]:
        raise StagelineError(answer["error"])
    return answer["value"]

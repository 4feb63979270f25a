"""The protocol of a launcher, and `sl.launch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from stageline.common.errors import LaunchError, PipelineError, StagelineError, TransportError, nearest, shorten
from stageline.distributed.recovery_policy import Recovery

LAUNCHERS = {"processes": "ProcessLauncher", "threads": "ThreadLauncher", "ray": "RayLauncher"}
"""The classes of the launchers by name; the module of each has its name."""


@dataclass(frozen=True)
class Job:
    """What every rank of a job calls, and what it finds in its environment."""

    function: Callable[..., Any]
    """Can be imported by name."""
    arguments: tuple[Any, ...] = ()
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks, beside those that give a rank its place."""
    timeout: float | None = None
    """Seconds for the whole job."""
    returns: bool = True
    """Whether results and exceptions come back; otherwise exceptions are printed, and exit codes come back."""
    recovery: Recovery = field(default_factory=Recovery)
    """What to do about a lost rank."""
    modules: tuple[str, ...] = ()
    """Modules that every rank imports; a launcher may import them once, for all ranks."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    """The exception, if it could be pickled."""
    failure: str = ""
    """A traceback, or a sentence on how the process ended; empty if the function returned."""
    code: int = 0
    """The exit code, negative for a signal."""
    moment: float = 0.0
    """When the function returned or failed, or the process ended; by any clock that orders the ranks."""

    @property
    def is_traceback(self) -> bool:
        """Whether `failure` is a traceback, which may begin with that of the cause."""
        return "\nTraceback " in f"\n{self.failure}"


@runtime_checkable
class Launcher(Protocol):
    """Places ranks. `stageline.testing.exercise_launcher` tests one.

    A rank has its place in the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. When a rank fails, the launcher gives the others time to end by themselves, because
    they know better what happened, and then ends them. It leaves no process behind.
    """

    def run(self, job: Job) -> list[Outcome]:
        """Run the job, and return the outcomes in the order in which the ranks ended."""


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    launcher: str | Launcher = "processes",
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    on_loss: Sequence[str] = ("restart", "spare"),
    spares: int = 0,
) -> list[Any]:
    """Call `function(*arguments)` on every rank of a new job, and return the results by rank.

    The function must be importable by name, as for `multiprocessing`. In it, `sl.Pipeline` finds the other ranks by
    itself. `launcher` places the ranks:

    - "processes": one process per rank on this machine, forked from a server that has imported torch.
    - "threads": the function is called once, in this process, with STAGELINE_RANKS set; its pipelines run their ranks
      as threads. The list has one result.
    - "ray": one actor per rank in a placement group of a Ray cluster (see `launchers.ray.RayLauncher`).
    - an object with a method `run` (see `Launcher`).

    With `max_restarts`, a rank that dies is started again, that many times in all. The others get a `PipelineError`:
    a function that calls `sl.rejoin` with it keeps its process and joins the new rank; any other ends, and is called
    again, too. `on_loss` lists what may be done about a lost rank, and `spares` is the number of processes that wait to
    take its place (see docs/recovery.md).
    If a rank raises an exception, dies, or the job takes longer than `timeout` seconds, the other ranks are ended and
    a `LaunchError` names the rank that failed first.

    >>> import operator
    >>> launch(operator.add, 1, 2, processes=2)
    [3, 3]
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise StagelineError(f"processes must be the number of ranks, at least 1; got {shorten(processes)}")
    if not callable(function):
        raise StagelineError(f"launch expects a function to call on every rank; got {shorten(function)}")
    if timeout is not None and not timeout > 0:
        raise StagelineError(f"timeout must be a number of seconds above 0, or None; got {shorten(timeout)}")
    variables = {str(name): str(value) for name, value in (environment or {}).items()}
    recovery = Recovery(max_restarts, tuple(on_loss), spares)
    job = Job(function, arguments, processes, variables, timeout, recovery=recovery)
    outcomes = find_launcher(launcher).run(job)
    culprit = first_failure(outcomes)
    if culprit is not None:
        raise LaunchError(describe(culprit, processes), culprit.rank) from culprit.error
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def find_launcher(launcher: str | Launcher) -> Launcher:
    """Return the launcher of this name, or the object itself."""
    if isinstance(launcher, str):
        if launcher not in LAUNCHERS:
            raise StagelineError(
                f"unknown launcher {launcher!r}{nearest(launcher, LAUNCHERS)}; expected {', '.join(LAUNCHERS)}, or an "
                "object with a method run"
            )
        kind: type[Launcher] = getattr(
            import_module(f"stageline.distributed.launchers.{launcher}"), LAUNCHERS[launcher]
        )
        return kind()
    if not isinstance(launcher, Launcher):
        raise StagelineError(f"launcher must be a name or an object with a method run; got {shorten(launcher)}")
    return launcher


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The rank that failed first: of those that ended badly, the first whose failure is not about another rank.

    >>> lost = Outcome(0, error=PipelineError("rank 1 died"), failure="Traceback …")
    >>> first_failure([lost, Outcome(1, failure="was killed by SIGKILL", code=-9)]).rank
    1
    """
    failures = [outcome for outcome in outcomes if outcome.failure]
    own = [outcome for outcome in failures if not isinstance(outcome.error, PipelineError | TransportError)]
    return next(iter(own or failures), None)


def describe(outcome: Outcome, processes: int) -> str:
    """Return a sentence on a rank that failed, with its traceback below.

    >>> print(describe(Outcome(1, failure="was killed by SIGKILL", code=-9), 4))
    rank 1 of 4 was killed by SIGKILL
    """
    who = f"rank {outcome.rank} of {processes}"
    if not outcome.is_traceback:
        return f"{who} {outcome.failure}"
    summary = outcome.failure.strip().splitlines()[-1] if outcome.error is None else _one_line(outcome.error)
    return f"{who} failed: {summary}\n\nOn rank {outcome.rank}:\n{outcome.failure.rstrip()}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

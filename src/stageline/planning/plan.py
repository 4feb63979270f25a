"""The plan: how to train a model, and the expected time and memory; as data, as text, as a page and as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from stageline.common.checked_json import NonNegative, PositiveInt, check_format, json_lines, parse_json
from stageline.common.checked_json import field as read
from stageline.common.errors import JsonError, StagelineError
from stageline.common.files import read_text, write_text
from stageline.model.profile import NOISY
from stageline.planning.candidates import Trial
from stageline.planning.costs import RankMemory, Recompute
from stageline.planning.explain import explain
from stageline.planning.mesh import read_mesh
from stageline.planning.mesh_costs import Collectives, lowered
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline, share_above

if TYPE_CHECKING:
    from stageline.model.split import Staged

FORMAT, VERSION = "stageline-plan", 1


@dataclass(frozen=True)
class Alternative:
    """Another way to train, and its simulated time and memory."""

    schedule: str
    chunks: PositiveInt
    microbatches: PositiveInt
    layers_per_stage: tuple[PositiveInt, ...]
    recompute: Recompute
    seconds: NonNegative
    bubble: NonNegative
    memory: NonNegative
    """The bytes of the fullest rank."""
    rank: int
    """The fullest rank."""
    fits: bool

    @classmethod
    def of(cls, trial: Trial) -> Alternative:
        """Return the summary of a trial."""
        totals = [rank.total for rank in trial.memory]
        fullest = max(range(len(totals)), key=totals.__getitem__)
        candidate = trial.candidate
        return cls(
            trial.name, candidate.shape.chunks, candidate.microbatches, candidate.counts, candidate.recompute,
            trial.seconds, trial.bubble, totals[fullest], fullest, trial.fits,
        )  # fmt: skip

    @property
    def kind(self) -> tuple[str, int, int, str]:
        """What distinguishes kinds of plans: everything but the cut and which units are recomputed."""
        recompute = self.recompute if isinstance(self.recompute, str) else "units"
        return self.schedule, self.chunks, self.microbatches, recompute


@dataclass(frozen=True)
class MeshAlternative:
    """The best plan of another mesh; or only a bound, if it could not be better."""

    mesh: dict[str, PositiveInt]
    seconds: NonNegative
    """The simulated step, or the bound."""
    simulated: bool
    fits: bool
    schedule: str = ""
    microbatches: int = 0
    """Of one pipeline."""
    samples: int = 0
    """In a microbatch."""
    bubble: float = 0.0
    collectives: float = 0.0
    """Seconds that the busiest rank spends in collectives: within actions (tp), or beside them."""
    memory: float = 0.0
    """The bytes of the fullest rank."""
    rank: int = 0
    """The fullest rank."""
    complete: bool = True
    """Whether everything was tried, or the bound shows that no more was needed; not if the time was up."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How to train a model: cut, microbatches, recomputation and schedule; and the expected time and memory.

    >>> import torch, stageline as sl
    >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    >>> best = sl.plan(model, torch.ones(4, 16), ranks=2, microbatches=4, time_limit=0.5)
    >>> best.microbatches, sum(best.layers_per_stage), best.recompute
    (4, 8, 'none')
    >>> pipe = sl.Pipeline(best.split(model), loss_fn=nn.functional.mse_loss, schedule=best.schedule)
    >>> pipe.step(torch.ones(16, 16), torch.ones(16, 16)).microbatches
    4
    """

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    """The number of units of every stage."""
    recompute: Recompute
    """What is recomputed, as for `Pipeline(recompute=…)`: "none", "stage", or the names of units."""
    costs: Costs
    """The costs of the stages, in seconds and bytes."""
    memory: tuple[RankMemory, ...]
    """The peak bytes of every rank, by purpose."""
    caps: tuple[float, ...] | None
    """The memory limit of every rank, if there is one."""
    bound: float | None
    """A lower bound on the step for this cut, if known."""
    alternatives: tuple[Alternative, ...]
    """The other simulated plans: those that fit, fastest first, then those that do not."""
    samples: int
    """The number of samples in a microbatch."""
    names: tuple[str, ...]
    """The names of the units."""
    notes: tuple[str, ...] = ()
    """Remarks on the search."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The dimensions of the mesh that it is for, as in {"pp": 4, "dp_shard": 2}; empty for a pipeline alone."""
    reshard_after_forward: str = "default"
    """When gathered parameters are freed, with a dimension dp_shard: "default", "always" or "never"."""
    unit_seconds: tuple[float, ...] = ()
    """The time of every unit for a microbatch, forward and backward, at the profile's speed; empty if unknown."""
    collectives: Collectives = field(default_factory=Collectives)
    """Seconds of a step in collectives of the mesh, on the rank that has most of them."""
    meshes: tuple[MeshAlternative, ...] = ()
    """With `devices`: the best plan of every other mesh, those that fit first, fastest first."""
    uncertainty: float = 0.0
    """How far the measured times varied, as a fraction; the step may be off by as much."""
    timeline: Timeline = field(init=False)
    """The planned step."""

    def __post_init__(self) -> None:
        run = lowered(self.schedule, self.costs, self.mesh, self.reshard_after_forward)
        object.__setattr__(self, "timeline", simulate(run, self.costs))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.schedule.ranks

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a step."""
        return self.schedule.microbatches

    @property
    def chunks(self) -> int:
        """The number of stages of a rank."""
        return self.schedule.chunks

    @property
    def step_seconds(self) -> float:
        """The expected time of a step: its makespan."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The fraction of the makespan in which the busiest rank is idle."""
        return share_above(self.timeline.makespan, self.timeline.ideal)

    @property
    def is_noisy(self) -> bool:
        """Whether the measured times varied so much that differences between plans mean little."""
        return self.uncertainty > NOISY

    @property
    def gap(self) -> float | None:
        """How far the step is above the bound, as a fraction of it; 0 if no order of this cut is faster."""
        if self.bound is None:
            return None
        above = self.step_seconds - self.bound
        return above / self.bound if self.bound > 0 and above > 1e-9 * self.bound else 0.0

    def split(self, model: nn.Module | Callable[[], nn.Module], example: Any = None) -> Staged:
        """Cut a model as planned, between the profiled units, which the plan knows by name.

        `example` is needed if the forward uses weights of a unit outside of it.
        """
        from stageline.model.split import split, split_by_units

        if not self.names:
            return split(model, self.schedule.stages, layers_per_stage=self.layers_per_stage, example=example)
        return split_by_units(model, self.names, self.layers_per_stage, example)

    def explain(self, rows: int = 12) -> str:
        """Return the figures of the plan, and a table of the alternatives."""
        return explain(self, rows)

    def html(self) -> str:
        """Return the plan as a self-contained page: cut, memory, alternatives, bound, and the planned step."""
        from stageline.planning.page import html

        return html(self)

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, for `sl.read_plan`. An existing file is replaced atomically."""
        target = Path(path)
        if target.suffix.lower() != ".json":
            raise StagelineError(f"plans are written as JSON; the file name must end in .json, got {target.name!r}")
        write_text(target, self.to_text())

    def to_text(self) -> str:
        """Return the JSON that `write` writes: one line for each field, each rank's memory and each alternative."""
        return "".join(json_lines(self.to_json(), ("memory", "alternatives", "meshes")))

    def to_json(self) -> dict[str, Any]:
        """Return the data that `write` writes, with its figures for human readers."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.schedule.name,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "samples": self.samples,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "bound": self.bound,
            "recompute": self.recompute if isinstance(self.recompute, str) else list(self.recompute),
            "layers_per_stage": list(self.layers_per_stage),
            "names": list(self.names),
            "memory": [rank._asdict() for rank in self.memory],
            "caps": None if self.caps is None else list(self.caps),
            "notes": list(self.notes),
            "uncertainty": self.uncertainty,
            "mesh": dict(self.mesh),
            "reshard_after_forward": self.reshard_after_forward,
            "unit_seconds": list(self.unit_seconds),
            "collectives": self.collectives._asdict(),
            "meshes": [asdict(alternative) for alternative in self.meshes],
            "costs": self.costs.to_json(),
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "schedule": json.loads("".join(schedule_lines(self.schedule))),
        }

    def __repr__(self) -> str:
        peak = max(rank.total for rank in self.memory)
        return (
            f"<Plan: {self.schedule.name}, {self.ranks} ranks × {self.chunks}, {self.microbatches} microbatches, "
            f"{1e3 * self.step_seconds:.4g} ms, bubble {self.bubble:.1%}, {peak / 2**30:.3g} GiB>"
        )


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.write` wrote.

    >>> import torch, stageline as sl
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> best = sl.plan(model, torch.ones(2, 4), ranks=2, microbatches=4, repeats=1, time_limit=0.5)
    >>> best.write("plan.json")
    >>> copy = read_plan("plan.json")
    >>> copy.schedule == best.schedule, copy.step_seconds == best.step_seconds
    (True, True)
    """
    source = Path(path)
    return parse_plan(read_text(source, "plan"), str(source))


def parse_plan(text: str, source: str) -> Plan:
    """Parse the JSON of a plan; errors name `source`."""
    try:
        data = check_format(parse_json(text), FORMAT, VERSION, "plan")
        schedule = schedule_from(read(data, "schedule", dict))
        verify(schedule)
        costs = Costs.from_json(read(data, "costs", dict))
        costs.check_lengths(schedule.stages, schedule.microbatches)
        optional = {"caps": None, "bound": None, "mesh": {}, "reshard_after_forward": "default", "meshes": [], **data}
        optional.setdefault("collectives", {})
        plan = Plan(
            schedule=schedule,
            layers_per_stage=read(data, "layers_per_stage", tuple[PositiveInt, ...]),
            recompute=read(data, "recompute", Literal["none", "stage"] | tuple[str, ...]),
            costs=costs,
            memory=read(data, "memory", tuple[RankMemory, ...]),
            caps=read(optional, "caps", tuple[NonNegative, ...] | None),
            bound=read(optional, "bound", NonNegative | None),
            alternatives=read(data, "alternatives", tuple[Alternative, ...]),
            samples=read(data, "samples", PositiveInt),
            names=read(data, "names", tuple[str, ...]),
            notes=read(data, "notes", tuple[str, ...]),
            mesh=read(optional, "mesh", dict[str, PositiveInt]),
            reshard_after_forward=read(optional, "reshard_after_forward", Literal["default", "always", "never"]),
            unit_seconds=read({"unit_seconds": [], **optional}, "unit_seconds", tuple[NonNegative, ...]),
            collectives=read(optional, "collectives", Collectives),
            meshes=read(optional, "meshes", tuple[MeshAlternative, ...]),
            uncertainty=read({"uncertainty": 0.0, **data}, "uncertainty", NonNegative),
        )
        if plan.recompute == ():
            raise JsonError('\'recompute\' must be "none", "stage" or a list of unit names, got an empty list')
        if plan.mesh:
            read_mesh(plan.mesh, schedule.ranks)
        _check_length("layers_per_stage", plan.layers_per_stage, schedule.stages, "stages")
        _check_length("memory", plan.memory, schedule.ranks, "ranks")
        if plan.names:
            _check_length("names", plan.names, sum(plan.layers_per_stage), "units")
        if plan.caps is not None:
            _check_length("caps", plan.caps, schedule.ranks, "ranks")
        return plan
    except StagelineError as error:
        raise StagelineError(f"{source}: {error}") from None


def _check_length(name: str, values: Sequence[object], expected: int, what: str) -> None:
    if len(values) != expected:
        raise JsonError(f"{name!r} must have one entry for each of the {expected} {what}, got {len(values)}")

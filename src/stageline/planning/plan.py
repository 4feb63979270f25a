"""`plan`: the fastest way to train a model on a number of ranks within their memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from stageline.autograd.graphs.options import Compile
from stageline.common.checked_json import NonNegative, PositiveInt, check_format, json_lines, parse_json
from stageline.common.checked_json import field as read
from stageline.common.errors import JsonError, NothingFits, StagelineError, shorten
from stageline.common.files import read_text, write_text
from stageline.common.units import Size
from stageline.model.neighbours import Launcher
from stageline.model.profile import NOISY, Profile
from stageline.model.samples import FEW
from stageline.planning import request as arguments
from stageline.planning.candidates import Trial
from stageline.planning.costs import RankMemory, Recompute, SizedProfiles
from stageline.planning.devices import DeviceRequest, MeshAlternative, MeshSearch
from stageline.planning.explain import explain, nothing_fits
from stageline.planning.mesh import RESHARD, check_one_size, read_mesh
from stageline.planning.mesh_costs import Collectives, MeshTime, lowered
from stageline.planning.network import PerLink, load_links, per_rank, read_network
from stageline.planning.request import SYNTHESIZED, PlanRequest
from stageline.planning.search import PlanSearch
from stageline.planning.tensor_parallel import TensorParallel
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.registry import schedule as make_schedule
from stageline.schedules.registry import whole
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.timeline.costs import Costs, Share, SharedLink
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline, share_above

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.model.split import Staged

FORMAT, VERSION = "stageline-plan", 1
CUT_SHORT = "the time limit ended the search before everything was tried"


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


def plan(
    model: nn.Module | None = None,
    example: Any = None,
    *,
    ranks: int | Literal["auto"] | None = None,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    devices: int | None = None,
    tp: int | Sequence[int] | None = None,
    cores: float | Sequence[Share] | None = None,
    launcher: Launcher = "processes",
    speed: float | Sequence[float] | None = None,
    reshard_after_forward: str = "default",
    shard_optimizer: bool = False,
    batch: int | None = None,
    microbatches: int | None = None,
    memory: Size | Sequence[Size] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    compile: Compile = False,
    profile: Profile | Mapping[int, Profile] | None = None,
    samples: int | None = None,
    recompute: Recompute = "auto",
    schedule: str | Sequence[str] | Schedule = "auto",
    chunks: int | None = None,
    split: str = "time",
    layers_per_stage: Sequence[int] | None = None,
    transfer: PerLink = 0.0,
    bandwidth: PerLink = None,
    links: Sequence[SharedLink] = (),
    overhead: float = 0.0,
    parameter_bytes: float | None = None,
    gradient_bytes_per_parameter: float | None = None,
    optimizer_bytes_per_parameter: float = 8.0,
    interlock: bool = False,
    cuda_graphs: bool = False,
    time_limit: float = 5.0,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Find the fastest way to train a model on a number of ranks within their memory.

    `example` is one microbatch, and `microbatches` the number of microbatches in a step. Alternatively, `batch` is the
    number of samples in a step: then the number of microbatches is chosen among its divisors, and the model is also
    measured on fewer samples of the example. Instead of a model and an example, pass `profile`, from `sl.profile` on
    any machine, or several profiles by number of samples; with `batch` and a single profile, `samples` is the number of
    samples that it was measured with. With `loss_fn` and its `targets` for the example, the last stage includes the
    loss, whose time and memory count where outputs are large, as those of a vocabulary are. `compile` is that of
    `Pipeline`: units are measured compiled.

    `memory` is the limit of a rank, in bytes or as a string like "24GiB", or one per rank; by default, that of the
    model's GPU. It includes parameters, gradients, optimizer state (8 bytes per parameter: AdamW in float32),
    activations and messages; with `interlock`, also what `Pipeline.run` keeps to undo a step; with
    `cuda_graphs`, also the outputs that stay where they are. `recompute` is "auto"
    (units or stages if memory requires it), "none", "stage" or names of units. `schedule` is the name of one or several
    families, or a schedule for which a cut is to be found; `chunks` is the number of stages per rank; `split` is what
    the cut balances ("time", "parameters" or "layers"), and `layers_per_stage` fixes it. A message takes `transfer`
    seconds plus its bytes divided by `bandwidth`; both are one number, one per pair of ranks, or one per dimension of
    the mesh, as in {"pp": "50G", "tp": "300G"}, or a .json or .csv file of them. Messages that share one of the `links`
    slow each other down. The forward of a stage takes `overhead` seconds beside its layers. `speed` is the speed of
    each rank relative to the profile. After the measurement, the search takes about `time_limit` seconds.

    Ranks on one machine without GPUs share its `cores`: while more of them compute than there are cores for their
    threads, they slow each other down. By default every rank has its own; a list of `sl.Share` says which ranks share
    what. With `ranks="auto"`, the number of ranks that share the cores is chosen, too. Where the ranks find a core each
    on this machine, a model on the CPU is measured alone and with as many others at work, as processes or, with
    `launcher="threads"`, as threads: they share memory, caches and, as threads, the interpreter lock.

    One of `ranks`, `mesh` and `devices` is given. `ranks` is the number of pipeline ranks. `mesh` has sizes of the
    dimensions pp, dp_replicate, dp_shard and tp, and `memory` is that of one of its processes: dp_shard and tp divide
    parameters, gradients and optimizer state. dp_shard also gathers parameters, until a stage's last use in a step or,
    with `reshard_after_forward` "always", block by block. With `shard_optimizer`, dp_replicate divides the optimizer
    state, too. With a `bandwidth`, gathers, reductions and the collectives of tensor parallel take time. `batch` and
    `microbatches` are those of one pipeline.

    With `devices`, the number of processes, the mesh is chosen; `plan.meshes` compares it with others. Then `batch` and
    `microbatches` are those of all pipelines together, and `tp` the sizes of tensor parallel that are tried: by
    default, those that divide the heads and widths of the model.

    >>> import torch, stageline as sl
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    >>> best = sl.plan(model, torch.ones(4, 32), ranks=3, batch=16, schedule=["1f1b", "gpipe"], repeats=1)
    >>> best.schedule.name in ("1f1b", "gpipe"), best.samples * best.microbatches
    (True, 16)
    >>> sl.plan(ranks=4, batch=8)
    Traceback (most recent call last):
    stageline.StagelineError: plan needs a model and an example, one microbatch to run it on, or profile=
    """
    check_one_size(ranks, mesh, devices)
    transfer, bandwidth = load_links("transfer", transfer), load_links("bandwidth", bandwidth)
    if mesh is not None or ranks not in (None, "auto"):
        read_mesh(mesh, ranks)
    reshard = arguments.one_of("reshard_after_forward", reshard_after_forward, RESHARD)
    if not isinstance(shard_optimizer, bool):
        raise StagelineError(f"shard_optimizer is True or False, got {shorten(shard_optimizer)}")
    progress = progress or (lambda text: None)
    limit = arguments.positive_seconds("time_limit", time_limit)
    arguments.one_of("launcher", launcher, ("processes", "threads"))
    neighbours = arguments.read_neighbours(cores, read_mesh(mesh, ranks)[1] if isinstance(ranks, int) else 1, model)
    profiles = arguments.read_profiles(
        model, example, profile, samples, batch is not None, repeats, progress, loss_fn, targets, compile,
        neighbours if repeats >= FEW else 0, launcher,
    )  # fmt: skip
    if parameter_bytes is None:
        parameter_bytes = arguments.bytes_per_parameter(model)

    @cache
    def divided_by(parts: int) -> tuple[TensorParallel, SizedProfiles]:
        tensor_parallel = TensorParallel.of(parts, model, profiles.names)
        return tensor_parallel, tensor_parallel.divide(profiles)

    def request_for(degrees: Mapping[str, int], num_ranks: int, pipelines: int = 1) -> PlanRequest:
        """The request for one mesh; `pipelines` divide the batch among them."""
        tensor_parallel, divided = divided_by(degrees.get("tp", 1))
        network = read_network(transfer, bandwidth, degrees, num_ranks, links)
        return PlanRequest(
            divided,
            num_ranks,
            arguments.read_splits(profiles, batch, microbatches, pipelines),
            caps=arguments.read_caps(memory, num_ranks, model, degrees),
            states=arguments.read_states(
                parameter_bytes,
                gradient_bytes_per_parameter,
                optimizer_bytes_per_parameter,
                interlock,
                cuda_graphs,
                degrees.get("dp_shard", 1),
                reshard,
                degrees.get("dp_replicate", 1) if shard_optimizer else 1,
            ),
            mesh=degrees,
            reshard=reshard,
            time=MeshTime(degrees, network, tensor_parallel, per_rank("speed", speed, degrees, num_ranks)),
            overhead=arguments.seconds("overhead", overhead),
            shares=arguments.read_shares(
                cores, num_ranks, profiles.largest.threads, profiles.largest.speeds, here=profile is None
            ),
            recompute=arguments.read_recompute(recompute, profiles),
            names=arguments.read_families(schedule),
            schedule=schedule if isinstance(schedule, Schedule) else None,
            chunks=None if chunks is None else whole("plan", "chunks", chunks),
            by=arguments.one_of("split", split, ("time", "parameters", "layers")),
            counts=None if layers_per_stage is None else tuple(int(count) for count in layers_per_stage),
            synthesis=schedule == "auto" or (not isinstance(schedule, Schedule) and SYNTHESIZED in schedule),
            time_limit=limit,
            seed=seed,
        )

    if devices is not None:
        if cores is not None or links:
            raise StagelineError("devices= plans for processes that share nothing; leave cores= and links= out")
        sizes = {"batch": batch, "microbatches": microbatches}
        lists = {"bandwidth": bandwidth, "transfer": transfer, "speed": speed, "memory": memory}
        return plan_devices(
            DeviceRequest.read(devices, tp, model, profiles, sizes, lists, request_for), limit, progress
        )
    if tp is not None:
        raise StagelineError("tp= is for devices=, which chooses the mesh; state the size in mesh=, as in {'tp': 2}")
    counts = arguments.read_ranks(ranks, cores, profiles)
    requests = [replace(request_for(*read_mesh(mesh, count)), time_limit=limit / len(counts)) for count in counts]
    for request in requests:
        arguments.check_sizes(request)
    return fastest_plan(requests, progress)


def fastest_plan(requests: Sequence[PlanRequest], progress: Callable[[str], None]) -> Plan:
    """Return the fastest plan of several requests, of equals the first; raise the last error if nothing fits any."""
    plans: list[Plan] = []
    for request in requests:
        try:
            plans.append(find_plan(request, progress))
        except NothingFits:
            if request is requests[-1] and not plans:
                raise
    return min(plans, key=lambda plan: plan.step_seconds)


def find_plan(request: PlanRequest, progress: Callable[[str], None] = lambda text: None) -> Plan:
    """Return the best plan for a request; raise an error with suggestions if nothing fits."""
    search = PlanSearch(request, progress)
    search.run()
    if search.best is None:
        raise nothing_fits(search, progress)
    return plan_of(search)


def plan_devices(devices: DeviceRequest, limit: float, progress: Callable[[str], None]) -> Plan:
    """Return the best plan of all meshes; raise an error with suggestions if nothing fits any."""
    search = MeshSearch(devices, limit, progress)
    search.run()
    if search.best is None:
        raise nothing_fits(search.closest, progress, devices=True)
    best = plan_of(search.best)
    notes = [*best.notes, *devices.notes]
    if search.was_cut_short and CUT_SHORT not in notes:
        notes.append(CUT_SHORT)
    return replace(best, meshes=search.alternatives(), notes=tuple(notes))


def plan_of(search: PlanSearch) -> Plan:
    """Return the plan that a search has found."""
    request, best = search.request, search.best
    assert best is not None
    candidate = best.candidate
    schedule = best.schedule or make_schedule(best.name, request.ranks, candidate.microbatches, **best.options)
    verify(schedule)
    notes = [request.profiles.note([samples for _, samples in request.splits]), *request.time.notes]
    noisiest = request.profiles.noisiest
    notes += [noisiest.noise]
    notes += [CUT_SHORT] if search.was_cut_short else []
    # The best cut of every other kind of plan; trials are sorted.
    alternatives: dict[Any, Alternative] = {}
    for alternative in (Alternative.of(trial) for trial in search.trials if trial is not best):
        alternatives.setdefault(alternative.kind, alternative)
    alternatives.pop(Alternative.of(best).kind, None)
    return Plan(
        schedule=schedule,
        layers_per_stage=candidate.counts,
        recompute=candidate.recompute,
        costs=search.evaluator.costs(candidate),
        memory=best.memory,
        caps=request.caps,
        bound=search.lower_bound(best),
        alternatives=tuple(alternatives.values()),
        samples=candidate.samples,
        names=request.profiles.names,
        notes=tuple(note for note in notes if note),
        mesh=request.mesh,
        reshard_after_forward=request.reshard,
        unit_seconds=tuple(request.time.layer_seconds(search.evaluator.profile(candidate.samples), False, split=False)),
        collectives=search.evaluator.collectives(candidate),
        uncertainty=noisiest.uncertainty,
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

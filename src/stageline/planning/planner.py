"""`plan`: the fastest way to train a model on a number of ranks within their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from stageline.autograd.graphs.options import Compile
from stageline.common.errors import NothingFits, StagelineError, shorten
from stageline.common.units import Size
from stageline.model.neighbours import Launcher
from stageline.model.profile import Profile
from stageline.model.samples import FEW
from stageline.planning import request as arguments
from stageline.planning.costs import Recompute, StateBytes
from stageline.planning.explain import nothing_fits
from stageline.planning.mesh import RESHARD, PerLink, check_one_size, load_links, per_rank, read_mesh, read_network
from stageline.planning.mesh_costs import HostOverhead, MeshTime
from stageline.planning.plan import Alternative, Plan
from stageline.planning.profiles import SizedProfiles, measure_sizes
from stageline.planning.request import SYNTHESIZED, PlanRequest
from stageline.planning.search import PlanSearch
from stageline.planning.tensor_parallel import TensorParallel, refuse_degree
from stageline.schedules.registry import schedule as make_schedule
from stageline.schedules.registry import whole
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.timeline.costs import Share, SharedLink

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CUT_SHORT = "the search reached its time limit before everything was tried"


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
    message_overhead: float = 0.0,
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
    slow each other down. Every action takes `overhead` seconds beside its layers, and its rank `message_overhead`
    seconds for each message that it sends or receives. `speed` is the speed of each rank relative to the profile. After
    the measurement, the search takes about `time_limit` seconds.

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
    stageline.StagelineError: plan needs a model and example=, one microbatch to run it on, or profile=
    """
    options = PlanOptions(**locals())  # all arguments by their names
    profiles = options.read_profiles()
    if devices is not None:
        return _plan_devices(options, profiles)
    if tp is not None:
        raise StagelineError(
            "tp= works only with devices=, which chooses the mesh; give the size in mesh=, as in {'tp': 2}"
        )
    counts = arguments.read_ranks(ranks, cores, profiles)
    limit = options.time_limit / len(counts)
    requests = [replace(options.request(profiles, *read_mesh(mesh, count)), time_limit=limit) for count in counts]
    for request in requests:
        arguments.check_sizes(request)
    return _fastest_plan(requests, options.progress)


def _no_progress(text: str) -> None:
    pass


@dataclass
class PlanOptions:
    """The arguments of `plan`, which documents each."""

    model: nn.Module | None
    example: Any
    ranks: int | Literal["auto"] | None
    mesh: Mapping[str, int] | DeviceMesh | None
    devices: int | None
    tp: int | Sequence[int] | None
    cores: float | Sequence[Share] | None
    launcher: Launcher
    speed: float | Sequence[float] | None
    reshard_after_forward: str
    shard_optimizer: bool
    batch: int | None
    microbatches: int | None
    memory: Size | Sequence[Size] | None
    loss_fn: Callable[[Any, Any], Any] | None
    targets: Any
    compile: Compile
    profile: Profile | Mapping[int, Profile] | None
    samples: int | None
    recompute: Recompute
    schedule: str | Sequence[str] | Schedule
    chunks: int | None
    split: str
    layers_per_stage: Sequence[int] | None
    transfer: PerLink
    bandwidth: PerLink
    links: Sequence[SharedLink]
    overhead: float
    message_overhead: float
    parameter_bytes: float | None
    gradient_bytes_per_parameter: float | None
    optimizer_bytes_per_parameter: float
    interlock: bool
    cuda_graphs: bool
    time_limit: float
    repeats: int
    seed: int
    progress: Any
    _divided: dict[int, tuple[TensorParallel, SizedProfiles]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what needs no profile."""
        check_one_size(self.ranks, self.mesh, self.devices)
        self.transfer, self.bandwidth = load_links("transfer", self.transfer), load_links("bandwidth", self.bandwidth)
        if self.mesh is not None or self.ranks not in (None, "auto"):
            degrees, _ = read_mesh(self.mesh, self.ranks)
            if isinstance(self.model, nn.Module) and degrees.get("tp", 1) > 1:
                refuse_degree(self.model, degrees["tp"])
        arguments.one_of("reshard_after_forward", self.reshard_after_forward, RESHARD)
        if not isinstance(self.shard_optimizer, bool):
            raise StagelineError(f"shard_optimizer must be True or False, got {shorten(self.shard_optimizer)}")
        self.time_limit = arguments.positive_seconds("time_limit", self.time_limit)
        arguments.one_of("launcher", self.launcher, ("processes", "threads"))
        self.progress = self.progress or _no_progress

    def read_profiles(self) -> SizedProfiles:
        """Return the profiles that the user passed, or measure the model."""
        profile, several = self.profile, self.batch is not None
        if profile is None:
            if self.model is None or self.example is None:
                raise StagelineError("plan needs a model and example=, one microbatch to run it on, or profile=")
            if not isinstance(self.model, nn.Module):
                raise StagelineError(f"plan expects a model (nn.Module), got {shorten(self.model)}")
            ranks = read_mesh(self.mesh, self.ranks)[1] if isinstance(self.ranks, int) else 1
            neighbours = arguments.read_neighbours(self.cores, ranks, self.model) if self.repeats >= FEW else 0
            return measure_sizes(
                self.model, self.example, several=several, loss_fn=self.loss_fn, targets=self.targets,
                compile=self.compile, repeats=self.repeats, neighbours=neighbours, launcher=self.launcher,
                progress=self.progress,
            )  # fmt: skip
        if isinstance(profile, Mapping):
            return SizedProfiles.of(profile)
        if several and self.samples is None:
            raise StagelineError(
                "batch= needs the costs of other microbatch sizes than the profile's: pass samples=, the number of "
                "samples in the profiled microbatch, or pass microbatches= instead of batch="
            )
        return SizedProfiles.of({1 if self.samples is None else whole("plan", "samples", self.samples): profile})

    def request(self, profiles: SizedProfiles, mesh: Mapping[str, int], ranks: int, pipelines: int = 1) -> PlanRequest:
        """Return the request for one mesh; `pipelines` divide the batch among them."""
        tensor_parallel, divided = self._divide(profiles, mesh.get("tp", 1))
        network = read_network(self.transfer, self.bandwidth, mesh, ranks, self.links)
        schedule, counts, measured = self.schedule, self.layers_per_stage, profiles.largest
        return PlanRequest(
            divided,
            ranks,
            arguments.read_splits(profiles, self.batch, self.microbatches, pipelines),
            caps=arguments.read_caps(self.memory, ranks, self.model, mesh),
            states=self._states(mesh),
            mesh=mesh,
            reshard=self.reshard_after_forward,
            time=MeshTime(mesh, network, tensor_parallel, per_rank("speed", self.speed, mesh, ranks)),
            overhead=HostOverhead(
                arguments.seconds("overhead", self.overhead),
                arguments.seconds("message_overhead", self.message_overhead),
            ),
            shares=arguments.read_shares(
                self.cores, ranks, measured.threads, measured.speeds, here=self.profile is None
            ),
            recompute=arguments.read_recompute(self.recompute, profiles),
            names=arguments.read_families(schedule),
            schedule=schedule if isinstance(schedule, Schedule) else None,
            chunks=None if self.chunks is None else whole("plan", "chunks", self.chunks),
            by=arguments.one_of("split", self.split, ("time", "parameters", "layers")),
            counts=None if counts is None else tuple(int(count) for count in counts),
            synthesis=schedule == "auto" or (not isinstance(schedule, Schedule) and SYNTHESIZED in schedule),
            time_limit=self.time_limit,
            seed=self.seed,
        )

    def _divide(self, profiles: SizedProfiles, parts: int) -> tuple[TensorParallel, SizedProfiles]:
        """Return what tensor parallel of this size does to the model, and the profiles of one part."""
        if parts == 1:
            return TensorParallel(), profiles
        if parts not in self._divided:
            tensor_parallel = TensorParallel.of(parts, self.model, profiles.names)
            self._divided[parts] = tensor_parallel, tensor_parallel.divide(profiles)
        return self._divided[parts]

    def _states(self, mesh: Mapping[str, int]) -> StateBytes:
        """Return the bytes per parameter; shards divide them, and replicas may divide those of the optimizer."""
        parameter, gradient = self.parameter_bytes, self.gradient_bytes_per_parameter
        if parameter is None:
            parameter = arguments.bytes_per_parameter(self.model)
        for name, value, minimum in (
            ("parameter_bytes", parameter, 0.1),
            ("gradient_bytes_per_parameter", 0.0 if gradient is None else gradient, 0.0),
            ("optimizer_bytes_per_parameter", self.optimizer_bytes_per_parameter, 0.0),
        ):
            if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < 1e6:
                raise StagelineError(f"{name} must be a number of bytes >= {minimum:g}, got {shorten(value)}")
        if not isinstance(self.interlock, bool):
            raise StagelineError(
                f"interlock must be True (for continuous steps, pipe.run) or False, got {shorten(self.interlock)}"
            )
        if not isinstance(self.cuda_graphs, bool):
            raise StagelineError(f"cuda_graphs must be True or False, got {shorten(self.cuda_graphs)}")
        return StateBytes(
            float(parameter),
            None if gradient is None else float(gradient),
            float(self.optimizer_bytes_per_parameter),
            continuous=self.interlock,
            cuda_graphs=self.cuda_graphs,
            shards=mesh.get("dp_shard", 1),
            by_block=self.reshard_after_forward == "always",
            optimizer_replicas=mesh.get("dp_replicate", 1) if self.shard_optimizer else 1,
        )


def _fastest_plan(requests: Sequence[PlanRequest], progress: Callable[[str], None]) -> Plan:
    """Return the fastest plan of several requests, of equals the first; raise the last error if nothing fits any."""
    plans: list[Plan] = []
    for request in requests:
        try:
            plans.append(_find_plan(request, progress))
        except NothingFits:
            if request is requests[-1] and not plans:
                raise
    return min(plans, key=lambda plan: plan.step_seconds)


def _find_plan(request: PlanRequest, progress: Callable[[str], None]) -> Plan:
    """Return the best plan for a request; raise an error with suggestions if nothing fits."""
    search = PlanSearch(request, progress)
    search.run()
    if search.best is None:
        raise nothing_fits(search, progress)
    return _plan_of(search)


def _plan_devices(options: PlanOptions, profiles: SizedProfiles) -> Plan:
    """Return the best plan of all meshes; raise an error with suggestions if nothing fits any."""
    from stageline.planning.devices import DeviceRequest, MeshSearch

    if options.cores is not None or options.links:
        raise StagelineError("devices= plans for processes that share no resources; leave out cores= and links=")
    sizes = {"batch": options.batch, "microbatches": options.microbatches}
    lists = {name: getattr(options, name) for name in ("bandwidth", "transfer", "speed", "memory")}
    devices = DeviceRequest.read(
        options.devices, options.tp, options.model, profiles, sizes, lists, partial(options.request, profiles)
    )
    search = MeshSearch(devices, options.time_limit, options.progress)
    search.run()
    if search.best is None:
        raise nothing_fits(search.closest, options.progress, devices=True)
    best = _plan_of(search.best)
    notes = [*best.notes, *devices.notes]
    if search.was_cut_short and CUT_SHORT not in notes:
        notes.append(CUT_SHORT)
    return replace(best, meshes=search.alternatives(), notes=tuple(notes))


def _plan_of(search: PlanSearch) -> Plan:
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

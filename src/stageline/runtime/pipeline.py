"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from stageline.autograd.recompute import Choice, Policy, mark, understand
from stageline.common.errors import PipelineError, StagelineError, shorten
from stageline.distributed.collectives import ProcessCollectives
from stageline.distributed.layout import mesh_of, ranks_of
from stageline.distributed.process_host import find_world
from stageline.distributed.rank_host import Floats
from stageline.model.compiled_models import any_compiled
from stageline.model.stage_module.shared_state import SharedState
from stageline.model.staged import Staged
from stageline.runtime.automatic_plan import Automatic, automatic
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.compile import Compile, compile_units
from stageline.runtime.continuous.rollback import Make
from stageline.runtime.continuous.run import Rates, Run
from stageline.runtime.executor import Executors
from stageline.runtime.grad_norm import norm_dtype, norms_of, owners_of, total_norm
from stageline.runtime.grad_reduce import check_buckets
from stageline.runtime.guards.foreign_reads import holders_of, readers
from stageline.runtime.guards.initial_weights import compare_weights, held_by_several
from stageline.runtime.guards.loss_reads import Tensors, listed
from stageline.runtime.handshake import common_seed, facts_of, find_deadline, function_fact
from stageline.runtime.microbatches import Keywords, Reduction, check_reduction, input_parts
from stageline.runtime.optimizer_step import GradientRules, scale_gradients
from stageline.runtime.penalty import Penalty, check_penalty
from stageline.runtime.replan import Replan, watch_for
from stageline.runtime.replicas import Replicas, replica_seed
from stageline.runtime.shared_parameters import Placed, place
from stageline.runtime.stage import StageOptions, watched_layers
from stageline.runtime.stages import (
    check_options,
    count_layers,
    cut_by_batch,
    cut_or_wait,
    described,
    find_schedule,
    refuse_odd_tensors,
    refuse_second,
    whole_model,
)
from stageline.runtime.state_dict import check_state, gather_state, watched
from stageline.runtime.step import Batch, Runner
from stageline.runtime.step_report import Measured, joined, lengths_of, times_of
from stageline.runtime.step_stats import Evaluation, StepStats
from stageline.runtime.summary import described_in_words
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.tensors.pytree import refuse_arrays
from stageline.timeline.costs import Costs
from stageline.timeline.stragglers import Stragglers
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.planning.plan import Plan


class Pipeline(Runner):
    """A model cut into stages, trained microbatch by microbatch in the order of a schedule.

    Every rank is a thread of this process. A step adds to the `.grad` of every parameter just what this loop would,
    bit for bit at equal thread counts:

    `for xi, yi in zip(x.tensor_split(M), y.tensor_split(M)): (loss_fn(model(xi), yi) * (len(xi) / len(x))).backward()`

    >>> import torch, stageline as sl
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    >>> pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="zb-h1", microbatches=4, ranks=2)
    >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    >>> x, y = torch.randn(8, 4), torch.randn(8, 2)
    >>> for _ in range(3):
    ...     stats = pipe.step(x, y)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> stats.samples, stats.microbatches, pipe.timeline.schedule.name
    (8, 4, 'zb-h1')
    """

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Say what `stages=` beside a model comes to, before Python refuses it in fewer words."""
        if given and "stages" in named and cls.__init__ is Pipeline.__init__:
            refuse_second(named["stages"])
        return super().__new__(cls)

    def __init__(
        self,
        stages: nn.Module | Staged | Callable[[], nn.Module] | Sequence[nn.Module | Callable[..., Any]],
        *,
        loss_fn: Callable[[Any, Any], Any],
        schedule: str | Path | Schedule | type = "1f1b",
        microbatches: int | None = None,
        ranks: int | None = None,
        replicas: int | None = None,
        mesh: DeviceMesh | None = None,
        bucket_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
        loss_reduction: Reduction = "mean",
        penalty: Penalty | None = None,
        recompute: Choice = "none",
        recompute_policy: Policy | None = None,
        seed: int | None = None,
        deadline: float | None = None,
        check_finite: bool = True,
        compare_weights: bool = True,
        example: Any = None,
        device: torch.device | str = "cpu",
        compile: Compile = False,
        replan: Replan = "off",
        replan_every: int = 10,
        planned: Costs | Plan | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        targets_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        stragglers: bool = True,
        **options: Any,
    ) -> None:
        """`stages` is a model, which is cut evenly (see `sl.split` for other cuts), or one module per stage.

        It may also be a function that builds the model, or a list of functions that build its layers: then a process
        has memory only for its own stages, on `device`, and weights depend on the seed and on names (see `sl.build`).
        `loss_reduction` says how microbatches weigh: "mean", each by its share of the samples; "sum", each once;
        "count", each divided by the `count` that `step` is given, for sums over targets, such as padded text.
        `penalty` is a function of a parameter's name and the parameter that gives one number as a tensor, or None; the
        sum over all parameters is added to the loss once a step (see "Penalties" in docs/runtime.md).
        `recompute="stage"` keeps only what a stage was given and runs its forward once more before its backward;
        names (`"*.mlp"`), classes or a function of name and module choose modules instead, and `recompute_policy` is
        torch's policy of which operators of them to keep.
        `seed` is what dropout draws from (torch's own seed on rank 0 unless given). `deadline` is how many seconds a
        rank may be silent, or be waited for while nobody is at work, before the step fails with its name (60, or what
        the environment says as STAGELINE_DEADLINE). `check_finite` fails a step whose loss or gradients are not finite,
        with the stage and microbatch where that began; gradients of a `scale` above 1 are left to the scaler.
        `compare_weights` compares, in the first step, the weights that two or more processes hold (tied weights, both
        directions, replicas), and names the first that differs; False skips that.
        `example` is a batch by which a model shows the order in which it calls its parts (see `sl.split`). Where all
        ranks are threads and none is given, the model is cut by the first batch; processes need it where the order of
        calls is not that of the definitions.
        `schedule="auto"` measures the model on the example, a batch as a step is given it, and takes the cut, the
        schedule and, unless given, the number of microbatches that `sl.plan` finds; `recompute="auto"` is its too.
        `replicas` trains so many copies of the pipeline, each on samples of its own, in ranks × replicas processes;
        `mesh` says which process is which, by dimensions named "dp" and "pp". Gradients are added up over them in
        buckets of `bucket_mb` MiB, in float32 or better unless `reduce_dtype` says otherwise.
        `compile` is True, the name of a backend or the keywords of torch.compile, which then compiles every layer, or
        unit of a model (see docs/runtime.md). `options` are the family's own, such as `chunks`.
        `replan` compares the last steps of every `replan_every` with `planned`, with the plan of "auto" or with the
        first of them: "warn" says which stage drifts, "auto" takes a better order for the next step (see docs/plan.md).
        `args_chunk_spec`, `kwargs_chunk_spec` (by keyword, for inputs that are a dict and for `stage_kwargs`) and
        `targets_chunk_spec` say what is not cut along its first dimension: torch's `TensorChunkSpec(dim)`, or None for
        what every microbatch is given whole. `output_merge_spec` says how outputs are put together again.
        `stragglers` logs one line when a stage becomes slower than the others and stays so (see docs/runtime.md).
        """
        schedule = schedule.__name__ if isinstance(schedule, type) else schedule  # a class of torch's
        refuse_arrays(example, "the example")
        check_options(options, schedule, Pipeline.__init__.__kwdefaults__ or ())
        check_reduction(loss_reduction)
        check_buckets(bucket_mb, reduce_dtype)
        check_penalty(penalty)
        if not callable(loss_fn):
            raise StagelineError(f"loss_fn is a function of output and target, got {shorten(loss_fn)}")
        seconds = find_deadline(deadline)
        self._specs = ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, targets_chunk_spec, output_merge_spec)
        given, recipe = described(stages)
        ranks = ranks_of(mesh) if ranks is None and mesh is not None else ranks
        auto: Automatic | None = None
        if isinstance(schedule, str) and schedule == "auto":
            if self._specs:
                raise StagelineError(
                    "schedule='auto' measures microbatches that are cut along the first dimension, and chunk specs are "
                    "given; name a schedule, or plan with sl.plan and give its schedule"
                )
            auto = automatic(
                stages, given, recipe, ranks=ranks, replicas=replicas, mesh=mesh, deadline=seconds,
                microbatches=microbatches, example=example, recompute=recompute, device=device, options=options,
            )  # fmt: skip
            given, schedule, recompute, microbatches, options = (
                auto.staged,
                auto.plan.schedule,
                auto.recompute,
                None,
                {},
            )
        self.plan = None if auto is None else auto.plan
        """How it was planned, where it was."""
        again = understand(recompute, recompute_policy)
        self.model = whole_model(given)
        refuse_odd_tensors(self.model)
        self._exact = not isinstance(given, nn.Module | Staged)
        self.schedule = find_schedule(schedule, count_layers(given), ranks, microbatches, **options)
        self.certificate = verify(self.schedule)
        self._watch = watch_for(replan, replan_every, planned, self.plan, self.schedule)
        self.replans = []
        self._stragglers = Stragglers(self.schedule) if stragglers and self.schedule.training else None
        self.loss_fn = loss_fn
        self.penalty = penalty
        self.loss_reduction = loss_reduction
        self.check_finite = check_finite
        self.recomputed = mark(self.model, again, recompute)
        self._given, self._compile = given, compile
        self._defined: list[nn.Sequential] = []
        """The stages by the order of definitions, once the first batch showed others."""
        self._waits = example is None and isinstance(given, nn.Module) and not isinstance(given, nn.Sequential)
        given, self._parts, untold = cut_or_wait(given, self.model, self.schedule.stages, example)
        self._mesh = mesh
        self._world = auto.world if auto is not None else find_world(self.schedule.ranks, seconds, replicas, mesh)
        self._waits = self._waits and self._alone  # processes must know at once which parameters are theirs
        if untold is not None and not self._waits:
            raise untold
        self._world.check_same(
            {
                **facts_of(self.model, self.schedule),
                "the seed that was given": repr(seed),
                "loss_reduction": loss_reduction,
                "loss_fn": function_fact(loss_fn),
                "penalty": function_fact(penalty),
                "check_finite": str(check_finite),
                "recompute": "\n".join([f"stages {again.stages}", *self.recomputed]),
                "compare_weights": str(compare_weights),
                "replicas and mesh": repr(self._world.layout.rows),
                "bucket_mb and reduce_dtype": f"{bucket_mb:g} {reduce_dtype}",
                "the chunk specs": str(self._specs),
                "replan, replan_every and planned": f"{replan} {replan_every} {planned}",
            }
        )
        common = common_seed(self._world, seed)
        described_tensors = _named_tensors(self.model)
        if recipe is not None:
            recipe.materialise(self._owned_names().__contains__, seed=common, device=device)
            _, self._parts, _ = cut_or_wait(given, self.model, self.schedule.stages, example)
        self._compiled = compile is not False
        self._place()
        self._options = StageOptions(loss_fn, replica_seed(common, self.replica), again)
        self._compares = compare_weights
        self._watched = Tensors([*_named_tensors(self.model), *described_tensors])
        self._replicas = self._join_replicas(bucket_mb, reduce_dtype)
        self._crews: dict[tuple[int, bool], Executors] = {}
        self._steps = 0
        self._agreed: int | None = None
        self._measured: Measured | None = None
        self._running = False
        self._scaled = False
        """Whether the gradients of the last step are scaled, so that a scaler deals with those that are not finite."""

    def _place(self) -> None:
        """Give every rank that is here the modules of its stages, once they are known."""
        if not self._waits:
            compile_units((part for stage, part in enumerate(self._parts) if self._holds(stage)), self._compile)
        self._compiled = self._compiled or any_compiled(self._parts)
        layers = [watched_layers(part) for part in self._parts]
        self._sharing = SharedState.of(layers)
        self._readers = readers(self._parts, layers, [stage for stage in range(len(layers)) if self._holds(stage)])
        held = [*self._sharing.holders(), *(holders_of(self._parts) if self._readers else ())]
        self._placed = (
            place(self._parts, self.schedule.placement, self._world.here, held)
            if self._parts
            else Placed({rank: {} for rank in self._world.here}, {}, [])
        )

    def _see(self, batch: Batch) -> None:
        """Cut the model by the first batch, where no example was given: it shows the order of the model's calls."""
        self._look_at_batch(batch)
        shown = input_parts(batch.inputs, self.schedule.microbatches, 1, self._specs)[0]
        defined = self._parts
        self._cut_again(cut_by_batch(self._given, self.model, self.schedule.stages, shown, defined), waits=False)
        self._defined = defined

    def _forget_batch(self) -> None:
        """Wait for the first batch again, as the one that the model was cut by failed."""
        self._cut_again(self._defined, waits=True)

    def _cut_again(self, parts: list[nn.Sequential], *, waits: bool) -> None:
        """Take other stages, before the first batch that does not fail."""
        self._parts, self._waits = parts, waits
        self._crews.clear()
        self._place()
        for name in ("_owned", "_owners"):
            self.__dict__.pop(name, None)

    def _join_replicas(self, bucket_mb: float, dtype: torch.dtype | None) -> Replicas | None:
        """What joins this process to the other replicas, which must begin with the same weights."""
        world, column = self._world, self._world.replica_group
        if column is None:
            return None
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found = Replicas(
            world, column, self.schedule, self._parts, self._placed, names, bucket_mb=bucket_mb, dtype=dtype
        )
        if self._compares:
            replicas, placement = world.layout.replicas, self.schedule.placement
            compare_weights(world, held_by_several(self.model, self._parts, placement, replicas))
        return found

    @property
    def deadline(self) -> float:
        """How many seconds a rank may be silent before a step fails."""
        return self._world.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._world.deadline = seconds
        for executors in self._crews.values():
            for executor in executors.executors:
                executor.deadline = seconds

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has: in each replica, where there are several."""
        return self.schedule.ranks

    @property
    def replicas(self) -> int:
        """How many copies of the pipeline train together, each on samples of its own."""
        return self._world.layout.replicas

    @property
    def replica(self) -> int:
        """Which of them this process is in."""
        return self._world.replica

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The processes by replica ("dp") and rank ("pp"): the mesh that was given, or one of the pipeline's groups."""
        if self._mesh is not None:
            return self._mesh
        if not isinstance(self._world, ProcessCollectives):
            raise StagelineError("all ranks are threads of this process, and a mesh is of processes: use torchrun")
        return mesh_of(self._world)

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: threads, connections and measured times belong to this one."""
        raise StagelineError("a Pipeline cannot be copied or pickled; copy its model, and make a new Pipeline of that")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a pipeline runs whole batches, and training needs their targets."""
        raise StagelineError(
            "a Pipeline is not called as a model is: pipe.predict(inputs) gives the outputs, pipe.evaluate(inputs, "
            "targets) the loss, and pipe.step(inputs, targets) the gradients"
        )

    def __repr__(self) -> str:
        """The model, its schedule, and where the ranks live."""
        return described_in_words(self) if hasattr(self, "_running") else "<Pipeline that was not made>"

    # What a user of torch expects of a model.

    @cached_property
    def _owned(self) -> set[int]:
        """The stages whose weights are here."""
        return {stage for stages in self._placed.modules.values() for stage in stages}

    def _holds(self, stage: int) -> bool:
        """Whether a rank that is here runs this stage."""
        return bool(set(self.schedule.placement.table[:, stage].tolist()) & set(self._world.here))

    def _owned_names(self) -> set[str]:
        """The names of all tensors of the stages whose ranks are here."""
        parts: list[nn.Module] = [part for stage, part in enumerate(self._parts) if self._holds(stage)]
        parts = parts or [self.model]
        parameters = {name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)}
        return parameters | {name for part in parts for name, _ in part.named_buffers(remove_duplicate=False)}

    def _own_parts(self) -> Iterator[nn.Module]:
        """The stages that are here; the whole model, where it is cut by the first batch and that has not come."""
        if not self._parts:
            return iter([self.model])
        return (part for stage, part in enumerate(self._parts) if stage in self._owned)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages that are here, each once; gradients add into their `.grad`."""
        own = (parameter for _, parameter in self.named_parameters())
        return own if self._alone else watched(own)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages that are here, by their names in the whole model."""
        mine = {parameter for part in self._own_parts() for parameter in part.parameters()}
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter in mine)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradients by the names of their parameters."""
        return ((name, parameter.grad) for name, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stages that are here, by their names in the whole model."""
        found = {name: buffer for part in self._own_parts() for name, buffer in part.named_buffers()}
        order = (name for name, _ in self.model.named_buffers())
        return iter({name: found[name] for name in (*order, *found) if name in found}.items())

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """The state of the stages that are here, by names of the whole model.

        With `gather=True`, which all processes must call together, every one gets the whole model's, on the CPU.
        """
        own = {name: value for part in self._own_parts() for name, value in part.state_dict().items()}
        order = list(self.model.state_dict())
        if gather:
            return gather_state(self._world, self.schedule.ranks, own, order)
        return {name: own[name] for name in (*order, *own) if name in own}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with names of the whole model; what belongs to stages elsewhere is passed over."""
        self._refuse_in_run()
        check_state(state, set(self.model.state_dict()), set(self.state_dict()), strict)
        for part in self._own_parts():
            names = part.state_dict().keys()
            part.load_state_dict({name: state[name] for name in names if name in state}, strict=False)

    def train(self, mode: bool = True) -> Pipeline:
        """Switch all modules to training or evaluation."""
        self.model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Switch all modules to evaluation."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all stages and ranks, tied weights counted once; give back the norm before it."""
        if self._replicas is not None and self._replicas.pending:
            raise StagelineError(
                "gradients were accumulated with sync=False and differ between replicas; clip them after a step with "
                "sync=True"
            )
        norms = self._norms(norm_type)
        total = total_norm(norms, norm_type, norm_dtype(self.model.parameters()))
        decision = GradientRules(max_norm, self.check_finite and not self._scaled).decide(total)
        if decision.failed:
            self._refuse_norm(norms, total)
        if decision.factor is not None:
            gradients = (parameter.grad for parameter in self.parameters())
            scale_gradients((gradient for gradient in gradients if gradient is not None), decision.factor)
        return total

    def grad_norm(self, norm_type: float = 2.0, gradients: Mapping[str, Tensor] | None = None) -> Tensor:
        """The norm of the gradients of all stages and ranks, tied weights counted once, on the CPU.

        It is a float32, or a float64 where parameters are. It has the same bits on every rank, and for any number of
        them. `gradients` are by names, and those of the parameters unless given. All processes must call this together.
        """
        return total_norm(self._norms(norm_type, gradients), norm_type, norm_dtype(self.model.parameters()))

    def _norms(self, norm_type: float, gradients: Mapping[str, Tensor] | None = None) -> Floats:
        """The norm of each parameter's gradient, in the order of the model."""
        known = dict(self.named_gradients()) if gradients is None else gradients
        own = {name: known[name] for name, _ in self.named_parameters() if self.owns(name) and name in known}
        return self._world.all_reduce(norms_of([name for name, _ in self.model.named_parameters()], own, norm_type))

    def _refuse_norm(self, norms: Floats, total: Tensor) -> None:
        """Name the parameters whose gradients are not finite, and their stages."""
        stages = {name: stage for stage, part in reversed(list(enumerate(self._parts))) for name, _ in
                  part.named_parameters(remove_duplicate=False)}  # fmt: skip
        wrong = [
            f"{name} (stage {stages.get(name, '?')})"
            for (name, _), norm in zip(self.model.named_parameters(), norms.tolist(), strict=True)
            if not math.isfinite(norm)
        ]
        raise PipelineError(
            f"the norm of the gradients is {total.item()}, and those of {listed(wrong) or 'all parameters together'} "
            "are not finite or too large; no gradient was clipped and no parameter changed: call zero_grad() before "
            "the next step; check_finite=False lets such gradients pass"
        )

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer is this process's to count and to save; it is one process's in a replica."""
        return not self._parts or self._owners.get(name) in self._world.here

    @cached_property
    def _owners(self) -> dict[str, int]:
        """The rank that each parameter and buffer belongs to: the first that uses it."""
        return owners_of(self.model, self._parts, self.schedule.placement, self._placed)

    # Steps.

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        count: float | None = None,
        scale: float = 1.0,
        stage_kwargs: Keywords | None = None,
        sync: bool = True,
    ) -> StepStats:
        """Run every microbatch forward and backward; gradients add into `.grad`, and no parameter changes.

        Where every process is a rank, each may be given the whole batch, or None for what its stages do not need:
        inputs are read on the first stage, targets on the last. `count` is the number of targets that a loss is divided
        by, over all microbatches and, where gradients of several steps are added up, over all of those. `scale` is what
        all gradients are multiplied by, as float16 needs, or a mean over several steps; the loss that is told is not.
        Inputs that require grad get their gradients, where stage 0 is: a leaf in its `.grad`, and the graph of any
        other (`pipe.step(front(x), y)`) runs its backward once.
        `stage_kwargs` holds keyword inputs of single stages, `{2: {"mask": mask}}`, or of every stage that takes them,
        `{"all": {"mask": mask}}`; they are cut into microbatches as the batch is.
        Each replica is given samples of its own, and gradients are added up over all of them. With `sync=False` they
        only accumulate in every replica; the next step without it adds up all that has been accumulated.
        """
        self._refuse_to_train()
        if not (isinstance(scale, int | float) and 0 < scale < float("inf")):
            raise StagelineError(f"scale is a number above 0, got {shorten(scale)}")
        wanted = self._targets(targets)
        return self._step(
            Batch(inputs, wanted, stage_kwargs, training=True, count=count, scale=float(scale), sync=sync)
        )

    def _step(self, batch: Batch) -> StepStats:
        began = time.perf_counter()
        self._scaled = batch.scale > 1.0
        done = self._run(batch)
        crew, results = done.crew, done.results
        times, clocks = done.outcome.times, self._world.clocks
        known = (lambda: times_of(crew, results, clocks).reshape(-1)) if times is None else lambda: times
        self._measured = Measured(
            crew.schedule, self._world.all_reduce_async(known) if times is None else known, clocks
        )
        self._steps += 1
        self._notice(crew, lambda: lengths_of(crew, results, times) if self._alone or times is not None else None)
        measured = self._measured.timeline
        if self._watch is not None:
            self._look_at(self._watch, measured if len(done.work.weights) == self.schedule.microbatches else None)
        return StepStats(
            loss=done.loss,
            losses=done.outcome.losses,
            penalty=done.outcome.penalty,
            metrics=done.metrics,
            seconds=time.perf_counter() - began,
            samples=done.work.samples,
            microbatches=len(done.work.weights),
            unsplit=done.outcome.unsplit,
            measured=measured,
        )

    def run(
        self,
        batches: Iterable[Any],
        *,
        optimizer: torch.optim.Optimizer | Make,
        max_norm: float | None = None,
        lr_schedule: Rates | None = None,
        skip_not_finite: bool = False,
    ) -> Run:
        """Train on batches, step after step: gives the figures of every step, as soon as all ranks have made it.

        The same as `step`, `clip_grad_norm_(max_norm)`, `optimizer.step()` and `zero_grad()`, bit for bit, but a rank
        begins the next step while others still run the last one (see "Interlocking steps" in docs/runtime.md). What
        should have been clipped is found out one step later, and then made good; for that each rank keeps a copy of its
        parameters, optimizer state and buffers, and one more set of gradients: `snapshot_bytes` of the run.
        A batch is (inputs, targets); a dict of inputs; or a dict of arguments of `step`, with "inputs" among them.
        `optimizer` is one over `pipe.parameters()`, or a function that makes it of them. `lr_schedule` is a function
        from the number of a step to a factor, or a scheduler of torch's. Gradients that are not finite fail a step, or
        leave it out with `skip_not_finite`; if a step fails, parameters are those before it.
        """
        self._refuse_to_train()
        return Run(self, batches, optimizer, GradientRules(max_norm, self.check_finite, skip_not_finite), lr_schedule)

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        outputs: bool = False,
        count: float | None = None,
        stage_kwargs: Keywords | None = None,
    ) -> Evaluation:
        """Run the forwards alone, with the loss and its metrics; no gradient is touched."""
        began = time.perf_counter()
        wanted = self._targets(targets)
        done = self._run(Batch(inputs, wanted, stage_kwargs, keep=outputs, count=count))
        return Evaluation(
            loss=done.loss,
            losses=done.outcome.losses,
            metrics=done.metrics,
            outputs=joined(done.results, self._specs.output),
            seconds=time.perf_counter() - began,
        )

    def predict(self, inputs: Any, *, stage_kwargs: Keywords | None = None) -> Any:
        """Run the forwards alone; give back the outputs of the whole batch."""
        done = self._run(Batch(inputs, None, stage_kwargs, with_targets=False, keep=True))
        return joined(done.results, self._specs.output)

    @property
    def steps(self) -> int:
        """How many steps were made; what is drawn at random depends on it, so a run that goes on sets it."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise StagelineError(f"steps is a whole number from 0 upwards, got {shorten(value)}")
        self._steps = value

    @property
    def timeline(self) -> Timeline:
        """When every action and transfer of the last step ran, comparable with `stageline.simulate`."""
        if self._measured is None:
            raise StagelineError("there is no timeline before the first step")
        return self._measured.timeline()


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers of a model, tied ones by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]

"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from stageline.autograd.graphs.options import Compile
from stageline.autograd.recompute import Choice, Policy, mark, parse_recompute
from stageline.common.errors import StagelineError, shorten
from stageline.common.units import pluralize
from stageline.distributed.collectives import ProcessCollectives
from stageline.distributed.launchers.threads import launched_ranks
from stageline.distributed.layout import mesh_of, ranks_of
from stageline.distributed.rank_host import Floats, RankHost
from stageline.model.split import Staged
from stageline.runtime.batches.chunk_specs import ChunkSpecs, Keywords
from stageline.runtime.continuous.rollback import Make
from stageline.runtime.continuous.run import ContinuousRun, Rates
from stageline.runtime.guards.non_finite import refuse_norm
from stageline.runtime.microbatches import Batch
from stageline.runtime.optimizer_shards import OptimizerShards
from stageline.runtime.optimizer_step import GradientRules, norm_dtype, norms_of, scale_gradients, total_norm
from stageline.runtime.penalty import Penalty
from stageline.runtime.replan import Replan, Replanned
from stageline.runtime.setup.automatic_plan import automatic
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions, Reduction
from stageline.runtime.setup.stages import (
    check_options,
    count_layers,
    default_ranks,
    described,
    find_schedule,
    on_one_gpu,
    refuse_odd_tensors,
    refuse_other_device,
    refuse_second,
    whole_model,
)
from stageline.runtime.setup.start import Blueprint, start
from stageline.runtime.state_dict import check_shapes, check_state, gather_state, watched
from stageline.runtime.step import StepRunner
from stageline.runtime.step_report import Evaluation, StepStats, joined
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import ReshardAfterForward
from stageline.schedules.verify import Certificate
from stageline.tensors.sharded import part_like
from stageline.timeline.costs import Costs
from stageline.timeline.drift import Drift
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.planning.plan import Plan


class Pipeline:
    """A model cut into stages, trained microbatch by microbatch in the order of a schedule.

    Ranks are threads of this process, or processes of a job. A step adds to the `.grad` of every parameter what this
    loop would, bit for bit at equal thread counts:

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse `stages=` beside a model with a clearer error than Python's."""
        if args and "stages" in kwargs and cls.__init__ is Pipeline.__init__:
            refuse_second(kwargs["stages"])
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
        cuda_graphs: bool = False,
        replan: Replan = "off",
        replan_every: int = 10,
        planned: Costs | Plan | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        targets_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        stragglers: bool = True,
        parallelize: Callable[[Any, Any], Any] | None = None,
        shard_optimizer: bool = False,
        reshard_after_forward: ReshardAfterForward = "default",
        **options: Any,
    ) -> None:
        """Cut the model, join the other processes if there are any, and prepare for the first step.

        `stages` is a model, which is cut evenly (see `sl.split` for other cuts), or one module per stage. It may also
        be a function that builds the model, or a list of functions that build its layers: then a process allocates
        memory only for its own stages, on `device`, and weights depend on the seed and on names (see `sl.build`).
        `loss_reduction` weights the losses of microbatches: "mean" by their share of the samples; "sum" by 1; "count"
        by 1 / `count`, an argument of `step`, for sums over targets such as padded text.
        `penalty` is a function of a parameter's name and the parameter that returns a scalar tensor or None; the sum
        over all parameters is added to the loss once a step (see "Penalties" in docs/runtime.md).
        `recompute="stage"` keeps only the inputs of a stage and recomputes its forward before its backward; names
        (`"*.mlp"`), classes or a function of name and module choose modules instead, and `recompute_policy` is torch's
        policy of which of their operators to save.
        `seed` seeds dropout (default: torch's own seed on rank 0). `deadline` is how many seconds a rank may be silent,
        or be waited for while no rank is working, before the step fails with its name (default: the environment
        variable STAGELINE_DEADLINE, or 60). `check_finite` fails a step whose loss or gradients are not finite, and
        names the stage and microbatch where that began; with a `scale` above 1, gradients are left to the scaler.
        `compare_weights` compares, in the first step, the weights that several processes hold (tied weights, both
        directions, replicas), and names the first that differs.
        `example` is a batch that shows the order in which a model calls its parts (see `sl.split`). Without one, a
        pipeline of threads cuts the model by the first batch; processes need it where the order of calls is not that of
        the definitions.
        `schedule="auto"` profiles the model on the example, which is a whole batch, and takes the cut, the schedule
        and, by default, the number of microbatches that `sl.plan` finds; with `recompute="auto"`, what to recompute.
        `ranks` is by default the number of processes, and 1 for a model on one GPU. With a named schedule, it is by
        default 1 for a model on one GPU, and otherwise follows from the layers, each of which is a stage.
        `replicas` trains that many copies of the pipeline, each on its own samples, in ranks × replicas processes;
        `mesh` assigns the processes, by dimensions named pp, dp_replicate (or dp), dp_shard and tp (see docs/mesh.md).
        `parallelize` is a function of a stage and the mesh without pp, which cuts the stage's layers or shards its
        parameters in place (torch's parallelize_module and fully_shard); by default, FSDP2 shards every layer over
        dp_shard. `reshard_after_forward` says when their gathered parameters are freed: after the last use in a step
        ("default", "never"), or after every action ("always"). Gradients are added up over replicas in buckets
        of `bucket_mb` MiB, in `reduce_dtype` (default: float32, or the dtype of the gradients if that is wider).
        With `shard_optimizer`, each replica keeps the optimizer state of a part of the parameters, and steps them for
        all (ZeRO-1), with the same results.
        `compile` is True, the name of a backend or the keywords of torch.compile, which compiles every layer, or every
        unit of a model; "graphs" runs captured graphs without a compiler (see docs/runtime.md). `cuda_graphs`
        captures the actions of stages on GPUs in the third step and replays them from then on.
        `options` are those of the schedule's family, such as `chunks`.
        `replan` compares the last steps of every `replan_every` with `planned`, with the plan of "auto" or with the
        first of them: "warn" names the stages that drift, "auto" takes a better order (see docs/plan.md).
        `args_chunk_spec`, `kwargs_chunk_spec` (by keyword, for inputs that are a dict and for `stage_kwargs`) and
        `targets_chunk_spec` describe what is not cut along its first dimension: torch's `TensorChunkSpec(dim)`, or None
        for what every microbatch gets whole. `output_merge_spec` describes how outputs are merged.
        `stragglers` logs one line when a stage becomes slower than the others and stays so (see docs/runtime.md).
        """
        schedule = schedule.__name__ if isinstance(schedule, type) else schedule  # a torch class
        check_options(options, schedule, Pipeline.__init__.__kwdefaults__ or ())
        self.options = PipelineOptions(
            loss_fn=loss_fn, loss_reduction=loss_reduction, penalty=penalty, check_finite=check_finite,
            compare_weights=compare_weights, recompute=recompute, recompute_policy=recompute_policy, seed=seed,
            deadline=deadline, example=example, device=device, compile=compile, cuda_graphs=cuda_graphs,
            bucket_mb=bucket_mb, reduce_dtype=reduce_dtype, replan=replan, replan_every=replan_every, planned=planned,
            stragglers=stragglers, parallelize=parallelize, shard_optimizer=shard_optimizer,
            reshard_after_forward=reshard_after_forward,
            chunk_specs=ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, targets_chunk_spec, output_merge_spec),
        )  # fmt: skip
        source, recipe = described(stages)
        if ranks is None:
            ranks = ranks_of(mesh) if mesh is not None else launched_ranks()
        self.plan: Plan | None = None
        """How it was planned, with `schedule="auto"`."""
        host: RankHost | None = None
        if isinstance(schedule, str) and schedule == "auto":
            host, self.plan, source = automatic(
                stages, source, recipe, self.options,
                ranks=ranks, replicas=replicas, mesh=mesh, microbatches=microbatches, chunks=options.get("chunks"),
            )  # fmt: skip
            schedule, microbatches, options = self.plan.schedule, None, {}
            if isinstance(recompute, str) and recompute == "auto":
                self.options = replace(self.options, recompute=self.plan.recompute)
        self.model = whole_model(source)
        refuse_odd_tensors(self.model)
        if recipe is None:
            refuse_other_device(self.model, device)
        built, seconds = recipe is not None, self.options.seconds

        def default() -> int | None:
            is_cut = isinstance(source, nn.Module)  # and not stages that the user made
            return default_ranks(replicas, seconds, on_one_gpu(source, built, device)) if is_cut else None

        order = find_schedule(schedule, count_layers(source), ranks, microbatches, default=default, **options)
        recomputation = parse_recompute(self.options.recompute, self.options.recompute_policy)
        self.recomputed = mark(self.model, recomputation, self.options.recompute)
        self._blueprint = Blueprint(
            order, ModelStages(source, self.model, order.stages, example), self.plan, recomputation, self.recomputed,
            replicas, mesh,
        )  # fmt: skip
        self.runner = start(self.options, self._blueprint, recipe, host)

    def reconnect(self, *, compare_weights: bool = True) -> None:
        """Join the processes of a job in which some were replaced (`sl.rejoin`).

        Stages, weights and compiled code of this process stay; a process that is new creates a `Pipeline` instead, with
        the same options. Load the same checkpoint on all of them before the next step. `compare_weights` replaces the
        option of that name: where the new processes have other weights at first, pass False on all of them.
        """
        if self.runner.stages.sharded or self._blueprint.mesh is not None:
            raise StagelineError("the process groups of a pipeline in a mesh no longer exist: create a new Pipeline")
        if self._shards is not None:
            self._shards.close()
        self.options = replace(self.options, compare_weights=compare_weights)
        self.__dict__.pop("mesh", None)
        self.zero_grad()
        self._blueprint = replace(self._blueprint, schedule=self.runner.planned_order)
        self.runner = start(self.options, self._blueprint, built=True)

    # What it is made of.

    @property
    def schedule(self) -> Schedule:
        """The schedule; `replan="auto"` may change its order."""
        return self.runner.schedule

    @property
    def certificate(self) -> Certificate:
        """The verified properties of the schedule."""
        return self.runner.certificate

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """The loss function."""
        return self.options.loss_fn

    @property
    def loss_reduction(self) -> Reduction:
        """How the losses of microbatches are weighted."""
        return self.options.loss_reduction

    @property
    def penalty(self) -> Penalty | None:
        """The penalty on parameters."""
        return self.options.penalty

    @property
    def check_finite(self) -> bool:
        """Whether a loss or a gradient that is not finite fails a step."""
        return self.options.check_finite

    @check_finite.setter
    def check_finite(self, value: bool) -> None:
        self.options.check_finite = value

    @property
    def replans(self) -> list[Replanned]:
        """The changes of the order so far."""
        return self.runner.watch.replans

    @property
    def drift(self) -> Drift | None:
        """The stages that drifted from their plan at the last comparison; None before it, or with replan="off"."""
        return None if self.runner.watch.plan is None else self.runner.watch.plan.drift

    @property
    def deadline(self) -> float:
        """How many seconds a rank may be silent before a step fails."""
        return self.runner.host.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.runner.host.deadline = seconds
        self.runner.executors.set_deadline(seconds)

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has: in each replica, where there are several."""
        return self.runner.schedule.ranks

    @property
    def replicas(self) -> int:
        """How many copies of the pipeline train together, each on its own samples."""
        return self.runner.host.layout.data_rows

    @property
    def replica(self) -> int:
        """The replica of this process: the number of its share of the samples."""
        return self.runner.host.layout.data_row(self.runner.host.replica)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The processes by replica ("dp") and rank ("pp"): the `mesh` option, or one of the pipeline's own groups."""
        if self._blueprint.mesh is not None:
            return self._blueprint.mesh
        if not isinstance(self.runner.host, ProcessCollectives):
            raise StagelineError("all ranks are threads of one process, but a mesh consists of processes: use torchrun")
        return mesh_of(self.runner.host)

    def __reduce__(self) -> Any:
        raise StagelineError("a Pipeline cannot be copied or pickled; create a new Pipeline from a copy of its model")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a pipeline runs whole batches, and training needs their targets."""
        raise StagelineError(
            "a Pipeline is not callable: pipe.predict(inputs) returns the outputs, pipe.evaluate(inputs, "
            "targets) the loss, and pipe.step(inputs, targets) the gradients"
        )

    def __repr__(self) -> str:
        return summary(self.runner) if hasattr(self, "runner") else "<Pipeline, not initialised>"

    # The methods of a model.

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages, each once; gradients add into their `.grad`.

        With `shard_optimizer` they are the same in every replica, but a step leaves gradients only on those that this
        replica `updates`. An optimizer skips the others, and keeps no state for them.
        """
        own = (parameter for _, parameter in self.named_parameters())
        return own if self.runner.host.single_process else watched(own)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, by their names in the whole model."""
        return self.runner.stages.named_parameters()

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradients by the names of their parameters."""
        return ((name, parameter.grad) for name, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this process's stages, by their names in the whole model."""
        return self.runner.stages.named_buffers()

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """The state of this process's stages, by names of the whole model.

        With `gather=True`, which all processes must call together, each returns that of the whole model, on the CPU.
        """
        if gather:
            self.broadcast_parameters()
        own = self.runner.stages.state_dict()
        if not gather:
            return own
        with self._naming_lost():
            return gather_state(self.runner.host, self.ranks, own, list(self.model.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with names of the whole model; the stages of other processes are skipped."""
        self.runner.refuse_in_run()
        check_state(state, set(self.model.state_dict()), set(self.state_dict()), strict)
        check_shapes(state, self.model.named_parameters(remove_duplicate=False))
        for part in self.runner.stages.local_parts():
            own = part.state_dict()
            part.load_state_dict(
                {name: part_like(state[name], value) for name, value in own.items() if name in state}, strict=False
            )

    def train(self, mode: bool = True) -> Pipeline:
        """Switch all modules to training or evaluation."""
        self.model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Switch all modules to evaluation."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.model.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all stages and ranks, tied weights counted once; returns the norm before clipping."""
        if self.runner.replicas is not None and self.runner.replicas.pending:
            raise StagelineError(
                "gradients were accumulated with sync=False and differ between replicas; clip them after a step with "
                "sync=True"
            )
        norms = self._norms(norm_type)
        total = total_norm(norms, norm_type, norm_dtype(self.model.parameters()))
        decision = GradientRules(max_norm, self.check_finite and not self.runner.scaled).decide(total)
        if decision.failed:
            refuse_norm(self.runner.stages, norms, total)
        if decision.factor is not None:
            gradients = (parameter.grad for parameter in self.parameters() if parameter.grad is not None)
            scale_gradients(gradients, decision.factor)
        return total

    def grad_norm(self, norm_type: float = 2.0, gradients: Mapping[str, Tensor] | None = None) -> Tensor:
        """The norm of the gradients of all stages and ranks, tied weights counted once, on the CPU.

        It is a float32, or a float64 where parameters are, with the same bits on every rank and for any number of
        ranks. `gradients` are by names (default: those of the parameters). All processes must call this together.
        """
        return total_norm(self._norms(norm_type, gradients), norm_type, norm_dtype(self.model.parameters()))

    def _norms(self, norm_type: float, gradients: Mapping[str, Tensor] | None = None) -> Floats:
        own = {name: gradient for name, gradient in self.named_gradients() if self.owns(name)}
        if gradients is not None:
            own = {name: gradients[name] for name in own if name in gradients}
        with self._naming_lost():
            norms = norms_of([name for name, _ in self.model.named_parameters()], own, norm_type)
        return self.runner.host.all_reduce(norms if self._shards is None else self._shards.sum_norms(norms))

    def _naming_lost(self) -> AbstractContextManager[None]:
        host = self.runner.host
        return host.naming_lost() if isinstance(host, ProcessCollectives) else nullcontext()

    def owns(self, name: str) -> bool:
        """Whether this process counts and saves a parameter or buffer; in a replica, one process does."""
        return self.runner.stages.owns(name)

    @property
    def _shards(self) -> OptimizerShards | None:
        return None if self.runner.replicas is None else self.runner.replicas.shards

    def updates(self, name: str) -> bool:
        """Whether this replica updates a parameter of its stages: with `shard_optimizer` one replica does, else all."""
        return self._shards is None or name in self._shards.names

    def broadcast_parameters(self) -> None:
        """With `shard_optimizer`: copy every parameter from the replica that updates it to the others.

        torch's optimizers do this at the end of `step`. Call it after an update by other means, in all processes.
        """
        if self._shards is not None:
            self._shards.broadcast()

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

        Where ranks are processes, each takes the whole batch, or None for what its stages do not need: the first stage
        reads inputs, the last one targets. `count` is the number of targets that a loss is divided by, over all
        microbatches and, where gradients of several steps accumulate, over all of these steps. `scale` multiplies all
        gradients, as float16 needs, or for a mean over several steps; the loss in the result is not scaled.
        Inputs that require grad get their gradients, where stage 0 is: a leaf in its `.grad`, and the graph of any
        other (`pipe.step(front(x), y)`) runs its backward once.
        `stage_kwargs` holds keyword inputs of single stages, `{2: {"mask": mask}}`, or of every stage that takes them,
        `{"all": {"mask": mask}}`; they are cut into microbatches as the batch is.
        Each replica takes its own samples, and gradients are added up over replicas. With `sync=False` they accumulate
        in every replica; the next step with `sync=True` adds up all that accumulated.
        """
        self.runner.refuse_to_train()
        if not (isinstance(scale, int | float) and 0 < scale < float("inf")):
            raise StagelineError(f"scale must be a number above 0, got {shorten(scale)}")
        wanted = self.runner.batches.targets(targets)
        return self.runner.step(
            Batch(inputs, wanted, stage_kwargs, training=True, count=count, scale=float(scale), sync=sync)
        )

    def run(
        self,
        batches: Iterable[Any],
        *,
        optimizer: torch.optim.Optimizer | Make,
        max_norm: float | None = None,
        lr_schedule: Rates | None = None,
        skip_not_finite: bool = False,
    ) -> ContinuousRun:
        """Train on batches with continuous steps: yields the figures of every step when all ranks have completed it.

        The same as `step`, `clip_grad_norm_(max_norm)`, `optimizer.step()` and `zero_grad()`, bit for bit, but a rank
        starts the next step while others still run the last one (see docs/runtime.md). Whether gradients must be
        clipped is known one step later; the update is then rolled back and repeated. For that each rank keeps a copy of
        its parameters, optimizer state and buffers, and one more set of gradients: `snapshot_bytes` of the run.
        A batch is (inputs, targets); a dict of inputs; or a dict of arguments of `step`, with "inputs" among them.
        `optimizer` is one over `pipe.parameters()`, or a function that creates one from them. `lr_schedule` maps the
        number of a step to a factor, or a torch scheduler. Gradients that are not finite fail a step, or
        skip it with `skip_not_finite`; if a step fails, parameters are those before it.
        """
        self.runner.refuse_to_train()
        return ContinuousRun(
            self, batches, optimizer, GradientRules(max_norm, self.check_finite, skip_not_finite), lr_schedule
        )

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        outputs: bool = False,
        count: float | None = None,
        stage_kwargs: Keywords | None = None,
    ) -> Evaluation:
        """Run only the forwards, with the loss and its metrics; gradients do not change."""
        began = time.perf_counter()
        wanted = self.runner.batches.targets(targets)
        done = self.runner.run(Batch(inputs, wanted, stage_kwargs, keep=outputs, count=count))
        return Evaluation(
            loss=done.loss,
            losses=done.outcome.losses,
            metrics=done.metrics,
            outputs=joined(done.results, self.options.chunk_specs.output),
            seconds=time.perf_counter() - began,
        )

    def predict(self, inputs: Any, *, stage_kwargs: Keywords | None = None) -> Any:
        """Run only the forwards; returns the outputs of the whole batch."""
        done = self.runner.run(Batch(inputs, None, stage_kwargs, with_targets=False, keep=True))
        return joined(done.results, self.options.chunk_specs.output)

    @property
    def steps(self) -> int:
        """The number of steps so far. Random numbers depend on it, so a run that resumes sets it."""
        return self.runner.steps

    @steps.setter
    def steps(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise StagelineError(f"steps must be an integer >= 0, got {shorten(value)}")
        self.runner.steps = value

    @property
    def timeline(self) -> Timeline:
        """The times of all actions and transfers of the last step, comparable with `stageline.simulate`."""
        if self.runner.measured is None:
            raise StagelineError("there is no timeline before the first step")
        return self.runner.measured.timeline()


def summary(runner: StepRunner) -> str:
    """A pipeline in one line.

    >>> import torch, stageline as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="gpipe", ranks=1, microbatches=4)
    <Pipeline of Sequential: 1 stage on 1 rank, schedule gpipe, 4 microbatches; in this process on cpu>
    """
    schedule, host, stages = runner.schedule, runner.host, runner.stages
    tensors = (tensor for part in stages.local_parts() for tensor in (*part.parameters(), *part.buffers()))
    devices = " and ".join(sorted({str(tensor.device) for tensor in tensors})) or "cpu"
    if host.single_process:
        where = f"ranks are threads of this process on {devices}"
        where = where if schedule.ranks > 1 else f"in this process on {devices}"
    else:
        own = ", ".join(map(str, sorted(stages.local)))
        layout = host.layout
        replica = f" of replica {host.replica} of {layout.replicas}" if layout.replicas > 1 else ""
        word = "stage" if len(stages.local) == 1 else "stages"
        where = f"ranks are processes, this one is rank {host.here[0]}{replica} with {word} {own} on {devices}"
    return (
        f"<Pipeline of {type(stages.model).__name__}: {pluralize(schedule.stages, 'stage')} on "
        f"{pluralize(schedule.ranks, 'rank')}, schedule {schedule.name}, "
        f"{pluralize(schedule.microbatches, 'microbatch')}; {where}>"
    )

"""Continuous steps: a rank starts the next step while others still run the current one."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stageline.common.errors import PipelineError, StagelineError, nearest, shorten
from stageline.distributed.process_host import ProcessHost
from stageline.distributed.rank_host import Floats
from stageline.distributed.thread_host import ThreadHost
from stageline.runtime._torch_private import optimizer_hooks
from stageline.runtime.batches.input_gradients import require_gradients
from stageline.runtime.continuous.processes import NextBatch, ProcessRun, ProcessServices
from stageline.runtime.continuous.rank_loop import (
    DecidedStep,
    PlannedStep,
    RankLoop,
    RankServices,
    RunOptions,
    norm_not_finite,
)
from stageline.runtime.continuous.rollback import Make, OptimizerPart, find_optimizer
from stageline.runtime.continuous.threads import ThreadRun
from stageline.runtime.microbatches import Batch
from stageline.runtime.optimizer_step import GradientRules, norm_dtype, step_optimizer
from stageline.runtime.step import StepRunner
from stageline.runtime.step_report import Measured, StepStats, add_up, lengths_of
from stageline.tensors.pytree import plain
from stageline.tensors.random_numbers import Generators, draw_in_turn

if TYPE_CHECKING:
    from stageline.runtime.pipeline import Pipeline

Rates: TypeAlias = Callable[[int], float] | LRScheduler
"""A function from the step number to a factor of the learning rates, or a torch scheduler."""
ARGUMENTS = ("inputs", "targets", "count", "scale", "stage_kwargs")
"""The keys of a batch that is a dict with "inputs" in it."""


@dataclass(frozen=True)
class UpdateOptions:
    """How a run updates the parameters."""

    optimizer: Optimizer
    rules: GradientRules
    rates: Rates | None = None

    def __post_init__(self) -> None:
        max_norm = self.rules.max_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise StagelineError(f"max_norm must be a number above 0, or None for no clipping; got {shorten(max_norm)}")
        if isinstance(self.rates, ReduceLROnPlateau):
            raise StagelineError(
                "lr_schedule=ReduceLROnPlateau needs a metric; leave it out, and call scheduler.step(metric) "
                "in the loop over the steps"
            )
        if self.rates is not None and not callable(self.rates) and not isinstance(self.rates, LRScheduler):
            raise StagelineError(
                "lr_schedule must be a function from a step number to a factor, or a torch scheduler; got "
                f"{shorten(self.rates)}"
            )

    def set_rates(self, step: int) -> None:
        """Set the learning rates of a step, where a function computes them."""
        if self.rates is not None and not isinstance(self.rates, LRScheduler):
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.rates(step)

    def advance_rates(self, step: int) -> None:
        """Set the learning rates of the step after this one."""
        if isinstance(self.rates, LRScheduler):
            self.rates.step()
        else:
            self.set_rates(step + 1)


def read_batch(runner: StepRunner, item: Any) -> Batch:
    """A batch of a run: a pair of inputs and targets; inputs alone; or arguments of `step` by name."""
    arguments: dict[str, Any] = {"inputs": item}
    if isinstance(item, Mapping) and "inputs" in item:
        arguments = dict(item)
        unknown = next((name for name in arguments if name not in ARGUMENTS), None)
        if unknown is not None:
            raise StagelineError(
                f"a batch has the key {unknown!r}{nearest(str(unknown), ARGUMENTS)}; one with 'inputs' may have "
                f"{', '.join(ARGUMENTS)}"
            )
    elif isinstance(item, tuple | list) and len(item) == 2:
        arguments = {"inputs": item[0], "targets": item[1]}
    elif not isinstance(item, Mapping | Tensor) and item is not None:
        raise StagelineError(
            "a batch must be a pair of inputs and targets, a tensor or a dict of inputs alone, or None if a rank needs "
            f"none; got {shorten(item)}"
        )
    if require_gradients(arguments["inputs"]):
        raise StagelineError(
            "the inputs require grad, but a run reads the next batch before their gradients are known; call "
            "pipe.step(inputs, targets) and optimizer.step() in a loop instead, or detach the inputs"
        )
    return Batch(
        plain(arguments["inputs"]),
        plain(runner.batches.targets(arguments.get("targets"))),
        arguments.get("stage_kwargs"),
        True,
        count=arguments.get("count"),
        scale=float(arguments.get("scale", 1.0)),
    )


def cut_by_first(runner: StepRunner, batches: Iterable[Any]) -> Iterable[Any]:
    """Cut the model by the first batch, which decides whether steps can be continuous; returns all batches."""
    try:
        coming = iter(batches)
    except TypeError:  # refused where the run begins
        return batches
    first = list(islice(coming, 1))
    for item in first:
        runner.show(read_batch(runner, item))
        try:
            runner.stages.refuse_to_train()
        except StagelineError:
            runner.forget_batch()
            raise
    return chain(first, coming)


def why_not(runner: StepRunner, optimizer: Optimizer) -> str:
    """Why steps cannot be continuous; empty if they can."""
    scattered = {id(parameter) for parameter in runner.stages.placed.scattered}
    model, replicas = runner.stages.model, runner.host.layout.replicas
    if replicas > 1:
        return f"the gradients of {replicas} replicas are summed when all ranks have finished a step"
    if runner.stages.sharded:
        return "parallelize changed the stages, and their parameters may be gathered and freed in every step"
    if scattered:
        name = next(name for name, parameter in model.named_parameters() if id(parameter) in scattered)
        return f"several ranks use the parameter {name}, so its gradient is complete only after the step"
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    if devices:
        return f"stages are on {' and '.join(sorted(devices))}, and continuous steps need them on the CPU"
    if runner.host.single_process and optimizer_hooks(optimizer):
        return "the optimizer has hooks, which expect to be called once for all parameters"
    return ""


class CallerTurn:
    """Keeps the random numbers that the caller draws between steps apart from those of ranks that are threads."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._before = Generators.now()
        self.lock = threading.RLock()
        """A rank of this run holds it while it draws; ranks of other pipelines, which may run meanwhile, do not."""

    @contextmanager
    def take(self) -> Iterator[None]:
        """While this is held, no rank draws, so all random numbers belong to the caller."""
        with self.lock:
            if self._before.moved():
                self._runner.report_draws(list(self._runner.executors.sets.values()))
            try:
                yield
            finally:
                self._before = Generators.now()


class RunSteps:
    """The steps of a run, from the batches to their figures; `ContinuousRun` holds them, so dropping that ends them."""

    def __init__(self, pipe: Pipeline, batches: Iterable[Any], update: UpdateOptions) -> None:
        self.pipe, self.runner, self.update = pipe, pipe.runner, update
        try:
            self._batches = iter(batches)
        except TypeError:
            raise StagelineError(
                f"batches must be an iterable of batches, one for every step; got {shorten(batches)}"
            ) from None
        self._loops: list[RankLoop] = []

    @property
    def bytes(self) -> int:
        """The memory that a rollback needs on the ranks of this process."""
        return sum(loop.bytes for loop in self._loops)

    def one_by_one(self) -> Generator[StepStats, None, None]:
        """Run steps one after the other."""
        pipe, runner, update = self.pipe, self.runner, self.update
        rules = update.rules
        update.set_rates(runner.steps)
        for item in self._batches:
            batch = read_batch(runner, item)
            try:
                stats = runner.step(replace(batch, check_gradients=not rules.skip_not_finite))
            except PipelineError:
                pipe.zero_grad()
                raise
            norm = pipe.grad_norm() if rules.need_norm else None
            decision = rules.decide(norm)
            if norm is not None and decision.failed:
                pipe.zero_grad()
                runner.steps -= 1
                raise norm_not_finite(runner.steps, norm, stats.loss)
            gradients = (parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)
            step_optimizer(decision, gradients, update.optimizer.step)
            pipe.zero_grad()
            update.advance_rates(runner.steps - 1)
            yield replace(stats, norm=None if norm is None else norm.item())

    def continuous(self) -> Generator[StepStats, None, None]:
        """Run continuous steps."""
        runner = self.runner
        with runner.continuous():
            caller = CallerTurn(runner)
            self.update.set_rates(runner.steps)
            began = time.perf_counter()
            for decided, times in self._begin(caller).steps():
                stats = self._complete(decided, times, began)
                began = time.perf_counter()
                with caller.take():
                    self.update.advance_rates(decided.step)
                    yield stats

    def _begin(self, caller: CallerTurn) -> ThreadRun | ProcessRun:
        runner, update, host = self.runner, self.update, self.runner.host
        stages, penalty = runner.stages, runner.options.penalty
        options = RunOptions(
            runner.steps,
            stages.placed,
            [name for name, _ in stages.model.named_parameters()],
            update.rules,
            penalty,
            norm_dtype(stages.model.parameters()),
            None if penalty is None else runner.penalty_reads,
        )
        named = dict(stages.named_parameters())

        def make_loop(rank: int, services: RankServices) -> RankLoop:
            own = {name: parameter for name, parameter in named.items() if stages.owners[name] == rank}
            return RankLoop(rank, services, options, OptimizerPart(update.optimizer, list(own.values())), own)

        run: ThreadRun | ProcessRun
        if isinstance(host, ThreadHost):
            on_start = lambda: draw_in_turn(caller.lock)  # noqa: E731
            run = ThreadRun(host, options, make_loop, lambda step: self._fetch_and_plan(step, caller), on_start)
        else:
            assert isinstance(host, ProcessHost)
            services = ProcessServices(host, lambda: self._fetch(caller), self._plan, runner.batches.readers)
            run = ProcessRun(host, options, make_loop, services)
        self._loops = run.loops
        return run

    def _fetch(self, caller: CallerTurn) -> NextBatch:
        try:
            with caller.take():
                item = next(self._batches)
            batch = read_batch(self.runner, item)
            return NextBatch(batch, self.runner.batches.validate(batch))
        except StopIteration:
            return NextBatch(ended=True)
        except Exception as error:
            return NextBatch(error=error)

    def _fetch_and_plan(self, step: int, caller: CallerTurn) -> PlannedStep:
        """What a step computes, where all ranks are in this process."""
        fetched = self._fetch(caller)
        if fetched.batch is None or fetched.described.samples is None:
            return PlannedStep(step, error=fetched.error)
        planned = self._plan(step, fetched.batch, fetched.described.samples)
        return planned if planned.refused is None else PlannedStep(step, error=planned.refused)

    def _plan(self, step: int, batch: Batch, samples: int) -> PlannedStep:
        runner = self.runner
        executors = runner.executors_for(min(runner.batches.parts, samples), True)
        try:
            return PlannedStep(step, executors, runner.batches.request(executors, batch, step, samples, samples))
        except StagelineError as error:
            return PlannedStep(step, executors, refused=error)

    def _complete(self, decided: DecidedStep, times: Callable[[], Floats], began: float) -> StepStats:
        """All ranks have completed this step. A new order takes effect at the first step that no rank has planned."""
        runner, executors, request = self.runner, decided.planned.executors, decided.planned.request
        assert executors is not None
        assert request is not None
        runner.batches.agreed = request.samples
        measured = Measured(executors.schedule, times, runner.host.clocks)
        runner.complete(
            executors,
            request,
            measured,
            lambda: lengths_of(executors.schedule, times()),
            lengths_are_known=runner.host.single_process or executors.record_layout.with_times,
        )
        outcome = decided.totals.outcome
        return StepStats(
            loss=add_up(outcome.losses) + outcome.penalty,
            losses=outcome.losses,
            metrics=decided.totals.metrics,
            seconds=time.perf_counter() - began,
            samples=request.samples,
            microbatches=len(request.weights),
            unsplit=outcome.unsplit,
            measured=measured.timeline,
            penalty=outcome.penalty,
            norm=None if decided.decision.norm is None else decided.decision.norm.item(),
        )


class ContinuousRun(Iterator[StepStats]):
    """The steps of `Pipeline.run`: a loop over it trains.

    >>> import torch, stageline as sl
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    >>> pipe = sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="zb-h2", microbatches=4, ranks=2)
    >>> batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    >>> run = pipe.run(batches, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    >>> [stats.samples for stats in run], pipe.steps, run.interlocks
    ([8, 8, 8], 3, True)
    """

    def __init__(
        self,
        pipe: Pipeline,
        batches: Iterable[Any],
        optimizer: Optimizer | Make,
        rules: GradientRules,
        lr_schedule: Rates | None,
    ) -> None:
        """Start nothing before the first step is requested."""
        runner = pipe.runner
        self._shown: StepRunner | None = None
        """The runner whose model was cut by the first batch, until that batch has run."""
        if runner.stages.awaits_batch:
            batches = cut_by_first(runner, batches)
            self._shown = None if runner.stages.awaits_batch else runner
        self.optimizer = find_optimizer(optimizer, list(pipe.parameters()))
        """The optimizer that was passed, or created."""
        self.note = why_not(runner, self.optimizer)
        """Why steps are not continuous; empty if they are."""
        self.interlocks = not self.note and pipe.ranks > 1
        """Whether steps are continuous: a rank may start one before all ranks have ended the last."""
        self._run = RunSteps(pipe, batches, UpdateOptions(self.optimizer, rules, lr_schedule))
        self._steps = self._run.continuous() if self.interlocks else self._run.one_by_one()
        self._thread: int | None = None
        if self.note:
            warnings.warn(f"steps are not continuous and run one after another: {self.note}", stacklevel=3)

    @property
    def snapshot_bytes(self) -> int:
        """The memory that a rollback needs now, on the ranks of this process.

        That is: a copy of parameters, optimizer state and buffers, and the gradients of the last step.
        """
        return self._run.bytes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepStats:
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise StagelineError(
                "only one thread may iterate over a run, but another thread has already started this one"
            )
        self._thread = thread
        if self._shown is None:
            return next(self._steps)
        try:
            return next(self._steps)
        except Exception:
            self._shown.forget_batch()
            raise
        finally:
            self._shown = None

    def close(self) -> None:
        """End the run: the parameters are as the last returned step left them."""
        self._steps.close()

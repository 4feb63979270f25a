"""Running a batch on all ranks: agree on it, cut it into microbatches, run it, and check the result on all ranks."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.failures import GRADIENTS, failure, note_record
from stageline.distributed.rank_host import Floats, HostedStep, RankHost
from stageline.faults.monitor.verdict import Failure, Verdict, located
from stageline.runtime._torch_private import version_of
from stageline.runtime.action_ranges import warn_about_threads
from stageline.runtime.batches.input_gradients import exchange, give_gradients
from stageline.runtime.executor import StepRequest
from stageline.runtime.grad_reduce import Reducers
from stageline.runtime.guards.foreign_reads import NamedTensors, reaches
from stageline.runtime.guards.non_finite import NotFinite, not_finite
from stageline.runtime.microbatches import Agreement, Batch, BatchIntake, input_parts
from stageline.runtime.optimizer_shards import spread_not_finite
from stageline.runtime.penalty import add_gradients, penalty_not_finite, terms_of, values_of
from stageline.runtime.rank_executors import ExecutorCache, ExecutorSet
from stageline.runtime.replan import LOOK_EVERY, StepWatch
from stageline.runtime.replicas import Replicas
from stageline.runtime.setup.handshake import compare_weights
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.sharding import refuse_apart, refuse_other_actions
from stageline.runtime.shared_parameters import sum_shared_gradients
from stageline.runtime.step_report import (
    Measured,
    Outcome,
    RankResult,
    StepStats,
    add_up,
    lengths_of,
    metrics_of,
    sum_metrics,
)
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.tensors.buffers import BufferCopies, all_buffers, put_back
from stageline.tensors.pytree import plain
from stageline.tensors.random_numbers import Generators
from stageline.tensors.sharded import settle_gradient


@dataclass(frozen=True)
class CompletedBatch:
    """A completed batch."""

    executors: ExecutorSet
    request: StepRequest
    results: list[RankResult]
    outcome: Outcome
    loss: float
    """Of all replicas."""
    metrics: dict[str, float]


class StepRunner:
    """Runs batches on the ranks of a pipeline. All processes of the pipeline make the same calls."""

    def __init__(
        self,
        options: PipelineOptions,
        schedule: Schedule,
        host: RankHost,
        stages: ModelStages,
        executors: ExecutorCache,
        replicas: Replicas | None,
        watch: StepWatch,
    ) -> None:
        self.options, self.host, self.stages = options, host, stages
        self.replicas = replicas
        """What this process does together with other replicas; None if there is only one replica."""
        self.watch = watch
        self.executors = executors
        self.batches = BatchIntake(options, schedule, host, stages)
        self.steps = 0
        """The number of steps so far."""
        self.measured: Measured | None = None
        """The times of the last step."""
        self.scaled = False
        """Whether the gradients of the last step are scaled: a scaler then handles those that are not finite."""
        self.in_run = False
        """Whether continuous steps are running."""
        self._failed = False
        """Whether the last batch failed."""
        self._compares = options.compare_weights
        self.planned_order = schedule
        """The schedule without shard actions, before any change of its order."""
        self._follow(schedule)

    def _follow(self, schedule: Schedule) -> None:
        self.schedule = self.executors.lowered(schedule)
        self.certificate = verify(self.schedule)
        self._two_directions = schedule.placement.directions > 1

    def reorder(self, schedule: Schedule) -> None:
        """Use a new order from the next step on; stages stay on their ranks and keep everything they have recorded."""
        self._follow(schedule)
        self.executors.reorder(schedule)
        if self.replicas is not None:
            self.replicas.follow(schedule)

    # Steps.

    def step(self, batch: Batch) -> StepStats:
        """Train on a batch."""
        began = time.perf_counter()
        self.scaled = batch.scale > 1.0
        done = self.run(batch)
        executors, results, times, clocks = done.executors, done.results, done.outcome.times, self.host.clocks
        layout = executors.record_layout
        known = self.host.all_reduce_async(lambda: layout.times(results, clocks)) if times is None else lambda: times
        measured = Measured(executors.schedule, known, clocks)
        self.complete(
            executors,
            done.request,
            measured,
            lambda: lengths_of(executors.schedule, layout.times(results, None) if times is None else times),
            lengths_are_known=times is not None or self.host.single_process,
        )
        return StepStats(
            loss=done.loss,
            losses=done.outcome.losses,
            penalty=done.outcome.penalty,
            metrics=done.metrics,
            seconds=time.perf_counter() - began,
            samples=done.request.samples,
            microbatches=len(done.request.weights),
            unsplit=done.outcome.unsplit,
            measured=measured.timeline,
        )

    def complete(
        self,
        executors: ExecutorSet,
        request: StepRequest,
        measured: Measured,
        lengths: Callable[[], Floats],
        *,
        lengths_are_known: bool,
    ) -> None:
        """A training step is complete: count it, look for stragglers, and compare it with the plan."""
        self.measured = measured
        self.steps += 1
        watch, whole = self.watch, len(request.weights) == self.batches.parts
        if watch.stragglers is not None and lengths_are_known and whole and not executors.devices:
            watch.lengths.append((self.steps - 1, executors.schedule, lengths()))
            if len(watch.lengths) == LOOK_EVERY:
                watch.find_stragglers(self.host)
        if watch.plan is not None:
            better = watch.compare(self.steps - 1, measured.timeline if whole else None, self.schedule, self.host)
            if better is not None:
                self.reorder(better)

    def run(self, batch: Batch) -> CompletedBatch:
        """Run a batch on all ranks. If it fails anywhere it fails everywhere, and buffers are as before."""
        self.refuse_in_run()
        if type(batch.inputs) is not Tensor or type(batch.targets) is not Tensor:
            batch = replace(batch, inputs=plain(batch.inputs), targets=plain(batch.targets))
        if not self.stages.awaits_batch:
            return self._run_stages(batch)
        self.show(batch)
        try:
            if batch.training:
                self.stages.refuse_to_train()
            return self._run_stages(batch)
        except Exception:  # later batches may show a different order of calls
            self.forget_batch()
            raise

    def show(self, batch: Batch) -> None:
        """Cut the model by the first batch, which shows the order of the model's calls."""
        self.batches.validate(batch)
        self.stages.cut_by(input_parts(batch.inputs, self.batches.parts, 1, self.options.chunk_specs)[0])
        self.executors.sets.clear()

    def forget_batch(self) -> None:
        """Wait for the first batch again: the batch by which the model was cut has failed."""
        self.stages.forget_batch()
        self.executors.sets.clear()

    @contextmanager
    def continuous(self) -> Iterator[None]:
        """Let continuous steps run, and no others."""
        self.refuse_in_run()
        self.in_run = True
        try:
            self.compare_weights()
            yield
        finally:
            self.in_run = False

    def refuse_in_run(self) -> None:
        """Refuse while continuous steps are running."""
        if self.in_run:
            raise StagelineError(
                "a run of this pipeline is in progress and already computing its next step; finish it, or end it "
                "with run.close() or by leaving its loop"
            )

    def refuse_to_train(self) -> None:
        """Refuse to train where no step can."""
        if torch.is_inference_mode_enabled():
            raise StagelineError("step cannot train inside torch.inference_mode(); call it outside")
        if not self.schedule.training:
            raise StagelineError(f"{self.schedule.name} has no backwards to train with; use predict or evaluate")
        if self.stages.shared_state.norms:
            self.stages.refuse_to_train()

    def _run_stages(self, batch: Batch) -> CompletedBatch:
        host, replicas = self.host, self.replicas
        host.begin()
        if replicas is not None and replicas.shards is not None:
            replicas.shards.broadcast()  # where an optimizer that is not torch's stepped
        if self._compares:
            self.compare_weights()
        buffers = all_buffers(self.stages.model) if batch.training else []
        reducer = replicas.reducer() if replicas is not None and batch.training and batch.sync else None
        try:
            if self._failed and self.stages.sharded:
                refuse_apart(host, self.stages.mesh, self.stages.local_parts())
            agreed = self.batches.agree(batch, 0 if reducer is None else reducer.elements)
            filled = min(self.batches.parts, agreed.samples)  # the parts that are not empty come first
            if self.stages.sharded and any(samples < self.batches.parts for samples in agreed.by_row):
                order = partial(self.executors.order, self.schedule, training=batch.training)
                refuse_other_actions(order, agreed.by_row, self.batches.parts, host.here[0])
            executors = self.executors.sets.get((filled, batch.training)) or self.executors_for(filled, batch.training)
            request, refused = None, agreed.refused
            if refused is None:
                try:
                    request = self.batches.request(executors, batch, self.steps, agreed.samples, agreed.total)
                except StagelineError as error:
                    refused = error
            done = self._run_executors(executors, request, replace(agreed, refused=refused), batch, reducer, buffers)
            self.batches.agreed = agreed.samples
            if self.stages.compiled:
                executors.finish_compiling()
            self._failed = False
            return done
        except BaseException as error:
            self._failed = True
            put_back(buffers)
            if not isinstance(error, Exception):
                host.abandon(error)
            raise
        finally:
            host.end()

    def executors_for(self, microbatches: int, training: bool) -> ExecutorSet:
        """The executors of this process's ranks for this many microbatches."""
        return self.executors.find(self.schedule, microbatches, training=training)

    def compare_weights(self) -> None:
        """Before the first batch, all processes together: weights that several processes hold must be the same."""
        if self._compares and (not self.host.single_process or self.replicas is not None):
            try:
                compare_weights(self.host, self.stages, self.schedule.placement)
            except PipelineError:
                self.host.end()
                raise
        self._compares = False

    # The run.

    def _run_executors(
        self,
        executors: ExecutorSet,
        request: StepRequest | None,
        agreed: Agreement,
        batch: Batch,
        reducer: Reducers | None,
        buffers: BufferCopies,
    ) -> CompletedBatch:
        """Run the ranks of this process, and finish the step together with all others."""
        host, replicas, refused = self.host, self.replicas, agreed.refused
        if not self.stages.plain:
            self.stages.placed.start()
            if batch.training:
                self.stages.placed.count_once()
        if replicas is not None and batch.training:
            replicas.start()
        versions = list(map(version_of, self.stages.model.buffers())) if self._two_directions else []
        on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        generators = Generators.now() if on_gpus else torch.get_rng_state()
        if request is not None and executors.devices:  # ranks start after the work in the caller's streams
            start_events = {device: (_event(device), time.perf_counter()) for device in executors.devices}
            request = replace(request, start_events=start_events)
        penalties: dict[str, Tensor] = {}
        drawn: list[bool] = []
        compares = not host.single_process and replicas is None  # replicas compare their batches before the step
        disagreement = cache(lambda: self.batches.disagreement(agreed.rows(), batch) if compares else "")

        def make_record(results: list[RankResult]) -> Floats:
            drawn.append(moved_since(generators))
            if executors.devices:  # while the GPUs still work, so that nobody waits for it afterwards
                if collects:
                    gc.collect(0)
                with suppress(PipelineError):  # of a lost rank: the end of the step names it
                    disagreement()
            return self._make_record(executors, results, penalties, batch.training)

        overlapped = reducer if replicas is not None and replicas.overlap else None
        size = executors.record_layout.size
        step = HostedStep(executors, request, refused, make_record, size, overlapped, agreed.start)
        if len(host.here) > 1:
            warn_about_threads()
        try:
            with no_collections() as collects:
                results, totals = host.run(step)
        except PipelineError as error:
            if refused is not None and not isinstance(refused, PipelineError):
                raise refused from error  # this rank's own error
            text = "" if host.single_process else self.batches.disagreement(agreed.rows(), batch)
            raise (PipelineError(text) if text else error) from error.__cause__
        assert request is not None
        if disagreement():
            raise PipelineError(disagreement())
        outcome = executors.record_layout.read(totals)
        losses, has_metrics, changed = [add_up(outcome.losses)], outcome.has_metrics, np.zeros(0)
        wrong = self._not_finite(executors, request, outcome)
        good = [wrong is None]
        if replicas is not None:
            taken = buffers if batch.training else []
            losses, has_metrics, changed, good = replicas.losses(outcome, taken, wrong is None)
        if batch.training:
            if not all(good):
                raise self._not_finite_error(executors, wrong, good.index(False))
            self._check(executors, outcome, versions, any(drawn))
            if not self.stages.plain:
                sum_shared_gradients(self.stages.placed, host.broadcast_tensor, host.single_process)
            if replicas is not None:
                replicas.finish(reducer, changed, buffers)
            if penalties and (batch.sync or host.replica == 0):  # it counts once in the sum over replicas
                add_gradients(self._kept(penalties) if batch.sync else penalties, batch.scale)
                for _, parameter in self.stages.named_parameters():
                    settle_gradient(parameter)
            if batch.scale > 1.0 and batch.sync and not host.single_process:
                spread_not_finite(host, (parameter.grad for _, parameter in self.stages.named_parameters()))
            if request.inputs_require_grad or len(self.batches.first_ranks) > 1:
                self._give_input_gradients(request, results)
        metrics = self._metrics(metrics_of(results, request.weights)) if has_metrics else {}
        return CompletedBatch(executors, request, results, outcome, add_up(losses) + outcome.penalty, metrics)

    def _make_record(
        self, executors: ExecutorSet, results: list[RankResult], penalties: dict[str, Tensor], training: bool
    ) -> Floats:
        """What the ranks of this process report about the step; `penalties` receives those of their parameters."""
        for executor, result in zip(executors.executors, results, strict=True):
            if result.finished_event is not None:  # the caller's streams continue after this rank's
                torch.cuda.current_stream(executor.device).wait_event(result.finished_event)
            if result.gpu_clock is not None and not self.host.single_process:
                result.gpu_clock.follow()  # so that little is left to do when the last action ends
        layout, penalty = executors.record_layout, self.options.penalty
        row = layout.write(results)
        if penalty is not None:
            if training:
                penalties.update(terms_of(penalty, self.stages.named_parameters(), self.penalty_reads))
            names = [name for name, _ in self.stages.model.named_parameters()]
            row = np.concatenate([row, values_of(names, penalties, self.stages.owns)])
        if not layout.with_times:
            return row
        if executors.devices and not training:  # the GPU may be behind, and nobody asks for its times
            return np.concatenate([row, np.zeros(3 * layout.actions + 1)])
        return np.concatenate([row, layout.times(results, self.host.clocks), [1.0]])

    def _kept(self, penalties: dict[str, Tensor]) -> dict[str, Tensor]:
        """The penalties of the parameters whose gradients this replica keeps."""
        shards = None if self.replicas is None else self.replicas.shards
        if shards is None:
            return penalties
        return {name: term for name, term in penalties.items() if name in shards.names}

    @cached_property
    def penalty_reads(self) -> NamedTensors | None:
        """The parameters of the model, if the penalty can reach them: each of its terms may read only one of them."""
        model = NamedTensors(self.stages.model.named_parameters())
        return model if reaches(self.options.penalty, model) else None

    def _give_input_gradients(self, request: StepRequest, results: Sequence[RankResult]) -> None:
        gradients = {key: grads for result in results for key, grads in result.input_gradients.items()}
        if len(self.batches.first_ranks) > 1 and not self.host.single_process:
            gradients = dict(exchange(self.host, self.batches.first_ranks, request.inputs_require_grad, gradients))
        if request.inputs_require_grad and set(self.batches.first_ranks) & set(self.host.here):
            give_gradients(request.inputs, request.input_roots, gradients)

    def _metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add up the metrics of the ranks that hold the last stage, of which there may be two."""
        if not self.host.single_process:
            text = json.dumps(own)
            own = sum_metrics(json.loads(self.host.broadcast(text, rank)) for rank in self.batches.last_ranks)
        return own if self.replicas is None else self.replicas.metrics(own)

    # Checks after the run.

    def _not_finite(self, executors: ExecutorSet, request: StepRequest, outcome: Outcome) -> NotFinite | None:
        """Why this replica's loss or gradients fail the step; None if they do not."""
        if not (request.training and self.options.check_finite):
            return None
        if np.isfinite(outcome.losses).all() and not outcome.bad:
            return None
        wrong = not_finite(outcome.losses, outcome.events, outcome.bad, executors.schedule)
        return wrong if wrong is None or not request.inputs else wrong.with_inputs(request.inputs)

    def _not_finite_error(self, executors: ExecutorSet, wrong: NotFinite | None, replica: int) -> PipelineError:
        """The error of a loss or gradient that is not finite, the same on all ranks of all replicas."""
        host, layout = self.host, self.host.layout
        own: dict[str, Any] = {}
        if wrong is not None:
            own = {"process": layout.rows[host.replica][wrong.rank], "doing": wrong.doing, "text": wrong.text}
        first = json.loads(host.broadcast_to_all(json.dumps(own), layout.rows[replica][0]))
        cause = ArithmeticError(first["text"])
        error = failure(layout.name(first["process"]), first["doing"], cause)
        report = Failure.of(cause, located(first["doing"]))
        verdict = Verdict(
            first["process"], "raised", doing=report.doing, text=report.text, final=False,
            action=report.action, stage=report.stage, microbatch=report.microbatch,
        )  # fmt: skip
        note_record(error, [executor.record(verdict) for executor in executors.executors])
        error.__cause__ = cause
        return error

    def _check(self, executors: ExecutorSet, outcome: Outcome, versions: Sequence[int], drawn: bool) -> None:
        if self.options.penalty is not None and self.options.check_finite:
            names = [name for name, _ in self.stages.model.named_parameters()]
            text = penalty_not_finite(names, outcome.penalties)
            if text:
                raise PipelineError(f"{text}; {GRADIENTS}; check_finite=False accepts such penalties")
        # With two directions, each copy of a stage sees half of the microbatches, so no buffer may change.
        for before, (name, buffer) in zip(versions, self.stages.model.named_buffers(), strict=False):
            if version_of(buffer) != before:
                raise PipelineError(
                    f"the buffer {name} changed in training, and {self.schedule.name} runs every stage on two ranks "
                    "that each see half of the microbatches; use a family with one direction, or set that module to "
                    "eval()"
                )
        if drawn:
            self.report_draws([executors])

    def report_draws(self, executors: Sequence[ExecutorSet]) -> None:
        """Warn that something drew from torch's global generators, and check all layers again in the next step."""
        for executor_set in executors:
            executor_set.check_random_layers()
        if not self.stages.compiled:  # the compiler sets the generator back and forth
            warnings.warn(
                f"torch's global random number generator was used during step {self.steps}, by a layer that did not "
                "use it in its first microbatch or by one of your own threads; layers will be checked again in the "
                "next step, or set draws_random_numbers = True on a module that draws random numbers",
                stacklevel=3,
            )


def moved_since(before: Generators | Tensor) -> bool:
    """Whether something was drawn since; `before` is the host's generator, or all of them if GPUs are in use."""
    return not torch.equal(before, torch.get_rng_state()) if isinstance(before, Tensor) else before.moved()


@contextmanager
def no_collections() -> Iterator[bool]:
    """Keep Python's cyclic garbage collector from running: it would stop every rank of the process.

    Yields whether it runs otherwise.

    A step makes many small objects, and every few hundred of them would start a collection; a full one takes a tenth of
    a second once torch is loaded.

    >>> with no_collections():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield enabled
    finally:
        if enabled:
            gc.enable()


def _event(device: int) -> Any:
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event

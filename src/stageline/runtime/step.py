"""Running a batch on all ranks: agreeing on it, cutting it, running it, and finding out together what came of it."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.failures import GRADIENTS, failure, note_record
from stageline.distributed.rank_host import Floats, HostedStep, World
from stageline.faults.monitor.verdict import Failure, Verdict, located
from stageline.model.huggingface import own_loss
from stageline.model.stage_module.shared_state import SharedState
from stageline.model.stage_module.stage_module import StagePart
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.batches.input_gradients import (
    exchange,
    give_gradients,
    refuse_graphs,
    refuse_keywords,
    refuse_target_graphs,
    wanted,
    with_leaves,
)
from stageline.runtime.executor import Executor, Executors, RankResult, StepRequest
from stageline.runtime.grad_reduce import Reducer
from stageline.runtime.guards.foreign_reads import ForeignReads, holders_of
from stageline.runtime.guards.initial_weights import compare_weights, held_by_several
from stageline.runtime.guards.loss_reads import LossReads, Tensors, reaches
from stageline.runtime.guards.non_finite import NotFinite, not_finite
from stageline.runtime.microbatches import (
    COUNT,
    MODE,
    NAMES,
    REFUSED,
    SCALE,
    Given,
    Keywords,
    Reduction,
    difference,
    disagreement,
    input_parts,
    keyword_parts,
    look_at,
    settings_row,
    target_parts,
    weights,
)
from stageline.runtime.penalty import Penalty, add_gradients, terms_of, values_of
from stageline.runtime.penalty import not_finite as penalty_not_finite
from stageline.runtime.replan import Replanned, Watch, logger
from stageline.runtime.replicas import Replicas
from stageline.runtime.shared_parameters import Placed, gather
from stageline.runtime.stage import Stage, StageOptions
from stageline.runtime.stages import forwards_of, only_microbatches
from stageline.runtime.step_report import Outcome, metrics_of, sums, times_of
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import Certificate, verify
from stageline.tensors.buffers import Taken, all_buffers, put_back
from stageline.tensors.garbage import no_collections
from stageline.tensors.host_memory import keep_memory
from stageline.tensors.pytree import plain
from stageline.tensors.random_numbers import Generators
from stageline.timeline.drift import Drift
from stageline.timeline.stragglers import Stragglers
from stageline.timeline.timeline import Timeline

FEW = 1 << 16
"""How many numbers all ranks together tell at the end of a step without thinking twice."""


@dataclass(frozen=True)
class Batch:
    """What a user asks to be run, in this replica."""

    inputs: Any
    targets: Any = None
    keywords: Keywords | None = None
    training: bool = False
    with_targets: bool = True
    keep: bool = False
    """Whether the outputs are wanted."""
    count: float | None = None
    scale: float = 1.0
    sync: bool = True
    """Whether gradients are added up over replicas."""
    check_gradients: bool = True
    """Whether gradients that are not finite fail the step."""

    @property
    def columns(self) -> list[int]:
        """Which of `NAMES` all ranks of a replica must have in common."""
        return [0, 1, 2, 3, SCALE, COUNT, MODE] if self.with_targets else [0, 1, 3, MODE]

    @property
    def mode(self) -> int:
        """A number that tells what is asked for."""
        return 1 + self.training + 2 * self.with_targets + 4 * self.sync


class Runner:
    """What a pipeline runs batches with; all ranks of it do the same, wherever they live."""

    model: nn.Module
    schedule: Schedule
    loss_reduction: Reduction
    check_finite: bool
    penalty: Penalty | None
    _world: World
    _placed: Placed
    _sharing: SharedState
    _readers: frozenset[int]
    """The stages that can reach parameters of others through plain references."""
    _options: StageOptions
    _exact: bool
    _steps: int
    _agreed: int | None
    """How many samples all ranks had in the last step."""
    _replicas: Replicas | None
    """What this process has to do with other replicas; None where there is one."""
    _compiled: bool
    """Whether torch.compile runs the units."""
    _crews: dict[tuple[int, bool], Executors]
    _specs: ChunkSpecs
    """Along which dimensions batches are cut."""
    _parts: list[nn.Sequential]
    _compares: bool
    """Whether weights that several processes hold are still to be compared."""
    _watched: Tensors
    """The tensors of the model, which loss_fn may not read but for those of the last stage."""
    _waits: bool
    """Whether the model is cut by the first batch, which has not come yet."""
    _running: bool
    """Whether a run is under way whose steps interlock."""
    _watch: Watch | None
    """What compares steps with the plan; None where nobody asked for it."""
    _stragglers: Stragglers | None
    """What tells of stages that became slower; None where nobody wants to know."""
    certificate: Certificate
    replans: list[Replanned]
    """The orders that were changed."""

    if TYPE_CHECKING:

        def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
            """The parameters of the stages that are here, by their names in the whole model."""

        def owns(self, name: str) -> bool:
            """Whether a parameter or buffer is this process's to count."""

    @property
    def _alone(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self._world.here) == self.schedule.ranks

    @property
    def _needs(self) -> dict[int, set[int]]:
        """Of `NAMES`: the ranks that read the inputs, and those that read the targets."""
        table = self.schedule.placement.table
        return {1: set(table[:, 0].tolist()), 2: set(table[:, -1].tolist())}

    def _targets(self, targets: Any) -> Any:
        """What the loss is computed with; a model that computes its own was given it among its inputs."""
        return None if self._options.loss_fn is own_loss else targets

    def _see(self, batch: Batch) -> None:
        """Cut the model by the first batch."""
        raise NotImplementedError

    def _forget_batch(self) -> None:
        """Wait for the first batch again."""
        raise NotImplementedError

    def _look_at_batch(self, batch: Batch) -> Given:
        """Make sure that a batch can be cut."""
        specs, alone = self._specs, self._alone
        if alone and specs.kwargs is not None and batch.training:
            specs.refuse_unknown(batch.inputs, batch.keywords)
        if batch.keep:
            specs.refuse_merge()
        given = look_at(self.schedule.stages, batch.inputs, batch.targets, batch.keywords, not alone, specs)
        if alone and batch.inputs is None:
            raise StagelineError("the inputs are None; the first stage needs them")
        if alone and given.samples is None:
            raise StagelineError(
                "the chunk specs give all of the batch to every microbatch, so there is nothing to cut into "
                f"{self.schedule.microbatches} microbatches; let them cut one tensor at least"
            )
        settings = settings_row(batch.scale, batch.count, self.model.training)
        return given._replace(row=np.concatenate([given.row, settings]))

    def _refuse_to_train(self) -> None:
        if torch.is_inference_mode_enabled():
            raise StagelineError("step cannot train inside of torch.inference_mode(); call it outside")
        if not self.schedule.training:
            raise StagelineError(f"{self.schedule.name} has no backwards to train with; use predict or evaluate")
        if not self._waits:
            self._sharing.refuse_norms()

    def _refuse_in_run(self) -> None:
        if self._running:
            raise StagelineError(
                "a run of this pipeline is under way, and its next step is being computed; go on with it to its end, "
                "or leave it: run.close(), or break out of its loop"
            )

    def _run(self, batch: Batch) -> Done:
        """Run a batch on all ranks. If it fails anywhere it fails everywhere, and buffers are as before."""
        self._refuse_in_run()
        batch = replace(batch, inputs=plain(batch.inputs), targets=plain(batch.targets))
        if not self._waits:
            return self._run_cut(batch)
        self._see(batch)
        try:
            if batch.training:
                self._sharing.refuse_norms()
            return self._run_cut(batch)
        except Exception:  # it may have shown another order of calls than those that are to come
            self._forget_batch()
            raise

    def _run_cut(self, batch: Batch) -> Done:
        """Run a batch on the stages of the model."""
        self._world.begin()
        self._compare_weights()
        buffers = all_buffers(self.model) if batch.training else []
        reducer = self._replicas.reducer() if self._replicas is not None and batch.training and batch.sync else None
        try:
            samples, total, rows, refused = self._agree_on(batch, 0 if reducer is None else reducer.elements)
            filled = min(self.schedule.microbatches, samples)  # the parts that are not empty come first
            crew = self._crew(filled, training=batch.training)
            work: StepRequest | None = None
            if refused is None:
                try:
                    work = self._work(batch, samples, total, filled)
                    self._check_work(crew, work)
                except StagelineError as error:
                    refused = error
            done = self._run_crew(crew, work, refused, rows, batch, reducer, buffers)
            self._agreed = samples
            for executor in crew.executors:  # all is compiled by now
                executor.turns = nullcontext()
            return done
        except BaseException as error:
            put_back(buffers)
            if not isinstance(error, Exception):
                self._world.abandon(error)
            raise
        finally:
            self._world.end()

    def _compare_weights(self) -> None:
        """Before the first batch, all ranks together: weights that several processes hold must be the same in all."""
        if self._compares and (not self._alone or self._replicas is not None):
            placement, replicas = self.schedule.placement, self._world.layout.replicas
            held = held_by_several(self.model, self._parts, placement, replicas)
            try:
                if held:
                    compare_weights(self._world, held)
            except PipelineError:
                self._world.end()
                raise
        self._compares = False

    def _agree_on(self, batch: Batch, elements: int) -> tuple[int, int, Callable[[], Floats], Exception | None]:
        """How many samples there are, here and in all replicas; the batches of all ranks, to be compared; and why this
        process cannot run.

        All is told without waiting. Only a rank that was given nothing, or another number of samples than in the last
        step, waits until it knows what the others were given. Where there are replicas, all ranks wait.
        """
        alone, replicas = self._alone, self._replicas
        refused: Exception | None = None
        try:
            given = self._look_at_batch(batch)
        except StagelineError as error:
            if alone and replicas is None:
                raise
            refused, given = error, Given(None, np.array(REFUSED))
        if replicas is not None:
            row = replicas.row(given, batch.mode, batch.count, elements, refused is not None)
            known = self._world.all_gather(row)
            counts = replicas.agree(known, [] if alone else batch.columns, self._needs, refused)
            mine = known[self._world.replica, :, : len(NAMES)]
            return counts[self._world.replica], sum(counts), lambda: mine, None
        heard = self._world.all_gather_async(given.row)

        def rows() -> Floats:
            first: Floats = heard()[0]
            return first

        if given.samples is not None and (alone or given.samples == self._agreed):
            return given.samples, given.samples, rows, refused
        known = rows()
        told = set(known[:, 0].tolist()) - {0.0}
        apart = difference(known, [0])
        if not told or (apart and self._agreed not in told):  # and every rank knows it
            raise refused or PipelineError(apart or "no rank was given the inputs")
        samples = int(self._agreed) if apart and self._agreed is not None else int(told.pop())
        return samples, samples, rows, refused or (PipelineError(apart) if apart else None)

    def _work(self, batch: Batch, samples: int, total: int, filled: int) -> StepRequest:
        """Cut the batch; parts that would be empty are left out."""
        parts = self.schedule.microbatches
        predicting = not batch.with_targets
        wants = wanted(batch.inputs) if batch.training else []
        if batch.training:
            refuse_graphs(batch.inputs, self._world.layout.replicas)
            refuse_keywords(batch.keywords)
            refuse_target_graphs(batch.targets)
        whole, roots = with_leaves(batch.inputs) if wants else (batch.inputs, ())
        with torch.enable_grad() if wants else nullcontext():  # gradients go from the parts to the whole
            inputs = input_parts(whole, parts, filled, self._specs)
        return StepRequest(
            step=self._steps,
            samples=total,
            inputs=inputs,
            inputs_want=wants,
            input_roots=roots,
            targets=target_parts(batch.targets, parts, filled, self._specs) if batch.with_targets else [],
            weights=weights(self.loss_reduction, samples, parts, filled, batch.count, predicting, total),
            keywords=keyword_parts(batch.keywords, self.schedule.stages, parts, filled, self._specs),
            training=batch.training,
            keep_outputs=batch.keep,
            scale=batch.scale,
            check_finite=self.check_finite,
            check_gradients=batch.check_gradients,
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, own in self.model.named_parameters() if own is parameter), "without a name")

    def _check_work(self, crew: Executors, work: StepRequest) -> None:
        """Refuse what a step cannot do with the keywords and hooks that there are."""
        if work.training:
            self._placed.refuse_hooks(self._name_of)
        for executor in crew.executors:
            for stage, given in work.keywords.items():
                if stage in executor.stages:
                    executor.stages[stage].check_keywords(list(given[0]))

    def _run_crew(
        self,
        crew: Executors,
        work: StepRequest | None,
        refused: Exception | None,
        rows: Callable[[], Floats],
        batch: Batch,
        reducer: Reducer | None,
        buffers: Taken,
    ) -> Done:
        """Run the ranks that are here; on GPUs, they begin after, and end before, what the caller's streams hold."""
        self._placed.start()
        if self._replicas is not None and batch.training:
            self._replicas.start()
        versions = [buffer._version for buffer in self.model.buffers()]
        generators = Generators.now()
        devices = {executor.device for executor in crew.executors if executor.device is not None}
        began = {device: (_event(device), time.perf_counter()) for device in devices}
        given = None if work is None else replace(work, began=began)
        names = [name for name, _ in self.model.named_parameters()] if self.penalty is not None else []
        terms: dict[str, Tensor] = {}
        size = Outcome.size(crew.schedule, len(names), with_times=self._tells_times(crew))
        meanwhile = reducer if self._replicas is not None and self._replicas.overlap else None
        try:
            with no_collections():
                results, totals = self._world.run(
                    HostedStep(
                        crew,
                        given,
                        refused,
                        lambda found: self._sum_up(crew, found, names, terms, batch.training),
                        size,
                        meanwhile,
                    )
                )
        except PipelineError as error:
            if refused is not None and not isinstance(refused, PipelineError):
                raise refused from error  # this rank's own mistake, in its own words
            apart = "" if self._alone else disagreement(rows(), batch.columns, self._needs)
            raise (PipelineError(apart) if apart else error) from error.__cause__
        assert work is not None
        self._check_batch(rows, batch.columns)
        outcome = Outcome.read(totals, crew.schedule, len(names))
        losses, described, changed = [sum(outcome.losses)], outcome.described, np.zeros(0)
        wrong = self._not_finite(crew, work, outcome)
        good = [wrong is None]
        if self._replicas is not None:
            taken = buffers if work.training else []
            losses, described, changed, good = self._replicas.losses(outcome, taken, wrong is None)
        if work.training:
            self._check_finite(crew, wrong, good)
            self._check_penalty(names, outcome)
            self._check_buffers(versions)
            self._check_generators(generators, crew)
            gather(self._placed, self._world.broadcast_tensor, self._alone)
            if self._replicas is not None:
                self._replicas.finish(reducer, changed, buffers)
            if batch.sync or self._world.replica == 0:  # what is added up over replicas later counts in one of them
                add_gradients(terms, batch.scale)
            self._give_input_gradients(work, results)
        metrics = self._metrics(metrics_of(results, work.weights)) if described else {}
        return Done(crew, work, results, outcome, sum(losses) + outcome.penalty, metrics)

    def _give_input_gradients(self, work: StepRequest, results: Sequence[RankResult]) -> None:
        """Bring the gradients of the inputs where they belong, on the processes that hold stage 0."""
        gradients = {key: grads for result in results for key, grads in result.input_gradients.items()}
        owners = sorted(set(self.schedule.placement.table[:, 0].tolist()))
        if len(owners) > 1 and not self._alone:
            gradients = dict(exchange(self._world, owners, work.inputs_want, gradients))
        if work.inputs_want and set(owners) & set(self._world.here):
            give_gradients(work.inputs, work.input_roots, gradients)

    def _sum_up(
        self, crew: Executors, results: list[RankResult], names: Sequence[str], terms: dict[str, Tensor], training: bool
    ) -> Floats:
        """What the ranks that are here know of the step; `terms` takes the penalties of their parameters."""
        for executor, result in zip(crew.executors, results, strict=True):
            if result.over is not None:  # the caller's streams go on after this rank's
                torch.cuda.current_stream(executor.device).wait_event(result.over)
        found = sums(crew.schedule, results)
        if names:
            if self.penalty is not None and training:
                terms.update(terms_of(self.penalty, self.named_parameters(), self._penalty_reads))
            found = np.concatenate([found, values_of(names, terms, self.owns)])
        if not self._tells_times(crew):
            return found
        # Those of a GPU are not known yet, and are told later.
        known = all(executor.device is None for executor in crew.executors)
        times = np.zeros(3 * crew.schedule.num_actions)
        if known:
            times = times_of(crew, results, self._world.clocks).reshape(-1)
        return np.concatenate([found, times, [float(known)]])

    def _tells_times(self, crew: Executors) -> bool:
        """Whether the times of all actions are few enough to be told with everything else at the end of a step."""
        return not self._alone and 3 * crew.schedule.num_actions * crew.schedule.ranks <= FEW

    def _check_batch(self, rows: Callable[[], Floats], columns: Sequence[int]) -> None:
        if not self._alone and self._replicas is None:  # replicas have compared theirs before
            apart = disagreement(rows(), columns, self._needs)
            if apart:
                raise PipelineError(apart)

    def _not_finite(self, crew: Executors, work: StepRequest, outcome: Outcome) -> NotFinite | None:
        """Why this replica's loss or gradients fail the step; None where they do not."""
        if not (work.training and self.check_finite):
            return None
        wrong = not_finite(outcome.losses, outcome.events, outcome.bad, crew.schedule)
        return wrong if wrong is None or not work.inputs else wrong.with_inputs(work.inputs)

    def _check_finite(self, crew: Executors, wrong: NotFinite | None, good: Sequence[bool]) -> None:
        """Fail a step in which a loss or gradient is not finite, on all ranks of all replicas alike."""
        if all(good):
            return
        replica, layout = good.index(False), self._world.layout
        mine = {} if wrong is None else {"process": layout.rows[self._world.replica][wrong.rank], **wrong.to_json()}
        heard = json.loads(self._world.broadcast_to_all(json.dumps(mine), layout.rows[replica][0]))
        cause = ArithmeticError(heard["text"])
        error = failure(layout.name(heard["process"]), heard["doing"], cause)
        told = Failure.of(cause, located(heard["doing"]))
        verdict = Verdict(
            heard["process"], "raised", doing=told.doing, text=told.text, final=False,
            action=told.action, stage=told.stage, microbatch=told.microbatch,
        )  # fmt: skip
        note_record(error, [executor.record(verdict) for executor in crew.executors])
        raise error from cause

    def _check_penalty(self, names: Sequence[str], outcome: Outcome) -> None:
        said = penalty_not_finite(names, outcome.penalties) if self.check_finite else ""
        if said:
            raise PipelineError(f"{said}; {GRADIENTS}; check_finite=False lets such penalties pass")

    def _check_buffers(self, versions: list[int]) -> None:
        """With two directions each copy of a stage sees half of the microbatches, so no buffer may change."""
        if self.schedule.placement.directions == 1:
            return
        for (name, buffer), before in zip(self.model.named_buffers(), versions, strict=True):
            if buffer._version != before:
                raise PipelineError(
                    f"the buffer {name} changed in training, and {self.schedule.name} runs every stage on two ranks "
                    "that each see half of the microbatches; use a family with one direction, or evaluation mode for it"
                )

    def _check_generators(self, before: Generators, crew: Executors) -> None:
        """Every layer that draws was seen to in its first microbatch; one that began later is found in the next."""
        if before.moved():
            for executor in crew.executors:
                for stage in executor.stages.values():
                    stage.watch_again()
            if self._compiled:  # the compiler sets the generator back and forth
                return
            warnings.warn(
                f"something drew from torch's own random numbers during step {self._steps}: a layer that did not draw "
                "in its first microbatch, or another thread of yours; layers are looked at again in the next step, or "
                "set draws_random_numbers = True on a module that draws",
                stacklevel=3,
            )

    def _metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add up the metrics of the ranks that hold the last stage, of which there may be two."""
        owners = sorted({int(rank) for rank in self.schedule.placement.table[:, -1]})
        total: dict[str, float] = own if self._alone else {}
        for rank in [] if self._alone else owners:
            for name, value in json.loads(self._world.broadcast(json.dumps(own), rank)).items():
                total[name] = total.get(name, 0.0) + value
        return total if self._replicas is None else self._replicas.metrics(total)

    def _crew(self, microbatches: int, *, training: bool) -> Executors:
        """The executors of all ranks for so many microbatches, made once."""
        key = (microbatches, training)
        if key not in self._crews:
            schedule = only_microbatches(self.schedule if training else forwards_of(self.schedule), microbatches)
            stages = {
                rank: {
                    stage: Stage(
                        stage,
                        module,
                        self._options,
                        spread=self._exact,
                        loss_reads=self._loss_reads(stage, module),
                        watch=self._sharing.watch(stage, self._twins(module)),
                        foreign=self._foreign_reads(stage, module),
                    )
                    for stage, module in self._placed.modules[rank].items()
                }
                for rank in self._world.here
            }
            self._crews[key] = self._crew_of(schedule, stages)
        return self._crews[key]

    def _loss_reads(self, stage: int, module: nn.Module) -> LossReads | None:
        """What calls loss_fn on the last stage; it may read what that stage alone uses."""
        if stage < self.schedule.stages - 1:
            return None
        shared = {id(parameter) for parameter in self._placed.uses}
        shared |= {id(use.own) for uses in self._placed.uses.values() for use in uses}
        own = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in shared]
        alone = self._alone and self.schedule.placement.directions == 1
        return LossReads(self._options.loss_fn, self._watched, own, alone=alone)

    @cached_property
    def _penalty_reads(self) -> Tensors | None:
        """The parameters of the model, if the penalty can reach them: each of its terms may read one alone."""
        model = Tensors(self.model.named_parameters())
        return model if reaches(self.penalty, model) else None

    def _foreign_reads(self, stage: int, module: nn.Module) -> ForeignReads | None:
        """What calls the layers of a stage that can reach parameters of other stages."""
        if stage not in self._readers:
            return None
        twins = self._placed.twins.get(module, {})
        return ForeignReads(
            stage, module, holders_of(self._parts), twins, alone=self._alone, functions=not self._compiled
        )

    def _twins(self, module: nn.Module) -> dict[int, Any]:
        """The copies that a stage's module has of what stages share, by the originals' ids."""
        copies = module.copies() if isinstance(module, StagePart) else {}
        return {**self._placed.twins.get(module, {}), **copies}

    def _crew_of(self, schedule: Schedule, stages: Mapping[int, Mapping[int, Stage]]) -> Executors:
        """The executors of the ranks that are here."""
        executors = [
            Executor(
                schedule,
                rank,
                stages[rank],
                self._world.transport(rank),
                names=self._world.layout.rows[self._world.replica],
                own_stream=len(self._world.here) > 1,
                progress=self._world.progress(rank),
                flight=self._world.flight(rank),
                deadline=self._world.deadline,
            )
            for rank in self._world.here
        ]
        if any(executor.device is None for executor in executors):
            keep_memory()
        if self._compiled and len(executors) > 1:
            lock = threading.Lock()
            for executor in executors:
                executor.turns = lock
        return Executors(schedule, executors)

    def _look_at(self, watch: Watch, measured: Callable[[], Timeline] | None) -> None:
        """Compare the step with the plan, and take another order where that is better."""
        seen = measured() if measured is not None and watch.wants() else None
        changed = watch.after(self._steps - 1, seen, self.schedule, self._world)
        if changed is not None:
            self._reorder(changed.schedule)
            self.replans.append(changed)

    def _notice(self, crew: Executors, seconds: Callable[[], Floats | None]) -> None:
        """Tell of stages that became slower and stay so. `seconds` gives the lengths of all actions, if they are known.

        Those of a GPU are not known yet, and are not waited for.
        """
        watch = self._stragglers
        if watch is None or crew.schedule.microbatches != self.schedule.microbatches or 0 not in self._world.here:
            return
        if any(executor.device is not None for executor in crew.executors):
            return
        if watch.schedule is not crew.schedule:  # another order begins anew
            self._stragglers = watch = Stragglers(crew.schedule)
        lengths = seconds()
        if lengths is not None and (stragglers := watch.after(lengths)):
            first, *others = stragglers
            more = f" (and {len(others)} more)" if others else ""
            where = f"replica {self._world.replica}, " if self._world.layout.replicas > 1 else ""
            logger.warning("%s", f"after step {self._steps - 1}, {where}{first}{more}; stragglers=False is silent")

    @property
    def drift(self) -> Drift | None:
        """Which stages drifted from their plan when it was last looked at; None before that, or with replan="off"."""
        return None if self._watch is None else self._watch.drift

    def _reorder(self, schedule: Schedule) -> None:
        """Train in another order from the next step on; stages stay where they are, with all they have learned."""
        self.schedule, self.certificate = schedule, verify(schedule)
        for (microbatches, training), crew in list(self._crews.items()):
            if training:
                stages = {executor.rank: executor.stages for executor in crew.executors}
                made = self._crew_of(only_microbatches(schedule, microbatches), stages)
                self._crews[(microbatches, training)] = made
        if self._replicas is not None:
            self._replicas.follow(schedule)


def _event(device: int) -> Any:
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class Done:
    """A batch that ran."""

    crew: Executors
    work: StepRequest
    results: list[RankResult]
    outcome: Outcome
    loss: float
    """Of all replicas."""
    metrics: dict[str, float]

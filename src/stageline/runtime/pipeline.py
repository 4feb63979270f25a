"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.runtime.batch import (
    NAMES,
    Given,
    Keywords,
    Reduction,
    check_reduction,
    difference,
    digest,
    keyword_parts,
    look_at,
    parts_of,
    weights,
)
from stageline.runtime.cut import cut, find_schedule, forwards_of, only_microbatches, whole_model
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.garbage import no_collections
from stageline.runtime.outcome import Measured, Outcome, first_not_finite, metrics_of, sums, times_of
from stageline.runtime.processes import find_world
from stageline.runtime.randomness import Generators
from stageline.runtime.recompute import Choice, Policy, mark, understand
from stageline.runtime.shadows import gather, place
from stageline.runtime.stage import Stage, StageOptions
from stageline.runtime.state import gather_state, watched
from stageline.runtime.stats import Evaluation, StepStats
from stageline.runtime.tree import join_batch
from stageline.runtime.worlds import GRADIENTS, Crew, Floats, PipelineError
from stageline.schedules.certificate import verify
from stageline.schedules.schedule import Schedule
from stageline.timeline.timeline import Timeline


class Pipeline:
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

    def __init__(
        self,
        stages: nn.Sequential | Sequence[nn.Module],
        *,
        loss_fn: Callable[[Any, Any], Any],
        schedule: str | Path | Schedule = "1f1b",
        microbatches: int | None = None,
        ranks: int | None = None,
        loss_reduction: Reduction = "mean",
        recompute: Choice = "none",
        recompute_policy: Policy | None = None,
        seed: int | None = None,
        deadline: float | None = None,
        check_finite: bool = True,
        **options: Any,
    ) -> None:
        """`stages` is one module per stage, or an nn.Sequential that is cut evenly.

        `loss_reduction` says how microbatches weigh: "mean", each by its share of the samples; "sum", each once;
        "count", each divided by the `count` that `step` is given, for sums over targets, such as padded text.
        `recompute="stage"` keeps only what a stage was given and runs its forward once more before its backward;
        names (`"*.mlp"`), classes or a function of name and module choose modules instead, and `recompute_policy` is
        torch's policy of which operators of them to keep.
        `seed` is what dropout draws from (torch's own seed on rank 0 unless given). `deadline` is how many seconds a
        rank may be silent, or be waited for while nobody is at work, before the step fails with its name (60, or what
        the environment says as STAGELINE_DEADLINE). `check_finite` fails a step whose loss is not a finite number.
        `options` are the family's own, such as `chunks`.
        """
        check_reduction(loss_reduction)
        again = understand(recompute, recompute_policy)
        self.deadline = find_deadline(deadline)
        self.model = whole_model(stages)
        exact = not isinstance(stages, nn.Sequential)
        self.schedule = find_schedule(schedule, len(self.model), ranks, microbatches, **options)
        self.certificate = verify(self.schedule)
        self.loss_fn = loss_fn
        self.loss_reduction = loss_reduction
        self.check_finite = check_finite
        self.recomputed = mark(self.model, again, recompute)
        self._parts = cut(self.model, self.schedule.stages, exact)
        self._world = find_world(self.schedule.ranks, self.deadline)
        self._placed = place(self._parts, self.schedule.placement, self._world.here)
        self._world.agree(self._facts())
        self._options = StageOptions(loss_fn, self._common_seed(seed), again, check_finite)
        self._crews: dict[tuple[int, bool], Crew] = {}
        self._steps = 0
        self._agreed: int | None = None
        """How many samples all ranks had in the last step."""
        self._measured: Measured | None = None

    # What a user of torch expects of a model.

    @cached_property
    def _owned(self) -> set[int]:
        """The stages whose weights are here."""
        return {stage for stages in self._placed.modules.values() for stage in stages}

    def _own_parts(self) -> Iterator[nn.Sequential]:
        return (part for stage, part in enumerate(self._parts) if stage in self._owned)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages that are here, each once; gradients add into their `.grad`."""
        own = (parameter for _, parameter in self.named_parameters())
        return own if len(self._world.here) == self.schedule.ranks else watched(own)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages that are here, by their names in the whole model."""
        mine = {parameter for part in self._own_parts() for parameter in part.parameters()}
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter in mine)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradients by the names of their parameters."""
        return ((name, parameter.grad) for name, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stages that are here, by their names in the whole model."""
        return (named for part in self._own_parts() for named in part.named_buffers())

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """The state of the stages that are here, by names of the whole model.

        With `gather=True`, which all processes must call together, every one gets the whole model's, on the CPU.
        """
        own = {name: value for part in self._own_parts() for name, value in part.state_dict().items()}
        return gather_state(self._world, self.schedule.ranks, own, list(self.model.state_dict())) if gather else own

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with names of the whole model; what belongs to stages elsewhere is passed over."""
        known = set(self.model.state_dict())
        unknown = sorted(set(state) - known)
        missing = sorted(set(self.state_dict()) - set(state))
        if strict and (unknown or missing):
            raise StagelineError(
                f"the state does not fit the model: {len(missing)} names are missing (first: {missing[:1]}), "
                f"{len(unknown)} are unknown (first: {unknown[:1]})"
            )
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
        if len(self._world.here) == self.schedule.ranks:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return self._clip_together(max_norm, norm_type)

    def _clip_together(self, max_norm: float, norm_type: float) -> Tensor:
        """As torch does it in one process: the norm of all parameters' norms, in the order of the model."""
        everything = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norms = np.zeros(len(everything))
        first = {id(parameter): uses[0].rank for parameter, uses in self._placed.uses.items()}
        mine = {id(parameter) for parameter in self.parameters()}
        for index, parameter in enumerate(everything):
            counts_here = first.get(id(parameter), self._world.here[0]) == self._world.here[0]
            if id(parameter) in mine and counts_here and parameter.grad is not None:
                norms[index] = float(torch.linalg.vector_norm(parameter.grad, norm_type))
        known = torch.from_numpy(self._world.add_up(norms)).to(everything[0].dtype)
        total: Tensor = torch.linalg.vector_norm(known, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        return total

    # Steps.

    def step(
        self, inputs: Any, targets: Any, *, count: float | None = None, stage_kwargs: Keywords | None = None
    ) -> StepStats:
        """Run every microbatch forward and backward; gradients add into `.grad`, and no parameter changes.

        Where every process is a rank, each may be given the whole batch, or None for what its stages do not need:
        inputs are read on the first stage, targets on the last. `count` is the number of targets that a loss is divided
        by, over all microbatches and, where gradients of several steps are added up, over all of those.
        `stage_kwargs` holds keyword inputs of single stages, `{2: {"mask": mask}}`, or of every stage that takes them,
        `{"all": {"mask": mask}}`; they are cut into microbatches as the batch is.
        """
        if not self.schedule.training:
            raise StagelineError(f"{self.schedule.name} has no backwards to train with; use predict or evaluate")
        began = time.perf_counter()
        done = self._run(inputs, targets, stage_kwargs, training=True, count=count)
        crew, results = done.crew, done.results
        self._measured = Measured(crew.schedule, self._world.later(lambda: times_of(crew, results).reshape(-1)))
        self._steps += 1
        return StepStats(
            loss=sum(done.outcome.losses),
            losses=done.outcome.losses,
            metrics=done.metrics,
            seconds=time.perf_counter() - began,
            samples=done.work.samples,
            microbatches=len(done.work.weights),
            unsplit=done.outcome.unsplit,
            measured=self._measured.timeline,
        )

    def evaluate(
        self,
        inputs: Any,
        targets: Any,
        *,
        outputs: bool = False,
        count: float | None = None,
        stage_kwargs: Keywords | None = None,
    ) -> Evaluation:
        """Run the forwards alone, with the loss and its metrics; no gradient is touched."""
        began = time.perf_counter()
        done = self._run(inputs, targets, stage_kwargs, training=False, keep=outputs, count=count)
        return Evaluation(
            loss=sum(done.outcome.losses),
            losses=done.outcome.losses,
            metrics=done.metrics,
            outputs=_joined(done.results),
            seconds=time.perf_counter() - began,
        )

    def predict(self, inputs: Any, *, stage_kwargs: Keywords | None = None) -> Any:
        """Run the forwards alone; give back the outputs of the whole batch."""
        done = self._run(inputs, None, stage_kwargs, training=False, with_targets=False, keep=True)
        return _joined(done.results)

    @property
    def timeline(self) -> Timeline:
        """When every action and transfer of the last step ran, comparable with `stageline.simulate`."""
        if self._measured is None:
            raise StagelineError("there is no timeline before the first step")
        return self._measured.timeline()

    def _facts(self) -> dict[str, str]:
        """What all ranks must have in common."""
        schedule = self.schedule
        order = digest(
            [torch.from_numpy(part) for part in (schedule.kinds, schedule.stage_ids, schedule.microbatch_ids)]
        )
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        return {
            "the schedule": f"{schedule!r} {order}",
            "the names and shapes of the model": repr(shapes),
            "the number of threads (torch.get_num_threads)": str(torch.get_num_threads()),
            "the version of torch": str(torch.__version__),
            "loss_reduction": self.loss_reduction,
        }

    def _common_seed(self, seed: int | None) -> int:
        """The seed of rank 0, known to all; it must be exact in a float, so its last 52 bits count."""
        mine = (torch.initial_seed() if seed is None else int(seed)) & (2**52 - 1)
        return int(self._world.add_up(np.array([float(mine) if 0 in self._world.here else 0.0]))[0])

    def _run(
        self,
        inputs: Any,
        targets: Any,
        keywords: Keywords | None,
        *,
        training: bool,
        with_targets: bool = True,
        keep: bool = False,
        count: float | None = None,
    ) -> _Done:
        """Run a batch on all ranks. If it fails anywhere it fails everywhere, and buffers are as before."""
        self._world.begin()
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()] if training else []
        try:
            samples, rows, refused = self._agree_on(inputs, targets, keywords, with_targets)
            filled = min(self.schedule.microbatches, samples)  # the parts that are not empty come first
            crew = self._crew(filled, training=training)
            work: Work | None = None
            if refused is None:
                try:
                    work = self._work(inputs, targets, keywords, samples, filled, training, with_targets, keep, count)
                    self._check_keywords(crew, work)
                except StagelineError as error:
                    refused = error
            done = self._run_crew(crew, work, refused, rows, with_targets)
            self._agreed = samples
            return done
        except BaseException:
            for buffer, before in buffers:
                buffer.data.copy_(before)
            raise
        finally:
            self._world.end()

    def _agree_on(
        self, inputs: Any, targets: Any, keywords: Keywords | None, with_targets: bool
    ) -> tuple[int, Callable[[], Floats], Exception | None]:
        """How many samples there are; the batches of all ranks, to be compared; and why this process cannot run.

        All is told without waiting. Only a rank that was given nothing, or another number of samples than in the last
        step, waits until it knows what the others were given.
        """
        alone = len(self._world.here) == self.schedule.ranks
        refused: Exception | None = None
        try:
            given = look_at(self.schedule.stages, inputs, targets, keywords, digests=not alone)
            if alone and (given.samples is None or inputs is None):
                raise StagelineError("the inputs are None; the first stage needs them")
            if alone and with_targets and targets is None:
                raise StagelineError("the targets are None; the loss needs them")
        except StagelineError as error:
            if alone:
                raise
            refused, given = error, Given(None, np.zeros(len(NAMES)))
        rows = self._world.announce(given.row)
        if given.samples is not None and given.samples in (self._agreed, None if not alone else given.samples):
            return given.samples, rows, refused
        known = rows()
        told = set(known[:, 0].tolist()) - {0.0}
        apart = difference(known, [0])
        if not told or (apart and self._agreed not in told):  # and every rank knows it
            raise refused or PipelineError(apart or "no rank was given the inputs")
        samples = int(self._agreed) if apart and self._agreed is not None else int(told.pop())
        return samples, rows, refused or (PipelineError(apart) if apart else None)

    def _work(
        self,
        inputs: Any,
        targets: Any,
        keywords: Keywords | None,
        samples: int,
        filled: int,
        training: bool,
        with_targets: bool,
        keep: bool,
        count: float | None,
    ) -> Work:
        """Cut the batch; parts that would be empty are left out."""
        parts = self.schedule.microbatches
        return Work(
            step=self._steps,
            samples=samples,
            inputs=parts_of(inputs, parts, filled),
            targets=parts_of(targets, parts, filled) if with_targets else [],
            weights=weights(self.loss_reduction, samples, parts, filled, count, not with_targets),
            keywords=keyword_parts(keywords, self.schedule.stages, parts, filled),
            training=training,
            keep_outputs=keep,
        )

    def _check_keywords(self, crew: Crew, work: Work) -> None:
        for executor in crew.executors:
            for stage, given in work.keywords.items():
                if stage in executor.stages:
                    executor.stages[stage].check_keywords(list(given[0]))

    def _run_crew(
        self,
        crew: Crew,
        work: Work | None,
        refused: Exception | None,
        rows: Callable[[], Floats],
        with_targets: bool,
    ) -> _Done:
        """Run the ranks that are here; on GPUs, they begin after, and end before, what the caller's streams hold."""
        self._placed.start()
        versions = [buffer._version for buffer in self.model.buffers()]
        generators = Generators.now()
        devices = {executor.device for executor in crew.executors if executor.device is not None}
        began = {device: (_event(device), time.perf_counter()) for device in devices}
        given = None if work is None else replace(work, began=began)
        columns = [0, 1, 2, 3] if with_targets else [0, 1, 3]
        size = Outcome.size(crew.schedule)
        try:
            with no_collections():
                results, totals = self._world.run(
                    crew, given, self.deadline, lambda found: self._sum_up(crew, found), size, refused
                )
        except PipelineError as error:
            if refused is not None and not isinstance(refused, PipelineError):
                raise refused from error  # this rank's own mistake, in its own words
            apart = difference(rows(), columns)
            raise (PipelineError(apart) if apart else error) from error.__cause__
        assert work is not None
        self._check_batch(rows, columns)
        outcome = Outcome.read(totals)
        if work.training:
            self._check_losses(outcome)
            self._check_buffers(versions)
            self._check_generators(generators, crew)
            gather(self._placed, self._world.share)
        metrics = self._metrics(metrics_of(results, work.weights)) if outcome.described else {}
        return _Done(crew, work, results, outcome, metrics)

    @staticmethod
    def _sum_up(crew: Crew, results: list[RankResult]) -> Floats:
        for executor, result in zip(crew.executors, results, strict=True):
            if result.over is not None:  # the caller's streams go on after this rank's
                torch.cuda.current_stream(executor.device).wait_event(result.over)
        return sums(crew.schedule, results)

    def _check_batch(self, rows: Callable[[], Floats], columns: Sequence[int]) -> None:
        if len(self._world.here) < self.schedule.ranks:
            known = rows()
            apart = difference(known, columns)
            missing = next((NAMES[column] for column in columns if column in (1, 2) and not known[:, column].any()), "")
            if apart or missing:
                raise PipelineError(apart or f"no rank was given {missing}")

    def _check_losses(self, outcome: Outcome) -> None:
        """On a GPU, a loss that is not finite is found only now; on the host the last stage has found it before."""
        bad = first_not_finite(outcome.losses) if self.check_finite else None
        if bad is not None:
            raise PipelineError(
                f"the loss of microbatch {bad} is {outcome.losses[bad]} on stage {self.schedule.stages - 1}; "
                f"{GRADIENTS}; check_finite=False lets such losses pass"
            )

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

    def _check_generators(self, before: Generators, crew: Crew) -> None:
        """Every layer that draws was seen to in its first microbatch; one that began later is found in the next."""
        if before.moved():
            for executor in crew.executors:
                for stage in executor.stages.values():
                    stage.watch_again()
            warnings.warn(
                f"something drew from torch's own random numbers during step {self._steps}: a layer that did not draw "
                "in its first microbatch, or another thread of yours; layers are looked at again in the next step, or "
                "set draws_random_numbers = True on a module that draws",
                stacklevel=3,
            )

    def _metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add up the metrics of the ranks that hold the last stage, of which there may be two."""
        owners = sorted({int(rank) for rank in self.schedule.placement.table[:, -1]})
        if len(self._world.here) == self.schedule.ranks:
            return own
        total: dict[str, float] = {}
        for rank in owners:
            for name, value in json.loads(self._world.tell(json.dumps(own), rank)).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _crew(self, microbatches: int, *, training: bool) -> Crew:
        """The executors of all ranks for so many microbatches, made once."""
        key = (microbatches, training)
        if key not in self._crews:
            schedule = only_microbatches(self.schedule if training else forwards_of(self.schedule), microbatches)
            executors = [
                Executor(
                    schedule,
                    rank,
                    {
                        stage: Stage(stage, module, self._options)
                        for stage, module in self._placed.modules[rank].items()
                    },
                    self._world.transport(rank),
                    own_stream=len(self._world.here) > 1,
                    progress=self._world.progress(rank),
                    flight=self._world.flight(rank),
                )
                for rank in self._world.here
            ]
            self._crews[key] = Crew(schedule, executors)
        return self._crews[key]


def _event(device: int) -> Any:
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _joined(results: Sequence[RankResult]) -> Any:
    """The outputs of the whole batch, where the last stage is; None elsewhere."""
    found = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
    return join_batch([found[microbatch] for microbatch in sorted(found)]) if found else None


def find_deadline(given: float | None) -> float:
    """The deadline asked for, that of the environment, or a minute."""
    text = os.environ.get("STAGELINE_DEADLINE", "")
    try:
        found = float(given if given is not None else text or 60.0)
    except (TypeError, ValueError):
        found = 0.0
    if not 0 < found < float("inf"):
        name = "deadline" if given is not None else "STAGELINE_DEADLINE"
        raise StagelineError(f"{name} is a number of seconds above 0, got {given if given is not None else text!r}")
    return found


@dataclass(frozen=True)
class _Done:
    """A batch that ran."""

    crew: Crew
    work: Work
    results: list[RankResult]
    outcome: Outcome
    metrics: dict[str, float]

"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import json
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
from stageline.runtime.batch import Keywords, Reduction, check_reduction, keyword_parts, parts_of, samples_of, weights
from stageline.runtime.cut import cut, find_schedule, forwards_of, only_microbatches, whole_model
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.garbage import no_collections
from stageline.runtime.randomness import Generators
from stageline.runtime.recompute import Choice, Policy, mark, understand
from stageline.runtime.shadows import gather, place
from stageline.runtime.stage import Stage, StageOptions
from stageline.runtime.state import gather_state, watched
from stageline.runtime.stats import Evaluation, StepStats
from stageline.runtime.tree import join_batch
from stageline.runtime.worlds import Crew, Floats, PipelineError, digest, find_world
from stageline.schedules.build import PAIRED
from stageline.schedules.certificate import verify
from stageline.schedules.schedule import Schedule
from stageline.timeline.timeline import Timeline, Transfers


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
        deadline: float = 60.0,
        **options: Any,
    ) -> None:
        """`stages` is one module per stage, or an nn.Sequential that is cut evenly.

        `loss_reduction` says how microbatches weigh: "mean", each by its share of the samples; "sum", each once;
        "count", each divided by the `count` that `step` is given, for sums over targets, such as padded text.
        `recompute="stage"` keeps only what a stage was given and runs its forward once more before its backward;
        names (`"*.mlp"`), classes or a function of name and module choose modules instead, and `recompute_policy` is
        torch's policy of which operators of them to keep.
        `seed` is what dropout draws from (torch's own seed on rank 0 unless given). `deadline` is how many seconds a
        rank waits for another. `options` are the family's own, such as `chunks`.
        """
        check_reduction(loss_reduction)
        again = understand(recompute, recompute_policy)
        if not deadline > 0:
            raise StagelineError(f"deadline is a number of seconds above 0, got {deadline!r}")
        self.model = whole_model(stages)
        exact = not isinstance(stages, nn.Sequential)
        self.schedule = find_schedule(schedule, len(self.model), ranks, microbatches, **options)
        self.certificate = verify(self.schedule)
        self.loss_fn = loss_fn
        self.loss_reduction = loss_reduction
        self.deadline = deadline
        self.recomputed = mark(self.model, again, recompute)
        self._parts = cut(self.model, self.schedule.stages, exact)
        self._world = find_world(self.schedule.ranks)
        self._placed = place(self._parts, self.schedule.placement, self._world.here)
        self._world.agree(self._facts())
        self._options = StageOptions(loss_fn, self._common_seed(seed), again)
        self._crews: dict[tuple[int, bool], Crew] = {}
        self._steps = 0
        self._timeline: Timeline | None = None

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
        work = self._work(inputs, targets, stage_kwargs, training=True, count=count)
        crew = self._crew(len(work.weights), training=True)
        self._placed.start()
        versions = [buffer._version for buffer in self.model.buffers()]
        generators = Generators.now()
        results = self._run(crew, work)
        self._check_buffers(versions)
        self._check_generators(generators, crew)
        gather(self._placed, self._world.share)
        known = self._known(crew, results, work.weights)
        self._timeline = _timeline(crew.schedule, known.times)
        self._steps += 1
        return StepStats(
            loss=sum(known.losses),
            losses=known.losses,
            metrics=known.metrics,
            seconds=time.perf_counter() - began,
            samples=work.samples,
            microbatches=len(work.weights),
            bubble=self._timeline.bubble,
            unsplit=known.unsplit,
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
        work = self._work(inputs, targets, stage_kwargs, training=False, keep=outputs, count=count)
        return self._forwards(work, scored=True)

    def predict(self, inputs: Any, *, stage_kwargs: Keywords | None = None) -> Any:
        """Run the forwards alone; give back the outputs of the whole batch."""
        work = self._work(inputs, None, stage_kwargs, training=False, with_targets=False, keep=True)
        return self._forwards(work, scored=False).outputs

    @property
    def timeline(self) -> Timeline:
        """When every action and transfer of the last step ran, comparable with `stageline.simulate`."""
        if self._timeline is None:
            raise StagelineError("there is no timeline before the first step")
        return self._timeline

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

    def _work(
        self,
        inputs: Any,
        targets: Any,
        keywords: Keywords | None,
        *,
        training: bool,
        with_targets: bool = True,
        keep: bool = False,
        count: float | None = None,
    ) -> Work:
        """Check and cut the batch; parts that would be empty are left out."""
        schedule = self.schedule
        samples = samples_of(
            self._world, schedule.ranks, schedule.stages, inputs, targets, keywords, with_targets=with_targets
        )
        parts = schedule.microbatches
        filled = min(parts, samples)  # the parts that are not empty come first
        return Work(
            step=self._steps,
            samples=samples,
            inputs=parts_of(inputs, parts, filled),
            targets=parts_of(targets, parts, filled),
            weights=weights(self.loss_reduction, samples, parts, filled, count, not with_targets),
            keywords=keyword_parts(keywords, schedule.stages, parts, filled),
            training=training,
            keep_outputs=keep,
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

    def _known(self, crew: Crew, results: Sequence[RankResult], weigh: Sequence[float]) -> _Known:
        """Let every rank know what each of them found out, in one exchange (two where there are metrics)."""
        schedule = crew.schedule
        losses = np.zeros(schedule.microbatches)
        times = np.zeros((3, schedule.num_actions))
        metrics: dict[str, float] = {}
        for executor, result in zip(crew.executors, results, strict=True):
            mine = slice(int(schedule.bounds[executor.rank]), int(schedule.bounds[executor.rank + 1]))
            times[0, mine], times[1, mine] = result.clock.read()
            for index, moment in result.arrived.items():
                times[2, index] = moment
            for microbatch in sorted(result.losses):
                losses[microbatch] = float(result.losses[microbatch])
                for name, value in result.metrics[microbatch].items():
                    metrics[name] = metrics.get(name, 0.0) + float(value) * weigh[microbatch]
        counts = np.sum([result.split for result in results], axis=0)
        own = np.concatenate([losses, counts, [len(metrics)], times.reshape(-1)])
        every = self._world.add_up(own)
        first = schedule.microbatches
        total, unsplit, described = every[first : first + 3].tolist()
        return _Known(
            losses=tuple(every[:first].tolist()),
            metrics=self._metrics(metrics) if described else {},
            times=every[first + 3 :].reshape(3, -1),
            unsplit=unsplit / total if total else 0.0,
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
                )
                for rank in self._world.here
            ]
            self._crews[key] = Crew(schedule, executors)
        return self._crews[key]

    def _forwards(self, work: Work, *, scored: bool) -> Evaluation:
        began = time.perf_counter()
        self._placed.start()
        crew = self._crew(len(work.weights), training=False)
        results = self._run(crew, work)
        known = self._known(crew, results, work.weights)
        found = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
        outputs = join_batch([found[microbatch] for microbatch in sorted(found)]) if found else None
        return Evaluation(
            loss=sum(known.losses) if scored else None,
            losses=known.losses if scored else (),
            metrics=known.metrics,
            outputs=outputs,
            seconds=time.perf_counter() - began,
        )

    def _run(self, crew: Crew, work: Work) -> list[RankResult]:
        """Run the ranks that are here; on GPUs, they begin after, and end before, what the caller's streams hold."""
        for executor in crew.executors:
            for stage, given in work.keywords.items():
                if stage in executor.stages:
                    executor.stages[stage].check_keywords(list(given[0]))
        devices = {executor.device for executor in crew.executors if executor.device is not None}
        began = {device: (_event(device), time.perf_counter()) for device in devices}
        with no_collections():
            results = self._world.run(crew, replace(work, began=began), self.deadline)
        for executor, result in zip(crew.executors, results, strict=True):
            if result.over is not None:
                torch.cuda.current_stream(executor.device).wait_event(result.over)
        return results


def _event(device: int) -> Any:
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class _Known:
    """What all ranks know after a step."""

    losses: tuple[float, ...]
    metrics: dict[str, float]
    times: Floats
    """Start and end of every action, and when its input came."""
    unsplit: float


def _timeline(schedule: Schedule, times: Floats) -> Timeline:
    start, end, came = times - times[0].min()
    pairs = np.flatnonzero(schedule.kinds >= PAIRED)  # a pair is one entry: its halves have the same times
    start[pairs + 1] = start[pairs] = np.minimum(start[pairs], start[pairs + 1])
    end[pairs] = end[pairs + 1] = np.maximum(end[pairs], end[pairs + 1])
    graph = schedule.graph
    receivers = np.flatnonzero((graph.source >= 0) & (graph.rank != graph.rank[graph.source]))
    sent = end[graph.source[receivers]]
    # A message that was there before its receiver asked for it had arrived, for the receiver, when it was sent.
    arrived = np.maximum(np.minimum(came[receivers], start[receivers]), sent)
    return Timeline(schedule=schedule, start=start, end=end, transfers=Transfers(receivers, sent, arrived))

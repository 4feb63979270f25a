"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.runtime.cut import cut, find_schedule, forwards_of, only_microbatches, whole_model
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.shadows import gather, place
from stageline.runtime.stage import Stage
from stageline.runtime.stats import Evaluation, StepStats
from stageline.runtime.tree import batch_size, join_batch, split_batch
from stageline.runtime.worlds import Crew, Floats, digest, find_world, same_batch
from stageline.schedules.certificate import verify
from stageline.schedules.schedule import Schedule
from stageline.timeline.timeline import Timeline, Transfers

Reduction = Literal["mean", "sum"]


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
        loss_fn: Callable[[Any, Any], Tensor],
        schedule: str | Path | Schedule = "1f1b",
        microbatches: int | None = None,
        ranks: int | None = None,
        loss_reduction: Reduction = "mean",
        deadline: float = 60.0,
        **options: Any,
    ) -> None:
        """`stages` is one module per stage, or an nn.Sequential that is cut evenly.

        `options` are the family's own, such as `chunks`. `deadline` is how many seconds a rank waits for another.
        """
        if loss_reduction not in ("mean", "sum"):
            raise StagelineError(f"loss_reduction is 'mean' or 'sum', got {loss_reduction!r}")
        if not deadline > 0:
            raise StagelineError(f"deadline is a number of seconds above 0, got {deadline!r}")
        self.model = whole_model(stages)
        exact = not isinstance(stages, nn.Sequential)
        self.schedule = find_schedule(schedule, len(self.model), exact, ranks, microbatches, **options)
        self.certificate = verify(self.schedule)
        self.loss_fn = loss_fn
        self.loss_reduction = loss_reduction
        self.deadline = deadline
        self._parts = cut(self.model, self.schedule.stages, exact)
        self._world = find_world(self.schedule.ranks)
        self._placed = place(self._parts, self.schedule.placement, self._world.here)
        self._world.agree(self._facts())
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
        return (parameter for _, parameter in self.named_parameters())

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

    def state_dict(self) -> dict[str, Any]:
        """The state of the stages that are here, by names of the whole model."""
        return {name: value for part in self._own_parts() for name, value in part.state_dict().items()}

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

    def step(self, inputs: Any, targets: Any) -> StepStats:
        """Run every microbatch forward and backward; gradients add into `.grad`, and no parameter changes.

        Where every process is a rank, each may be given the whole batch, or None for what its stages do not need:
        inputs are read on the first stage, targets on the last.
        """
        began = time.perf_counter()
        work = self._work(inputs, targets, training=True)
        crew = self._crew(len(work.weights), training=True)
        self._placed.start()
        results = self._world.run(crew, work, self.deadline)
        gather(self._placed, self._world.share)
        losses = self._losses(results, len(work.weights))
        self._timeline = self._measured(crew, results)
        self._steps += 1
        split, unsplit = self._world.add_up(np.sum([result.split for result in results], axis=0).astype(np.float64))
        return StepStats(
            loss=sum(losses.tolist()),
            losses=tuple(losses.tolist()),
            seconds=time.perf_counter() - began,
            samples=work.samples,
            microbatches=len(work.weights),
            bubble=self._timeline.bubble,
            unsplit=float(unsplit / split) if split else 0.0,
        )

    def evaluate(self, inputs: Any, targets: Any, *, outputs: bool = False) -> Evaluation:
        """Run the forwards alone, with the loss; no gradient is touched."""
        return self._forwards(inputs, targets, outputs)

    def predict(self, inputs: Any) -> Any:
        """Run the forwards alone; give back the outputs of the whole batch."""
        return self._forwards(inputs, None, True).outputs

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

    def _work(self, inputs: Any, targets: Any, *, training: bool, keep: bool = False) -> Work:
        """Check and cut the batch; parts that would be empty are left out."""
        sizes = [
            batch_size(part, what)
            for part, what in ((inputs, "the inputs"), (targets, "the targets"))
            if part is not None
        ]
        if len(set(sizes)) > 1:
            raise StagelineError(
                f"there are {sizes[0]} samples of inputs and {sizes[1]} of targets; give as many of both"
            )
        batch = [("the inputs", inputs), ("the targets", targets)][: 2 if training or targets is not None else 1]
        samples = same_batch(self._world, self.schedule.ranks, sizes[0] if sizes else None, batch)
        if samples == 0:
            raise StagelineError("the batch has no samples")
        parts = self.schedule.microbatches
        count = min(parts, samples)  # the parts that are not empty come first
        share = [samples // parts + (part < samples % parts) for part in range(count)]
        weights = [size / samples for size in share] if self.loss_reduction == "mean" else [1.0] * count
        return Work(
            step=self._steps,
            samples=samples,
            inputs=split_batch(inputs, parts)[:count] if inputs is not None else [],
            targets=split_batch(targets, parts)[:count] if targets is not None else [],
            weights=weights,
            training=training,
            keep_outputs=keep,
        )

    def _losses(self, results: Sequence[RankResult], count: int) -> Floats:
        """Each microbatch's loss, known on every rank."""
        losses = np.zeros(count)
        for result in results:
            for microbatch, loss in result.losses.items():
                losses[microbatch] = float(loss)
        return self._world.add_up(losses)

    def _crew(self, microbatches: int, *, training: bool) -> Crew:
        """The executors of all ranks for so many microbatches, made once."""
        key = (microbatches, training)
        if key not in self._crews:
            schedule = only_microbatches(self.schedule if training else forwards_of(self.schedule), microbatches)
            last = schedule.stages - 1
            executors = [
                Executor(
                    schedule,
                    rank,
                    {
                        stage: Stage(stage, module, self.loss_fn if stage == last else None)
                        for stage, module in self._placed.modules[rank].items()
                    },
                    self._world.transport(rank),
                )
                for rank in self._world.here
            ]
            self._crews[key] = Crew(schedule, executors)
        return self._crews[key]

    def _forwards(self, inputs: Any, targets: Any, keep: bool) -> Evaluation:
        began = time.perf_counter()
        work = self._work(inputs, targets, training=False, keep=keep)
        self._placed.start()
        results = self._world.run(self._crew(len(work.weights), training=False), work, self.deadline)
        losses = self._losses(results, len(work.weights))
        found = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
        outputs = join_batch([found[microbatch] for microbatch in sorted(found)]) if found else None
        return Evaluation(
            loss=sum(losses.tolist()) if targets is not None else None,
            losses=tuple(losses.tolist()) if targets is not None else (),
            outputs=outputs,
            seconds=time.perf_counter() - began,
        )

    def _measured(self, crew: Crew, results: Sequence[RankResult]) -> Timeline:
        """Put the ranks' times together; the processes of one machine read one clock."""
        schedule = crew.schedule
        times = np.zeros((3, schedule.num_actions))
        for executor, result in zip(crew.executors, results, strict=True):
            mine = slice(int(schedule.bounds[executor.rank]), int(schedule.bounds[executor.rank + 1]))
            times[0, mine], times[1, mine] = result.start, result.end
            for index, moment in result.arrived.items():
                times[2, index] = moment
        times = self._world.add_up(times.reshape(-1)).reshape(3, -1)
        return _timeline(schedule, times)


def _timeline(schedule: Schedule, times: Floats) -> Timeline:
    start, end, came = times - times[0].min()
    graph = schedule.graph
    receivers = np.flatnonzero((graph.source >= 0) & (graph.rank != graph.rank[graph.source]))
    sent = end[graph.source[receivers]]
    # A message that was there before its receiver asked for it had arrived, for the receiver, when it was sent.
    arrived = np.maximum(np.minimum(came[receivers], start[receivers]), sent)
    return Timeline(schedule=schedule, start=start, end=end, transfers=Transfers(receivers, sent, arrived))

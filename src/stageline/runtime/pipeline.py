"""The pipeline: a model in stages, a schedule, and one call per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.runtime.cut import cut, find_schedule, forwards_of, only_microbatches, whole_model
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.shadows import Alias, clear, gather, shadow_of, sync_modes
from stageline.runtime.stage import Stage
from stageline.runtime.stats import Evaluation, StepStats, add_up
from stageline.runtime.tree import batch_size, join_batch, split_batch
from stageline.schedules.certificate import verify
from stageline.schedules.schedule import Schedule
from stageline.timeline.timeline import Timeline, Transfers
from stageline.transport.protocol import PeerFailed
from stageline.transport.threads import ThreadHub

Reduction = Literal["mean", "sum"]


class PipelineError(StagelineError, RuntimeError):
    """A step that failed; says which rank, stage, microbatch and action, and what became of the gradients."""


@dataclass(frozen=True)
class Crew:
    """A schedule, and what runs it on every rank."""

    schedule: Schedule
    executors: list[Executor]


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
        self._modules, self._aliases, self._shadows = _place(self._parts, self.schedule)
        self._hub = ThreadHub(self.schedule.ranks)
        self._crews: dict[tuple[int, bool], Crew] = {}
        self._steps = 0
        self._timeline: Timeline | None = None

    # What a user of torch expects of a model.

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, each once; gradients add into their `.grad` as in plain PyTorch."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by their names in the whole model."""
        return self.model.named_parameters()

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradients by the names of their parameters."""
        return ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers by their names in the whole model."""
        return self.model.named_buffers()

    def state_dict(self) -> dict[str, Any]:
        """The state by names of the whole model."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state with names of the whole model."""
        return self.model.load_state_dict(state, strict=strict)

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
        """Clip by the norm over all stages, tied weights counted once; gives back the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    # Steps.

    def step(self, inputs: Any, targets: Any) -> StepStats:
        """Run every microbatch forward and backward; gradients add into `.grad`, and no parameter changes."""
        samples = batch_size(inputs, "the inputs")
        if batch_size(targets, "the targets") != samples:
            found = batch_size(targets, "the targets")
            raise StagelineError(f"there are {samples} samples of inputs and {found} of targets; give as many of both")
        began = time.perf_counter()
        work = self._work(inputs, targets, samples, training=True)
        crew = self._crew(len(work.inputs), training=True)
        results = self._run(crew, work)
        for aliases in self._aliases:
            gather(aliases)
        seconds = time.perf_counter() - began
        self._timeline = _timeline(crew.schedule, results)
        self._steps += 1
        losses = {microbatch: loss for result in results for microbatch, loss in result.losses.items()}
        total, parts = add_up(losses)
        split, unsplit = (sum(counts) for counts in zip(*(result.split for result in results), strict=True))
        return StepStats(
            loss=total,
            losses=parts,
            seconds=seconds,
            samples=samples,
            microbatches=crew.schedule.microbatches,
            bubble=self._timeline.bubble,
            unsplit=unsplit / split if split else 0.0,
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

    def _work(self, inputs: Any, targets: Any, samples: int, *, training: bool, keep: bool = False) -> Work:
        """Cut the batch; parts that would be empty are left out."""
        if samples == 0:
            raise StagelineError("the batch has no samples")
        parts = self.schedule.microbatches
        count = min(parts, samples)  # the parts that are not empty come first
        sizes = [samples // parts + (part < samples % parts) for part in range(count)]
        weights = [size / samples for size in sizes] if self.loss_reduction == "mean" else [1.0] * count
        given = split_batch(targets, parts)[:count] if targets is not None else []
        return Work(self._steps, split_batch(inputs, parts)[:count], given, weights, training, keep)

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
                        for stage, module in self._modules[rank].items()
                    },
                    self._hub.end(rank),
                )
                for rank in range(schedule.ranks)
            ]
            self._crews[key] = Crew(schedule, executors)
        return self._crews[key]

    def _forwards(self, inputs: Any, targets: Any, keep: bool) -> Evaluation:
        samples = batch_size(inputs, "the inputs")
        began = time.perf_counter()
        work = self._work(inputs, targets, samples, training=False, keep=keep)
        results = self._run(self._crew(len(work.inputs), training=False), work)
        losses = {microbatch: loss for result in results for microbatch, loss in result.losses.items()}
        found = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
        total, parts = add_up(losses)
        outputs = join_batch([found[microbatch] for microbatch in sorted(found)]) if keep else None
        return Evaluation(total if losses else None, parts, outputs, time.perf_counter() - began)

    def _run(self, crew: Crew, work: Work) -> list[RankResult]:
        """Let every rank run its program on a thread of its own; the first failure stops all."""
        for original, shadow in self._shadows:
            sync_modes(original, shadow)
        for aliases in self._aliases:
            clear(aliases)
        self._hub.reset()
        results: dict[int, RankResult] = {}
        failures: dict[int, BaseException] = {}

        def run(executor: Executor) -> None:
            try:
                results[executor.rank] = executor.run(work, self.deadline)
            except BaseException as error:
                failures[executor.rank] = error
                executor.transport.fail(error, f"rank {executor.rank} failed in {executor.doing}")

        threads = [
            threading.Thread(target=run, args=(executor,), name=f"stageline rank {executor.rank}", daemon=True)
            for executor in crew.executors
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            origin = next(
                (rank for rank, error in failures.items() if not isinstance(error, PeerFailed)), min(failures)
            )
            doing = crew.executors[origin].doing
            for executor in crew.executors:
                executor.forget()
            raise PipelineError(
                f"rank {origin} failed in {doing}: {type(failures[origin]).__name__}: {failures[origin]}; no parameter "
                "was changed, and gradients may hold part of this step: call zero_grad() before the next one"
            ) from failures[origin]
        return [results[rank] for rank in range(crew.schedule.ranks)]


def _place(
    parts: Sequence[nn.Module], schedule: Schedule
) -> tuple[list[dict[int, nn.Module]], list[list[Alias]], list[tuple[nn.Module, nn.Module]]]:
    """Give every rank the modules of its stages; later uses of a parameter run on shadows."""
    modules: list[dict[int, nn.Module]] = [{} for _ in range(schedule.ranks)]
    aliases: list[list[Alias]] = []
    shadows: list[tuple[nn.Module, nn.Module]] = []
    seen: set[nn.Parameter] = set()
    for direction in range(schedule.placement.directions):
        for stage, part in enumerate(parts):
            used = list(part.parameters())
            again = [parameter for parameter in used if parameter in seen]
            seen.update(used)
            module = part
            if again:
                module, found = shadow_of(part, again)
                aliases.append(found)
                shadows.append((part, module))
            modules[int(schedule.placement.table[direction, stage])][stage] = module
    return modules, aliases, shadows


def _timeline(schedule: Schedule, results: Sequence[RankResult]) -> Timeline:
    """Put the ranks' clocks together; they are one clock, because they are one process."""
    start = np.concatenate([result.start for result in results])
    end = np.concatenate([result.end for result in results])
    arrived = {index: moment for result in results for index, moment in result.arrived.items()}
    receivers = np.array(sorted(arrived), dtype=np.int64)
    sent = end[schedule.graph.source[receivers]]
    came = np.array([arrived[index] for index in receivers.tolist()])
    began = float(start.min())
    # A message that was there before its receiver asked for it arrived, for the receiver, when it was sent.
    return Timeline(
        schedule=schedule,
        start=start - began,
        end=end - began,
        transfers=Transfers(receivers, sent - began, np.maximum(np.minimum(came, start[receivers]), sent) - began),
    )

"""Steps that interlock: a rank begins the next one while others still run the last one."""

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
from stageline.distributed.process_host import ProcessWorld
from stageline.distributed.rank_host import Floats
from stageline.distributed.thread_host import ThreadWorld
from stageline.runtime.batches.input_gradients import wanted as wants_gradients
from stageline.runtime.continuous.processes import ProcessGround, ProcessRun, Pulled
from stageline.runtime.continuous.rank_loop import Ground, Judged, Lane, Offer, Terms, not_finite
from stageline.runtime.continuous.rollback import Make, Part, find_optimizer
from stageline.runtime.continuous.threads import ThreadRun
from stageline.runtime.executor import Executors
from stageline.runtime.grad_norm import norm_dtype
from stageline.runtime.optimizer_step import GradientRules, step_optimizer
from stageline.runtime.step import Batch
from stageline.runtime.step_report import Measured, lengths_of
from stageline.runtime.step_stats import StepStats
from stageline.tensors.pytree import plain
from stageline.tensors.random_numbers import Generators, draw_in_turn

if TYPE_CHECKING:
    from stageline.runtime.pipeline import Pipeline

Rates: TypeAlias = Callable[[int], float] | LRScheduler
"""A factor of the learning rates by the number of a step, or a schedule of torch's."""
ARGUMENTS = ("inputs", "targets", "count", "scale", "stage_kwargs")
"""What a batch may say that is a dict with "inputs" in it."""


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do."""

    optimizer: Optimizer
    rules: GradientRules
    rates: Rates | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        max_norm = self.rules.max_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise StagelineError(f"max_norm is a number above 0, or None to clip nothing; got {shorten(max_norm)}")
        if isinstance(self.rates, ReduceLROnPlateau):
            raise StagelineError(
                "lr_schedule=ReduceLROnPlateau needs a figure to go by; leave it out, and call scheduler.step(figure) "
                "in the loop over the steps"
            )
        if self.rates is not None and not callable(self.rates) and not isinstance(self.rates, LRScheduler):
            raise StagelineError(
                f"lr_schedule is a function from the number of a step to a factor, or a scheduler of torch's; got "
                f"{shorten(self.rates)}"
            )

    def set_rates(self, step: int) -> None:
        """Give the optimizer the learning rates of a step, where a function says them."""
        if self.rates is not None and not isinstance(self.rates, LRScheduler):
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.rates(step)

    def stepped(self, step: int) -> None:
        """A step is made: the learning rates are those of the next one."""
        if isinstance(self.rates, LRScheduler):
            self.rates.step()
        else:
            self.set_rates(step + 1)


def read_batch(pipe: Pipeline, given: Any) -> Batch:
    """What a batch of a run says: inputs and targets; inputs alone; or arguments of `step` by name."""
    said: dict[str, Any] = {"inputs": given}
    if isinstance(given, Mapping) and "inputs" in given:
        said = dict(given)
        strange = next((name for name in said if name not in ARGUMENTS), None)
        if strange is not None:
            raise StagelineError(
                f"a batch says {strange!r}{nearest(str(strange), ARGUMENTS)}; one with 'inputs' in it may say "
                f"{', '.join(ARGUMENTS)}"
            )
    elif isinstance(given, tuple | list) and len(given) == 2:
        said = {"inputs": given[0], "targets": given[1]}
    elif not isinstance(given, Mapping | Tensor) and given is not None:
        raise StagelineError(
            f"a batch is a pair of inputs and targets, a tensor or a dict of inputs alone, or None where a rank needs "
            f"none; got {shorten(given)}"
        )
    if wants_gradients(said["inputs"]):
        raise StagelineError(
            "inputs of a run require grad, and the next batch is read before their gradients are known; call "
            "pipe.step(inputs, targets) and optimizer.step() in a loop instead, or detach the inputs"
        )
    wanted = pipe._targets(said.get("targets"))
    scale = said.get("scale", 1.0)
    return Batch(
        plain(said["inputs"]),
        plain(wanted),
        said.get("stage_kwargs"),
        True,
        count=said.get("count"),
        scale=float(scale),
    )


def seen(pipe: Pipeline, batches: Iterable[Any]) -> Iterable[Any]:
    """Let the first batch show where a model is cut, on which depends whether steps interlock; give all of them."""
    try:
        coming = iter(batches)
    except TypeError:  # said where the run begins
        return batches
    first = list(islice(coming, 1))
    for given in first:
        pipe._see(read_batch(pipe, given))
        try:
            pipe._sharing.refuse_norms()
        except StagelineError:
            pipe._forget_batch()
            raise
    return chain(first, coming)


def why_not(pipe: Pipeline, optimizer: Optimizer) -> str:
    """Why steps cannot interlock; empty where they can."""
    scattered = {id(parameter) for parameter in pipe._placed.scattered}
    if pipe.replicas > 1:
        return f"the gradients of {pipe.replicas} replicas are added up when all ranks are at the end of a step"
    if scattered:
        name = next(name for name, each in pipe.model.named_parameters() if id(each) in scattered)
        return f"several ranks use the parameter {name}, so its gradient is complete when all are at the end of a step"
    devices = {tensor.device.type for tensor in (*pipe.model.parameters(), *pipe.model.buffers())} - {"cpu", "meta"}
    if devices:
        return f"stages are on {' and '.join(sorted(devices))}, and only those of the host interlock"
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if pipe._alone and hooks:
        return "the optimizer has hooks, which expect to be called once for all parameters"
    return ""


class Outside:
    """What the caller does between steps, apart from what ranks draw meanwhile: threads share torch's generator."""

    def __init__(self, pipe: Pipeline) -> None:
        """Note the state of the generators."""
        self._pipe = pipe
        self._before = Generators.now()
        self.turn = threading.RLock()
        """What a rank of the run holds while it draws. Ranks of other pipelines, which may run meanwhile, do not."""

    @contextmanager
    def leave(self) -> Iterator[None]:
        """While this lasts no rank draws, and what is drawn is the caller's."""
        with self.turn:
            if self._before.moved():
                everyone = [executor for crew in self._pipe._crews.values() for executor in crew.executors]
                self._pipe._check_generators(self._before, Executors(self._pipe.schedule, everyone))
            try:
                yield
            finally:
                self._before = Generators.now()


class Course:
    """The steps of a run, from the batches to their figures."""

    def __init__(self, pipe: Pipeline, batches: Iterable[Any], settings: Settings) -> None:
        """Nothing is begun yet."""
        self.pipe, self.settings = pipe, settings
        try:
            self._batches = iter(batches)
        except TypeError:
            raise StagelineError(
                f"batches is an iterable of batches, one for every step; got {shorten(batches)}"
            ) from None
        self._lanes: list[Lane] = []

    @property
    def bytes(self) -> int:
        """What the way back takes on the ranks that are here."""
        return sum(lane.bytes for lane in self._lanes)

    # One after the other.

    def one_by_one(self) -> Generator[StepStats, None, None]:
        """Steps that do not interlock."""
        pipe, settings = self.pipe, self.settings
        settings.set_rates(pipe.steps)
        for given in self._batches:
            batch = read_batch(pipe, given)
            try:
                stats = pipe._step(replace(batch, check_gradients=not settings.rules.skip_not_finite))
            except PipelineError:
                pipe.zero_grad()
                raise
            norm = pipe.grad_norm() if settings.rules.need_norm else None
            decision = settings.rules.decide(norm)
            if norm is not None and decision.failed:
                pipe.zero_grad()
                pipe.steps -= 1
                raise not_finite(pipe.steps, norm, stats.loss)
            gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
            step_optimizer(decision, gradients, settings.optimizer.step)
            pipe.zero_grad()
            settings.stepped(pipe.steps - 1)
            yield replace(stats, norm=None if norm is None else norm.item())

    # Interlocking.

    def interlocked(self) -> Generator[StepStats, None, None]:
        """Steps that do."""
        pipe = self.pipe
        pipe._refuse_in_run()
        pipe._running = True
        outside = Outside(pipe)
        try:
            pipe._compare_weights()
            self.settings.set_rates(pipe.steps)
            began = time.perf_counter()
            for judged, times in self._begin(outside).steps():
                self._told(judged, times)
                self._look(judged)
                stats = self._stats(judged, began)
                began = time.perf_counter()
                with outside.leave():
                    self.settings.stepped(judged.step)
                    yield stats
        finally:
            pipe._running = False

    def _begin(self, outside: Outside) -> ThreadRun | ProcessRun:
        pipe, settings, world = self.pipe, self.settings, self.pipe._world
        terms = Terms(
            pipe.steps,
            pipe._placed,
            [name for name, _ in pipe.model.named_parameters()],
            settings.rules,
            pipe.penalty,
            norm_dtype(pipe.model.parameters()),
            None if pipe.penalty is None else pipe._penalty_reads,
        )
        named = dict(pipe.named_parameters())

        def lane(rank: int, ground: Ground) -> Lane:
            own = {name: parameter for name, parameter in named.items() if pipe._owners[name] == rank}
            return Lane(rank, ground, terms, Part(settings.optimizer, list(own.values())), own)

        made: ThreadRun | ProcessRun
        if isinstance(world, ThreadWorld):
            made = ThreadRun(
                world,
                terms,
                lane,
                lambda step: self._offer(step, outside),
                lambda: draw_in_turn(outside.turn),
            )
        else:
            assert isinstance(world, ProcessWorld)
            ground = ProcessGround(world, lambda: self._pull(outside), self._plan, pipe._needs)
            made = ProcessRun(world, terms, lane, ground)
        self._lanes = made.lanes
        return made

    def _pull(self, outside: Outside) -> Pulled:
        """Ask for the next batch."""
        pipe = self.pipe
        try:
            with outside.leave():
                given = next(self._batches)
            batch = read_batch(pipe, given)
            return Pulled(batch, pipe._look_at_batch(batch))
        except StopIteration:
            return Pulled(ended=True)
        except Exception as error:
            return Pulled(error=error)

    def _offer(self, step: int, outside: Outside) -> Offer:
        """What a step does, where all ranks are here."""
        pulled = self._pull(outside)
        if pulled.batch is None or pulled.given.samples is None:
            return Offer(step, error=pulled.error)
        offer = self._plan(step, pulled.batch, pulled.given.samples)
        return offer if offer.refused is None else Offer(step, error=offer.refused)

    def _plan(self, step: int, batch: Batch, samples: int) -> Offer:
        pipe = self.pipe
        filled = min(pipe.schedule.microbatches, samples)
        crew = pipe._crew(filled, training=True)
        try:
            work = replace(pipe._work(batch, samples, samples, filled), step=step)
            pipe._check_work(crew, work)
        except StagelineError as error:
            return Offer(step, crew, refused=error)
        return Offer(step, crew, work)

    def _told(self, judged: Judged, times: Callable[[], Floats]) -> None:
        """All ranks have made this step: the pipeline is one step further."""
        pipe, crew = self.pipe, judged.offer.crew
        assert crew is not None
        assert judged.offer.work is not None
        pipe._measured = Measured(crew.schedule, times, pipe._world.clocks)
        pipe._steps = judged.step + 1
        pipe._agreed = judged.offer.work.samples
        pipe._notice(crew, lambda: lengths_of(crew, (), times()) if pipe._tells_times(crew) or pipe._alone else None)

    def _look(self, judged: Judged) -> None:
        """Compare it with the plan; another order is taken by the first step that no rank was told of yet."""
        pipe, work = self.pipe, judged.offer.work
        if pipe._watch is not None and work is not None and pipe._measured is not None:
            whole = len(work.weights) == pipe.schedule.microbatches
            pipe._look_at(pipe._watch, pipe._measured.timeline if whole else None)

    def _stats(self, judged: Judged, began: float) -> StepStats:
        work, outcome = judged.offer.work, judged.told.outcome
        assert work is not None
        assert self.pipe._measured is not None
        return StepStats(
            loss=sum(outcome.losses) + outcome.penalty,
            losses=outcome.losses,
            metrics=judged.told.metrics,
            seconds=time.perf_counter() - began,
            samples=work.samples,
            microbatches=len(work.weights),
            unsplit=outcome.unsplit,
            measured=self.pipe._measured.timeline,
            penalty=outcome.penalty,
            norm=None if judged.norm is None else judged.norm.item(),
        )


class Run(Iterator[StepStats]):
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
        """Begin nothing before the first step is asked for."""
        self._shown: Pipeline | None = None
        """The pipeline whose model was cut by the first batch, until that has been run."""
        if pipe._waits:
            batches = seen(pipe, batches)
            self._shown = None if pipe._waits else pipe
        self.optimizer = find_optimizer(optimizer, list(pipe.parameters()))
        """The optimizer that was given, or made."""
        self.note = why_not(pipe, self.optimizer)
        """Why steps do not interlock; empty where they do."""
        self.interlocks = not self.note and pipe.ranks > 1
        """Whether a rank may begin a step before all have ended the last one."""
        self._course = Course(pipe, batches, Settings(self.optimizer, rules, lr_schedule))
        self._steps = self._course.interlocked() if self.interlocks else self._course.one_by_one()
        self._thread: int | None = None
        if self.note:
            warnings.warn(f"steps do not interlock, and are made one after the other: {self.note}", stacklevel=3)

    @property
    def snapshot_bytes(self) -> int:
        """The memory that the way back takes now, on the ranks of this process.

        That is: a copy of parameters, optimizer state and buffers, and the gradients of the last step.
        """
        return self._course.bytes

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> StepStats:
        """The next step."""
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise StagelineError("a run is gone through by one thread, and another one has begun with this")
        self._thread = thread
        if self._shown is None:
            return next(self._steps)
        try:
            stats = next(self._steps)
        except Exception:
            self._shown._forget_batch()
            raise
        finally:
            self._shown = None
        return stats

    def close(self) -> None:
        """Leave the run: parameters are those after the last step that it told of."""
        self._steps.close()

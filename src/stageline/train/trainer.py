"""The training job: from a configuration to a checkpoint you can resume from."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from stageline.common.errors import StagelineError
from stageline.common.interrupts import StopSignals
from stageline.distributed.attempts import number_of
from stageline.distributed.failures import OutOfMemory
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.faults.flight_recorder import flights_into
from stageline.train.callbacks import Callback, Callbacks
from stageline.train.checkpoint.remote import checkpoint_folder, is_remote
from stageline.train.checkpoint_state import (
    JobCheckpoints,
    TrainingProgress,
    check_same_run,
    find_checkpoint,
    job_state,
    load_initial_weights,
    resume,
    resume_progress,
)
from stageline.train.config.config import Config
from stageline.train.config.io import read_config
from stageline.train.config.rules import validate
from stageline.train.data import Data, Prefetch
from stageline.train.events import Logs, read_metrics
from stageline.train.layout import batch_sizes, find_job_layout, process_settings
from stageline.train.optimizers import Optimizer, outer_parameters, rate
from stageline.train.output import Output, memory_in_use
from stageline.train.recovery import JobRecovery, RankReturns, config_for, full_layout
from stageline.train.run_folder import FLIGHT, METRICS, RunFolder
from stageline.train.schedule_choice import in_config_words
from stageline.train.screen import put
from stageline.train.setup import Setup
from stageline.train.step import LossScale, StepResult, TrainingStep
from stageline.train.validation import ComputeMetrics, MetricsOfValidation, Validation

CONTINUOUS_STEPS = 8
"""Continuous steps between two checks for signals and the time limit."""


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    step: int
    """The last step."""
    why: str
    """finished, time limit, early stop, stopped by a callback, or stopped by a signal."""
    loss: float | None
    """The loss of the last step; None if this start made no step."""
    validation_loss: float | None
    folder: Path
    """The folder of the run: metrics, timelines, checkpoints, report."""


class Vote(NamedTuple):
    """What a process tells the others after a step, as numbers; all act on the largest ones."""

    signal: Any
    """That it received; 0 for none."""
    timed_out: Any
    save_failed: Any
    interval: Any
    """Steps between two copies of its state in host memory, as it wants them."""
    rank_returns: Any
    """Whether a rank that was lost is back."""
    pending: Any
    """Whether its last state is not on another host yet."""
    stop_requested: Any
    memory: Any
    """Bytes in use on its device."""


class Trainer:
    """Trains a model through a pipeline, as `stageline train` does; the same job started again resumes.

    >>> import contextlib, io
    >>> config = Config.read(None, "training.steps=2", "training.seq_len=16", "model.dim=16", "job.dump_folder=run")
    >>> with contextlib.redirect_stdout(io.StringIO()):     # the progress of the job
    ...     result = Trainer(config).run()
    >>> result.step, result.why
    (2, 'finished')
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        model: Callable[[], nn.Module] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        data: Data | Iterable[Any] | None = None,
        on_step: Callable[[int, StepResult], object] | None = None,
        callbacks: Iterable[Callback] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        compute_metrics: ComputeMetrics | None = None,
    ) -> None:
        """`config` is a `Config`, the path of a TOML file, or None for the built-in default.

        `model` builds the model, `loss_fn` is its loss, and `data` is an iterable of samples (inputs and targets, or a
        dict) or the result of `open_data`; each replaces what the configuration names. `on_step` is called on every
        process with the number and the figures of each step; `callbacks` also hear of validations, checkpoints and the
        end (see `Callback`).

        `collate_fn` turns a list of samples of `data` into a batch: inputs and targets, or a dict. `compute_metrics` is
        called after every validation with the outputs of the model and the targets, as (predictions, label_ids), and
        returns a dict of numbers, which are logged.
        """
        self.config = config if isinstance(config, Config) else read_config(config)
        threads = replace(self.config.parallelism, launcher="threads")  # unless this is one of several processes
        validate(replace(self.config, parallelism=threads))
        self._full_config, self._full_layout = self.config, full_layout(self.config)
        self.layout = self._full_layout
        if number_of():
            self.config = config_for(self.config, self._full_layout, int(os.environ["WORLD_SIZE"]))
            self.layout = find_job_layout(self.config)
        self.folder = RunFolder(self.config.job.dump_folder)
        self.setup = Setup(self.config, self.layout, self.folder, model, loss_fn, data, collate_fn)
        self._callbacks = Callbacks(self, callbacks)
        self._compute_metrics = compute_metrics
        if compute_metrics is not None and self.layout.replicas > 1:
            raise StagelineError(
                "compute_metrics needs the outputs of all validation samples in one pipeline, but this job has "
                f"{self.layout.replicas} replicas or shards; use one, or compute metrics in a loss function"
            )
        self.progress = TrainingProgress()
        self._on_step = on_step
        self.recovery = JobRecovery(self.config.recovery.memory_interval)
        if self.layout.processes < self._full_layout.processes:
            self.setup.nominal_per_step = batch_sizes(self._full_config, self._full_layout.replicas).per_step
        self._loss: float | None = None
        self._validation_loss: float | None = None
        self._reported = 0
        self._training = self._begins = self._rank_returns = self._stop_requested = False

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        return self.progress.step

    @property
    def world(self) -> RankHost:
        """The former name of `host`."""
        return self.host

    @property
    def position(self) -> int:
        """The number of samples so far, over all replicas."""
        return self.progress.position

    def request_stop(self) -> None:
        """End the job after this step, with a checkpoint; for callbacks, on any process."""
        self._stop_requested = True

    def run(self) -> Result:
        """Train until the last step, the time limit, an early stop or a signal; every process calls this."""
        self._started = time.monotonic()
        flights, self.logs = flights_into(self.folder.path / FLIGHT), self._new_logs()
        with process_settings(self.config, self.layout), flights, StopSignals() as self._stop:
            while True:
                try:
                    return self._attempt()
                except BaseException as error:
                    if isinstance(error, Exception) and self._recovers(error):
                        continue
                    if self._training:
                        with suppress(StagelineError):  # a disk that is full says so once
                            self.logs.event("end", step=self.step, why=f"failed: {type(error).__name__}: {error}")
                    self.logs.close()
                    raise
                finally:
                    self.folder.release()

    def _new_logs(self) -> Logs:
        steps = self.config.training.steps
        logs = Logs(self.config, self.folder.path, main=self.layout.main, total_steps=steps)
        logs.on_event = lambda row: self._callbacks("on_log", row)
        return logs

    def _attempt(self) -> Result:
        """Start the job, or start it again in this process after another one was lost, and train to the end."""
        self.setup.prepare()
        resumed = self._prepare()
        why = self._is_complete() and self._why_no_more_steps()
        result = self._report_complete(why) if why else self._run(resumed)
        self.logs.close()
        return result

    def _recovers(self, error: Exception) -> bool:
        """Whether the launcher replaces a rank that was lost; then this process has joined the next attempt."""
        reported = self.progress.step
        self.folder.release()  # another process may be the first one now
        try:
            self.recovery.rejoin(error)
        except Exception:
            return False
        self._reported = max(self._reported, reported)
        self._follow_layout()
        return True

    def _follow_layout(self) -> None:
        """Take the place of this process in the next attempt, which may have fewer replicas or ranks."""
        self.config = config_for(self._full_config, self._full_layout, int(os.environ["WORLD_SIZE"]))
        layout = find_job_layout(self.config)
        if layout != self.layout:
            if layout.main != self.layout.main:
                self.logs.close()
            main, self.layout = self.layout.main, layout
            self.logs = self.logs if layout.main == main else self._new_logs()
            self.setup = self.setup.for_layout(self.config, layout)

    # Before the first step.

    def _prepare(self) -> bool:
        """Make the optimizer, and load the newest state if there is one; return whether the run resumes."""
        config, setup = self.config, self.setup
        self.pipe, self.host = setup.pipe, setup.host
        load_step = config.checkpoint.load_step
        checkpoint = None
        recovers = self.recovery.attempt is not None
        in_memory = self.recovery.common_step(self.host) if recovers else None
        where = checkpoint_folder(self.folder.path, config.checkpoint.folder)
        # A run whose checkpoints are in an object store may resume on a host without its folder.
        resumes = setup.resumes or is_remote(where)
        if in_memory is None and (resumes or load_step >= 0):
            step = -1 if recovers and setup.resumes else load_step
            checkpoint = find_checkpoint(where, step, self.host)
        if checkpoint is None and in_memory is None and config.checkpoint.initial_load_path:
            load_initial_weights(self.pipe, config.checkpoint.initial_load_path, self.host)
        self.scale = LossScale(config.training.mixed_precision_param == "float16")
        self.optimizer = Optimizer(
            config.optimizer,
            self.pipe.named_parameters(),
            outer=outer_parameters(self.pipe.model),
            updates=self.pipe.updates,
        )
        self.training_step = TrainingStep(
            self.pipe,
            setup.task,
            self.optimizer,
            self.scale,
            device=self.layout.device,
            mixed=config.training.mixed_precision_param,
            max_norm=config.training.max_norm,
            total=self._sum_over_replicas,
        )
        self.progress = TrainingProgress()
        if in_memory is not None:
            state = self.recovery.restore(in_memory, self.pipe, self.optimizer)
            self.host.all_reduce(np.zeros(1))  # nobody writes a new copy before all have read the old ones
            self.progress = resume_progress(in_memory, state, setup, self.scale)
        elif checkpoint is not None:
            check_same_run(checkpoint, config)
            self.progress = resume(checkpoint, setup, self.optimizer, self.scale)
            checkpoint.close()
        source = "memory" if in_memory is not None else "a checkpoint" if checkpoint is not None else "the start"
        self._restored = self.progress.step, source
        self.validation = Validation.of(setup)
        validation = self.validation
        self._bytes_per_target = None if validation is None else validation.bytes_per_target(setup.data, setup.task)
        return checkpoint is not None or recovers

    def _sum_over_replicas(self, value: float) -> float:
        if self.layout.replicas == 1:
            return value
        return float(self.host.all_reduce(np.array([value if self.layout.first else 0.0]))[0])

    def _is_complete(self) -> bool:
        """Whether an earlier start completed the run: it was not killed after the last step."""
        if not self._why_no_more_steps():
            return False

        def has_ended() -> bool:
            path = self.folder.path / METRICS
            ends = read_metrics(path).of("end") if path.is_file() else []
            return any(
                row["step"] == self.progress.step and row.get("why") in ("finished", "early stop") for row in ends
            )

        return bool(decide_together(self.host, has_ended))

    def _why_no_more_steps(self) -> str:
        """Return "finished" or "early stop" if there are no more steps to make, else an empty string."""
        if self.progress.step >= self.config.training.steps:
            return "finished"
        return "early stop" if 0 < self.config.validation.patience <= self.progress.validations_since_best else ""

    def _report_complete(self, why: str) -> Result:
        step = self.progress.step
        if self.layout.main:
            ending, option = "is finished", "training.steps"
            if why != "finished":
                ending = (
                    f"stopped early, after {self.progress.validations_since_best} validations without a better loss"
                )
                option = "validation.patience"
            put(
                f"{self.folder.path} {ending}: step {step} of {self.config.training.steps}; increase {option} to "
                "resume, or use another job.dump_folder"
            )
        return Result(step, why, None, None, self.folder.path)

    # The steps.

    def _run(self, resumed: bool) -> Result:
        layout, setup, progress = self.layout, self.setup, self.progress
        self.output = Output(setup, self.logs, self._stop)
        if self.recovery.attempt is None:
            self.output.begin(resumed)
            alone = {} if setup.alone is None else {"alone": setup.alone}
            self.logs.event("start", step=progress.step, resumed=resumed, **alone)
            self._callbacks("on_train_begin")
        self._training, self._begins = True, True
        checkpoints = JobCheckpoints(setup, self.optimizer, self.logs)
        checkpoints.on_save = lambda step, path: self._callbacks("on_save", step, path)
        batches = Prefetch(
            setup.loader,
            position=progress.position,
            replica=layout.replica,
            replicas=layout.replicas,
            local=setup.batches.local,
        )
        with checkpoints as self.checkpoints, batches as self.batches:
            why = self._loop()
            self.checkpoints.finish()
            self.output.finish(progress.step, why)
        self._begin()
        self.logs.event("end", step=progress.step, why=why)
        self.output.report()
        result = Result(progress.step, why, self._loss, self._validation_loss, self.folder.path)
        self._callbacks("on_train_end", result)
        return result

    def _begin(self) -> None:
        """After the first step of an attempt: tell the launcher, and log what was lost and what was done."""
        if self._begins:
            self._begins = False
            if self.recovery.attempt is not None:
                is_smaller = self.layout.replicas < self._full_layout.replicas
                self.output.recovery(self.recovery.attempt, *self._restored, self._reported, mark_all=is_smaller)
            self.recovery.begin(self.layout)

    def _loop(self) -> str:
        """Train, validate and save until a step is the last one; return why."""
        config, progress = self.config, self.progress
        self._copy_state()
        is_due = config.checkpoint.enable and progress.step > 0 and self._is_due(config.checkpoint.interval)
        if self.recovery.attempt is not None and is_due and not self.checkpoints.has(progress.step):
            self._save(background=config.checkpoint.async_mode == "async")
        while True:
            must_validate = progress.validation_pending
            if not must_validate:
                if why := self._why_no_more_steps():
                    return why
                try:
                    self._train()
                except OutOfMemory as error:
                    raise OutOfMemory(in_config_words(str(error)), **error.facts()) from error
                must_validate = self._is_due(config.validation.freq)
            stops_early = must_validate and self._validate()
            why = self._agree_to_stop() or ("early stop" if stops_early else "")
            why = why or ("finished" if progress.step >= config.training.steps else "")
            if config.checkpoint.enable and (why or self._is_due(config.checkpoint.interval)):
                self._save(background=not why and config.checkpoint.async_mode == "async")
            if why:
                return why
            self._copy_state(force=self._rank_returns)
            if self._rank_returns:
                raise RankReturns("the ranks of a replica are back")

    def _save(self, *, background: bool) -> None:
        state = job_state(self.setup, self.progress, self.scale)
        self.checkpoints.save(self.progress.step, state, background=background)

    def _copy_state(self, *, force: bool = False) -> None:
        """Copy the state of this process to host memory, from which a lost rank is restored."""
        if force or self.recovery.is_due(self.progress.step):
            state = job_state(self.setup, self.progress, self.scale)
            self.recovery.copy_state(self.progress.step, self.pipe, self.optimizer, state)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _train(self) -> None:
        """Make one step, or several continuous ones."""
        started = time.perf_counter()
        steps = self._continuous_steps() if self.config.training.continuous_steps else self._single_step()
        for fraction, result in steps:
            self._stop.begin()
            self._begin()
            self.progress.step += 1
            self.progress.position += self.setup.batches.per_step
            self._loss = result.loss
            self.output.step(self.progress.step, result, fraction, time.perf_counter() - started)
            self.checkpoints.report()
            if self._on_step is not None:
                self._on_step(self.progress.step, result)
            self._callbacks("on_step_end", result)
            started = time.perf_counter()

    def _rate(self, step: int) -> float:
        return rate(self.config.lr_scheduler, step, self.config.training.steps)

    def _single_step(self) -> Iterator[tuple[float, StepResult]]:
        fraction = self._rate(self.progress.step)
        batches = [next(self.batches) for _ in range(self.setup.batches.accumulation)]
        yield fraction, self.training_step.train(batches, fraction)

    def _continuous_steps(self) -> Iterator[tuple[float, StepResult]]:
        """Run continuous steps up to the next step that is validated, saved or the last."""
        config, step = self.config, self.progress.step
        intervals = (config.validation.freq, config.checkpoint.interval, CONTINUOUS_STEPS)
        count = min(config.training.steps - step, *(every - step % every for every in intervals if every > 0))
        batches = (next(self.batches) for _ in range(count))
        offset = step - self.pipe.steps
        results = self.training_step.train_continuously(batches, lambda number: self._rate(number + offset))
        for result in results:
            yield self._rate(self.progress.step), result

    def _validate(self) -> bool:
        """Evaluate on the validation samples; return whether to stop early."""
        progress = self.progress
        if self.validation is None:
            progress.validation_pending = False
            return False
        started = time.perf_counter()
        loss = self.validation.loss(self.training_step, self._is_stop_requested, self._metrics())
        progress.validation_pending = loss is None
        if loss is None:  # the next start evaluates, so that a resumed run stays the same
            return False
        self._validation_loss = loss
        seconds = time.perf_counter() - started
        metrics = dict(self.validation.metrics)
        if self._bytes_per_target is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self._bytes_per_target
        samples = self.validation.samples
        self.logs.event("validation", step=progress.step, loss=loss, samples=samples, seconds=seconds, **metrics)
        self._callbacks("on_evaluate", {"loss": loss, **metrics})
        if loss < progress.best_loss:
            progress.best_loss, progress.validations_since_best = loss, 0
        else:
            progress.validations_since_best += 1
        return 0 < self.config.validation.patience <= progress.validations_since_best

    def _metrics(self) -> MetricsOfValidation | None:
        if self._compute_metrics is None:
            return None
        last = int(self.setup.choice.schedule.placement.table[0, -1])
        owner, rank = (last, self.layout.rank) if self.layout.processes > 1 else (0, 0)
        return MetricsOfValidation(self._compute_metrics, self.host, owner, rank)

    def _is_stop_requested(self) -> bool:
        """Whether any process received a signal; all of them call this and get the same answer."""
        number = float(self._stop.number)
        return bool(self.host.all_reduce(np.array([number]))[0] if self.layout.processes > 1 else number)

    def _agree_to_stop(self) -> str:
        """Return why to stop: a signal to any process, or the time limit; all processes get the same answer."""
        layout, recovery = self.layout, self.recovery
        limit = self.config.training.time_limit * 60
        is_smaller = layout.processes < self._full_layout.processes
        own = Vote(
            signal=self._stop.number,
            timed_out=layout.main and limit > 0 and time.monotonic() - self._started > limit,
            save_failed=self.checkpoints.failed,
            interval=recovery.wanted_interval,
            rank_returns=layout.main and is_smaller and recovery.has_place(),
            pending=recovery.pending,
            stop_requested=self._stop_requested,
            memory=memory_in_use(layout.device),
        )
        votes = np.zeros((layout.processes, len(own)))
        votes[layout.rank] = own
        if layout.processes > 1:
            votes = self.host.all_reduce(votes.reshape(-1)).reshape(-1, len(own))
            self.output.memory = tuple(int(size) for size in Vote(*votes.T).memory if size)
        most = Vote(*votes.max(axis=0))
        if most.save_failed:
            self.checkpoints.fail(int(Vote(*votes.T).save_failed.argmax()))
        recovery.agree_on_interval(most.interval, pending=bool(most.pending))
        self._rank_returns = bool(most.rank_returns)
        if most.signal:
            return f"stopped by {signal.Signals(int(most.signal)).name}"
        return "time limit" if most.timed_out else "stopped by a callback" if most.stop_requested else ""

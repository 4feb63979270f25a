"""The training job: from a configuration to a trained model that can be gone on with."""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.common.errors import StagelineError
from stageline.faults.flight_recorder import flights_into
from stageline.train import checkpoint_state as saving
from stageline.train.checkpoint import Checkpoint, CheckpointError, Writer
from stageline.train.config.config import Config
from stageline.train.config.io import read_config, to_dict
from stageline.train.config.rules import validate
from stageline.train.data import Data, Loader, Prefetch
from stageline.train.events import Logs, read_metrics
from stageline.train.events.screen import put
from stageline.train.layout import Layout, find_layout
from stageline.train.optimizer_step import Stepper
from stageline.train.optimizers import Optimizer, outer_parameters, rate
from stageline.train.output import Show
from stageline.train.precision import LossScale
from stageline.train.run_folder import FLIGHT, METRICS, RunFolder
from stageline.train.setup import Setup
from stageline.train.signals import StopSignals
from stageline.train.validation import HeldBack


@contextmanager
def _surroundings(config: Config, layout: Layout) -> Iterator[None]:
    """What holds for the whole process while a job runs, and is afterwards as it was."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(config.training.deterministic or deterministic)
        if layout.processes == 1 and "OMP_NUM_THREADS" not in os.environ:
            # Ranks that are threads share the cores.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.ranks))
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    step: int
    """The last step that was made."""
    why: str
    """finished, time limit, early stop, or stopped by a signal."""
    loss: float | None
    """Of the last step; None if this start made none."""
    validation_loss: float | None
    folder: Path
    """Where the run is: metrics, timelines, checkpoints, report."""


class Trainer:
    """Trains a model through a pipeline, as `stageline train` does; run it again, and it goes on where it was.

    >>> import contextlib, io
    >>> config = Config.read(None, "training.steps=2", "training.seq_len=16", "model.dim=16", "job.dump_folder=run")
    >>> with contextlib.redirect_stdout(io.StringIO()):     # what it shows of itself
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
    ) -> None:
        """`config` is one, or a TOML file, or None for the embedded default.

        `model` builds the model, `loss_fn` is its loss, and `data` what it is trained on, in place of what the
        configuration names: an iterable of samples (inputs and targets, or a dict), or what `open_data` gives.
        """
        self.config = config if isinstance(config, Config) else read_config(config)
        validate(self.config)
        self.layout = find_layout(self.config)
        self.folder = RunFolder(self.config.job.dump_folder)
        self.setup = Setup(self.config, self.layout, self.folder, model, loss_fn, data)
        self.step = 0
        self.position = 0
        """Samples that were trained on, by all replicas."""
        self._best, self._since_best = math.inf, 0
        self._validation: float | None = None
        self._validation_owed = False
        """Whether a signal cut the validation of this step short."""
        self._loss: float | None = None
        self._reported, self._blocked = -1, 0.0

    def run(self) -> Result:
        """Train until the last step, the time limit, an early stop or a signal; every process calls this alike."""
        self._began = time.monotonic()
        flights = flights_into(self.folder.path / FLIGHT)
        with _surroundings(self.config, self.layout), flights, StopSignals() as self._asked:
            try:
                found = self._prepare()
                steps = self.config.training.steps
                with Logs(self.config, self.folder.path, main=self.layout.main, total_steps=steps) as self.logs:
                    return self._run(found is not None)
            finally:
                self.folder.release()

    # Before the first step.

    def _prepare(self) -> Checkpoint | None:
        """Make all that is needed; give back the checkpoint to go on from."""
        config, setup = self.config, self.setup
        setup.prepare()
        self.pipe, self.world, self.loader = setup.pipe, setup.world, setup.loader
        self.checkpoints = self.folder.path / config.checkpoint.folder
        asked = config.checkpoint.load_step
        found = saving.find(self.checkpoints, asked, self.world) if setup.goes_on or asked >= 0 else None
        if found is None and config.checkpoint.initial_load_path:
            saving.begin_with(self.pipe, config.checkpoint.initial_load_path, self.world)
        self.scale = LossScale(config.training.mixed_precision_param == "float16")
        self.optimizer = Optimizer(
            config.optimizer, self.pipe.named_parameters(), outer=outer_parameters(self.pipe.model)
        )
        self.stepper = Stepper(
            self.pipe,
            setup.task,
            self.optimizer,
            self.scale,
            device=self.layout.device,
            mixed=config.training.mixed_precision_param,
            max_norm=config.training.max_norm,
            total=self._over_replicas,
        )
        if found is not None:
            self._go_on_from(found)
            found.close()
        self.validation = None
        if setup.data.validation is not None and config.validation.enable:
            self.validation = HeldBack(
                Loader(setup.data.validation, batch=setup.per_step, shuffle=False),
                asked=config.validation.steps * setup.per_step,
                local=setup.local,
                replica=self.layout.replica,
                replicas=self.layout.replicas,
            )
        return found

    def _over_replicas(self, value: float) -> float:
        """Add a number of each replica over all of them."""
        if self.layout.replicas == 1:
            return value
        return float(self.world.all_reduce(np.array([value if self.layout.first else 0.0]))[0])

    # The steps.

    def _go_on_from(self, found: Checkpoint) -> None:
        """Take up weights, optimizer, scale, position and random numbers where a checkpoint left them."""
        saving.check_model(self.pipe, found)
        state = found.state
        if state["per_step"] != self.setup.per_step:
            raise StagelineError(
                f"{found.path} was trained with {state['per_step']} samples in a step, and this job has "
                f"{self.setup.per_step}; set training.global_batch_size to {state['per_step']}"
            )
        self.position = self.loader.load_state_dict(state["data"])
        saving.load(self.pipe, self.optimizer, found)
        self.scale.load(state["scale"])
        self.step, self.pipe.steps = found.step, int(state["pipeline_steps"])
        self._best, self._since_best = float(state["best"]), int(state["since_best"])
        self._validation_owed = bool(state.get("validation_owed", False))
        saving.set_random_state(state["random"])
        if state["threads"] != torch.get_num_threads():
            self.setup.notes.append(
                f"the run had {state['threads']} threads a rank and this machine gives {torch.get_num_threads()}: "
                "numbers may differ in their last bits (OMP_NUM_THREADS sets it)"
            )

    # The steps.

    def _run(self, resumed: bool) -> Result:
        config, layout = self.config, self.layout
        if self._over() and self._ended():
            why = self._why_over()
            if layout.main:
                is_, more = (
                    ("is finished", "training.steps")
                    if why == "finished"
                    else (
                        f"stopped early, after {self._since_best} evaluations without a better loss",
                        "validation.patience",
                    )
                )
                put(
                    f"{self.folder.path} {is_}: step {self.step} of {config.training.steps}; raise {more} to go on, "
                    "or give another job.dump_folder"
                )
            return Result(self.step, why, None, None, self.folder.path)
        self.show = Show(self)
        self.show.begin(resumed)
        self.logs.event("start", step=self.step, resumed=resumed)
        self._attempt = self.world.broadcast(uuid.uuid4().hex if layout.main else "", 0)
        deadline = max(60.0, config.comm.train_timeout_seconds)
        # Every rank of the first replica writes what it has; ranks that are threads have one writer.
        number, count = (layout.rank % layout.ranks, layout.ranks) if self._many else (0, 1)
        with (
            Writer(
                self.checkpoints, number, count, keep=config.checkpoint.keep_latest_k, deadline=deadline
            ) as self.writer,
            Prefetch(
                self.loader,
                position=self.position,
                replica=layout.replica,
                replicas=layout.replicas,
                local=self.setup.local,
            ) as self.batches,
        ):
            try:
                why = self._loop()
                self._finish_saving()
                self.show.finish(why)
            except BaseException as error:
                self.logs.event("end", step=self.step, why=f"failed: {type(error).__name__}: {error}")
                raise
        self.logs.event("end", step=self.step, why=why)
        self.show.report()
        return Result(self.step, why, self._loss, self._validation, self.folder.path)

    def _over(self) -> bool:
        """Whether an earlier start made all steps, or stopped early."""
        patience = self.config.validation.patience
        return self.step >= self.config.training.steps or 0 < patience <= self._since_best

    def _why_over(self) -> str:
        return "finished" if self.step >= self.config.training.steps else "early stop"

    def _ended(self) -> bool:
        """Whether the run came to its very end: not killed, and not failed, between its last step and that."""
        ended = ""
        if self.layout.main and (self.folder.path / METRICS).is_file():
            ends = [row for row in read_metrics(self.folder.path / METRICS).of("end") if row["step"] == self.step]
            ended = "yes" if any(row.get("why") in ("finished", "early stop") for row in ends) else ""
        return bool(self.world.broadcast(ended, 0))

    def _loop(self) -> str:
        """Make steps until one is the last; say why it was."""
        config = self.config
        owed = self._validation_owed
        while True:
            if not owed:
                if self._over():
                    return self._why_over()
                self._one_step()
                self._report_saved()
            early = (owed or self._due(config.validation.freq)) and self._validate()
            owed = False
            why = self._agree_to_stop() or ("early stop" if early else "")
            why = why or ("finished" if self.step >= config.training.steps else "")
            if config.checkpoint.enable and (why or self._due(config.checkpoint.interval)):
                self._save(background=not why and config.checkpoint.async_mode == "async")
            if why:
                return why

    @property
    def _many(self) -> bool:
        return self.layout.processes > 1

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _one_step(self) -> None:
        began = time.perf_counter()
        config = self.config
        factor = rate(config.lr_scheduler, self.step, config.training.steps)
        done = self.stepper.train([next(self.batches) for _ in range(self.setup.turns)], factor)
        self._asked.begin()
        self.step += 1
        self.position += self.setup.per_step
        self._loss = done.loss
        self.show.step(done, factor, time.perf_counter() - began)

    def _validate(self) -> bool:
        """Evaluate on the data that is held back; give back whether to stop early."""
        if self.validation is None:
            return False
        began = time.perf_counter()
        loss = self.validation.loss(self.stepper, interrupted=self._stop_requested)
        self._validation_owed = loss is None
        if loss is None:  # the next start does it, so that the run stays the same
            return False
        self._validation = loss
        seconds = time.perf_counter() - began
        self.logs.event(
            "validation", step=self.step, loss=self._validation, samples=self.validation.samples, seconds=seconds
        )
        if self._validation < self._best:
            self._best, self._since_best = self._validation, 0
        else:
            self._since_best += 1
        return 0 < self.config.validation.patience <= self._since_best

    @property
    def signal(self) -> int:
        """The signal that told this process to stop; 0 as long as none did."""
        return self._asked.number

    def _stop_requested(self) -> bool:
        """Whether a signal came to any process; all of them call this and get the same answer."""
        value = float(self.signal)
        return bool(self.world.all_reduce(np.array([value]))[0] if self._many else value)

    def _agree_to_stop(self) -> str:
        """Whether any process was asked to stop, or the main one's time is over; all give the same answer."""
        limit = self.config.training.time_limit * 60
        over = self.layout.main and limit > 0 and time.monotonic() - self._began > limit
        said = np.array([[float(self._asked.number), float(over), float(self.writer.failed is not None)]])
        if self._many:
            everyone = np.zeros((self.layout.processes, 3))
            everyone[self.layout.rank] = said
            said = self.world.all_reduce(everyone.reshape(-1)).reshape(-1, 3)
        if said[:, 2].any():
            self._not_saved(int(said[:, 2].argmax()))
        said = said.max(axis=0)
        if said[0]:
            return f"stopped by {signal.Signals(int(said[0])).name}"
        return "time limit" if said[1] else ""

    # Checkpoints.

    def _save(self, *, background: bool) -> None:
        """Save a checkpoint; processes that write nothing learn here that another could not."""
        error: CheckpointError | None = None
        try:
            if not self.layout.replica:
                self._write(background=background)
        except CheckpointError as failed:
            error = failed
        self._agree_on_saving(error)

    def _finish_saving(self) -> None:
        """Wait until the last checkpoint is there, or fail on all processes alike."""
        error: CheckpointError | None = None
        try:
            self.writer.wait()
        except CheckpointError as failed:
            error = failed
        self._agree_on_saving(error)
        self._report_saved()

    def _agree_on_saving(self, error: CheckpointError | None) -> None:
        """Raise the error of a process that could not save, on all of them; or name a rank that was lost meanwhile."""
        if self._many:
            failed = np.zeros(self.layout.processes)
            failed[self.layout.rank] = float(error is not None)
            try:
                failed = self.world.all_reduce(failed)
            except StagelineError as lost:
                if error is not None:
                    lost.add_note(str(error))
                raise
            if failed.any():
                text = self.world.broadcast(str(error or ""), int(failed.argmax()))
                raise error or CheckpointError(text)
        elif error is not None:
            raise error

    def _write(self, *, background: bool) -> None:
        self.writer.wait()
        self._report_saved()
        began = time.perf_counter()
        self.writer.save(
            self.step,
            saving.own_weights(self.pipe),
            saving.own_state(self.pipe, self.optimizer),
            self._state(),
            assets=self.setup.task.assets,
            attempt=f"{self._attempt}-{self.step}",
            world={"ranks": self.layout.ranks, "replicas": self.layout.replicas, "layout": str(self.layout)},
            background=background,
        )
        self._blocked = time.perf_counter() - began
        if not background:
            self._report_saved()

    def _not_saved(self, process: int) -> None:
        """End the job with the error of a checkpoint that a process could not write, on all of them alike."""
        text = self.world.broadcast(str(self.writer.failed or ""), process)
        self.writer.wait()
        raise CheckpointError(text)

    def _report_saved(self) -> None:
        """Tell of the last checkpoint, once it is there."""
        saved = self.writer.last
        if saved is not None and saved.step > self._reported:
            self._reported = saved.step
            self.logs.event(
                "checkpoint", step=saved.step, seconds=saved.seconds, bytes=saved.bytes, blocked=self._blocked
            )

    def _state(self) -> dict[str, Any]:
        """What there is besides tensors; the same on every rank."""
        return {
            "config": to_dict(self.config),
            "data": self.loader.state_dict(self.position),
            "per_step": self.setup.per_step,
            "scale": self.scale.state(),
            "pipeline_steps": self.pipe.steps,
            "best": self._best if math.isfinite(self._best) else 1e308,
            "since_best": self._since_best,
            "validation_owed": self._validation_owed,
            "random": saving.random_state(),
            "threads": torch.get_num_threads(),
        }

"""The training job: from a configuration to a trained model that can be gone on with."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.errors import StagelineError
from stageline.model.load import load_weights
from stageline.timeline import draw
from stageline.timeline.timeline import Timeline
from stageline.train import saving
from stageline.train.checkpoint import Checkpoint, Writer, newest, open_checkpoint
from stageline.train.config import Config
from stageline.train.data import Data, Loader
from stageline.train.layout import find_layout
from stageline.train.logs import Logs
from stageline.train.optimizers import Optimizer, rate
from stageline.train.precision import LossScale
from stageline.train.runs import ENVIRONMENT, METRICS, RunFolder, environment
from stageline.train.sample import generate
from stageline.train.settings import read_config, to_dict
from stageline.train.setup import Setup
from stageline.train.signals import StopSignals
from stageline.train.steps import Batch, Stepped, Stepper
from stageline.train.validate import validate


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

    >>> config = Config.read(None, "training.steps=2", "training.seq_len=16", "model.dim=16", "job.dump_folder=run")
    >>> result = Trainer(config).run()  # doctest: +ELLIPSIS
    ...
    >>> result.step, result.why
    (2, 'finished')
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        model: Callable[[], nn.Module] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        data: Data | None = None,
    ) -> None:
        """`config` is one, or a TOML file, or None for the embedded default.

        `model` builds the model, `loss_fn` is its loss, and `data` (see `open_data`) what it is trained on, in place of
        what the configuration names.
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
        self._loss: float | None = None

    def run(self) -> Result:
        """Train until the last step, the time limit, an early stop or a signal; every process calls this alike."""
        self._began = time.monotonic()
        if self.config.training.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.layout.processes == 1 and "OMP_NUM_THREADS" not in os.environ:
            # Ranks that are threads share the cores.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.layout.ranks))
        with StopSignals() as self._asked:
            try:
                found = self._prepare()
                steps = self.config.training.steps
                with Logs(self.config, self.folder.path, main=self.layout.main, total_steps=steps) as self.logs:
                    return self._run(found)
            finally:
                self.folder.release()

    # Before the first step.

    def _prepare(self) -> Checkpoint | None:
        """Make all that is needed; give back the checkpoint to go on from."""
        config, setup = self.config, self.setup
        setup.prepare()
        self.pipe, self.world, self.loader = setup.pipe, setup.world, setup.loader
        self.checkpoints = self.folder.path / config.checkpoint.folder
        found = self._find_checkpoint() if setup.goes_on else None
        if found is None and config.checkpoint.initial_load_path:
            load_weights(self.pipe.model, config.checkpoint.initial_load_path, cast=True)
        self.scale = LossScale(config.training.mixed_precision_param == "float16")
        outer = [name for name, each in self.pipe.model.named_modules() if isinstance(each, nn.Embedding)]
        outer += [name for name, _ in list(self.pipe.model.named_modules())[-1:]]
        self.optimizer = Optimizer(
            config.optimizer, self.pipe.named_parameters(), outer=[f"{name}.weight" for name in outer]
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
        self.validation = None
        if setup.data.validation is not None and config.validation.enable:
            self.validation = Loader(setup.data.validation, batch=setup.per_step, shuffle=False)
        return found

    def _over_replicas(self, value: float) -> float:
        """Add a number of each replica over all of them."""
        if self.layout.replicas == 1:
            return value
        return float(self.world.add_up(np.array([value if self.layout.first else 0.0]))[0])

    def _find_checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint, or the one that was asked for; the main process looks, and tells."""
        asked, told = self.config.checkpoint.load_step, ""
        if self.layout.main:
            if asked >= 0:
                chosen: Checkpoint | None = open_checkpoint(self.checkpoints / f"step-{asked:08}")
            else:
                chosen = newest(self.checkpoints, on_damage=lambda damage: print(f"warning: {damage}", file=sys.stderr))
            told = "" if chosen is None else str(chosen.path)
        told = self.world.tell(told, 0)
        return open_checkpoint(Path(told)) if told else None

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
        saving.set_random_state(state["random"])
        if state["threads"] != torch.get_num_threads():
            self.setup.notes.append(
                f"the run had {state['threads']} threads a rank and this machine gives {torch.get_num_threads()}: "
                "numbers may differ in their last bits (OMP_NUM_THREADS sets it)"
            )

    # The steps.

    def _run(self, found: Checkpoint | None) -> Result:
        config, logs = self.config, self.logs
        total = config.training.steps
        if self.layout.main:
            self._describe(found)
        logs.event("start", step=self.step, resumed=found is not None)
        if found is not None:
            found.close()
        self.writer = Writer(
            self.checkpoints, self.layout.rank % self.layout.ranks, self.layout.ranks if self._many else 1,
            keep=config.checkpoint.keep_latest_k, deadline=max(60.0, config.comm.train_timeout_seconds),
        )  # fmt: skip
        self._attempt = self.world.tell(uuid.uuid4().hex if self.layout.main else "", 0)
        why, saved = "finished", self.step if found is not None else -1
        try:
            while self.step < total:
                self._one_step()
                if self._due(config.validation.freq) and self._validate():
                    why = "early stop"
                why = self._agree_to_stop() or why
                last = why != "finished" or self.step == total
                if config.checkpoint.enable and (last or self._due(config.checkpoint.interval)):
                    self._save(background=not last and config.checkpoint.async_mode == "async")
                    saved = self.step
                if why != "finished":
                    break
            self.writer.wait()
            del saved
            self._finish(why)
        except BaseException as error:
            logs.event("end", step=self.step, why=f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.writer.close()
        logs.event("end", step=self.step, why=why)
        return Result(self.step, why, self._loss, self._validation, self.folder.path)

    @property
    def _many(self) -> bool:
        return self.layout.processes > 1

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _batches(self, loader: Loader, position: int) -> list[Batch]:
        """What this replica takes of a step."""
        setup, layout = self.setup, self.layout
        once = setup.local * layout.replicas
        return [
            loader.batch(position + turn * once, layout.replica, layout.replicas, setup.local)
            for turn in range(setup.turns)
        ]

    def _one_step(self) -> None:
        began = time.perf_counter()
        config = self.config
        factor = rate(config.lr_scheduler, self.step, config.training.steps)
        done = self.stepper.train(self._batches(self.loader, self.position), factor)
        self.step += 1
        self.position += self.setup.per_step
        self._loss = done.loss
        self._log(done, factor, time.perf_counter() - began)

    def _log(self, done: Stepped, factor: float, seconds: float) -> None:
        if not self.layout.main:
            return
        tokens = self.setup.per_step * self.config.training.seq_len
        measured = done.stats.measured()
        self.logs.event(
            "step",
            step=self.step,
            loss=done.loss,
            grad_norm=done.grad_norm,
            lr=self.config.optimizer.lr * factor,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            seconds=seconds,
            bubble=measured.bubble,
            planned_bubble=self.planned.bubble,
            memory=_memory(self.layout.device),
            **({"scale": done.scale, "skipped": done.skipped} if self.scale.enabled else {}),
        )
        if self._due(self.config.metrics.timeline_freq) or self.step == self.config.training.steps:
            self._keep(measured)

    def _keep(self, measured: Timeline) -> None:
        """Keep the timeline of the last step."""
        name = f"timeline/step-{self.step:08}.json"
        measured.write(self.folder.path / name)
        self._measured = measured
        self.logs.event("timeline", step=self.step, file=name)

    def _validate(self) -> bool:
        """Evaluate on the data that is held back; give back whether to stop early."""
        if self.validation is None:
            return False
        began = time.perf_counter()
        asked = self.config.validation
        losses = [
            self.stepper.evaluate(self._batches(self.validation, number * self.setup.per_step))
            for number in range(asked.steps)
        ]
        self._validation = sum(losses) / len(losses)
        self.logs.event("validation", step=self.step, loss=self._validation, seconds=time.perf_counter() - began)
        if self._validation < self._best:
            self._best, self._since_best = self._validation, 0
        else:
            self._since_best += 1
        return 0 < asked.patience <= self._since_best

    def _agree_to_stop(self) -> str:
        """Whether any process was asked to stop, or the main one's time is over; all give the same answer."""
        limit = self.config.training.time_limit * 60
        over = self.layout.main and limit > 0 and time.monotonic() - self._began > limit
        said = np.array([float(self._asked.number), float(over)])
        if self._many:
            everyone = np.zeros((self.layout.processes, 2))
            everyone[self.layout.rank] = said
            said = self.world.add_up(everyone.reshape(-1)).reshape(-1, 2).max(axis=0)
        if said[0]:
            return f"stopped by {_signal(int(said[0]))}"
        return "time limit" if said[1] else ""

    # Checkpoints.

    def _save(self, *, background: bool) -> None:
        if self.layout.replica:
            return
        began = time.perf_counter()
        self.writer.save(
            self.step,
            saving.own_weights(self.pipe),
            saving.own_state(self.pipe, self.optimizer),
            self._state(),
            assets=self.setup.task.assets,
            attempt=f"{self._attempt}-{self.step}",
            background=background,
        )
        self.logs.event("checkpoint", step=self.step, blocked=time.perf_counter() - began)

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
            "random": saving.random_state(),
            "threads": torch.get_num_threads(),
        }

    # What is shown.

    def _describe(self, found: Checkpoint | None) -> None:
        """Say what is about to be trained, and keep where."""
        setup, path = self.setup, self.folder.path
        self.planned = setup.choice.timeline
        if found is None:
            self.folder.set_aside(METRICS)
        count = sum(parameter.numel() for parameter in self.pipe.model.parameters())
        (path / "timeline").mkdir(exist_ok=True)
        self.planned.write(path / "timeline" / "planned.json")
        about = {
            "model": setup.task.name,
            "parameters": count,
            "data": setup.data.describe(),
            "layout": str(self.layout),
            "ranks": self.layout.ranks,
            "replicas": self.layout.replicas,
            "transport": "threads" if self.layout.processes == 1 else "processes",
            "schedule": setup.choice.schedule.name,
        }
        self.folder.write(ENVIRONMENT, environment(**about))
        schedule = setup.choice.schedule
        for note in setup.notes:
            print(f"note: {note}")
        print(f"model     {setup.task.name}, {count:,} parameters")
        print(f"data      {setup.data.describe()}")
        print(f"ranks     {self.layout}")
        print(f"schedule  {schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches of {setup.size}")
        print(f"folder    {path}")

    def _finish(self, why: str) -> None:
        """A sample, the timeline on one page, the report."""
        text = self._sample() if why in ("finished", "early stop") else ""
        if not self.layout.main:
            return
        if text:
            self.folder.write("sample.txt", text)
            print(f"\n{text}\n")
        measured = getattr(self, "_measured", None)
        if measured is not None:
            names = [f"{measured.schedule.name}, {what}" for what in ("planned", "measured")]
            title = f"{measured.schedule.name}, planned and measured at step {self.step}"
            self.folder.write("timeline.html", draw.html([self.planned, measured], title, names=names))

    def _sample(self) -> str:
        """Text that the model writes; every process takes part."""
        asked, data = self.config.sample, self.setup.data
        if not asked.tokens or data.tokenizer is None or self.setup.task.loss_name not in ("cross_entropy", "own"):
            return ""
        prompt = [int(token) for token in data.tokenizer.encode(asked.prompt or "\n")]
        last = int(self.setup.choice.schedule.placement.table[0, -1]) + self.layout.replica * self.layout.ranks
        found = generate(
            self.pipe,
            prompt,
            asked.tokens,
            length=self.config.training.seq_len,
            tell=lambda token: int(self.world.tell(str(token), last if self._many else 0)),
            temperature=asked.temperature,
            seed=self.config.training.seed,
            give=lambda tokens: {"input_ids": tokens} if self.setup.task.loss_name == "own" else tokens,
        )
        return data.tokenizer.decode(found)


def _memory(device: torch.device) -> int:
    """The most memory that was in use: of the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _signal(number: int) -> str:
    import signal

    return signal.Signals(number).name

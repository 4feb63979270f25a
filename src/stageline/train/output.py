"""What a job shows of itself and keeps beside its checkpoints: events, timelines, a sample, the report."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from stageline.model.huggingface import own_loss
from stageline.timeline import draw
from stageline.timeline.timeline import Timeline
from stageline.train.events.screen import put
from stageline.train.optimizer_step import Stepped
from stageline.train.run_folder import ENVIRONMENT, METRICS, environment
from stageline.train.sample import generate

if TYPE_CHECKING:
    from stageline.train.trainer import Trainer


class Show:
    """Tells of a trainer's steps; only the main process has something to say."""

    def __init__(self, trainer: Trainer) -> None:
        """Look at a trainer that is ready."""
        self._of = trainer
        self._main = trainer.layout.main
        self._planned = trainer.setup.choice.timeline
        self._measured: Timeline | None = None
        self._replans = 0
        self._sample_cut = False

    def begin(self, resumed: bool) -> None:
        """Say what is about to be trained, and keep where."""
        if not self._main:
            return
        setup, folder, layout = self._of.setup, self._of.folder, self._of.layout
        folder.keep(self._of.config)
        if not resumed and (aside := folder.set_aside(METRICS)) is not None:
            setup.notes.append(
                f"{folder.path} holds a run without a checkpoint in {self._of.checkpoints.name}, so it begins anew; "
                f"its events so far are kept in {aside.name}"
            )
        schedule = setup.choice.schedule
        count = sum(parameter.numel() for parameter in self._of.pipe.model.parameters())
        (folder.path / "timeline").mkdir(exist_ok=True)
        self._planned.write(folder.path / "timeline" / "planned.json")
        about = {
            "model": setup.task.name,
            "parameters": count,
            "data": setup.data.describe(),
            "ranks": layout.ranks,
            "replicas": layout.replicas,
            "transport": "threads" if layout.processes == 1 else "processes",
            "device": str(layout.device),
            "schedule": schedule.name,
        }
        folder.write(ENVIRONMENT, environment(**about))
        tried = 1 + len(setup.choice.alternatives)
        best = f", the fastest of {tried} by the profile" if tried > 1 else ""
        for note in setup.notes:
            put(f"note: {note}")
        put(f"model     {setup.task.name}, {count:,} parameters")
        put(f"data      {setup.data.describe()}")
        put(f"ranks     {layout}")
        put(f"schedule  {schedule.name}{best}: {schedule.stages} stages, {schedule.microbatches} microbatches")
        put(f"folder    {folder.path}")

    def step(self, done: Stepped, factor: float, seconds: float) -> None:
        """Tell of a step, and keep its timeline now and then."""
        if not self._main:
            return
        of, config = self._of, self._of.config
        tokens = of.setup.per_step * (of.setup.tokens or 1)  # what is no row of tokens counts as one
        measured = done.stats.measured()
        of.logs.event(
            "step",
            step=of.step,
            loss=done.loss,
            grad_norm=done.grad_norm,
            lr=config.optimizer.lr * factor,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            seconds=seconds,
            bubble=measured.bubble,
            planned_bubble=self._planned.bubble,
            memory=memory_in_use(of.layout.device),
            **({"scale": done.scale, "skipped": done.skipped} if of.scale.enabled else {}),
        )
        for changed in of.pipe.replans[self._replans :]:
            self._planned = changed.timeline
            of.logs.event("replan", step=of.step, said=str(changed), before=changed.before, after=changed.after)
        self._replans = len(of.pipe.replans)
        every = config.metrics.timeline_freq
        self._measured = measured
        if (every and of.step % every == 0) or of.step == config.training.steps:
            self._keep()

    def _keep(self) -> None:
        assert self._measured is not None
        name = f"timeline/step-{self._of.step:08}.json"
        self._measured.write(self._of.folder.path / name)
        self._of.logs.event("timeline", step=self._of.step, file=name)

    def finish(self, why: str) -> None:
        """A sample of a language model, and the planned and measured timeline on one page; all processes take part."""
        text = self._sample() if why in ("finished", "early stop") else ""
        if not self._main:
            return
        folder = self._of.folder
        if text:
            folder.write("sample.txt", text)
            put(f"\n{text}\n")
        if self._measured is not None and self._measured.is_aligned:
            name = self._measured.schedule.name
            names = [f"{name}, {what}" for what in ("planned", "measured")]
            title = f"{name}, planned and measured at step {self._of.step}"
            folder.write("timeline.html", draw.html([self._planned, self._measured], title, names=names))

    def report(self) -> None:
        """Make the run's page."""
        if self._main:
            from stageline.train.report import make_report

            put(f"report    {make_report(self._of.folder.path)}")

    def _sample(self) -> str:
        """Text that the model writes; every process takes part."""
        of = self._of
        asked, data, task = of.config.sample, of.setup.data, of.setup.task
        if not asked.tokens or data.tokenizer is None or not task.speaks or not of.setup.tokens:
            return ""
        prompt = [int(token) for token in data.tokenizer.encode(asked.prompt or "\n")]
        found = generate(
            of.pipe,
            prompt,
            asked.tokens,
            length=of.config.training.seq_len,
            tell=self._tell_token,
            temperature=asked.temperature,
            seed=of.config.training.seed,
            give=lambda tokens: {"input_ids": tokens} if task.loss.function is own_loss else tokens,
        )
        if self._sample_cut:
            if self._main:
                put("sample    none: stopped by a signal")
            return ""
        return data.tokenizer.decode(found)

    def _tell_token(self, token: int) -> int | None:
        """Give all processes the token that the one with the last stage drew; None if a signal came to any of them."""
        of = self._of
        last = int(of.setup.choice.schedule.placement.table[0, -1])
        values = np.array([token if of.layout.processes == 1 or of.layout.rank == last else 0, of.signal], float)
        if of.layout.processes > 1:
            values = of.world.all_reduce(values)
        self._sample_cut = bool(values[1])
        return None if self._sample_cut else int(values[0])


def memory_in_use(device: torch.device) -> int:
    """The most bytes that were in use: of the GPU, or of this process.

    >>> memory_in_use(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

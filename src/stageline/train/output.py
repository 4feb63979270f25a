"""The output of a job besides its checkpoints: what it prints and logs, timelines, a sample, the report."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from stageline._version import __version__
from stageline.common.errors import StagelineError
from stageline.common.interrupts import StopSignals
from stageline.common.machine import cores
from stageline.common.units import format_makespan, format_seconds, format_uncertainty
from stageline.distributed.attempts import Attempt
from stageline.model.huggingface import own_loss
from stageline.timeline.io import PLANNED
from stageline.timeline.timeline import Timeline
from stageline.train.events import Logs, read_metrics
from stageline.train.model_flops import flops_per_token, peak_flops
from stageline.train.run_folder import ENVIRONMENT, METRICS, SAMPLE, TIMELINE_PAGE, TIMELINES, timeline_file
from stageline.train.screen import WARM_UP, put
from stageline.train.setup import Setup
from stageline.train.step import StepResult

MAX_STEPS = 1000
"""The newest steps, whose median time is printed at the end."""
REPORT_SECONDS = 30.0
"""While the job runs, the report is written at most this often, and takes at most a hundredth of the time."""


class Output:
    """Reports the steps of a job; only the main process prints and writes."""

    def __init__(self, setup: Setup, logs: Logs, stop: StopSignals) -> None:
        """`setup` is prepared."""
        self._setup, self._logs, self._stop = setup, logs, stop
        self._main = setup.layout.main
        self._planned = setup.choice.timeline
        self._measured: Timeline | None = None
        self._num_replans = 0
        self._sample_interrupted = False
        self._seconds: deque[float] = deque(maxlen=MAX_STEPS)
        self._recovery: dict[str, Any] = {}
        self.memory: tuple[int, ...] = ()
        """The bytes in use by each process after the last step; empty if they are not known yet."""
        self._logged_memory: tuple[int, ...] = ()
        self._marks_until = 0
        self._next_report = time.monotonic() + REPORT_SECONDS
        self._flops, self._peak = self._find_flops()

    def _find_flops(self) -> tuple[float, float | None]:
        """Return the FLOPs of a step, and the peak FLOP/s of all devices; None if that is unknown."""
        setup, training = self._setup, self._setup.config.training
        if not setup.tokens or not setup.task.predicts_tokens:
            return 0.0, None
        dtype = training.mixed_precision_param if training.dtype == "float32" else training.dtype
        peak = peak_flops(setup.layout.device, dtype, setup.config.metrics.peak_tflops)
        tokens = setup.batches.per_step * setup.tokens
        return flops_per_token(setup.pipe.model, setup.tokens) * tokens, peak and peak * setup.layout.processes

    def recovery(self, attempt: Attempt, step: int, state: str, reported: int, *, mark_all: bool) -> None:
        """Log a recovery, and mark the steps that it affects: those that are repeated, the first new one, or all."""
        path, layout = self._setup.folder.path / METRICS, self._setup.layout
        if self._main and not (self._setup.folder.path / TIMELINES).exists():
            self._describe()  # the first process of the job is on another host now, with a folder of its own
        if self._main and path.is_file():
            reported = max([reported, *(row["step"] for row in read_metrics(path).of("step"))])
        self._marks_until = self._setup.config.training.steps if mark_all else reported + 1
        self._recovery = {"lost": list(attempt.lost), "action": attempt.action, "seconds": time.time() - attempt.moment}
        details = {"state": state, "ranks": layout.ranks, "replicas": layout.replicas}
        self._logs.event("recovery", step=step, attempt=attempt.number, **self._recovery, **details)

    def begin(self, resumed: bool) -> None:
        """Print and save what is about to be trained."""
        if not self._main:
            return
        setup, folder, layout = self._setup, self._setup.folder, self._setup.layout
        if not resumed and (aside := folder.move_aside(METRICS)) is not None:
            setup.notes.append(
                f"{folder.path} contains a run without a checkpoint, so training "
                f"starts from step 0; the earlier events are kept in {aside.name}"
            )
        schedule, num_parameters = setup.choice.schedule, self._describe()
        num_candidates = 1 + len(setup.choice.alternatives)
        best = f", the fastest of {num_candidates} by the profile" if num_candidates > 1 else ""
        for note in setup.notes:
            put(f"note: {note}")
        put(f"model     {setup.task.name}, {num_parameters:,} parameters")
        put(f"data      {setup.data.describe()}")
        put(f"ranks     {layout}")
        stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
        put(f"schedule  {schedule.name}{best}: {stages}, {schedule.microbatches} microbatches")
        noisy = f"; the profile is noisy, so this may be off by {format_uncertainty(setup.choice.uncertainty)}"
        makespan = f"makespan {format_makespan(self._planned.makespan)}, bubble {self._planned.bubble or 0:.1%}"
        put(f"plan      {makespan}{noisy if setup.choice.is_noisy else ''}")
        put(f"folder    {folder.path}")

    def _describe(self) -> int:
        """Save what is trained, where, and its plan, in the folder of the run; return the number of parameters."""
        setup, folder, layout = self._setup, self._setup.folder, self._setup.layout
        num_parameters = sum(parameter.numel() for parameter in setup.pipe.model.parameters())
        folder.write_config(setup.config)
        (folder.path / TIMELINES).mkdir(exist_ok=True)
        self._planned.write(folder.path / TIMELINES / PLANNED)
        job = {
            "model": setup.task.name,
            "parameters": num_parameters,
            "data": setup.data.describe(),
            "ranks": layout.ranks,
            "replicas": layout.replicas,
            "transport": "threads" if layout.processes == 1 else "processes",
            "device": str(layout.device),
            "schedule": setup.choice.schedule.name,
        }
        folder.write(ENVIRONMENT, environment(**job))
        return num_parameters

    def step(self, step: int, result: StepResult, rate: float, seconds: float) -> None:
        """Log a step, and save its timeline every `metrics.timeline_freq` steps."""
        if not self._main:
            return
        setup, config = self._setup, self._setup.config
        tokens = setup.batches.per_step * (setup.tokens or 1)  # a sample that is not a row of tokens counts as one
        self._measured = result.stats.measured()
        self._seconds.append(seconds)
        scaled = config.training.mixed_precision_param == "float16"
        self._logs.event(
            "step",
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=config.optimizer.lr * rate,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            **({"mfu": self._flops / seconds / self._peak} if self._peak else {}),
            seconds=seconds,
            makespan=self._measured.makespan if self._measured.is_aligned else None,
            planned_makespan=self._planned.makespan,
            bubble=self._measured.bubble,
            planned_bubble=self._planned.bubble,
            memory=memory_in_use(setup.layout.device),
            **({"scale": result.scale, "skipped": result.skipped} if scaled else {}),
            **({"recovery": self._recovery} if step <= self._marks_until else {}),
            **({"memory_by_process": self.memory} if self.memory != self._logged_memory else {}),
        )
        self._logged_memory = self.memory
        for replan in setup.pipe.replans[self._num_replans :]:
            self._planned = replan.timeline
            self._planned.write(setup.folder.path / TIMELINES / PLANNED)
            self._logs.event("replan", step=step, said=str(replan), before=replan.before, after=replan.after)
        self._num_replans = len(setup.pipe.replans)
        every = config.metrics.timeline_freq
        if (every and step % every == 0) or step == config.training.steps:
            self._measured.write(setup.folder.path / timeline_file(step))
            self._logs.event("timeline", step=step, file=timeline_file(step))
        if time.monotonic() > self._next_report:
            self._refresh_report()

    def _refresh_report(self) -> None:
        """Write the report of the steps so far; what keeps it from being written is said at the end."""
        from stageline.train.report import make_report

        started = time.monotonic()
        with suppress(StagelineError):
            make_report(self._setup.folder.path)
        self._next_report = time.monotonic() + max(REPORT_SECONDS, 100 * (time.monotonic() - started))

    def finish(self, step: int, why: str) -> None:
        """Write a sample of a language model, and a page of the planned and measured timeline.

        All processes take part in the sample.
        """
        text = self._sample() if why in ("finished", "early stop") else ""
        if not self._main:
            return
        folder = self._setup.folder
        if text:
            folder.write(SAMPLE, text)
            put(f"\n{text}\n")
        if self._measured is not None and self._measured.is_aligned:
            from stageline.timeline import draw

            name = self._measured.schedule.name
            names = [f"{name}, {kind}" for kind in ("planned", "measured")]
            title = f"{name}, planned and measured at step {step}"
            folder.write(TIMELINE_PAGE, draw.html([self._planned, self._measured], title, names=names))

    def report(self) -> None:
        """Write the report of the run, and say how much faster than one process it was."""
        if self._main:
            from stageline.train.report import make_report

            seconds, alone = list(self._seconds)[WARM_UP:], self._setup.alone
            if seconds and alone:
                typical = statistics.median(seconds)
                put(
                    f"speed     {format_seconds(typical)} a step, {alone / typical:.2f} times as fast as one process "
                    f"that trains on the same microbatches with {cores()} threads ({format_seconds(alone)} a step)"
                )
            put(f"report    {make_report(self._setup.folder.path)}")

    def _sample(self) -> str:
        """Return text that the model writes; every process takes part."""
        setup, config = self._setup, self._setup.config
        options, tokenizer, task = config.sample, setup.data.tokenizer, setup.task
        if not options.tokens or tokenizer is None or not task.predicts_tokens or not setup.tokens:
            return ""
        from stageline.train.generation import Sampling, generate

        prompt = [int(token) for token in tokenizer.encode(options.prompt or "\n")]
        tokens = generate(
            setup.pipe,
            prompt,
            options.tokens,
            length=config.training.seq_len,
            share=self._share_token,
            sampling=Sampling(options.temperature, top_p=options.top_p, seed=config.training.seed),
            inputs=lambda rows: {"input_ids": rows} if task.loss.function is own_loss else rows,
            use_cache=not (config.compile.enable or config.compile.cuda_graphs),  # compiled code has a shape for each
        )
        text = tokenizer.decode([*prompt, *tokens])
        if self._sample_interrupted:
            if self._main:
                put("sample    none: stopped by a signal")
            return ""
        return "\n".join(text.split("\n")[:-1]) or text  # the last line is cut at the number of tokens

    def _share_token(self, token: int) -> int | None:
        """Give all processes the token of the last stage; None if any of them received a signal."""
        setup, layout = self._setup, self._setup.layout
        last = int(setup.choice.schedule.placement.table[0, -1])
        values = np.array([token if layout.processes == 1 or layout.rank == last else 0, self._stop.number], float)
        if layout.processes > 1:
            values = setup.host.all_reduce(values)
        self._sample_interrupted = bool(values[1])
        return None if self._sample_interrupted else int(values[0])


def environment(**job: Any) -> str:
    """Return the versions, the machine, the command and the given facts of a job as JSON."""
    facts = {
        "stageline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        "command": " ".join(sys.argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        **job,
    }
    return json.dumps(facts, indent=1) + "\n"


def memory_in_use(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""The choice of stages and a schedule for a job: the model, measured on a microbatch, and the fastest plan that the
configuration allows."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.autograd.graphs.options import Compile
from stageline.common.errors import NothingFits, StagelineError, in_flags
from stageline.common.files import write_text
from stageline.common.machine import cores
from stageline.common.units import format_size
from stageline.distributed.pairs import measure_pairs, measure_threads
from stageline.distributed.rank_host import RankHost
from stageline.model.build.build import build
from stageline.model.profile import Profile
from stageline.model.profiler import profile, time_alone
from stageline.model.split import split
from stageline.planning.plan import Plan, read_plan
from stageline.planning.planner import plan
from stageline.planning.profiles import by_calls
from stageline.planning.request import MAX_NEIGHBOURS, device_memory
from stageline.runtime._torch_private import pytree
from stageline.runtime.out_of_memory import PLAN_ADVICE
from stageline.timeline.costs import Share
from stageline.train.config.config import Config
from stageline.train.config.rules import fixed_schedule
from stageline.train.data import Data, Tokens
from stageline.train.layout import BatchSizes, JobLayout, ranks_here
from stageline.train.optimizers import Optimizer, outer_parameters
from stageline.train.run_folder import CHOICE, PLAN
from stageline.train.step import autocast
from stageline.train.task import Task, looks_ahead

MAX_MEASURED_RANKS = 8
"""Up to this many ranks, the messages between neighbours are measured."""
MIN_STAGES_REPEATS, MAX_STAGES_REPEATS, STAGES_SECONDS = 6, 20, 0.5
"""The model runs in one stage and in two stages so many times, the number depending on how long it takes."""
OPTIMIZER_REPEATS = 4
MAX_PARAMETERS = 50_000_000
"""Up to this many parameters, the optimizer is measured."""
TIME_LIMIT = 1.0
"""Seconds that the search may take, because a job should start soon."""
MICROBATCH_SIZE = "--parallelism.pipeline_parallel_microbatch_size"
OPTIMIZER_STATE_BYTES = {"AdamW": 8.0, "Adam": 8.0, "SGD": 4.0, "Adafactor": 1.0, "Muon": 4.0}
"""Approximate bytes of optimizer state for each parameter."""


class TransferCosts(NamedTuple):
    """What a message between two ranks costs."""

    seconds: float
    """Of any message."""
    bandwidth: float | None
    """Bytes per second; None if it does not matter."""
    busy: float = 0.0
    """Seconds that a rank spends on sending or receiving one."""


FREE = TransferCosts(0.0, None)


class StageTimes(NamedTuple):
    """What the model takes in stages, for one microbatch."""

    seconds: float
    """Of a forward and a backward of the whole model as one stage; 0 if unknown."""
    overhead: float
    """Of an action, beside its layers."""


UNKNOWN = StageTimes(0.0, 0.0)


def transfer_costs(host: RankHost, layout: JobLayout) -> TransferCosts:
    """Measure the messages of neighbouring ranks that are processes on the CPU; all processes of the job call this.

    Those of other jobs count as free.
    """
    if not 1 < layout.processes == layout.ranks <= MAX_MEASURED_RANKS or layout.device.type != "cpu":
        return FREE
    pairs = measure_pairs(host, pairwise(range(layout.ranks)), layout.device)
    busy = statistics.median(pair.message_us for pair in pairs) / 1e6
    seconds = statistics.median(pair.latency_us for pair in pairs) / 1e6
    bandwidth = 1e9 * statistics.median(pair.gbytes_per_s for pair in pairs)
    return TransferCosts(max(0.0, seconds - busy), bandwidth, busy)  # a latency includes a send


@contextmanager
def _naming_too_large(name: str) -> Iterator[None]:
    """Say what helps if a model does not fit into memory."""
    try:
        yield
    except RuntimeError as error:
        bytes_of_cpu = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if bytes_of_cpu is None and not isinstance(error, torch.OutOfMemoryError):
            raise
        what = f"a tensor of {format_size(float(bytes_of_cpu[1]))}" if bytes_of_cpu else "a tensor"
        raise StagelineError(
            f"the model {name} does not fit into memory: {what} could not be allocated; the model is built once as a "
            "whole to measure it, so use a smaller one (the options of model), or a machine with more memory"
        ) from error


class JobMeasurement:
    """The whole model of a job, with inputs and targets of a microbatch, to be measured on this process."""

    def __init__(
        self,
        config: Config,
        layout: JobLayout,
        batches: BatchSizes,
        task: Task,
        data: Data,
        microbatch: tuple[Any, Any],
    ) -> None:
        self._config, self._layout, self._batches, self._task, self._data = config, layout, batches, task, data
        with _naming_too_large(task.name):
            self._model = build(task.make, seed=config.training.seed, device=layout.device, otherwise="construct")
        move = lambda leaf: leaf.to(layout.device) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        self._example, self._targets = pytree.tree_map(move, microbatch)
        self.note = ""
        """What the user should know about the model."""

    def profile(self) -> Profile:
        """Measure the units of the model, in call order."""
        model, example = self._model, self._example
        is_language_model = isinstance(self._data.train, Tokens) and self._task.predicts_tokens
        if is_language_model and looks_ahead(model, example, vocab_size=self._data.vocab_size):
            self.note = (
                f"{self._task.name} sees the tokens that it has to predict: its output at a position depends on "
                "later tokens; use a causal model, or your own samples"
            )
        measured = self._measure()
        in_stage = self._stage_times.seconds - 2 * self.stage_overhead
        if in_stage > 0 and not self._config.compile.enable:  # small layers take longer alone than within a stage
            measured = measured.scaled(in_stage / sum(layer.forward + layer.backward for layer in measured.layers))
        return by_calls(measured, [unit.name for unit in split(model, 1, example=example).units])

    @property
    def memory(self) -> float | None:
        """The bytes of a rank on its GPU; None on the CPU. Ranks that are threads share a GPU."""
        memory = device_memory(self._model)
        sharing = self._layout.ranks if self._layout.processes == 1 else 1
        return None if memory is None else memory / sharing

    def seconds_alone(self) -> float | None:
        """Return the seconds of a training step in one process with all cores: a loop over the same microbatches, and
        the optimizer; None if that cannot be measured.

        On a busy machine, several threads that wait for each other may take longer than one; the faster way counts.
        """
        threads, count = torch.get_num_threads(), self._batches.per_step / self._batches.microbatch
        with suppress(Exception):  # the first step reports what fails
            seconds = []
            try:
                for threads_alone in (cores(), 1):
                    torch.set_num_threads(threads_alone)
                    with autocast(self._layout.device, self._config.training.mixed_precision_param):
                        loop = count * time_alone(self._model, self._example, self._loss_fn, self._targets)
                    seconds.append(loop + self._optimizer_seconds())
                return min(seconds) if min(seconds) < math.inf else None
            finally:
                torch.set_num_threads(threads)
                self._model.zero_grad()
        return None

    def _optimizer_seconds(self) -> float:
        """Return the seconds in which the optimizer of a small model clips and steps all parameters.

        A large one is left out, since its state may not fit; the loop over its microbatches takes far longer.
        """
        config, parameters = self._config, list(self._model.parameters())
        if sum(parameter.numel() for parameter in parameters) > MAX_PARAMETERS:
            return 0.0
        still = replace(config.optimizer, lr=0.0)  # the model is measured again
        optimizer = Optimizer(still, self._model.named_parameters(), outer=outer_parameters(self._model))
        taken = []
        for _ in range(1 + OPTIMIZER_REPEATS):
            start = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm or math.inf)
            optimizer.step()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    @property
    def stage_overhead(self) -> float:
        """The seconds that an action takes beside its layers, on the CPU: those by which a forward and a backward of
        two stages take longer than those of one."""
        return self._stage_times.overhead

    @property
    def thread_messages(self) -> TransferCosts:
        """The messages between ranks that are threads, on the CPU, while the sender computes."""
        if self._layout.device.type != "cpu" or not 1 == self._layout.processes < self._layout.ranks:
            return FREE
        try:
            parts = split(self._model, 1, example=self._example).parts()
            with suppress(Exception), torch.random.fork_rng(devices=[]):  # the first step reports what fails
                sending, latency = measure_threads(lambda: self._seconds_of(parts))
                return TransferCosts(max(0.0, latency - sending), None, sending)
            return FREE
        finally:
            self._model.zero_grad()

    @cached_property
    def _stage_times(self) -> StageTimes:
        if self._layout.device.type != "cpu":
            return UNKNOWN
        taken: list[tuple[float, float]] = []
        try:
            with (
                suppress(Exception),  # the first step reports what fails
                torch.random.fork_rng(devices=[]),
                autocast(self._layout.device, self._config.training.mixed_precision_param),
            ):
                whole, halves = (split(self._model, count, example=self._example).parts() for count in (1, 2))
                end = time.perf_counter() + STAGES_SECONDS
                while len(taken) < MIN_STAGES_REPEATS or (
                    len(taken) < MAX_STAGES_REPEATS and time.perf_counter() < end
                ):
                    taken.append((self._seconds_of(whole), self._seconds_of(halves)))
        finally:
            self._model.zero_grad()
        if len(taken) < MIN_STAGES_REPEATS:
            return UNKNOWN
        ones, twos = zip(*taken[1:], strict=True)
        return StageTimes(statistics.median(ones), max(0.0, min(twos) - min(ones)) / 2)

    def _seconds_of(self, parts: Sequence[nn.Module]) -> float:
        """Return the seconds of a forward and a backward of stages, one after the other."""
        start, value = time.perf_counter(), self._example
        passed: list[tuple[list[Tensor], list[Tensor]]] = []  # what left a stage, and as what it arrived
        for part in parts:
            value = part(value)
            if part is parts[-1] and (loss_fn := self._loss_fn) is not None:
                value = loss_fn(value, self._targets)
            sent, layout = pytree.tree_flatten(value)
            arrived = [
                leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in sent
            ]
            wanted = [index for index, leaf in enumerate(sent) if isinstance(leaf, Tensor) and leaf.requires_grad]
            passed.append(([sent[index] for index in wanted], [arrived[index] for index in wanted]))
            value = pytree.tree_unflatten(arrived, layout)
        for sent, arrived in reversed(passed):
            grads = [torch.ones_like(leaf) if leaf.grad is None else leaf.grad for leaf in arrived]
            torch.autograd.backward(sent, grads)
        return time.perf_counter() - start

    @property
    def _loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """The loss, unless it is the user's: that may count its calls."""
        return None if self._task.user_loss or ":" in self._task.loss_name else self._task.loss.function

    @property
    def _neighbours(self) -> int:
        """The ranks that compute beside another one on the cores of this machine."""
        if self._layout.device.type != "cpu":
            return 0
        at_once = min(ranks_here(self._layout), cores() // torch.get_num_threads())
        return max(0, min(at_once - 1, MAX_NEIGHBOURS))

    def _measure(self) -> Profile:
        """Profile the model in the precision of a step, with its loss."""
        with autocast(self._layout.device, self._config.training.mixed_precision_param):
            launcher = "threads" if self._layout.processes == 1 else "processes"
            options: Any = {"compile": compile_option(self._config), "repeats": 3, "warmup": 1}
            options |= {"neighbours": self._neighbours, "launcher": launcher}
            with suppress(StagelineError):  # the first step reports why a loss fails
                if (loss_fn := self._loss_fn) is not None:
                    return profile(self._model, self._example, loss_fn=loss_fn, targets=self._targets, **options)
            return profile(self._model, self._example, **options)


def compile_option(config: Config) -> Compile:
    """Return the `compile` option of the pipeline."""
    return {"backend": config.compile.backend} if config.compile.enable else False


def save_choice(choice: Plan, folder: Path, request: dict[str, Any]) -> None:
    """Save a choice with its request, so that a resumed run makes the same one."""
    choice.write(folder / PLAN)
    write_text(folder / CHOICE, json.dumps({"asked": request}, indent=1) + "\n")


def load_choice(folder: Path, request: dict[str, Any]) -> Plan | None:
    """Return the choice of an earlier start for the same request; None if there is none."""
    try:
        if json.loads((folder / CHOICE).read_text(encoding="utf-8"))["asked"] != request:
            return None
        return read_plan(folder / PLAN)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose_schedule(
    profile: Profile,
    config: Config,
    ranks: int,
    microbatches: int,
    memory: float | None = None,
    mesh: Mapping[str, int] | None = None,
    shares: Sequence[Share] = (),
    overhead: float = 0.0,
    transfer: TransferCosts = FREE,
) -> tuple[Plan, str]:
    """Return the fastest schedule that the configuration allows, with its best split; and a note, or an empty string.

    >>> import torch
    >>> from stageline.model.profiler import profile
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> choice, _ = choose_schedule(profile(layers, torch.ones(32, 64), repeats=1), Config(), ranks=2, microbatches=4)
    >>> len(choice.alternatives) > 5, sum(choice.layers_per_stage), choice.samples
    (True, 8, 2)
    """
    options = config.parallelism
    fixed = fixed_schedule(options, ranks, microbatches)
    half = config.training.dtype == "bfloat16"
    request: dict[str, Any] = {
        "profile": profile,
        "samples": options.pipeline_parallel_microbatch_size,
        "ranks": ranks if mesh is None else None,
        "mesh": mesh,
        "cores": list(shares),
        "overhead": overhead,
        "message_overhead": transfer.busy,
        "transfer": transfer.seconds,
        "bandwidth": transfer.bandwidth,
        "shard_optimizer": options.shard_optimizer,
        "microbatches": microbatches,
        "schedule": "auto" if fixed is None else fixed,
        "chunks": options.pipeline_parallel_chunks or None if fixed is None else None,
        "split": options.pipeline_parallel_split,
        "recompute": "stage" if config.activation_checkpoint.mode == "full" else "none",
        "parameter_bytes": 2.0 if half else 4.0,
        # A bfloat16 parameter has a float32 master weight.
        "optimizer_bytes_per_parameter": OPTIMIZER_STATE_BYTES.get(config.optimizer.name, 8.0) + (4.0 if half else 0.0),
        "cuda_graphs": config.compile.cuda_graphs,
        "time_limit": TIME_LIMIT,
    }
    try:
        return plan(memory=memory, **request), ""
    except NothingFits as error:  # an estimate, so the job may still try
        return plan(**request), in_config_words(str(error))


def in_config_words(text: str) -> str:
    """Return the advice of `sl.plan`, or of a step that ran out of memory, as flags of a job.

    >>> in_config_words("this would fit: recompute='auto' brings it to 3 GiB; ranks=8 brings it to 1 GiB")
    'this would fit: --activation_checkpoint.mode full brings it to 3 GiB; --parallelism.pipeline_parallel_degree 8
    brings it to 1 GiB'
    >>> in_config_words("this would fit: batch=16, microbatches=8 needs 3 GiB")
    'this would fit: --parallelism.pipeline_parallel_microbatch_size 2 needs 3 GiB'
    """
    text = text.replace(f"; {PLAN_ADVICE}", "")  # a job plans for the memory of its GPUs
    text = re.sub(r"microbatches=\d+ instead of \d+, of half the size", f"half of {MICROBATCH_SIZE}", text)
    text = re.sub(r"batch=(\d+), microbatches=(\d+)", lambda m: f"{MICROBATCH_SIZE} {int(m[1]) // int(m[2])}", text)
    text = text.replace("recompute='auto'", "recompute=full").replace("recompute='stage'", "recompute=full")
    return in_flags(
        text,
        {
            "ranks": "--parallelism.pipeline_parallel_degree",
            "schedule": "--parallelism.pipeline_parallel_schedule",
            "recompute": "--activation_checkpoint.mode",
            "memory": "a rank with",
        },
    )

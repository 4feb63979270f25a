"""The start-up of a job: data, a locked run folder, stages and a schedule by the model's profile, a pipeline."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.autograd.graphs.options import Compile
from stageline.common.errors import NothingFits, StagelineError, in_flags
from stageline.common.files import write_text
from stageline.common.interrupts import ended_by_sigterm
from stageline.common.machine import cores
from stageline.distributed.attempts import number_of
from stageline.distributed.bootstrap import job_host
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.model.build.build import build, describe
from stageline.model.profile import Profile
from stageline.model.profiler import profile, time_alone
from stageline.model.split import Staged, split
from stageline.planning.costs import by_calls
from stageline.planning.plan import Plan, parse_plan, plan, read_plan
from stageline.planning.request import MAX_NEIGHBOURS, device_memory
from stageline.runtime._torch_private import pytree
from stageline.runtime.out_of_memory import PLAN_ADVICE
from stageline.runtime.pipeline import Pipeline
from stageline.timeline.costs import Share
from stageline.train.checkpoint import leave_mark, remove_mark, sees_mark
from stageline.train.checkpoint.remote import RemotePath, checkpoint_folder
from stageline.train.config.config import Config, Recovery
from stageline.train.config.rules import fixed_schedule
from stageline.train.data import Data, Loader, Tokens, data_of, open_data
from stageline.train.layout import (
    ZERO_REPLICAS,
    BatchSizes,
    JobLayout,
    batch_sizes,
    core_shares,
    note_on_gpus,
    ranks_here,
)
from stageline.train.optimizers import warm_up_note
from stageline.train.run_folder import CHOICE, PLAN, PROFILE, RunFolder
from stageline.train.step import autocast, disable_broken_bfloat16
from stageline.train.task import Task, looks_ahead, make_task


class Setup:
    """The parts of a job. `prepare` makes all of them; `open_data` alone is enough to check a configuration."""

    batches: BatchSizes
    data: Data
    loader: Loader
    task: Task
    host: RankHost
    choice: Plan
    """The stages and the schedule."""
    pipe: Pipeline

    def __init__(
        self,
        config: Config,
        layout: JobLayout,
        folder: RunFolder,
        model: Callable[[], nn.Module] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        data: Data | Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """`model`, `loss_fn` and `data` replace those of the configuration; `collate_fn` makes batches of samples."""
        self.config, self.layout, self.folder = config, layout, folder
        self._model, self._loss_fn, self._data, self._collate_fn = model, loss_fn, data, collate_fn
        self.resumes = False
        """Whether the folder holds a run to resume."""
        self.notes: list[str] = []
        """Sentences to print before the first step."""
        self.alone: float | None = None
        """Seconds of a step in one process that loops over its microbatches with all cores, if that was measured."""
        self.nominal_per_step = 0
        """Samples of an optimizer step while no replica is lost."""

    def for_layout(self, config: Config, layout: JobLayout) -> Setup:
        """The same job with fewer or more processes; keeps the data that is open."""
        data = getattr(self, "data", self._data)
        setup = Setup(config, layout, self.folder, self._model, self._loss_fn, data, self._collate_fn)
        setup.nominal_per_step = self.nominal_per_step
        return setup

    def prepare(self) -> None:
        """Run the start-up, step by step. All processes call this together, and communicate where a line says so."""
        self.batches = batch_sizes(self.config, self.layout.replicas)
        self.nominal_per_step = self.nominal_per_step or self.batches.per_step
        precision_note = self._disable_broken_kernels()
        self._join_processes()  # communicates
        if not hasattr(self, "data"):  # else this process survived the loss of another one
            self.open_data()
        self._claim_folder()  # communicates
        self._check_shared_folder()  # communicates
        zero_replicas = "" if self.config.parallelism.data_parallel_replicate_degree else ZERO_REPLICAS
        notes = (
            note_on_gpus(self.config, self.layout),
            zero_replicas,
            precision_note,
            warm_up_note(self.config),
            self._recovery_note(),
        )
        self.notes += [note for note in notes if note]
        self._choose_schedule()  # communicates
        self._build_pipeline()  # communicates

    def _disable_broken_kernels(self) -> str:
        training = self.config.training
        muon_dtype = "bfloat16" if self.config.optimizer.name == "Muon" else ""  # it orthogonalises in bfloat16
        return disable_broken_bfloat16(self.layout.device, training.dtype, training.mixed_precision_param, muon_dtype)

    def _recovery_note(self) -> str:
        if number_of() is not None or self.config.recovery == Recovery():
            return ""
        return (
            "the options of recovery are for ranks that stageline train starts as processes; here they have no effect"
        )

    def _join_processes(self) -> None:
        with ended_by_sigterm():
            self.host = job_host(self.config.comm.train_timeout_seconds)

    def open_data(self) -> None:
        """Open the data and make the task; raise if they do not fit each other."""
        config = self.config
        self.batches = batch_sizes(config, self.layout.replicas)
        if self._data is None:
            # A model of the user's own may not know the words of the built-in one.
            auto = self._model is not None and config.model.tokenizer_path == "auto"
            model = replace(config.model, tokenizer_path="bytes") if auto else config.model
            self.data = open_data(replace(config, model=model))
        else:
            self.data = self._data if isinstance(self._data, Data) else data_of(self._data, config)
        if self._collate_fn is not None:
            self.data.collate_with(self._collate_fn)
        self.loader = Loader(self.data.train, batch=self.batches.per_step, seed=config.training.seed)
        self.task = self._make_task()
        if self.task.configured is not None:
            self.task.check_length(self.tokens, config.training.seq_len)
        if config.validation.patience and self.data.validation is None:
            raise StagelineError(
                f"validation.patience is {config.validation.patience}, but nothing is validated on: a stream has no "
                "validation samples; use a validation.dataset_path, or set the patience to 0"
            )

    def _make_task(self) -> Task:
        training = self.config.training
        if self._model is None:
            task = make_task(self.config, self.data.vocab_size)
        else:
            name = getattr(self._model, "__name__", type(self._model).__name__)
            task = Task(name, self._model, training.loss, tuple(training.loss_weights), getattr(torch, training.dtype))
        task.user_loss = self._loss_fn
        if self.data.tokenizer is not None:
            task.assets = self.data.tokenizer.files() | task.assets
        return task

    @cached_property
    def _microbatch(self) -> tuple[Any, Any]:
        return self.task.batch(*self.loader.batch(0, 0, 1, self.batches.microbatch))

    @property
    def example(self) -> Any:
        """The inputs of a microbatch."""
        return self._microbatch[0]

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of a sample; 0 if samples are not rows of tokens."""
        inputs = self.example
        rows = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if isinstance(rows, Tensor) and rows.dim() == 2 and not rows.is_floating_point():
            return int(rows.shape[1])
        return 0

    def _claim_folder(self) -> None:
        """Find a run to resume, and lock the folder; rank 0 does both."""

        def claim() -> tuple[bool, list[str]]:
            resumes, notes = self.folder.find_run(self.config)
            self.folder.claim(self.config)
            return resumes, notes

        self.resumes, self.notes = decide_together(self.host, claim)

    def _check_shared_folder(self) -> None:
        """Raise if a process does not see the folder of the checkpoints: that of the run, or an object store."""
        if self.layout.processes == 1:
            return
        where = checkpoint_folder(self.folder.path, self.config.checkpoint.folder)
        folder = where if isinstance(where, RemotePath) else self.folder.path
        nonce = decide_together(self.host, lambda: leave_mark(folder))
        blind = np.zeros(self.layout.processes)
        blind[self.layout.rank] = float(not sees_mark(folder, nonce))
        blind = self.host.all_reduce(blind)
        if self.layout.main:
            remove_mark(folder, nonce)
        if blind.any():
            ranks = ", ".join(map(str, np.flatnonzero(blind).tolist()))
            raise StagelineError(
                f"rank {ranks} does not see the folder {str(folder)!r} of rank 0; use a job.dump_folder on a file "
                "system that all machines share, or a checkpoint.folder in an object store that all of them reach"
            )

    def _choose_schedule(self) -> None:
        """Choose the stages and the schedule on rank 0: those of an earlier start, or by a profile."""
        text = decide_together(self.host, self._load_choice)
        if not text:
            if self.layout.device.type == "cpu":
                self.alone = decide_together(self.host, self._measure_alone)
            text = decide_together(self.host, self._choose)
            self.__dict__.pop("_whole_model", None)
        self.choice = parse_plan(text, "the plan of rank 0")

    @cached_property
    def _choice_request(self) -> dict[str, Any]:
        """What the choice depends on, beside the profile."""
        config = self.config
        request: dict[str, Any] = {
            "parallelism": asdict(config.parallelism),
            "model": asdict(config.model) | {"seq_len": config.training.seq_len},
            "ranks": self.layout.ranks,
            "microbatches": self.batches.microbatches,
        }
        if file := config.parallelism.pipeline_parallel_schedule_csv:  # its contents may have changed
            with suppress(OSError):
                request["file"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        return request

    def _load_choice(self) -> str:
        """Return the plan of an earlier start as text; empty if there is none."""
        choice = getattr(self, "choice", None)
        if choice is None and self.resumes:
            choice = load_choice(self.folder.path, self._choice_request)
        return "" if choice is None else choice.to_text()

    def _choose(self) -> str:
        """Return a new plan as text."""
        path = self.folder.path
        measured, memory = self._profile()
        choice, note = choose_schedule(
            measured,
            self.config,
            self.layout.ranks,
            self.batches.microbatches,
            memory,
            self._plan_mesh,
            core_shares(self.layout, measured.threads, measured.speeds),
            self._stage_overhead(),
        )
        self.notes += [note] if note else []
        measured.write(path / PROFILE)
        save_choice(choice, path, self._choice_request)
        return choice.to_text()

    @property
    def _plan_mesh(self) -> dict[str, int] | None:
        """The mesh that a plan counts; None if no dimension divides the memory of a rank."""
        layout, shards_optimizer = self.layout, self.config.parallelism.shard_optimizer
        if layout.shards == layout.tensors == 1 and not shards_optimizer:
            return None
        replicas = {"dp_replicate": layout.replicas // layout.shards} if shards_optimizer else {}
        return {"pp": layout.ranks, **replicas, "dp_shard": layout.shards, "tp": layout.tensors}

    def _profile(self) -> tuple[Profile, float | None]:
        """Measure the units of the model, in call order, on a microbatch; return the memory of a rank, too."""
        model, (example, targets) = self._whole_model
        is_language_model = isinstance(self.data.train, Tokens) and self.task.predicts_tokens
        if is_language_model and looks_ahead(model, example, vocab_size=self.data.vocab_size):
            self.notes.append(
                f"{self.task.name} sees the tokens that it is to predict: its output at a position changes with the "
                "tokens after it; use a causal model, or samples of your own"
            )
        measured = self._measure(model, example, targets)
        memory = device_memory(model)
        sharing = self.layout.ranks if self.layout.processes == 1 else 1  # ranks that are threads share a GPU
        named = by_calls(measured, [unit.name for unit in split(model, 1, example=example).units])
        return named, None if memory is None else memory / sharing

    @cached_property
    def _whole_model(self) -> tuple[nn.Module, tuple[Any, Any]]:
        """The whole model, to be measured, with inputs and targets of a microbatch."""
        device = self.layout.device
        model = build(self.task.make, seed=self.config.training.seed, device=device, otherwise="construct")
        move = lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        return model, pytree.tree_map(move, self._microbatch)

    def _measure_alone(self) -> float | None:
        """Return the seconds in which one process with all cores loops over the microbatches of a step, on the CPU.

        The optimizer is not included. None if that cannot be measured; on a busy machine, several threads that wait
        for each other may take longer than one.
        """
        threads = torch.get_num_threads()
        with suppress(Exception):  # the first step reports what fails
            model, (example, targets) = self._whole_model
            loss_fn = None if self.task.user_loss or ":" in self.task.loss_name else self.task.loss.function
            seconds = []
            try:
                for count in (cores(), 1):
                    torch.set_num_threads(count)
                    with autocast(self.layout.device, self.config.training.mixed_precision_param):
                        seconds.append(time_alone(model, example, loss_fn, targets))
                if seconds[0] <= seconds[1] < math.inf:
                    return seconds[0] * self.batches.per_step / self.batches.microbatch
            finally:
                torch.set_num_threads(threads)
                model.zero_grad()
        return None

    def _stage_overhead(self) -> float:
        """Return the seconds by which each of two stages takes longer than its part of a whole forward, on the CPU."""
        model, (example, _) = self._whole_model
        if self.layout.device.type != "cpu":
            return 0.0
        with suppress(Exception), torch.no_grad():  # the first step reports what fails
            whole, halves = (split(model, count, example=example).parts() for count in (1, 2))
            taken = []
            for parts in (whole, halves) * OVERHEAD_REPEATS:
                start, value = time.perf_counter(), example
                for part in parts:
                    value = part(value)
                taken.append(time.perf_counter() - start)
            return max(0.0, min(taken[3::2]) - min(taken[2::2])) / 2
        return 0.0

    @property
    def _neighbours(self) -> int:
        """The ranks that compute beside another one on the cores of this machine."""
        if self.layout.device.type != "cpu":
            return 0
        at_once = min(ranks_here(self.layout), cores() // torch.get_num_threads())
        return max(0, min(at_once - 1, MAX_NEIGHBOURS))

    def _measure(self, model: nn.Module, example: Any, targets: Any) -> Profile:
        """Profile a model in the precision of a step, with the loss, unless it is the user's: it may count calls."""
        with autocast(self.layout.device, self.config.training.mixed_precision_param):
            launcher = "threads" if self.layout.processes == 1 else "processes"
            options: Any = {"compile": self._compile, "repeats": 3, "warmup": 1}
            options |= {"neighbours": self._neighbours, "launcher": launcher}
            if self.task.user_loss is None and ":" not in self.task.loss_name:
                with suppress(StagelineError):  # the first step reports why a loss fails
                    return profile(model, example, loss_fn=self.task.loss.function, targets=targets, **options)
            return profile(model, example, **options)

    @property
    def _compile(self) -> Compile:
        """The `compile` option of the pipeline."""
        return {"backend": self.config.compile.backend} if self.config.compile.enable else False

    def _build_pipeline(self) -> None:
        """Build the pipeline; initial weights depend only on the seed and on names."""
        config, layout, choice = self.config, self.layout, self.choice
        recovers = bool(number_of())
        if recovers and hasattr(self, "pipe") and layout.shards == layout.tensors == 1:
            self.pipe.reconnect(compare_weights=False)  # a process that is new has the weights of the start
            return
        recompute = {"none": "none", "full": "stage", "selective": list(config.activation_checkpoint.modules)}
        staged = self._split_model()  # first, because a loss of the model's own is known once the model is built
        self.pipe = Pipeline(
            staged,
            loss_fn=self.task.loss.function,
            loss_reduction=self.task.loss.reduction,
            schedule=choice.schedule,
            seed=config.training.seed,
            deadline=config.comm.train_timeout_seconds,
            compare_weights=not recovers,
            recompute=recompute[config.activation_checkpoint.mode],
            replicas=layout.replicas,
            mesh=layout.mesh,
            bucket_mb=config.parallelism.bucket_mb,
            shard_optimizer=config.parallelism.shard_optimizer,
            device=layout.device,
            compile=self._compile,
            cuda_graphs=config.compile.cuda_graphs,
            replan=config.parallelism.replan,
            replan_every=config.parallelism.replan_freq,
            stragglers=config.parallelism.stragglers,
            planned=choice,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        )

    def _split_model(self) -> Staged:
        """Split the model into stages."""
        schedule, device, seed = self.choice.schedule, self.layout.device, self.config.training.seed
        counts = self.choice.layers_per_stage
        staged, reason = split_model(self.task, schedule.stages, counts, self.example, seed, device)
        if reason and self.layout.processes > 1:
            self.notes.append(f"every process builds the whole model before it keeps its part: {reason}")
        return staged


def split_model(
    task: Task, stages: int, counts: Sequence[int] | None, example: Any, seed: int, device: torch.device
) -> tuple[Staged, str]:
    """Split a model into stages, on the meta device if its constructor can be repeated for a part of it; else say why.

    `counts` are the layers of each stage.
    """
    try:
        recipe = describe(task.make)
        for inputs in (example, None):  # a model on the meta device cannot always run
            with suppress(StagelineError):
                staged = split(recipe.model, stages, layers_per_stage=counts, example=inputs)
                return replace(staged, recipe=recipe), ""
        reason = "its units can only be found by running it"
    except StagelineError as error:
        reason = str(error)
    model = build(task.make, seed=seed, device=device, otherwise="construct")
    return split(model, stages, layers_per_stage=counts, example=example), reason


OVERHEAD_REPEATS = 6
TIME_LIMIT = 1.0
"""Seconds that the search may take, because a job should start soon."""
MICROBATCH_SIZE = "--parallelism.pipeline_parallel_microbatch_size"
OPTIMIZER_STATE_BYTES = {"AdamW": 8.0, "Adam": 8.0, "SGD": 4.0, "Adafactor": 1.0, "Muon": 4.0}
"""Approximate bytes of optimizer state for each parameter."""


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
) -> tuple[Plan, str]:
    """Return the fastest schedule that the configuration allows, with its best split; and a note, or an empty string.

    >>> import torch
    >>> from stageline.model.profiler import profile
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> choice, _ = choose_schedule(profile(layers, torch.ones(32, 64), repeats=1), Config(), ranks=2, microbatches=4)
    >>> len(choice.alternatives) > 5, sum(choice.layers_per_stage)
    (True, 8)
    """
    options = config.parallelism
    fixed = fixed_schedule(options, ranks, microbatches)
    half = config.training.dtype == "bfloat16"
    request: dict[str, Any] = {
        "profile": profile,
        "ranks": ranks if mesh is None else None,
        "mesh": mesh,
        "cores": list(shares),
        "overhead": overhead,
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

    >>> in_config_words("what would fit: recompute='auto' brings it to 3 GiB; ranks=8 brings it to 1 GiB")
    'what would fit: --activation_checkpoint.mode full brings it to 3 GiB; --parallelism.pipeline_parallel_degree 8
    brings it to 1 GiB'
    """
    text = text.replace(f"; {PLAN_ADVICE}", "")  # a job plans for the memory of its GPUs
    text = re.sub(r"microbatches=\d+ instead of \d+, of half the size", f"half of {MICROBATCH_SIZE}", text)
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

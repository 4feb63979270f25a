"""The start-up of a job: data, a locked run folder, stages and a schedule, a pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.common.interrupts import ended_by_sigterm
from stageline.distributed.attempts import number_of
from stageline.distributed.bootstrap import job_host
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.model.build.build import build, describe
from stageline.model.split import Staged, split
from stageline.planning.plan import Plan, parse_plan
from stageline.runtime.pipeline import Pipeline
from stageline.train.checkpoint import leave_mark, remove_mark, sees_mark
from stageline.train.checkpoint.remote import RemotePath, checkpoint_folder
from stageline.train.config.config import Config, Recovery
from stageline.train.data import Data, Loader, data_of, open_data
from stageline.train.layout import (
    ZERO_REPLICAS,
    BatchSizes,
    JobLayout,
    batch_sizes,
    core_shares,
    note_on_gpus,
)
from stageline.train.optimizers import warm_up_note
from stageline.train.run_folder import PLAN, PROFILE, RunFolder
from stageline.train.schedule_choice import (
    JobMeasurement,
    TransferCosts,
    choose_schedule,
    compile_option,
    load_choice,
    save_choice,
    transfer_costs,
)
from stageline.train.step import disable_broken_bfloat16
from stageline.train.task import Task, make_task


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
        """Seconds of a step in one process with all cores and the same microbatches, if that was measured."""
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
            "the recovery options have no effect here; they apply only to ranks that stageline train starts as "
            "processes"
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
                f"validation.patience is {config.validation.patience}, but there is no validation data: a stream has "
                "no validation samples; set validation.dataset_path, or set the patience to 0"
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
        job_id = self._text_of_survivors(self.folder.job_id) if number_of() else ""

        def claim() -> tuple[bool, list[str], str]:
            resumes, notes = self.folder.find_run(self.config)
            return resumes, notes, self.folder.claim(self.config, job_id)

        self.resumes, self.notes, self.folder.job_id = decide_together(self.host, claim)

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
                f"rank {ranks} cannot see the folder {str(folder)!r} of rank 0; use a job.dump_folder on a file "
                "system that all machines share, or a checkpoint.folder in an object store that they can all reach"
            )

    def _choose_schedule(self) -> None:
        """Choose the stages and the schedule: those of an earlier attempt or start, or on rank 0 by a profile."""
        own = self.choice.to_text() if hasattr(self, "choice") else ""
        text = self._text_of_survivors(own) if number_of() else ""
        text = text or decide_together(self.host, self._load_choice)
        if not text:
            if self.layout.device.type == "cpu":
                self.alone = decide_together(self.host, lambda: self._measurement.seconds_alone())
            transfer = transfer_costs(self.host, self.layout)
            text = decide_together(self.host, lambda: self._choose(transfer))
            self.__dict__.pop("_measurement", None)
        self.choice = parse_plan(text, "the plan of rank 0")
        if self.layout.main and not (self.folder.path / PLAN).exists():  # rank 0 is new, on another host
            save_choice(self.choice, self.folder.path, self._choice_request)

    @cached_property
    def _measurement(self) -> JobMeasurement:
        """The whole model, on rank 0 alone, until the schedule is chosen."""
        return JobMeasurement(self.config, self.layout, self.batches, self.task, self.data, self._microbatch)

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

    def _text_of_survivors(self, own: str) -> str:
        """Return what a process that survived a loss has; rank 0 may be a new one, on a host without the folder."""
        holders = np.zeros(self.layout.processes)
        holders[self.layout.rank] = float(bool(own))
        holders = self.host.all_reduce(holders)
        owner = int(np.argmax(holders))
        return self.host.broadcast_to_all(own, owner) if holders[owner] else ""

    def _load_choice(self) -> str:
        """Return the plan of an earlier start as text; empty if there is none."""
        choice = getattr(self, "choice", None)
        if choice is None and self.resumes:
            choice = load_choice(self.folder.path, self._choice_request)
        return "" if choice is None else choice.to_text()

    def _choose(self, transfer: TransferCosts) -> str:
        """Return a new plan as text."""
        path = self.folder.path
        measurement = self._measurement
        measured = measurement.profile()
        choice, note = choose_schedule(
            measured,
            self.config,
            self.layout.ranks,
            self.batches.microbatches,
            measurement.memory,
            self._plan_mesh,
            core_shares(self.layout, measured.threads, measured.speeds),
            measurement.stage_overhead,
            transfer if self.layout.processes > 1 else measurement.thread_messages,
        )
        self.notes += [text for text in (measurement.note, note) if text]
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
            compile=compile_option(config),
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
            self.notes.append(f"every process builds the whole model and then keeps only its part: {reason}")
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
        reason = "its units can be found only by running it"
    except StagelineError as error:
        reason = str(error)
    model = build(task.make, seed=seed, device=device, otherwise="construct")
    return split(model, stages, layers_per_stage=counts, example=example), reason

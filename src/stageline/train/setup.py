"""Everything a job needs before its first step: data, model, folder, schedule, pipeline. Nothing is trained here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError
from stageline.distributed.process_host import job_world
from stageline.distributed.rank_host import World
from stageline.model.build.build import build, describe
from stageline.model.profile.profile import Profile
from stageline.model.profile.profiler import profile
from stageline.model.split import split
from stageline.model.staged import Staged
from stageline.planning.batch_sizes import by_calls
from stageline.planning.io import parse_plan, to_text
from stageline.planning.plan import Plan
from stageline.planning.request import device_memory
from stageline.runtime.compile import Compile
from stageline.runtime.pipeline import Pipeline
from stageline.train.checkpoint import leave_mark, remove_mark, sees_mark
from stageline.train.config.config import Config
from stageline.train.data import Data, Loader, Tokens, data_of, open_data
from stageline.train.layout import Layout
from stageline.train.optimizers import warm_up_note
from stageline.train.precision import disable_broken_bfloat16
from stageline.train.run_folder import RunFolder
from stageline.train.schedule_choice import choose, keep, kept
from stageline.train.signals import ended_by_sigterm
from stageline.train.task import Task, looks_ahead, make_task


class Setup:
    """The parts of a job, each made when it is first asked for; every process asks for them in the same order."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        folder: RunFolder,
        model: Callable[[], nn.Module] | None,
        loss_fn: Callable[[Any, Any], Any] | None,
        data: Data | Iterable[Any] | None,
    ) -> None:
        """Keep what is asked for."""
        self.config, self.layout, self.folder = config, layout, folder
        self._model, self._loss_fn, self._data = model, loss_fn, data
        self.goes_on = False
        """Whether the folder holds a run to go on with."""
        self.notes: list[str] = []
        """What people should know before the first step."""

    def prepare(self) -> None:
        """Make all of it; what is wrong is found here, before the folder is written to."""
        self.make_batches()
        training = self.config.training
        inside = "bfloat16" if self.config.optimizer.name == "Muon" else ""  # what it orthogonalises in
        mended = disable_broken_bfloat16(self.layout.device, training.dtype, training.mixed_precision_param, inside)
        _ = self.world
        self.check_data()
        self._look_at_folder()
        self._share_folder()
        self.notes += [note for note in (mended, warm_up_note(self.config)) if note]
        _ = self.choice, self.pipe

    def check_data(self) -> None:
        """Open the data and make the task; refuse what the two do not have for each other."""
        _ = self.loader, self.task
        if self.task.configured is not None:
            self.task.check_length(self.tokens, self.config.training.seq_len)
        if self.config.validation.patience and self.data.validation is None:
            raise StagelineError(
                f"validation.patience is {self.config.validation.patience}, and nothing is validated on: of a stream "
                "nothing is held back; give a validation.dataset_path, or 0 for the patience"
            )

    @cached_property
    def world(self) -> World:
        """All processes of the job."""
        with ended_by_sigterm():
            return job_world(self.config.comm.train_timeout_seconds)

    @cached_property
    def data(self) -> Data:
        """What is trained on."""
        if self._data is None:
            return open_data(self.config)
        return self._data if isinstance(self._data, Data) else data_of(self._data, self.config)

    @cached_property
    def loader(self) -> Loader:
        """Batches by position."""
        return Loader(self.data.train, batch=self.per_step, seed=self.config.training.seed)

    @cached_property
    def task(self) -> Task:
        """The model and its loss."""
        training = self.config.training
        if self._model is None:
            task = make_task(self.config, self.data.vocab_size)
        else:
            name = getattr(self._model, "__name__", type(self._model).__name__)
            task = Task(name, self._model, training.loss, tuple(training.loss_weights), getattr(torch, training.dtype))
        task.given = self._loss_fn
        return task

    def make_batches(self) -> None:
        """How many samples a replica takes at once, how often in a step of the optimizer, and in how many parts."""
        training, replicas = self.config.training, self.layout.replicas
        once = training.local_batch_size * replicas
        self.per_step = training.global_batch_size or once
        """Samples of a step of the optimizer, over all replicas."""
        if self.per_step % once:
            below, above = self.per_step // once * once, (self.per_step // once + 1) * once
            raise StagelineError(
                f"training.global_batch_size is {self.per_step}, which {replicas} replicas × "
                f"training.local_batch_size {training.local_batch_size} do not divide; the nearest that fit are "
                f"{f'{below} and ' if below else ''}{above}"
            )
        self.local = training.local_batch_size
        self.turns = self.per_step // once
        """Steps of the pipeline in one of the optimizer."""
        self.size = min(self.config.parallelism.pipeline_parallel_microbatch_size, self.local)
        self.microbatches = -(-self.local // self.size)

    def _look_at_folder(self) -> None:
        """See whether there is a run to go on with; the main process looks, claims the folder, and tells."""
        said: dict[str, Any] = {"goes_on": False, "error": "", "notes": []}
        if self.layout.main:
            try:
                said["goes_on"], said["notes"] = self.folder.look(self.config)
                self.folder.claim(self.config)
            except StagelineError as error:
                said["error"] = str(error)
        said = json.loads(self.world.broadcast(json.dumps(said), 0))
        if said["error"]:
            raise StagelineError(said["error"])
        self.goes_on, self.notes = said["goes_on"], said["notes"]

    def _share_folder(self) -> None:
        """Find processes that do not see the run's folder."""
        if self.layout.processes == 1:
            return
        nonce = self.world.broadcast(leave_mark(self.folder.path) if self.layout.main else "", 0)
        blind = np.zeros(self.layout.processes)
        blind[self.layout.rank] = float(not sees_mark(self.folder.path, nonce))
        blind = self.world.all_reduce(blind)
        if self.layout.main:
            remove_mark(self.folder.path, nonce)
        if blind.any():
            ranks = ", ".join(map(str, np.flatnonzero(blind).tolist()))
            raise StagelineError(
                f"rank {ranks} does not see the folder {str(self.folder.path)!r} of rank 0; give a job.dump_folder on "
                "a file system that all machines share"
            )

    @cached_property
    def choice(self) -> Plan:
        """The cut and the schedule: of an earlier start, if the same was asked for, or by a profile; rank 0 chooses."""
        said = {"plan": "", "error": ""}
        if self.layout.main:
            try:
                said["plan"] = to_text(self._choose())
            except StagelineError as error:
                if self.layout.processes == 1:
                    raise
                said["error"] = str(error)
        said = json.loads(self.world.broadcast(json.dumps(said), 0))
        if said["error"]:
            raise StagelineError(said["error"])
        return parse_plan(said["plan"], "the plan of rank 0")

    def _choose(self) -> Plan:
        config, layout, path = self.config, self.layout, self.folder.path
        asked: dict[str, Any] = {
            "parallelism": asdict(config.parallelism),
            "model": asdict(config.model) | {"seq_len": config.training.seq_len},
            "ranks": layout.ranks,
            "microbatches": self.microbatches,
        }
        if file := config.parallelism.pipeline_parallel_schedule_csv:  # it may have changed under its name
            with suppress(OSError):
                asked["file"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        found = kept(path, asked) if self.goes_on else None
        if found is None:
            profiled, room = self._profile()
            found, note = choose(profiled, config, layout.ranks, self.microbatches, room)
            self.notes += [note] if note else []
            profiled.write(path / "profile.json")
            keep(found, path, asked)
        return found

    @cached_property
    def example(self) -> Any:
        """A microbatch of the data, as the model takes it."""
        inputs, _ = self.task.batch(*self.loader.batch(0, 0, 1, self.size))
        return inputs

    @cached_property
    def tokens(self) -> int:
        """Tokens in a sample; 0 where samples are no rows of tokens."""
        inputs = self.example
        rows = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if isinstance(rows, Tensor) and rows.dim() == 2 and not rows.is_floating_point():
            return int(rows.shape[1])
        return 0

    def _profile(self) -> tuple[Profile, float | None]:
        """Measure the units of the model, in the order of their calls, on a microbatch; and what a rank may hold."""
        device = self.layout.device
        model = build(self.task.make, seed=self.config.training.seed, device=device, otherwise="construct")
        here = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, self.example)
        words = self.data.vocab_size
        if isinstance(self.data.train, Tokens) and self.task.speaks and looks_ahead(model, here, words=words):
            self.notes.append(
                f"{self.task.name} sees the tokens that it is to foretell: what it says of a place changes with those "
                "behind it; take a causal model, or samples of your own"
            )
        found = profile(model, here, repeats=3, warmup=1)
        if self.config.compile.enable:  # a compiled backward is one piece
            layers = [replace(each, backward_input=each.backward, backward_weight=0.0) for each in found.layers]
            found = replace(found, layers=tuple(layers))
        room = device_memory(model)
        shared = self.layout.ranks if self.layout.processes == 1 else 1  # ranks that are threads share a GPU
        named = by_calls(found, [unit.name for unit in split(model, 1, example=here).units])
        return named, None if room is None else room / shared

    @cached_property
    def pipe(self) -> Pipeline:
        """The pipeline, with weights that depend on the seed and on names alone."""
        config, layout, choice = self.config, self.layout, self.choice
        recompute = {"none": "none", "full": "stage", "selective": list(config.activation_checkpoint.modules)}
        return Pipeline(
            self._staged(),
            loss_fn=self.task.loss.function,
            loss_reduction=self.task.loss.reduction,
            schedule=choice.schedule,
            seed=config.training.seed,
            deadline=config.comm.train_timeout_seconds,
            recompute=recompute[config.activation_checkpoint.mode],
            replicas=layout.replicas,
            bucket_mb=config.parallelism.bucket_mb,
            device=layout.device,
            compile=self._compile,
            replan=config.parallelism.replan,
            replan_every=config.parallelism.replan_freq,
            stragglers=config.parallelism.stragglers,
            planned=choice,
        )

    @property
    def _compile(self) -> Compile:
        return {"backend": self.config.compile.backend} if self.config.compile.enable else False

    def _staged(self) -> Staged:
        """The model in stages, without memory where its constructor can be repeated for a part of it."""
        stages, counts = self.choice.schedule.stages, self.choice.layers_per_stage
        try:
            recipe = describe(self.task.make)
            for example in (self.example, None):  # what has no memory cannot always be run
                with suppress(StagelineError):
                    found = split(recipe.model, stages, layers_per_stage=counts, example=example)
                    return replace(found, recipe=recipe)
            why = "its parts are found only by running it"
        except StagelineError as error:
            why = str(error)
        if self.layout.processes > 1:
            self.notes.append(f"every process builds the whole model before it keeps its part: {why}")
        seed, device = self.config.training.seed, self.layout.device
        model = build(self.task.make, seed=seed, device=device, otherwise="construct")
        return split(model, stages, layers_per_stage=counts, example=self.example)

"""From a job to its checkpoint and back: what is saved and loaded, by name, for any number of ranks and replicas."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import CheckpointError, StagelineError
from stageline.common.imports import is_hub_name
from stageline.distributed.rank_host import Collectives, decide_together
from stageline.model.build.weights import NOT_STRICT, load_weights
from stageline.model.huggingface import WEIGHT_FILES, hub_files
from stageline.runtime.pipeline import Pipeline
from stageline.train.checkpoint import Checkpoint, open_checkpoint, published, step_name
from stageline.train.checkpoint.convert import convert
from stageline.train.checkpoint.folder import remove_tree
from stageline.train.checkpoint.manifest import MANIFEST
from stageline.train.checkpoint.reader import at_step
from stageline.train.checkpoint.remote import Location, checkpoint_folder, is_remote, location
from stageline.train.checkpoint.writer import Writer
from stageline.train.config.config import Config
from stageline.train.config.io import FREE, WARN, differences, from_dict, to_dict
from stageline.train.events import Logs
from stageline.train.optimizers import Optimizer, State
from stageline.train.pipeline_state import (
    check_model,
    in_first_replica,
    load_weights_of,
    newest_path,
    own_optimizer_state,
    own_weights,
    read_states,
    undamaged,
    writer_number,
)
from stageline.train.run_folder import ADAPTER
from stageline.train.setup import Setup
from stageline.train.step import LossScale


def find_checkpoint(folder: Location, step: int, host: Collectives, *, weights_only: bool = False) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a folder, or that of a step from 0 on; rank 0 chooses."""

    def choose() -> str:
        if step >= 0:
            return str(undamaged(at_step(folder, step), weights_only=weights_only))
        path = newest_path(folder, weights_only=weights_only)
        return "" if path is None else str(path)

    chosen = decide_together(host, choose)
    return open_checkpoint(chosen) if chosen else None


def load_initial_weights(pipe: Pipeline, name: str, host: Collectives) -> None:
    """Load the weights of a checkpoint, of the newest undamaged one in a folder of them, or of safetensors files."""

    def choose() -> str:
        path = location(name)
        if is_hub_name(name):
            return str(hub_files(name, WEIGHT_FILES))
        try:
            if (path / MANIFEST).exists():
                return str(undamaged(path, weights_only=True))
            return str(newest_path(path, weights_only=True) if path.is_dir() and published(path) else path)
        except StagelineError as error:
            raise StagelineError(f"checkpoint.initial_load_path is {name!r}: {error}") from None

    chosen = decide_together(host, choose)
    if not is_remote(chosen):
        _load_exactly(pipe, chosen, name)
        return
    with open_checkpoint(chosen) as checkpoint:
        _load_exactly(pipe, checkpoint.local_model(), name)


def _load_exactly(pipe: Pipeline, path: str | Path, name: str) -> None:
    """Load weights; an error says what a user of the config can do, who cannot pass `strict=False`."""
    try:
        load_weights(pipe.model, path, cast=True)
    except StagelineError as error:
        cause = str(error)
        if cause.endswith(NOT_STRICT):
            cause = (
                f"{cause.removesuffix(NOT_STRICT)}; it must have exactly the tensors of the model (to train an adapter "
                "on a pretrained model, load that model in the function of model.name instead)"
            )
        raise StagelineError(f"checkpoint.initial_load_path is {name!r}: {cause}") from None


def check_same_run(checkpoint: Checkpoint, config: Config) -> None:
    """Raise if a checkpoint of an object store, which no run folder protects, belongs to another configuration."""
    if not is_remote(checkpoint.path):
        return
    conflicts = differences(config, from_dict(checkpoint.state["config"]), ignore=WARN | FREE)
    if conflicts:
        raise StagelineError(
            f"{checkpoint.path} belongs to a run with another configuration: {'; '.join(conflicts)}; use another "
            "checkpoint.folder, or restore that configuration to resume the run"
        )


@dataclass
class TrainingProgress:
    """The progress of a run, stored in checkpoints."""

    step: int = 0
    position: int = 0
    """Samples that were trained on, over all replicas."""
    best_loss: float = math.inf
    """The best validation loss."""
    validations_since_best: int = 0
    validation_pending: bool = False
    """Whether a signal interrupted the validation of this step."""


def job_state(setup: Setup, progress: TrainingProgress, scale: LossScale) -> dict[str, Any]:
    """Return what a checkpoint keeps besides tensors; it is the same on every rank."""
    return {
        "config": to_dict(setup.config),
        "data": setup.loader.state_dict(progress.position),
        "per_step": setup.nominal_per_step,
        "scale": scale.state(),
        "pipeline_steps": setup.pipe.steps,
        "best": progress.best_loss if math.isfinite(progress.best_loss) else 1e308,
        "since_best": progress.validations_since_best,
        "validation_owed": progress.validation_pending,
        "random": random_state(),
        "threads": torch.get_num_threads(),
        **({"adapter": setup.task.adapter_names} if setup.task.adapter_names else {}),
    }


def resume(checkpoint: Checkpoint, setup: Setup, optimizer: Optimizer, scale: LossScale) -> TrainingProgress:
    """Load weights, optimizer, loss scale, position and random numbers from a checkpoint."""
    check_model(setup.pipe, checkpoint)
    state, per_step = checkpoint.state, setup.nominal_per_step
    if state["per_step"] != per_step:
        raise StagelineError(
            f"{checkpoint.path} was trained with {state['per_step']} samples per step, but this job has "
            f"{per_step}; set training.global_batch_size to {state['per_step']}"
        )
    load_weights_of(setup.pipe, checkpoint)
    optimizer.load(read_states(setup.pipe, optimizer.parameters, checkpoint))
    if state["threads"] != torch.get_num_threads():
        setup.notes.append(
            f"the run used {state['threads']} threads per rank, but this machine uses {torch.get_num_threads()}: "
            "results may differ in their last bits; set OMP_NUM_THREADS to keep the number"
        )
    return resume_progress(checkpoint.step, state, setup, scale)


def resume_progress(step: int, state: Mapping[str, Any], setup: Setup, scale: LossScale) -> TrainingProgress:
    """Load what `job_state` returned: loss scale, position and random numbers."""
    position = setup.loader.load_state_dict(state["data"])
    scale.load(state["scale"])
    setup.pipe.steps = int(state["pipeline_steps"])
    set_random_state(state["random"])
    owed = bool(state.get("validation_owed", False))
    return TrainingProgress(step, position, float(state["best"]), int(state["since_best"]), owed)


def random_state() -> dict[str, Any]:
    """Return the states of the generators that the user's own code may draw from, as JSON data."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states of the generators."""
    torch.set_rng_state(torch.frombuffer(bytearray(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


class JobCheckpoints:
    """Saves the checkpoints of a job; an error of one process is raised on all of them."""

    def __init__(self, setup: Setup, optimizer: Optimizer, logs: Logs) -> None:
        """All processes call this together, once for each start of the job."""
        config, layout = setup.config, setup.layout
        self._setup, self._optimizer, self._logs = setup, optimizer, logs
        self._host, self._layout = setup.host, layout
        self._attempt = decide_together(setup.host, lambda: uuid.uuid4().hex)
        where = writer_number(setup.pipe)
        self._writes, (number, count) = where is not None, where or (0, 1)
        self._writer = Writer(
            checkpoint_folder(setup.folder.path, config.checkpoint.folder),
            number,
            count,
            keep=config.checkpoint.keep_latest_k,
            deadline=max(60.0, config.comm.train_timeout_seconds),
        )
        self._reported, self._blocked_seconds = -1, 0.0
        self.on_save: Callable[[int, str], object] = lambda step, path: None
        """Called on the main process with each checkpoint that is published."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, at)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of a step; all processes call this."""
        return bool(
            decide_together(
                self._host, lambda: any(path.name == step_name(step) for path in published(self._writer.folder))
            )
        )

    def save(self, step: int, state: Mapping[str, Any], *, background: bool) -> None:
        """Save a checkpoint; processes that write nothing learn here of a failure."""
        if not self._writes:
            self._on_all(lambda: None)
            return
        pipe = self._setup.pipe
        weights = own_weights(pipe) if in_first_replica(pipe) else {}
        tensors = weights, own_optimizer_state(pipe, self._optimizer.state())
        self._on_all(partial(self._write, step, *tensors, state, background=background))

    def finish(self) -> None:
        """Wait for the last checkpoint; if it failed, raise on every process."""
        self._on_all(self._writer.wait)
        self.report()
        if self._layout.main and self._setup.task.adapter_names and self._writer.last is not None:
            self._write_adapter(self._writer.last.step)

    def _write_adapter(self, step: int) -> None:
        """Write the adapter of a checkpoint as peft loads it."""
        target = self._setup.folder.path / ADAPTER
        with open_checkpoint(at_step(self._writer.folder, step)) as checkpoint:
            remove_tree(target)
            convert(checkpoint, target, format="huggingface")

    @property
    def failed(self) -> bool:
        """Whether this process failed to write a checkpoint in the background."""
        return self._writer.failed is not None

    def fail(self, process: int) -> None:
        """Raise the error of the process that failed, on all of them."""
        text = self._host.broadcast(str(self._writer.failed or ""), process)
        self._writer.wait()
        raise CheckpointError(text)

    def report(self) -> None:
        """Log the last checkpoint once it is published."""
        saved = self._writer.last
        if saved is not None and saved.step > self._reported:
            self._reported = saved.step
            self._logs.event(
                "checkpoint",
                step=saved.step,
                seconds=saved.seconds,
                bytes=saved.bytes,
                blocked=self._blocked_seconds,
            )
            if self._layout.main:
                self.on_save(saved.step, str(saved.path))

    def _write(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        optimizer_state: State,
        state: Mapping[str, Any],
        *,
        background: bool,
    ) -> None:
        self._writer.wait()
        self.report()
        started = time.perf_counter()
        layout = self._layout
        self._writer.save(
            step,
            weights,
            optimizer_state,
            state,
            assets=self._setup.task.assets,
            attempt=f"{self._attempt}-{step}",
            world={"ranks": layout.ranks, "replicas": layout.replicas, "layout": str(layout)},
            background=background,
        )
        self._blocked_seconds = time.perf_counter() - started
        if not background:
            self.report()

    def _on_all(self, action: Callable[[], None]) -> None:
        """Raise an error of the action in any process on all of them; if a rank is lost meanwhile, that comes first."""
        if self._layout.processes == 1:
            action()
            return
        error: CheckpointError | None = None
        try:
            action()
        except CheckpointError as failure:
            error = failure
        failed = np.zeros(self._layout.processes)
        failed[self._layout.rank] = float(error is not None)
        try:
            failed = self._host.all_reduce(failed)
        except StagelineError as lost:
            if error is not None:
                lost.add_note(str(error))
            raise
        if failed.any():
            text = self._host.broadcast(str(error or ""), int(failed.argmax()))
            raise error or CheckpointError(text)

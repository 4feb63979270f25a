"""The state of a pipeline in a checkpoint: which process saves which tensors, and what each of them reads.

A checkpoint has whole tensors by name, so any layout of ranks, replicas, shards and tensor parallel reads what another
one wrote.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import CheckpointError, StagelineError, nearest
from stageline.distributed.rank_host import decide_together
from stageline.runtime.pipeline import Pipeline
from stageline.tensors.sharded import local, whole
from stageline.train.checkpoint import Checkpoint, newest, open_checkpoint
from stageline.train.checkpoint.manifest import MANIFEST
from stageline.train.checkpoint.reader import Damage, inspect
from stageline.train.checkpoint.remote import Location, location
from stageline.train.checkpoint.writer import Writer
from stageline.train.optimizers import State, place_slots


def save_checkpoint(
    folder: str | Location,
    step: int,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Any = None,
    keep: int = 3,
) -> Location:
    """Save weights, buffers and optimizer state of a step in a folder of checkpoints; return the checkpoint's path.

    All processes of the pipeline call this, and share the folder, which may be in an object store (s3://…). Each writes
    its share of the tensors, and an error of one is raised on all. `state` is JSON data of your own, and `keep` the
    number of checkpoints to keep (0: all). docs/checkpoints.md describes the format.

    >>> import stageline as sl
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, ranks=2, microbatches=1)
    >>> optimizer = torch.optim.AdamW(pipe.parameters())
    >>> _ = pipe.step(torch.ones(1, 2), torch.ones(1, 2))
    >>> optimizer.step()
    >>> path = sl.save_checkpoint("checkpoints", 1, pipe, optimizer, state={"epoch": 0})
    >>> path.name, sl.load_checkpoint("checkpoints", pipe, optimizer).state
    ('step-00000001', {'epoch': 0})
    """
    host, where = pipe.runner.host, writer_number(pipe)
    attempt = decide_together(host, lambda: uuid.uuid4().hex)
    error: CheckpointError | None = None
    weights = own_weights(pipe) if in_first_replica(pipe) else {}
    states = {} if optimizer is None else own_optimizer_state(pipe, _named_state(pipe, optimizer))
    try:
        if where is not None:
            world = {"ranks": pipe.ranks, "replicas": pipe.replicas, "schedule": pipe.schedule.name}
            with Writer(folder, *where, keep=keep, deadline=max(60.0, pipe.deadline)) as writer:
                writer.save(step, weights, states, state, attempt=attempt, world=world, background=False)
    except CheckpointError as failure:
        error = failure
    failed = host.all_gather(np.array([float(error is not None)]))[..., 0]
    if failed.any():
        row, rank = np.argwhere(failed)[0]
        text = host.broadcast_to_all(str(error or ""), host.layout.rows[int(row)][int(rank)])
        raise error or CheckpointError(text)
    return location(folder) / f"step-{step:08d}"


def load_checkpoint(path: str | Location, pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> Checkpoint:
    """Load weights, buffers and optimizer state into a pipeline of any layout; return the checkpoint.

    `path` is a checkpoint, or a folder of them, of which the newest undamaged one is taken. The checkpoint's `step` and
    `state` are what was saved. All processes call this; each reads only its own part of every tensor.
    """

    def choose() -> str:
        where = location(path)
        chosen = undamaged(where) if (where / MANIFEST).exists() else newest_path(where)
        if chosen is None:
            raise StagelineError(f"{path} has no checkpoint")
        return str(chosen)

    checkpoint = open_checkpoint(decide_together(pipe.runner.host, choose))
    check_model(pipe, checkpoint)
    load_weights_of(pipe, checkpoint)
    if optimizer is not None:
        parameters = dict(pipe.named_parameters())
        states = read_states(pipe, parameters, checkpoint)
        for name, parameter in parameters.items():
            optimizer.state.pop(parameter, None)
            if name in states:
                optimizer.state[parameter] = place_slots(states[name], parameter, optimizer)
    checkpoint.close()
    return checkpoint


def _named_state(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> State:
    """The state of an optimizer by the names of its parameters."""
    state: State = {}
    for name, parameter in pipe.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is not None and not isinstance(value, Tensor | int | float | bool):
                raise StagelineError(
                    f"the optimizer's state {slot} of {name} is a {type(value).__name__}; a checkpoint can store "
                    "only tensors and numbers; save this optimizer's state yourself"
                )
            if value is not None:
                state.setdefault(name, {})[slot] = torch.as_tensor(value)
    return state


def in_first_replica(pipe: Pipeline) -> bool:
    """Whether this process is in the first replica, which saves the weights, or in a row that holds parts of it."""
    return pipe.runner.host.replica < _rows_of_replica(pipe)


def _rows_of_replica(pipe: Pipeline) -> int:
    """How many rows of the mesh hold the parts of a replica: all, if parameters are sharded over replicas."""
    layout, replicas = pipe.runner.host.layout, pipe.runner.replicas
    return layout.replicas if replicas is not None and replicas.spanned else layout.shards * layout.tensors


def writer_number(pipe: Pipeline) -> tuple[int, int] | None:
    """The number of this process among those that write, and how many do; None if it does not.

    The processes of the first replica write; with `shard_optimizer`, those of all replicas. Ranks that are threads
    share a writer.
    """
    host, layout, shards = pipe.runner.host, pipe.runner.host.layout, pipe.options.shard_optimizer
    if len(host.here) == layout.ranks and layout.replicas == 1:
        return 0, 1
    if not (shards or in_first_replica(pipe)):
        return None
    rows = layout.replicas if shards else _rows_of_replica(pipe)
    return host.replica * layout.ranks + host.here[0], rows * layout.ranks


def own_weights(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the parameters and buffers that this process saves: one process saves each, tied ones under one name.

    Processes that hold parts of the same stages call this together.
    """
    duplicates = _duplicate_names(pipe)
    weights = {
        name: {"": value}
        for name, value in pipe.state_dict().items()
        if isinstance(value, Tensor) and name not in duplicates and pipe.owns(name)
    }
    return {name: tensors[""] for name, tensors in _own_share(pipe, weights)}


def own_optimizer_state(pipe: Pipeline, state: State) -> State:
    """Return the optimizer state that this process saves, of the state of all its parameters."""
    own = {name: slots for name, slots in state.items() if slots and pipe.owns(name) and pipe.updates(name)}
    return dict(_own_share(pipe, own))


def _own_share(pipe: Pipeline, state: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors that this process saves, whole: those that hold parts of the same stages share the work.

    They gather one tensor at a time, and each keeps only its share of the bytes.
    """
    loads = [0] * _rows_of_replica(pipe)
    place = pipe.runner.host.replica % len(loads)
    for name, tensors in state.items():
        writer = loads.index(min(loads))
        loads[writer] += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        gathered = {slot: whole(tensor) for slot, tensor in tensors.items()}
        if writer == place:
            yield name, gathered


def _duplicate_names(pipe: Pipeline) -> set[str]:
    """Return the names of tied parameters after their first one."""
    first_names = {name for name, _ in pipe.model.named_parameters()}
    return {name for name, _ in pipe.model.named_parameters(remove_duplicate=False)} - first_names


def check_model(pipe: Pipeline, checkpoint: Checkpoint) -> None:
    """Raise if the checkpoint belongs to a different model, with the first name or shape that differs."""
    duplicates = _duplicate_names(pipe)
    expected = {
        name: tuple(value.shape)
        for name, value in pipe.model.state_dict().items()
        if isinstance(value, Tensor) and name not in duplicates
    }
    saved = {name: entry.shape for name, entry in checkpoint.manifest.model.items()}
    other_model = f"{checkpoint.path} is a checkpoint of another model"
    for name, shape in expected.items():
        if name not in saved:
            raise StagelineError(f"{other_model}: it has no {name!r}{nearest(name, saved)}")
        if saved[name] != shape:
            raise StagelineError(f"{other_model}: {name!r} has shape {saved[name]} there and {shape} here")
    extra = sorted(set(saved) - set(expected))
    if extra:
        raise StagelineError(f"{other_model}: it has {extra[0]!r}, which this model does not")


def load_weights_of(pipe: Pipeline, checkpoint: Checkpoint) -> None:
    """Load this process's parameters and buffers."""
    state = pipe.state_dict()
    buffers = {name: buffer for name, buffer in pipe.named_buffers() if name in state}
    # By their first names in the model, which a stage with a tied parameter may not have.
    tensors: dict[str, Tensor] = {**dict(pipe.named_parameters()), **buffers}
    values = checkpoint.read_model(list(tensors), like=tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            local(tensor).copy_(local(values[name]))


def read_states(pipe: Pipeline, parameters: Mapping[str, nn.Parameter], checkpoint: Checkpoint) -> State:
    """Return the optimizer state of those parameters that this process updates, cut as they are."""
    saved = checkpoint.manifest.optimizer
    updated = [name for name in parameters if name in saved and pipe.updates(name)]
    return checkpoint.read_optimizer(updated, like=parameters)


def newest_path(folder: Location, *, weights_only: bool = False) -> Location | None:
    """Return the newest undamaged checkpoint of a folder; None if it has none at all.

    `weights_only` leaves out the files of the optimizer, here and below.
    """
    damages: list[Damage] = []
    checkpoint = newest(folder, on_damage=damages.append, weights_only=weights_only)
    if checkpoint is None:
        return None
    for damage in damages:
        print(f"warning: {damage}; using step {checkpoint.step} instead", file=sys.stderr)
    return checkpoint.path


def undamaged(path: Location, *, weights_only: bool = False) -> Location:
    """Verify every byte of a checkpoint that was requested by name; no other one replaces it."""
    _, damages = inspect(path, weights_only=weights_only)
    if damages:
        raise StagelineError(
            f"{'; '.join(map(str, damages[:3]))}; nothing was loaded; choose another checkpoint, or set "
            "checkpoint.load_step to -1 to resume from the newest intact one"
        )
    return path

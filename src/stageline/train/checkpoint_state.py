"""From a job to its checkpoint and back: what is kept, by names, for any number of ranks and replicas."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import StagelineError, nearest
from stageline.distributed.rank_host import World
from stageline.model.build.weights import load_weights
from stageline.runtime.pipeline import Pipeline
from stageline.train.checkpoint import Checkpoint, newest, open_checkpoint, published
from stageline.train.checkpoint.manifest import MANIFEST
from stageline.train.checkpoint.reader import at_step, inspect
from stageline.train.optimizers import Optimizer, State


def find(folder: Path, step: int, world: World) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, or that of a step if it is not below 0; one process looks, all agree."""
    told = {"path": "", "error": ""}
    if 0 in world.here:
        try:
            chosen = _whole(at_step(folder, step)) if step >= 0 else _newest(folder)
            told["path"] = "" if chosen is None else str(chosen)
        except StagelineError as error:
            told["error"] = str(error)
    told = json.loads(world.broadcast(json.dumps(told), 0))
    if told["error"]:
        raise StagelineError(told["error"])
    return open_checkpoint(Path(told["path"])) if told["path"] else None


def _newest(folder: Path) -> Path | None:
    found = newest(folder, on_damage=lambda damage: print(f"warning: {damage}", file=sys.stderr))
    return None if found is None else found.path


def _whole(path: Path) -> Path:
    """The checkpoint that was asked for, every byte of it as it was written: no other one is taken in its place."""
    _, damages = inspect(path)
    if damages:
        raise StagelineError(
            f"{'; '.join(map(str, damages[:3]))}; nothing is taken from it: name another checkpoint, or leave the "
            "choice to the job, which takes the newest whole one"
        )
    return path


def begin_with(pipe: Pipeline, given: str, world: World) -> None:
    """Give the pipeline the weights of a checkpoint, of the newest whole one in a folder of them, or of safetensors."""
    told = {"path": given, "error": ""}
    if 0 in world.here:
        try:
            path: Path | None = Path(given)
            if (Path(given) / MANIFEST).exists():
                path = _whole(Path(given))
            elif Path(given).is_dir() and published(given):
                path = _newest(Path(given))
            told["path"] = str(path)
        except StagelineError as error:
            told["error"] = str(error)
    told = json.loads(world.broadcast(json.dumps(told), 0))
    if told["error"]:
        raise StagelineError(f"checkpoint.initial_load_path is {given!r}: {told['error']}")
    load_weights(pipe.model, told["path"], cast=True)


def own_weights(pipe: Pipeline) -> dict[str, Tensor]:
    """The parameters and buffers that this process saves: each is one process's, tied ones under one name."""
    once = {name for name, _ in pipe.model.named_parameters()}
    twins = {name for name, _ in pipe.model.named_parameters(remove_duplicate=False)} - once
    return {
        name: value
        for name, value in pipe.state_dict().items()
        if isinstance(value, Tensor) and name not in twins and pipe.owns(name)
    }


def own_state(pipe: Pipeline, optimizer: Optimizer) -> State:
    """The state of the optimizer that this process saves."""
    return {name: slots for name, slots in optimizer.state().items() if slots and pipe.owns(name)}


def check_model(pipe: Pipeline, found: Checkpoint) -> None:
    """Refuse a checkpoint of another model, by the first name or shape that differs."""
    twins = {name for name, _ in pipe.model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in pipe.model.named_parameters()
    }
    wanted = {
        name: tuple(value.shape)
        for name, value in pipe.model.state_dict().items()
        if isinstance(value, Tensor) and name not in twins
    }
    there = {name: held.shape for name, held in found.manifest.model.items()}
    for name, shape in wanted.items():
        if name not in there:
            raise StagelineError(
                f"{found.path} is a checkpoint of another model: it has no {name!r}{nearest(name, there)}"
            )
        if there[name] != shape:
            raise StagelineError(
                f"{found.path} is a checkpoint of another model: {name!r} has shape {there[name]} there and {shape} "
                "here"
            )
    more = sorted(set(there) - set(wanted))
    if more:
        raise StagelineError(f"{found.path} is a checkpoint of another model: this one has no {more[0]!r}")


def load(pipe: Pipeline, optimizer: Optimizer, found: Checkpoint) -> None:
    """Give this process's weights and optimizer the values of a checkpoint."""
    once = {name for name, _ in pipe.model.named_parameters()}
    own = {
        name: value
        for name, value in pipe.state_dict().items()
        if isinstance(value, Tensor) and (name in once or name in dict(pipe.named_buffers()))
    }
    values = found.read_model(list(own))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(values[name])
    known = found.manifest.optimizer
    optimizer.load(found.read_optimizer([name for name in optimizer.parameters if name in known]))


def random_state() -> dict[str, Any]:
    """The states of the generators that a user's own code may draw from, in JSON's words."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let the generators go on from such a state."""
    torch.set_rng_state(torch.frombuffer(bytearray(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002

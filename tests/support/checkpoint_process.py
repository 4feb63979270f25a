"""What processes do in the tests of checkpoints: save endlessly, die in the middle, write a share, meet a full disk."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stageline.train.checkpoint import Writer

NAMES = ("embedding.weight", "layers.0.weight", "layers.1.weight", "head.bias")


def model(step: int) -> dict[str, Tensor]:
    """The model after a step; different after every step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(17, 9, generator=generator) for name in NAMES}


def optimizer(step: int) -> dict[str, dict[str, Tensor]]:
    return {name: {"exp_avg": tensor + 1, "step": torch.tensor(float(step))} for name, tensor in model(step).items()}


def save(writer: Writer, step: int, **options: Any) -> None:
    assets = {"config.json": b'{"model_type": "test"}'}
    writer.save(step, model(step), optimizer(step), {"step": step}, assets, **options)


def say(path: str, text: object) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


def save_for_ever(folder: str, log: str, step: int) -> None:
    """Note every step that was published."""
    writer = Writer(folder, keep=2)
    while True:
        save(writer, step)
        writer.wait()
        say(log, step)
        step += 1


def die_at(folder: str, log: str, step: int, fatal: int) -> None:
    """Save one step, and be killed before a given change of the disk; note when there are not that many."""
    calls = 0

    def deadly(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    writer = Writer(folder, keep=1)
    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    save(writer, step, background=False)
    fatal = -1
    say(log, "published")
    os._exit(0)


def end_at_once(folder: str) -> None:
    """Save, and let the script end."""
    save(Writer(folder), 1)


def write_share(folder: str, log: str, number: int, count: int, step: int, deadline: float) -> None:
    """Be one of several writers."""
    share = NAMES[number::count]
    options = {"assets": {"config.json": b"{}"}, "attempt": f"attempt {step}", "background": False}
    try:
        Writer(folder, number, count, deadline=deadline).save(
            step,
            {name: tensor for name, tensor in model(step).items() if name in share},
            {name: slots for name, slots in optimizer(step).items() if name in share},
            {"step": step},
            **options,  # type: ignore[arg-type]
        )
        say(log, "done")
    except ValueError as error:
        say(log, error)
    os._exit(0)  # an interpreter that ends in order takes seconds


def meet_a_limit(folder: str, log: str, most: int) -> None:
    """Save with a limit on the size of files: the system refuses to write more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    writer = Writer(folder)
    big = {"weight": torch.ones(most)}
    try:
        writer.save(2, big)
        writer.save(3, {"weight": torch.ones(2)})
    except ValueError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        Path(log).write_text(str(error)[: most // 2])
        save(writer, 4)
        writer.close()
        os._exit(0)

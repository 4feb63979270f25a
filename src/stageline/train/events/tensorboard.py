"""The same figures for TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from stageline.common.errors import StagelineError
from stageline.train.events.figures import number_of
from stageline.train.events.metrics_file import Row

LEFT_OUT = ("step", "time")


class TensorBoard:
    """Writes every number of an event as a scalar: train/loss, train/bubble, validation/loss, checkpoint/seconds."""

    def __init__(self, folder: Path) -> None:
        """See to it that torch can write for TensorBoard; the files come with the first event."""
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise StagelineError(
                f"metrics.enable_tensorboard needs tensorboard, which cannot be imported ({error}): "
                "pip install 'stageline[tensorboard]', or leave the setting out"
            ) from None
        self._folder = folder
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """Write the numbers of an event; one that starts again at a step takes back what came after it."""
        step = row["step"]
        if self._writer is None:
            again = step + 1 if row["event"] == "start" and step > 0 else None
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=again)
        if row["event"] in ("start", "end"):
            return
        name = "train" if row["event"] == "step" else row["event"]
        now = number_of(row.get("time"))
        for key, value in row.items():
            number = number_of(value)
            if key not in LEFT_OUT and number is not None:
                self._writer.add_scalar(f"{name}/{key}", number, step, walltime=now)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

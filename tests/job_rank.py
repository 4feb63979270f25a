"""What a process of a training job runs in tests: the command, with its words. Imported once, before processes fork."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers import when they first step

import stageline.cli.train
import stageline.train.report
import stageline.train.trainer  # noqa: F401
from stageline.cli.app import run


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent computed with
    sys.exit(run(["train", *words]))


def on_a_full_disk(words: list[str], step: int) -> None:
    """The same, but the first rank cannot write tensors from the checkpoint of a step on."""
    from stageline.train.checkpoint import writer
    from stageline.train.checkpoint.tensors import write_tensors

    def refuse(path: Path, *rest: Any) -> Any:
        if int(path.parent.name[5:13]) >= step and os.environ["RANK"] == "0":
            raise OSError(28, "No space left on device")
        return write_tensors(path, *rest)

    vars(writer)["write_tensors"] = refuse
    main(words)

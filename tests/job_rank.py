"""What a process of a training job runs in tests: the command, with its words. Imported once, before processes fork."""

from __future__ import annotations

import sys

import torch
import torch._dynamo  # what optimizers import when they first step

import stageline.cli.train
import stageline.train.report
import stageline.train.trainer  # noqa: F401
from stageline.cli.app import run


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent computed with
    sys.exit(run(["train", *words]))

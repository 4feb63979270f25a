"""What a process of a training job runs in tests: the command, with its words."""

from __future__ import annotations

import sys


def main(words: list[str]) -> None:
    import torch

    from stageline.cli.app import run

    torch.set_num_threads(1)  # a forked process has none of the threads that its parent computed with
    sys.exit(run(["train", *words]))

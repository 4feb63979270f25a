"""The sample of the built-in job: how many of its lines Python's tokenizer accepts, each line alone; bits per byte.

python benchmarks/sample.py [--seeds 5] [--peer]

Trains the built-in job once per seed, on one rank and one core: for any number of ranks the results have the same
bits. "by CPU" is the processor time of the whole job. With --peer, a job on bytes (dim 128, 200 steps of 16
samples, learning rate 2e-3) trains on the same text for each seed, and the last line has the ratio of bits per byte.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
import tokenize
from pathlib import Path

from stageline.train.config.config import Config
from stageline.train.events import read_metrics
from stageline.train.run_folder import METRICS, SAMPLE
from stageline.train.trainer import Trainer

PEER = (
    "model.tokenizer_path=bytes", "model.dim=128", "training.steps=200", "training.local_batch_size=16",
    "optimizer.lr=2e-3", "validation.freq=200",
)  # fmt: skip
VALIDATE_ALL = ("validation.freq=800", "validation.steps=1000000")  # after the last step, on all validation data


def is_accepted(line: str) -> bool:
    try:
        list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return True


def train(seed: int, *settings: str) -> tuple[list[str], float]:
    """Return the lines of the sample and the bits per byte of the last validation."""
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="stageline-sample-") as name:
        folder = Path(name, "run")
        options = [f"job.dump_folder={folder}", f"training.seed={seed}", "parallelism.pipeline_parallel_degree=1"]
        Trainer(Config.read(None, *options, "checkpoint.enable=false", *VALIDATE_ALL, *settings)).run()
        text = (folder / SAMPLE).read_text(encoding="utf-8")
        validations = read_metrics(folder / METRICS).of("validation")
    lines = [line for line in text.split("\n") if line.strip()]
    accepted, bits = sum(map(is_accepted, lines)), float(validations[-1]["bits_per_byte"])
    print(
        f"seed {seed}: {accepted} of {len(lines)} lines accepted, {bits:.3f} bits per byte, "
        f"{time.process_time() - started:.0f} s by CPU",
        file=sys.stderr,
    )
    return lines, bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # one core: threads that wait for each other would count
    lines: list[str] = []
    bits, peer_bits = [], []
    for seed in range(arguments.seeds):
        of_seed, value = train(seed)
        lines += of_seed
        bits.append(value)
        if arguments.peer:
            peer_bits.append(train(seed, *PEER)[1])
    share = sum(map(is_accepted, lines)) / len(lines)
    print(f"{share:.0%} of {len(lines)} lines accepted, {statistics.mean(bits):.3f} bits per byte")
    if peer_bits:
        print(f"{statistics.mean(bits) / statistics.mean(peer_bits):.2f} times the bits per byte of the job on bytes")


if __name__ == "__main__":
    main()

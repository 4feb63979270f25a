"""Ctrl-C at random moments of the first seconds: no traceback, and the process exits soon.

python benchmarks/interrupts.py [--trials 20] [--within 10] [--limit 2] [--seed 0] [--json] [-- WORDS OF THE COMMAND]

Every trial starts the command in an empty folder (`stageline train` by default), sends it SIGINT at a random moment,
and measures the time until the process has exited. Before the first step is finished it exits at once with code 130 and
one line; later it finishes the step, saves, and exits with 0. The first tenth of a second is excluded, because Python
itself handles interrupts while it starts.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after which a process that has not exited is killed."""


def command(words: list[str]) -> list[str]:
    script = Path(sys.executable).with_name("stageline")
    return [str(script), *words] if script.exists() else [sys.executable, "-m", "stageline", *words]


def interrupt(words: list[str], moment: float) -> dict[str, Any]:
    """Start the command, interrupt it, and return how it exited."""
    with tempfile.TemporaryDirectory(prefix="stageline-interrupt-") as folder:
        output = Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command(words), cwd=folder, stdout=file, stderr=subprocess.PIPE)
        time.sleep(moment)
        ended_before = process.poll() is not None
        sent = time.perf_counter()
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        seconds = time.perf_counter() - sent
        text = output.read_text(errors="replace") + errors.decode(errors="replace")
        return {
            "moment": moment,
            "seconds": seconds,
            "code": process.returncode,
            "ended before": ended_before,
            "traceback": "Traceback" in text or "Exception ignored" in text,
            "said": errors.decode(errors="replace").strip().splitlines(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--within", type=float, default=10.0, help="the latest moment, in seconds")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds in which it must end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*", default=["train"])
    options = parser.parse_args()
    chance = random.Random(options.seed)
    trials = []
    for _ in range(options.trials):
        trial = interrupt(options.words, chance.uniform(0.1, options.within))
        trials.append(trial)
        if not options.json:
            mark = "TRACEBACK" if trial["traceback"] else "ended before" if trial["ended before"] else ""
            last = trial["said"][-1] if trial["said"] else ""
            print(
                f"at {trial['moment']:5.2f} s: ended after {trial['seconds']:.2f} s with {trial['code']} {mark} {last}",
                flush=True,
            )
    seconds = [trial["seconds"] for trial in trials]
    summary = {
        "trials": len(trials),
        "tracebacks": sum(trial["traceback"] for trial in trials),
        "late": sum(value > options.limit for value in seconds),
        "median": statistics.median(seconds),
        "longest": max(seconds),
    }
    if options.json:
        print(json.dumps({**summary, "each": trials}))
    else:
        print(
            f"{summary['tracebacks']} of {summary['trials']} showed a traceback, {summary['late']} took more than "
            f"{options.limit:g} s; median {summary['median']:.2f} s, longest {summary['longest']:.2f} s"
        )
    sys.exit(1 if summary["tracebacks"] or summary["late"] else 0)


if __name__ == "__main__":
    main()

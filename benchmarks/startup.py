"""The time of `import stageline` and of each command, compared with importing numpy and torch alone.

python benchmarks/startup.py [--repeats 7]

Every number is the median of fresh processes, run in turns, measured in this run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

STAGELINE = [sys.executable, "-m", "stageline"]
CASES: dict[str, list[str]] = {
    "python alone": [sys.executable, "-c", "pass"],
    "import numpy": [sys.executable, "-c", "import numpy"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import stageline": [sys.executable, "-c", "import stageline"],
    "stageline families": [*STAGELINE, "families"],
    "stageline show zb-v -p 4 -m 8": [*STAGELINE, "show", "zb-v", "-p", "4", "-m", "8"],
    "stageline verify zb-v -p 4 -m 8": [*STAGELINE, "verify", "zb-v", "-p", "4", "-m", "8"],
    "stageline simulate zb-v -p 4 -m 8": [*STAGELINE, "simulate", "zb-v", "-p", "4", "-m", "8"],
    "stageline compare -p 8 -m 32": [*STAGELINE, "compare", "-p", "8", "-m", "32"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="processes per case (default 7)")
    repeats = parser.parse_args().repeats
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, command in CASES.items():
            taken[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{'median seconds of ' + str(repeats) + ' processes':36} {'':>7}   share of import torch")
    for name, median in medians.items():
        print(f"{name:36} {median:7.3f}   {median / medians['import torch']:.2f}")


if __name__ == "__main__":
    main()

"""Public helpers for tests: ranks as real processes, the same step in one process, transports put to the test."""

from stageline.testing.conformance import FaultyTransport, exercise
from stageline.testing.ranks import run_ranks
from stageline.testing.reference import Difference, assert_same_bits, differences, one_process_step

__all__ = [
    "Difference",
    "FaultyTransport",
    "assert_same_bits",
    "differences",
    "exercise",
    "one_process_step",
    "run_ranks",
]

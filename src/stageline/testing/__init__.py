"""Public helpers for tests: ranks as real processes, the same step in one process, the comparison bit by bit."""

from stageline.testing.ranks import run_ranks
from stageline.testing.reference import Difference, assert_same_bits, differences, one_process_step

__all__ = ["Difference", "assert_same_bits", "differences", "one_process_step", "run_ranks"]

"""Public helpers for tests: the same step in one process, and the comparison bit by bit. Needs torch."""

from stageline.testing.reference import Difference, assert_same_bits, differences, one_process_step

__all__ = ["Difference", "assert_same_bits", "differences", "one_process_step"]

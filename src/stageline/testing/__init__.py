"""Public helpers for tests: ranks as processes, the step of one process, transports put to the test, faults, sleeps."""

from stageline.testing.conformance import FaultyTransport, exercise
from stageline.testing.faults import FaultyStage
from stageline.testing.nursery import Child, Nursery
from stageline.testing.ranks import run_ranks
from stageline.testing.reference import Difference, assert_same_bits, differences, one_process_step
from stageline.testing.sleep import SleepStage, Slept

__all__ = [
    "Child",
    "Difference",
    "FaultyStage",
    "FaultyTransport",
    "Nursery",
    "SleepStage",
    "Slept",
    "assert_same_bits",
    "differences",
    "exercise",
    "one_process_step",
    "run_ranks",
]

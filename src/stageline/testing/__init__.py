"""Public test helpers: run ranks in a test, compare bits with one process, exercise transports, inject faults.

`ranks` runs a function on several processes, `fork_server` starts processes that a test may kill, `conformance` tests a
transport, `faults` and `sleep` are stages that fail and stages of known duration. Nothing here needs pytest, and no
other package of Stageline imports this one.
"""

from stageline.runtime.reference import Difference, assert_same_bits, differences, one_process_step
from stageline.testing.conformance import FaultyTransport, exercise
from stageline.testing.faults import FaultyStage
from stageline.testing.fork_server import Child, ForkServer
from stageline.testing.ranks import run_ranks
from stageline.testing.sleep import SleepStage, Slept

Nursery = ForkServer
"""The former name of `ForkServer`."""

__all__ = [
    "Child",
    "Difference",
    "FaultyStage",
    "FaultyTransport",
    "ForkServer",
    "Nursery",
    "SleepStage",
    "Slept",
    "assert_same_bits",
    "differences",
    "exercise",
    "one_process_step",
    "run_ranks",
]

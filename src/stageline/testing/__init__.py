"""Public test helpers: run ranks in a test, compare bits with one process, exercise transports, inject faults.

`processes` runs ranks and tests launchers; `conformance` tests a transport; `stages` has stages
that fail and stages of known duration. Nothing here needs pytest, and no
other package of Stageline imports this one.
"""

from stageline.distributed.launchers.fork_server import Child, ForkServer
from stageline.runtime.reference import Difference, assert_same_bits, differences, one_process_step
from stageline.testing.conformance import FaultyTransport, exercise
from stageline.testing.processes import exercise_launcher, run_ranks, shared_gpu
from stageline.testing.stages import FaultyStage, SleepStage, Slept

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
    "exercise_launcher",
    "one_process_step",
    "run_ranks",
    "shared_gpu",
]

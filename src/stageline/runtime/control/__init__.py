"""The control channel between ranks that are processes: who lives, who failed first, and what it was doing.

Messages of a failure must not travel the way that failed. So beside the ranks runs a small process, the referee; each
rank has one connection to it, and a thread that beats. See `docs/faults.md`. Nothing here imports torch.
"""

from __future__ import annotations

from stageline.runtime.control.client import Control
from stageline.runtime.control.judge import EVERYONE
from stageline.runtime.control.launch import Address, ControlError, share_by_store, start_referee
from stageline.runtime.control.verdict import Failure, Standing, Verdict

__all__ = [
    "EVERYONE",
    "Address",
    "Control",
    "ControlError",
    "Failure",
    "Standing",
    "Verdict",
    "share_by_store",
    "start_referee",
]

"""The failure monitor: a small process beside the ranks that hears who is alive and tells all ranks who failed first.

Read in order: `verdict` (what ranks are told), `blame` (the rules, on a clock that is passed in, without sockets),
`server`, `client` (a rank's end), `launch`, `signals`.
"""

from __future__ import annotations

from stageline.common.errors import ControlError
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.client import Control
from stageline.faults.monitor.launch import Address, share_by_store, start_referee
from stageline.faults.monitor.verdict import Failure, Standing, Verdict

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

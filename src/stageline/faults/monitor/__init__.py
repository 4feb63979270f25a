"""The failure monitor: a small process beside the ranks that watches them and tells all of them which one failed first.

Read in order: `verdict` (what ranks report and are told), `blame` (the rules, without sockets or clocks), `server`,
`client` (a rank's end) with `channel` and `connection`. What `server` imports must need the standard library alone.
"""

from __future__ import annotations

from stageline.common.errors import ControlError
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.client import MonitorClient
from stageline.faults.monitor.connection import Address, share_by_store, start_monitor
from stageline.faults.monitor.verdict import Failure, RankSnapshot, Verdict

__all__ = [
    "EVERYONE",
    "Address",
    "ControlError",
    "Failure",
    "MonitorClient",
    "RankSnapshot",
    "Verdict",
    "share_by_store",
    "start_monitor",
]

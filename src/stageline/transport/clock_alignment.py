"""Clock alignment: `time.perf_counter` of two hosts starts at unrelated moments, so times are converted to one clock.

A rank asks the rank above it in a tree for the time, several times, and uses the answer that came back fastest:
whenever the other clock was read in between, the reading is off by at most half of the round trip.

    rank       t0 ──────────────────────────────▶ t3        offset = ((t1 − t0) + (t2 − t3)) / 2
    above              t1 ──────────▶ t2                    uncertainty = ((t3 − t0) − (t2 − t1)) / 2
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRIFT = 5e-5
"""How many seconds two clocks may drift apart per second: the tolerance of free-running crystals."""

TRIPS = 8
"""How many round trips are made: the first may wait for the other rank, and some are disturbed."""


class Reading(NamedTuple):
    """What to add to a clock to get another, and by how much that may be wrong."""

    offset: float
    uncertainty: float


def offset_of(sent: float, received: float, answered: float, back: float) -> Reading:
    """The offset of the other clock, by one round trip.

    >>> offset_of(sent=10.0, received=110.25, answered=110.5, back=10.75)
    Reading(offset=100.0, uncertainty=0.25)
    """
    return Reading(((received - sent) + (answered - back)) / 2, max(0.0, ((back - sent) - (answered - received)) / 2))


@dataclass(frozen=True)
class Alignment:
    """The offsets between the clocks of a pipeline's ranks.

    >>> clocks = Alignment((0.0, 100.0, 7.0), (0.0, 1e-4, 2e-4), moment=50.0)
    >>> clocks.uncertainty(50.0), clocks.uncertainty(150.0)
    (0.0003, 0.0103)
    >>> Alignment((0.0, 0.0), (0.0, 0.0), moment=50.0).uncertainty(150.0)
    0.0
    """

    offsets: tuple[float, ...]
    """For each rank, what to add to its `time.perf_counter` to get that of the first."""
    uncertainties: tuple[float, ...]
    """For each rank, by how many seconds that may be wrong; 0 if the rank reads the same clock as the first."""
    moment: float
    """When this was measured, by the clock of this rank."""
    hosts: tuple[str, ...] = ()
    """The address of each rank's machine; empty if they are not known."""

    @property
    def exact(self) -> bool:
        """Whether all ranks read one clock."""
        return not any(self.uncertainties)

    def uncertainty(self, now: float) -> float:
        """Upper bound on the clock error between two ranks, in seconds, at this moment of this rank's clock."""
        if self.exact:
            return 0.0
        *_, second, first = sorted((0.0, *self.uncertainties))
        return float(round(first + second + 2 * DRIFT * max(0.0, now - self.moment), 12))


def aligned(rows: NDArray[np.float64], moment: float, hosts: tuple[str, ...] = ()) -> Alignment:
    """The alignment by the rows of all ranks: offset, uncertainty, and a number of the clock they read.

    Ranks whose clock has the number of the first one's, and that measured no difference, read the same clock.
    """
    offsets, uncertainties = [], []
    for offset, uncertainty, clock in rows.tolist():
        same = clock == rows[0, 2] and clock != 0.0 and abs(offset) <= uncertainty
        offsets.append(0.0 if same else offset)
        uncertainties.append(0.0 if same else uncertainty)
    return Alignment(tuple(offsets), tuple(uncertainties), moment, hosts)


def clock_number() -> float:
    """A number that processes with one clock have in common: the running kernel and its time namespace; 0 if unknown.

    >>> clock_number() == clock_number()
    True
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        clock = time.get_clock_info("perf_counter").implementation
        name = f"{boot.strip()} {os.readlink('/proc/self/ns/time')} {clock}"
        return float(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big"))
    return 0.0

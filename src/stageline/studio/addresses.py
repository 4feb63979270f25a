"""A synthesized schedule as a part of an address, because no other studio has it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from functools import lru_cache
from typing import Any

from stageline.common.checked_json import parse_json
from stageline.common.errors import JsonError, StagelineError
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify

MAX_CHARACTERS = 8000
"""A longer schedule is not shared: not every program passes on longer addresses."""
MAX_TEXT = 4 * 2**20
"""Bytes that an address may expand to, which is more than the largest schedule of the page."""

_ACTION = re.compile(r"([0-9]+[FBIW])([0-9]*)")


def pack_schedule(schedule: Schedule) -> str:
    """Return a schedule as letters for an address; empty if there would be too many.

    Most programs run the microbatches of a stage in order. So a microbatch is written only if it is not the next one
    of its stage and kind; what remains repeats itself, and compresses well.
    """
    data = json.loads("".join(schedule_lines(schedule)))
    data["programs"] = [" ".join(_without_order(program)) for program in data["programs"]]
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    text = base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return text if len(text) <= MAX_CHARACTERS else ""


@lru_cache(maxsize=8)
def unpack_schedule(text: str) -> Schedule:
    """Return the schedule that `pack_schedule` wrote, and verify it: an address may come from anywhere.

    >>> from stageline.schedules.registry import schedule
    >>> unpack_schedule(pack_schedule(schedule("zb-v", 4, 8))) == schedule("zb-v", 4, 8)
    True
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        plain = zlib.decompressobj().decompress(packed, MAX_TEXT).decode()
        data = parse_json(plain)
        if not isinstance(data, dict) or not isinstance(data.get("programs"), list):
            raise JsonError("it has no programs")
        schedule = schedule_from(data | {"programs": [_with_order(program) for program in data["programs"]]})
        verify(schedule)
    except (ValueError, zlib.error, StagelineError) as error:
        reason = str(error) if isinstance(error, StagelineError) else "the address is incomplete"
        raise StagelineError(f"cannot read the synthesized schedule of this address: {reason}") from None
    return schedule


def _without_order(program: list[str]) -> list[str]:
    """Leave out each microbatch that is the next one of its stage and kind.

    >>> _without_order(["0F0", "0F1", "0B0", "0F3", "(0F4;0B1)OVERLAP_F_B"])
    ['0F', '0F', '0B', '0F3', '(0F;0B)OVERLAP_F_B']
    """
    following: Counter[str] = Counter()

    def shorten(match: re.Match[str]) -> str:
        action, microbatch = match.groups()
        is_next = microbatch == str(following[action])
        following[action] = int(microbatch) + 1
        return action if is_next else match[0]

    return [_ACTION.sub(shorten, entry) for entry in program]


def _with_order(program: Any) -> list[str]:
    """Undo `_without_order`."""
    following: Counter[str] = Counter()

    def complete(match: re.Match[str]) -> str:
        action, microbatch = match.groups()
        number = int(microbatch[:12]) if microbatch else following[action]
        following[action] = number + 1
        return f"{action}{number}"

    return [_ACTION.sub(complete, entry) for entry in str(program).split()]

"""From the flight records of a job to what happened: who failed, who waited for whom, which messages were on the way.

A killed process writes no record. What it did last is then read from the others': what it sent them, what they sent it,
and what the referee had heard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stageline.faults.flight_recorder import Passed, Record
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import Standing, Verdict, place

MOST_CHAINS = 4
MOST_MESSAGES = 3
"""Messages of a channel that are named; the others are counted."""


@dataclass(frozen=True)
class Row:
    """One rank, as far as it is known. Times are seconds before the last record was written."""

    rank: int
    wrote: bool
    state: str
    last: str
    last_end: float | None
    doing: str
    waits: int | None
    awaited: str
    waited: float | None
    silence: float | None


@dataclass(frozen=True)
class Underway:
    """Messages of a channel that were sent, and that the receiver had not taken; `known` if its record says so."""

    source: int
    target: int
    traffic: str
    count: int
    messages: tuple[str, ...]
    bytes: int
    known: bool


@dataclass(frozen=True)
class Diagnosis:
    """What the records say together."""

    job: str
    ranks: int
    schedule: Mapping[str, Any]
    verdict: Verdict | None
    others: tuple[str, ...]
    """Verdicts that some ranks had and the most did not."""
    rows: tuple[Row, ...]
    chains: tuple[str, ...]
    underway: tuple[Underway, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        said = None if self.verdict is None else {**self.verdict.to_json(), "sentence": str(self.verdict)}
        return {**asdict(self), "schedule": dict(self.schedule), "verdict": said}


def diagnose(records: Mapping[int, Record]) -> Diagnosis:
    """Read the records of one job together."""
    first = next(iter(records.values()))
    end = max(record.written for record in records.values())
    told = Counter(record.verdict for record in records.values() if record.verdict is not None)
    sentences = Counter(str(verdict) for verdict in told.elements())
    verdict = None
    if told:
        usual = sentences.most_common(1)[0][0]
        verdict = next(each for each in told if str(each) == usual)
        others = tuple(sorted(sentence for sentence in sentences if sentence != usual))
    else:
        others = ()
    heard = {} if verdict is None else {each.rank: each for each in verdict.ranks}
    rows = tuple(_row(rank, records.get(rank), heard.get(rank), verdict, end) for rank in range(first.ranks))
    chains = _chains(rows, verdict)
    return Diagnosis(
        job=first.job,
        ranks=first.ranks,
        schedule=next((record.schedule for record in records.values() if record.schedule), {}),
        verdict=verdict,
        others=others,
        rows=rows,
        chains=chains,
        underway=_underway(records),
        notes=_notes(records, verdict, end),
        advice=_advice(rows, verdict, chains, records),
    )


def _row(rank: int, record: Record | None, heard: Standing | None, verdict: Verdict | None, end: float) -> Row:
    silence = None if heard is None else heard.silence
    state = "unknown" if heard is None else heard.state
    if verdict is not None and verdict.culprit == rank:
        state = verdict.kind
    if record is None:
        doing = "" if heard is None else heard.doing
        return Row(rank, False, state, "", None, doing, None if heard is None else heard.waits, "", None, silence)
    last = record.actions[-1] if record.actions else None
    return Row(
        rank,
        True,
        "here" if state == "unknown" else state,
        "" if last is None else str(last),
        None if last is None else round(end - last.end, 3),
        record.doing,
        record.waits,
        record.awaited,
        None if record.since is None else round(record.written - record.since, 3),
        silence,
    )


def _chains(rows: tuple[Row, ...], verdict: Verdict | None) -> tuple[str, ...]:
    """Who waits for whom, each chain from a rank that nobody waits for to one that waits for nobody."""
    culprit = None if verdict is None else verdict.culprit
    waits: dict[int, int] = {}
    for row in rows:
        if row.waits is not None and row.rank != culprit:
            target = row.waits
            if target == EVERYONE:
                busy = [each.rank for each in rows if each.waits is None and each.rank != row.rank]
                target = culprit if culprit is not None else (busy[0] if busy else row.rank)
            if target != row.rank and 0 <= target < len(rows):
                waits[row.rank] = target
    starts = [rank for rank in waits if rank not in waits.values()] or sorted(waits)[:1]
    chains: list[str] = []
    for start in starts:
        path = [start]
        while path[-1] in waits and waits[path[-1]] not in path:
            path.append(waits[path[-1]])
        parts = [_wait(rows[rank]) for rank in path[:-1]]
        if path[-1] in waits:
            parts += [_wait(rows[path[-1]]), f"rank {waits[path[-1]]} again: a circle"]
        else:
            parts.append(_last_link(rows[path[-1]], verdict))
        chains.append(" → ".join(parts))
    # Ranks in a circle that others wait for lie on no chain of their own; every start leads into it.
    return tuple(sorted(chains, key=len, reverse=True)[:MOST_CHAINS])


def _wait(row: Row) -> str:
    who = "all ranks" if row.waits == EVERYONE else f"rank {row.waits}"
    since = "" if row.waited is None else f" {row.waited:.1f} s"
    what = f"{row.awaited} of {who}" if row.awaited and not row.awaited.endswith(who) else row.awaited or who
    return f"rank {row.rank} waits{since} for {what}"


def _last_link(row: Row, verdict: Verdict | None) -> str:
    if verdict is not None and verdict.culprit == row.rank:
        kinds = {"died": "died", "frozen": "froze", "raised": "failed", "absent": "never started", "left": "left"}
        return f"rank {row.rank} {kinds[verdict.kind]}"
    return f"rank {row.rank} was {place(row.doing)}" if row.doing else f"rank {row.rank}, which waits for nobody"


def _underway(records: Mapping[int, Record]) -> tuple[Underway, ...]:
    """Channels are in order: what was sent after the last message that was received had not been taken."""
    found: list[Underway] = []
    for source, record in records.items():
        channels: dict[tuple[int, str], list[Passed]] = {}
        for message in record.sent:
            channels.setdefault((message.peer, message.traffic), []).append(message)
        for (target, traffic), messages in sorted(channels.items()):
            receiver = records.get(target)
            if receiver is not None:
                taken = [each for each in receiver.received if (each.peer, each.traffic) == (source, traffic)]
                names = [_name(each) for each in messages]
                if taken and _name(taken[-1]) in names:
                    messages = messages[names.index(_name(taken[-1])) + 1 :]
            else:
                messages = messages[-1:]
            if messages:
                named = tuple(str(each) for each in messages[:MOST_MESSAGES])
                size = sum(each.bytes for each in messages)
                found.append(Underway(source, target, traffic, len(messages), named, size, receiver is not None))
    return tuple(found)


def _name(message: Passed) -> tuple[int, int, int]:
    return (message.step, message.stage, message.microbatch)


def _notes(records: Mapping[int, Record], verdict: Verdict | None, end: float) -> tuple[str, ...]:
    """What else is known: who wrote nothing, and what it did last as the others saw it."""
    ranks = next(iter(records.values())).ranks
    notes = [
        f"rank {rank} had no control channel: {record.control_lost}"
        for rank, record in records.items()
        if record.control_lost
    ]
    missing = [rank for rank in range(ranks) if rank not in records]
    for rank in missing[:8]:
        killed = verdict is not None and verdict.culprit == rank and verdict.kind == "died"
        why = "a killed process cannot" if killed else "or it is not among these files"
        seen = [
            (
                message.time,
                f"the last that arrived of it is {message}, at rank {other}, {end - message.time:.1f} s before",
            )
            for other, record in records.items()
            for message in record.received
            if message.peer == rank
        ]
        notes.append(f"rank {rank} wrote no record ({why})" + (f"; {max(seen)[1]}" if seen else ""))
    if len(missing) > 8:
        notes.append(f"and {len(missing) - 8} more ranks wrote no record")
    return tuple(notes)


def _advice(
    rows: tuple[Row, ...], verdict: Verdict | None, chains: tuple[str, ...], records: Mapping[int, Record]
) -> tuple[str, ...]:
    """What to do next."""
    if verdict is None:
        silent = [row.rank for row in rows if not row.wrote]
        found = ["no record names a culprit: the control channel was lost, or the ranks were ended from outside"]
        if any("a circle" in chain for chain in chains):
            found.append("the ranks wait in a circle: run `stageline verify` on the schedule")
        if silent:
            found.append(f"begin with the ranks that wrote nothing: {', '.join(map(str, silent[:8]))}")
        return tuple(found)
    rank, place = verdict.culprit, verdict.where or "its machine"
    record = records.get(rank)
    if record is not None:
        place = f"pid {record.pid} on {record.host}"
    return {
        "died": (
            f"look at the end of rank {rank}'s own output for a crash in native code, and at its exit code",
            f"ask the machine whether it ended the process ({place}) for its memory: dmesg | grep -i 'killed process'",
        ),
        "frozen": (
            f"if it still lives, see where it hangs: py-spy dump --pid PID ({place}); a stopped one shows T in ps",
            "one long call that holds Python's lock stops the heartbeat too: if that is it, give a larger deadline=",
            "if its machine or the network between is gone, every rank of that machine is silent",
        ),
        "raised": (
            f"the traceback of rank {rank} is the first cause; errors on the other ranks follow from it",
            "call zero_grad() before the next step, if the script goes on",
        ),
        "absent": (
            f"look whether rank {rank} was started at all, and at the beginning of its output",
            "if it only starts slowly, give a larger start-up deadline",
        ),
        "left": (
            f"see why the script of rank {rank} ended: {verdict.text or 'it said nothing'}",
            "all ranks must run the same number of steps: do they read the same amount of data?",
        ),
    }[verdict.kind]

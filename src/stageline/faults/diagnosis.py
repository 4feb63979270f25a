"""The diagnosis of a failed job from its flight records: who failed, who waited for whom, lost messages.

A killed process writes no record. What it did last follows from the records of the others: what it sent them, what they
sent it, and what the failure monitor knew of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stageline.faults.flight_recorder import FlightRecord, PassedMessage
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import RankSnapshot, Verdict, place_in_words

MAX_CHAINS = 4
MAX_MESSAGES = 3
"""How many messages of a channel are named; the others are counted."""


@dataclass(frozen=True)
class Row:
    """What is known about one rank. Times are in seconds before the last record was written."""

    rank: int
    wrote: bool
    state: str
    last: str = ""
    last_end: float | None = None
    doing: str = ""
    waits: int | None = None
    awaited: str = ""
    waited: float | None = None
    silence: float | None = None


@dataclass(frozen=True)
class UndeliveredMessages:
    """Messages of a channel that were sent and not received; `known` if the receiver wrote a record."""

    source: int
    target: int
    traffic: str
    count: int
    messages: tuple[str, ...]
    bytes: int
    known: bool


@dataclass(frozen=True)
class Diagnosis:
    """What all records say together."""

    job: str
    ranks: int
    schedule: Mapping[str, Any]
    verdict: Verdict | None
    others: tuple[str, ...]
    """Verdicts of a minority of the ranks."""
    rows: tuple[Row, ...]
    chains: tuple[str, ...]
    underway: tuple[UndeliveredMessages, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        verdict = None if self.verdict is None else {**self.verdict.to_json(), "sentence": str(self.verdict)}
        return {**asdict(self), "schedule": dict(self.schedule), "verdict": verdict}


def diagnose(records: Mapping[int, FlightRecord]) -> Diagnosis:
    """Combine the records of one job."""
    first = next(iter(records.values()))
    end = max(record.written for record in records.values())
    verdict, others = _majority([record.verdict for record in records.values() if record.verdict is not None])
    snapshots = {} if verdict is None else {snapshot.rank: snapshot for snapshot in verdict.ranks}
    rows = tuple(_row(rank, records.get(rank), snapshots.get(rank), verdict, end) for rank in range(first.ranks))
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


def _majority(verdicts: list[Verdict]) -> tuple[Verdict | None, tuple[str, ...]]:
    """Return the verdict of most ranks, and what the others were told instead."""
    if not verdicts:
        return None, ()
    sentences = Counter(map(str, verdicts))
    usual = sentences.most_common(1)[0][0]
    return next(verdict for verdict in verdicts if str(verdict) == usual), tuple(sorted(set(sentences) - {usual}))


def _row(
    rank: int, record: FlightRecord | None, snapshot: RankSnapshot | None, verdict: Verdict | None, end: float
) -> Row:
    silence = None if snapshot is None else snapshot.silence
    state = "unknown" if snapshot is None else snapshot.state
    if verdict is not None and verdict.culprit == rank:
        state = verdict.kind
    if record is None:
        doing, waits = ("", None) if snapshot is None else (snapshot.doing, snapshot.waits)
        return Row(rank, False, state, doing=doing, waits=waits, silence=silence)
    last = record.actions[-1] if record.actions else None
    return Row(
        rank,
        True,
        "here" if state == "unknown" else state,
        last="" if last is None else str(last),
        last_end=None if last is None else round(end - last.end, 3),
        doing=record.doing,
        waits=record.waits,
        awaited=record.awaited,
        waited=None if record.since is None else round(record.written - record.since, 3),
        silence=silence,
    )


def _chains(rows: tuple[Row, ...], verdict: Verdict | None) -> tuple[str, ...]:
    """Return who waits for whom: chains from a rank that nobody waits for to one that waits for nobody."""
    culprit = None if verdict is None else verdict.culprit
    waits: dict[int, int] = {}
    for row in rows:
        if row.waits is not None and row.rank != culprit:
            target = row.waits
            if target == EVERYONE:
                busy = [other.rank for other in rows if other.waits is None and other.rank != row.rank]
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
            parts += [_wait(rows[path[-1]]), f"rank {waits[path[-1]]} again: a cycle"]
        else:
            parts.append(_last_link(rows[path[-1]], verdict))
        chains.append(" → ".join(parts))
    return tuple(sorted(chains, key=len, reverse=True)[:MAX_CHAINS])


def _wait(row: Row) -> str:
    who = "all ranks" if row.waits == EVERYONE else f"rank {row.waits}"
    since = "" if row.waited is None else f" {row.waited:.1f} s"
    what = f"{row.awaited} of {who}" if row.awaited and "rank" not in row.awaited else row.awaited or who
    return f"rank {row.rank} waits{since} for {what}"


def _last_link(row: Row, verdict: Verdict | None) -> str:
    if verdict is not None and verdict.culprit == row.rank:
        kinds = {"died": "died", "frozen": "froze", "raised": "failed", "absent": "never started", "left": "left"}
        return f"rank {row.rank} {kinds[verdict.kind]}"
    doing = f" was {place_in_words(row.doing)}" if row.doing else ", which waits for nobody"
    return f"rank {row.rank}{doing}"


def _underway(records: Mapping[int, FlightRecord]) -> tuple[UndeliveredMessages, ...]:
    """Return the messages that were sent after the last one received: channels keep their order."""
    underway: list[UndeliveredMessages] = []
    for source, record in records.items():
        channels: dict[tuple[int, str], list[PassedMessage]] = {}
        for message in record.sent:
            channels.setdefault((message.peer, message.traffic), []).append(message)
        for (target, traffic), messages in sorted(channels.items()):
            receiver = records.get(target)
            if receiver is not None:
                received = [item for item in receiver.received if (item.peer, item.traffic) == (source, traffic)]
                keys = [_key(message) for message in messages]
                if received and _key(received[-1]) in keys:
                    messages = messages[keys.index(_key(received[-1])) + 1 :]
            else:
                messages = messages[-1:]
            if messages:
                names = tuple(map(str, messages[:MAX_MESSAGES]))
                size = sum(message.bytes for message in messages)
                underway.append(
                    UndeliveredMessages(source, target, traffic, len(messages), names, size, receiver is not None)
                )
    return tuple(underway)


def _key(message: PassedMessage) -> tuple[int, int, int]:
    return (message.step, message.stage, message.microbatch)


def _notes(records: Mapping[int, FlightRecord], verdict: Verdict | None, end: float) -> tuple[str, ...]:
    """Return which ranks wrote nothing, and what the others last received from them."""
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
                f"the last message received from it is {message}, at rank {other}, {end - message.time:.1f} s before",
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
    rows: tuple[Row, ...], verdict: Verdict | None, chains: tuple[str, ...], records: Mapping[int, FlightRecord]
) -> tuple[str, ...]:
    """Return what to do next."""
    if verdict is None:
        silent = [row.rank for row in rows if not row.wrote]
        advice = [
            "no record names the rank that failed: the control channel was lost, or the ranks were killed from outside"
        ]
        if any("a cycle" in chain for chain in chains):
            advice.append("the ranks wait in a cycle: run `stageline verify` on the schedule")
        if silent:
            advice.append(f"start with the ranks that wrote no record: {', '.join(map(str, silent[:8]))}")
        return tuple(advice)
    rank, place = verdict.culprit, verdict.where or "its machine"
    record = records.get(rank)
    if record is not None:
        place = f"pid {record.pid} on {record.host}"
    return {
        "died": (
            f"look at the end of rank {rank}'s own output for a crash in native code, and at its exit code",
            f"check whether the kernel killed the process ({place}) because it ran out of memory: dmesg | grep -i "
            "'killed process'",
        ),
        "frozen": (
            f"if it is still alive, see where it hangs: py-spy dump --pid PID ({place}); a stopped one shows T in ps",
            "a long call that holds the GIL also stops the heartbeat; if that is the cause, increase deadline=",
            "if its machine or the network is down, all ranks of that machine are silent",
        ),
        "raised": (
            f"the traceback of rank {rank} is the root cause; errors on the other ranks follow from it",
            "call zero_grad() before the next step, if the script continues",
        ),
        "absent": (
            f"check whether rank {rank} was started, and look at the beginning of its output",
            "if it only starts slowly, increase the start-up deadline",
        ),
        "left": (
            f"check why the script of rank {rank} ended: {verdict.text or 'it gave no reason'}",
            "all ranks must run the same number of steps: check that they read the same amount of data",
        ),
    }[verdict.kind]

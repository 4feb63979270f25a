"""The blame rules: which rank failed first, from what the failure monitor heard, and when.

The first cause wins. An error that may follow from another rank's failure, such as a transport error, is held back
until all other ranks have been heard after it; it is blamed only if no cause turns up. Silent and absent ranks are
blamed at their deadlines, and a rank that left is blamed once another rank waits for it. There are no sockets here, and
the caller passes the time. The monitor process imports this module, so it uses nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GRACE = 0.4
"""Seconds that an error waits for its cause if another rank's failure may have caused it."""
SAME_MOMENT = 0.05
"""Seconds in which a heartbeat that was sent before another rank's error may be read after it."""
SUSPICIOUS_SILENCE = 3.0
"""Seconds of silence that a busy machine does not explain."""
RECONNECT = 1.5
"""Seconds in which a rank of another machine must open a broken connection again: its process cannot be looked up."""
WAIT_FOR_LEAVER = 1.0
"""Seconds that a rank must wait for one that left before the latter is blamed."""
MAX_REPORTED_RANKS = 64
"""A verdict reports the states of this many ranks: those nearest to the culprit."""
EVERYONE = -1
"""The `waits` of a rank that waits for all ranks, as in a collective."""
BY_SIGNAL = "ended by SIGTERM"


class RankState:
    """What the monitor knows about one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state = "absent"
        self.where = ""
        """Its process and its machine."""
        self.host = ""
        """The address of its machine."""
        self.heard = 0.0
        self.doing = ""
        self.waits: int | None = None
        self.done = 0
        self.since = 0.0
        """When `doing`, `waits` or `done` last changed."""
        self.terminated = 0.0
        """When it received SIGTERM, or 0."""
        self.unconnected = 0.0
        """Since when its connection is broken, or 0."""
        self.how = ""
        """How it left."""
        self.clean = True

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the fields of a `RankSnapshot`."""
        silence = round(now - self.heard, 3) if self.heard else 0.0
        state = {"rank": self.rank, "state": self.state, "doing": self.doing, "waits": self.waits}
        return {**state, "silence": silence, "done": self.done}


class BlameRules:
    """Decides which rank failed first. Every method takes the time of its event.

    >>> rules = BlameRules(ranks=2, deadline=5.0, start_deadline=5.0, now=0.0)
    >>> rules.hello(0, 0.0), rules.hello(1, 0.0)
    (True, True)
    >>> rules.failed(0, {"text": "connection reset", "secondary": True}, 1.0)
    >>> rules.closed(1, 1.1)
    >>> rules.verdict["culprit"], rules.verdict["kind"]
    (1, 'died')
    """

    def __init__(
        self, ranks: int, deadline: float, start_deadline: float, now: float, *, standby: bool = False
    ) -> None:
        """`standby` records everything and blames nobody until `lead`."""
        self.deadline = deadline
        self.standby = standby
        self.start_deadline = start_deadline
        self.started = now
        self.ranks = [RankState(rank) for rank in range(ranks)]
        self.verdict: dict[str, Any] | None = None
        self.verdicts = 0
        """How many verdicts there were; each one replaces `verdict`."""
        self._echoes: list[tuple[float, int, dict[str, Any]]] = []
        """Errors that wait for their cause: when, of which rank, and its report."""

    def hello(self, rank: int, now: float, where: str = "") -> bool:
        """Register a rank; return False if its number is invalid or taken."""
        if not 0 <= rank < len(self.ranks) or self.ranks[rank].state != "absent":
            return False
        state = self.ranks[rank]
        state.state, state.heard, state.since, state.where = "here", now, now, where
        return True

    def rejoin(self, rank: int, now: float, where: str) -> bool:
        """Register the new connection of a rank whose connection broke; return False if it is not that rank."""
        if not 0 <= rank < len(self.ranks) or self.ranks[rank].state not in ("here", "died"):
            return False
        state = self.ranks[rank]
        if state.where != where:
            return False
        if state.state == "here":
            state.heard, state.unconnected = now, 0.0
        return True

    def disconnected(self, rank: int, now: float) -> None:
        """Record that a connection broke although the process may be alive."""
        if self.ranks[rank].state == "here":
            self.ranks[rank].unconnected = now

    def lead(self, now: float) -> None:
        """Take over from a monitor that was lost."""
        if self.standby:
            self.standby = False
            died = [state for state in self.ranks if state.state == "died"]
            if died and not self.is_settled(None):
                self._settle(min(died, key=lambda state: state.unconnected).rank, "died", now)

    def adopt(self, verdict: dict[str, Any]) -> None:
        """Take a verdict of the other monitor, unless there is one."""
        if not self.is_settled(int(verdict["round"])):
            self.verdict = verdict
            self.verdicts += 1
            self._echoes.clear()

    def beat(self, rank: int, doing: str, waits: int | None, done: int, now: float) -> None:
        """Record a heartbeat."""
        state = self.ranks[rank]
        if (state.doing, state.waits, state.done) != (doing, waits, done):
            state.doing, state.waits, state.done, state.since = doing, waits, done, now
        state.heard = now

    def failed(self, rank: int, report: dict[str, Any], now: float) -> None:
        """Record an exception that a rank reported."""
        self.ranks[rank].heard = now
        if self.is_settled(int(report.get("round", 0))):
            return
        if report.get("secondary"):
            self._echoes.append((now, rank, report))
        else:
            self._blame_exception(rank, report, now)

    def busy(self, rank: int, now: float) -> bool:
        """Whether it makes sense to keep waiting for a rank: it works, or a rank that it waits for works.

        The monitor knows a rank's state as of its last heartbeat. So ranks that seem to wait for each other get the
        deadline to make progress.
        """
        chain: dict[int, RankState] = {}
        while rank not in chain and not self.is_settled(None):
            state = chain[rank] = self.ranks[rank]
            if state.state != "here":
                return False
            if state.waits is None:
                return True
            if state.waits == EVERYONE:  # it waits for those that have not reached the same point
                if any(other.state == "here" and other.waits is None for other in self.ranks):
                    return True
                break
            rank = state.waits
        return any(now - state.since < self.deadline for state in chain.values())

    def terminated(self, rank: int, now: float) -> None:
        """Record that a rank received SIGTERM and wants to know whom to blame."""
        self.ranks[rank].heard = self.ranks[rank].terminated = now

    def bye(self, rank: int, how: str, clean: bool, now: float) -> None:
        """Record that a rank said goodbye."""
        state = self.ranks[rank]
        how = BY_SIGNAL if state.terminated else how
        state.state, state.heard, state.how, state.clean, state.waits = "left", now, how, clean, None

    def closed(self, rank: int, now: float) -> None:
        """Record that a connection closed; without a goodbye, the process died."""
        state = self.ranks[rank]
        if state.state != "here":
            return
        state.state, state.unconnected = "died", now
        if not self.standby and not self.is_settled(None):
            self._settle(rank, "died", now)
        state.waits = None

    def forgive(self, seconds: float, now: float) -> None:
        """Ignore a time in which the monitor itself did not run."""
        for state in self.ranks:
            if state.state == "here":
                state.heard = min(now, state.heard + seconds)
                state.since = min(now, state.since + seconds)
        self.started += seconds

    def tick(self, now: float) -> None:
        """Apply the rules that depend on time; every message sent before `now` must have been recorded."""
        for state in self.ranks:
            if state.unconnected and state.state == "here" and now - state.unconnected > self._reconnect:
                self.closed(state.rank, now)
        if self.standby or self.is_settled(None):
            return
        here = [state for state in self.ranks if state.state == "here"]
        silent = max(here, key=lambda state: now - state.heard, default=None)
        # A little before the deadline, so that all ranks know the verdict by then.
        if silent is not None and now - silent.heard > self.deadline - min(0.3, self.deadline / 10):
            self._blame_silent(silent, here, now)
            return
        if now - self.started > self.start_deadline:
            for state in self.ranks:
                if state.state == "absent":
                    self._settle(state.rank, "absent", now, deadline=self.start_deadline)
                    return
        if self._blame_leaver(here, now):
            return
        if self._echoes and now - self._echoes[0][0] > GRACE:
            # A rank that knows its cause may be heard before that cause: prefer a rank that knows of none.
            _, rank, report = min(self._echoes, key=lambda echo: echo[2].get("origin") is not None)
            silence = max(SUSPICIOUS_SILENCE, self.deadline / 4)
            if silent is not None and silent.rank != rank and now - silent.heard > silence:
                self._blame_silent(silent, here, now)  # the likelier cause of a transport error
            elif self._all_alive(here):
                same = {other for _, other, known in self._echoes if known.get("origin") is None} - {rank}
                self._blame_exception(rank, report, now, also=sorted(same))

    @property
    def _reconnect(self) -> float:
        return min(RECONNECT, self.deadline / 3)

    def _blame_silent(self, silent: RankState, here: list[RankState], now: float) -> None:
        """Blame the rank that has been silent for longest, or the first one of its machine if that is lost."""
        machine = [state for state in here if state.host == silent.host]
        others = len({state.host for state in here}) > 1
        if silent.host and others and all(now - state.heard > self.deadline / 2 for state in machine):
            lost = [state.rank for state in machine]
            self._settle(lost[0], "frozen", now, host=silent.host, lost=lost)
        else:
            self._settle(silent.rank, "frozen", now)

    def _all_alive(self, here: list[RankState]) -> bool:
        """Whether every rank has been heard since the first error that waits for its cause.

        A killed process that holds a GPU falls silent at once, but its connections close only when the driver has
        released its memory, which may take seconds.
        """
        reporters = {rank for _, rank, _ in self._echoes}
        since = self._echoes[0][0] + SAME_MOMENT
        return all(state.rank in reporters or state.heard > since for state in here)

    def all_terminated(self, now: float) -> bool:
        """Whether all ranks are being ended from outside, so that none is to blame."""
        here = [state for state in self.ranks if state.state == "here"]
        return (
            bool(here) and not self.is_settled(None) and all(0 < state.terminated < now - GRACE / 2 for state in here)
        )

    def all_gone(self) -> bool:
        """Whether every rank connected and has left."""
        return all(state.state in ("left", "died") for state in self.ranks)

    def _blame_leaver(self, here: list[RankState], now: float) -> bool:
        """Blame a rank that left if another waits for it, or fails or is ended because of it."""
        left = sorted((state for state in self.ranks if state.state == "left"), key=lambda s: (s.clean, s.heard))
        ended = [state for state in here if state.terminated]
        for leaver in left:
            # A waiter counts by its heartbeats since: one that did not run for a while may have stopped waiting.
            waiters = [
                state
                for state in here
                if state.waits in (leaver.rank, EVERYONE)
                and state.heard - max(state.since, leaver.heard) > WAIT_FOR_LEAVER
            ]
            echoes = [self.ranks[rank] for moment, rank, _ in self._echoes if now - moment > GRACE]
            # A rank that a signal ended is blamed only for failures of ranks that no signal ended.
            by_signal = leaver.how == BY_SIGNAL
            blamed = any(not state.terminated for state in echoes) if by_signal else bool(ended or echoes)
            if blamed or any(not state.terminated for state in waiters):
                waiter = next((state.rank for state in waiters), None)
                self._settle(leaver.rank, "left", now, text=leaver.how, waiter=waiter)
                return True
        return False

    def is_settled(self, round: int | None) -> bool:
        """Whether there is a final verdict, or one about this round."""
        if self.verdict is None:
            return False
        return bool(self.verdict["final"]) or (round is not None and round <= self.verdict["round"])

    def _blame_exception(self, rank: int, report: dict[str, Any], now: float, also: Sequence[int] = ()) -> None:
        action = {key: report.get(key) for key in ("action", "stage", "microbatch")}
        texts = {key: str(report.get(key) or "") for key in ("text", "traceback")}
        state = self.ranks[rank]
        state.doing = str(report.get("doing") or state.doing)
        final, round = bool(report.get("final")), int(report.get("round", 0))
        self._settle(rank, "raised", now, final=final, round=round, also=list(also), **texts, **action)

    def _settle(self, rank: int, kind: str, now: float, **details: Any) -> None:
        state = self.ranks[rank]
        nearest = sorted(self.ranks, key=lambda other: abs(other.rank - rank))[:MAX_REPORTED_RANKS]
        self.verdict = {
            "culprit": rank,
            "kind": kind,
            "where": state.where,
            "doing": state.doing,
            "silence": round(now - state.heard, 3) if state.heard else 0.0,
            "deadline": self.deadline,
            "final": True,
            "round": 0,
            "ranks": [other.to_json(now) for other in sorted(nearest, key=lambda other: other.rank)],
            **details,
        }
        self.verdicts += 1
        self._echoes.clear()

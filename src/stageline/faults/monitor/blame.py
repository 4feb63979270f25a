"""Who is to blame: the rules by which the referee judges, on a clock that is given, with no sockets.

The first cause wins. An error that may be the echo of another rank's failure (a transport's, say) waits a moment for
the cause, and one that names the rank it follows from is no cause as long as there is another; silence and absence are
judged by their deadlines; a rank that left is to blame once another waits for it. Runs inside the referee, so it needs
nothing but the standard library, and little of that.
"""

from __future__ import annotations

from typing import Any

GRACE = 0.4
"""Seconds that an error which may be the echo of another waits for the cause to become known."""
HUSH = 3.0
"""Seconds of silence that are more than a busy machine's."""
WAITED = 1.0
"""Seconds that a rank must say it waits in one place for one that left, before that one is to blame."""
MOST_TOLD = 64
"""Ranks whose standing is told with a verdict: those nearest to the culprit."""
EVERYONE = -1
"""The rank that one waits for who waits for all."""
BY_SIGNAL = "ended by SIGTERM"


class Seat:
    """What is known of one rank."""

    def __init__(self, rank: int) -> None:
        """Nothing yet."""
        self.rank = rank
        self.state = "absent"
        self.where = ""
        """Its process and its machine."""
        self.heard = 0.0
        self.doing = ""
        self.waits: int | None = None
        self.done = 0
        self.since = 0.0
        """Since when it has been doing the same, waiting for the same."""
        self.terminated = 0.0
        self.how = ""
        self.clean = True

    def standing(self, now: float) -> dict[str, Any]:
        """As plain data."""
        silence = round(now - self.heard, 3) if self.heard else 0.0
        state = {"rank": self.rank, "state": self.state, "doing": self.doing, "waits": self.waits}
        return {**state, "silence": silence, "done": self.done}


class Judge:
    """The rules: from what was heard, and when, to the verdict. The first cause wins; an echo waits for its cause.

    >>> judge = Judge(ranks=2, deadline=5.0, start_deadline=5.0, now=0.0)
    >>> judge.hello(0, 0.0), judge.hello(1, 0.0)
    (True, True)
    >>> judge.failed(0, {"text": "connection reset", "secondary": True}, 1.0)
    >>> judge.closed(1, 1.1)
    >>> judge.verdict["culprit"], judge.verdict["kind"]
    (1, 'died')
    """

    def __init__(self, ranks: int, deadline: float, start_deadline: float, now: float) -> None:
        """All ranks are expected from now on."""
        self.deadline = deadline
        self.start_deadline = start_deadline
        self.started = now
        self.seats = [Seat(rank) for rank in range(ranks)]
        self.verdict: dict[str, Any] | None = None
        self.told = 0
        """How many verdicts were given."""
        self._echoes: list[tuple[float, int, dict[str, Any]]] = []

    def hello(self, rank: int, now: float, where: str = "") -> bool:
        """A rank came; False if it is not expected, or was here before."""
        if not 0 <= rank < len(self.seats) or self.seats[rank].state != "absent":
            return False
        seat = self.seats[rank]
        seat.state, seat.heard, seat.since, seat.where = "here", now, now, where
        return True

    def beat(self, rank: int, doing: str, waits: int | None, done: int, now: float) -> None:
        """A rank lives."""
        seat = self.seats[rank]
        if (seat.doing, seat.waits, seat.done) != (doing, waits, done):
            seat.doing, seat.waits, seat.done, seat.since = doing, waits, done, now
        seat.heard = now

    def failed(self, rank: int, report: dict[str, Any], now: float) -> None:
        """A rank raised."""
        seat = self.seats[rank]
        seat.heard = now
        if self._over(int(report.get("round", 0))):
            return
        if report.get("secondary"):
            self._echoes.append((now, rank, report))
        else:
            self._raised(rank, report, now)

    def busy(self, rank: int, now: float) -> bool:
        """Whether who waits for this rank has reason to go on: it, or the one it waits for in turn, is at work.

        What is known of a rank is as old as its last beat, so ranks that seem to wait for each other are given the
        deadline to come out of it.
        """
        seen: dict[int, Seat] = {}
        while rank not in seen and not self._over(None):
            seat = seen[rank] = self.seats[rank]
            if seat.state != "here":
                return False
            if seat.waits is None:
                return True
            if seat.waits == EVERYONE:  # it waits for those who have not come to that point yet
                if any(each.state == "here" and each.waits is None for each in self.seats):
                    return True
                break
            rank = seat.waits
        return any(now - seat.since < self.deadline for seat in seen.values())

    def terminated(self, rank: int, now: float) -> None:
        """A rank was told by a signal to end, and asks whom to blame."""
        self.seats[rank].heard = self.seats[rank].terminated = now

    def bye(self, rank: int, how: str, clean: bool, now: float) -> None:
        """A rank leaves by its own will, or by a signal's."""
        seat = self.seats[rank]
        how = BY_SIGNAL if seat.terminated else how
        seat.state, seat.heard, seat.how, seat.clean, seat.waits = "left", now, how, clean, None

    def closed(self, rank: int, now: float) -> None:
        """A rank's connection ended."""
        seat = self.seats[rank]
        if seat.state != "here":
            return
        seat.state = "died"
        if not self._over(None):
            self._settle(rank, "died", now)
        seat.waits = None

    def forgive(self, seconds: float, now: float) -> None:
        """The referee itself did not run for a while: nobody's silence in that time counts."""
        for seat in self.seats:
            if seat.state == "here":
                seat.heard = min(now, seat.heard + seconds)
                seat.since = min(now, seat.since + seconds)
        self.started += seconds

    def tick(self, now: float) -> None:
        """Judge what only time can tell; all that had been said by `now` must have been heard."""
        if self._over(None):
            return
        here = [seat for seat in self.seats if seat.state == "here"]
        silent = max(here, key=lambda seat: now - seat.heard, default=None)
        # A little before the deadline, so that all ranks know it by then.
        if silent is not None and now - silent.heard > self.deadline - min(0.3, self.deadline / 10):
            self._settle(silent.rank, "frozen", now)
            return
        if now - self.started > self.start_deadline:
            for seat in self.seats:
                if seat.state == "absent":
                    self._settle(seat.rank, "absent", now, deadline=self.start_deadline)
                    return
        if self._judge_leavers(here, now):
            return
        if self._echoes and now - self._echoes[0][0] > GRACE:
            # Who heard of another's failure may be heard before that one: a rank that knows of none comes first.
            _, rank, report = min(self._echoes, key=lambda echo: echo[2].get("origin") is not None)
            # An error of a transport while a rank is silent: the silence is the likelier cause.
            if silent is not None and silent.rank != rank and now - silent.heard > max(HUSH, self.deadline / 4):
                self._settle(silent.rank, "frozen", now)
            else:
                self._raised(rank, report, now)

    def nobody(self, now: float) -> bool:
        """Whether all ranks are being ended from outside, so that there is nobody to blame."""
        here = [seat for seat in self.seats if seat.state == "here"]
        return bool(here) and not self._over(None) and all(0 < seat.terminated < now - GRACE / 2 for seat in here)

    def all_gone(self) -> bool:
        """Whether every rank came and is gone again."""
        return all(seat.state in ("left", "died") for seat in self.seats)

    def _judge_leavers(self, here: list[Seat], now: float) -> bool:
        """A rank that left is to blame once another waits for it, or fails or is ended because of it."""
        left = sorted((seat for seat in self.seats if seat.state == "left"), key=lambda seat: (seat.clean, seat.heard))
        ended = [seat for seat in here if seat.terminated]
        for seat in left:
            # By what the waiter itself said since: one that did not run for a while has merely not said otherwise.
            waiters = [
                each
                for each in here
                if each.waits in (seat.rank, EVERYONE) and each.heard - max(each.since, seat.heard) > WAITED
            ]
            echoes = [self.seats[rank] for at, rank, _ in self._echoes if now - at > GRACE]
            # Who was ended by a signal is to blame only for those who were not.
            by_signal = seat.how == BY_SIGNAL
            blamed = any(not each.terminated for each in echoes) if by_signal else bool(ended or echoes)
            if blamed or any(not each.terminated for each in waiters):
                waiter = next((each.rank for each in waiters), None)
                self._settle(seat.rank, "left", now, text=seat.how, waiter=waiter)
                return True
        return False

    def _over(self, round: int | None) -> bool:
        """Whether there is nothing to add: a final verdict, or one about this round."""
        if self.verdict is None:
            return False
        return bool(self.verdict["final"]) or (round is not None and round <= self.verdict["round"])

    def _raised(self, rank: int, report: dict[str, Any], now: float) -> None:
        places = {key: report.get(key) for key in ("action", "stage", "microbatch")}
        said = {key: str(report.get(key) or "") for key in ("text", "traceback")}
        seat = self.seats[rank]
        seat.doing = str(report.get("doing") or seat.doing)
        final, round = bool(report.get("final")), int(report.get("round", 0))
        self._settle(rank, "raised", now, final=final, round=round, **said, **places)

    def _settle(self, rank: int, kind: str, now: float, **more: Any) -> None:
        seat = self.seats[rank]
        near = sorted(self.seats, key=lambda each: abs(each.rank - rank))[:MOST_TOLD]
        self.verdict = {
            "culprit": rank,
            "kind": kind,
            "where": seat.where,
            "doing": seat.doing,
            "silence": round(now - seat.heard, 3) if seat.heard else 0.0,
            "deadline": self.deadline,
            "final": True,
            "round": 0,
            "ranks": [each.standing(now) for each in sorted(near, key=lambda each: each.rank)],
            **more,
        }
        self.told += 1
        self._echoes.clear()

"""One rank's end of the control channel: a thread that says "I live", and hears who failed.

The thread beats while the main thread computes, waits or loads; so a slow rank is not taken for a dead one, and a
stopped process falls silent. What the rank is doing is a plain attribute that the thread reads when it beats.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from stageline.common.errors import ControlError, StagelineError
from stageline.common.trust import new_nonce, proof, proves
from stageline.faults.monitor.blame import BY_SIGNAL
from stageline.faults.monitor.launch import Address, start_referee
from stageline.faults.monitor.signals import Bell, end_by
from stageline.faults.monitor.verdict import Failure, Verdict, describe

HOLD = 0.7
"""Seconds that a rank which is being ended waits to learn whom to blame, once the referee has heard of it."""

SLOW = 5.0
"""Seconds that the referee may take to hear of it, on a busy machine."""

CONNECT = 30.0
"""Seconds in which the referee must answer a hello."""


_open: weakref.WeakSet[Control] = weakref.WeakSet()
"""What a forked child must let go of."""


def say(text: str) -> None:
    """Write to stderr at once, past any buffer: the process may have milliseconds left."""
    with contextlib.suppress(OSError):
        os.write(2, f"stageline: {text}\n".encode(errors="replace"))


class Control:
    """A rank's end. `doing`, `waits` and `done` are plain attributes: setting them costs nanoseconds and no lock.

    >>> with Control.start(rank=0, ranks=1, share=lambda text: text) as control:
    ...     number = control.begin()
    ...     control.doing, control.waits = ("F", 0, 3), None
    ...     control.report(Failure.of(ArithmeticError("planted"), control.doing))
    ...     print(control.verdict(timeout=60))
    rank 0 failed in F of stage 0, microbatch 3: ArithmeticError: planted
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        deadline: float,
        tell: Callable[[str], None] = say,
        patience: float = float("inf"),
    ) -> None:
        """Not connected yet: see `start`."""
        self.rank = rank
        self.ranks = ranks
        self.deadline = deadline
        self.patience = patience
        self.interval = min(max(0.2, ranks / 500), deadline / 5)
        self.doing: object = None
        """What the rank is in: text, or (letter, stage, microbatch), or None outside of a step."""
        self.waits: int | None = None
        """The rank it waits for; EVERYONE for a collective; None while it waits for nobody."""
        self.done = 0
        """Actions finished so far."""
        self.lost: str | None = None
        """Why there is no control channel any more; training goes on without it."""
        self.job = "alone"
        self._tell = tell
        self._round = 0
        self._verdict: Verdict | None = None
        self._final: Verdict | None = None
        self._final_since = 0.0
        self._complete = self._nobody = False
        self._answers: dict[int, bool] = {}
        self._on_verdict: list[Callable[[Verdict], None]] = []
        self._on_end: list[Callable[[Verdict | None], None]] = []
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._on_all: Callable[[], None] = lambda: None
        """Called once every rank has come, or at the end: nobody needs what was shared any more."""
        self._closing = self._ending = False
        self._link: socket.socket | None = None
        self._buffer = b""
        self._bell = Bell()
        self._pid = os.getpid()
        self.where = f"pid {self._pid} on {socket.gethostname()[:200]}"
        self._earlier_error = getattr(sys, "last_value", None)
        self._thread = threading.Thread(target=self._live, name="stageline control", daemon=True)

    @classmethod
    def start(
        cls,
        rank: int,
        ranks: int,
        share: Callable[[str], str],
        deadline: float = 60.0,
        start_deadline: float | None = None,
        *,
        tell: Callable[[str], None] = say,
        patience: float = float("inf"),
    ) -> Control:
        """Open the channel: rank 0 starts the referee, and `share` gives its text to all ranks.

        `share` is called once on every rank, with the address on rank 0 and with "" on the others, and returns rank
        0's text. If it needs nobody but rank 0, as a store does and a collective does not, a rank that never starts is
        named after `start_deadline`: see `everyone`. Where no channel can be opened, training goes on without one, and
        `lost` says why. A rank that has not come back from its step `patience` seconds after another was lost (it hangs
        in a collective, which nothing can wake) is ended.
        """
        if not 0 <= rank < ranks:
            raise ControlError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        if not 0 < deadline < float("inf"):
            raise ControlError(f"the deadline is a number of seconds above 0, got {deadline}")
        text, why = "", "rank 0 could not start the referee"
        if rank == 0:
            try:
                text = str(start_referee(ranks, deadline, deadline if start_deadline is None else start_deadline))
            except ControlError as error:
                why = str(error)
        try:
            address = share(text)
        except Exception as error:
            if rank == 0 or isinstance(error, StagelineError):
                raise
            raise ControlError(
                f"rank {rank} was not told where the control channel is, so rank 0 did not start or has ended: "
                f"{type(error).__name__}: {error}"
            ) from error
        control = cls(rank, ranks, deadline, tell, patience)
        control._on_all = getattr(share, "done", control._on_all)
        _open.add(control)
        atexit.register(control._at_exit)
        if address:
            control._connect(Address.parse(address))
        else:
            control._lose(why)
        return control

    def begin(self) -> int:
        """Begin a step, on all ranks alike: what was raised in an earlier one is over; a lost rank stays lost."""
        self.doing = "before its first action"
        with self._changed:
            self._round += 1
            before = self._verdict
            if before is None or before.final or before.round < self._round:
                self._verdict = self._final
            fresh = self._verdict if self._verdict is not before else None
        if fresh is not None:
            self._spread(fresh)
        return self._round

    def end(self) -> None:
        """End a step: nothing is being done, and nobody is waited for."""
        self.doing = self.waits = None

    @property
    def host(self) -> str:
        """The address of this machine from which the referee was reached; empty where there is none."""
        return str(self._link.getsockname()[0]) if self._link is not None and self.lost is None else ""

    @property
    def final(self) -> Verdict | None:
        """By which failure the job is over; None while it goes on."""
        return self._final

    @property
    def round(self) -> int:
        """How many steps were begun."""
        return self._round

    def set_deadline(self, deadline: float) -> None:
        """From now on, a rank that is silent for so long is taken for frozen."""
        if deadline != self.deadline:
            self.deadline = deadline
            self.interval = min(max(0.2, self.ranks / 500), deadline / 5)
            self._send({"deadline": deadline})

    def busy(self, rank: int, timeout: float = 5.0) -> bool:
        """Ask whether there is reason to go on waiting for a rank: it, or whom it waits for in turn, is at work."""
        if self.lost is not None or self._link is None:
            return False
        with self._changed:
            self._answers.pop(rank, None)
        self._send({"ask": rank})
        with self._changed:
            self._changed.wait_for(lambda: rank in self._answers or self.lost is not None, timeout)
            return self._answers.get(rank, False)

    def report(self, failure: Failure) -> None:
        """Tell all ranks that this one failed."""
        self._send({"failed": {**failure.to_json(), "round": self._round}})

    def verdict(self, timeout: float = 0.0) -> Verdict | None:
        """Who failed first, waiting for it at most `timeout` seconds; None if nobody is known to have."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None or self.lost is not None, timeout)
            return self._verdict

    def blame(self, timeout: float) -> Verdict | None:
        """Who failed first, waiting at most `timeout` seconds after the referee has heard all that was said until now.

        So it does not depend on how soon a busy machine lets the referee run.
        """
        with self._changed:
            self._answers.pop(self.rank, None)
        self._send({"ask": self.rank})
        with self._changed:
            self._changed.wait_for(
                lambda: self.rank in self._answers or self._verdict is not None or self.lost is not None,
                0.0 if self._closing else CONNECT,
            )
        return self.verdict(timeout)

    def everyone(self, timeout: float) -> Verdict | None:
        """Wait until every rank has come; None if they have, or if the channel is lost."""
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._complete or self._verdict is not None or self.lost is not None, timeout
            )
            if not met:
                raise ControlError(f"not all ranks came within {timeout:g} s, and the referee blames none of them")
            return self._verdict

    def on_verdict(self, callback: Callable[[Verdict], None]) -> None:
        """Call this with every verdict, from the control thread: wake what waits, and return soon."""
        with self._changed:
            self._on_verdict.append(_weakly(callback))
            known = self._verdict
        if known is not None:
            callback(known)

    def on_end(self, callback: Callable[[Verdict | None], None]) -> None:
        """Call this, from the control thread, before the process is ended by a signal in a step: last words."""
        self._on_end.append(_weakly(callback))

    def close(self, how: str = "", clean: bool = True) -> None:
        """Say goodbye, and leave no thread and no connection."""
        if self._closing or os.getpid() != self._pid:
            return
        joins = self._thread.is_alive() and threading.current_thread() is not self._thread
        if joins and (self._ending or self._bell.rung):
            self._thread.join(SLOW + 2 * HOLD)  # it says the last words, and the process ends with them
        self._send({"bye": how, "clean": clean})
        self._closing = True
        self._on_all()
        self._bell.ring()
        if joins:
            self._thread.join(2.0)
        if self._link is not None:
            self._link.close()
        self._bell.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Say how the block ended."""
        self.close(Failure.of(error).text if error else "", clean=error is None)

    def _connect(self, address: Address) -> None:
        self.job = address.job
        try:
            self._link = socket.create_connection((address.host, address.port), timeout=CONNECT)
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._introduce(address.token)
        except (OSError, ControlError, ValueError, AttributeError) as error:
            self._lose(f"cannot reach the referee at {address.host}:{address.port}: {error}")
            return
        self._split(b"")
        self._thread.start()
        self._bell.listen()

    def _introduce(self, secret: str) -> None:
        """Prove to the referee that this rank knows the secret, and have it prove the same."""
        theirs, ours = str(self._first_line().get("challenge")), new_nonce()
        facts = (self.rank, theirs, ours)
        self._send(
            {"hello": self.rank, "nonce": ours, "proof": proof(secret, "rank", *facts, self.where), "where": self.where}
        )
        welcome = self._first_line()
        if not proves(welcome.get("proof"), secret, "referee", *facts):
            raise ControlError("it does not know the secret of this job")

    def _first_line(self) -> Any:
        """The next line of what the referee says, as long as nothing else listens."""
        assert self._link is not None
        while b"\n" not in self._buffer:
            data = self._link.recv(4096)
            if not data:
                raise ControlError("it refused this rank: another job's token, or its number is taken")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _live(self) -> None:
        """The thread; whatever happens in it, the training goes on."""
        try:
            self._beat_and_hear()
        except Exception as error:
            if not self._closing:
                self._lose(f"its thread failed: {Failure.of(error).text}")
        finally:
            self._bell.attended = False

    def _beat_and_hear(self) -> None:
        """Beat, hear, and say last words."""
        assert self._link is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._bell.ear, selectors.EVENT_READ)
            due = heard = time.monotonic()
            while not self._closing:
                now = time.monotonic()
                if now - due > 1.0:
                    heard = now  # this process did not run; the referee is not to blame for that
                    # What it said meanwhile comes first: a beat to one that is gone would wipe it out.
                    if any(key.fileobj is self._link for key, _ in selector.select(0)) and not self._hear():
                        break
                if self._final and self.doing is not None and now - self._final_since > self.patience:
                    self._give_up()
                if now >= due:
                    self._beat()
                    due = now + self.interval
                ready = {key.fileobj for key, _ in selector.select(max(0.0, due - time.monotonic()))}
                if self._bell.ear in ready and signal.SIGTERM in self._bell.answer() and self._bell.ours:
                    self._last_words(selector)
                if self._link in ready:
                    if not self._hear():
                        break
                    heard = time.monotonic()
                elif time.monotonic() - due < 1.0 and time.monotonic() - heard > max(5.0, self.deadline):
                    self._lose(f"the referee is silent for {time.monotonic() - heard:.0f} s")
                    break
            # Without a referee, the last words are still to be said.
            selector.unregister(self._link)
            while not self._closing:
                selector.select()
                if signal.SIGTERM in self._bell.answer() and self._bell.ours:
                    self._last_words(selector)

    def _beat(self) -> None:
        self._send({"beat": self._round, "doing": describe(self.doing), "waits": self.waits, "done": self.done})

    def _hear(self) -> bool:
        """Read what the referee says; False when it is gone."""
        assert self._link is not None
        try:
            found = self._link.recv(1 << 16)
        except TimeoutError:
            return True
        except OSError:
            found = b""
        self._split(found)
        if not found and not self._closing:
            self._lose("the referee is gone")
        return bool(found)

    def _split(self, found: bytes) -> None:
        *lines, self._buffer = (self._buffer + found).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        fresh: Verdict | None = None
        if "all" in said:
            self._on_all()
        with self._changed:
            self._complete = self._complete or "all" in said
            self._nobody = self._nobody or "nobody" in said
            if "answer" in said:
                self._answers[int(said["answer"])] = bool(said.get("busy"))
            if "verdict" in said:
                found = Verdict.from_json(said["verdict"])
                if found.final and self._final is None:
                    self._final, self._final_since = found, time.monotonic()
                if self._verdict is None and (found.final or found.round >= self._round):
                    self._verdict = fresh = found
            self._changed.notify_all()
        if fresh is not None:
            self._spread(fresh)

    def _spread(self, fresh: Verdict) -> None:
        if fresh.final:
            # Before anything else: whoever started us may end us in the next tenth of a second.
            self._tell(f"rank {self.rank}: {fresh}")
        for callback in list(self._on_verdict):
            self._call(callback, fresh)

    def _call(self, callback: Callable[[Any], None], verdict: Verdict | None) -> None:
        try:
            callback(verdict)
        except Exception as error:
            self._tell(f"rank {self.rank}: a callback of the control channel failed: {Failure.of(error).text}")

    def _last_words(self, selector: selectors.BaseSelector) -> None:
        """SIGTERM: learn whom to blame, write it, and end by the signal."""
        self._ending = True
        if self.doing is not None:
            self._answers.pop(self.rank, None)
            self._send({"terminated": True})
            self._send({"ask": self.rank})
            heard = self.lost is not None
            end = time.monotonic() + (0.0 if heard else SLOW)
            while self._verdict is None and not self._nobody and time.monotonic() < end:
                ready = {key.fileobj for key, _ in selector.select(0.05)}
                self._bell.answer()
                if self._link in ready and not self._hear():
                    break
                if not heard and self.rank in self._answers:
                    heard, end = True, time.monotonic() + HOLD
            verdict = self._verdict
            blame = "no other rank is known to have failed" if verdict is None else str(verdict)
            if verdict is not None and verdict.final:
                blame = f"rank {verdict.culprit} is to blame"  # the sentence was written when it came
            self._tell(f"rank {self.rank}: ended by SIGTERM in {describe(self.doing)}; {blame}")
            for callback in list(self._on_end):
                self._call(callback, verdict)
        self._send({"bye": BY_SIGNAL, "clean": False})
        end_by(signal.SIGTERM)

    def _give_up(self) -> None:
        """The job is lost and the main thread hangs where nothing wakes it: end the process."""
        self._tell(
            f"rank {self.rank}: did not come back from {describe(self.doing)} within {self.patience:g} s after the "
            f"failure of rank {self._final.culprit if self._final else '?'}; this process is ended"
        )
        for callback in list(self._on_end):
            self._call(callback, self._final)
        self._send({"bye": "it hung after the failure", "clean": False})
        os._exit(1)

    def _send(self, what: dict[str, Any]) -> None:
        if self._link is None or self.lost is not None or os.getpid() != self._pid:
            return
        # A dead referee is noticed, and told of, by the thread that reads.
        with self._sending, contextlib.suppress(OSError):
            self._link.sendall(json.dumps(what).encode() + b"\n")

    def _lose(self, why: str) -> None:
        with self._changed:
            self.lost = why
            self._changed.notify_all()
        self._tell(
            f"rank {self.rank}: warning: no control channel: {why}; training goes on, but a rank that fails shows only "
            "as an error of its neighbours' transport"
        )

    def _at_exit(self) -> None:
        """The script ended, or an exception ended it: Python keeps the latter in `sys.last_value`."""
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._earlier_error:
            self.close(Failure.of(error).text, clean=False)
        else:
            self.close("its script ended")


def _weakly(callback: Callable[[Any], None]) -> Callable[[Any], None]:
    """Call a method only as long as its object lives: the channel outlives the pipelines that listen to it."""
    try:
        method = weakref.WeakMethod(callback)
    except TypeError:
        return callback

    def call(told: Any) -> None:
        found = method()
        if found is not None:
            found(told)

    return call


def _forget() -> None:
    """In a forked child: connections are the parent's. Held open by a child, they would hide the parent's death."""
    for control in list(_open):
        if control._link is not None:
            control._link.close()
        control._bell.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

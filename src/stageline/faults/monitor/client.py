"""A rank's end of the control channel: a thread that sends heartbeats and learns which rank failed first.

The thread sends heartbeats while the main thread computes, waits or loads data. So a slow rank is not mistaken for a
dead one, and a stopped process falls silent. The thread reads what the rank is doing from plain attributes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from stageline.common.errors import ControlError, StagelineError
from stageline.common.interrupts import Wakeup, end_by
from stageline.faults.monitor.blame import BY_SIGNAL
from stageline.faults.monitor.channel import PROBLEMS, Channel
from stageline.faults.monitor.connection import CONNECT_TIMEOUT, Address, no_address, start_monitor
from stageline.faults.monitor.verdict import Failure, Verdict, describe

HOLD = 0.7
"""Seconds that a rank waits for a verdict after a signal to end, once the monitor knows of the signal."""

SLOWEST_ANSWER = 5.0
"""Seconds that the monitor may take to learn it, on a busy machine."""


COLLECTED = "STAGELINE_COLLECTED"
"""The variable that a launcher sets if it waits for the errors of the ranks and reports them once."""

_open: weakref.WeakSet[MonitorClient] = weakref.WeakSet()
"""The clients whose sockets a forked child must close."""


def write_stderr(text: str) -> None:
    """Write to stderr at once, past any buffer: the process may have milliseconds left."""
    with contextlib.suppress(OSError):
        os.write(2, f"stageline: {text}\n".encode(errors="replace"))


class MonitorClient:
    """One rank's end. `doing`, `waits` and `done` are plain attributes: setting them takes nanoseconds and no lock.

    >>> with MonitorClient.start(rank=0, ranks=1, share=lambda text: text) as client:
    ...     number = client.begin()
    ...     client.doing, client.waits = ("F", 0, 3), None
    ...     client.report(Failure.of(ArithmeticError("planted"), client.doing))
    ...     print(client.verdict(timeout=60))
    rank 0 failed in F of stage 0, microbatch 3: ArithmeticError: planted
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        deadline: float,
        tell: Callable[[str], None] = write_stderr,
        patience: float = float("inf"),
    ) -> None:
        """Make a client that is not connected; see `start`."""
        self.rank = rank
        self.ranks = ranks
        self.deadline = deadline
        self.patience = patience
        self.doing: object = None
        """What the rank is doing: text, or (letter, stage, microbatch), or None outside of a step."""
        self.waits: int | None = None
        """The rank that it waits for; EVERYONE in a collective; None while it waits for nobody."""
        self.done = 0
        """How many actions it has finished."""
        self.round = 0
        """How many steps have begun."""
        self.final: Verdict | None = None
        """The failure that ended the job; None while it runs."""
        self.lost: str | None = None
        """Why there is no control channel, if there is none; training continues without it."""
        self.unreached = ""
        """Why this rank could not reach the monitor that rank 0 had started, if that is so."""
        self.name_of: Callable[[int], str] = lambda rank: ""
        """The name of a rank in a mesh; empty if it is plain "rank 3"."""
        self.job = "alone"
        self.where = f"pid {os.getpid()} on {socket.gethostname()[:200]}"
        self._tell = tell
        self._verdict: Verdict | None = None
        self._final_since = 0.0
        self._complete = self._nobody_to_blame = False
        self._answers: dict[int, bool] = {}
        self._asked: set[int] = set()
        self._on_verdict: list[Callable[[Verdict], None]] = []
        self._on_end: list[Callable[[Verdict | None], None]] = []
        self._on_complete: Callable[[], None] = lambda: None
        """Called once every rank has connected, or at the end: the shared address is no longer needed."""
        self._changed = threading.Condition()
        self._closing = self._ending = False
        self._channel: Channel | None = None
        """To the monitor that this rank listens to."""
        self._standby: Channel | None = None
        """To the standby, which takes over if the first monitor is lost."""
        self._next_standby: Channel | None = None
        self._cut_off = ""
        """The machine of the first monitor, if it was lost because nothing was heard of it."""
        self._wakeup = Wakeup()
        self._pid = os.getpid()
        self._earlier_error = getattr(sys, "last_value", None)
        self._thread = threading.Thread(target=self._run, name="stageline control", daemon=True)

    @classmethod
    def start(
        cls,
        rank: int,
        ranks: int,
        share: Callable[[str], str],
        deadline: float = 60.0,
        start_deadline: float | None = None,
        *,
        tell: Callable[[str], None] = write_stderr,
        patience: float = float("inf"),
        host: str = "",
    ) -> MonitorClient:
        """Open the channel: rank 0 starts the monitor, and `share` passes its address to all ranks.

        `share` is called once on every rank, with the address on rank 0 and with "" on the others, and returns rank
        0's text. If it depends on rank 0 alone, as a store does and a collective does not, then `everyone` names a
        rank that does not start within `start_deadline`. If no channel can be opened, training continues without one,
        and `lost` says why. A rank that does not return from its step within `patience` seconds after another was lost
        is ended: it hangs in a collective, which nothing can interrupt. `host` is where the monitor listens; by
        default as `control_host` says.
        """
        if not 0 <= rank < ranks:
            raise ControlError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        if not 0 < deadline < float("inf"):
            raise ControlError(f"the deadline must be a number of seconds above 0, got {deadline}")
        text, why = "", "rank 0 could not start the failure monitor"
        if rank == 0:
            try:
                starting = deadline if start_deadline is None else start_deadline
                text = str(start_monitor(ranks, deadline, starting, host))
            except ControlError as error:
                why = str(error)
        try:
            address = share(text)
        except Exception as error:
            if rank == 0 or isinstance(error, StagelineError):
                raise
            raise no_address(rank, error) from error
        client = cls(rank, ranks, deadline, tell, patience)
        client._on_complete = getattr(share, "done", client._on_complete)
        _open.add(client)
        atexit.register(client._close_at_exit)
        if address:
            client._connect(Address.parse(address))
        else:
            client._lose(why)
        return client

    def begin(self) -> int:
        """Begin a step; every rank does. Exceptions of earlier steps no longer count, and a lost rank stays lost."""
        self.doing = "before its first action"
        with self._changed:
            self.round += 1
            before = self._verdict
            if before is None or before.final or before.round < self.round:
                self._verdict = self.final
            new = self._verdict if self._verdict is not before else None
        if new is not None:
            self._spread(new)
        return self.round

    def end(self) -> None:
        """End a step."""
        self.doing = self.waits = None

    @property
    def host(self) -> str:
        """The address of this machine from which it reached the monitor; empty if it did not."""
        return self._channel.machine if self._channel is not None and self.lost is None else ""

    @property
    def has_standby(self) -> bool:
        """Whether another monitor would take over if the first one were lost."""
        return self._standby is not None

    def set_deadline(self, deadline: float) -> None:
        """Set after how many seconds of silence a rank counts as frozen."""
        if deadline != self.deadline:
            self.deadline = deadline
            self._report({"deadline": deadline}, to_both=True)

    def busy(self, rank: int, timeout: float = 5.0) -> bool:
        """Ask whether it makes sense to keep waiting for a rank: it works, or a rank that it waits for works."""
        if self.lost is not None or self._channel is None:
            return False
        self._ask(rank)
        with self._changed:
            self._changed.wait_for(lambda: rank in self._answers or self.lost is not None, timeout)
            return self._answers.get(rank, False)

    def report(self, failure: Failure) -> None:
        """Report to all ranks that this one failed."""
        self._report({"failed": {**failure.to_json(), "round": self.round}})

    def verdict(self, timeout: float = 0.0) -> Verdict | None:
        """Return which rank failed first, waiting at most `timeout` seconds; None if none is known to have failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None or self.lost is not None, timeout)
            return self._verdict

    def blame(self, timeout: float) -> Verdict | None:
        """Like `verdict`, but count the timeout from when the monitor has read everything sent until now.

        So the result does not depend on how soon a busy machine runs the monitor.
        """
        self._ask(self.rank)
        with self._changed:
            self._changed.wait_for(
                lambda: self.rank in self._answers or self._verdict is not None or self.lost is not None,
                0.0 if self._closing else CONNECT_TIMEOUT,
            )
        return self.verdict(timeout)

    def everyone(self, timeout: float) -> Verdict | None:
        """Wait until every rank has connected; return None if they have, or if there is no channel."""
        with self._changed:
            decided = self._changed.wait_for(
                lambda: self._complete or self._verdict is not None or self.lost is not None, timeout
            )
            if not decided:
                raise ControlError(
                    f"not all ranks connected within {timeout:g} s, but the monitor did not determine which one failed"
                )
            return self._verdict

    def on_verdict(self, callback: Callable[[Verdict], None]) -> None:
        """Call a function with every verdict, from the client's thread; it must return soon."""
        with self._changed:
            self._on_verdict.append(_weakly(callback))
            known = self._verdict
        if known is not None:
            callback(known)

    def on_end(self, callback: Callable[[Verdict | None], None]) -> None:
        """Call a function, from the client's thread, before a signal ends the process in a step."""
        self._on_end.append(_weakly(callback))

    def close(self, how: str = "", clean: bool = True) -> None:
        """Say goodbye, and end the thread and the connection."""
        if self._closing or os.getpid() != self._pid:
            return
        joins = self._thread.is_alive() and threading.current_thread() is not self._thread
        if joins and (self._ending or self._wakeup.signalled):
            self._thread.join(SLOWEST_ANSWER + 2 * HOLD)  # it ends the process
        self._report({"bye": how, "clean": clean}, to_both=True)
        self._closing = True
        self._on_complete()
        self._wakeup.wake()
        if joins:
            self._thread.join(2.0)
        self.close_sockets()
        atexit.unregister(self._close_at_exit)

    def close_sockets(self) -> None:
        """Close the connection without a goodbye, as a forked child does with those of its parent."""
        for channel in (self._channel, self._standby, self._next_standby):
            if channel is not None:
                channel.close()
        self._wakeup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(Failure.of(error).text if error else "", clean=error is None)

    @property
    def interval(self) -> float:
        """Seconds between heartbeats."""
        return min(max(0.2, self.ranks / 500), self.deadline / 5)

    def _connect(self, address: Address) -> None:
        self.job = address.job
        try:
            timeout = max(2.0, min(CONNECT_TIMEOUT, 0.8 * self.deadline))  # before the monitor blames this rank
            self._channel = Channel(address, self.rank, self.where, os.environ.get("STAGELINE_HOST", ""), timeout)
        except PROBLEMS as error:
            self.unreached = f"nothing answers at {address.host}, port {address.port}: {error}"
            self._lose(f"cannot reach the failure monitor at {address.host}:{address.port}: {error}")
            return
        self._thread.start()
        self._wakeup.install()

    def _run(self) -> None:
        """Run the thread; an error in it must not stop the training."""
        try:
            self._beat_and_receive()
        except Exception as error:
            if not self._closing:
                self._lose(f"its thread failed: {Failure.of(error).text}")
        finally:
            self._wakeup.attended = False

    def _beat_and_receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup.reader, selectors.EVENT_READ)
            due = time.monotonic()
            while not self._closing:
                self._watch(selector)
                now = time.monotonic()
                if now - due > 1.0:
                    # Read first: a heartbeat to a monitor that is gone would discard its last messages.
                    self._receive(selector.select(0))
                    for channel in self._channels:
                        channel.heard = now  # this process did not run, so a monitor's silence does not count
                if self.final and self.doing is not None and now - self._final_since > self.patience:
                    self._give_up()
                if now >= due:
                    self.beat()
                    due = now + self.interval
                wait = None if self._channel is None else max(0.0, due - time.monotonic())
                ready = selector.select(wait)
                if any(key.fileobj is self._wakeup.reader for key, _ in ready) and self._wakeup.read_sigterm():
                    self._end_by_sigterm(selector)
                self._receive(ready)
                now = time.monotonic()
                for channel in self._channels if now - due < 1.0 else ():
                    self._check_channel(channel, now)

    @property
    def _channels(self) -> list[Channel]:
        return [channel for channel in (self._channel, self._standby) if channel is not None and self.lost is None]

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Let the selector wait for all open connections."""
        if self._next_standby is not None:
            self._standby, self._next_standby = self._next_standby, None
        wanted = {channel.connection.socket: channel for channel in self._channels if channel.connection is not None}
        for key in list(selector.get_map().values()):
            if key.data is not None and key.fileobj not in wanted:
                selector.unregister(key.fileobj)
        for link, channel in wanted.items():
            if link not in selector.get_map():
                selector.register(link, selectors.EVENT_READ, channel)

    def _check_channel(self, channel: Channel, now: float) -> None:
        """Open a connection again that broke or is silent, and give up a monitor that is gone."""
        if channel.take_over():
            with self._changed:
                asked = set(self._asked)
            for rank in asked if channel is self._channel else ():
                channel.send({"ask": rank})
        silence = now - channel.heard
        limit = self.deadline if self._standby is not None or self._cut_off else max(5.0, self.deadline)
        if channel.gone:
            self._give_up_channel(channel, channel.gone)
        elif silence > limit:
            self._give_up_channel(channel, f"the failure monitor has been silent for {silence:.0f} s", cut_off=True)
        elif channel.connection is None or silence > max(2.0, limit / 3):
            channel.open_again(self._wakeup.wake)

    def _give_up_channel(self, channel: Channel, why: str, *, cut_off: bool = False) -> None:
        """The standby takes over, if there is one; else training continues without a monitor."""
        channel.close()
        host = channel.address.host
        if channel is self._standby:
            self._standby = None
            self._tell(f"{self._name(self.rank)}: warning: the standby of the failure monitor on {host} is lost")
        elif self._standby is not None:
            self._channel, self._standby, self._cut_off = self._standby, None, host if cut_off else ""
            self._tell(
                f"{self._name(self.rank)}: warning: {why}; the standby on {self._channel.address.host} takes over"
            )
            if self._verdict is not None:
                self._report({"relay": self._verdict.to_json()})
            for failed in channel.kept("failed"):
                if failed["round"] == self.round:
                    self._report({"failed": failed})
            self._report({"lead": why})
            for rank in list(self._asked):
                self._send({"ask": rank})
        else:
            machine = channel.machine
            self._channel = None
            if cut_off and self._cut_off and machine != host:
                # No machine with a monitor is reached, so this one is cut off from the others.
                silence = time.monotonic() - channel.heard
                verdict = Verdict(0, "frozen", silence=silence, deadline=self.deadline, host=self._cut_off)
                self._handle({"verdict": verdict.to_json()}, None)
            self._lose(why)

    def named(self, verdict: Verdict) -> Verdict:
        """The verdict with the name of the rank in a mesh."""
        return replace(verdict, name=verdict.name or self.name_of(verdict.culprit))

    def beat(self) -> None:
        """Send a heartbeat now."""
        message = {"beat": self.round, "doing": describe(self.doing), "waits": self.waits, "done": self.done}
        for channel in self._channels:
            channel.send(message)

    def _receive(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Handle what the monitors sent."""
        for key, _ in ready:
            if key.data is not None and key.data in self._channels:
                for message in key.data.receive():
                    self._handle(message, key.data)

    def _handle(self, message: dict[str, Any], channel: Channel | None) -> None:
        new: Verdict | None = None
        if channel is not None and channel is not self._channel:
            return  # the standby does not lead
        if "all" in message:
            self._on_complete()
        if "start_standby" in message:
            self._in_background(self._start_standby)
        if "standby" in message and self._standby is None and self._next_standby is None:
            host, port = message["standby"]
            self._in_background(lambda: self._connect_to_standby(str(host), int(port)))
        with self._changed:
            self._complete = self._complete or "all" in message
            self._nobody_to_blame = self._nobody_to_blame or "nobody" in message
            if "answer" in message:
                self._answers[int(message["answer"])] = bool(message.get("busy"))
                self._asked.discard(int(message["answer"]))
            if "verdict" in message:
                verdict = Verdict.from_json(message["verdict"])
                if verdict.final and self.final is None:
                    self.final, self._final_since = verdict, time.monotonic()
                if self._verdict is None and (verdict.final or verdict.round >= self.round):
                    self._verdict = new = verdict
            self._changed.notify_all()
        if new is not None:
            if self._standby is not None:
                self._standby.send({"relay": new.to_json()}, keep=True)
            self._spread(new)

    def _in_background(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name="stageline standby", daemon=True).start()

    def _start_standby(self) -> None:
        """On the first rank of another machine than the monitor's: start the standby there."""
        channel = self._channel
        if channel is None:
            return
        try:
            address = start_monitor(self.ranks, self.deadline, 0.0, channel.machine, standby_of=channel.address)
        except ControlError as error:
            self._tell(f"{self._name(self.rank)}: warning: the failure monitor has no standby: {error}")
            return
        self._report({"standby": [address.host, address.port]})

    def _connect_to_standby(self, host: str, port: int) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            standby = Channel(replace(channel.address, host=host, port=port), self.rank, self.where, channel.machine)
        except PROBLEMS as error:
            self._tell(
                f"{self._name(self.rank)}: warning: cannot reach the standby of the failure monitor at {host}:{port}: "
                f"{error}"
            )
            return
        if self._closing:
            standby.close()
            return
        self._next_standby = standby
        self._wakeup.wake()

    def _name(self, rank: int) -> str:
        return self.name_of(rank) or f"rank {rank}"

    def _spread(self, verdict: Verdict) -> None:
        if verdict.final and not os.environ.get(COLLECTED):
            # Before anything else: a launcher may end this process in the next tenth of a second.
            self._tell(f"{self._name(self.rank)}: {self.named(verdict)}")
        for callback in list(self._on_verdict):
            self._call(callback, verdict)

    def _call(self, callback: Callable[[Any], None], verdict: Verdict | None) -> None:
        try:
            callback(verdict)
        except Exception as error:
            self._tell(f"{self._name(self.rank)}: a callback of the control channel failed: {Failure.of(error).text}")

    def _end_by_sigterm(self, selector: selectors.BaseSelector) -> None:
        """Wait briefly for a verdict, report it, and end by the signal."""
        self._ending = True
        if self.doing is not None:
            self._report({"terminated": True}, to_both=True)
            self._ask(self.rank)
            answered = self.lost is not None
            end = time.monotonic() + (0.0 if answered else SLOWEST_ANSWER)
            while self._verdict is None and not self._nobody_to_blame and time.monotonic() < end:
                ready = selector.select(0.05)
                self._wakeup.read()
                self._receive(ready)
                if self._channel is None or (self._channel.connection is None and self._standby is None):
                    break
                if not answered and self.rank in self._answers:
                    answered, end = True, time.monotonic() + HOLD
            verdict = self._verdict
            blame = "no other rank is known to have failed" if verdict is None else str(self.named(verdict))
            if verdict is not None and verdict.final:
                blame = f"{self._name(verdict.culprit)} is to blame"  # the verdict was written when it arrived
            self._tell(f"{self._name(self.rank)}: ended by SIGTERM in {describe(self.doing)}; {blame}")
            for callback in list(self._on_end):
                self._call(callback, verdict)
        self._report({"bye": BY_SIGNAL, "clean": False}, to_both=True)
        end_by(signal.SIGTERM)

    def _give_up(self) -> None:
        """End the process: the job is lost, and the main thread hangs where nothing can interrupt it."""
        self._tell(
            f"{self._name(self.rank)}: did not return from {describe(self.doing)} within {self.patience:g} s after "
            f"the failure of {self._name(self.final.culprit) if self.final else 'another'}; terminating this "
            "process"
        )
        for callback in list(self._on_end):
            self._call(callback, self.final)
        self._report({"bye": "it hung after the failure", "clean": False}, to_both=True)
        os._exit(1)

    def _ask(self, rank: int) -> None:
        """Ask the monitor whether a rank is busy; the answer goes to `_answers`."""
        with self._changed:
            self._answers.pop(rank, None)
            self._asked.add(rank)
        self._send({"ask": rank})

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is not None and self.lost is None:
            self._channel.send(message)

    def _report(self, message: dict[str, Any], *, to_both: bool = False) -> None:
        """Send a message that must not be lost: to the monitor, or to the standby as well."""
        for channel in self._channels if to_both else self._channels[:1]:
            channel.send(message, keep=True)

    def _lose(self, why: str) -> None:
        with self._changed:
            self.lost = why
            self._changed.notify_all()
        self._tell(
            f"{self._name(self.rank)}: warning: no control channel: {why}; training continues, but a failed rank "
            "will show up only as transport errors on its neighbours"
        )

    def _close_at_exit(self) -> None:
        """Close when the script ends; Python keeps an exception that ended it in `sys.last_value`."""
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._earlier_error:
            self.close(Failure.of(error).text, clean=False)
        else:
            self.close("its script ended")


def _weakly(callback: Callable[[Any], None]) -> Callable[[Any], None]:
    """Call a method only while its object is alive: the channel outlives the pipelines that listen to it."""
    try:
        method = weakref.WeakMethod(callback)
    except TypeError:
        return callback

    def call(verdict: Any) -> None:
        bound = method()
        if bound is not None:
            bound(verdict)

    return call


def _close_in_child() -> None:
    """Close the parent's connections in a forked child: open there, they would hide the parent's death."""
    for client in list(_open):
        client.close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

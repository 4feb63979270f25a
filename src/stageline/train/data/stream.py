"""Samples from an iterable of unknown length."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from stageline.common.errors import StagelineError, shorten
from stageline.train.data.source import Batch, collate, digest, own_fingerprint

MAX_SILENT_SKIP = 1000
"""Up to this many samples are skipped without seeking and without a note."""

MAX_STATES = 16
"""Number of recent states of the iterable to keep, one per batch, for a checkpoint a few batches later."""

_END = object()


def print_note(text: str) -> None:
    """Print a status line to stderr."""
    print(text, file=sys.stderr, flush=True)


class Stream:
    """The samples of an iterable in its order, one epoch after the other without end.

    Samples are numbered from 0 over all epochs. Every replica iterates over all samples and keeps its own. To resume,
    an iterable with `seek(n)` starts its next `iter()` with sample n of the endless sequence; one with `state_dict()`
    and `load_state_dict(state)` gets its state back; for any other, samples are skipped. `set_epoch(e)` is called at
    the start of an epoch if the iterable has it.

    >>> stream = Stream([[1, 2, 3], [4, 5, 6]], name="two rows")
    >>> stream.take(1, 2)
    (tensor([[4, 5], [1, 2]]), tensor([[5, 6], [2, 3]]))
    """

    length = None

    def __init__(
        self, iterable: Any, *, name: str = "stream", vocab_size: int = 0, note: Callable[[str], None] = print_note
    ) -> None:
        """Nothing is drawn yet. `note` is called with a status line while samples are skipped."""
        if not hasattr(iterable, "__iter__"):
            raise StagelineError(f"{name} is {shorten(iterable)}, of type {type(iterable).__name__}; use an iterable")
        self.iterable, self.name, self.vocab_size, self.note = iterable, name, vocab_size, note
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        """Makes a batch of samples instead of `collate`."""
        self._iterator: Iterator[Any] | None = None
        self._drawn = self._epoch = 0
        self._error: BaseException | None = None
        self._states: deque[dict[str, Any]] = deque(maxlen=MAX_STATES)
        self._lock = threading.Lock()
        self._can_seek = callable(getattr(iterable, "seek", None))
        self._has_state = not self._can_seek and all(
            callable(getattr(iterable, method, None)) for method in ("state_dict", "load_state_dict")
        )
        self._initial = self._state() if self._has_state else None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the iterable, or a digest of its name; it is not read."""
        return digest(own_fingerprint(self.iterable) or self.name)

    def identity(self) -> dict[str, Any]:
        """Return JSON-serialisable data for a checkpoint."""
        return {"kind": "stream", "name": self.name, "fingerprint": self.fingerprint}

    def describe(self) -> str:
        """Return a short description of the amount of data."""
        return "a stream of samples"

    def take(self, first: int, count: int) -> Batch:
        """Return the samples number `first` to `first + count - 1` as a batch."""
        self._go_to(first)
        samples = [self._next() for _ in range(count)]
        if self._has_state:
            with self._lock:
                self._states.append(self._state())
        return collate(samples, range(first, first + count), self.name, self.vocab_size, self.collate_fn)

    def state(self, position: int) -> dict[str, Any] | None:
        """Return the last state of the iterable at or before a sample; None if there is none."""
        with self._lock:
            return next((state for state in reversed(self._states) if state["drawn"] <= position), None)

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a state, if the iterable supports it."""
        if self._has_state:
            self.iterable.load_state_dict(state["state"])
            self._iterator, self._error = None, None
            self._drawn, self._epoch = state["drawn"], state["epoch"]
            with self._lock:
                self._states.append(state)

    def _state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "epoch": self._epoch, "state": deepcopy(self.iterable.state_dict())}

    def _go_to(self, first: int) -> None:
        if self._can_seek and (self._iterator is None or not 0 <= first - self._drawn <= MAX_SILENT_SKIP):
            self._drawn, self._iterator = first, None
        if first < self._drawn and self._initial is not None:
            self.load_state(self.state(first) or self._initial)
        elif first < self._drawn:
            if iter(self.iterable) is self.iterable:
                raise StagelineError(
                    f"{self.name} is at sample {self._drawn:,} and cannot go back to {first:,}: an iterator can be "
                    "read only once; give it a seek(n) method, or use an iterable whose __iter__ starts over"
                )
            self._drawn, self._epoch, self._iterator = 0, 0, None
        self._skip(first - self._drawn)

    def _skip(self, count: int) -> None:
        target, last_note = self._drawn + count, time.monotonic()
        if count > MAX_SILENT_SKIP:
            self.note(
                f"{self.name}: skipping {count:,} samples to resume at {target:,}; with a seek(n) or state_dict() "
                "method, resuming would be immediate"
            )
        while self._drawn < target:
            self._next()
            if time.monotonic() - last_note > 10:
                last_note = time.monotonic()
                self.note(f"{self.name}: {target - self._drawn:,} samples left to skip")

    def _next(self) -> Any:
        if self._error is not None:
            raise StagelineError(
                f"{self.name} failed before, at sample {self._drawn:,}, with {type(self._error).__name__}: "
                f"{self._error}; it cannot continue"
            ) from self._error
        try:
            sample = next(self._current_iterator(), _END)
            if sample is _END:
                self._iterator, self._epoch = None, self._epoch + 1
                sample = next(self._current_iterator(), _END)
        except BaseException as error:
            self._error = error
            raise
        if sample is _END:
            raise self._end_error()
        self._drawn += 1
        return sample

    def _current_iterator(self) -> Iterator[Any]:
        if self._iterator is None:
            if self._can_seek:
                self.iterable.seek(self._drawn)
            elif callable(set_epoch := getattr(self.iterable, "set_epoch", None)):
                set_epoch(self._epoch)
            self._iterator = iter(self.iterable)
        return self._iterator

    def _end_error(self) -> StagelineError:
        if self._drawn == 0:
            return StagelineError(f"{self.name} has no samples: the iterable is empty")
        retry = f"after seek({self._drawn})" if self._can_seek else "when iterated again"
        advice = (
            "seek(n) receives the number of samples drawn over all epochs; take it modulo the length of an epoch"
            if self._can_seek
            else "use an iterable whose __iter__ starts over, or fewer training.steps"
        )
        return StagelineError(f"{self.name} ended after {self._drawn:,} samples and returned none {retry}: {advice}")

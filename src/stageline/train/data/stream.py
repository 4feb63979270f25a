"""Samples from an iterable, of which nobody knows how many there are."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from stageline.errors import StagelineError, shorten
from stageline.train.data.collate import Batch, collate
from stageline.train.data.source import digest, own_fingerprint

FAR = 1000
"""Samples that are skipped without asking whether there is a quicker way, and without a word."""

STATES = 64
"""States of the iterable that are kept, one a batch, for a checkpoint that is taken a few batches later."""

_END = object()


def say(text: str) -> None:
    """Tell people on stderr what takes long."""
    print(text, file=sys.stderr, flush=True)


class Stream:
    """The samples of an iterable in its order, one epoch after the other without end.

    A sample has the number of those drawn before it. Every replica iterates over all samples and keeps its own. To go
    on from a sample, an iterable that has `seek(n)` is told so and begins the next `iter()` with sample n of the
    endless sequence; one with `state_dict()` and `load_state_dict(state)` gets a state back; any other is skipped
    through. An iterable with `set_epoch(e)` is told which epoch begins.

    >>> stream = Stream([[1, 2, 3], [4, 5, 6]], name="two rows")
    >>> stream.take(1, 2)
    (tensor([[4, 5], [1, 2]]), tensor([[5, 6], [2, 3]]))
    """

    length = None

    def __init__(
        self, iterable: Any, *, name: str = "stream", vocab_size: int = 0, note: Callable[[str], None] = say
    ) -> None:
        """Take an iterable; nothing is drawn yet. `note` is called with a line for people while samples are skipped."""
        if not hasattr(iterable, "__iter__"):
            raise StagelineError(f"{name} is a {type(iterable).__name__}, {shorten(iterable)}; give an iterable")
        self.iterable, self.name, self.vocab_size, self.note = iterable, name, vocab_size, note
        self._iterator: Iterator[Any] | None = None
        self._drawn = self._epoch = 0
        self._failed: BaseException | None = None
        self._states: deque[dict[str, Any]] = deque(maxlen=STATES)
        self._lock = threading.Lock()
        self._seeks = callable(getattr(iterable, "seek", None))
        self._has_state = not self._seeks and all(
            callable(getattr(iterable, each, None)) for each in ("state_dict", "load_state_dict")
        )

    @property
    def fingerprint(self) -> str:
        """The iterable's own fingerprint, or a digest of its name: it is not read for it."""
        return digest(own_fingerprint(self.iterable) or self.name)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kind": "stream", "name": self.name, "fingerprint": self.fingerprint}

    def describe(self) -> str:
        """How much there is: that is not known."""
        return "a stream of samples"

    def take(self, first: int, count: int) -> Batch:
        """A batch of the samples number `first` to `first + count - 1`."""
        self._go_to(first)
        samples = [self._next() for _ in range(count)]
        if self._has_state:
            state = {"drawn": self._drawn, "epoch": self._epoch, "state": self.iterable.state_dict()}
            with self._lock:
                self._states.append(state)
        return collate(samples, range(first, first + count), self.name, self.vocab_size)

    def state(self, position: int) -> dict[str, Any] | None:
        """The last state of the iterable at or before a sample; None where there is none."""
        with self._lock:
            return next((each for each in reversed(self._states) if each["drawn"] <= position), None)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state, if the iterable has such."""
        if self._has_state:
            self.iterable.load_state_dict(state["state"])
            self._iterator, self._failed = None, None
            self._drawn, self._epoch = state["drawn"], state["epoch"]

    def _go_to(self, first: int) -> None:
        if self._seeks and (self._iterator is None or not 0 <= first - self._drawn <= FAR):
            self._drawn, self._iterator = first, None
        if first < self._drawn:
            if iter(self.iterable) is self.iterable:
                raise StagelineError(
                    f"{self.name} is at sample {self._drawn:,} and cannot go back to {first:,}: it is an iterator, "
                    "which is read once; give it a seek(n), or give an iterable with an __iter__ that begins anew"
                )
            self._drawn, self._epoch, self._iterator = 0, 0, None
        self._skip(first - self._drawn)

    def _skip(self, count: int) -> None:
        target, said = self._drawn + count, time.monotonic()
        if count > FAR:
            self.note(
                f"{self.name}: skipping {count:,} samples to go on at {target:,}; with a seek(n) or a state_dict it "
                "would be there at once"
            )
        while self._drawn < target:
            self._next()
            if time.monotonic() - said > 10:
                said = time.monotonic()
                self.note(f"{self.name}: {target - self._drawn:,} samples left to skip")

    def _next(self) -> Any:
        if self._failed is not None:
            raise StagelineError(
                f"{self.name} failed before, at sample {self._drawn:,}, with {type(self._failed).__name__}: "
                f"{self._failed}; it cannot go on"
            ) from self._failed
        try:
            sample = next(self._begun(), _END)
            if sample is _END:
                self._iterator, self._epoch = None, self._epoch + 1
                sample = next(self._begun(), _END)
        except BaseException as error:
            self._failed = error
            raise
        if sample is _END:
            raise self._ended()
        self._drawn += 1
        return sample

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            if self._seeks:
                self.iterable.seek(self._drawn)
            elif callable(tell := getattr(self.iterable, "set_epoch", None)):
                tell(self._epoch)
            self._iterator = iter(self.iterable)
        return self._iterator

    def _ended(self) -> StagelineError:
        if self._drawn == 0:
            return StagelineError(f"{self.name} gave no sample: the iterable is empty")
        again = f"asked for seek({self._drawn})" if self._seeks else "iterated again"
        advice = (
            "its seek(n) is given the number of all samples drawn so far, over all epochs; take it modulo an epoch"
            if self._seeks
            else "give an iterable with an __iter__ that begins anew, or train for fewer training.steps"
        )
        return StagelineError(
            f"{self.name} ended after {self._drawn:,} samples and gave none when it was {again}: {advice}"
        )

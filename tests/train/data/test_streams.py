"""Streams of samples, resumed at their position, and batches that are prepared ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline import StagelineError
from stageline.train.data import Batch, Loader, Prefetch, Stream
from support.instances import examples
from support.texts import counting


def same(one: Batch, two: Batch) -> bool:
    return torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


class Numbers:
    """Rows that say their number; ten an epoch, or without end."""

    def __init__(self, epoch: int | None = 10) -> None:
        self.epoch = epoch
        self.drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in count() if self.epoch is None else range(self.epoch):
            self.drawn += 1
            yield [number, number]


class Seeking(Numbers):
    begin = 0

    def seek(self, position: int) -> None:
        self.begin = position

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.begin % 10, 10):
            self.drawn += 1
            yield [number, number]


class Remembering(Numbers):
    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < 10:
            self.drawn += 1
            self.at += 1
            yield [self.at - 1, self.at - 1]
        self.at = 0


def numbers(batch: Batch) -> list[int]:
    return [int(number) for number in batch[0].flatten()]


def test_a_stream_goes_through_its_epochs_in_order() -> None:
    assert numbers(Loader(Stream(Numbers()), batch=4).samples(8, 14)) == [8, 9, *range(10), 0, 1]


@pytest.mark.parametrize(("kind", "drawn"), [(Numbers, 5024), (Seeking, 4), (Remembering, 4)])
def test_a_stream_is_taken_up_where_it_was(kind: type[Numbers], drawn: int) -> None:
    """Only a stream that cannot seek is skipped through, with a note."""
    first = Loader(Stream(kind()), batch=4)
    expected = numbers(first.samples(5000, 20))
    for position in range(5020, 5040, 4):
        first.batch(position)
    iterable, notes = kind(), list[str]()
    again = Loader(Stream(iterable, note=notes.append), batch=4)
    position = again.load_state_dict(first.state_dict(5020))
    assert numbers(again.batch(position)) == [0, 1, 2, 3]
    assert expected == list(range(10)) * 2
    assert iterable.drawn == drawn
    assert bool(notes) == (kind is Numbers)
    assert all("skipping 5,020 samples" in note for note in notes)


@settings(max_examples=examples(60))
@given(
    st.sampled_from([Numbers, Seeking, Remembering]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_a_stream_resumes_with_other_replicas(
    kind: type[Numbers], replicas: int, local: int, batches: int, ahead: int, later: int
) -> None:
    """The checkpoint has a position a few batches back, as when batches are prepared ahead."""
    first = Loader(Stream(kind()), batch=replicas * local)
    for turn in range(batches + ahead):
        first.batch(turn * replicas * local, 0, replicas, local)
    position = batches * replicas * local
    state = first.state_dict(position)
    samples = []
    for replica in range(later):
        again = Loader(Stream(kind()), batch=later * 3)
        samples += numbers(again.batch(again.load_state_dict(state), replica, later, 3))
    assert samples == [number % 10 for number in range(position, position + later * 3)]


@pytest.mark.parametrize("kind", [Numbers, Seeking, Remembering])
def test_a_stream_is_read_again_from_before(kind: type[Numbers]) -> None:
    """As for validation, which reads the same samples every time."""
    loader = Loader(Stream(kind()), batch=25)
    for first in (0, 0, 12, 3, 200, 0, 199):
        assert numbers(loader.batch(first)) == [number % 10 for number in range(first, first + 25)]


def test_a_checkpoint_right_after_going_on_is_as_good() -> None:
    first = Loader(Stream(Remembering()), batch=4)
    for position in range(0, 2000, 4):
        first.batch(position)
    second = Loader(Stream(Remembering()), batch=4)
    position = second.load_state_dict(first.state_dict(2000))
    iterable = Remembering()
    third = Loader(Stream(iterable), batch=4)
    assert numbers(third.batch(third.load_state_dict(second.state_dict(position)))) == [0, 1, 2, 3]
    assert iterable.drawn == 4


def test_a_stream_is_told_its_epoch() -> None:
    epochs: list[int] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    Loader(Stream(Told()), batch=25).batch(0)
    assert epochs == [0, 1, 2]


def test_a_resumed_stream_is_given_its_epoch() -> None:
    epochs: list[int] = []

    class Told(Remembering):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    first, again = Loader(Stream(Told()), batch=25), Loader(Stream(Told()), batch=25)
    first.batch(0)
    epochs.clear()
    again.batch(again.load_state_dict(first.state_dict(25)))
    assert epochs == [2, 3, 4]


def test_streams_that_end_say_after_how_many_samples() -> None:
    with pytest.raises(StagelineError, match="mine has no samples: the iterable is empty"):
        Stream([], name="mine").take(0, 1)
    with pytest.raises(StagelineError, match="mine ended after 10 samples and returned none when iterated again"):
        Stream(iter(Numbers()), name="mine").take(0, 11)

    class Short(Seeking):
        def __iter__(self) -> Iterator[list[int]]:
            return (row for row in [[number, number] for number in range(10)][self.begin :])

    with pytest.raises(StagelineError, match=r"ended after 10 samples .* seek\(10\): .* modulo the length of an epoch"):
        Stream(Short(), name="mine").take(0, 11)
    with pytest.raises(StagelineError, match="mine is 5, of type int; use an iterable"):
        Stream(5, name="mine")


def test_an_iterator_is_not_read_twice() -> None:
    stream = Stream(iter(Numbers()), name="mine")
    stream.take(0, 4)
    with pytest.raises(StagelineError, match="mine is at sample 4 and cannot go back to 2"):
        stream.take(2, 1)


def test_a_stream_that_failed_does_not_begin_a_new_epoch() -> None:
    def failing() -> Iterator[list[int]]:
        yield [1, 2]
        raise OSError("the disk is gone")

    stream = Stream(failing(), name="mine")
    with pytest.raises(OSError, match="the disk is gone"):
        stream.take(0, 2)
    with pytest.raises(StagelineError, match="failed before, at sample 1, with OSError: the disk is gone"):
        stream.take(1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_batches_made_ahead_are_the_same(stream: bool) -> None:
    def loader() -> Loader:
        return Loader(Stream(Numbers()) if stream else counting(7), batch=6, seed=2)

    with Prefetch(loader(), position=12, replica=1, replicas=2, local=3, ahead=3) as batches:
        for turn in range(20):
            assert batches.position == 12 + turn * 6
            assert same(next(batches), loader().batch(12 + turn * 6, 1, 2, 3))
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stageline-prefetch"]


def test_no_more_batches_are_made_ahead_than_allowed() -> None:
    batches_made = threading.Semaphore(0)
    iterable = Numbers(None)

    class Counted(Loader):
        def batch(self, *args: Any, **kwargs: Any) -> Batch:
            batch = super().batch(*args, **kwargs)
            batches_made.release()
            return batch

    with Prefetch(Counted(Stream(iterable), batch=2), ahead=3) as batches:
        for _ in range(3):
            assert batches_made.acquire(timeout=30)
        assert not batches_made.acquire(timeout=0.2)
        assert iterable.drawn == 6
        next(batches)
        assert batches_made.acquire(timeout=30)
        assert not batches_made.acquire(timeout=0.2)


def test_an_error_comes_with_its_batch_and_stays() -> None:
    with Prefetch(Loader(Stream(iter(Numbers()), name="mine"), batch=4), ahead=5) as batches:
        assert numbers(next(batches)) == [0, 1, 2, 3]
        assert numbers(next(batches)) == [4, 5, 6, 7]
        for _ in range(2):
            with pytest.raises(StagelineError, match="mine ended after 10 samples"):
                next(batches)
        assert batches.position == 8
    with pytest.raises(StagelineError, match="closed"):
        next(batches)
    assert not running()


def test_a_source_that_hangs_is_named() -> None:
    gate = threading.Event()

    def hanging() -> Iterator[list[int]]:
        gate.wait(60)
        yield [1, 2]

    with Prefetch(Loader(Stream(hanging(), name="mine"), batch=1), timeout=0.1) as batches:
        with pytest.raises(StagelineError, match=r"mine produced no batch for 0\.1 seconds, at sample 0"):
            next(batches)
        gate.set()
    assert not running()

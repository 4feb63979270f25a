"""The order of the data: every sample once an epoch, the same for any number of replicas and from any position on."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import examples
from stageline import StagelineError
from stageline.train.data import Batch, Indexed, Items, Loader, Prefetch, Stream, Tokens
from stageline.train.data.permutation import shuffled

SEEDS = st.integers(-(2**70), 2**70)


def counting(samples: int, seq_len: int = 3) -> Tokens:
    """Tokens of which each says where it stands."""
    return Tokens(np.arange(samples * seq_len + 1), seq_len, name="counting", digest="counting")


def same(one: Batch, two: Batch) -> bool:
    return torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 5000), SEEDS, st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_for_any_size_and_seed(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(2**31, 2**48), SEEDS, st.lists(st.integers(0, 2**31), min_size=2, unique=True))
def test_huge_data_is_permuted_without_being_held(size: int, seed: int, places: list[int]) -> None:
    order = shuffled(np.array(places), size, seed, 0)
    assert len(set(order.tolist())) == len(places)
    assert order.min() >= 0
    assert order.max() < size
    one_by_one = [int(shuffled(np.array([place]), size, seed, 0)[0]) for place in places[:3]]
    assert one_by_one == order[:3].tolist()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(20, 2000), SEEDS, st.integers(0, 10**6), st.integers(1, 10**6))
def test_every_epoch_and_every_seed_has_an_order_of_its_own(size: int, seed: int, epoch: int, later: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert not np.array_equal(order, shuffled(np.arange(size), size, seed, epoch + later))
    assert not np.array_equal(order, shuffled(np.arange(size), size, seed + later, epoch))


@pytest.mark.parametrize("size", [3, 5, 16, 100])
def test_over_many_epochs_every_sample_comes_at_every_place_as_often(size: int) -> None:
    epochs = 1000
    orders = np.array([shuffled(np.arange(size), size, 7, epoch) for epoch in range(epochs)])
    for place in range(size):
        expected = epochs / size
        chi = ((np.bincount(orders[:, place], minlength=size) - expected) ** 2 / expected).sum()
        assert chi < size - 1 + 5 * np.sqrt(2 * (size - 1)), place  # five deviations


def in_plain_python(place: int, size: int, seed: int, epoch: int) -> int:
    """The order once more in integers without a size, which no platform and no version of numpy can bend."""
    words = hashlib.blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(words[at : at + 8], "little") for at in range(0, 64, 8)]
    columns = next(each for each in range(1, size + 1) if each * each >= size)
    rows = math.ceil(size / columns)

    def mixed(number: int, key: int) -> int:
        number ^= key
        for _ in range(2):
            number = (number ^ number >> 32) * 0xD6E8FEB86659FD93 % 2**64
        return number ^ number >> 32

    while True:
        row, column = divmod(place, columns)
        for turn in range(0, 8, 2):
            row = (row + mixed(column, keys[turn])) % rows
            column = (column + mixed(row, keys[turn + 1])) % columns
        place = row * columns + column
        if place < size:
            return place


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 10**8), SEEDS, st.integers(0, 10**6), st.data())
def test_the_order_is_the_same_on_every_platform(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    assert shuffled(np.array([place]), size, seed, epoch).tolist() == [in_plain_python(place, size, seed, epoch)]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 300), st.integers(1, 9), st.integers(0, 5), SEEDS)
def test_every_token_is_a_target_once_an_epoch(tokens: int, seq_len: int, epoch: int, seed: int) -> None:
    seq_len = min(seq_len, tokens - 1)
    source = Tokens(np.arange(tokens), seq_len, digest="x")
    loader = Loader(source, batch=1, seed=seed)
    inputs, targets = loader.samples(epoch * source.length, source.length)
    assert torch.equal(inputs + 1, targets)
    assert sorted(targets.flatten().tolist()) == list(range(1, source.length * seq_len + 1))
    assert tokens - 1 - source.length * seq_len < seq_len
    assert (inputs.dtype, inputs.shape) == (torch.int64, (source.length, seq_len))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_shares_of_replicas_are_the_batch_of_one(
    samples: int, position: int, replicas: int, local: int, shuffle: bool, stream: bool
) -> None:
    source: Any = counting(samples)
    if stream:
        position %= 100
        source = Stream([source.array[at : at + 4] for at in range(samples)])
    loader = Loader(source, batch=replicas * local, seed=1, shuffle=shuffle)
    whole = loader.batch(position)
    shares = [loader.batch(position, replica, replicas, local) for replica in range(replicas)]
    assert torch.equal(torch.cat([share[0] for share in shares]), whole[0])
    assert torch.equal(torch.cat([share[1] for share in shares]), whole[1])


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 30), st.integers(0, 100), st.integers(1, 40), SEEDS, st.sampled_from(["tokens", "items", "stream"])
)
def test_going_on_from_a_position_is_as_if_never_stopped(
    samples: int, position: int, after: int, seed: int, kind: str
) -> None:
    def loader() -> Loader:
        tokens = counting(samples)
        rows = [tokens.array[at * 3 : at * 3 + 4] for at in range(samples)]
        kinds: dict[str, Indexed | Stream] = {"tokens": tokens, "items": Items(rows), "stream": Stream(rows)}
        return Loader(kinds[kind], batch=after, seed=seed)

    uninterrupted = loader().samples(0, position + after)
    again = loader()
    assert again.load_state_dict(loader().state_dict(position)) == position
    inputs, targets = again.samples(position, after)
    assert torch.equal(inputs, uninterrupted[0][position:])
    assert torch.equal(targets, uninterrupted[1][position:])


def test_the_same_samples_are_trained_on_with_any_number_of_replicas() -> None:
    loader = Loader(counting(50), batch=12, seed=3)
    for replicas, local in ((1, 12), (1, 4), (2, 3), (3, 4), (6, 1)):
        found = []
        for turn in range(loader.turns(replicas, local)):
            at = 24 + turn * replicas * local
            found += [loader.batch(at, replica, replicas, local)[0] for replica in range(replicas)]
        assert torch.equal(torch.cat(found), loader.batch(24)[0])


def test_batches_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    loader = Loader(counting(5), batch=30)
    with pytest.raises(StagelineError, match=r"30, which is no multiple of 2 replicas × 4 .* = 8; the nearest is 32"):
        loader.turns(2, 4)
    with pytest.raises(StagelineError, match="which 4 replicas cannot share evenly; the nearest that they can is 32"):
        loader.batch(0, 0, 4)
    with pytest.raises(StagelineError, match="replica 2 is none of 2"):
        loader.batch(0, 2, 2)
    with pytest.raises(StagelineError, match="got 3 from -1"):
        loader.samples(-1, 3)


def test_a_checkpoint_with_another_seed_is_refused() -> None:
    state = Loader(counting(5), batch=2, seed=1).state_dict(4)
    with pytest.raises(StagelineError, match=r"training\.seed 1 .* from 2 now"):
        Loader(counting(5), batch=2, seed=2).load_state_dict(state)
    with pytest.raises(StagelineError, match=r"position of a checkpoint.*got None"):
        Loader(counting(5), batch=2, seed=1).load_state_dict({})


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
    return [int(each) for each in batch[0].flatten()]


def test_a_stream_goes_through_its_epochs_in_order() -> None:
    assert numbers(Loader(Stream(Numbers()), batch=4).samples(8, 14)) == [8, 9, *range(10), 0, 1]


@pytest.mark.parametrize(("kind", "drawn"), [(Numbers, 5024), (Seeking, 4), (Remembering, 4)])
def test_a_stream_is_taken_up_where_it_was(kind: type[Numbers], drawn: int) -> None:
    """Only one that cannot be told where to go on is skipped through, with a note."""
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


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([Numbers, Seeking, Remembering]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_a_stream_goes_on_with_other_replicas(
    kind: type[Numbers], replicas: int, local: int, batches: int, ahead: int, later: int
) -> None:
    """The checkpoint is of a position a few batches back, as when batches are made ahead."""
    first = Loader(Stream(kind()), batch=replicas * local)
    for turn in range(batches + ahead):
        first.batch(turn * replicas * local, 0, replicas, local)
    position = batches * replicas * local
    state = first.state_dict(position)
    found = []
    for replica in range(later):
        again = Loader(Stream(kind()), batch=later * 3)
        found += numbers(again.batch(again.load_state_dict(state), replica, later, 3))
    assert found == [number % 10 for number in range(position, position + later * 3)]


def test_a_stream_is_told_its_epoch() -> None:
    told: list[int] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    Loader(Stream(Told()), batch=25).batch(0)
    assert told == [0, 1, 2]


def test_streams_that_end_say_after_how_many_samples() -> None:
    with pytest.raises(StagelineError, match="mine gave no sample: the iterable is empty"):
        Stream([], name="mine").take(0, 1)
    with pytest.raises(StagelineError, match="mine ended after 10 samples and gave none when it was iterated again"):
        Stream(iter(Numbers()), name="mine").take(0, 11)

    class Short(Seeking):
        def __iter__(self) -> Iterator[list[int]]:
            return (row for row in [[number, number] for number in range(10)][self.begin :])

    with pytest.raises(StagelineError, match=r"ended after 10 samples .* seek\(10\): .* modulo an epoch"):
        Stream(Short(), name="mine").take(0, 11)
    with pytest.raises(StagelineError, match="mine is a int, 5; give an iterable"):
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
    return [each for each in threading.enumerate() if each.name == "stageline-prefetch"]


def test_no_more_batches_are_made_ahead_than_allowed() -> None:
    made = threading.Semaphore(0)
    iterable = Numbers(None)

    class Counted(Loader):
        def batch(self, *args: Any, **kwargs: Any) -> Batch:
            found = super().batch(*args, **kwargs)
            made.release()
            return found

    with Prefetch(Counted(Stream(iterable), batch=2), ahead=3) as batches:
        for _ in range(3):
            assert made.acquire(timeout=30)
        assert not made.acquire(timeout=0.2)
        assert iterable.drawn == 6
        next(batches)
        assert made.acquire(timeout=30)
        assert not made.acquire(timeout=0.2)


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
        with pytest.raises(StagelineError, match=r"mine gave no batch for 0\.1 seconds, at sample 0"):
            next(batches)
        gate.set()
    assert not running()

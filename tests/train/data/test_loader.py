"""The order of the data: every sample once an epoch, the same for any number of replicas and from any position on."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline import StagelineError
from stageline.train.data import Indexed, Items, Loader, Stream, Tokens
from stageline.train.data.loader import shuffled
from support.instances import examples
from support.texts import counting

SEEDS = st.integers(-(2**70), 2**70)


@settings(max_examples=examples(200))
@given(st.integers(1, 5000), SEEDS, st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_for_any_size_and_seed(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=examples(50))
@given(st.integers(2**31, 2**48), SEEDS, st.lists(st.integers(0, 2**31), min_size=2, unique=True))
def test_huge_data_is_permuted_without_being_held(size: int, seed: int, places: list[int]) -> None:
    order = shuffled(np.array(places), size, seed, 0)
    assert len(set(order.tolist())) == len(places)
    assert order.min() >= 0
    assert order.max() < size
    one_by_one = [int(shuffled(np.array([place]), size, seed, 0)[0]) for place in places[:3]]
    assert one_by_one == order[:3].tolist()


@settings(max_examples=examples(100))
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
    """The same order computed with Python's unbounded integers, independent of the platform and of numpy."""
    words = hashlib.blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(words[at : at + 8], "little") for at in range(0, 64, 8)]
    columns = next(count for count in range(1, size + 1) if count * count >= size)
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


@settings(max_examples=examples(100))
@given(st.integers(1, 10**8), SEEDS, st.integers(0, 10**6), st.data())
def test_the_order_is_the_same_on_every_platform(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    assert shuffled(np.array([place]), size, seed, epoch).tolist() == [in_plain_python(place, size, seed, epoch)]


@settings(max_examples=examples(100))
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


@settings(max_examples=examples(100))
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


@settings(max_examples=examples(100))
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
        parts = []
        for turn in range(loader.turns(replicas, local)):
            at = 24 + turn * replicas * local
            parts += [loader.batch(at, replica, replicas, local)[0] for replica in range(replicas)]
        assert torch.equal(torch.cat(parts), loader.batch(24)[0])


def test_batches_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    loader = Loader(counting(5), batch=30)
    with pytest.raises(
        StagelineError, match=r"30, which is not a multiple of 2 replicas × 4 .* = 8; the nearest value is 32"
    ):
        loader.turns(2, 4)
    with pytest.raises(StagelineError, match="which is not divisible by 4 replicas; the nearest value is 32"):
        loader.batch(0, 0, 4)
    with pytest.raises(StagelineError, match="replica is 2; with 2 replicas it must be from 0 to 1"):
        loader.batch(0, 2, 2)
    with pytest.raises(StagelineError, match="got 3 samples from -1"):
        loader.samples(-1, 3)


def test_a_checkpoint_with_another_seed_is_refused() -> None:
    state = Loader(counting(5), batch=2, seed=1).state_dict(4)
    with pytest.raises(StagelineError, match=r"training\.seed 1 .* it is now 2"):
        Loader(counting(5), batch=2, seed=2).load_state_dict(state)
    with pytest.raises(StagelineError, match=r"data position of the checkpoint.*got None"):
        Loader(counting(5), batch=2, seed=1).load_state_dict({})


def test_the_epochs_of_a_loader_have_orders_of_their_own() -> None:
    loader = Loader(counting(30), batch=30, seed=4)
    orders = [loader.batch(30 * epoch)[0][:, 0].tolist() for epoch in range(5)]
    assert all(sorted(order) == list(range(0, 90, 3)) for order in orders)
    assert len(set(map(tuple, orders))) == 5
    in_order = Loader(counting(30), batch=30, shuffle=False)
    assert in_order.batch(30)[0][:, 0].tolist() == list(range(0, 90, 3))

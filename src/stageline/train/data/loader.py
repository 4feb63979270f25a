"""The samples of a batch as a function of the position alone: the order of an epoch, and prefetching on a thread."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.bootstrap import lost_rank
from stageline.train.data.source import Batch, Indexed, check_same
from stageline.train.data.stream import Stream


class Loader:
    """An endless sequence of samples, with a new order in every epoch.

    The position is the number of samples that all replicas have consumed. It is all that is needed to resume, with any
    number of replicas.

    >>> from stageline.train.data import Tokens
    >>> loader = Loader(Tokens(np.arange(41), seq_len=4), batch=4, seed=0)
    >>> inputs, targets = loader.batch(8, replica=1, replicas=2, local=2)     # samples 10 and 11
    >>> bool((inputs == loader.samples(8, 4)[0][2:]).all()), loader.epoch(8)
    (True, 0.8)
    """

    def __init__(self, source: Indexed | Stream, *, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        """`batch` is the number of samples per optimizer step, over all replicas; a stream is never shuffled."""
        if batch < 1:
            raise StagelineError(f"batch must be at least 1, got {batch}")
        self.source, self.size, self.seed = source, batch, seed
        self.shuffle = shuffle and not isinstance(source, Stream)

    def samples(self, first: int, count: int) -> Batch:
        """Return the samples number `first` to `first + count - 1` as one batch of inputs and targets."""
        if first < 0 or count < 1:
            raise StagelineError(f"first must be at least 0 and count at least 1, got {count} samples from {first}")
        if isinstance(self.source, Stream):
            return self.source.take(first, count)
        length = self.source.length
        epochs, indices = np.divmod(np.arange(first, first + count, dtype=np.int64), length)
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                indices[epochs == epoch] = shuffled(indices[epochs == epoch], length, self.seed, epoch)
        return self.source.read(indices)

    def batch(self, position: int, replica: int = 0, replicas: int = 1, local: int | None = None) -> Batch:
        """Return the batch of one replica at a position: `local` samples, after those of the replicas before it.

        Without `local`, the replicas share the whole batch.
        """
        if not 0 <= replica < replicas:
            raise StagelineError(f"replica is {replica}; with {replicas} replicas it must be from 0 to {replicas - 1}")
        local = self.local(replicas) if local is None else local
        return self.samples(position + replica * local, local)

    def local(self, replicas: int) -> int:
        """Return each replica's share of a whole batch."""
        return self._divide_batch(replicas, f"divisible by {replicas} replicas")

    def turns(self, replicas: int, local: int) -> int:
        """Return how many times all replicas take `local` samples until a batch is full."""
        samples = replicas * local
        condition = f"a multiple of {replicas} replicas × {local} samples (training.local_batch_size) = {samples}"
        return self._divide_batch(samples, condition)

    def _divide_batch(self, samples: int, condition: str) -> int:
        if samples < 1 or self.size % samples:
            nearest = max(round(self.size / max(samples, 1)), 1) * max(samples, 1)
            raise StagelineError(
                f"training.global_batch_size is {self.size}, which is not {condition}; the nearest value is {nearest}"
            )
        return self.size // samples

    def epoch(self, position: int) -> float | None:
        """Return the number of epochs completed at a position; None for a stream."""
        return position / self.source.length if self.source.length else None

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the state for a checkpoint at a position; JSON-serialisable unless a stream's own state is not."""
        state: dict[str, Any] = {
            "position": position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "source": self.source.identity(),
        }
        if isinstance(self.source, Stream) and (stream_state := self.source.state(position)) is not None:
            state["stream"] = stream_state
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> int:
        """Check that data and order match a checkpoint, and return the position to resume from."""
        position = saved.get("position")
        if not isinstance(position, int) or position < 0:
            raise StagelineError(f"the data position of the checkpoint must be an integer >= 0, got {position!r}")
        check_same(saved.get("source", {}), self.source)
        if saved.get("shuffle") != self.shuffle or (self.shuffle and saved.get("seed") != self.seed):
            old, new = (shorten(seed) for seed in (saved.get("seed"), self.seed))
            raise StagelineError(
                f"the checkpoint was trained with training.seed {old} (shuffled: {saved.get('shuffle')}), but it is "
                f"now {new} (shuffled: {self.shuffle}); restore the old values, or start a new run"
            )
        if isinstance(self.source, Stream) and isinstance(saved.get("stream"), dict):
            self.source.load_state(saved["stream"])
        return position


ROUNDS = 8


def shuffled(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the elements at some indices of the permutation of 0 … size-1 that `seed` and `epoch` define.

    It needs memory only for the requested indices. It uses only integers, so it is the same on every platform.

    >>> shuffled(np.arange(8), 8, seed=1, epoch=0).tolist()
    [2, 7, 1, 0, 4, 5, 3, 6]
    >>> shuffled(np.array([2_999_999_999]), 3_000_000_000, seed=1, epoch=0).tolist()
    [1092807310]
    """
    # A number below columns * rows is a pair (row, column). Each round shifts one half by an amount that depends on the
    # other half and a key. That is invertible, so all rounds together permute the rectangle. Values that are not below
    # size are permuted again until they are (cycle walking), which ends because it follows a cycle.
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    key_bytes = hashlib.blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(key_bytes, "<u8").astype(np.uint64)
    values = _rounds(indices.astype(np.uint64), np.uint64(rows), np.uint64(columns), keys)
    while (outside := np.flatnonzero(values >= np.uint64(size))).size:
        values[outside] = _rounds(values[outside], np.uint64(rows), np.uint64(columns), keys)
    return values.astype(np.int64)


def _rounds(
    numbers: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    row, column = numbers // columns, numbers % columns
    for index in range(0, ROUNDS, 2):
        row = (row + _mix(column, keys[index]) % rows) % rows
        column = (column + _mix(row, keys[index + 1]) % columns) % columns
    return row * columns + column


def _mix(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix all bits of the numbers and the key into 64-bit hashes; arithmetic wraps around."""
    mixed = numbers ^ key
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


class Prefetch:
    """Iterates over the batches of a replica, prepared on a thread; use it as a context manager to end the thread.

    >>> import numpy as np
    >>> from stageline.train.data import Tokens
    >>> loader = Loader(Tokens(np.arange(41), seq_len=4), batch=2)
    >>> with Prefetch(loader, position=4) as batches:
    ...     inputs, targets = next(batches)
    ...     batches.position
    6
    >>> bool((inputs == loader.batch(4)[0]).all())
    True
    """

    def __init__(
        self,
        loader: Loader,
        *,
        position: int = 0,
        replica: int = 0,
        replicas: int = 1,
        local: int | None = None,
        ahead: int = 2,
        timeout: float = 600.0,
    ) -> None:
        """Start at a position, with at most `ahead` batches prepared.

        If a batch takes longer than `timeout` seconds, `next` raises `StagelineError`.
        """
        if ahead < 1:
            raise StagelineError(f"ahead must be at least 1, got {ahead}")
        self._loader, self._replica, self._replicas = loader, replica, replicas
        self._local = loader.local(replicas) if local is None else local
        self._position = self._next_position = position
        self._ahead, self._timeout = ahead, timeout
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="stageline-prefetch", daemon=True)
        self._thread.start()

    @property
    def position(self) -> int:
        """Samples that all replicas have consumed with the batches returned so far, for a checkpoint."""
        return self._position

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise an error of the source in the place of its batch."""
        with self._changed:
            end = time.monotonic() + self._timeout
            while time.monotonic() < end and not self._changed.wait_for(
                lambda: self._ready or self._error or self._closed, min(0.2, self._timeout)
            ):
                if lost := lost_rank():
                    raise StagelineError(f"{lost}; this job cannot continue; restart it")
            if self._closed:
                raise StagelineError("the prefetcher is closed")
            if self._ready:
                batch = self._ready.popleft()
                self._position += self._replicas * self._local
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
        raise StagelineError(
            f"{self._loader.source.name} produced no batch for {self._timeout:g} seconds, at sample {self._position:,}"
        )

    def close(self) -> None:
        """End the thread and drop its batches.

        Wait for a source that does not return for at most 5 seconds, or half a second where a rank is lost.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=0.5 if lost_rank() else 5)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                if self._closed:
                    return
            try:
                batch = self._loader.batch(self._next_position, self._replica, self._replicas, self._local)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            self._next_position += self._replicas * self._local
            with self._changed:
                self._ready.append(batch)
                self._changed.notify_all()

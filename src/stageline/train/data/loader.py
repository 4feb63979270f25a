"""The samples of a batch, as a function of the position alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stageline.common.errors import StagelineError, shorten
from stageline.train.data.collate import Batch
from stageline.train.data.permutation import shuffled
from stageline.train.data.source import Indexed, check_same
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
        """Return each replica's share of a whole batch.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=12).local(replicas=3)
        4
        """
        if replicas < 1 or self.size % replicas:
            raise StagelineError(
                f"training.global_batch_size is {self.size}, which is not divisible by {replicas} replicas; the "
                f"nearest value is {max(round(self.size / max(replicas, 1)), 1) * max(replicas, 1)}"
            )
        return self.size // replicas

    def turns(self, replicas: int, local: int) -> int:
        """Return how many times all replicas take `local` samples until a batch is full.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=32).turns(replicas=2, local=4)
        4
        """
        per_turn = replicas * local
        if per_turn < 1 or self.size % per_turn:
            raise StagelineError(
                f"training.global_batch_size is {self.size}, which is not a multiple of {replicas} replicas × {local} "
                f"samples (training.local_batch_size) = {per_turn}; the nearest value is "
                f"{max(round(self.size / max(per_turn, 1)), 1) * max(per_turn, 1)}"
            )
        return self.size // per_turn

    def epoch(self, position: int) -> float | None:
        """Return the number of epochs completed at a position; None for a stream.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=2).epoch(15)
        1.5
        """
        return position / self.source.length if self.source.length else None

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the state for a checkpoint at a position; JSON-serialisable unless a stream's own state is not.

        >>> from stageline.train.data import Tokens
        >>> state = Loader(Tokens(np.arange(41), seq_len=4), batch=2, seed=5).state_dict(6)
        >>> state["position"], state["seed"], state["source"]["tokens"]
        (6, 5, 41)
        """
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
        """Check that data and order match a checkpoint, and return the position to resume from.

        >>> from stageline.train.data import Tokens
        >>> loader = Loader(Tokens(np.arange(41), seq_len=4), batch=2)
        >>> loader.load_state_dict(loader.state_dict(6))
        6
        """
        position = saved.get("position")
        if not isinstance(position, int) or position < 0:
            raise StagelineError(f"the data position of the checkpoint must be an integer >= 0, got {position!r}")
        check_same(saved.get("source", {}), self.source)
        if saved.get("shuffle") != self.shuffle or (self.shuffle and saved.get("seed") != self.seed):
            old, new = (shorten(seed) for seed in (saved.get("seed"), self.seed))
            raise StagelineError(
                f"the checkpoint was trained with training.seed {old} (shuffled: {saved.get('shuffle')}), but the "
                f"seed is {new} now (shuffled: {self.shuffle}); restore it, or start a new run"
            )
        if isinstance(self.source, Stream) and isinstance(saved.get("stream"), dict):
            self.source.load_state(saved["stream"])
        return position

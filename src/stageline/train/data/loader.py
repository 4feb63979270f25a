"""Which samples make up a batch: a function of the position alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stageline.errors import StagelineError, shorten
from stageline.train.data.collate import Batch
from stageline.train.data.permutation import shuffled
from stageline.train.data.source import Indexed, check_same
from stageline.train.data.stream import Stream


class Loader:
    """The endless sequence of samples, every epoch in another order.

    The position is the number of samples that all replicas have consumed. It is all that has to be kept to go on, with
    as many replicas as you like.

    >>> from stageline.train.data import Tokens
    >>> loader = Loader(Tokens(np.arange(41), seq_len=4), batch=4, seed=0)
    >>> inputs, targets = loader.batch(8, replica=1, replicas=2, local=2)     # samples 10 and 11
    >>> bool((inputs == loader.samples(8, 4)[0][2:]).all()), loader.epoch(8)
    (True, 0.8)
    """

    def __init__(self, source: Indexed | Stream, *, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        """`batch` is the samples in a step of the optimizer, over all replicas; a stream is never shuffled."""
        if batch < 1:
            raise StagelineError(f"a batch has at least 1 sample, got {batch}")
        self.source, self.size, self.seed = source, batch, seed
        self.shuffle = shuffle and not isinstance(source, Stream)

    def samples(self, first: int, count: int) -> Batch:
        """The samples number `first` to `first + count - 1` as one batch of inputs and targets."""
        if first < 0 or count < 1:
            raise StagelineError(f"samples are asked for from 0 on and at least 1 of them, got {count} from {first}")
        if isinstance(self.source, Stream):
            return self.source.take(first, count)
        length = self.source.length
        epochs, places = np.divmod(np.arange(first, first + count, dtype=np.int64), length)
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                places[epochs == epoch] = shuffled(places[epochs == epoch], length, self.seed, epoch)
        return self.source.read(places)

    def batch(self, position: int, replica: int = 0, replicas: int = 1, local: int | None = None) -> Batch:
        """What one of several replicas takes at a position: `local` samples, after those of the replicas before it.

        Without `local`, the replicas share the whole batch.
        """
        if not 0 <= replica < replicas:
            raise StagelineError(f"replica {replica} is none of {replicas}: they count from 0 to {replicas - 1}")
        local = self.local(replicas) if local is None else local
        return self.samples(position + replica * local, local)

    def local(self, replicas: int) -> int:
        """Each replica's share of a whole batch.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=12).local(replicas=3)
        4
        """
        if replicas < 1 or self.size % replicas:
            raise StagelineError(
                f"training.global_batch_size is {self.size}, which {replicas} replicas cannot share evenly; the "
                f"nearest that they can is {max(round(self.size / max(replicas, 1)), 1) * max(replicas, 1)}"
            )
        return self.size // replicas

    def turns(self, replicas: int, local: int) -> int:
        """How often all replicas take `local` samples until a batch is full.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=32).turns(replicas=2, local=4)
        4
        """
        at_once = replicas * local
        if at_once < 1 or self.size % at_once:
            raise StagelineError(
                f"training.global_batch_size is {self.size}, which is no multiple of {replicas} replicas × {local} "
                f"samples (training.local_batch_size) = {at_once}; the nearest is "
                f"{max(round(self.size / max(at_once, 1)), 1) * max(at_once, 1)}"
            )
        return self.size // at_once

    def epoch(self, position: int) -> float | None:
        """How often the data has been seen at a position; None for a stream.

        >>> from stageline.train.data import Tokens
        >>> Loader(Tokens(np.arange(41), seq_len=4), batch=2).epoch(15)
        1.5
        """
        return position / self.source.length if self.source.length else None

    def state_dict(self, position: int) -> dict[str, Any]:
        """What a checkpoint at a position keeps: JSON can hold it, unless a stream's own state says otherwise.

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
        if isinstance(self.source, Stream) and (own := self.source.state(position)) is not None:
            state["stream"] = own
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> int:
        """Make sure that data and order are those of a checkpoint, and give its position to go on from.

        >>> from stageline.train.data import Tokens
        >>> loader = Loader(Tokens(np.arange(41), seq_len=4), batch=2)
        >>> loader.load_state_dict(loader.state_dict(6))
        6
        """
        position = saved.get("position")
        if not isinstance(position, int) or position < 0:
            raise StagelineError(f"the position of a checkpoint in its data is a number from 0 on, got {position!r}")
        check_same(saved.get("source", {}), self.source)
        if saved.get("shuffle") != self.shuffle or (self.shuffle and saved.get("seed") != self.seed):
            old, new = (shorten(each) for each in (saved.get("seed"), self.seed))
            raise StagelineError(
                f"the order of the data was drawn from training.seed {old} (shuffled: {saved.get('shuffle')}) and is "
                f"from {new} now (shuffled: {self.shuffle}); set it back, or begin a new run"
            )
        if isinstance(self.source, Stream) and isinstance(saved.get("stream"), dict):
            self.source.load_state(saved["stream"])
        return position

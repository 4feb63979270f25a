"""Prefetch batches on a thread while a step runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

from stageline.common.errors import StagelineError
from stageline.distributed.process_groups import lost_rank
from stageline.train.data.collate import Batch
from stageline.train.data.loader import Loader


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
                    raise StagelineError(f"{lost}; this job cannot go on: start it again")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

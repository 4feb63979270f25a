"""Validation: the loss on samples that are not trained on, each of which counts at most once."""

from __future__ import annotations

from collections.abc import Callable

from stageline.common.errors import StagelineError
from stageline.train.data import Loader
from stageline.train.step import TrainingStep


def validation_batches(available: int | None, wanted: int, local: int, replicas: int) -> list[tuple[int, int]]:
    """Return the first sample and the size of each batch, of which every replica takes up to `local` samples.

    `available` is None for a stream of unknown length. A last batch with fewer samples than replicas is left out.

    >>> validation_batches(available=11, wanted=100, local=2, replicas=2)
    [(0, 4), (4, 4), (8, 3)]
    >>> validation_batches(available=9, wanted=100, local=2, replicas=2)
    [(0, 4), (4, 4)]
    """
    samples, size = wanted if available is None else min(available, wanted), local * replicas
    batches = [(first, min(size, samples - first)) for first in range(0, samples, size)]
    return [(first, count) for first, count in batches if count >= replicas]


class Validation:
    """Evaluates on the same samples every time; all processes make the same calls."""

    def __init__(self, loader: Loader, *, wanted: int, local: int, replica: int, replicas: int) -> None:
        """Evaluate on `wanted` samples, or on all if there are fewer."""
        self._loader, self._replica, self._replicas = loader, replica, replicas
        available = loader.source.length
        self._batches = validation_batches(available, wanted, local, replicas)
        self.samples = sum(count for _, count in self._batches)
        """The number of samples, over all replicas."""
        if not self.samples:
            raise StagelineError(
                f"{loader.source.name} holds {available} to validate on, and each of {replicas} replicas takes one at "
                "least; raise validation.fraction, use a validation.dataset_path, or set validation.enable to false"
            )

    def loss(self, step: TrainingStep, interrupted: Callable[[], bool] = lambda: False) -> float | None:
        """Return the loss over all samples, weighted by their targets where some do not count.

        `interrupted` is called before every batch, and returns the same value on all processes: True ends the
        evaluation, which then returns None.
        """
        total = weight = 0.0
        for first, count in self._batches:
            if interrupted():
                return None
            start, stop = (count * replica // self._replicas for replica in (self._replica, self._replica + 1))
            loss, batch_weight = step.evaluate(*self._loader.samples(first + start, stop - start))
            batch_weight = float(count) if batch_weight is None else batch_weight
            total, weight = total + loss * batch_weight, weight + batch_weight
        if not weight > 0:
            raise StagelineError(
                f"none of the {self.samples} validation samples has a target that counts: all are ignored, or have "
                "weight 0"
            )
        return total / weight

"""The loss on what is held back: every sample counts once at most, however many are asked for."""

from __future__ import annotations

from collections.abc import Callable

from stageline.common.errors import StagelineError
from stageline.train.data import Loader
from stageline.train.optimizer_step import Stepper


def turns(held: int | None, asked: int, local: int, replicas: int) -> list[tuple[int, int]]:
    """How often the replicas take up to `local` samples each: the first one, and how many all of them take.

    Of `asked` samples there are `held`, or nobody knows how many. A rest of less than one for each replica is left out.

    >>> turns(held=11, asked=100, local=2, replicas=2)
    [(0, 4), (4, 4), (8, 3)]
    >>> turns(held=9, asked=100, local=2, replicas=2), turns(held=None, asked=8, local=4, replicas=1)
    ([(0, 4), (4, 4)], [(0, 4), (4, 4)])
    """
    used, once = asked if held is None else min(held, asked), local * replicas
    found = [(first, min(once, used - first)) for first in range(0, used, once)]
    return [(first, samples) for first, samples in found if samples >= replicas]


class HeldBack:
    """Evaluates on the same samples every time; all processes call it alike."""

    def __init__(self, loader: Loader, *, asked: int, local: int, replica: int, replicas: int) -> None:
        """Evaluate on `asked` samples if there are as many."""
        self._loader, self._replica, self._replicas = loader, replica, replicas
        held = loader.source.length
        self._turns = turns(held, asked, local, replicas)
        self.samples = sum(samples for _, samples in self._turns)
        """How many are evaluated on, by all replicas."""
        if not self.samples:
            raise StagelineError(
                f"{loader.source.name} holds {held} to validate on, and each of {replicas} replicas takes one at "
                "least; raise validation.fraction, give a validation.dataset_path, or set validation.enable to false"
            )

    def loss(self, stepper: Stepper, interrupted: Callable[[], bool] = lambda: False) -> float | None:
        """The loss over all samples, or over all targets of theirs where some do not count.

        None if `interrupted`, called before every turn with the same answer on all processes, says to give up.
        """
        whole = weight = 0.0
        for first, samples in self._turns:
            if interrupted():
                return None
            start, stop = (samples * each // self._replicas for each in (self._replica, self._replica + 1))
            inputs, targets = self._loader.samples(first + start, stop - start)
            found, count = stepper.evaluate(inputs, targets)
            share = float(samples) if count is None else count
            whole, weight = whole + found * share, weight + share
        if not weight > 0:
            raise StagelineError(
                f"none of the {self.samples} samples to validate on has a target that counts: all of them are ignored, "
                "or weigh nothing"
            )
        return whole / weight

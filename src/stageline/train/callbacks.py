"""Callbacks of a job, with the names of Hugging Face's `TrainerCallback` where they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stageline.common.errors import StagelineError, shorten

if TYPE_CHECKING:
    from stageline.train.step import StepResult
    from stageline.train.trainer import Result, Trainer


class Callback:
    """Called while a job trains: override what you need, and pass instances as `Trainer(callbacks=[…])`.

    Every process calls the methods, in the order of the list, unless a method says otherwise. `trainer` has the
    `config`, the `step`, the `folder` of the run and its `layout`; `trainer.layout.main` is True on one process, which
    should print and write. `trainer.request_stop()` on any process ends the job after this step, with a checkpoint. An
    exception ends the job.

    >>> class Losses(Callback):
    ...     def on_step_end(self, trainer, result):
    ...         print(trainer.step, round(result.loss, 1))
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step of this start."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """After an optimizer step, with its figures."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After a validation, with its `loss` and the results of `compute_metrics`."""

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        """After a checkpoint was published, on the main process only."""

    def on_log(self, trainer: Trainer, logs: Mapping[str, Any]) -> None:
        """After any event was logged, on the main process only: the line of metrics.jsonl."""

    def on_train_end(self, trainer: Trainer, result: Result) -> None:
        """After the last step, when everything is saved."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a job, called in order."""

    def __init__(self, trainer: Trainer, callbacks: Iterable[Callback] = ()) -> None:
        """Refuse what is not a callback."""
        self._trainer, self._callbacks = trainer, list(callbacks)
        for callback in self._callbacks:
            if isinstance(callback, type) or not any(callable(getattr(callback, name, None)) for name in EVENTS):
                kind = "a class; pass an instance of it" if isinstance(callback, type) else "not a Callback"
                raise StagelineError(f"callbacks contains {shorten(callback)}, which is {kind}")

    def __call__(self, event: str, *arguments: Any) -> None:
        """Call a method of all callbacks that have it."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._trainer, *arguments)

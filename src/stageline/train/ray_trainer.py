"""A training job on a Ray cluster: it takes a configuration, and reports the statistics of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stageline.distributed.launchers.launcher import launch
from stageline.distributed.launchers.ray import RayLauncher, report
from stageline.runtime.step_report import StepStats
from stageline.train.config.config import Config
from stageline.train.config.io import read_config
from stageline.train.config.rules import validate
from stageline.train.step import StepResult
from stageline.train.trainer import Result, Trainer

if TYPE_CHECKING:
    from stageline.train.data import Data

OnStep = Callable[[int, StepStats], object]


class RayTrainer:
    """`sl.Trainer` with its ranks as actors of a Ray cluster.

    If a rank dies or a host is lost, all ranks start again, up to `max_restarts` times, and resume from the newest
    checkpoint; after that, `run` raises a `LaunchError` that names the rank. Hosts without a shared folder keep their
    checkpoints in an object store (`checkpoint.folder`).

        trainer = RayTrainer("job.toml", processes=8, max_restarts=3)
        result = trainer.run(on_step=lambda step, stats: print(step, stats.loss))
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        processes: int,
        max_restarts: int = 0,
        model: Callable[[], nn.Module] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        data: Data | Iterable[Any] | None = None,
        **placement: Any,
    ) -> None:
        """`model`, `loss_fn` and `data` are those of `sl.Trainer`, and `placement` are options of `RayLauncher`."""
        self.config = config if isinstance(config, Config) else read_config(config)
        validate(self.config)
        self._processes, self._placement = processes, {"max_restarts": max_restarts, **placement}
        self._job = (model, loss_fn, data)

    def run(self, on_step: OnStep | None = None) -> Result:
        """Train; `on_step` is called here once for each step with its number and the figures of rank 0.

        An exception of `on_step` ends the job.
        """
        last = 0

        def pass_on(stats: tuple[int, StepStats]) -> None:
            nonlocal last
            if on_step is not None and stats[0] > last:  # steps after a checkpoint are made again by a restart
                last = stats[0]
                on_step(*stats)

        launcher = RayLauncher(on_report=pass_on, **self._placement)
        results = launch(_train, self.config, *self._job, processes=self._processes, launcher=launcher)
        return results[0]  # type: ignore[no-any-return]


def _train(
    config: Config,
    model: Callable[[], nn.Module] | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    data: Data | Iterable[Any] | None,
) -> Result:
    """Train as one rank."""

    def send(step: int, result: StepResult) -> None:
        if trainer.layout.main:
            timeline = result.stats.measured()
            report((step, replace(result.stats, measured=lambda: timeline)))

    trainer = Trainer(config, model=model, loss_fn=loss_fn, data=data, on_step=send)
    return trainer.run()

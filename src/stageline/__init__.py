"""Stageline: verified pipeline-parallel training for PyTorch.

A schedule is data, and everything else is a reading of it:

>>> import stageline as sl
>>> s = sl.schedule("zb-v", ranks=4, microbatches=8)
>>> sl.verify(s).in_order
True
>>> t = sl.simulate(s, sl.Costs(forward=1, backward_input=1, backward_weight=1))
>>> t.makespan, t.span
(51.0, 48.0)
"""

from __future__ import annotations

from stageline import _moved
from stageline._version import __version__

_moved.install()

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this file
if TYPE_CHECKING:
    from typing import Any

    from stageline.common.errors import (
        CostError,
        LaunchError,
        MemoryCapError,
        NothingFits,
        PipelineError,
        ScheduleError,
        StagelineError,
    )
    from stageline.distributed.launchers.launcher import launch
    from stageline.distributed.recovery import rejoin
    from stageline.model.build.build import build
    from stageline.model.build.weights import load_weights
    from stageline.model.huggingface import own_loss
    from stageline.model.partition.partition import partition
    from stageline.model.profile import Profile, read_profile
    from stageline.model.profiler import profile
    from stageline.model.skips import pop, skippable, stash
    from stageline.model.split import Staged, split
    from stageline.planning.plan import Plan, read_plan
    from stageline.planning.planner import plan
    from stageline.runtime.check import Report, check
    from stageline.runtime.pipeline import Pipeline
    from stageline.runtime.step_report import Evaluation, StepStats
    from stageline.schedules.action import Action, Overlap
    from stageline.schedules.channels import Channel
    from stageline.schedules.io import read_schedule
    from stageline.schedules.placement import Placement
    from stageline.schedules.registry import Family, families, family, schedule
    from stageline.schedules.schedule import Program, Schedule
    from stageline.schedules.verify import Certificate, verify
    from stageline.synthesis.pareto import ParetoCurve, pareto
    from stageline.synthesis.synthesize import Synthesis, synthesize
    from stageline.timeline.compare import Comparison, compare
    from stageline.timeline.costs import Costs, Share, SharedLink
    from stageline.timeline.explain import Explanation, explain
    from stageline.timeline.io import read_timeline
    from stageline.timeline.simulate import simulate
    from stageline.timeline.timeline import Timeline
    from stageline.train.callbacks import Callback
    from stageline.train.config.config import Config
    from stageline.train.pipeline_state import load_checkpoint, save_checkpoint
    from stageline.train.trainer import Trainer

__all__ = [
    "Action",
    "Callback",
    "Certificate",
    "Channel",
    "Comparison",
    "Config",
    "CostError",
    "Costs",
    "Evaluation",
    "Explanation",
    "Family",
    "LaunchError",
    "MemoryCapError",
    "NothingFits",
    "Overlap",
    "ParetoCurve",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Plan",
    "Profile",
    "Program",
    "Report",
    "Schedule",
    "ScheduleError",
    "Share",
    "SharedLink",
    "Staged",
    "StagelineError",
    "StepStats",
    "Synthesis",
    "Timeline",
    "Trainer",
    "__version__",
    "build",
    "check",
    "compare",
    "explain",
    "families",
    "family",
    "launch",
    "load_checkpoint",
    "load_weights",
    "own_loss",
    "pareto",
    "partition",
    "plan",
    "pop",
    "profile",
    "read_plan",
    "read_profile",
    "read_schedule",
    "read_timeline",
    "rejoin",
    "save_checkpoint",
    "schedule",
    "simulate",
    "skippable",
    "split",
    "stash",
    "synthesize",
    "verify",
]

_MODULES = {
    "common.errors": "CostError LaunchError MemoryCapError NothingFits PipelineError ScheduleError StagelineError",
    "schedules.action": "Action Overlap",
    "schedules.channels": "Channel",
    "schedules.io": "read_schedule",
    "schedules.placement": "Placement",
    "schedules.registry": "Family families family schedule",
    "schedules.schedule": "Program Schedule",
    "schedules.verify": "Certificate verify",
    "timeline.compare": "Comparison compare",
    "timeline.costs": "Costs Share SharedLink",
    "timeline.explain": "Explanation explain",
    "timeline.io": "read_timeline",
    "timeline.simulate": "simulate",
    "timeline.timeline": "Timeline",
    "synthesis.pareto": "ParetoCurve pareto",
    "synthesis.synthesize": "Synthesis synthesize",
    "distributed.launchers.launcher": "launch",
    "distributed.recovery": "rejoin",
    "model.build.build": "build",
    "model.build.weights": "load_weights",
    "model.huggingface": "own_loss",
    "model.partition.partition": "partition",
    "model.profile": "Profile read_profile",
    "model.profiler": "profile",
    "model.skips": "pop skippable stash",
    "model.split": "Staged split",
    "planning.plan": "Plan read_plan",
    "planning.planner": "plan",
    "runtime.check": "Report check",
    "runtime.pipeline": "Pipeline",
    "runtime.step_report": "Evaluation StepStats",
    "train.callbacks": "Callback",
    "train.config.config": "Config",
    "train.pipeline_state": "load_checkpoint save_checkpoint",
    "train.trainer": "Trainer",
}
"""The public names of each module, which is imported when one of them is first used."""
_LAZY_NAMES = {name: f"stageline.{module}" for module, names in _MODULES.items() for name in names.split()}

_PACKAGES = ("errors", "schedules", "timeline")
"""What `import stageline` alone gives access to, by their full names."""


def __getattr__(name: str) -> Any:
    """Load everything when it is first touched.

    Most of it needs torch, whose import takes seconds. The rest needs numpy, and the command must be able to answer
    Ctrl-C before it imports that.
    """
    if name not in _LAZY_NAMES and name not in _PACKAGES:
        raise AttributeError(f"module 'stageline' has no attribute {name!r}")
    from importlib import import_module

    if name in _PACKAGES:
        for module in _MODULES:
            if module.startswith(f"{name}."):
                import_module(f"stageline.{module}")
        return import_module(f"stageline.{name}")
    value = getattr(import_module(_LAZY_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY_NAMES, *_PACKAGES})

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
        MemoryCapError,
        NothingFits,
        PipelineError,
        ScheduleError,
        StagelineError,
    )
    from stageline.model.build.build import build
    from stageline.model.build.weights import load_weights
    from stageline.model.huggingface import own_loss
    from stageline.model.partition.partition import partition
    from stageline.model.profile import Profile, read_profile
    from stageline.model.profiler import profile
    from stageline.model.skips import pop, skippable, stash
    from stageline.model.split import Staged, split
    from stageline.planning.plan import Plan, plan, read_plan
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
    from stageline.synthesis.synthesize import Synthesis, synthesize
    from stageline.timeline.compare import Comparison, compare
    from stageline.timeline.costs import Costs
    from stageline.timeline.explain import Explanation, explain
    from stageline.timeline.io import read_timeline
    from stageline.timeline.simulate import simulate
    from stageline.timeline.timeline import Timeline
    from stageline.train.config.config import Config
    from stageline.train.trainer import Trainer

__all__ = [
    "Action",
    "Certificate",
    "Channel",
    "Comparison",
    "Config",
    "CostError",
    "Costs",
    "Evaluation",
    "Explanation",
    "Family",
    "MemoryCapError",
    "NothingFits",
    "Overlap",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Plan",
    "Profile",
    "Program",
    "Report",
    "Schedule",
    "ScheduleError",
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
    "load_weights",
    "own_loss",
    "partition",
    "plan",
    "pop",
    "profile",
    "read_plan",
    "read_profile",
    "read_schedule",
    "read_timeline",
    "schedule",
    "simulate",
    "skippable",
    "split",
    "stash",
    "synthesize",
    "verify",
]

_LAZY_NAMES = {
    "CostError": "stageline.common.errors",
    "ScheduleError": "stageline.common.errors",
    "StagelineError": "stageline.common.errors",
    "MemoryCapError": "stageline.common.errors",
    "NothingFits": "stageline.common.errors",
    "PipelineError": "stageline.common.errors",
    "Action": "stageline.schedules.action",
    "Overlap": "stageline.schedules.action",
    "Certificate": "stageline.schedules.verify",
    "verify": "stageline.schedules.verify",
    "Channel": "stageline.schedules.channels",
    "read_schedule": "stageline.schedules.io",
    "Placement": "stageline.schedules.placement",
    "Family": "stageline.schedules.registry",
    "families": "stageline.schedules.registry",
    "family": "stageline.schedules.registry",
    "schedule": "stageline.schedules.registry",
    "Program": "stageline.schedules.schedule",
    "Schedule": "stageline.schedules.schedule",
    "Comparison": "stageline.timeline.compare",
    "compare": "stageline.timeline.compare",
    "Costs": "stageline.timeline.costs",
    "Explanation": "stageline.timeline.explain",
    "explain": "stageline.timeline.explain",
    "read_timeline": "stageline.timeline.io",
    "simulate": "stageline.timeline.simulate",
    "Timeline": "stageline.timeline.timeline",
    "Evaluation": "stageline.runtime.step_report",
    "Staged": "stageline.model.split",
    "pop": "stageline.model.skips",
    "skippable": "stageline.model.skips",
    "stash": "stageline.model.skips",
    "build": "stageline.model.build.build",
    "load_weights": "stageline.model.build.weights",
    "Report": "stageline.runtime.check",
    "check": "stageline.runtime.check",
    "own_loss": "stageline.model.huggingface",
    "Profile": "stageline.model.profile",
    "Plan": "stageline.planning.plan",
    "plan": "stageline.planning.plan",
    "read_plan": "stageline.planning.plan",
    "partition": "stageline.model.partition.partition",
    "profile": "stageline.model.profiler",
    "read_profile": "stageline.model.profile",
    "split": "stageline.model.split",
    "Pipeline": "stageline.runtime.pipeline",
    "StepStats": "stageline.runtime.step_report",
    "Synthesis": "stageline.synthesis.synthesize",
    "synthesize": "stageline.synthesis.synthesize",
    "Trainer": "stageline.train.trainer",
    "Config": "stageline.train.config.config",
}

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
        for module in dict.fromkeys(_LAZY_NAMES.values()):
            if module.startswith(f"stageline.{name}."):
                import_module(module)
        return import_module(f"stageline.{name}")
    value = getattr(import_module(_LAZY_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY_NAMES, *_PACKAGES})

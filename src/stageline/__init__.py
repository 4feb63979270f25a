"""Stageline: pipeline-parallel training for PyTorch that people trust.

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

from stageline._version import __version__

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this file
if TYPE_CHECKING:
    from typing import Any

    from stageline.errors import CostError, ScheduleError, StagelineError
    from stageline.model.build import build
    from stageline.model.huggingface import own_loss
    from stageline.model.load import load_weights
    from stageline.model.partition import partition
    from stageline.model.profile import Profile, read_profile
    from stageline.model.skips import pop, skippable, stash
    from stageline.model.staged import Staged, profile, split
    from stageline.planning.advice import NothingFits
    from stageline.planning.files import read_plan
    from stageline.planning.plan import Plan, plan
    from stageline.runtime.check import Report, check
    from stageline.runtime.pipeline import Pipeline
    from stageline.runtime.stats import Evaluation, StepStats
    from stageline.runtime.worlds import PipelineError
    from stageline.schedules.action import Action, Overlap
    from stageline.schedules.certificate import Certificate, verify
    from stageline.schedules.channels import Channel
    from stageline.schedules.files import read_schedule
    from stageline.schedules.placement import Placement
    from stageline.schedules.registry import Family, families, family, schedule
    from stageline.schedules.schedule import Program, Schedule
    from stageline.synthesis.problem import MemoryCapError
    from stageline.synthesis.synthesize import Synthesis, synthesize
    from stageline.timeline.compare import Comparison, compare
    from stageline.timeline.costs import Costs
    from stageline.timeline.explain import Explanation, explain
    from stageline.timeline.files import read_timeline
    from stageline.timeline.simulate import simulate
    from stageline.timeline.timeline import Timeline
    from stageline.train.config import Config
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

_LATER = {
    "CostError": "stageline.errors",
    "ScheduleError": "stageline.errors",
    "StagelineError": "stageline.errors",
    "Action": "stageline.schedules.action",
    "Overlap": "stageline.schedules.action",
    "Certificate": "stageline.schedules.certificate",
    "verify": "stageline.schedules.certificate",
    "Channel": "stageline.schedules.channels",
    "read_schedule": "stageline.schedules.files",
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
    "read_timeline": "stageline.timeline.files",
    "simulate": "stageline.timeline.simulate",
    "Timeline": "stageline.timeline.timeline",
    "Evaluation": "stageline.runtime.stats",
    "Staged": "stageline.model.staged",
    "pop": "stageline.model.skips",
    "skippable": "stageline.model.skips",
    "stash": "stageline.model.skips",
    "build": "stageline.model.build",
    "load_weights": "stageline.model.load",
    "Report": "stageline.runtime.check",
    "check": "stageline.runtime.check",
    "own_loss": "stageline.model.huggingface",
    "Profile": "stageline.model.profile",
    "NothingFits": "stageline.planning.advice",
    "Plan": "stageline.planning.plan",
    "plan": "stageline.planning.plan",
    "read_plan": "stageline.planning.files",
    "partition": "stageline.model.partition",
    "profile": "stageline.model.staged",
    "read_profile": "stageline.model.profile",
    "split": "stageline.model.staged",
    "Pipeline": "stageline.runtime.pipeline",
    "PipelineError": "stageline.runtime.worlds",
    "StepStats": "stageline.runtime.stats",
    "MemoryCapError": "stageline.synthesis.problem",
    "Synthesis": "stageline.synthesis.synthesize",
    "synthesize": "stageline.synthesis.synthesize",
    "Trainer": "stageline.train.trainer",
    "Config": "stageline.train.config",
}

_PACKAGES = ("errors", "schedules", "timeline")
"""What `import stageline` alone gives access to, by their full names."""


def __getattr__(name: str) -> Any:
    """Load everything when it is first touched.

    Most of it needs torch, whose import takes seconds. The rest needs numpy, and the command must be able to answer
    Ctrl-C before it imports that.
    """
    if name not in _LATER and name not in _PACKAGES:
        raise AttributeError(f"module 'stageline' has no attribute {name!r}")
    from importlib import import_module

    if name in _PACKAGES:
        for module in dict.fromkeys(_LATER.values()):
            if module.startswith(f"stageline.{name}."):
                import_module(module)
        return import_module(f"stageline.{name}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LATER, *_PACKAGES})

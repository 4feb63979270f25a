"""The errors under the name that version 0.1.0 gave them: use `stageline.common.errors`, or `stageline` itself."""

from stageline.common.errors import CostError, ScheduleError, StagelineError, UnknownOption

__all__ = ["CostError", "ScheduleError", "StagelineError", "UnknownOption"]

"""Where to cut a chain of units into stages.

This is arithmetic on lists of costs, without torch. Only `schedule_cuts` simulates schedules; the others know at most
the placement of stages.

Read in order: `partition` (the public function), `request` (its checked arguments), `cuts` (one stage per rank, and the
general search), `v_cuts` (V placement), `schedule_cuts` (cuts for a schedule).
"""

from stageline.model.partition.partition import evaluate, partition, uniform

__all__ = ["evaluate", "partition", "uniform"]

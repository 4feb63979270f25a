"""The events of a job: lines for people, JSON lines for programs, scalars for TensorBoard.

Read in order: `events`, `metrics_file`, `screen`. Nothing here needs torch or knows a pipeline.
"""

from stageline.train.events.events import Logs
from stageline.train.events.metrics_file import History, MetricsFile, Row, read_metrics

__all__ = ["History", "Logs", "MetricsFile", "Row", "read_metrics"]

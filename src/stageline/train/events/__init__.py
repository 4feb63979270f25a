"""What a running job reports: lines for people, JSON lines for programs, scalars for TensorBoard."""

from stageline.train.events.events import Logs
from stageline.train.events.metrics_file import History, MetricsFile, Row, read_metrics

__all__ = ["History", "Logs", "MetricsFile", "Row", "read_metrics"]

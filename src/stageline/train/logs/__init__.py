"""What a running job says of itself: lines for people, JSON lines for programs, and scalars for TensorBoard."""

from stageline.train.logs.logs import Logs
from stageline.train.logs.metrics import History, MetricsFile, Row, read_metrics

__all__ = ["History", "Logs", "MetricsFile", "Row", "read_metrics"]

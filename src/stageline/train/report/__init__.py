"""The report of a run: what happened, as one page that needs nothing else."""

from stageline.train.report.page import make_report
from stageline.train.report.run import Run, read_run

__all__ = ["Run", "make_report", "read_run"]

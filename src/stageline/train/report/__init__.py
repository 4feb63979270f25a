"""The report of a run, as one self-contained page that is made from the files of its folder.

Read in order: `run` (the folder), `page`, `charts`, `ranks`, `comparison` (several runs). Nothing here needs torch.
"""

from stageline.train.report.comparison import make_comparison
from stageline.train.report.page import make_report
from stageline.train.report.run import Run, read_run

__all__ = ["Run", "make_comparison", "make_report", "read_run"]

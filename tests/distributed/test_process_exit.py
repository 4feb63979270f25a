"""The end of a process: what was opened last is shut down first, by its owner alone, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "exit_order.py"


@pytest.mark.parametrize("how", ["", "fork", "hang"])
def test_everything_is_shut_down_once_and_in_reverse_order(how: str) -> None:
    """Also after an error in between; a forked child leaves it to its parent, and a hang ends after a moment."""
    began = time.monotonic()
    run = subprocess.run([sys.executable, str(SCRIPT), how], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (3, "second first ", "")
    assert time.monotonic() - began < 100

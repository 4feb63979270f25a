"""Measurements of messages between ranks."""

from __future__ import annotations

import threading

import pytest

from stageline.distributed.pairs import SPACED, measure_threads
from support.threads import left_over


@pytest.mark.parametrize("calls", [1, SPACED, SPACED + 1])
def test_no_thread_is_left_after_a_computation_that_fails(calls: int) -> None:
    """The receiver waited on for a minute, and then printed a traceback in the middle of the job."""
    before = threading.enumerate()
    computed = 0

    def compute() -> None:
        nonlocal computed
        computed += 1
        if computed == calls:
            raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"):
        measure_threads(compute)
    assert left_over(before) == []

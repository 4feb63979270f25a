"""Ranks as threads of one process: an interrupt stops all of them."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.distributed.thread_host import join_started
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients
from support.pipelines import Block, batch
from support.threads import left_over


def test_ctrl_c_stops_every_rank_and_is_raised_as_keyboard_interrupt() -> None:
    """The ranks continued in the background and added into gradients; with one rank it became another error."""

    class Interrupted(Block):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise KeyboardInterrupt
            return super().forward(x)

    for ranks in (1, 2):
        model: Any = nn.Sequential(Block(), Interrupted())
        plain = copy.deepcopy(model)
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=ranks, microbatches=4)
        before = threading.enumerate()
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*batch())
        assert left_over(before) == []
        model[1].broken = plain[1].broken = False
        pipe.zero_grad()
        pipe.step(*batch())
        one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
        assert_same_bits(gradients(model), gradients(plain))


def test_ctrl_c_while_the_caller_waits_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Block):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Slow.runs += 1
            if Slow.runs == 2:
                assert stopped.wait(60)
            return super().forward(x)

    stopped = threading.Event()
    join = threading.Thread.join
    calls: list[int] = []

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        stopped.set()  # the ranks know by now that they must stop
        join(self, timeout)

    pipe = sl.Pipeline(nn.Sequential(Slow(), Slow()), loss_fn=functional.mse_loss, ranks=2, microbatches=8)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*batch())
    runs = Slow.runs
    assert runs < 16
    time.sleep(0.2)
    assert Slow.runs == runs, "nothing continues in the background"


def test_a_thread_whose_start_is_not_complete_is_joined() -> None:
    """An interrupt can reach the main thread while it starts one; `Thread.join` fails then."""
    held, ran = threading.Event(), threading.Event()

    class SlowStart(threading.Thread):
        def _bootstrap(self) -> None:
            assert held.wait(60)
            super()._bootstrap()  # type: ignore[misc]

    thread = SlowStart(target=ran.set)
    starter = threading.Thread(target=thread.start)
    starter.start()
    while thread not in threading.enumerate():
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="before it is started"):
        thread.join()
    threading.Timer(0.1, held.set).start()
    join_started(thread)
    assert ran.is_set()
    assert not thread.is_alive()
    starter.join()

"""Every transport passes one suite, and a fault on the way is an error that names it, never a wrong number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyTransport, exercise, run_ranks
from stageline.transport.process_group import ProcessGroupTransport
from stageline.transport.protocol import Header, TransportError
from stageline.transport.threads import ThreadHub
from test_pipeline import batch, blocks


def test_threads_pass_the_suite() -> None:
    hub = ThreadHub(2)
    failures: list[BaseException] = []

    def side(rank: int) -> None:
        try:
            exercise(hub.end(rank), lambda expected: None, lambda: None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=side, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def process_side(rank: int) -> str:
    transport = ProcessGroupTransport()
    exercise(transport, transport.begin, lambda: transport.finish(30.0))
    return "passed"


def test_processes_pass_the_suite() -> None:
    assert run_ranks(process_side, 2) == ["passed", "passed"]


def faulty(**faults: Callable[[Header], Any]) -> sl.Pipeline:
    pipe = sl.Pipeline(blocks(4), loss_fn=functional.mse_loss, schedule="1f1b", ranks=4, microbatches=4, deadline=1.0)
    honest = pipe._world.transport
    pipe._world.transport = lambda rank: FaultyTransport(honest(rank), **faults)  # type: ignore[method-assign]
    return pipe


def test_a_message_that_is_lost_is_named_by_who_waited_for_it() -> None:
    pipe = faulty(drop=lambda header: header.traffic == "forward" and header.stage == 1 and header.microbatch == 2)
    with pytest.raises(sl.PipelineError, match="the output of stage 1, microbatch 2") as caught:
        pipe.step(*batch())
    assert isinstance(caught.value.__cause__, TransportError)


def test_a_message_with_another_label_is_refused() -> None:
    pipe = faulty(relabel=lambda header: replace(header, microbatch=3) if header.microbatch == 1 else header)
    with pytest.raises(sl.PipelineError, match=r"expected the output of .* microbatch 1.* got .* microbatch 3"):
        pipe.step(*batch())


def test_a_slow_message_changes_no_bit() -> None:
    pipe, plain = faulty(delay=lambda header: 0.01 if header.microbatch % 2 else 0.0), blocks(4)
    torch.set_num_threads(1)
    pipe.step(*batch())
    sl.Pipeline(plain, loss_fn=functional.mse_loss, schedule="gpipe", ranks=1, microbatches=4).step(*batch())
    for name, grad in pipe.named_gradients():
        other = dict(plain.named_parameters())[name].grad
        assert torch.equal(torch.as_tensor(grad), other)

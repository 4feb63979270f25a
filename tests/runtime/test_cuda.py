"""Two processes that share one GPU: tensors travel through pinned memory, and the bits are those of the plain loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyTransport, assert_same_bits, exercise, one_process_step, run_ranks
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import SocketTransport
from support.gradients import gradients
from support.pipelines import batch, blocks, tied_model, token_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda", 0)
FAMILIES = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "dualpipe"]


def suite(rank: int) -> int:
    """The suite of all transports, in a process that has a GPU."""
    transport = SocketTransport(Links.join())
    exercise(transport, transport.begin, lambda: transport.finish(60.0))
    return threading.active_count()


def test_processes_with_a_gpu_pass_the_suite() -> None:
    assert max(run_ranks(suite, 2, timeout=120)) <= 2


def exchanges(rank: int) -> int:
    """Messages of every kind from GPU to GPU, while the GPU is kept busy, so that nothing arrives early by luck."""
    transport = SocketTransport(Links.join())
    other = 1 - rank
    sizes = [(64, 64), (64, 64), (3,), (512, 1024), (512, 1024), (0, 4), (1,)]
    counts: Any = {(other, "forward"): len(sizes), (other, "backward"): len(sizes)}
    transport.begin(counts, counts, DEVICE)
    slow = torch.randn(2048, 2048, device=DEVICE)
    for number, size in enumerate(sizes):
        for traffic in ("forward", "backward"):
            header = Header(rank, other, traffic, 0, number, 0)
            for _ in range(4):
                slow = torch.tanh(slow @ slow)
            value = (slow.sum() * 0 + number).expand(size).contiguous() + torch.arange(size[-1], device=DEVICE)
            leaves: list[Any] = [value.bfloat16(), None, value.cpu(), value.T if value.dim() == 2 else value, "text"]
            transport.send(Message(header, leaves, "", [False] * len(leaves)))
            del value, leaves
    for number, size in enumerate(sizes):
        for traffic in ("backward", "forward"):
            received = transport.receive(Header(other, rank, traffic, 0, number, 0), 60.0).leaves  # type: ignore[arg-type]
            expected = torch.full(size, float(number)) + torch.arange(size[-1])
            first, nothing, second, third, text = received
            assert isinstance(first, Tensor)
            assert isinstance(second, Tensor)
            assert isinstance(third, Tensor)
            assert (nothing, text) == (None, "text")
            assert (first.device, second.device.type, third.device) == (DEVICE, "cpu", DEVICE)
            assert torch.equal((first + 0).cpu(), expected.bfloat16())
            assert torch.equal(second, expected)
            assert torch.equal((third + 0).cpu(), expected.T if len(size) == 2 else expected)
            assert not third.numel() or third.stride() == (expected.T if len(size) == 2 else expected).stride()
    transport.finish(60.0)
    assert transport.kept == 0
    return threading.active_count()


def test_tensors_of_a_gpu_arrive_on_a_gpu_while_it_computes() -> None:
    assert max(run_ranks(exchanges, 2, timeout=120)) <= 2


def trains(rank: int, names: list[str], dtype: torch.dtype) -> int:
    """Every family beside the plain loop on the same GPU; fail where any bit differs."""
    torch.use_deterministic_algorithms(True)
    for name in names:
        for microbatches in (4, 5):
            try:
                sl.schedule(name, 2, microbatches)
            except sl.ScheduleError:
                continue
            model, plain = blocks(8, 64).to(DEVICE, dtype), blocks(8, 64).to(DEVICE, dtype)
            x, y = (part.to(DEVICE, dtype) for part in batch(20, 64))
            options: dict[str, Any] = {"schedule": name, "ranks": 2, "microbatches": microbatches}
            pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, **options)
            optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (pipe, plain)]
            directions = pipe.schedule.placement.direction.tolist()
            for _ in range(3):
                loss = pipe.step(x, y).loss
                expected = one_process_step(
                    plain, functional.mse_loss, x, y, microbatches, directions=directions if 1 in directions else None
                )
                assert loss == expected, (name, microbatches, loss, expected)
                mine = dict(pipe.named_gradients())
                same = {key: grad for key, grad in gradients(plain).items() if key in mine}
                assert_same_bits(mine, same, f"gradients of {name} with {microbatches} microbatches")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return threading.active_count()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_on_one_gpu_give_the_bits_of_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert max(run_ranks(trains, 2, FAMILIES, dtype, timeout=240)) <= 4  # one thread keeps all connections


def ties(rank: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Tied weights, clipping and the gathered state, from a GPU."""
    model = tied_model().to(DEVICE)
    torch.manual_seed(5)
    tokens = torch.randint(0, 11, (6, 5)).to(DEVICE)
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule="zb-h1", ranks=2, microbatches=3)
    pipe.step(tokens, tokens)
    norm = float(pipe.clip_grad_norm_(0.5))
    grads = {name: None if grad is None else grad.cpu() for name, grad in pipe.named_gradients()}
    state = pipe.state_dict(gather=True)
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    return grads, state, norm


def test_tied_weights_and_the_gathered_state_of_a_gpu() -> None:
    (first, state, norm), (second, other, same) = run_ranks(ties, 2, timeout=120)
    assert norm == same
    assert_same_bits({"tied": first["0.weight"]}, {"tied": second["0.weight"]})
    assert_same_bits(state, other)
    assert_same_bits(state, tied_model().state_dict())


def fails(rank: int) -> str:
    """A GPU message that differs from its announcement, followed by a correct step."""
    pipe = sl.Pipeline(blocks(2).to(DEVICE), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    host: Any = pipe.runner.host
    honest = host.transport(rank)
    faulty = FaultyTransport(honest, replaced=lambda message: [leaf.half() for leaf in message.leaves])  # type: ignore[union-attr]
    if rank == 0:
        host.transport = lambda rank: faulty
    x, y = (part.to(DEVICE) for part in batch())
    with pytest.raises(sl.PipelineError) as caught:
        pipe.step(x, y)
    faulty._replaced = lambda message: message.leaves
    pipe.zero_grad()
    plain = blocks(2).to(DEVICE)
    assert pipe.step(x, y).loss == one_process_step(plain, functional.mse_loss, x, y, 4)
    return str(caught.value)


def test_a_fault_between_processes_with_a_gpu_is_named_and_overcome() -> None:
    for error in run_ranks(fails, 2, timeout=120):
        assert "[float32 of shape (3, 3, 8)], but got [float16 of shape (3, 3, 8)]" in error

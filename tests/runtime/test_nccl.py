"""Ranks that share one GPU over real NCCL: the bits of the plain loop, whatever travels, and every fault is named."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyStage, ForkServer, assert_same_bits, one_process_step, run_ranks, shared_gpu
from stageline.transport.gpu import nccl
from support.gradients import gradients
from support.meshes import (
    CASES,
    both,
    compare,
    mesh_of,
    own_forward,
    quiet,
    sequential,
    sharded,
    tensor_parallel,
)
from support.pipelines import TRAINING, Block, batch, blocks, tied_model, token_loss
from support.ports import free_port

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
]

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def on_one_gpu(function: Any, ranks: int, *arguments: Any) -> list[Any]:
    return run_ranks(function, ranks, *arguments, timeout=300, backend="nccl", share_gpu=True)


def travels_over_nccl(pipe: sl.Pipeline) -> bool:
    """Whether every channel of this rank has a communicator."""
    host: Any = pipe.runner.host
    rank = host.here[0]
    row = host.layout.rows[host.replica]
    ends = [
        (row[channel.source], row[channel.target], channel.traffic)
        for channel in pipe.schedule.channels
        if rank in (channel.source, channel.target)
    ]
    return not host._transport._payloads.missing(ends)


def trains(rank: int, ranks: int, names: list[str], microbatches: list[int], dtype: torch.dtype) -> list[str]:
    """Every family beside the plain loop on the same GPU; fail where any bit differs."""
    torch.use_deterministic_algorithms(True)
    done = []
    for name in names:
        for count in microbatches:
            try:
                sl.schedule(name, ranks, count)
            except sl.ScheduleError:
                continue
            model, plain = (blocks(16, 64).to(DEVICE, dtype) for _ in range(2))
            x, y = (part.to(DEVICE, dtype) for part in batch(20, 64))
            pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=count)
            assert travels_over_nccl(pipe)
            directions = pipe.schedule.placement.direction.tolist()
            for _ in range(2):
                loss = pipe.step(x, y).loss
                expected = one_process_step(
                    plain, functional.mse_loss, x, y, count, directions=directions if 1 in directions else None
                )
                assert loss == expected, (name, count, loss, expected)
                mine = dict(pipe.named_gradients())
                same = {key: grad for key, grad in gradients(plain).items() if key in mine}
                assert_same_bits(mine, same, f"gradients of {name} with {count} microbatches")
            done.append(f"{name} {count}")
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_families_give_the_bits_of_one_process_on_two_ranks(dtype: torch.dtype) -> None:
    first, second = on_one_gpu(trains, 2, 2, TRAINING, [1, 5, 8], dtype)
    assert first == second
    assert len(first) > 2 * len(TRAINING)


def test_families_give_the_bits_of_one_process_on_four_ranks() -> None:
    names = ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"]
    assert len(on_one_gpu(trains, 4, 4, names, [8], torch.float32)[0]) == len(names)


def captures(rank: int, ranks: int, names: list[str]) -> list[str]:
    """CUDA graphs beside a pipeline without them, both over NCCL; fail where any bit differs."""
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    done = []
    for name in names:
        model = blocks(8, 64).to(DEVICE)
        first, second = (
            sl.Pipeline(
                copy.deepcopy(model), loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=8,
                cuda_graphs=graphs,
            )
            for graphs in (True, False)
        )  # fmt: skip
        assert travels_over_nccl(first)
        optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1) for pipe in (first, second)]
        for step in range(5):
            torch.manual_seed(step)
            x, y = (part.to(DEVICE) for part in batch(16, 64))
            assert first.step(x, y).loss == second.step(x, y).loss, (name, step)
            assert_same_bits(dict(first.named_gradients()), dict(second.named_gradients()), f"{name}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        (executor,) = first.runner.executors_for(8, True).executors
        assert executor.graphs is not None
        assert all("F" in state.actions for state in executor.graphs.microbatches.values())
        done.append(name)
    return done


@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_actions_give_the_bits_of_a_pipeline_without_graphs(ranks: int) -> None:
    names = ["1f1b", "interleaved", "zb-h1", "zb-v"]
    assert on_one_gpu(captures, ranks, ranks, names) == [names] * ranks


def meshes(rank: int, shape: tuple[int, ...], names: tuple[str, ...], kind: str) -> bool:
    """A pipeline as one row of a larger mesh, against the plain loop in float64 on the same GPU."""
    quiet()
    mesh = mesh_of(shape, *names, device="cuda")
    function = {"tp": tensor_parallel, "shards": sharded, "both": both}[kind]
    for schedule, microbatches, options in CASES:
        if schedule != "synthesized":  # to agree on one takes seconds, and it runs as any other
            compare(sequential().to(DEVICE), mesh, function, schedule, microbatches, max_norm=0.5, **options)
    compare(own_forward().to(DEVICE), mesh, function, "zb-h1", 4, max_norm=0.5)
    return True


@pytest.mark.parametrize(
    ("shape", "names", "kind"),
    [
        ((2, 2), ("pp", "tp"), "tp"),
        ((2, 2), ("pp", "dp_shard"), "shards"),
        ((2, 2, 2), ("pp", "dp_shard", "tp"), "both"),
    ],
)
def test_a_row_of_a_larger_mesh_trains_as_the_plain_loop(
    shape: tuple[int, ...], names: tuple[str, ...], kind: str
) -> None:
    assert all(on_one_gpu(meshes, math.prod(shape), shape, names, kind))


class Tree(nn.Module):
    """Passes on a dict with a tuple, None, a number and a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return {"a": self.block(x), "b": (x.mT, None, 3), "c": x.bool()}
        mixed = self.block(x["a"]) + x["b"][0].mT * x["b"][2]
        return {"a": mixed, "b": (x["b"][0], None, 3), "c": x["c"]}


class Last(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return torch.as_tensor(x["a"] * x["c"])


def passes_trees(rank: int) -> int:
    """Trees, with shapes that change from step to step and from microbatch to microbatch."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    model = nn.Sequential(*(Tree() for _ in range(3)), Last()).to(DEVICE)
    torch.manual_seed(1)
    plain = nn.Sequential(*(Tree() for _ in range(3)), Last()).to(DEVICE)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    for samples, length in ((8, 3), (8, 3), (8, 5), (11, 5), (11, 2), (5, 7)):
        torch.manual_seed(samples + length)
        x, y = torch.randn(samples, length, 8, device=DEVICE), torch.randn(samples, length, 8, device=DEVICE)
        pipe.zero_grad()
        plain.zero_grad()
        assert pipe.step(x, y).loss == one_process_step(plain, functional.mse_loss, x, y, 4)
        mine = dict(pipe.named_gradients())
        assert_same_bits(mine, {key: grad for key, grad in gradients(plain).items() if key in mine})
    return pipe.steps


def test_trees_and_changing_shapes() -> None:
    assert on_one_gpu(passes_trees, 2) == [6, 6]


def ties(rank: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Tied weights, clipping and the gathered state."""
    model = tied_model().to(DEVICE)
    torch.manual_seed(5)
    tokens = torch.randint(0, 11, (6, 5)).to(DEVICE)
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule="zb-h1", ranks=2, microbatches=3)
    pipe.step(tokens, tokens)
    norm = float(pipe.clip_grad_norm_(0.5))
    grads = {name: None if grad is None else grad.cpu() for name, grad in pipe.named_gradients()}
    return grads, pipe.state_dict(gather=True), norm


def test_tied_weights_and_the_gathered_state() -> None:
    (first, state, norm), (second, other, same) = on_one_gpu(ties, 2)
    assert norm == same
    assert_same_bits({"tied": first["0.weight"]}, {"tied": second["0.weight"]})
    assert_same_bits(state, other)
    assert_same_bits(state, tied_model().state_dict())


def replicates(rank: int) -> bool:
    """Two replicas of two ranks, whose gradients are summed over NCCL."""
    model = blocks(4).to(DEVICE)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, replicas=2, microbatches=2)
    group = pipe.runner.host.replica_group
    assert group is not None
    assert group.direct
    x, y = (part.to(DEVICE) for part in batch(8))
    mine = slice(4 * pipe.replica, 4 * pipe.replica + 4)
    plain = blocks(4).to(DEVICE)
    for _ in range(2):
        pipe.zero_grad()
        plain.zero_grad()
        loss = pipe.step(x[mine], y[mine]).loss
        expected = one_process_step(plain, functional.mse_loss, x, y, 4)
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, grad in pipe.named_gradients():
            torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-4, atol=1e-6)
    states = []
    for shard in (False, True):  # replicas that divide the optimizer's state, and broadcast what they updated
        own = sl.Pipeline(
            blocks(4).to(DEVICE), loss_fn=functional.mse_loss, ranks=2, replicas=2, microbatches=2,
            shard_optimizer=shard,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.05)
        for _ in range(3):
            own.step(x[mine], y[mine])
            own.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        states.append(own.state_dict())
    assert_same_bits(states[0], states[1])
    return travels_over_nccl(pipe)


def test_replicas() -> None:
    assert all(on_one_gpu(replicates, 4))


def continues(rank: int, folder: str) -> list[float]:
    """Continuous steps and plain steps give the same bits; a saved state resumes with the same bits."""
    torch.use_deterministic_algorithms(True)
    x, y = (part.to(DEVICE) for part in batch())
    losses: list[list[float]] = []
    states = []
    for continuous in (True, False):
        pipe = sl.Pipeline(blocks(4).to(DEVICE), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        if continuous:
            losses.append([stats.loss for stats in pipe.run([(x, y)] * 4, optimizer=optimizer, max_norm=0.5)])
        else:
            losses.append([])
            for step in range(4):
                if step == 2:
                    torch.save(
                        {"model": pipe.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state-{rank}"
                    )
                losses[-1].append(pipe.step(x, y).loss)
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        states.append({name: value.cpu() for name, value in pipe.state_dict().items()})
    assert losses[0] == losses[1]
    assert_same_bits(states[0], states[1])
    saved = torch.load(f"{folder}/state-{rank}", weights_only=True)
    pipe = sl.Pipeline(blocks(4).to(DEVICE), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    pipe.load_state_dict(saved["model"], strict=False)
    assert pipe.step(x, y).loss == losses[1][2]
    return losses[0]


def test_continuous_steps_and_resuming(tmp_path: Path) -> None:
    first, second = on_one_gpu(continues, 2, str(tmp_path))
    assert first == second


def raises_once(rank: int, culprit: int) -> tuple[str, bool]:
    """An exception on one rank is raised on all, and the next step is right."""
    layers = [FaultyStage(layer) for layer in blocks(4)]
    stages = [layer.to(DEVICE) for layer in layers]
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=4)
    x, y = (part.to(DEVICE) for part in batch())
    good = pipe.step(x, y).loss

    def planted(value: Tensor) -> Tensor:
        raise ArithmeticError("planted")

    layers[culprit].plant(planted, "B" if culprit % 2 else "F", 2)
    pipe.zero_grad()
    with pytest.raises(sl.PipelineError) as caught:
        pipe.step(x, y)
    pipe.zero_grad()
    return str(caught.value), pipe.step(x, y).loss == good


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_exception_is_named_by_all_and_harms_no_later_step(culprit: int) -> None:
    for message, good in on_one_gpu(raises_once, 4, culprit):
        assert message.startswith(f"rank {culprit} failed in")
        assert "ArithmeticError: planted" in message
        assert good


@pytest.mark.parametrize("fault", ["kill", "freeze", "exception"])
def test_faults_are_named_by_every_survivor_in_time(fault: str) -> None:
    """The benchmark runs ten of each; here it runs two, on ranks 0 and 1 of four."""
    command = [sys.executable, str(ROOT / "benchmarks" / "nccl_faults.py"), "--cases", "2", "--only", fault, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for case in json.loads(run.stdout):
        assert not case["problems"], case


def test_nothing_is_written_to_the_log_of_a_job_that_succeeds(tmp_path: Path) -> None:
    """No warning of torch or NCCL at the start, in a step or at exit."""
    port = free_port()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = ROOT / "tests" / "support" / "nccl_rank.py"
    with ForkServer() as server:
        children = [
            server.start(
                script, "main", [rank, str(tmp_path)], log=tmp_path / f"log-{rank}",
                environment={**common, **shared_gpu(rank), "RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        codes = [child.wait(timeout=120) for child in children]
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]
    assert (codes, logs) == ([0, 0], ["", ""])
    assert len({(tmp_path / f"losses-{rank}").read_text() for rank in range(2)}) == 1


def sends_both_ways(rank: int) -> str:
    """The communicator itself: large and small tensors both ways at once, a sum, and an abort that ends a receive."""
    device = torch.device("cuda", 0)
    ids: list[Any] = [[nccl.new_id() for _ in range(3)] if rank == 0 else None]
    dist.broadcast_object_list(ids)
    seats = {number: nccl.Seat(ids[0][number], 2, rank if number != 1 else 1 - rank) for number in range(3)}
    pairs = nccl.connect(seats, device)
    nccl.open_channels(list(pairs.values())[:2])
    mine, other = (pairs[0], pairs[1]) if rank == 0 else (pairs[1], pairs[0])
    for size in (1, 1000, 1 << 24):
        value = torch.full((size,), rank + 1, dtype=torch.uint8, device=device)
        sent = mine.send(value, 1)
        room = torch.zeros_like(value)
        other.receive(room, 0)
        assert bool((room == 2 - rank).all())
        torch.cuda.synchronize()
        assert sent.is_completed()
    total = torch.full((5,), float(rank + 1), device=device)
    pairs[2].all_reduce(total).wait()
    assert total.tolist() == [3.0] * 5
    if rank == 0:
        other.receive(torch.zeros(1, dtype=torch.uint8, device=device), 0)
        other.abort()
        torch.cuda.synchronize()
        with pytest.raises(sl.StagelineError, match="aborted"):
            other.receive(torch.zeros(1, dtype=torch.uint8, device=device), 0)
    dist.all_reduce(torch.zeros(1))
    mine.close()
    return nccl.version()


def test_a_communicator_sends_sums_and_can_be_aborted() -> None:
    first, second = on_one_gpu(sends_both_ways, 2)
    assert first == second
    assert first.count(".") == 2

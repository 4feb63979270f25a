"""One rank per process: the same bits as in one process, and the same script."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from test_pipeline import Block, batch, blocks, gradients, noisy, tied_model, token_loss

TRAINING = [name for name in sl.families() if name != "forward-only"]


def owned(pipe: sl.Pipeline, plain: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    mine = dict(pipe.named_gradients())
    return mine, {name: grad for name, grad in gradients(plain).items() if name in mine}


def train(rank: int, ranks: int, names: list[str], dtype: torch.dtype) -> int:
    """Train every family for some sizes beside the plain loop; fail where any bit differs."""
    runs = 0
    for name in names:
        for microbatches in (1, 5, 8):
            try:
                sl.schedule(name, ranks, microbatches)
            except sl.ScheduleError:
                continue
            model, plain = blocks().to(dtype), blocks().to(dtype)
            x, y = (part.to(dtype) for part in batch())
            given: dict[str, Any] = {"schedule": name, "ranks": ranks, "microbatches": microbatches}
            pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, **given)
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, plain)]
            directions = pipe.schedule.placement.direction.tolist()
            for _ in range(3):
                # Ranks that need no inputs or targets may be given None.
                stages = pipe.schedule.placement.stages_of(rank)
                last = pipe.schedule.stages - 1
                stats = pipe.step(x if 0 in stages or rank % 2 else None, y if last in stages or rank % 2 else None)
                expected = one_process_step(
                    plain, functional.mse_loss, x, y, microbatches, directions=directions if 1 in directions else None
                )
                assert stats.loss == expected, (name, microbatches, stats.loss, expected)
                assert_same_bits(*owned(pipe, plain), f"gradients of {name} {ranks}×{microbatches}")
                assert pipe.timeline.schedule == pipe.schedule
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            weights = {key: value.detach() for key, value in pipe.named_parameters()}
            same = {key: value.detach() for key, value in plain.named_parameters() if key in weights}
            assert_same_bits(dict(weights), dict(same), f"weights of {name} {ranks}×{microbatches}")
            runs += 1
    return runs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)])
def test_every_family_gives_the_bits_of_one_process_on_processes(ranks: int, dtype: torch.dtype) -> None:
    runs = run_ranks(train, ranks, ranks, TRAINING, dtype, timeout=240)
    assert len(set(runs)) == 1
    assert runs[0] >= 2 * len(TRAINING) - 8


def tied(rank: int) -> tuple[dict[str, Tensor | None], float]:
    model = tied_model()
    tokens = torch.randint(0, 11, (6, 5))
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule="zb-h1", ranks=2, microbatches=3)
    for _ in range(2):
        pipe.step(tokens, tokens)
    norm = float(pipe.clip_grad_norm_(0.5))
    return dict(pipe.named_gradients()), norm


def test_tied_weights_and_clipping_are_as_on_threads() -> None:
    """Both processes that use a tied weight hold the same gradient, and the norm is over all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    (first, norm), (second, other) = run_ranks(tied, 2)
    together, expected = tied(0)
    torch.set_num_threads(before)
    assert_same_bits({"tied": first["0.weight"]}, {"tied": second["0.weight"]})
    assert_same_bits({**first, **second}, together)
    assert first["0.weight"] is not None
    assert norm == other == expected


def mistakes(rank: int) -> list[str]:
    """What goes wrong between ranks is said on all of them."""
    said = []
    x, y = batch()

    def attempt(call: Any) -> None:
        try:
            call()
            said.append("nothing")
        except sl.StagelineError as error:
            said.append(str(error))

    def make(**given: Any) -> sl.Pipeline:
        return sl.Pipeline(blocks(), loss_fn=functional.mse_loss, **{"ranks": 2, "microbatches": 4, **given})

    attempt(lambda: make(schedule="1f1b" if rank == 0 else "gpipe"))
    attempt(lambda: make(schedule="1f1b", ranks=4))
    attempt(lambda: make(loss_reduction="mean" if rank == 0 else "sum"))
    pipe = make(schedule="1f1b")
    attempt(lambda: pipe.step(x + rank, y))
    attempt(lambda: pipe.step(None, None))
    attempt(lambda: pipe.step(x[: 10 - rank], y[: 10 - rank]))
    pipe.step(x, y)
    found = pipe.evaluate(x, y, outputs=True)
    said.append(f"{found.loss is not None} {found.outputs is not None}")
    return said


def test_differences_between_ranks_are_found_and_named() -> None:
    first, second = run_ranks(mistakes, 2)
    for said in (first, second):
        assert "rank 1 and rank 0 differ in the schedule" in said[0]
        assert "the schedule has 4 ranks and 2 processes were started" in said[1]
        assert "differ in loss_reduction" in said[2]
        assert said[3] == "rank 1 was given another batch than rank 0: the inputs differ"
        assert "no rank was given" in said[4]
        assert "rank 1 was given another batch than rank 0: the number of samples differ" in said[5]
    assert first[6] == "True False"
    assert second[6] == "True True"


class Fragile(Block):
    broken = True

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("planted")
        return super().forward(x)


def fails(rank: int, stage: int, name: str) -> tuple[str, int]:
    """Fail once, and then train as if nothing had happened."""
    torch.manual_seed(1)
    layers: list[Any] = [Fragile() if index == stage else Block() for index in range(3)]
    plain: Any = copy.deepcopy(nn.Sequential(*layers))
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule=name, microbatches=4, deadline=30)
    said = "nothing"
    try:
        pipe.step(*batch())
    except sl.PipelineError as error:
        said = str(error)
    layers[stage].broken = plain[stage].broken = False
    pipe.zero_grad()
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(*owned(pipe, plain))
    return said, threading.active_count()


@pytest.mark.parametrize(("stage", "name"), [(0, "1f1b"), (1, "zb-h1"), (2, "gpipe")])
def test_an_exception_on_one_rank_reaches_all_and_the_next_step_is_right(stage: int, name: str) -> None:
    for said, threads in run_ranks(fails, 3, stage, name):
        assert said.startswith(f"rank {stage} failed in F of stage {stage}, microbatch 0: ArithmeticError: planted")
        assert threads <= 2, "no thread is left behind"


def last_loss_fails(rank: int) -> str:
    """The last microbatch's loss fails when the other rank has little left to wait for; inference even nothing."""
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise ArithmeticError("planted")
        return functional.mse_loss(output, target)

    pipe = sl.Pipeline(blocks(2), loss_fn=loss_fn, schedule="gpipe", ranks=2, microbatches=4, deadline=30)
    with pytest.raises(sl.PipelineError) as caught:
        pipe.evaluate(*batch())
    return str(caught.value)


def test_a_rank_that_waits_for_nobody_hears_of_a_failure_too() -> None:
    for said in run_ranks(last_loss_fails, 2):
        assert said.startswith("rank 1 failed in F of stage 1, microbatch 3: ArithmeticError: planted")


def noisy_step(rank: int) -> tuple[list[float], dict[str, float]]:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return functional.mse_loss(output, target), {"mean": output.detach().mean()}

    pipe = sl.Pipeline(noisy(), loss_fn=loss_fn, schedule="zb-v", ranks=2, microbatches=4, seed=7)
    stats = pipe.step(*batch())
    return list(stats.losses), stats.metrics


def test_dropout_and_metrics_are_as_on_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = noisy_step(0)
    torch.set_num_threads(before)
    assert run_ranks(noisy_step, 2) == [expected, expected]


SCRIPT = """
import os, pathlib, torch
from torch.nn import functional
import stageline as sl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
x, y = torch.randn(8, 6), torch.randn(8, 6)
for _ in range(3):
    stats = pipe.step(x, y)
    optimizer.step()
    optimizer.zero_grad()
pathlib.Path("loss-" + os.environ.get("RANK", "alone")).write_text(stats.loss.hex())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_the_same_script_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(path)], timeout=60, check=True, env=environment, cwd=tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "stageline", str(path)]
    many = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=tmp_path
    )
    assert many.returncode == 0, many.stderr
    losses = {name: (tmp_path / f"loss-{name}").read_text() for name in ("alone", "0", "1")}
    assert len(set(losses.values())) == 1, losses

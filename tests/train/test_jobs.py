"""Training jobs as real processes: killed, stopped, restarted, spread over ranks; the numbers stay the same."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from stageline.testing import ForkServer
from stageline.train.checkpoint import published
from stageline.train.config.io import read_config
from stageline.train.run_folder import RunFolder
from support.jobs import (
    PATIENCE,
    SCRIPT,
    TINY,
    exit_codes,
    log_of,
    losses,
    start,
    step_of,
    validations,
    wait_for,
    wait_until,
    weights,
)
from support.ports import free_port

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_job_resumes_with_the_same_bits(fork_server: ForkServer, tokens: Path, processes: int) -> None:
    """Dropout and shuffling are on; all runs, also of planned schedules, are compared with an uninterrupted one."""
    planned = "--parallelism.pipeline_parallel_schedule=auto"
    assert exit_codes(start(fork_server, tokens, "whole")) == [0], log_of(tokens, "whole")
    draw = random.Random(processes)
    for _ in range(2):
        children = start(fork_server, tokens, "parts", planned, processes=processes)
        wait_for(tokens, "parts", min(step_of(tokens, "parts") + draw.randrange(1, 7), 15))
        for child in children:
            child.signal(signal.SIGKILL)
        exit_codes(children)
    children = start(fork_server, tokens, "parts", planned, processes=processes)
    assert exit_codes(children) == [0] * processes, log_of(tokens, "parts")
    assert losses(tokens, "parts") == losses(tokens, "whole")
    assert len(losses(tokens, "whole")) == 16
    assert weights(tokens, "parts", 16) == weights(tokens, "whole", 16)


def test_continuous_steps_of_processes_have_the_bits_of_single_steps(fork_server: ForkServer, tokens: Path) -> None:
    assert exit_codes(start(fork_server, tokens, "single", processes=2)) == [0, 0], log_of(tokens, "single")
    continuous = start(fork_server, tokens, "continuous", "--training.continuous_steps=true", processes=2)
    assert exit_codes(continuous) == [0, 0], log_of(tokens, "continuous")
    assert losses(tokens, "continuous") == losses(tokens, "single")
    assert weights(tokens, "continuous", 16) == weights(tokens, "single", 16)


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_ends_a_job_with_a_checkpoint_and_without_an_error(
    fork_server: ForkServer, tokens: Path, processes: int, number: signal.Signals
) -> None:
    children = start(fork_server, tokens, "run", "--training.steps=5000", processes=processes)
    wait_for(tokens, "run", 3)
    children[-1].signal(number)  # one rank alone; the ranks agree
    assert exit_codes(children) == [0] * processes, log_of(tokens, "run")
    last = step_of(tokens, "run")
    assert (tokens.parent / "run" / "checkpoint" / f"step-{last:08}" / "manifest.json").is_file()
    assert f"stopped by {number.name}" in log_of(tokens, "run")


def test_a_second_interrupt_ends_at_once(fork_server: ForkServer, tokens: Path) -> None:
    """In a step that would never end."""
    folder = tokens.parent
    words = [*TINY, f"--training.dataset_path={tokens}", f"--job.dump_folder={folder / 'run'}"]
    child = fork_server.start(SCRIPT, "hang", [words, str(folder)], log=folder / "run.0.log")
    wait_until(child, lambda: (folder / "inside").exists())
    child.signal(signal.SIGINT)
    wait_until(child, lambda: (folder / "heard-1").exists())
    child.signal(signal.SIGINT)
    assert child.wait(PATIENCE) == 130
    assert "stopped immediately; the last published checkpoint is intact" in log_of(tokens, "run")


def test_a_rank_whose_peer_died_ends_with_an_error_and_saves_nothing(fork_server: ForkServer, tokens: Path) -> None:
    children = start(fork_server, tokens, "run", "--training.steps=5000", "--checkpoint.interval=100000", processes=2)
    wait_for(tokens, "run", 3)
    children[1].signal(signal.SIGKILL)
    children[0].signal(signal.SIGTERM)
    assert children[0].wait(PATIENCE) != 0
    assert "rank 1" in log_of(tokens, "run")
    assert not list((tokens.parent / "run" / "checkpoint").glob("step-*"))


def test_a_checkpoint_that_one_rank_could_not_write_ends_all_of_them_with_its_error(
    fork_server: ForkServer, tokens: Path
) -> None:
    more = ("--checkpoint.interval=2", "--parallelism.pipeline_parallel_schedule=1f1b")
    children = start(fork_server, tokens, "run", "--training.steps=5000", *more, processes=2, full=4)
    assert exit_codes(children) == [2, 2], log_of(tokens, "run")
    last = tokens.parent / "run" / "checkpoint" / "step-00000002"
    for rank in range(2):
        assert "error: the checkpoint of step 4 was not saved: " in log_of(tokens, "run", rank)
        assert f"; the last intact one is {last}\n" in log_of(tokens, "run", rank)
    assert "error: the checkpoint of step 4 was not saved: No space left on device; " in log_of(tokens, "run")


def test_a_checkpoint_of_processes_resumes_on_threads_and_back(fork_server: ForkServer, tokens: Path) -> None:
    assert exit_codes(start(fork_server, tokens, "whole")) == [0]
    for processes, more in (
        (2, ["--training.time_limit=0.00001"]),
        (1, ["--training.time_limit=0.00001", "--parallelism.pipeline_parallel_degree=4"]),
        (2, ["--parallelism.pipeline_parallel_schedule=zb-v"]),
    ):
        assert exit_codes(start(fork_server, tokens, "parts", *more, processes=processes)) == [0] * processes, log_of(
            tokens, "parts"
        )
    assert losses(tokens, "parts") == losses(tokens, "whole")


def test_more_ranks_than_processes_is_one_clear_error(fork_server: ForkServer, tokens: Path) -> None:
    children = start(fork_server, tokens, "run", "--parallelism.pipeline_parallel_degree=4", processes=2)
    assert exit_codes(children) == [2, 2]
    assert "need 4 processes, but 2 were started" in log_of(tokens, "run")
    assert not (tokens.parent / "run").exists()


def test_ranks_without_a_shared_folder_are_found(fork_server: ForkServer, tokens: Path) -> None:
    """The second rank works in another folder, where the same relative path leads elsewhere."""
    elsewhere = tokens.parent / "elsewhere"
    elsewhere.mkdir()
    words = [*TINY, f"--training.dataset_path={tokens}", "--job.dump_folder=here"]
    common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = os.getcwd()
    children = []
    for rank, folder in enumerate((tokens.parent, elsewhere)):
        os.chdir(folder)
        try:
            children.append(
                fork_server.start(SCRIPT, "main", [words], log=tokens.parent / f"apart.{rank}.log",
                              environment=common | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
            )  # fmt: skip
        finally:
            os.chdir(before)
    assert exit_codes(children) == [2, 2], log_of(tokens, "apart")
    assert "rank 1 cannot see the folder 'here' of rank 0" in log_of(tokens, "apart")


def test_replicas_of_a_pipeline_train_go_on_and_load_elsewhere(fork_server: ForkServer, tokens: Path) -> None:
    """2 × 2 processes with a split backward: the same bits in every run of that layout, and nearly so in others.

    Replicas that divide the optimizer state have the same bits, and the others read their checkpoints.
    """
    divided = "--parallelism.shard_optimizer=true"
    spread = ["--training.local_batch_size=4", "--training.global_batch_size=16", "--model.dropout=0",
              "--parallelism.pipeline_parallel_schedule=zb-h1", "--validation.fraction=0.045"]  # fmt: skip
    assert exit_codes(start(fork_server, tokens, "whole", *spread, processes=4)) == [0] * 4, log_of(tokens, "whole")
    children = start(fork_server, tokens, "parts", *spread, divided, processes=4)
    wait_for(tokens, "parts", 13)
    for child in children:
        child.signal(signal.SIGKILL)
    exit_codes(children)
    assert exit_codes(start(fork_server, tokens, "parts", *spread, processes=4)) == [0] * 4, log_of(tokens, "parts")
    assert losses(tokens, "parts") == losses(tokens, "whole")
    assert weights(tokens, "parts", 16) == weights(tokens, "whole", 16)
    assert (
        exit_codes(start(fork_server, tokens, "other", *spread, divided, "--training.time_limit=0.00001", processes=4))
        == [0] * 4
    )
    alone = [*spread, "--training.local_batch_size=16", "--parallelism.pipeline_parallel_degree=3"]
    assert exit_codes(start(fork_server, tokens, "other", *alone)) == [0], log_of(tokens, "other")
    apart = [abs(losses(tokens, "other")[step][0] - losses(tokens, "whole")[step][0]) for step in range(1, 17)]
    assert max(apart) < 1e-4, apart
    (shared,), (whole,) = (validations(tokens, run) for run in ("whole", "other"))
    assert shared["samples"] == whole["samples"] == 11  # of 16 that are requested; the last 3 are shared unevenly
    assert abs(shared["loss"] - whole["loss"]) < 1e-4


@pytest.mark.parametrize("last", [False, True], ids=["in the background", "at the end"])
def test_a_rank_killed_while_saving_is_named_at_once_and_the_folder_is_free(
    fork_server: ForkServer, tokens: Path, last: bool
) -> None:
    """The first rank waits for what the killed one had to write, and the others for the first."""
    folder, ranks, step = tokens.parent, 3, 3
    words = [
        *TINY,
        f"--training.dataset_path={tokens}",
        f"--job.dump_folder={folder / 'run'}",
        "--checkpoint.interval=3",
    ]
    words += [f"--parallelism.pipeline_parallel_degree={ranks}", "--parallelism.pipeline_parallel_schedule=1f1b"]
    words += [f"--training.steps={step if last else 5000}"]
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        fork_server.start(
            SCRIPT,
            "killed_while_saving",
            [words, step, str(folder)],
            log=folder / f"run.{rank}.log",
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    codes = exit_codes(children)
    logs = [log_of(tokens, "run", rank) for rank in range(ranks)]
    assert codes == [2, 2, -signal.SIGKILL], logs
    killed = float((folder / "killed").read_text())
    for rank in range(ranks - 1):
        assert f"rank {rank}: rank {ranks - 1} died" in logs[rank]
        assert f"error: rank {ranks - 1} died" in logs[rank] or f"was not saved: rank {ranks - 1} died" in logs[rank]
        # Not by the deadline of the writer, which is a minute.
        assert float((folder / f"ended-{rank}").read_text()) - killed < 30.0
    assert not published(folder / "run" / "checkpoint")  # what they abandoned may stay until the next save
    free = RunFolder(folder / "run")
    free.claim(read_config(folder / "run" / "config.toml"))
    free.release()


def test_a_rank_that_waits_for_others_at_the_start_ends_by_sigterm(fork_server: ForkServer, tokens: Path) -> None:
    """As when another was killed before they met, and a launcher ends the rest to start all of them again."""
    folder = tokens.parent
    words = [*TINY, f"--training.dataset_path={tokens}", f"--job.dump_folder={folder / 'run'}"]
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    log = folder / "run.1.log"
    child = fork_server.start(SCRIPT, "noted_when_waiting", [words, str(folder)], log=log, environment=environment)
    wait_until(child, lambda: (folder / "inside").exists())
    child.signal(signal.SIGTERM)
    assert child.wait(PATIENCE) == -signal.SIGTERM, log.read_text()


@pytest.mark.parametrize(
    "more",
    [
        "--training.global_batch_size=16 --parallelism.pipeline_parallel_schedule=zb-h1 "
        "--parallelism.fsdp_reshard_after_forward=always",
        pytest.param(
            "--training.dtype=bfloat16 --activation_checkpoint.mode=full --optimizer.name=SGD --optimizer.lr=0.01",
            marks=pytest.mark.mesh_matrix,
        ),
    ],
    ids=["accumulation", "bfloat16"],
)
def test_shards_train_like_replicas_and_any_layout_resumes(fork_server: ForkServer, tokens: Path, more: str) -> None:
    """Two shards of two ranks, stopped and resumed, against two replicas; then one process resumes what they saved."""
    words = ["--training.local_batch_size=4", *more.split()]
    sharded = [*words, "--parallelism.data_parallel_shard_degree=2"]
    for run, options in (
        ("replicas", [*words, "--parallelism.shard_optimizer=true"]),
        ("shards", [*sharded, "--training.time_limit=0.00001"]),
        ("shards", sharded),
    ):
        assert exit_codes(start(fork_server, tokens, run, *options, processes=4)) == [0] * 4, log_of(tokens, run)
    assert "2 ranks × 2 shards as processes" in log_of(tokens, "shards")
    tolerance = 1e-4 if "float16" not in more else 2e-2
    apart = [abs(losses(tokens, "shards")[step][0] - losses(tokens, "replicas")[step][0]) for step in range(1, 17)]
    assert max(apart) < tolerance, apart
    saved, expected = (weights(tokens, run, 16) for run in ("shards", "replicas"))
    assert max(abs(a - b) for name in expected for a, b in zip(saved[name], expected[name], strict=True)) < tolerance
    per_step = 16 if "global" in more else 8
    alone = [*words, f"--training.local_batch_size={per_step}", "--training.steps=17"]
    assert exit_codes(start(fork_server, tokens, "shards", *alone)) == [0], log_of(tokens, "shards")
    assert len(losses(tokens, "shards")) == 17


def test_tensor_parallel_trains_like_one_process_and_any_layout_resumes(fork_server: ForkServer, tokens: Path) -> None:
    """Two ranks whose layers two processes share, stopped and resumed, against one process, which then resumes it."""
    # Without dropout, whose masks are different in layers that are cut.
    words = ["--training.local_batch_size=4", "--model.dropout=0", "--model.tie_embeddings=true"]
    parallel = [*words, "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=zb-h1"]
    for run, options, processes in (
        ("alone", words, 1),
        ("parallel", [*parallel, "--training.time_limit=0.00001"], 4),
        ("parallel", parallel, 4),
    ):
        codes = exit_codes(start(fork_server, tokens, run, *options, processes=processes))
        assert codes == [0] * processes, log_of(tokens, run)
    assert "2 ranks × 2 tensor parallel as processes" in log_of(tokens, "parallel")
    apart = [abs(losses(tokens, "parallel")[step][0] - losses(tokens, "alone")[step][0]) for step in range(1, 17)]
    assert max(apart) < 1e-4, apart
    saved, expected = (weights(tokens, run, 16) for run in ("parallel", "alone"))
    assert max(abs(a - b) for name in expected for a, b in zip(saved[name], expected[name], strict=True)) < 1e-4
    assert exit_codes(start(fork_server, tokens, "parallel", *words, "--training.steps=17")) == [0]
    assert len(losses(tokens, "parallel")) == 17

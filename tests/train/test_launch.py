"""`stageline train` that starts its ranks as processes: one output, one error, one exit code, as in one process."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stageline as sl
from stageline.cli.app import run
from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.launchers.launcher import Outcome
from stageline.testing import ForkServer
from stageline.train import launch, schedule_choice
from stageline.train.config.config import Config
from stageline.train.run_folder import PLAN
from support.jobs import PATIENCE, TINY, losses, step_of, weights

pytestmark = pytest.mark.timeout(300)
Capture = pytest.CaptureFixture[str]

SLOW = """
import time
from pathlib import Path

def make():
    Path("inside").touch()
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def train(tokens: Path, folder: str, *more: str) -> int:
    words = [*TINY, f"--training.dataset_path={tokens}", f"--job.dump_folder={tokens.parent / folder}"]
    return run(["train", *words, "--parallelism.launcher=processes", *more])


def when(condition: Callable[[], bool], act: Callable[[], object]) -> None:
    """Act once a condition holds, while this thread waits for a job."""

    def wait() -> None:
        end = time.monotonic() + PATIENCE
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_a_job_on_processes_stops_resumes_and_fails_as_one_process_does(
    fork_server: ForkServer, tokens: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_choice, "time_alone", lambda *_: 0.01)
    assert train(tokens, "whole", "--parallelism.launcher=threads") == 0
    out = capfd.readouterr().out
    assert "2 ranks as threads on cpu" in out
    text = r"speed +([\d.]+) ms a step, ([\d.]+) times as fast as one process .* with \d+ threads \((4\d[.\d]*) ms"
    match = re.search(text, out)
    assert match
    seconds, ratio, alone = match.groups()
    assert float(ratio) == pytest.approx(float(alone) / float(seconds), abs=0.01)
    assert f">{ratio}<" in (tokens.parent / "whole" / "report.html").read_text()

    assert sl.read_plan(tokens.parent / "whole" / PLAN).costs.bandwidth is None  # threads pass tensors on as they are

    when(lambda: step_of(tokens, "run") >= 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(tokens, "run", "--training.steps=5000") == 0
    out, err = capfd.readouterr()
    assert out.count("2 ranks as processes on cpu") == out.count("stopped by SIGINT") == 1
    assert err == ""

    costs = sl.read_plan(tokens.parent / "run" / PLAN).costs
    assert costs.bandwidth is not None  # the messages of processes were measured

    last = step_of(tokens, "run")
    when(lambda: step_of(tokens, "run") > last, lambda: os.kill(max(fork_server._children), signal.SIGKILL))
    more = ("--training.steps=5000", "--checkpoint.interval=5000", "--recovery.max_restarts=0")
    assert train(tokens, "run", *more) == 2
    error, *notes = capfd.readouterr().err.splitlines()
    assert error.startswith("error: rank 1 died (its process exited without reporting an error)")
    assert notes[-1] == "rank 1 of 2 was killed by SIGKILL"
    assert not any(note.startswith("error") for note in notes)

    assert train(tokens, "same", "--training.time_limit=0.00001") == 0
    when(lambda: step_of(tokens, "same") > 4, lambda: os.kill(max(fork_server._children), signal.SIGKILL))
    assert train(tokens, "same") == 0  # resumes, loses a rank, and recovers
    assert '"event":"recovery"' in (tokens.parent / "same" / "metrics.jsonl").read_text().replace(" ", "")
    assert losses(tokens, "same") == losses(tokens, "whole")
    assert weights(tokens, "same", 16) == weights(tokens, "whole", 16)


def test_an_interrupt_before_the_first_step_ends_all_ranks_with_one_line(tokens: Path, capfd: Capture) -> None:
    Path("slow.py").write_text(SLOW)
    when(Path("inside").exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(tokens, "run", "--model.name=slow:make", "--training.loss=mse") == 130
    assert capfd.readouterr().err == "stageline: interrupted\n"


def failing(*outcomes: Outcome) -> None:
    launch._fail(next(outcome for outcome in outcomes if outcome.failure), outcomes, len(outcomes))


def test_an_error_is_that_of_the_rank_that_failed_first(capsys: Capture) -> None:
    refusal = StagelineError("the model has 1 unit")
    with pytest.raises(StagelineError, match="1 unit") as caught:
        failing(Outcome(0, error=refusal, failure="Traceback …"), Outcome(1, error=refusal, failure="Traceback …"))
    assert caught.value is refusal
    lost = PipelineError("rank 1 died in B")
    with pytest.raises(PipelineError, match="rank 1 died in B") as lost_rank:
        failing(Outcome(1, failure="was killed by SIGKILL", code=-9), Outcome(0, error=lost, failure="Traceback …"))
    assert lost_rank.value.__notes__ == ["rank 1 of 2 was killed by SIGKILL"]
    with pytest.raises(SystemExit, match="1"):
        failing(Outcome(0, error=KeyError("x"), failure="Traceback …\nKeyError: 'x'\n"))
    assert capsys.readouterr().err == "Traceback …\nKeyError: 'x'\n"
    with pytest.raises(StagelineError, match="rank 0 of 1 ended with exit code 3"):
        failing(Outcome(0, failure="ended with exit code 3", code=3))


def test_under_another_launcher_no_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from stageline.train.config.ranks import processes_to_start

    options = Config.read(None, "parallelism.pipeline_parallel_degree=3").parallelism
    assert processes_to_start(options) == 3
    assert processes_to_start(Config.read(None, "parallelism.launcher=threads").parallelism) == 1
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun --nproc-per-node 1
    assert processes_to_start(options) == 1

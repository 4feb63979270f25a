"""`sl.launch` and its launchers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.cli.app import run
from stageline.distributed import attempts
from stageline.distributed.launchers.launcher import Job
from stageline.distributed.launchers.processes import ProcessLauncher
from stageline.testing import ForkServer, exercise_launcher
from support.ports import free_ports

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of these tests need none, and a machine may have fewer GPUs than a test has ranks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def gradients_of_pipeline() -> tuple[int, dict[str, torch.Tensor]]:
    """A pipeline of as many ranks as were launched, and its gradients on this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    batch = torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, ranks=2, deadline=30)
    pipe.step(batch, torch.zeros(8, 4))
    return pipe.ranks, {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def ranks_of_default_pipeline() -> int:
    """Pipelines of a job of threads have as many ranks as it."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    return sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="gpipe", microbatches=2).ranks


def stop_or_wait(folder: str) -> None:
    """Rank 1 dies when rank 0 runs; rank 0 would wait for ever, and ignores a request to end."""
    mark = Path(folder) / "rank-0"
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark.write_text(str(os.getpid()))
        while True:
            time.sleep(1)
    while not mark.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def loses_a_rank() -> tuple[int, int, float]:
    """Rank 1 dies in the first attempt. Rank 0 rejoins; rank 2 ends with the error, and is called again."""
    started = attempts.number_of() or 0
    while True:
        try:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2, deadline=30)
            pipe.step(torch.ones(4, 4), torch.ones(4, 4))
            if os.environ["RANK"] == "1" and attempts.number_of() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return started, os.getpid(), pipe.step(torch.ones(4, 4), torch.ones(4, 4)).loss
        except sl.PipelineError as error:
            if os.environ["RANK"] == "2":
                raise
            sl.rejoin(error)


def test_a_rank_that_dies_is_started_again_and_those_that_rejoin_keep_their_process() -> None:
    results = sl.launch(loses_a_rank, processes=3, max_restarts=1, timeout=100)
    assert [started for started, _, _ in results] == [0, 1, 1]
    assert len({loss for _, _, loss in results}) == 1
    with pytest.raises(
        sl.LaunchError, match=r"^rank 1 of 3 was killed by SIGKILL, and no action in on_loss \(replan\) "
    ):
        sl.launch(loses_a_rank, processes=3, max_restarts=1, on_loss=["replan"], timeout=100)
    with pytest.raises(sl.StagelineError, match=r"on_loss has 'restrat' \(did you mean 'restart'\?\); it may have"):
        sl.launch(loses_a_rank, processes=3, max_restarts=1, on_loss=["restrat"])


class OddError(Exception):
    """An exception that cannot be pickled back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def raise_odd() -> None:
    raise OddError("planted", " failure")


def raise_with_cause() -> None:
    """The traceback of this begins with its cause, which has none."""
    raise ValueError("planted") from KeyError("cause")


def return_local() -> object:
    return lambda: None


def leave(code: int) -> None:
    raise SystemExit(code)


def test_processes_and_threads_compute_the_same_gradients() -> None:
    (_, whole), *_ = sl.launch(gradients_of_pipeline, processes=2, launcher="threads")
    parts: dict[str, torch.Tensor] = {}
    for ranks, own in sl.launch(gradients_of_pipeline, processes=2):
        assert ranks == 2
        assert own.keys().isdisjoint(parts)
        parts |= own
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_threads_set_the_number_of_ranks() -> None:
    assert sl.launch(ranks_of_default_pipeline, processes=2, launcher="threads") == [2]
    assert "STAGELINE_RANKS" not in os.environ


def test_processes_conform(capfd: pytest.CaptureFixture[str]) -> None:
    exercise_launcher(ProcessLauncher(patience=1.0))
    assert "Traceback" not in capfd.readouterr().err


def test_a_dead_rank_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    outcomes = ProcessLauncher(patience=0.2).run(Job(stop_or_wait, (str(tmp_path),), processes=2))
    assert [outcome.rank for outcome in outcomes] == [1, 0]
    assert outcomes[0].failure == "was killed by SIGKILL"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank-0").read_text()), 0)


COMPUTING_SCRIPT = """
import sys
import torch

def compute():
    return (torch.ones(600, 600) @ torch.ones(600, 600)).exp().sum()

compute()  # in the server: a process forked from one that computed with several threads would wait for them

def work():
    torch.set_num_threads(2)
    compute()
    sys.exit(7)

def threads():
    sys.exit(torch.get_num_threads())
"""


def test_processes_of_a_fork_server_compute_with_several_threads(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "threads_rank.py").write_text(COMPUTING_SCRIPT)
    script, log = tmp_path / "threads_rank.py", tmp_path / "log"
    assert fork_server.start(script, "work", log=log).wait(60) == 7, log.read_text()
    own = {"OMP_NUM_THREADS": "3"}
    assert fork_server.start(script, "threads", log=log, environment=own).wait(60) == 3, log.read_text()


def test_a_job_that_takes_too_long_is_ended() -> None:
    with pytest.raises(sl.LaunchError, match=r"^rank 0 of 2 did not end within 0.5 s$"):
        sl.launch(time.sleep, 60, processes=2, timeout=0.5)


def test_exceptions_come_back() -> None:
    with pytest.raises(sl.LaunchError, match=r"^rank 0 of 1 failed: ValueError: invalid literal") as caught:
        sl.launch(int, "one", processes=1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.rank == 0
    with pytest.raises(sl.LaunchError, match=r"failed: OddError: planted failure\n(.|\n)*in raise_odd") as caught:
        sl.launch(raise_odd, processes=1)
    assert isinstance(caught.value.__cause__, OddError)
    with pytest.raises(sl.LaunchError, match=r"^rank 0 of 1 failed: ValueError: planted\n"):
        sl.launch(raise_with_cause, processes=1)


def test_what_cannot_be_sent_to_ranks_or_back_is_named() -> None:
    with pytest.raises(sl.StagelineError, match=r"^ranks cannot import \S+<lambda> .*; define it with def"):
        sl.launch(lambda: 1, processes=1)
    with pytest.raises(sl.StagelineError, match=r"^the arguments of getpid cannot be sent to the ranks \(.*lambda"):
        sl.launch(os.getpid, lambda: 1, processes=1)
    with pytest.raises(sl.LaunchError, match=r"the result of the function, a function, cannot be sent back") as caught:
        sl.launch(return_local, processes=1)
    assert isinstance(caught.value.__cause__, sl.StagelineError)


MAIN_PROGRAM = """
import os
import stageline as sl

def inner(): return os.environ["RANK"]
def outer(): return sl.launch(inner, processes=1)
"""


def test_functions_of_the_main_program(tmp_path: Path) -> None:
    """Ranks start ranks of their own; a program without a file, or without a guard, is refused in a sentence."""
    script = tmp_path / "program.py"
    script.write_text(f"{MAIN_PROGRAM}\nif __name__ == '__main__': print(sl.launch(outer, processes=2))")
    assert output_of([sys.executable, str(script)]) == "[['0'], ['0']]"
    script.write_text(f"{MAIN_PROGRAM}\nprint(sl.launch(inner, processes=1))")
    error = (
        "ranks import the main program, and this one starts ranks when it is imported; put that call under if __name__"
    )
    assert error in output_of([sys.executable, str(script)])
    error = "ranks cannot import inner or its arguments from the main program, which is not a file"
    assert error in output_of([sys.executable, "-c", f"{MAIN_PROGRAM}\nprint(sl.launch(inner, processes=1))"])


def output_of(command: list[str]) -> str:
    """The last line that a command writes."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(("code", "text"), [(3, "ended with exit code 3"), (0, "ended before the function returned")])
def test_a_rank_that_leaves_has_no_result(code: int, text: str) -> None:
    with pytest.raises(sl.LaunchError, match=text):
        sl.launch(leave, code, processes=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes": 0}, "processes must be the number of ranks, at least 1; got 0"),
        ({"processes": True}, "got True"),
        ({"processes": 1, "launcher": "proceses"}, r"unknown launcher 'proceses' \(did you mean 'processes'\?\)"),
        ({"processes": 1, "launcher": 3}, "launcher must be a name or an object with a method run; got 3"),
        ({"processes": 1, "spares": 1}, "spares is 1, but spare processes are used only if max_restarts"),
        ({"processes": 1, "timeout": 0}, "timeout must be a number of seconds above 0, or None; got 0"),
        ({"processes": 1, "launcher": "threads", "timeout": 1.0}, "cannot stop it; use processes"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(sl.StagelineError, match=text):
        sl.launch(os.getpid, **options)


SCRIPT = """
import os, sys, torch
from support.ports import free_ports
from torch import nn

import stageline as sl

rank = int(os.environ["RANK"])
print("rank", rank, sys.argv[1:], __name__)
pipe = sl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss_fn=nn.functional.mse_loss, schedule="1f1b",
                   microbatches=2)
if rank == 1 and sys.argv[1:] == ["--fail"]:
    raise KeyError("planted")
print("loss", pipe.step(torch.ones(2, 2), torch.ones(2, 2)).loss)
"""


def test_the_command_runs_scripts_and_names_the_rank_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(SCRIPT)
    assert run(["launch", "-n", "2", "job.py", "first", "-x"]) == 0
    output = capfd.readouterr().out
    assert "rank 0 ['first', '-x'] __main__" in output
    assert output.count("loss") == 2
    assert run(["launch", "-n", "2", "--logs", "logs", "-m", "job", "--fail"]) == 1
    error = capfd.readouterr().err
    assert error == "stageline launch: rank 1 of 2 failed: KeyError: 'planted'; its output is in logs/rank-1.log\n"
    log = Path("logs/rank-1.log").read_text()
    assert "KeyError: 'planted'" in log
    assert "fork_server" not in log
    assert "rank 1 left (KeyError: 'planted')" in Path("logs/rank-0.log").read_text()
    assert run(["launch", "-n", "2", "--launcher", "threads", "job.py"]) == 1
    output = capfd.readouterr().err
    assert "job.py" in output, "the traceback"
    assert output.endswith("stageline launch: rank 0 of 2 failed: KeyError: 'RANK'\n")
    assert run(["launch", "--nproc-per-node", "2", "job.py"]) == 2
    assert capfd.readouterr().err == (
        "error: unknown option --nproc-per-node (did you mean -n?); options of the script follow its name\n"
    )
    assert run(["launch", "-n", "2", "-m", "jop.main"]) == 2
    assert capfd.readouterr().err == (
        "error: there is no module jop.main; run stageline launch where Python finds it\n"
    )
    assert run(["launch", "jop.py"]) == 2
    assert (
        capfd.readouterr().err == "error: there is no file jop.py (did you mean 'job.py'?); to run a module, use -m\n"
    )


def test_jobs_listen_on_the_ports_of_a_range() -> None:
    first = free_ports(3)
    needed = {"STAGELINE_PORTS": f"{first}-{first + 2}"}  # two ranks, and the failure monitor
    assert len(sl.launch(gradients_of_pipeline, processes=2, environment=needed)) == 2
    too_few = {"STAGELINE_PORTS": f"{first}-{first}"}
    with pytest.raises(sl.StagelineError, match=f"^STAGELINE_PORTS={first}-{first} has 1 port, and .* 2 ranks needs 3"):
        sl.launch(gradients_of_pipeline, processes=2, environment=too_few)
    with pytest.raises(sl.StagelineError, match=r"^STAGELINE_SECRET has 3 characters, but at least 16 are needed"):
        sl.launch(gradients_of_pipeline, processes=2, environment={"STAGELINE_SECRET": "abc"})
    tls = dict.fromkeys(("STAGELINE_TLS_CERT", "STAGELINE_TLS_KEY", "STAGELINE_TLS_CA"), "missing.pem")
    with pytest.raises(sl.StagelineError, match=r"^cannot read the files of STAGELINE_TLS_CERT=missing.pem, "):
        sl.launch(gradients_of_pipeline, processes=2, environment=tls)


def processes_of(session: int) -> dict[int, str]:
    """The processes of a session that run, and their command lines."""
    commands = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == session:
                commands[int(folder.name)] = (folder / "cmdline").read_text()  # empty if it has ended
    return {pid: command for pid, command in commands.items() if command}


@pytest.mark.host_matrix
@pytest.mark.parametrize(
    ("target", "number", "code"), [("launcher", 2, 130), ("launcher", 15, 143), ("launcher", 9, -9), ("server", 9, 137)]
)
def test_nothing_is_left_of_a_job_that_a_signal_ends(target: str, number: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C, a request to end, the loss of the launcher, and that of the process that started the ranks."""
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('runs', flush=True)\ntime.sleep(600)")
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "stageline", "launch", "-n", "2", str(script)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
    try:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["runs\n"] * 2
        others = [pid for pid in processes_of(launcher.pid) if pid != launcher.pid]
        assert len(others) == 3, "the server and two ranks"
        os.kill(launcher.pid if target == "launcher" else min(others), number)
        assert launcher.wait(60) == code
        end = time.monotonic() + 30
        while left := processes_of(launcher.pid) or list((tmp_path / "tmp").glob("stageline-*")):
            assert time.monotonic() < end, left
            time.sleep(0.05)
    finally:
        for pid in processes_of(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.host_matrix
@pytest.mark.parametrize("words", [["launch", "-n", "2", "-m", "this"], ["train", "--job.dump_folder=run"]])
def test_ctrl_c_while_the_fork_server_imports_ends_the_command_at_once(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stageline", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + 60
        while not any("fork_server" in line for line in processes_of(process.pid).values()):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "stageline: interrupted\n")
        assert process.returncode == 130
        while processes_of(process.pid):
            assert time.monotonic() < end + 30, processes_of(process.pid)
            time.sleep(0.05)
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()

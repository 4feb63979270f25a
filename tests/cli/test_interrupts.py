"""Ctrl-C on the command line: one line and exit code 130 before the first step, a saved step after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.testing import ForkServer
from support.jobs import SCRIPT, TINY, exit_codes, log_of, losses, start, validations, wait_for, wait_until, weights

PATIENCE = 240.0

PLAIN = ("--parallelism.pipeline_parallel_schedule=1f1b",)
NATIVE = "ctypes.CDLL(None).pthread_mutex_lock(mutex)"
PLANTS = {
    "python": "time.sleep(600)",
    "swallowed": "\ntry: time.sleep(600)\nexcept BaseException: time.sleep(600)",
    "native": f"mutex = ctypes.create_string_buffer(64); {NATIVE}; {NATIVE}",
}
"""What an import is doing. The last one holds the main thread where Python runs no signal handlers."""


def interrupted(folder: Path, module: str, plant: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a module in whose import SIGINT comes."""
    planted = (
        f"import ctypes, os, signal, time\nos.kill(os.getpid(), signal.SIGINT) if {plant!r} != 'native' else None\n"
    )
    if plant == "native":
        planted += "import threading\nthreading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    (folder / f"{module}.py").write_text(planted + PLANTS[plant])
    paths = [str(folder), *sys.path]
    return subprocess.run(
        [sys.executable, "-m", "stageline", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize(
    ("module", "plant", "words"),
    [
        ("typer", "python", "families"),
        ("numpy", "swallowed", "show 1f1b -p 2 -m 2"),
        ("torch", "python", "train"),
        ("torch", "native", "train"),
        ("torch", "swallowed", "plan x:y -p 2 -b 4"),
        ("torch", "python", "profile x:y"),
        ("torch", "python", "check x:y -p 2"),
    ],
)
def test_an_interrupt_in_an_import_is_one_line(tmp_path: Path, module: str, plant: str, words: str) -> None:
    done = interrupted(tmp_path, module, plant, *words.split())
    assert (done.returncode, done.stderr) == (130, "stageline: interrupted\n"), done.stdout


def test_an_interrupt_in_a_stream_of_text_starts_a_new_line() -> None:
    code = """
import os, signal, time
from stageline.common import interrupts
interrupts.install()
from stageline.train.data import find_tokenizer
from stageline.train.generation_job import print_stream

def tokens():
    yield from b"main("
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

print_stream(find_tokenizer("bytes"), list(b"def "), tokens(), show=True)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (130, "def main(\nstageline: interrupted\n")


def test_nothing_is_imported_before_an_interrupt_can_be_heard() -> None:
    code = "import sys; before = set(sys.modules); import stageline.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    allowed = {"__future__", "stageline", "stageline._moved", "stageline._version", "stageline.cli"}
    assert set(done.stdout.split()) <= allowed


def test_the_names_of_the_package_are_there_without_touching_them_first() -> None:
    code = "import stageline as sl; print(sl.errors.StagelineError.__name__, sl.schedules.registry, sl.timeline.costs)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith("StagelineError <module 'stageline.schedules.registry'")


def test_before_the_first_step_is_finished_the_command_ends_at_once_and_can_be_started_again(
    fork_server: ForkServer, tokens: Path
) -> None:
    folder = tokens.parent
    words = [*TINY, *PLAIN, f"--training.dataset_path={tokens}", f"--job.dump_folder={folder / 'run'}"]
    child = fork_server.start(SCRIPT, "command", [words, str(folder)], log=folder / "run.0.log")
    wait_until(child, lambda: (folder / "inside").exists())
    child.signal(signal.SIGINT)
    assert child.wait(PATIENCE) == 130
    assert log_of(tokens, "run").count("stageline: interrupted\n") == 1
    assert "Traceback" not in log_of(tokens, "run")
    assert exit_codes(start(fork_server, tokens, "run", *PLAIN)) == [0]
    assert not [path.name for path in (folder / "run").iterdir() if path.name.startswith(".")]


def test_an_interrupt_while_a_sample_is_drawn_leaves_it_out(fork_server: ForkServer, tokens: Path) -> None:
    (tokens.parent / "text.txt").write_text("ab" * 4000)
    more = [
        "--training.dataset=text",
        f"--training.dataset_path={tokens.parent / 'text.txt'}",
        "--model.vocab_size=256",
    ]
    children = start(fork_server, tokens, "run", *PLAIN, *more, "--sample.tokens=1000000", processes=2)
    wait_until(children[0], lambda: (tokens.parent / "run/checkpoint/step-00000016/manifest.json").is_file())
    children[1].signal(signal.SIGINT)  # one rank alone; the ranks agree
    assert exit_codes(children) == [0, 0], log_of(tokens, "run")
    assert "sample    none: stopped by a signal\n" in log_of(tokens, "run")


def test_an_interrupted_validation_is_made_up_for_by_the_next_start(fork_server: ForkServer, tokens: Path) -> None:
    more = (*PLAIN, "--validation.steps=2", "--validation.freq=4", "--validation.patience=3")
    assert exit_codes(start(fork_server, tokens, "whole", *more)) == [0], log_of(tokens, "whole")
    children = start(fork_server, tokens, "parts", *more, processes=2, function="slow_validation")
    wait_for(tokens, "parts", 4)
    wait_until(children[1], lambda: (tokens.parent / "validating").exists())
    children[1].signal(signal.SIGINT)
    assert exit_codes(children) == [0, 0], log_of(tokens, "parts")
    assert validations(tokens, "parts") == []
    assert exit_codes(start(fork_server, tokens, "parts", *more)) == [0], log_of(tokens, "parts")
    assert [(row["step"], row["loss"]) for row in validations(tokens, "parts")] == [
        (row["step"], row["loss"]) for row in validations(tokens, "whole")
    ]
    assert losses(tokens, "parts") == losses(tokens, "whole")
    last = max(losses(tokens, "whole"))
    assert weights(tokens, "parts", last) == weights(tokens, "whole", last)

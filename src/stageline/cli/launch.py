"""`stageline launch`: run a script on several ranks of this machine or of a Ray cluster."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stageline.common.errors import StagelineError, nearest

TRAINING = ("stageline.cli.train", "stageline.train.trainer", "stageline.train.report")
"""What the ranks of `stageline launch -m stageline train` import."""
SETTINGS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Passed to the script.", show_default=False)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "-n", min=1, help="Number of ranks. Default: one per GPU, else one per core up to 4."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the output of the ranks, rank-0.log and so on; else the terminal.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="End the job after this many seconds.", min=0.1)] = None,
    launcher: Annotated[
        str, typer.Option(metavar="NAME", help="Where ranks run: processes of this machine, or ray, a Ray cluster.")
    ] = "processes",
    max_restarts: Annotated[int, typer.Option(help="How many losses of a rank the job survives.", min=0)] = 0,
    on_loss: Annotated[
        str, typer.Option(metavar="ACTIONS", help="What may be done about a lost rank, in this order.")
    ] = "restart,spare",
    spares: Annotated[int, typer.Option(help="Processes that wait to take the place of a lost rank.", min=0)] = 0,
) -> None:
    """Run a Python script on several ranks of this machine or of a Ray cluster, each in a process of its own.

    The ranks have the environment variables of torchrun, so scripts for torchrun run unchanged. If a rank fails, the
    others are ended, and the exit code is that of the rank that failed first: 128 plus its number for a signal. With
    --max-restarts, a rank that is killed is started again.

    Examples:
      stageline launch -n 4 train.py --lr 3e-4
      stageline launch -n 2 -m stageline train job.toml
      stageline launch --launcher ray -n 8 train.py
    """
    from stageline.distributed.launchers.launcher import Job, describe, find_launcher, first_failure
    from stageline.distributed.launchers.processes import ProcessLauncher, default_processes
    from stageline.distributed.recovery_policy import Recovery

    if not module and not Path(script).is_file():
        near = nearest(script, [path.name for path in Path().glob("*.py")])
        raise StagelineError(f"there is no file {script}{near}; to run a module, use -m")
    chosen: Any = find_launcher(launcher) if launcher != "processes" else ProcessLauncher(logs=logs)
    if logs is not None and launcher != "processes":
        raise StagelineError(f"--logs is for the launcher processes, and --launcher is {launcher}")
    count = processes or (chosen.slots() if launcher == "ray" else default_processes())
    words = (script, arguments or [], module)
    actions = tuple(action.strip() for action in on_loss.split(",") if action.strip())
    recovery = Recovery(max_restarts, actions, spares)
    modules = TRAINING if module and script == "stageline" else ()
    job = Job(run_script, words, count, timeout=timeout, returns=False, recovery=recovery, modules=modules)
    culprit = first_failure(chosen.run(job))
    if culprit is not None:
        where = f"; its output is in {logs / f'rank-{culprit.rank}.log'}" if logs is not None else ""
        typer.echo(f"stageline launch: {describe(culprit, count).splitlines()[0]}{where}", err=True)
        raise typer.Exit(128 - culprit.code if culprit.code < 0 else culprit.code or 1)


def run_script(script: str, arguments: list[str], module: bool) -> None:
    """Run a script or module as the main program, as `python script` and `python -m module` do."""
    sys.argv = [script, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")

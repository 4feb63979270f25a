"""`stageline launch`: run a script on several ranks of this machine, of several hosts or of a Ray cluster."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from stageline.common.errors import StagelineError, nearest
from stageline.common.interrupts import cleaned_up_by_sigterm

TRAINING = ("stageline.cli.train", "stageline.train.trainer", "stageline.train.report")
"""What the ranks of `stageline launch -m stageline train` import."""
SETTINGS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file or, with -m, a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS…", help="Arguments of the script.", show_default=False)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-n",
            min=0,
            help="Ranks on this host. Default: one per GPU or, without GPUs, one per core, up to 4.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as python -m does.")] = False,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for the output of the ranks (rank-0.log, …). Default: the terminal."
        ),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Stop the job after this many seconds.", min=0.1)] = None,
    launcher: Annotated[
        str, typer.Option(metavar="NAME", help="Where ranks run: processes, on this machine, or ray, on a Ray cluster.")
    ] = "processes",
    max_restarts: Annotated[
        int, typer.Option(help="Maximum number of lost ranks that the job recovers from.", min=0)
    ] = 0,
    on_loss: Annotated[
        str, typer.Option(metavar="ACTIONS", help="Actions to try, in order, when a rank is lost.")
    ] = "restart,spare",
    spares: Annotated[int, typer.Option(help="Number of spare processes that can replace a lost rank.", min=0)] = 0,
    nnodes: Annotated[int, typer.Option(help="Number of hosts; run the command on each of them.", min=1)] = 1,
    node_rank: Annotated[int, typer.Option(help="Index of this host, counted from 0.", min=0)] = 0,
    master_addr: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address of host 0, to which all launchers connect.")
    ] = "",
    master_port: Annotated[int, typer.Option(help="Port of the launcher on host 0.", min=1, max=65535)] = 29400,
    host_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a host counts as lost.", min=1.0)
    ] = 30.0,
) -> None:
    """Run a Python script on several ranks, each in its own process: on this machine, several hosts or a Ray cluster.

    The ranks get the environment variables that torchrun sets, so torchrun scripts run unchanged. If a rank fails, the
    others are terminated, and the exit code is that of the rank that failed first (128 plus the signal number if a
    signal killed it). With --max-restarts, killed ranks are restarted. On several hosts, run the command on each host
    with its own --node-rank; a host with -n 0 and --spares only holds spare processes.

    Examples:
      stageline launch -n 4 train.py --lr 3e-4
      stageline launch -n 2 -m stageline train job.toml
      stageline launch --launcher ray -n 8 train.py
      stageline launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -n 4 train.py
    """
    from stageline.distributed.launchers.launcher import Job, describe, first_failure
    from stageline.distributed.launchers.processes import default_processes
    from stageline.distributed.recovery_policy import Recovery

    if script.startswith("-"):
        known = ("--processes", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts")
        near = " (did you mean -n?)" if script.startswith("--nproc") else nearest(script, known)
        raise StagelineError(f"unknown option {script}{near}; options of the script follow its name")
    if module and not _is_found(script):
        raise StagelineError(f"there is no module {script}; run stageline launch where Python finds it")
    if not module and not Path(script).is_file():
        near = nearest(script, [path.name for path in Path().glob("*.py")])
        raise StagelineError(f"there is no file {script}{near}; to run a module, use -m")
    if logs is not None and logs.exists() and not logs.is_dir():
        raise StagelineError(f"--logs must be a folder for the output of the ranks, but {logs} is a file")
    chosen = _find_launcher(launcher, logs, processes, (nnodes, node_rank, master_addr, master_port, host_timeout))
    count = processes if processes is not None else chosen.slots() if launcher == "ray" else default_processes()
    words = (script, arguments or [], module)
    actions = tuple(action.strip() for action in on_loss.split(",") if action.strip())
    recovery = Recovery(max_restarts, actions, spares)
    modules = TRAINING if module and script == "stageline" else ()
    job = Job(run_script, words, count, timeout=timeout, returns=False, recovery=recovery, modules=modules)
    with cleaned_up_by_sigterm():
        culprit = first_failure(chosen.run(job))
    if culprit is not None:
        log = None if logs is None else logs / f"rank-{culprit.rank}.log"
        where = f"; its output is in {log}" if log is not None and log.exists() else ""
        ranks = chosen.ranks if nnodes > 1 else count
        typer.echo(f"stageline launch: {describe(culprit, ranks).splitlines()[0]}{where}", err=True)
        raise typer.Exit(128 - culprit.code if culprit.code < 0 else culprit.code or 1)


def _is_found(module: str) -> bool:
    """Whether there is a module, or a package that may have it; imports nothing."""
    package = module.partition(".")[0]
    return bool(package) and (find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])) is not None


def _find_launcher(name: str, logs: Path | None, processes: int | None, place: tuple[int, int, str, int, float]) -> Any:
    """Return the launcher, of several hosts if there are several; refuse options that it does not take."""
    from stageline.distributed.launchers.launcher import find_launcher
    from stageline.distributed.launchers.processes import ProcessLauncher

    nnodes, node_rank, master_addr, *_ = place
    if nnodes > 1 and name != "processes":
        raise StagelineError(f"--nnodes requires --launcher processes, got --launcher {name}")
    if nnodes > 1:
        from stageline.distributed.launchers.host_ranks import HostLauncher
        from stageline.distributed.launchers.hosts import HostPlace

        return HostLauncher(HostPlace(*place), logs=logs)
    chosen = find_launcher(name) if name != "processes" else ProcessLauncher(logs=logs)
    if node_rank or master_addr:
        raise StagelineError("--node-rank and --master-addr require --nnodes, the number of hosts")
    if processes == 0:
        raise StagelineError(
            "-n 0 is only for a host of spare processes in a job of several hosts (--nnodes); start at least one rank"
        )
    if logs is not None and name != "processes":
        raise StagelineError(f"--logs requires --launcher processes, got --launcher {name}")
    return chosen


def run_script(script: str, arguments: list[str], module: bool) -> None:
    """Run a script or module as the main program, as `python script` and `python -m module` do."""
    sys.argv = [script, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")

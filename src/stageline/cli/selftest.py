"""`stageline selftest`: try what we promise where a job will run, and write a page and a JSON file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stageline.cli.options import complete_family_list

if TYPE_CHECKING:
    from stageline.selftest.selftest import SelfTest


def command(
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "-n", min=2, help="Number of ranks to start. Default: one per GPU or, without GPUs, up to 4."
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Where to start ranks: processes or ray. Ignored under torchrun, srun or Ray."
        ),
    ] = "processes",
    out: Annotated[
        Path,
        typer.Option("-o", "--output", "--out", metavar="FOLDER", help="Folder for the HTML page and the JSON file."),
    ] = Path(),
    families: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="Schedule families to check. Default: all.", autocompletion=complete_family_list
        ),
    ] = None,
    kill: Annotated[bool, typer.Option(help="Kill a rank of a small job, and check that the others report it.")] = True,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds after which a silent rank counts as lost.")] = 30.0,
) -> None:
    """Test the hosts, links and versions that a job will use; write the results as an HTML page and a JSON file.

    Checks that every schedule family is bit-identical to a plain loop, that a killed rank is identified, and that all
    ranks run the same versions; measures latency and bandwidth between ranks. Under torchrun, srun or Ray, it runs on
    their ranks; otherwise it starts its own. The exit code is 0 if all checks pass, and 1 otherwise.

    Examples:
      stageline selftest
      stageline selftest --launcher ray -n 8 --output selftest
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host1 -m stageline selftest
      srun python -m stageline selftest
    """
    from stageline.distributed.launchers.slurm import slurm_place
    from stageline.schedules.registry import find_family
    from stageline.selftest.selftest import run_selftest

    names = [name.strip() for name in families.split(",")] if families else None
    for name in names or ():
        find_family(name)  # raises if there is none of this name
    os.environ.update(slurm_place(os.environ))
    placed = os.environ.get("WORLD_SIZE", "1") != "1"
    if placed:
        result = run_selftest(deadline, names, kill)
        if os.environ.get("RANK") == "0":
            _report(result, out)
    else:
        result = _launch(processes, launcher, deadline, names, kill)
        _report(result, out)
    raise typer.Exit(1 if result.problems else 0)


def _launch(processes: int | None, launcher: str, deadline: float, names: list[str] | None, kill: bool) -> SelfTest:
    from stageline.distributed.launchers.launcher import find_launcher, launch
    from stageline.distributed.launchers.processes import default_processes
    from stageline.selftest.selftest import run_selftest

    chosen = find_launcher(launcher)
    slots = getattr(chosen, "slots", default_processes)
    results = launch(run_selftest, deadline, names, kill, processes=processes or max(2, slots()), launcher=chosen)
    return results[0]  # type: ignore[no-any-return]


def _report(result: SelfTest, out: Path) -> None:
    """Print a summary, and write the files."""
    verdicts = [family.verdict for family in result.families]
    hosts = len({rank.host for rank in result.ranks})
    versions = ", ".join(f"{name} {version}" for name, version in result.ranks[0].versions.items())
    typer.echo(f"ranks     {len(result.ranks)} on {hosts} host{'s' if hosts > 1 else ''}, started by {result.launcher}")
    typer.echo(f"versions  {versions}")
    skipped = [family.name for family in result.families if family.verdict == "skipped"]
    note = f"; not for {len(result.ranks)} ranks: {', '.join(skipped)}" if skipped else ""
    rounding = f", {verdicts.count('reordered')} up to rounding" if "reordered" in verdicts else ""
    run = len(verdicts) - len(skipped)
    typer.echo(f"bits      {verdicts.count('equal')} of {run} families equal a plain loop{rounding}{note}")
    if result.pairs:
        slowest = min(result.pairs, key=lambda pair: pair.gbytes_per_s)
        latency = max(pair.latency_us for pair in result.pairs)
        count = "1 pair" if len(result.pairs) == 1 else f"{len(result.pairs)} pairs"
        typer.echo(
            f"links     {count}: at least {slowest.gbytes_per_s:.3g} GB/s (ranks {slowest.first} and "
            f"{slowest.second}), at most {latency:.0f} µs"
        )
    if result.kill is not None:
        typer.echo(f"kill      of rank {result.kill.killed}: the others raised within {result.kill.seconds:.2f} s")
    for problem in result.problems:
        typer.echo(f"FAILED    {problem}")
    page, data = result.write(out)
    typer.echo(f"wrote {page} and {data}")

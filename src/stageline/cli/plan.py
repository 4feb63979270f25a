"""`stageline plan`: the fastest way to train a model within the memory of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from stageline.cli.models import Length, ModelName, Repeats, Samples, Threads, load_with_inputs
from stageline.cli.options import DrawingOptions, complete_family_list, expand, output_option
from stageline.cli.output import console, print_chart, print_json, progress, save
from stageline.common.errors import StagelineError
from stageline.timeline import draw


def complete_schedules(incomplete: str) -> list[str]:
    """Complete --schedule.

    >>> complete_schedules("a"), complete_schedules("zb-v,1")
    (['auto'], ['zb-v,1f1b'])
    """
    words = [word for word in ("auto", "synthesized") if word.startswith(incomplete)]
    return words + complete_family_list(incomplete)


@dataclass(frozen=True)
class SearchOptions:
    """The options of the search, under the names of the arguments of `plan`."""

    batch: Annotated[
        int | None,
        Option("-b", "--batch", metavar="N", help="Samples per step; the number of microbatches is then chosen."),
    ] = None
    microbatches: Annotated[
        int | None,
        Option("-m", "--microbatches", metavar="N", help="Microbatches per step, each as large as the inputs."),
    ] = None
    cores: Annotated[
        float | None,
        Option(
            metavar="N", help="Number of cores that the ranks share; each rank uses as many threads as the profile did."
        ),
    ] = None
    mesh: Annotated[
        str | None,
        Option(metavar="NAME=N,…", help="Sizes of a mesh, such as pp=4,dp_shard=2,tp=2; --memory is per process."),
    ] = None
    devices: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Number of processes; the mesh is then chosen, and --batch and -m count all pipelines together.",
        ),
    ] = None
    tp: Annotated[
        str | None, Option(metavar="N,…", help="With --devices, tensor-parallel sizes to try, such as 1,2,4.")
    ] = None
    speed: Annotated[
        str | None,
        Option(metavar="X[,…]", help="Speed of each rank relative to the profile: 0.5 takes twice as long."),
    ] = None
    reshard_after_forward: Annotated[
        str, Option(metavar="WHEN", help="When gathered shards are freed: default, always or never.")
    ] = "default"
    shard_optimizer: Annotated[
        bool,
        Option(
            "--shard-optimizer",
            help="Divide the optimizer state among the dp_replicate processes of the mesh (ZeRO-1).",
        ),
    ] = False
    memory: Annotated[
        str | None, Option(metavar="SIZE[,…]", help="Memory limit of a rank, such as 24GiB, or one per rank.")
    ] = None
    recompute: Annotated[
        str, Option(metavar="WHAT", help="auto, none, stage, or names of units separated by commas.")
    ] = "auto"
    schedule: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="auto, or families separated by commas, or synthesized.",
            autocompletion=complete_schedules,
        ),
    ] = "auto"
    chunks: Annotated[int | None, Option(min=1, metavar="N", help="Stages per rank.")] = None
    transfer: Annotated[
        str,
        Option(
            metavar="S|NAME=S,…|FILE", help="Latency of a message in seconds, in any form that --bandwidth accepts."
        ),
    ] = "0"
    bandwidth: Annotated[
        str | None,
        Option(
            metavar="SIZE|NAME=SIZE,…|FILE",
            help="Bytes per second between two ranks, such as 10G; or by dimension, such as pp=50G,tp=300G; or a .json "
            "or .csv file with one row per rank.",
        ),
    ] = None
    optimizer_bytes_per_parameter: Annotated[
        float,
        Option("--optimizer-bytes", min=0, metavar="X", help="Optimizer state per parameter in bytes; AdamW needs 8."),
    ] = 8.0
    interlock: Annotated[
        bool, Option("--interlock", help="Include the memory that continuous steps need to undo a step.")
    ] = False
    time_limit: Annotated[float, Option(metavar="S", help="Approximate seconds to search.")] = 5.0
    repeats: Repeats = 3


@expand
def command(
    model: ModelName,
    search: SearchOptions,
    ranks: Annotated[
        str | None,
        Option(
            "-p", "--ranks", metavar="N", help="Pipeline ranks, or auto with --cores. Alternatives: --mesh, --devices."
        ),
    ] = None,
    threads: Threads = None,
    rows: Annotated[int, output_option(min=1, metavar="N", help="Number of alternatives to list.")] = 12,
    output: Annotated[
        Path | None, output_option("-o", "--output", metavar="FILE", help="Write the plan as JSON.")
    ] = None,
    samples: Samples = 2,
    length: Length = 64,
    *,
    drawing: DrawingOptions,
) -> None:
    """Find the fastest way to train a model: stages, microbatches, recomputation and schedule, within a memory limit.

    MODEL may also be a profile that stageline profile --output wrote on any machine; --samples is then the number of
    samples with which it was measured.

    Examples:
      stageline plan config.json -p 4 --batch 32 --samples 8 --memory 24GiB
      stageline plan profile.json -p 64 --batch 256 --samples 4 --bandwidth 50G
      stageline plan profile.json --mesh pp=4,dp_shard=2 -m 8 --bandwidth pp=50G,dp_shard=25G
      stageline plan config.json --devices 64 --batch 512 --memory 80GiB --bandwidth matrix.csv
    """
    subject = _subject(model, samples, length, threads, has_batch=search.batch is not None)
    from stageline.planning.planner import plan

    arguments = vars(search) | {"schedule": search.schedule.split(",") if "," in search.schedule else search.schedule}
    arguments["mesh"] = (
        None
        if search.mesh is None
        else {name: _number(size) for name, size in _by_name("--mesh", search.mesh, "pp=4,dp_shard=2").items()}
    )
    arguments["tp"] = None if search.tp is None else [_number(size) for size in search.tp.split(",")]
    arguments["speed"] = None if search.speed is None else _speeds(search.speed)
    for name in ("transfer", "bandwidth"):
        text = getattr(search, name)
        if text is not None and "=" in text:
            arguments[name] = _by_name(
                f"--{name}", text, "pp=50G,tp=300G" if name == "bandwidth" else "pp=1e-5,tp=1e-6"
            )
    if search.recompute not in ("auto", "none", "stage"):
        arguments["recompute"] = tuple(search.recompute.split(","))
    with progress("profiling the model …") as update:
        best = plan(**subject, **arguments, ranks=_number(ranks), progress=update)
    if output is not None:
        best.write(output)
        typer.echo(f"wrote the plan to {output}", err=True)
    save(drawing.svg, lambda: draw.svg(best.timeline), "the drawing")
    save(drawing.html, best.html, "the page")
    if drawing.json:
        print_json(best.to_json())
        return
    out = console(drawing.width)
    if best.ranks <= 32 and best.microbatches <= 256:
        print_chart(out, best.timeline, title=False)
        out.print()
    out.print(best.explain(rows), markup=False)


def _number(text: str | None) -> Any:
    """Return a whole number if the text is one, for `plan` to check."""
    return int(text) if text is not None and text.isdecimal() else text


def _by_name(flag: str, text: str, example: str) -> dict[str, str]:
    """Return values by dimension of the mesh.

    >>> _by_name("--mesh", "pp=4,dp_shard=2", "pp=4")
    {'pp': '4', 'dp_shard': '2'}
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in values:
            raise StagelineError(f"{flag} must name each dimension once with its value, as in {example}; got {text!r}")
        values[name] = value
    return values


def _speeds(text: str) -> float | list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise StagelineError(f"--speed takes a number, or one per rank like 1,1,0.5; got {text!r}") from None
    return values[0] if len(values) == 1 else values


def _subject(model: str, samples: int, length: int, threads: int | None, has_batch: bool) -> dict[str, Any]:
    """Return the arguments of `plan` for a profile, or for a model and its inputs."""
    path = Path(model)
    if path.suffix == ".json" and path.is_file() and "stageline-profile" in path.read_text("utf-8", "replace")[:200]:
        from stageline.model.profile import read_profile

        return {"profile": read_profile(path), "samples": samples if has_batch else None}
    loaded = load_with_inputs(model, samples, length, threads, traceback=False)
    return {"model": loaded.model, "example": loaded.inputs}

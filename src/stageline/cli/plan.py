"""`stageline plan`: the fastest way to train a model on so many ranks that fits their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageline.cli.models import Length, Model, Samples, find_model
from stageline.cli.options import Html, Json, Svg, Width
from stageline.cli.output import console, print_json, print_segments, save
from stageline.common.errors import StagelineError
from stageline.timeline import draw
from stageline.timeline.draw.terminal import chart, legend

if TYPE_CHECKING:
    from stageline.planning.plan import Plan


def command(
    model: Model,
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="How many ranks.")],
    batch: Annotated[
        int | None, typer.Option("-b", "--batch", help="Samples of a step; the number of microbatches is chosen.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Microbatches of a step, each as large as the inputs.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE[,…]", help="What a rank may hold, like 24GiB, or one per rank."),
    ] = None,
    recompute: Annotated[
        str, typer.Option("--recompute", help="auto, none, stage, or names of units with commas between.")
    ] = "auto",
    schedule: Annotated[
        str, typer.Option("--schedule", help="auto, or families with commas between; synthesized is one of them.")
    ] = "auto",
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Stages that a rank holds.")] = None,
    transfer: Annotated[float, typer.Option("--transfer", min=0, help="Seconds of a message between two ranks.")] = 0.0,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="Bytes a second between two ranks, like 10G.")
    ] = None,
    optimizer: Annotated[
        float, typer.Option("--optimizer-bytes", min=0, help="Of the optimizer's state for one parameter: AdamW has 8.")
    ] = 8.0,
    interlock: Annotated[
        bool, typer.Option("--interlock", help="Count what interlocking steps keep to take one back, too.")
    ] = False,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds to search, about.")] = 5.0,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements; their median counts.")] = 3,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of torch, as in your job.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Alternatives to show.")] = 12,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Keep the plan as JSON.")
    ] = None,
    samples: Samples = 2,
    length: Length = 64,
    svg: Svg = None,
    html: Html = None,
    width: Width = None,
    json: Json = False,
) -> None:
    """Find the fastest way to train a model: its cut, microbatches, recomputation and schedule, within the memory.

    MODEL may also be a profile, as `stageline profile --output` writes it, of whatever machine; --samples then says how
    many samples it was measured with.

    \b
    stageline plan config.json -p 4 --batch 32 --samples 8 --memory 24GiB -o plan.json
    stageline plan profile.json -p 64 --batch 256 --samples 4 --memory 80GiB --bandwidth 50G --transfer 1e-5
    """
    given = _given(model, samples, length, threads, several=batch is not None)
    from stageline.planning.plan import plan

    names: Any = schedule.split(",") if "," in schedule else schedule
    again: Any = recompute if recompute in ("auto", "none", "stage") else tuple(recompute.split(","))
    with _progress() as tell:
        found = plan(
            **given,
            ranks=ranks,
            batch=batch,
            microbatches=microbatches,
            memory=memory,
            recompute=again,
            schedule=names,
            chunks=chunks,
            transfer=transfer,
            bandwidth=bandwidth,
            optimizer_bytes_per_parameter=optimizer,
            interlock=interlock,
            time_limit=time_limit,
            repeats=repeats,
            progress=tell,
        )
    if output is not None:
        found.write(output)
        typer.echo(f"wrote the plan to {output}", err=True)
    save(svg, draw.svg(found.timeline) if svg else "", "the picture")
    save(html, draw.html(found.timeline) if html else "", "the page")
    if json:
        print_json(found.to_json())
        return
    _print(found, width, rows)


def _given(model: str, samples: int, length: int, threads: int | None, several: bool) -> dict[str, Any]:
    """A profile, or a model and what it is run on."""
    path = Path(model)
    if path.suffix == ".json" and path.is_file() and "stageline-profile" in path.read_text("utf-8", "replace")[:200]:
        from stageline.model.profile.profile import read_profile

        return {"profile": read_profile(path), "samples": samples if several else None}
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    named = find_model(model, samples, length)
    if named.inputs is None:
        raise StagelineError(f"{model} gives no inputs; let it return (model, inputs)")
    return {"model": named.model, "example": named.inputs}


def _print(found: Plan, width: int | None, rows: int) -> None:
    out = console(width)
    if found.ranks <= 32 and found.microbatches <= 256:
        print_segments(out, chart(found.timeline, out.width))
        out.print()
        print_segments(out, legend([found.timeline], out.width))
        out.print()
    out.print(found.explain(rows), markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """A line that says where the search stands, on a terminal."""
    from rich.console import Console

    out = Console(stderr=True, highlight=False)
    if not out.is_terminal:
        yield None
        return
    with out.status("looking at the model …") as status:
        yield lambda text: status.update(text)

"""`stageline checkpoint`: verify, list and convert what a training job saved."""

from __future__ import annotations

import datetime
import json as plain_json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageline.cli.options import Json
from stageline.cli.output import console, print_json
from stageline.common.errors import StagelineError, shorten
from stageline.common.units import format_size, parse_size

if TYPE_CHECKING:
    from stageline.train.checkpoint import Checkpoint, Damage

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Where = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A checkpoint (step-00000100), or a folder of them.", show_default=False),
]


class Format(StrEnum):
    """What a model is converted into."""

    stageline = "stageline"
    safetensors = "safetensors"


@app.callback()
def root() -> None:
    """Checkpoints of a training job: verify, list and convert them.

    \b
    stageline checkpoint list outputs/checkpoint
    """


@app.command("verify")
def verify(
    path: Where,
    sizes: Annotated[bool, typer.Option("--sizes", help="Look at presence and sizes alone; no checksums.")] = False,
    json: Json = False,
) -> None:
    """Compare every byte of checkpoints with their checksums, and name each file that is damaged.

    Exit code 0: all whole. 1: one or more damaged. 2: there is no checkpoint.

    \b
    stageline checkpoint verify outputs/checkpoint
    stageline checkpoint verify outputs/checkpoint/step-00000100 --json
    """
    from stageline.train.checkpoint.reader import inspect

    rows: list[dict[str, Any]] = []
    out = console()
    for each in _checkpoints(path):
        found, damages = inspect(each, deep=not sizes)
        rows.append({"path": str(each), "whole": not damages, "damages": [damage.to_json() for damage in damages]})
        if found is not None:
            rows[-1] |= {"step": found.step, "files": len(found.manifest.files), "bytes": found.manifest.size}
            found.close()
        if not json:
            for line in map(str, damages) if damages else [_whole(found, each)]:
                out.print(_plain(line), markup=False)
    damaged = sum(not row["whole"] for row in rows)
    if json:
        print_json({"whole": not damaged, "checkpoints": rows})
    elif len(rows) > 1:
        out.print(f"{len(rows) - damaged} of {len(rows)} checkpoints are whole", markup=False)
    raise typer.Exit(1 if damaged else 0)


@app.command("list")
def list_(path: Where, json: Json = False) -> None:
    """List checkpoints: step, size, when, model, writers, and whether all files are there in their sizes.

    \b
    stageline checkpoint list outputs/checkpoint
    """
    from rich.table import Table
    from rich.text import Text

    from stageline.train.checkpoint.reader import inspect

    rows: list[dict[str, Any]] = []
    for each in _checkpoints(path):
        found, damages = inspect(each, deep=False)
        rows.append({"path": str(each), "whole": not damages, "damage": [str(damage) for damage in damages]})
        if found is not None:
            manifest = found.manifest
            rows[-1] |= {
                "step": found.step,
                "bytes": manifest.size,
                "written": manifest.written,
                "model": _model(found),
                "parameters": manifest.parameters,
                "writers": manifest.world.get("writers"),
                "world": dict(manifest.world),
            }
            found.close()
    if json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("checkpoint", "size", "written", "model", "parameters", "writers", "whole (by sizes)"):
        table.add_column(column, justify="right" if column in ("size", "parameters", "writers") else "left")
    for row in rows:
        cells = [Path(row["path"]).name, "", "", "", "", "", "yes" if row["whole"] else "no"]
        if "step" in row:
            when = datetime.datetime.fromtimestamp(row["written"]).strftime("%Y-%m-%d %H:%M:%S")
            cells[1:6] = [format_size(row["bytes"]), when, row["model"], f"{row['parameters']:,}", str(row["writers"])]
        table.add_row(*(Text(_plain(cell)) for cell in cells))
    out = console()
    out.print(table)
    for line in [line for row in rows for line in row["damage"]]:
        out.print(_plain(line), markup=False)


@app.command("convert")
def convert(
    path: Where,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, or a new .safetensors file.", show_default=False)
    ],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="What floating point becomes: float32, bfloat16, float16, float64.")
    ] = None,
    format: Annotated[
        Format, typer.Option("--format", help="safetensors, for every tool; stageline, with checksums, too.")
    ] = Format.safetensors,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Where files are cut: 4GB, 500MB, 1GiB.")
    ] = "4GB",
) -> None:
    """Write the model alone, without the optimizer, for from_pretrained and sl.load_weights.

    Of a folder of checkpoints, the newest whole one is taken. Nothing is overwritten.

    \b
    stageline checkpoint convert outputs/checkpoint model --dtype bfloat16
    stageline checkpoint convert checkpoint/step-00000100 model.safetensors
    """
    from stageline.train.checkpoint.convert import convert as write

    max_bytes = int(parse_size(max_shard_size, "--max-shard-size"))
    if max_bytes < 1:
        raise StagelineError(f"--max-shard-size must be at least 1 byte, got {shorten(max_shard_size)}")
    with _whole_one(path) as found:
        made = write(found, out, dtype=dtype, format=format.value, max_shard_bytes=max_bytes)
        typer.echo(f"wrote the model of {found.path} to {made}")


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a folder."""
    from stageline.train.checkpoint import CheckpointError, published
    from stageline.train.checkpoint.folder import step_of
    from stageline.train.checkpoint.manifest import MANIFEST

    if step_of(path.absolute().name) is not None or (path / MANIFEST).exists():
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is no checkpoint: {'it is a file' if path.exists() else 'it does not exist'}"
            )
        return [path]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint, or a folder of them")
    found = published(path)
    if not found:
        raise CheckpointError(f"{path} has no checkpoints: no folder in it is called like step-00000100")
    return found


def _whole_one(path: Path) -> Checkpoint:
    from stageline.train.checkpoint import CheckpointError, newest
    from stageline.train.checkpoint.reader import inspect

    if _checkpoints(path) != [path]:
        whole = newest(path, on_damage=_warn)
        assert whole is not None  # or there would be no checkpoints
        return whole
    found, damages = inspect(path)
    if found is None or damages:
        raise CheckpointError(f"{damages[0]}; see stageline checkpoint verify {path}")
    return found


def _warn(damage: Damage) -> None:
    typer.echo(_plain(f"damaged: {damage}"), err=True)


def _whole(found: Checkpoint | None, path: Path) -> str:
    assert found is not None
    return f"{path}: whole, step {found.step}, {len(found.manifest.files)} files, {format_size(found.manifest.size)}"


def _model(found: Checkpoint) -> str:
    """What config.json calls the model, if there is one."""
    try:
        data = plain_json.loads(found.read_asset("config.json"))
    except (StagelineError, ValueError, RecursionError):
        return ""
    if not isinstance(data, dict):
        return ""
    names = data.get("architectures")
    return str(names[0] if isinstance(names, list) and names else data.get("model_type", ""))[:40]


def _plain(text: str) -> str:
    """What came from a file must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)

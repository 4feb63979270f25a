"""`stageline checkpoint`: verify, list and convert the checkpoints of a training job."""

from __future__ import annotations

import datetime
import json as plain_json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from stageline.cli.options import Json
from stageline.cli.output import console, print_json, printable, table
from stageline.common.errors import StagelineError, shorten
from stageline.common.units import format_size, parse_size
from stageline.train.run_folder import checkpoints_of

if TYPE_CHECKING:
    from stageline.train.checkpoint import Checkpoint, Damage
    from stageline.train.checkpoint.remote import Location

CheckpointPath = Annotated[
    str,
    Argument(
        metavar="PATH",
        help="A checkpoint (step-00000100), a folder of them, or the folder of a run; also a URL like s3://…",
        show_default=False,
    ),
]


class Format(StrEnum):
    """Format of a converted model."""

    auto = "auto"
    huggingface = "huggingface"
    safetensors = "safetensors"
    stageline = "stageline"
    dcp = "dcp"


def root() -> None:
    """Verify, list and convert the checkpoints of a training job.

    Examples:
      stageline checkpoint list outputs
      stageline checkpoint convert outputs model
    """


def verify(
    path: CheckpointPath,
    sizes: Annotated[bool, Option("--sizes", help="Check only existence and sizes, not checksums.")] = False,
    json: Json = False,
) -> None:
    """Verify every byte of checkpoints against their checksums, and name damaged files.

    The exit code is 0 if all are intact, 1 if one is damaged, and 2 if there is no checkpoint.

    Examples:
      stageline checkpoint verify outputs
      stageline checkpoint verify outputs/checkpoint/step-00000100 --json
    """
    from stageline.train.checkpoint.reader import inspect

    rows: list[dict[str, Any]] = []
    out = console()
    for folder in _checkpoint_folders(path):
        checkpoint, damages = inspect(folder, deep=not sizes)
        rows.append({"path": str(folder), "whole": not damages, "damages": [damage.to_json() for damage in damages]})
        lines = [str(damage) for damage in damages]
        if checkpoint is not None:
            manifest = checkpoint.manifest
            rows[-1] |= {"step": checkpoint.step, "files": len(manifest.files), "bytes": manifest.size}
            checkpoint.close()
            size = format_size(manifest.size)
            lines = lines or [f"{folder}: intact, step {checkpoint.step}, {len(manifest.files)} files, {size}"]
        for line in lines if not json else ():
            out.print(printable(line), markup=False)
    damaged = sum(not row["whole"] for row in rows)
    if json:
        print_json({"whole": not damaged, "checkpoints": rows})
    elif len(rows) > 1:
        out.print(f"{len(rows) - damaged} of {len(rows)} checkpoints are intact", markup=False)
    raise typer.Exit(1 if damaged else 0)


def list_(path: CheckpointPath, json: Json = False) -> None:
    """List checkpoints: step, size, time, model, writers, and whether all files exist with the right sizes.

    Examples:
      stageline checkpoint list outputs
      stageline checkpoint list s3://bucket/run
    """
    from rich.text import Text

    from stageline.train.checkpoint.reader import inspect

    rows: list[dict[str, Any]] = []
    for folder in _checkpoint_folders(path):
        checkpoint, damages = inspect(folder, deep=False)
        rows.append({"path": str(folder), "whole": not damages, "damage": [str(damage) for damage in damages]})
        if checkpoint is not None:
            manifest = checkpoint.manifest
            rows[-1] |= {
                "step": checkpoint.step,
                "bytes": manifest.size,
                "written": manifest.written,
                "model": _model_name(checkpoint),
                "parameters": manifest.parameters,
                "writers": manifest.world.get("writers"),
                "world": dict(manifest.world),
            }
            checkpoint.close()
    if json:
        print_json(rows)
        return
    columns = ("checkpoint", "size", "written", "model", "parameters", "writers", "intact (by sizes)")
    grid = table(*columns, left=("checkpoint", "written", "model", "intact (by sizes)"))
    for row in rows:
        cells = [row["path"].rpartition("/")[2], "", "", "", "", "", "yes" if row["whole"] else "no"]
        if "step" in row:
            when = datetime.datetime.fromtimestamp(row["written"]).strftime("%Y-%m-%d %H:%M:%S")
            cells[1:6] = [format_size(row["bytes"]), when, row["model"], f"{row['parameters']:,}", str(row["writers"])]
        grid.add_row(*(Text(printable(cell)) for cell in cells))
    out = console()
    out.print(grid)
    for line in [line for row in rows for line in row["damage"]]:
        out.print(printable(line), markup=False)


def convert(
    path: Annotated[
        str,
        Argument(
            metavar="PATH",
            help="A checkpoint (step-00000100), a folder of them, the folder of a run, or a checkpoint of "
            "torch.distributed.checkpoint.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="A new folder, or a new .safetensors file.", show_default=False)],
    dtype: Annotated[
        str | None,
        Option(
            "--dtype", metavar="DTYPE", help="Convert floating-point tensors to float32, bfloat16, float16 or float64."
        ),
    ] = None,
    format: Annotated[
        Format,
        Option(
            "--format",
            metavar="FORMAT",
            help="huggingface, for from_pretrained; safetensors, with the names of the parameters; stageline, which "
            "adds checksums; dcp, for torch.distributed.checkpoint; or auto: huggingface if possible, otherwise "
            "safetensors.",
        ),
    ] = Format.auto,
    max_shard_size: Annotated[
        str, Option(metavar="SIZE", help="Maximum size of a file, such as 4GiB or 500MiB.")
    ] = "4GiB",
    trust_pickle: Annotated[
        bool,
        Option(
            "--trust-pickle", help="Read the pickled metadata of a DCP checkpoint, which can execute arbitrary code."
        ),
    ] = False,
) -> None:
    """Export the weights, without the optimizer, for from_pretrained, sl.load_weights or torch.distributed.checkpoint.

    If PATH contains several checkpoints, the newest intact one is used. Existing files are never overwritten. The
    built-in GPT is written as a transformers GPT-2; for a model with a LoRA adapter, only the adapter is written, for
    peft.

    Examples:
      stageline checkpoint convert outputs model --dtype bfloat16
      stageline checkpoint convert outputs/checkpoint/step-00000100 model.safetensors
      stageline checkpoint convert outputs model --format dcp
      stageline checkpoint convert torchtitan/step-1000 model --trust-pickle
    """
    from stageline.train.checkpoint.convert import convert as write

    max_bytes = int(parse_size(max_shard_size, "--max-shard-size"))
    if max_bytes < 1:
        raise StagelineError(f"--max-shard-size must be at least 1 byte, got {shorten(max_shard_size)}")
    if (Path(path) / ".metadata").is_file():
        from stageline.train.checkpoint.dcp import dcp_model

        tensors = dcp_model(path, trust_pickle=trust_pickle)
        written = write(tensors, out, dtype=dtype, format=format.value, max_shard_bytes=max_bytes)
        typer.echo(f"wrote the model of {path} to {written}")
        return
    with _intact_checkpoint(path) as checkpoint:
        written = write(checkpoint, out, dtype=dtype, format=format.value, max_shard_bytes=max_bytes)
        typer.echo(f"wrote the model of {checkpoint.path} to {written}")


VERBS: dict[str, Callable[..., None]] = {"verify": verify, "list": list_, "convert": convert}


def _checkpoint_folders(text: str) -> list[Location]:
    """Return the checkpoint itself, or those in a folder."""
    from stageline.train.checkpoint import CheckpointError, published
    from stageline.train.checkpoint.folder import step_of
    from stageline.train.checkpoint.manifest import MANIFEST

    path = checkpoints_of(text)
    name = path.absolute().name if isinstance(path, Path) else path.name
    if step_of(name) is not None or (path / MANIFEST).exists():
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a checkpoint: it {'is a file' if path.exists() else 'does not exist'}"
            )
        return [path]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint, or a folder of them")
    folders = published(path)
    if not folders:
        raise CheckpointError(
            f"{path} has no checkpoints: it contains neither folders with names like step-00000100 nor the config.toml "
            "of a run"
        )
    return folders


def _intact_checkpoint(text: str) -> Checkpoint:
    """Return the checkpoint, or the newest one of a folder, if the files of the model are intact."""
    from stageline.train.checkpoint import CheckpointError, newest
    from stageline.train.checkpoint.reader import inspect

    path = checkpoints_of(text)
    if _checkpoint_folders(text) != [path]:
        intact = newest(path, on_damage=_warn, weights_only=True)
        assert intact is not None  # there is a checkpoint, and `newest` raises if all are damaged
        return intact
    checkpoint, damages = inspect(path, weights_only=True)
    if checkpoint is None or damages:
        raise CheckpointError(f"{damages[0]}; see stageline checkpoint verify {path}")
    return checkpoint


def _warn(damage: Damage) -> None:
    typer.echo(printable(f"damaged: {damage}"), err=True)


def _model_name(checkpoint: Checkpoint) -> str:
    """Return the name of the model in config.json, if there is one."""
    try:
        data = plain_json.loads(checkpoint.read_asset("config.json"))
    except (StagelineError, ValueError, RecursionError):
        state = checkpoint.state
        config = state.get("config") if isinstance(state, dict) else None
        model = config.get("model") if isinstance(config, dict) else None
        return str(model.get("name", ""))[:40] if isinstance(model, dict) else ""
    if not isinstance(data, dict):
        return ""
    names = data.get("architectures")
    return str(names[0] if isinstance(names, list) and names else data.get("model_type", ""))[:40]

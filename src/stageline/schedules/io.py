"""Schedules on disk: our JSON, and torch's CSV, which torchtitan reads too. See `docs/formats.md`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stageline.common.errors import ScheduleError, shorten
from stageline.common.files import write_text
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule

_MOVES = re.compile(r"[0-9]{0,12}(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,12}")
"""What torch does beside computing: messages between stages, and the parameters of sharded data parallelism."""

FORMAT = "stageline-schedule"
VERSION = 1
LARGEST_FILE = 512 * 2**20
"""No schedule file is larger: the ten million actions of a thousand ranks take a fifth of it."""


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as JSON or CSV, by the ending of the name; an existing file is replaced only when done."""
    target = Path(path)
    ending = target.suffix.lower()
    if ending == ".json":
        text: Iterator[str] = schedule_lines(schedule)
    elif ending == ".csv":
        if schedule.placement.directions > 1:
            raise ScheduleError(
                f"{schedule.name} has no CSV form: it holds every stage on two ranks, one for each direction, and "
                "torch's CSV has one rank per stage; write .json instead",
                rule="format",
            )
        for rank, program in enumerate(schedule.programs):
            if not len(program):
                raise ScheduleError(
                    f"rank {rank} runs nothing, and torch's CSV cannot say so; write .json instead", rule="format"
                )
        text = (",".join(map(str, program)) + "\n" for program in schedule.programs)
    else:
        raise ScheduleError(f"cannot tell the format of {target.name!r}: end the name in .json or .csv", rule="format")
    write_text(target, text, format_error)


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from JSON or from torch's CSV, by the ending of the name.

    Of a CSV with communication (torch's `compute_comms`), the computation is read: what is sent, received, gathered and
    reduced follows from it here. The file is parsed and not judged: `stageline.verify` does that.
    """
    source = Path(path)
    ending = source.suffix.lower()
    if ending not in (".json", ".csv"):
        raise ScheduleError(
            f"cannot tell the format of {source.name!r}: the name must end in .json or .csv", rule="format"
        )
    text = read_text(source, "schedule")
    try:
        return schedule_from(parse_json(text)) if ending == ".json" else _from_csv(text, source.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}", rule=error.rule, rank=error.rank, position=error.position) from None


def read_text(source: Path, what: str) -> str:
    """Read a file, or say why it cannot be one."""
    try:
        if source.stat().st_size > LARGEST_FILE:
            raise ScheduleError(
                f"{source} is larger than {LARGEST_FILE // 2**20} MiB: that is no {what}", rule="format"
            )
        return source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"cannot read {source}: {error.strerror or error}", rule="format") from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{source} is not text: byte {error.start} is no UTF-8", rule="format") from None


def schedule_lines(schedule: Schedule) -> Iterator[str]:
    """Write a schedule as JSON, one line per rank, so that two schedules can be compared with diff."""
    placement = schedule.placement
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "options": dict(schedule.options),
        "training": schedule.training,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "placement": placement.table.tolist(),
        "direction": None if placement.directions == 1 else placement.direction.tolist(),
    }
    yield "{\n"
    for key, value in head.items():
        yield f"  {json.dumps(key)}: {json.dumps(value)},\n"
    yield '  "programs": [\n'
    for rank, program in enumerate(schedule.programs):
        comma = "," if rank < schedule.ranks - 1 else ""
        yield f"    {json.dumps([str(entry) for entry in program])}{comma}\n"
    yield "  ]\n}\n"


def format_error(message: str) -> ScheduleError:
    """An error about a file."""
    return ScheduleError(message, rule="format")


def _from_csv(text: str, name: str) -> Schedule:
    """One row per rank; empty cells are torch's idle steps and carry nothing, nor do cells of communication."""
    try:
        rows = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"not a CSV file: {error}", rule="format") from None
    programs = [[entry for cell in row if (entry := _computation(cell.strip()))] for row in rows]
    while programs and not programs[-1]:
        programs.pop()
    return Schedule.from_programs(programs, name=name if name.isprintable() else "custom")


def _computation(cell: str) -> str:
    """What a cell of torch's CSV computes; nothing where it only moves tensors or shards of parameters.

    >>> [_computation(cell) for cell in ("0F1", "0SEND_F1", "1UNSHARD", "", "(0F4;3B1)OVERLAP_F_B")]
    ['0F1', '', '', '', '(0F4;3B1)OVERLAP_F_B']
    """
    if cell.startswith("(") and cell.endswith(")OVERLAP_F_B"):
        inside = cell[1 : -len(")OVERLAP_F_B")].split(";")
        parts = [part.strip() for part in inside if not _MOVES.fullmatch(part.strip())]
        # A pair of which one half only moves something is the other half alone.
        return cell if len(parts) == len(inside) else ";".join(parts)
    return "" if _MOVES.fullmatch(cell) else cell


def parse_json(text: str) -> object:
    """Parse JSON, and nothing that only looks like it."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        raise ScheduleError(f"not JSON: {shorten(str(error), 100)}", rule="format") from None


def check_format(data: object, name: str, version: int, what: str) -> Mapping[str, Any]:
    """Make sure that data say they are of this format, in the version that is known here."""
    if not isinstance(data, Mapping) or data.get("format") != name:
        raise ScheduleError(f"not a {what}: expected an object with 'format': {name!r}", rule="format")
    if data.get("version") is True or data.get("version") != version:
        raise ScheduleError(
            f"version {shorten(data.get('version'))} of the format is not known; this is version {version}",
            rule="format",
        )
    return data


def schedule_from(given: object) -> Schedule:
    """Make a schedule of parsed JSON."""
    data = check_format(given, FORMAT, VERSION, "schedule")
    programs = field(data, "programs", list)
    if not all(isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in programs):
        raise ScheduleError("'programs' must be one list of strings like '0F0' per rank", rule="format")
    ranks = field(data, "ranks", int)
    if ranks != len(programs):
        raise ScheduleError(f"'ranks' says {ranks} and 'programs' has {len(programs)}", rule="format")
    return Schedule.from_programs(
        programs,
        placement=_placement(data, ranks, sum(map(len, programs))),
        training=field(data, "training", bool),
        name=field(data, "name", str),
        options=field(data, "options", dict),
    )


def _placement(data: Mapping[str, Any], ranks: int, entries: int) -> Placement:
    stages, microbatches = field(data, "stages", int), field(data, "microbatches", int)
    for count, what in ((stages, "stages"), (microbatches, "microbatches")):
        if not 1 <= count <= 2 * entries:
            raise ScheduleError(f"'{what}' is {count}, and the programs have {entries} entries", rule="format")
    table = field(data, "placement", list)
    direction = data.get("direction")
    if direction is None:
        if len(table) > 1:
            raise ScheduleError(
                "'placement' has several directions, so 'direction' must give one per microbatch", rule="format"
            )
        direction = [0] * microbatches
    rows_fit = table and all(isinstance(row, list) and len(row) == stages for row in table)
    if not rows_fit or not all(_is_whole(rank, ranks) for row in table for rank in row):
        raise ScheduleError(
            f"'placement' must be one list per direction, each with a rank from 0 to {ranks - 1} for each of the "
            f"{stages} stages",
            rule="placement",
        )
    if not isinstance(direction, list) or len(direction) != microbatches:
        raise ScheduleError(
            f"'direction' must have one number for each of the {microbatches} microbatches", rule="format"
        )
    if not all(_is_whole(way, len(table)) for way in direction):
        raise ScheduleError(f"'direction' must hold numbers from 0 to {len(table) - 1}", rule="placement")
    return Placement.of(ranks, np.array(table), np.array(direction))


def _is_whole(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def field(data: Mapping[str, Any], name: str, kind: type) -> Any:
    """Take a field that must be there and of this kind."""
    if name not in data:
        raise ScheduleError(f"{name!r} is missing", rule="format")
    value = data[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ScheduleError(f"{name!r} must be {TYPES[kind]}, got {shorten(value)}", rule="format")
    return value


TYPES = {int: "a whole number", str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")

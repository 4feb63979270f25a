"""Schedule files: Stageline's JSON, and torch's CSV, which torchtitan also reads. See `docs/formats.md`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from stageline.common.checked_json import Range, check_format, field, json_lines, parse_json
from stageline.common.errors import JsonError, ScheduleError, StagelineError
from stageline.common.files import read_text, write_text
from stageline.schedules.action import parse_shard_action
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule

_COMMUNICATION = re.compile(r"[0-9]{0,12}(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,12}")
"""Actions of torch that compute nothing: messages between stages, and those of sharding that name no stage."""
FORMAT = "stageline-schedule"
VERSION = 1


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as JSON or CSV, depending on the file name. An existing file is replaced atomically."""
    target = Path(path)
    ending = target.suffix.lower()
    if ending == ".json":
        text: Iterator[str] = schedule_lines(schedule)
    elif ending == ".csv":
        text = csv_lines(schedule)
    else:
        raise ScheduleError(f"unknown format of {target.name!r}: the name must end in .json or .csv", rule="format")
    write_text(target, text, format_error)


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from JSON or from torch's CSV, depending on the file name.

    Messages in a CSV (torch's `compute_comms`) are ignored, as they follow from the computation; shard actions are
    kept. The schedule is not checked; use `stageline.verify`.
    """
    source = Path(path)
    ending = source.suffix.lower()
    if ending not in (".json", ".csv"):
        raise ScheduleError(f"unknown format of {source.name!r}: the name must end in .json or .csv", rule="format")
    text = read_text(source, "schedule", format_error)
    with naming(source):
        return schedule_from(parse_json(text)) if ending == ".json" else _from_csv(text, source.stem)


@contextmanager
def naming(source: Path) -> Iterator[None]:
    """Raise errors of the block as `ScheduleError` whose message starts with the name of the file."""
    try:
        yield
    except StagelineError as error:
        rule, rank, position = (getattr(error, name, None) for name in ("rule", "rank", "position"))
        raise ScheduleError(f"{source}: {error}", rule=rule or "format", rank=rank, position=position) from None


def schedule_lines(schedule: Schedule) -> Iterator[str]:
    """Yield a schedule as JSON, one line per rank, so that two schedules can be compared with diff."""
    placement = schedule.placement
    data = {
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
        "programs": ([str(entry) for entry in schedule.lowered_program(rank)] for rank in range(schedule.ranks)),
    }
    return json_lines(data, ("programs",))


def csv_lines(schedule: Schedule) -> Iterator[str]:
    """Return a schedule as torch's CSV, one line per rank; raise `ScheduleError` if that cannot express it."""
    if schedule.placement.directions > 1:
        raise ScheduleError(
            f"{schedule.name} cannot be written as CSV: every stage is on two ranks, one for each direction, and "
            "torch's CSV has one rank per stage; write .json instead",
            rule="format",
        )
    for rank, program in enumerate(schedule.programs):
        if not len(program):
            raise ScheduleError(
                f"rank {rank} runs nothing, which torch's CSV cannot express; write .json instead", rule="format"
            )
    return (",".join(map(str, schedule.lowered_program(rank))) + "\n" for rank in range(schedule.ranks))


def format_error(message: str) -> ScheduleError:
    """Return an error about a file."""
    return ScheduleError(message, rule="format")


def _from_csv(text: str, name: str) -> Schedule:
    """Parse torch's CSV: one row per rank; empty cells are idle steps."""
    try:
        rows = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"not a CSV file: {error}", rule="format") from None
    programs = [[entry for cell in row if (entry := _without_messages(cell.strip()))] for row in rows]
    if "REDUCE_GRAD" not in text:  # early versions of torch reduce in the last backward, and do not say so
        programs = [[entry for entry in program if parse_shard_action(entry) is None] for program in programs]
    while programs and not programs[-1]:
        programs.pop()
    return Schedule.from_programs(programs, name=name if name.isprintable() else "custom")


def _without_messages(cell: str) -> str:
    """Return what a cell of torch's CSV computes, gathers, frees or reduces; empty for messages.

    >>> [_without_messages(cell) for cell in ("0F1", "0SEND_F1", "1UNSHARD", "", "(0F4;3B1)OVERLAP_F_B")]
    ['0F1', '', '1UNSHARD', '', '(0F4;3B1)OVERLAP_F_B']
    """
    if cell.startswith("(") and cell.endswith(")OVERLAP_F_B"):
        inside = cell[1 : -len(")OVERLAP_F_B")].split(";")
        parts = [part.strip() for part in inside if not _COMMUNICATION.fullmatch(part.strip())]
        # If one half of a pair is communication, only the other half is left.
        return cell if len(parts) == len(inside) else ";".join(parts)
    if parse_shard_action(cell) is not None:
        return cell
    return "" if _COMMUNICATION.fullmatch(cell) else cell


def schedule_from(parsed: object) -> Schedule:
    """Build a schedule from parsed JSON; raise `JsonError` or `ScheduleError` if it is invalid."""
    data = check_format(parsed, FORMAT, VERSION, "schedule")
    programs = field(data, "programs", list[list[str]])
    ranks = field(data, "ranks", int)
    if ranks != len(programs):
        raise JsonError(f"'ranks' is {ranks}, but 'programs' has {len(programs)} lists")
    return Schedule.from_programs(
        programs,
        placement=_placement(data, ranks, sum(map(len, programs))),
        training=field(data, "training", bool),
        name=field(data, "name", str),
        options=field(data, "options", dict),
    )


def _placement(data: Mapping[str, Any], ranks: int, entries: int) -> Placement:
    stages, microbatches = field(data, "stages", int), field(data, "microbatches", int)
    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if not 1 <= count <= 2 * entries:
            raise JsonError(f"{name!r} is {count}, but the programs have {entries} entries")
    table = field(data, "placement", list[list[Annotated[int, Range(0, ranks - 1)]]])
    direction = field({"direction": None, **data}, "direction", list[Annotated[int, Range(0, len(table) - 1)]] | None)
    if not table or any(len(row) != stages for row in table):
        raise JsonError(f"'placement' must be one list per direction, with a rank for each of the {stages} stages")
    if direction is None and len(table) > 1:
        raise JsonError("'placement' has several directions, so 'direction' must have one number per microbatch")
    if direction is not None and len(direction) != microbatches:
        raise JsonError(f"'direction' must have one number for each of the {microbatches} microbatches")
    return Placement.of(ranks, np.array(table), np.array(direction or [0] * microbatches))

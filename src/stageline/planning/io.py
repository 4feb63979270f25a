"""Plans on disk: one JSON file with the schedule, the cut, the costs and what else was looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from stageline.common.errors import StagelineError, shorten
from stageline.common.files import write_text
from stageline.planning.memory import RankMemory
from stageline.planning.plan import Alternative, Plan
from stageline.schedules.io import check_format, format_error, parse_json, read_text, schedule_from, schedule_lines
from stageline.schedules.io import field as take
from stageline.schedules.verify import verify
from stageline.timeline.costs import LARGEST_SUM, Costs

FORMAT = "stageline-plan"
VERSION = 1


def to_json(plan: Plan) -> dict[str, Any]:
    """All of a plan as plain data, with its figures for whoever reads the file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": plan.schedule.name,
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
        "samples": plan.samples,
        "step_seconds": plan.step_seconds,
        "bubble": plan.bubble,
        "bound": plan.bound,
        "recompute": plan.recompute if isinstance(plan.recompute, str) else list(plan.recompute),
        "layers_per_stage": list(plan.layers_per_stage),
        "names": list(plan.names),
        "memory": [rank._asdict() for rank in plan.memory],
        "caps": None if plan.caps is None else list(plan.caps),
        "notes": list(plan.notes),
        "costs": plan.costs.to_json(),
        "alternatives": [asdict(each) for each in plan.alternatives],
        "schedule": json.loads("".join(schedule_lines(plan.schedule))),
    }


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write it; an existing file is replaced only when done."""
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise StagelineError(f"a plan is written as JSON: end the name in .json, not {target.name!r}")
    write_text(target, _lines(to_json(plan)), format_error)


def to_text(plan: Plan) -> str:
    """The JSON that `Plan.write` writes."""
    return "".join(_lines(to_json(plan)))


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    """A field on one line; a rank of memory, an alternative and a rank of the schedule on one each."""
    yield "{\n"
    for number, (key, value) in enumerate(data.items()):
        comma = "," if number < len(data) - 1 else ""
        if key in ("memory", "alternatives") and value:
            inner = ",\n    ".join(json.dumps(each) for each in value)
            yield f"  {json.dumps(key)}: [\n    {inner}\n  ]{comma}\n"
        else:
            yield f"  {json.dumps(key)}: {json.dumps(value)}{comma}\n"
    yield "}\n"


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.write` wrote.

    >>> import torch, stageline as sl
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> found = sl.plan(model, torch.ones(2, 4), ranks=2, microbatches=4, repeats=1, time_limit=0.5)
    >>> found.write("plan.json")
    >>> again = read_plan("plan.json")
    >>> again.schedule == found.schedule, again.step_seconds == found.step_seconds
    (True, True)
    """
    source = Path(path)
    return parse_plan(read_text(source, "plan"), str(source))


def parse_plan(text: str, source: str) -> Plan:
    """Read the JSON of a plan; errors name where it came from."""
    try:
        data = check_format(parse_json(text), FORMAT, VERSION, "plan")
        made = schedule_from(take(data, "schedule", dict))
        verify(made)
        counts = [_count("layers_per_stage", each) for each in take(data, "layers_per_stage", list)]
        if len(counts) != made.stages:
            raise StagelineError(f"'layers_per_stage' has {len(counts)} numbers, and the schedule {made.stages} stages")
        names = take(data, "names", list)
        if not all(isinstance(name, str) for name in names) or (names and len(names) != sum(counts)):
            raise StagelineError(f"'names' must be the {sum(counts)} names of the units, got {shorten(names)}")
        memory = [_row(RankMemory, row, "memory") for row in take(data, "memory", list)]
        if len(memory) != made.ranks:
            raise StagelineError(f"'memory' has {len(memory)} rows, and the schedule {made.ranks} ranks")
        caps, bound = data.get("caps"), data.get("bound")
        costs = Costs.from_json(take(data, "costs", dict))
        costs.check_lengths(made.stages, made.microbatches)
        return Plan(
            schedule=made,
            layers_per_stage=tuple(counts),
            recompute=_again(data.get("recompute")),
            costs=costs,
            memory=tuple(RankMemory(**row) for row in memory),
            caps=None if caps is None else tuple(_numbers("caps", caps, made.ranks)),
            bound=None if bound is None else _numbers("bound", [bound], 1)[0],
            alternatives=tuple(_alternative(row) for row in take(data, "alternatives", list)),
            samples=_count("samples", take(data, "samples", int)),
            names=tuple(names),
            notes=tuple(str(note) for note in take(data, "notes", list)),
        )
    except StagelineError as error:
        raise StagelineError(f"{source}: {error}") from None


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise StagelineError(f"{name!r} must be whole numbers from 1 upwards, got {shorten(value)}")
    return value


def _numbers(name: str, values: Any, count: int) -> list[float]:
    rows: list[Any] = values if isinstance(values, list) else [None]
    fine = all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= LARGEST_SUM for each in rows
    )
    if len(rows) != count or not fine:
        raise StagelineError(
            f"{name!r} must be {count} number{'s' * (count > 1)} from 0 upwards, got {shorten(values)}"
        )
    return [float(each) for each in rows]


def _row(kind: Any, row: Any, name: str) -> dict[str, float]:
    known, needed = set(kind._fields), [key for key in kind._fields if key not in kind._field_defaults]
    if not isinstance(row, Mapping) or not known >= set(row) >= set(needed):
        raise StagelineError(f"a row of {name!r} has {', '.join(needed)}, got {shorten(row)}")
    return {key: _numbers(key, [value], 1)[0] for key, value in row.items()}


def _again(value: Any) -> str | tuple[str, ...]:
    if value in ("none", "stage"):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise StagelineError(f'\'recompute\' must be "none", "stage" or a list of names of units, got {shorten(value)}')


def _alternative(row: Any) -> Alternative:
    known = [each.name for each in fields(Alternative)]
    if not isinstance(row, Mapping) or set(row) != set(known):
        raise StagelineError(f"an alternative has {', '.join(known)}, got {shorten(row)}")
    if not isinstance(row["schedule"], str) or not isinstance(row["fits"], bool) or not isinstance(row["rank"], int):
        raise StagelineError(f"an alternative has a schedule's name, a rank and whether it fits, got {shorten(row)}")
    counts = row["layers_per_stage"] if isinstance(row["layers_per_stage"], list) else [None]
    figures = {name: _numbers(name, [row[name]], 1)[0] for name in ("seconds", "bubble", "memory")}
    return Alternative(
        schedule=row["schedule"],
        chunks=_count("chunks", row["chunks"]),
        microbatches=_count("microbatches", row["microbatches"]),
        layers_per_stage=tuple(_count("layers_per_stage", each) for each in counts),
        recompute=_again(row["recompute"]),
        rank=row["rank"],
        fits=row["fits"],
        **figures,
    )

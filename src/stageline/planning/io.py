"""Plans on disk: one JSON file with the schedule, the cut, the costs and the alternatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from stageline.common.checked_json import NonNegative, PositiveInt, check_format, field, json_lines, parse_json
from stageline.common.errors import JsonError, StagelineError
from stageline.common.files import read_text, write_text
from stageline.planning.costs import RankMemory
from stageline.planning.mesh import read_mesh
from stageline.planning.plan import Alternative, Plan
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.verify import verify
from stageline.timeline.costs import Costs

FORMAT = "stageline-plan"
VERSION = 1
LONG_FIELDS = ("memory", "alternatives")
"""The fields with one line per element: one for each rank's memory, and for each alternative."""


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, with its figures for human readers."""
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
        "mesh": dict(plan.mesh),
        "reshard_after_forward": plan.reshard_after_forward,
        "costs": plan.costs.to_json(),
        "alternatives": [asdict(alternative) for alternative in plan.alternatives],
        "schedule": json.loads("".join(schedule_lines(plan.schedule))),
    }


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON. An existing file is replaced atomically."""
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise StagelineError(f"plans are written as JSON; the file name must end in .json, got {target.name!r}")
    write_text(target, json_lines(to_json(plan), LONG_FIELDS))


def to_text(plan: Plan) -> str:
    """Return the JSON that `Plan.write` writes."""
    return "".join(json_lines(to_json(plan), LONG_FIELDS))


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.write` wrote.

    >>> import torch, stageline as sl
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> best = sl.plan(model, torch.ones(2, 4), ranks=2, microbatches=4, repeats=1, time_limit=0.5)
    >>> best.write("plan.json")
    >>> copy = read_plan("plan.json")
    >>> copy.schedule == best.schedule, copy.step_seconds == best.step_seconds
    (True, True)
    """
    source = Path(path)
    return parse_plan(read_text(source, "plan"), str(source))


def parse_plan(text: str, source: str) -> Plan:
    """Parse the JSON of a plan; errors name `source`."""
    try:
        data = check_format(parse_json(text), FORMAT, VERSION, "plan")
        schedule = schedule_from(field(data, "schedule", dict))
        verify(schedule)
        costs = Costs.from_json(field(data, "costs", dict))
        costs.check_lengths(schedule.stages, schedule.microbatches)
        optional = {"caps": None, "bound": None, "mesh": {}, "reshard_after_forward": "default", **data}
        plan = Plan(
            schedule=schedule,
            layers_per_stage=field(data, "layers_per_stage", tuple[PositiveInt, ...]),
            recompute=field(data, "recompute", Literal["none", "stage"] | tuple[str, ...]),
            costs=costs,
            memory=field(data, "memory", tuple[RankMemory, ...]),
            caps=field(optional, "caps", tuple[NonNegative, ...] | None),
            bound=field(optional, "bound", NonNegative | None),
            alternatives=field(data, "alternatives", tuple[Alternative, ...]),
            samples=field(data, "samples", PositiveInt),
            names=field(data, "names", tuple[str, ...]),
            notes=field(data, "notes", tuple[str, ...]),
            mesh=field(optional, "mesh", dict[str, PositiveInt]),
            reshard_after_forward=field(optional, "reshard_after_forward", Literal["default", "always", "never"]),
        )
        if plan.recompute == ():
            raise JsonError('\'recompute\' must be "none", "stage" or a list of unit names, got an empty list')
        if plan.mesh:
            read_mesh(plan.mesh, schedule.ranks)
        _check_length("layers_per_stage", plan.layers_per_stage, schedule.stages, "stages")
        _check_length("memory", plan.memory, schedule.ranks, "ranks")
        if plan.names:
            _check_length("names", plan.names, sum(plan.layers_per_stage), "units")
        if plan.caps is not None:
            _check_length("caps", plan.caps, schedule.ranks, "ranks")
        return plan
    except StagelineError as error:
        raise StagelineError(f"{source}: {error}") from None


def _check_length(name: str, values: Sequence[object], expected: int, what: str) -> None:
    if len(values) != expected:
        raise JsonError(f"{name!r} must have one entry for each of the {expected} {what}, got {len(values)}")

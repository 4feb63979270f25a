"""Schedules of the page as files: SVG, JSON, CSV, a Perfetto trace, Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stageline.common.errors import StagelineError
from stageline.schedules.io import csv_lines, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.studio.schedules import SYNTHESIZED, PanelRequest, ScheduleRequest, timeline_of
from stageline.timeline import draw
from stageline.timeline.costs import Costs
from stageline.timeline.timeline import Timeline


class ExportedFile(NamedTuple):
    """A file to download."""

    name: str
    media_type: str
    text: str


FORMATS = {
    "svg": ("svg", "image/svg+xml"),
    "json": ("json", "application/json"),
    "csv": ("csv", "text/csv"),
    "perfetto": ("trace.json", "application/json"),
    "python": ("py", "text/x-python"),
}
"""For each format, the ending of the file and its media type."""


def export(
    request: ScheduleRequest,
    format_name: str,
    synthesized: Mapping[str, Schedule],
    searches: Mapping[str, Mapping[str, object]],
) -> ExportedFile:
    """Return the panels of a request as one file; only SVG and traces hold more than one.

    `searches` are the arguments of the searches that `synthesized` came from.

    >>> from stageline.studio.schedules import read_request
    >>> request = read_request({"ranks": 2, "microbatches": 2, "panels": [{"family": "1f1b"}]})
    >>> export(request, "csv", {}, {}).text
    '0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n'
    >>> print(export(request, "python", {}, {}).text)
    import stageline as sl
    <BLANKLINE>
    costs = sl.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=0.0, activation=1.0, residue=1.0)
    schedule = sl.schedule('1f1b', ranks=2, microbatches=2)
    timeline = sl.simulate(schedule, costs)
    print(timeline)
    <BLANKLINE>
    """
    if format_name not in FORMATS:
        raise StagelineError(f"no format is named {format_name!r}; there are: {', '.join(FORMATS)}")
    ending, media_type = FORMATS[format_name]
    timelines = [timeline_of(request, panel, synthesized) for panel in request.panels]
    if format_name not in ("svg", "perfetto") and len(timelines) != 1:
        raise StagelineError(f"a {format_name} file holds one schedule, got {len(timelines)}")
    names = dict.fromkeys(timeline.schedule.name for timeline in timelines)
    match format_name:
        case "svg":
            text = draw.svg(timelines)
        case "perfetto":
            text = draw.trace(timelines)
        case "json":
            text = "".join(schedule_lines(timelines[0].schedule))
        case "csv":
            text = "".join(csv_lines(timelines[0].schedule))
        case _:
            panel = request.panels[0]
            text = python_script(request, panel, timelines[0], searches)
    return ExportedFile(f"{'-'.join(names)}.{ending}", media_type, text)


def python_script(
    request: ScheduleRequest, panel: PanelRequest, timeline: Timeline, searches: Mapping[str, Mapping[str, object]]
) -> str:
    """Return a script that builds the same schedule and simulates it at the same costs."""
    schedule = timeline.schedule
    chunks = max(1, schedule.stages // request.ranks)
    costs = f"{_call('sl.Costs', _cost_arguments(request.costs.whole(request.ranks)))}"
    lines = ["import stageline as sl", "", f"costs = {costs}{f'.refined({chunks})' if chunks > 1 else ''}"]
    sizes = {"ranks": request.ranks, "microbatches": request.microbatches}
    if panel.family == SYNTHESIZED and panel.job not in searches:  # it came with the address
        lines += ["schedule = sl.read_schedule('synthesized.json')  # export it as JSON, too"]
    elif panel.family == SYNTHESIZED:
        lines += [f"schedule = {_call('sl.synthesize', {**sizes, **searches[panel.job]}, 'costs')}.schedule"]
    else:
        lines += [f"schedule = {_call('sl.schedule', {**sizes, **schedule.options}, repr(schedule.name))}"]
    return "\n".join([*lines, "timeline = sl.simulate(schedule, costs)", "print(timeline)", ""])


def _cost_arguments(costs: Costs) -> dict[str, object]:
    names = ("forward", "backward_input", "backward_weight", "transfer", "activation", "residue")
    return {name: getattr(costs, name) for name in names}


def _call(function: str, arguments: Mapping[str, object], first: str = "") -> str:
    listed = [first] if first else []
    return f"{function}({', '.join([*listed, *(f'{name}={value!r}' for name, value in arguments.items())])})"

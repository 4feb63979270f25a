"""Where the time of every rank went in the last measured step: bars, a table, and the two timelines."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stageline.common.units import format_size
from stageline.timeline import draw
from stageline.timeline.draw.palette import OWN_UNIT, shown_time, time_scale
from stageline.timeline.draw.terminal import shown_share
from stageline.timeline.explain import MEANINGS, Explanation, Parts, explain, slowest_transfers
from stageline.timeline.io import PLANNED
from stageline.timeline.timeline import Timeline
from stageline.train.report.run import Run
from stageline.train.run_folder import TIMELINES, timeline_file

MAX_RANKS, MAX_SLOW = 64, 5
MAX_TIMELINE_SIZE = 200_000
"""Maximum size, in characters, of the timelines embedded in the report."""


def attribution(run: Run) -> str:
    """Return where the time of each rank went, compared with the plan."""
    if run.measured is None:
        return '<p class="soft">There is no measured timeline yet; see metrics.timeline_freq.</p>'
    explanation = explain(run.planned, run.measured)
    scale, name = time_scale([explanation.planned, run.measured])
    unit = f" {name}" if name else ""
    longest = max(explanation.measured.makespan, explanation.planned.makespan) or 1.0
    rows = list(_rows(explanation))
    return "".join(
        [
            f"<p>{escape(_sentence(run, explanation, scale, unit))}</p>",
            f"<p>{escape(_shares(explanation))}</p>",
            '<div class="legend">',
            *(f'<span title="{MEANINGS[name]}"><i class="{name}"></i>{name}</span>' for name in Parts._fields),
            '</div><div class="bars">',
            *(_bar(name, parts, longest, scale, unit) for name, parts in rows),
            "</div>",
            _table(rows, scale, unit),
            _slow(explanation, scale, unit),
            _hosts(explanation.measured, scale, unit),
        ]
    )


def _sentence(run: Run, explanation: Explanation, scale: float, unit: str) -> str:
    plan, measured = explanation.planned.makespan, explanation.measured.makespan
    times = f" ({measured / plan:.2f} times)" if plan > 0 else ""
    source = "was planned" if run.planned is not None else "would do if every action took its typical time"
    excess = {
        name: mean - planned
        for name, mean, planned in zip(Parts._fields, explanation.mean, explanation.planned_mean, strict=True)
        if name not in ("compute", "bubble") and mean - planned > 0.005 * measured
    }
    order = sorted(excess, key=lambda name: -excess[name])
    largest = ", ".join(f"{name} {_short(excess[name] * scale)}{unit}" for name in order)
    took = f"Step {run.measured_step} took {shown_time(explanation.measured, measured)}"
    sentence = f"{took} where {shown_time(explanation.measured, plan)} {source}{times}."
    return f"{sentence} Beyond the plan, on average over the ranks: {largest}." if largest else sentence


def _shares(explanation: Explanation) -> str:
    """Return how much of ranks × makespan was used, and what unequal ranks cost."""
    plan = "planned" if explanation.has_plan else "with typical times"
    texts = []
    for name in ("utilisation", "imbalance"):
        measured, planned = (shown_share(getattr(step, name)) for step in (explanation.measured, explanation.planned))
        texts.append(f"{name.capitalize()} {measured}, {plan} {planned}.")
    return f"{' '.join(texts)} Imbalance is the share in which ranks idle because the busiest one has more work."


def _rows(explanation: Explanation) -> Iterator[tuple[str, Parts | None]]:
    """Yield the ranks (of many, the first and the last), then their mean, and the mean of the plan."""
    for rank, parts in enumerate(explanation.ranks):
        if MAX_RANKS // 2 <= rank < len(explanation.ranks) - MAX_RANKS // 2:
            if rank == MAX_RANKS // 2:
                yield "…", None
            continue
        yield f"rank {rank}", parts
    yield "mean", explanation.mean
    yield "plan" if explanation.has_plan else "typical", explanation.planned_mean


def _bar(name: str, parts: Parts | None, longest: float, scale: float, unit: str) -> str:
    if parts is None:
        return f"<div><span>{name}</span></div>"
    boxes, offset = [], 0.0
    for part, value in zip(Parts._fields, parts, strict=True):
        width = 1000 * value / longest
        if width > 0.05:
            share = f", {value / parts.total:.0%}" if parts.total > 0 else ""
            tooltip = f"{name}, {part}: {_short(value * scale)}{unit}{share}. {MEANINGS[part].capitalize()}"
            box = f'class="{part}" x="{offset:.1f}" width="{width:.1f}" height="10"'
            boxes.append(f"<rect {box}><title>{escape(tooltip)}</title></rect>")
        offset += width
    description = ", ".join(
        f"{part} {_short(value * scale)}{unit}" for part, value in zip(Parts._fields, parts, strict=True)
    )
    return (
        f'<div><span>{name}</span><svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{name}: {description}")}">{"".join(boxes)}</svg></div>'
    )


def _table(rows: list[tuple[str, Parts | None]], scale: float, unit: str) -> str:
    head = "".join(
        f'<th scope="col" title="{MEANINGS.get(name, "the length of the step")}">{name}</th>'
        for name in (*Parts._fields, "step")
    )
    body = []
    for name, parts in rows:
        values = [] if parts is None else [value * scale for value in (*parts, parts.total)]
        cells = "".join(f"<td>{value:.2f}</td>" if unit else f"<td>{_short(value)}</td>" for value in values)
        body.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    meanings = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in MEANINGS.items())
    return (
        f'<div class="wide"><table><thead><tr><th scope="col">{unit.strip() or OWN_UNIT}</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<details><summary>what the parts mean</summary><dl>{meanings}</dl></details>"
    )


def _hosts(measured: Timeline, scale: float, unit: str) -> str:
    """Return how long messages take and how well the clocks agree, if the ranks are on several machines."""
    if not measured.ranks_by_host:
        return ""
    transfers = slowest_transfers(measured, lambda time: f"{_short(time * scale)}{unit}")
    clocks = f"The clocks of the ranks agree within {_short((measured.uncertainty or 0.0) * scale)}{unit}."
    return f"<p>The ranks are on {len(measured.ranks_by_host)} machines. Messages, {escape(transfers)}. {clocks}</p>"


def _slow(explanation: Explanation, scale: float, unit: str) -> str:
    items = []
    for entry in explanation.slow[:MAX_SLOW]:
        measured, plan, extra = (
            f"{_short(value * scale)}{unit}" for value in (entry.measured, entry.planned, entry.extra)
        )
        action = f"{entry.kind} of stage {entry.stage} on rank {entry.rank}"
        items.append(
            f"<li>{escape(action)}: {measured} each where {plan} was planned, {entry.actions} times: {extra}</li>"
        )
    return f"<p>Slowest compared with the plan:</p><ul>{''.join(items)}</ul>" if items else ""


def _short(value: float) -> str:
    """Format with three digits, without rounding residues."""
    return f"{round(value, 9):.3g}" if abs(value) < 1000 else f"{value:.0f}"


def timelines(run: Run) -> str:
    """Return both timelines on one axis, as `stageline trace --html` draws them, in an iframe."""
    if run.measured is None and run.planned is None:
        return ""
    visible: dict[str, Timeline] = {}
    if run.measured is not None:
        planned = run.planned or explain(None, run.measured).planned
        first = "planned" if run.planned is not None else "typical times"
        visible = {first: planned, f"measured, step {run.measured_step}": run.measured}
    elif run.planned is not None:
        visible = {"planned": run.planned}
    in_seconds = run.measured is None or run.measured.costs is None
    page = draw.html(list(visible.values()), "timelines", names=list(visible), seconds=in_seconds)
    if len(page) > MAX_TIMELINE_SIZE:
        file = f"{TIMELINES}/{PLANNED}" if run.measured_step is None else timeline_file(run.measured_step)
        return (
            f'<p class="soft">The timelines ({format_size(len(page))}) are too large for this page; '
            f"draw them with stageline trace {escape(file)} --html trace.html</p>"
        )
    page = page.replace("</head>", FRAMED + "</head>")
    height = 60 + sum(150 + 25 * timeline.schedule.ranks for timeline in visible.values())
    escaped = page.replace("&", "&amp;").replace("'", "&#39;")
    title = f"{' and '.join(visible)}, on one time axis"
    return f'<iframe title="{title}" style="height:{height}px" srcdoc=\'{escaped}\'></iframe>'


# Inside the report, the title is redundant.
FRAMED = "<style>body { padding: 0 !important; overflow: hidden; } h1 { display: none; }</style>\n"

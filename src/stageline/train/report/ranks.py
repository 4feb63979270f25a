"""Where the time of every rank went in the last step that was kept: bars, a table, and the two timelines."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stageline.timeline import draw
from stageline.timeline.explain import MEANINGS, Explanation, Parts, explain
from stageline.timeline.timeline import Timeline
from stageline.train.report.run import PLANNED, TIMELINES, Run

MOST_RANKS, MOST_SLOW = 64, 5
LARGEST = 200_000
"""Letters of the page with both timelines that are taken into the report."""


def attribution(run: Run) -> str:
    """Say where the time went, rank by rank, against the plan."""
    if run.measured is None:
        return '<p class="soft">No measured timeline has been kept yet: see metrics.timeline_freq.</p>'
    found = explain(run.planned, run.measured)
    scale, unit = (1.0, "") if run.measured.costs else (1e3, " ms") if run.measured.makespan < 10 else (1.0, " s")
    longest = max(found.measured.makespan, found.planned.makespan) or 1.0
    rows = list(_rows(found))
    return "".join(
        [
            f"<p>{escape(_sentence(run, found, scale, unit))}</p>",
            '<div class="legend">',
            *(f'<span title="{MEANINGS[name]}"><i class="{name}"></i>{name}</span>' for name in Parts._fields),
            '</div><div class="bars">',
            *(_bar(name, parts, longest, scale, unit) for name, parts in rows),
            "</div>",
            _table(rows, scale, unit),
            _slow(found, scale, unit),
        ]
    )


def _sentence(run: Run, found: Explanation, scale: float, unit: str) -> str:
    plan, real = found.planned.makespan, found.measured.makespan
    times = f" ({real / plan:.2f} times)" if plan > 0 else ""
    source = "was planned" if run.planned is not None else "would do if every action took its typical time"
    beyond = {
        name: mean - planned
        for name, mean, planned in zip(Parts._fields, found.mean, found.planned_mean, strict=True)
        if name not in ("compute", "bubble") and mean - planned > 0.005 * real
    }
    order = sorted(beyond, key=lambda name: -beyond[name])
    most = ", ".join(f"{name} {_short(beyond[name] * scale)}{unit}" for name in order)
    took = f"Step {run.measured_step} took {_short(real * scale)}{unit}"
    said = f"{took} where {_short(plan * scale)}{unit} {source}{times}."
    return f"{said} Beyond the plan, on average over the ranks: {most}." if most else said


def _rows(found: Explanation) -> Iterator[tuple[str, Parts | None]]:
    """The ranks, of many only the first and the last; then their average, and the plan's."""
    for rank, parts in enumerate(found.ranks):
        if MOST_RANKS // 2 <= rank < len(found.ranks) - MOST_RANKS // 2:
            if rank == MOST_RANKS // 2:
                yield "…", None
            continue
        yield f"rank {rank}", parts
    yield "mean", found.mean
    yield "plan", found.planned_mean


def _bar(name: str, parts: Parts | None, longest: float, scale: float, unit: str) -> str:
    if parts is None:
        return f"<div><span>{name}</span></div>"
    drawn, at = [], 0.0
    for part, value in zip(Parts._fields, parts, strict=True):
        wide = 1000 * value / longest
        if wide > 0.05:
            share = f", {value / parts.total:.0%}" if parts.total > 0 else ""
            words = f"{name}, {part}: {_short(value * scale)}{unit}{share}. {MEANINGS[part].capitalize()}"
            box = f'class="{part}" x="{at:.1f}" width="{wide:.1f}" height="10"'
            drawn.append(f"<rect {box}><title>{escape(words)}</title></rect>")
        at += wide
    told = ", ".join(f"{part} {_short(value * scale)}{unit}" for part, value in zip(Parts._fields, parts, strict=True))
    return (
        f'<div><span>{name}</span><svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{name}: {told}")}">{"".join(drawn)}</svg></div>'
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
    words = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in MEANINGS.items())
    return (
        f'<div class="wide"><table><thead><tr><th scope="col">{unit.strip()}</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<details><summary>what the parts mean</summary><dl>{words}</dl></details>"
    )


def _slow(found: Explanation, scale: float, unit: str) -> str:
    said = []
    for each in found.slow[:MOST_SLOW]:
        real, plan, extra = (f"{_short(value * scale)}{unit}" for value in (each.measured, each.planned, each.extra))
        what = f"{each.kind} of stage {each.stage} on rank {each.rank}"
        said.append(f"<li>{escape(what)}: {real} each where {plan} was planned, {each.actions} times: {extra}</li>")
    return f"<p>The slowest against the plan:</p><ul>{''.join(said)}</ul>" if said else ""


def _short(value: float) -> str:
    """Three figures, and nothing for what only rounding left."""
    return f"{round(value, 9):.3g}" if abs(value) < 1000 else f"{value:.0f}"


def timelines(run: Run) -> str:
    """Both on one axis, as `stageline trace --html` draws them, in a frame of their own."""
    if run.measured is None and run.planned is None:
        return ""
    shown: dict[str, Timeline] = {}
    if run.measured is not None:
        planned = run.planned or explain(None, run.measured).planned
        shown = {"planned": planned, f"measured, step {run.measured_step}": run.measured}
    elif run.planned is not None:
        shown = {"planned": run.planned}
    page = draw.html(list(shown.values()), "timelines", names=list(shown))
    if len(page) > LARGEST:
        file = f"{TIMELINES}/{PLANNED if run.measured_step is None else f'step-{run.measured_step:08}.json'}"
        return (
            f'<p class="soft">{len(page) // 1000:,} kB of timelines are too many for this page; '
            f"draw them with stageline trace {escape(file)} --html trace.html</p>"
        )
    page = page.replace("wheel or + −", "Ctrl and wheel, or + −").replace("</head>", FRAMED + "</head>")
    high = 60 + sum(150 + 25 * timeline.schedule.ranks for timeline in shown.values())
    inside = page.replace("&", "&amp;").replace("'", "&#39;")
    return (
        f'<iframe title="{" and ".join(shown)}, on one time axis" style="height:{high}px" srcdoc=\'{inside}\'></iframe>'
    )


# Inside of the report, its title is said already, and the wheel scrolls the page.
FRAMED = """<style>body { padding: 0 !important; overflow: hidden; } h1 { display: none; }</style>
<script>addEventListener("wheel", event => { if (!event.ctrlKey) event.stopPropagation(); }, true);</script>
"""

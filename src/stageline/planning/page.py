"""A plan as a page: its cut, the memory of its ranks, the alternatives, the bound, and the planned step.

The page needs no network and no other file. Its sections also stand in the report of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stageline.common.units import format_seconds, format_size, pluralize
from stageline.model.partition.partition import spans_of
from stageline.planning.costs import RankMemory
from stageline.planning.explain import describe_gap, describe_recompute, mesh_name, mesh_rows, why_not
from stageline.timeline import draw

if TYPE_CHECKING:
    from stageline.planning.plan import Plan

STYLE = Path(__file__).with_name("page.css")
MAX_ROWS = 64
"""Of more stages or ranks, the first and the last are shown."""
MAX_ALTERNATIVES = 12
"""More are folded."""
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "waiting messages",
    "snapshot": "copy to undo a step",
    "graphs": "outputs of CUDA graphs",
    "gathered": "sharding: gathered parameters and gradients",
}
"""The parts of a rank's memory in words."""


def html(plan: Plan) -> str:
    """Return the plan as a self-contained page: figures, cut, memory, alternatives, and the planned step."""
    before = f'{style()}{sections(plan)}<div class="plan"><h2>The planned step</h2></div>'
    return draw.html(plan.timeline, title(plan), seconds=True, before=before)


def style() -> str:
    """Return the style of the sections."""
    return f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"


def title(plan: Plan) -> str:
    """Return what the plan is, in one line."""
    on = f"{mesh_name(plan.mesh)}" if plan.mesh else f"{plan.ranks} rank{'s' if plan.ranks != 1 else ''}"
    return f"Plan: {plan.schedule.name} on {on}"


def sections(plan: Plan) -> str:
    """Return figures, cut, memory, alternatives and notes, in one element with the class "plan"."""
    parts = [_figures(plan), _cut(plan), _memory(plan), _meshes(plan), _alternatives(plan), _notes(plan)]
    return f'<div class="plan">{"".join(parts)}</div>'


# Figures


def _figures(plan: Plan) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in _tiles(plan)
    )
    return f"<dl>{tiles}</dl>"


def _tiles(plan: Plan) -> Iterator[tuple[str, str, str]]:
    utilisation = plan.timeline.utilisation or 0.0
    yield "Step", format_seconds(plan.step_seconds), f"bubble {plan.bubble:.1%}, utilisation {utilisation:.1%}"
    if plan.gap is not None and plan.bound is not None:
        yield "Lower bound", format_seconds(plan.bound), describe_gap(plan)
    totals = [rank.total for rank in plan.memory]
    fullest = int(np.argmax(totals))
    cap = "no limit" if plan.caps is None else f"limit {format_size(plan.caps[fullest])}"
    yield "Memory", format_size(totals[fullest]), f"rank {fullest}, the fullest; {cap}"
    pipelines = plan.mesh.get("dp_replicate", 1) * plan.mesh.get("dp_shard", 1)
    samples = f"of {plan.samples} samples" if plan.samples > 1 else ""  # 1 also stands for an unknown number
    places = f"in each of {pipelines} pipelines" if pipelines > 1 else ""
    yield "Microbatches", str(plan.microbatches), ", ".join(filter(None, (samples, places)))
    yield (
        "Stages",
        str(plan.schedule.stages),
        f"{plan.chunks} on each of {pluralize(plan.ranks, 'rank')}, {pluralize(sum(plan.layers_per_stage), 'unit')}",
    )
    yield "Recomputed", describe_recompute(plan.recompute), ""
    if plan.collectives.total:
        kinds = zip(("tensor parallel", "gathers", "reductions"), plan.collectives, strict=True)
        listed = ", ".join(f"{name} {format_seconds(value)}" for name, value in kinds if value)
        yield "Collectives", format_seconds(plan.collectives.total), f"{listed}; of a rank, some beside compute"


# The cut


def _cut(plan: Plan) -> str:
    forward, backward, *_ = plan.costs.times(plan.schedule.stages)
    rank_of = plan.schedule.placement.table[0].tolist()
    longest = float((forward + backward).max()) or 1.0
    rows = []
    for stage, (start, stop) in enumerate(spans_of(plan.layers_per_stage)):
        names = plan.names[start:stop]
        units = f"{stop - start} unit{'s' if stop - start != 1 else ''}"
        listed = "" if not names else names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        label = (
            f"stage {stage}, rank {rank_of[stage]}<small>{escape(f'{units}: {listed}' if listed else units)}</small>"
        )
        parts = [("f", "F", forward[stage]), ("b", "B", backward[stage])]
        bar = "".join(
            _segment(name, value / longest, f"{letter} {format_seconds(value)}") for name, letter, value in parts
        )
        rows.append((label, bar, format_seconds(float(forward[stage] + backward[stage]))))
    return (
        f"<h2>The cut: time of a microbatch in each stage</h2>{_balance(plan)}{_units(plan)}"
        f'<p class="key"><span><i style="background:var(--f)"></i>forward</span>'
        f'<span><i style="background:var(--b)"></i>backward</span></p>{_rows(rows)}'
    )


def _balance(plan: Plan) -> str:
    """Say how evenly the ranks are loaded."""
    busy = plan.timeline.busy
    most, least = int(np.argmax(busy)), int(np.argmin(busy))
    if busy[most] <= busy[least] * 1.0005:
        text = f"Every rank is busy for {format_seconds(busy[most])} of the step."
    else:
        text = (
            f"Rank {most} is busy for {format_seconds(busy[most])} of the step, rank {least} for "
            f"{format_seconds(busy[least])}, {1 - busy[least] / busy[most]:.1%} less."
        )
    if any(len(share.ranks) > share.capacity for share in plan.costs.shares):
        text += " Ranks that share cores slow each other down; the bars show a stage that runs alone."
    return f"<p>{text}</p>"


def _units(plan: Plan) -> str:
    """Return a column for every unit, with the stages in turns of two colours."""
    if len(plan.unit_seconds) != sum(plan.layers_per_stage):
        return ""
    tallest = max(plan.unit_seconds) or 1.0
    columns = []
    for stage, (start, stop) in enumerate(spans_of(plan.layers_per_stage)):
        for unit in range(start, stop):
            seconds = plan.unit_seconds[unit]
            name = plan.names[unit] if plan.names else f"unit {unit}"
            classes = " ".join(["odd"] * (stage % 2) + ["first"] * (unit == start and stage > 0))
            columns.append(
                f'<span class="{classes}" title="{escape(f"{name}, stage {stage}: {format_seconds(seconds)}")}">'
                f'<i style="height:{100 * seconds / tallest:.2f}%"></i></span>'
            )
    return (
        f'<div class="columns" role="img" aria-label="Time of every unit">{"".join(columns)}</div>'
        f'<p class="soft">Each column is a unit, forward and backward of a microbatch; the tallest takes '
        f"{format_seconds(tallest)}. Colours change from stage to stage.</p>"
    )


def _segment(name: str, share: float, tooltip: str) -> str:
    return (
        f'<i style="width:{100 * share:.3f}%;background:var(--{name})" title="{escape(tooltip)}"></i>' if share else ""
    )


def _rows(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return rows of label, bar and value; of many, the first and the last."""
    half, lines = MAX_ROWS // 2, []
    for number, (label, bar, value) in enumerate(rows):
        if len(rows) > MAX_ROWS and half <= number < len(rows) - half:
            if number > half:
                continue
            label, bar, value = f"… {len(rows) - MAX_ROWS} more", "", ""
        cells = f'<span class="label">{label}</span><div class="bar">{bar}</div><span class="value">{value}</span>'
        lines.append(f'<div class="row">{cells}</div>')
    return f'<div class="rows">{"".join(lines)}</div>'


# Memory


def _memory(plan: Plan) -> str:
    used = [name for name in RankMemory._fields if any(getattr(rank, name) for rank in plan.memory)]
    largest = max([rank.total for rank in plan.memory] + list(_finite(plan.caps))) or 1.0
    rows = []
    for number, rank in enumerate(plan.memory):
        bar = "".join(
            _segment(name, getattr(rank, name) / largest, f"{PARTS[name]} {format_size(getattr(rank, name))}")
            for name in used
        )
        value = format_size(rank.total)
        if plan.caps is not None:
            bar += f'<b style="left:calc({100 * min(1.0, plan.caps[number] / largest):.3f}% - 2px)"></b>'
            value += f" of {format_size(plan.caps[number])}"
        rows.append((f"rank {number}", bar, value))
    key = "".join(f'<span><i style="background:var(--{name})"></i>{PARTS[name]}</span>' for name in used)
    limit = '<span><i class="limit" style="background:var(--limit)"></i>limit</span>' if plan.caps is not None else ""
    heading = f'<h2>Memory of each rank at its peak</h2><p class="key">{key}{limit}</p>'
    return heading + _rows(rows) + _memory_table(plan, used)


def _finite(caps: Sequence[float] | None) -> Iterable[float]:
    return [cap for cap in caps or () if cap < 1e30]


def _memory_table(plan: Plan, used: Sequence[str]) -> str:
    head = ["rank", *(PARTS[name] for name in used), "total"]
    rows = [
        [str(number), *(format_size(getattr(rank, name)) for name in used), format_size(rank.total)]
        for number, rank in enumerate(plan.memory)
    ]
    return f"<details><summary>as a table</summary>{_table(head, rows, text=())}</details>"


# Alternatives


def _meshes(plan: Plan) -> str:
    if not plan.meshes:
        return ""
    head = ["mesh", "schedule", "microbatches × samples", "step", "bubble", "collectives", "fullest rank", "why not"]
    return f"<h2>Meshes, and why not</h2>{_table(head, mesh_rows(plan), text=(0, 1), minor=(1, 2, 4, 5))}"


def _alternatives(plan: Plan) -> str:
    peak = max(rank.total for rank in plan.memory)
    rows = [
        [
            plan.schedule.name, str(plan.schedule.stages), str(plan.microbatches), describe_recompute(plan.recompute),
            format_seconds(plan.step_seconds), f"{plan.bubble:.1%}", format_size(peak), "chosen",
        ]
    ]  # fmt: skip
    rows += [
        [
            other.schedule, str(len(other.layers_per_stage)), str(other.microbatches),
            describe_recompute(other.recompute), format_seconds(other.seconds), f"{other.bubble:.1%}",
            format_size(other.memory), why_not(other, plan, peak),
        ]
        for other in plan.alternatives
    ]  # fmt: skip
    head = ["schedule", "stages", "microbatches", "recomputed", "step", "bubble", "fullest rank", "why not"]
    of_mesh = f" of {mesh_name(plan.mesh)}" if plan.meshes else ""
    table = (
        _table(head, rows, text=(0, 3), minor=(1, 2, 3, 5)) if len(rows) > 1 else "<p>No other plan was simulated.</p>"
    )
    return f"<h2>Alternatives{escape(of_mesh)}, and why not</h2>{table}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int], minor: Sequence[int] = ()) -> str:
    """Return a table; `text` columns are aligned to the left, `minor` ones hidden on a phone, and many rows folded."""

    def style_of(column: int) -> str:
        last = column == len(head) - 1 and bool(minor)
        names = ["text"] * (column in text) + ["minor"] * (column in minor) + ["why"] * last
        return f' class="{" ".join(names)}"' if names else ""

    def row_of(cells: Sequence[str]) -> str:
        chosen = ' class="chosen"' if cells[-1] == "chosen" else ""
        return f"<tr{chosen}>{''.join(f'<td{style_of(at)}>{escape(cell)}</td>' for at, cell in enumerate(cells))}</tr>"

    def table_of(part: Sequence[Sequence[str]]) -> str:
        body = "".join(map(row_of, part))
        return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'

    names = "".join(f'<th scope="col"{style_of(at)}>{escape(name)}</th>' for at, name in enumerate(head))
    shown, folded = rows[: MAX_ALTERNATIVES + 1], rows[MAX_ALTERNATIVES + 1 :]
    rest = f"<details><summary>{len(folded)} more</summary>{table_of(folded)}</details>" if folded else ""
    return table_of(shown) + rest


def _notes(plan: Plan) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""

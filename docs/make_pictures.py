"""Draw the pictures of the documentation again: `python docs/make_pictures.py`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import stageline as sl
from stageline.timeline import draw

FOLDER = Path(__file__).parent / "pictures"
COSTS = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    drawings = {}
    for name in sl.families():
        schedule = sl.schedule(name, ranks=4, microbatches=8)
        drawings[f"{name}.svg"] = draw.svg(sl.simulate(schedule, sl.Costs().refined(schedule.stages // 4)))
    compared = []
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        schedule = sl.schedule(name, ranks=4, microbatches=8)
        compared.append(sl.simulate(schedule, COSTS.refined(schedule.stages // 4)))
    drawings["compare.svg"] = draw.svg(compared)
    schedule = sl.schedule("1f1b", ranks=4, microbatches=8)
    slower = sl.Costs(forward=[10, 10, 14, 10], backward_input=11, backward_weight=7, transfer=3)
    both = [sl.simulate(schedule, COSTS), sl.simulate(schedule, slower)]
    drawings["trace.svg"] = draw.svg(both, names=["1f1b, planned", "1f1b, measured"])
    return drawings | synthesized() | planned() | {"overview.svg": overview()}


def overview() -> str:
    """A model cut into stages, and two orders in which four ranks may run them: the first picture of the README."""
    timelines = [sl.simulate(sl.schedule(name, ranks=4, microbatches=8)) for name in ("1f1b", "zb-h1")]
    chart = draw.svg(timelines)
    places = [(16, 120, "batch", "8 microbatches")]
    places += [(190 + 170 * rank, 126, f"rank {rank}", f"layers {6 * rank} to {6 * rank + 5}") for rank in range(4)]
    places += [(876, 108, "loss", "one number")]
    parts = [box for place in places for box in _box(*place)]
    for (x, width, *_), (next_x, *_) in pairwise(places):
        parts.append(f'<path class="a" d="M{x + width + 5} 62H{next_x - 5}" marker-end="url(#tip)"/>')
        if x > 16:
            parts.append(f'<path class="a" d="M{next_x - 5} 80H{x + width + 5}" marker-end="url(#tip)"/>')
    top, height = 116, int(chart.partition(' height="')[2].partition('"')[0])
    size = f'viewBox="0 0 1000 {top + height}" width="1000" height="{top + height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">
<style>.a{{stroke:#555;fill:none}}.b{{stroke:#888;fill:#eef6fc}}</style>
<defs><marker id="tip" markerWidth="7" markerHeight="8" refX="6" refY="4" orient="auto">
<path d="M0 0L7 4L0 8z" fill="#555"/></marker></defs>
<rect width="1000" height="{top}" fill="#ffffff"/>
<text x="16" y="26"><tspan class="t">A model of 24 layers on 4 ranks</tspan><tspan class="s" dx="12">Activations flow to
the right, gradients back. Below, two schedules: the same work in another order. Grey is idle time.</tspan></text>
{chr(10).join(parts)}
{chart.replace("<svg ", f'<svg y="{top}" ', 1)}</svg>
"""


def _box(x: int, width: int, title: str, text: str) -> tuple[str, str]:
    """A labelled box of the overview."""
    lines = f'<tspan class="t">{title}</tspan><tspan class="s" x="{x + width / 2}" dy="16">{text}</tspan>'
    return (
        f'<rect class="b" x="{x}" y="46" width="{width}" height="50" rx="6"/>',
        f'<text x="{x + width / 2}" y="67" text-anchor="middle">{lines}</text>',
    )


def synthesized() -> dict[str, str]:
    """Schedules made for their costs, beside the families that fit the same memory."""
    more = sl.synthesize(COSTS, ranks=4, microbatches=8, memory=5, time_limit=60)
    h1 = sl.simulate(sl.schedule("zb-h1", ranks=4, microbatches=8), COSTS)
    unequal = sl.Costs(forward=[7, 12, 9, 11], backward_input=[8, 13, 10, 12], backward_weight=[4, 9, 6, 8], transfer=1)
    same = sl.synthesize(unequal, ranks=4, microbatches=8, memory=[4, 3, 2, 1], time_limit=60)
    plain = sl.simulate(sl.schedule("1f1b", ranks=4, microbatches=8), unequal)
    return {
        "synthesis.svg": draw.svg([h1, more.timeline], names=["zb-h1", "synthesized for a cap of 5"]),
        "synthesis-unequal.svg": draw.svg([plain, same.timeline], names=["1f1b", "synthesized for the same memory"]),
    }


def planned() -> dict[str, str]:
    """A plan beside the usual choice without one: 1f1b and equal numbers of layers on every rank."""
    plan = sl.plan(profile=example_profile(), ranks=4, microbatches=8, schedule=["1f1b", "zb-h1", "zb-v"])
    even = sl.plan(profile=example_profile(), ranks=4, microbatches=8, schedule="1f1b", split="layers")
    names = ["1f1b, cut by layers", f"planned: {plan.schedule.name}, cut by time"]
    return {"plan.svg": draw.svg([even.timeline, plan.timeline], names=names)}


def example_profile() -> sl.Profile:
    """An embedding, twelve blocks and a head, as docs/plan.md has them."""
    from stageline.model.profile import Layer

    sizes: Any = {"activation": 200, "residue": 120, "tied": 0, "message": 16, "arriving": 0, "leaving": 0, "calls": 1}

    def layer(name: str, time: float, parameters: int) -> Layer:
        return Layer(name, "Block", time, time, 0.8 * time, 1.8 * time, parameters=parameters, **sizes)

    blocks = [layer(f"blocks.{number}", 0.010, 50) for number in range(12)]
    layers = (layer("embedding", 0.002, 200), *blocks, layer("head", 0.018, 200))
    return sl.Profile(layers, "an example", "cpu", "2.13.0", 1, 1)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, picture in pictures().items():
        (FOLDER / file_name).write_text(picture, encoding="utf-8")

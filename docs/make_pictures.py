"""Draw the pictures of the documentation again: `python docs/make_pictures.py`."""

from __future__ import annotations

from pathlib import Path

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
    return drawings | synthesized() | planned()


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

    sizes = {"activation": 200, "residue": 120, "tied": 0, "message": 16, "arriving": 0, "leaving": 0, "calls": 1}

    def layer(name: str, time: float, parameters: int) -> Layer:
        return Layer(name, "Block", time, time, 0.8 * time, 1.8 * time, parameters=parameters, **sizes)

    blocks = [layer(f"blocks.{number}", 0.010, 50) for number in range(12)]
    layers = (layer("embedding", 0.002, 200), *blocks, layer("head", 0.018, 200))
    return sl.Profile(layers, "an example", "cpu", "2.13.0", 1, 1)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, picture in pictures().items():
        (FOLDER / file_name).write_text(picture, encoding="utf-8")

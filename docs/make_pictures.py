"""Draw the pictures of the documentation again: `python docs/make_pictures.py`."""

from __future__ import annotations

from pathlib import Path

import stageline as sl
from stageline.timeline import draw

FOLDER = Path(__file__).parent / "pictures"
COSTS = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    found = {}
    for name in sl.families():
        made = sl.schedule(name, ranks=4, microbatches=8)
        found[f"{name}.svg"] = draw.svg(sl.simulate(made, sl.Costs().refined(made.stages // 4)))
    compared = []
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        made = sl.schedule(name, ranks=4, microbatches=8)
        compared.append(sl.simulate(made, COSTS.refined(made.stages // 4)))
    found["compare.svg"] = draw.svg(compared)
    made = sl.schedule("1f1b", ranks=4, microbatches=8)
    slower = sl.Costs(forward=[10, 10, 14, 10], backward_input=11, backward_weight=7, transfer=3)
    both = [sl.simulate(made, COSTS), sl.simulate(made, slower)]
    found["trace.svg"] = draw.svg(both, names=["1f1b, planned", "1f1b, measured"])
    return found | synthesized()


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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, picture in pictures().items():
        (FOLDER / file_name).write_text(picture, encoding="utf-8")

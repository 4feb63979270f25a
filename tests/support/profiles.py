"""Profiles of layers whose costs a test states."""

from __future__ import annotations

from typing import Any

import stageline as sl
from stageline.model.profile import Layer


def layer(name: str, forward: float = 1.0, **more: Any) -> Layer:
    known: dict[str, Any] = {
        "kind": "Linear",
        "backward_input": forward,
        "backward_weight": forward,
        "backward": 2 * forward,
        "activation": 100,
        "residue": 60,
        "parameters": 40,
        "tied": 0,
        "message": 10,
        "arriving": 0,
        "leaving": 0,
        "calls": 1,
    }
    return Layer(name=name, forward=forward, **(known | more))


def profile_of(*layers: Layer) -> sl.Profile:
    return sl.Profile(layers, "a machine", "cpu", "2.13.0", 1, 1)


def even(units: int, **more: Any) -> sl.Profile:
    return profile_of(*(layer(f"layers.{unit}", **more) for unit in range(units)))

"""Every layout of a mesh with every schedule: against the plain loop, itself, and the layout without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from stageline.testing import run_ranks
from support.meshes import (
    CASES,
    both,
    compare_schedules,
    mesh_of,
    own_forward,
    quiet,
    sequential,
    sharded,
    tensor_parallel,
)

pytestmark = pytest.mark.mesh_matrix

# The dimensions, and how a stage is cut along those that are not pp.
LAYOUTS: dict[int, list[tuple[dict[str, int], Any]]] = {
    4: [
        ({"pp": 2, "dp_replicate": 2}, None),
        ({"pp": 2, "dp_shard": 2}, sharded),
        ({"dp_shard": 2, "pp": 2}, None),
        ({"pp": 2, "tp": 2}, tensor_parallel),
    ],
    8: [
        ({"pp": 2, "dp_shard": 2, "tp": 2}, both),
        ({"tp": 2, "pp": 2, "dp_replicate": 2}, tensor_parallel),
        ({"dp_replicate": 2, "pp": 2, "dp_shard": 2}, sharded),
        ({"pp": 4, "dp_replicate": 2}, None),
        ({"pp": 4, "dp_shard": 2}, sharded),
        ({"pp": 4, "tp": 2}, tensor_parallel),
    ],
}
SCHEDULES = {name: options for name, _, options in CASES}


def on_layouts(rank: int, world: int) -> None:
    quiet()
    for shape, fn in LAYOUTS[world]:
        mesh, ranks = mesh_of(tuple(shape.values()), *shape), shape["pp"]
        cases = [(name, count, options) for name, options in SCHEDULES.items() for count in (ranks - 1, 6)]
        compare_schedules(sequential(2 * ranks), mesh, fn, cases, again=True)
        if world == 4:
            compare_schedules(own_forward(), mesh, fn, cases)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_schedule(world: int) -> None:
    run_ranks(on_layouts, world, world, timeout=1700)

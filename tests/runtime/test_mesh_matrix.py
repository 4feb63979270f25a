"""Every layout of a mesh with every schedule: against the plain loop, itself, and the layout without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stageline.testing import run_ranks
from support.meshes import CASES, both, compare, mesh_of, quiet, same_bits, sequential, sharded, tensor_parallel

pytestmark = [pytest.mark.mesh_matrix, pytest.mark.timeout(600)]

# The dimensions beside pp, in the order of the mesh, and how a stage is cut along them.
LAYOUTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "replicas": (("dp_replicate",), None),
    "fsdp": (("dp_shard",), sharded),
    "tensors": (("tp",), tensor_parallel),
    "fsdp-tensors": (("dp_shard", "tp"), both),
    "replicas-tensors": (("dp_replicate", "tp"), tensor_parallel),
    "replicas-fsdp": (("dp_replicate", "dp_shard"), sharded),
}
MICROBATCHES = (1, 3, 4)


def results_of(rank: int, layout: str, stages: int) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of all cases of a layout; those of one stage are the layout without a pipeline."""
    quiet()
    names, fn = LAYOUTS[layout]
    mesh = mesh_of((stages,) + (2,) * len(names), "pp", *names)
    cases = [(schedule, options) for schedule, _, options in CASES] if stages > 1 else [("1f1b", {})]
    results = {}
    for schedule, options in cases:
        for microbatches in MICROBATCHES:
            case = (schedule, microbatches)
            if case not in results:
                results[case] = compare(sequential(), mesh, fn, schedule, microbatches, max_norm=0.5, **options)
                again = compare(sequential(), mesh, fn, schedule, microbatches, max_norm=0.5, **options)
                assert same_bits(results[case], again), case
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_schedule(layout: str) -> None:
    world = 2 ** len(LAYOUTS[layout][0])
    alone = run_ranks(results_of, world, layout, 1, timeout=300)
    for rank, results in enumerate(run_ranks(results_of, 2 * world, layout, 2, timeout=300)):
        for (schedule, microbatches), result in results.items():
            expected = alone[rank % world]["1f1b", microbatches]
            assert same_bits(result, expected), (layout, schedule, microbatches, rank)
            for name, gradient in result["gradients"].items():
                assert torch.equal(gradient, expected["gradients"][name]), (layout, schedule, microbatches, rank, name)

"""Activations that tensor parallel cuts into parts of different sizes: refused where these are taken for equal ones.

A style of torch can return the part of this process as a plain tensor, of which the next style makes a DTensor again.
The shape of that DTensor is a multiple of the part here, so if the parts differ in size, processes disagree on the
sizes of all collectives that follow. DTensors that are passed on as such keep their shape, and may be uneven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import watched_parts
from stageline.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Cut(NamedTuple):
    """An activation that was cut unevenly."""

    axis: str
    dimension: int
    size: int


class UnevenParts:
    """Watches the parts of activations in a forward; all processes of the mesh run the same one.

    Sizes are compared only after a DTensor was cut unevenly, which all processes know. So even cuts cost nothing.
    """

    def __init__(self) -> None:
        self._cut: _Cut | None = None
        """The last activation of which this forward took an uneven part as a plain tensor."""
        self._group: Any = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch one forward."""
        self._cut = self._group = None
        with watched_parts(self._taken, self._joined):
            yield

    def _taken(self, whole: Any) -> None:
        """A process takes its part of a DTensor."""
        names = whole.device_mesh.mesh_dim_names or ()
        for number, (axis, placement) in enumerate(zip(names, whole.placements, strict=False)):
            dimension = getattr(placement, "dim", None)
            if dimension is not None and whole.shape[dimension] % whole.device_mesh.size(number):
                self._cut = _Cut(axis, dimension, whole.shape[dimension])
                self._group = whole.device_mesh.get_group(number)

    def _joined(self, part: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any] | None) -> None:
        """A DTensor is about to be made of parts, without its shape."""
        if self._cut is None or mesh is None:
            return
        for number, placement in enumerate(placements or ()):
            dimension = getattr(placement, "dim", None)
            if dimension is not None:
                known = _gather([part.shape[dimension]], mesh.get_group(number), part.device)
                self._refuse_different([size for (size,) in known], "a layer joins them as if they were equal")

    def check_outputs(self, stage: int, leaves: Sequence[Any]) -> None:
        """Refuse plain outputs of a stage whose sizes differ: the next stage would join them."""
        parts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_sharded(leaf)]
        if self._cut is None or not parts:
            return
        known = _gather([size for part in parts for size in part.shape], self._group, parts[0].device)
        for sizes in zip(*known, strict=True):
            self._refuse_different(sizes, f"stage {stage} passes them on as plain tensors")

    def _refuse_different(self, sizes: Sequence[int], what: str) -> None:
        if len(set(sizes)) == 1:
            return
        assert self._cut is not None
        axis, dimension, size = self._cut
        degree = len(sizes)
        raise StagelineError(
            f"{axis} is {degree}, which does not divide dimension {dimension} of an activation, of size {size}: its "
            f"parts have the sizes {', '.join(map(str, sizes))}, but {what}; pad that dimension, such as the sequence, "
            f"to {-(-size // degree) * degree}, use a {axis} that divides it, or pass DTensors on between layers "
            "(use_local_output=False)"
        )


def _gather(sizes: Sequence[int], group: Any, device: torch.device) -> list[list[int]]:
    """The sizes of all processes of a group."""
    mine = torch.tensor(sizes, device=device)
    known = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(known, mine, group)
    return [row.tolist() for row in known]

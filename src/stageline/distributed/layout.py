"""Which process is which rank of which replica of a pipeline.

4 processes, ranks=2, replicas=2            a DeviceMesh of the same
            rank 0   rank 1
replica 0      0        1                   dp │ pp ──▶
replica 1      2        3                      ▼
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stageline.common.errors import StagelineError, shorten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.distributed.collectives import ProcessCollectives

RANKS = ("pp",)
REPLICAS = ("dp", "dp_replicate")
"""Names of the dimensions of a mesh."""


@dataclass(frozen=True)
class Layout:
    """The processes of all replicas; by default those of a replica are consecutive.

    >>> layout = Layout.even(ranks=2, replicas=3)
    >>> layout.rows
    ((0, 1), (2, 3), (4, 5))
    >>> layout.place(3), layout.replica_group(1)
    ((1, 1), (1, 3, 5))
    """

    rows: tuple[tuple[int, ...], ...]
    """For each replica, the process of each of its ranks."""

    @classmethod
    def even(cls, ranks: int, replicas: int = 1) -> Layout:
        """Replica d has the processes from d × ranks on."""
        return cls(tuple(tuple(range(d * ranks, (d + 1) * ranks)) for d in range(replicas)))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, processes: int) -> Layout:
        """The layout of a mesh with dimensions named "pp" and "dp", or either alone, in any order."""
        names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
        shape = dict(zip(names, getattr(mesh, "shape", ()), strict=False))
        pp = next((name for name in names if name in RANKS), None)
        dp = next((name for name in names if name in REPLICAS), None)
        if pp is None and dp is None:
            raise StagelineError(
                f"mesh= is a DeviceMesh with a dimension 'pp' for ranks and 'dp' for replicas, or one of them; got "
                f"{f'dimensions {names}' if names else shorten(mesh)}: name them with mesh_dim_names="
            )
        others = [name for name in names if name not in (pp, dp) and shape[name] != 1]
        if others:
            raise StagelineError(
                f"the mesh has {shape}, but a pipeline has only ranks ('pp') and replicas ('dp'); create a mesh "
                f"without {', '.join(map(repr, others))}"
            )
        order = [names.index(name) for name in (dp, pp) if name is not None]
        rest = [index for index in range(len(names)) if index not in order]
        table = mesh.mesh.permute(*rest, *order).reshape(shape[dp] if dp else 1, shape[pp] if pp else 1).tolist()
        members = sorted(process for row in table for process in row)
        if members != list(range(processes)):
            raise StagelineError(
                f"the mesh holds the processes {members}, and {processes} were started: it must hold each of them once"
            )
        return cls(tuple(tuple(map(int, row)) for row in table))

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.rows)

    @property
    def ranks(self) -> int:
        """The number of ranks of each replica."""
        return len(self.rows[0])

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {process: (d, rank) for d, row in enumerate(self.rows) for rank, process in enumerate(row)}

    def place(self, process: int) -> tuple[int, int]:
        """The replica of a process, and its rank in it."""
        return self._places[process]

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The processes that are this rank of each replica, and so hold the same stages."""
        return tuple(row[rank] for row in self.rows)

    def name(self, process: int) -> str:
        """The name of a process in an error.

        >>> Layout.even(ranks=2).name(1), Layout.even(ranks=2, replicas=2).name(3)
        ('rank 1', 'rank 3 (replica 1)')
        """
        return f"rank {process}" + (f" (replica {self.place(process)[0]})" if self.replicas > 1 else "")


def ranks_of(mesh: DeviceMesh) -> int | None:
    """The number of ranks of a mesh; None if it has neither ranks nor replicas."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if any(name in RANKS for name in names):
        return int(mesh.shape[names.index(RANKS[0])])
    return 1 if any(name in REPLICAS for name in names) else None


def find_layout(ranks: int, replicas: int | None, mesh: DeviceMesh | None, processes: int) -> Layout:
    """The layout of ranks, replicas and mesh; refuses one that does not fit the number of processes.

    >>> find_layout(2, None, None, processes=6)
    Traceback (most recent call last):
        ...
    stageline.StagelineError: the schedule has 2 ranks and 6 processes were started; start 2, or pass ranks=6, or
    replicas=3 (3 × 2 = 6)
    """
    if replicas is not None and (not isinstance(replicas, int) or replicas < 1):
        raise StagelineError(f"replicas must be at least 1, got {shorten(replicas)}")
    if mesh is not None:
        layout = Layout.of_mesh(mesh, processes)
        if layout.ranks != ranks or replicas not in (None, layout.replicas):
            raise StagelineError(
                f"the mesh has {layout.ranks} ranks and {layout.replicas} replicas; the schedule has {ranks} ranks"
                f"{'' if replicas is None else f' and replicas={replicas} was passed'}: make them agree"
            )
        return layout
    if replicas is None and ranks == processes:
        return Layout.even(ranks)
    if processes == 1:
        raise StagelineError(
            f"replicas={replicas} needs a process for every rank of every replica: start {replicas} × {ranks} with "
            f"torchrun --nproc-per-node {(replicas or 1) * ranks}"
        )
    if replicas is None or replicas * ranks != processes:
        fits = f", or replicas={processes // ranks} ({processes // ranks} × {ranks} = {processes})"
        fits = fits if processes % ranks == 0 and processes > ranks else ""
        if replicas is None:
            raise StagelineError(
                f"the schedule has {ranks} ranks and {processes} processes were started; start {ranks}, or pass "
                f"ranks={processes}{fits}"
            )
        alone = f", or pass ranks={processes // replicas}" if processes % replicas == 0 else ""
        raise StagelineError(
            f"{replicas} replicas of {ranks} ranks are {replicas * ranks} processes, and {processes} were started; "
            f"start {replicas * ranks}{alone}{fits}"
        )
    return Layout.even(ranks, replicas)


def mesh_of(collectives: ProcessCollectives) -> DeviceMesh:
    """A mesh of the groups that a pipeline made for itself; sends nothing."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    groups = collectives.layout_groups
    if collectives.replica_group is None:
        return DeviceMesh.from_group(groups.replica, "cpu", mesh_dim_names=("pp",))
    device, of_mesh = "cpu", [groups.replica_group, groups.replica]
    if groups.replica_group_nccl is not None:
        device, of_mesh = "cuda", [groups.replica_group_nccl, groups.replica_nccl]
    rows = torch.tensor(collectives.layout.rows)
    return DeviceMesh.from_group(of_mesh, device, rows, mesh_dim_names=("dp", "pp"))

"""Which process is which rank of which copy of a pipeline.

4 processes, ranks=2, replicas=2            a DeviceMesh of the same
            rank 0   rank 1
replica 0      0        1                   dp │ pp ──▶
replica 1      2        3                      ▼

In a larger mesh, every row of ranks is one copy of the pipeline, and the other dimensions number the rows: replicas
(dp_replicate), processes that share the parameters of a replica (dp_shard), and those that share its layers (tp).

A part of a mesh, such as one column of it, is a pipeline of its own. Its processes are numbered from 0 here and in all
that they send each other; `members` has their numbers in the job, which errors name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stageline.common.errors import StagelineError, nearest, shorten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.distributed.collectives import ProcessCollectives

RANKS = ("pp",)
REPLICAS = ("dp", "dp_replicate")
SHARDS = ("dp_shard",)
TENSORS = ("tp",)
"""Names of the dimensions of a mesh."""
KNOWN = (*RANKS, *REPLICAS, *SHARDS, *TENSORS)
OTHERS = {
    "cp": "context parallelism is not supported; keep whole sequences on a rank, and use tp or more stages",
    "ep": "expert parallelism is not supported; keep all experts of a layer on a rank, and shard them with dp_shard",
    "fsdp": "name it 'dp_shard'",
    "ddp": "name it 'dp_replicate'",
    "dp_cp": "context parallelism is not supported",
}
"""What to do about dimensions that others use."""


@dataclass(frozen=True)
class Layout:
    """The processes of all rows; by default a row is a replica, and its processes are consecutive.

    >>> layout = Layout.even(ranks=2, replicas=3)
    >>> layout.rows
    ((0, 1), (2, 3), (4, 5))
    >>> layout.place(3), layout.replica_group(1)
    ((1, 1), (1, 3, 5))
    """

    rows: tuple[tuple[int, ...], ...]
    """For each row, the process of each of its ranks."""
    shards: int = 1
    """How many rows share the parameters of a replica: the size of dp_shard."""
    tensors: int = 1
    """How many rows share the layers of a replica, and so get the same samples: the size of tp."""
    names: tuple[str, ...] = ()
    """The dimensions of the mesh, in its order; empty without a mesh."""
    members: tuple[int, ...] = ()
    """The numbers of the processes in the job, if the mesh is a part of it; empty if it holds all of them."""

    @classmethod
    def even(cls, ranks: int, replicas: int = 1) -> Layout:
        """Replica d has the processes from d × ranks on."""
        return cls(tuple(tuple(range(d * ranks, (d + 1) * ranks)) for d in range(replicas)))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, processes: int) -> Layout:
        """The layout of a mesh with dimensions named pp, dp_replicate (or dp), dp_shard and tp, in any order.

        A dimension that is missing counts as 1. A mesh that holds only some of the processes is a part of one that
        holds all of them.
        """
        shape = _shape_of(mesh)
        names = tuple(shape)
        kinds = [next((name for name in names if name in kind), None) for kind in (REPLICAS, SHARDS, TENSORS, RANKS)]
        sizes = [1 if name is None else shape[name] for name in kinds]
        order = [names.index(name) for name in kinds if name is not None]
        rest = [index for index in range(len(names)) if index not in order]
        table = mesh.mesh.permute(*rest, *order).reshape(-1, sizes[3]).tolist()
        members = sorted(process for row in table for process in row)
        if len(members) != processes:
            _refuse_part(mesh, shape, members, processes)
        numbers = {process: number for number, process in enumerate(members)}
        rows = tuple(tuple(numbers[process] for process in row) for row in table)
        return cls(rows, sizes[1], sizes[2], names, () if len(members) == processes else tuple(members))

    def in_job(self, process: int) -> int:
        """The number of a process in the job.

        >>> Layout(((0, 1),), names=("pp",), members=(1, 3)).in_job(1)
        3
        """
        return self.members[process] if self.members else process

    def in_layout(self, process: int) -> int | None:
        """The number here of a process of the job; None if it is not a part of this layout."""
        if not self.members:
            return process
        return self.members.index(process) if process in self.members else None

    @property
    def replicas(self) -> int:
        """The number of rows: copies of the pipeline that run at the same time."""
        return len(self.rows)

    @property
    def data_rows(self) -> int:
        """How many different samples there are: rows that differ only in tp get the same."""
        return len(self.rows) // self.tensors

    def data_row(self, row: int) -> int:
        """The number of a row's samples."""
        return row // self.tensors

    @property
    def ranks(self) -> int:
        """The number of ranks of each row."""
        return len(self.rows[0])

    def coordinates(self, process: int) -> dict[str, int]:
        """The place of a process in every dimension.

        >>> Layout(((0, 1), (2, 3)), tensors=2, names=("tp", "pp")).coordinates(3)
        {'dp_replicate': 0, 'dp_shard': 0, 'tp': 1, 'pp': 1}
        """
        row, rank = self.place(process)
        replica, rest = divmod(row, self.shards * self.tensors)
        return {"dp_replicate": replica, "dp_shard": rest // self.tensors, "tp": rest % self.tensors, "pp": rank}

    def neighbours(self, process: int, dimensions: Collection[str]) -> tuple[int, ...]:
        """The processes that differ from this one in these dimensions alone, itself included.

        >>> Layout(((0, 1), (2, 3)), tensors=2, names=("tp", "pp")).neighbours(3, ["tp"])
        (1, 3)
        """
        here = self.coordinates(process)
        fixed = [name for name in here if name not in dimensions]
        members = (other for row in self.rows for other in row)
        return tuple(other for other in members if all(self.coordinates(other)[name] == here[name] for name in fixed))

    @property
    def data_dimensions(self) -> list[str]:
        """The dimensions over which samples differ that have more than one place."""
        replicates = self.data_rows // self.shards
        return [name for name, size in (("dp_replicate", replicates), ("dp_shard", self.shards)) if size > 1]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {process: (d, rank) for d, row in enumerate(self.rows) for rank, process in enumerate(row)}

    def place(self, process: int) -> tuple[int, int]:
        """The replica of a process, and its rank in it."""
        return self._places[process]

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The processes that are this rank of each row, and so hold the same stages, or parts of them."""
        return tuple(row[rank] for row in self.rows)

    def name(self, process: int) -> str:
        """The name of a process in an error.

        >>> Layout.even(ranks=2).name(1), Layout.even(ranks=2, replicas=2).name(3)
        ('rank 1', 'rank 3 (replica 1)')
        >>> Layout(((0, 1), (2, 3)), names=("pp", "dp")).name(1)
        'process 1 (pp 1, dp 0)'
        >>> Layout(((0, 1),), names=("pp",), members=(1, 3)).name(1)
        'process 3 (pp 1)'
        """
        if self.by_place:
            return self.place_name(process)
        return f"rank {process}" + (f" (replica {self.place(process)[0]})" if self.replicas > 1 else "")

    @property
    def in_mesh(self) -> bool:
        """Whether the mesh has more dimensions than ranks and replicas."""
        return bool(self.names) and (self.shards > 1 or self.tensors > 1)

    @property
    def by_place(self) -> bool:
        """Whether processes are named by their places: in a mesh of several dimensions, or a part of a larger one."""
        return bool(self.members) or (bool(self.names) and self.replicas > 1)

    def place_name(self, process: int) -> str:
        """The name of a process by its place in the mesh; "rank 3" if there is none, or one of ranks alone."""
        if not self.by_place:
            return f"rank {process}"
        place = self.coordinates(process)
        known = {name: place["dp_replicate" if name == "dp" else name] for name in self.names if name in KNOWN}
        return f"process {self.in_job(process)} ({', '.join(f'{name} {at}' for name, at in known.items())})"


def _shape_of(mesh: DeviceMesh) -> dict[str, int]:
    """The sizes of a mesh's dimensions by name; refuses a mesh with others than a pipeline knows."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    shape = dict(zip(names, getattr(mesh, "shape", ()), strict=False))
    if not names:
        raise StagelineError(
            f"mesh= must be a DeviceMesh whose dimensions are named {', '.join(KNOWN)}, in any order, but "
            f"{shorten(mesh)} has no names; pass mesh_dim_names= to init_device_mesh"
        )
    unknown = [name for name in names if name not in KNOWN and shape[name] != 1]
    if unknown:
        hint = OTHERS.get(unknown[0], f"rename it{nearest(unknown[0], KNOWN)}, or create a mesh without it")
        raise StagelineError(
            f"the mesh has the dimension {unknown[0]!r} of size {shape[unknown[0]]}, but a pipeline supports only "
            f"{', '.join(KNOWN)}; {hint}"
        )
    if all(name in names for name in REPLICAS):
        raise StagelineError("the mesh has both 'dp' and 'dp_replicate', which are the same dimension; keep one")
    return shape


def _refuse_part(mesh: DeviceMesh, shape: dict[str, int], members: list[int], processes: int) -> None:
    """Refuse a mesh of some processes unless it is a part of one of all, and has a place for this process."""
    from stageline.distributed._torch_private import root_of

    sizes_text = " × ".join(f"{name} {size}" for name, size in shape.items())
    if root_of(mesh).size() != processes:
        raise StagelineError(
            f"the mesh ({sizes_text}) contains the processes {shorten(members)}, but {processes} were started; it must "
            'contain each of them once, or be part of a mesh that does, such as world["pp"]'
        )
    if mesh.get_coordinate() is None:
        raise StagelineError(
            f"this process is not in the mesh ({sizes_text}), which contains the processes {shorten(members)}; "
            'pass the part that contains it, such as world["pp"] of the whole mesh'
        )


def ranks_of(mesh: DeviceMesh) -> int:
    """The number of ranks of a mesh; 1 if it has no dimension for them."""
    return _shape_of(mesh).get("pp", 1)


def inner_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of the processes that hold the same stages: without "pp"; None if nothing is left."""
    if mesh is None:
        return None
    shape = _shape_of(mesh)
    names = tuple(name for name in shape if name not in RANKS)
    if not names:
        return None
    return mesh if len(names) == len(shape) else mesh[names]


def data_choices(layout: Layout) -> list[frozenset[str]]:
    """The sets of dimensions over which gradients may have to be summed, other than all rows.

    >>> data_choices(Layout.even(2, replicas=2))
    []
    >>> [sorted(choice) for choice in data_choices(Layout(((0,), (1,), (2,), (3,)), shards=2, tensors=2))]
    [['dp_shard']]
    """
    names = layout.data_dimensions
    choices = [frozenset([name]) for name in names] + ([frozenset(names)] if len(names) > 1 else [])
    return [choice for choice in choices if layout.tensors > 1 or len(choice) < len(names)]


def find_layout(ranks: int, replicas: int | None, mesh: DeviceMesh | None, processes: int) -> Layout:
    """The layout of ranks, replicas and mesh; refuses one that does not fit the number of processes.

    >>> find_layout(2, None, None, processes=6)
    Traceback (most recent call last):
        ...
    stageline.StagelineError: the schedule has 2 ranks, but 6 processes were started; start 2, or pass ranks=6, or
    replicas=3 (3 × 2 = 6)
    """
    if replicas is not None and (not isinstance(replicas, int) or replicas < 1):
        raise StagelineError(f"replicas must be at least 1, got {shorten(replicas)}")
    if mesh is not None:
        layout = Layout.of_mesh(mesh, processes)
        if layout.ranks != ranks or replicas not in (None, layout.data_rows):
            raise StagelineError(
                f"the mesh has {layout.ranks} ranks and {layout.data_rows} replicas; the schedule has {ranks} ranks"
                f"{'' if replicas is None else f' and replicas={replicas} was passed'}; make them agree"
            )
        return layout
    if replicas is None and ranks == processes:
        return Layout.even(ranks)
    if processes == 1:
        raise StagelineError(
            f"replicas={replicas} needs a process for every rank of every replica; start {replicas} × {ranks} with "
            f"torchrun --nproc-per-node {(replicas or 1) * ranks}"
        )
    if replicas is None or replicas * ranks != processes:
        fits = f", or replicas={processes // ranks} ({processes // ranks} × {ranks} = {processes})"
        fits = fits if processes % ranks == 0 and processes > ranks else ""
        if replicas is None:
            raise StagelineError(
                f"the schedule has {ranks} ranks, but {processes} processes were started; start {ranks}, or pass "
                f"ranks={processes}{fits}"
            )
        alone = f", or pass ranks={processes // replicas}" if processes % replicas == 0 else ""
        raise StagelineError(
            f"{replicas} replicas of {ranks} ranks need {replicas * ranks} processes, but {processes} were started; "
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

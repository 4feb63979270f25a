"""Initial weights: weights that several processes hold must be equal in all of them when training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PipelineError
from stageline.distributed.rank_host import RankHost
from stageline.runtime.microbatches import digest
from stageline.schedules.placement import Placement


def held_by_several(
    model: nn.Module, parts: Sequence[nn.Module], placement: Placement, replicas: int
) -> dict[str, tuple[Tensor, set[int]]]:
    """The parameters and buffers that more than one process holds, by name, with the ranks of a replica that do.

    >>> import stageline as sl
    >>> tied = nn.Linear(2, 2)
    >>> model = nn.Sequential(tied, nn.Linear(2, 2), tied)
    >>> placement = sl.schedule("gpipe", ranks=3, microbatches=1).placement
    >>> {name: ranks for name, (_, ranks) in held_by_several(model, list(model), placement, 1).items()}
    {'0.weight': {0, 2}, '0.bias': {0, 2}}
    """
    holders: dict[int, set[int]] = {}
    for stage, part in enumerate(parts):
        ranks = {int(rank) for rank in placement.table[:, stage]}
        for tensor in (*part.parameters(), *part.buffers()):
            holders.setdefault(id(tensor), set()).update(ranks)
    named = (*model.named_parameters(), *model.named_buffers())
    known = {name: (tensor, holders.get(id(tensor), set())) for name, tensor in named}
    return {name: (tensor, ranks) for name, (tensor, ranks) in known.items() if len(ranks) * replicas > 1}


def compare_weights(host: RankHost, held: Mapping[str, tuple[Tensor, set[int]]]) -> None:
    """Raise the same error in all processes if two of them hold different values of one weight."""
    (rank,) = host.here
    own = [float(digest(tensor)) if rank in ranks else 0.0 for tensor, ranks in held.values()]
    known = host.all_gather(np.array(own))
    for column, (name, (tensor, _)) in enumerate(held.items()):
        values = known[..., column]
        holders = np.argwhere(values)
        different = [place for place in holders.tolist() if values[tuple(place)] != values[tuple(holders[0])]]
        if different:
            layout = host.layout
            first, second = (layout.rows[replica][at] for replica, at in (holders[0].tolist(), different[0]))
            mine = summarize(tensor) if values[host.replica, rank] else ""
            one, other = (host.broadcast_to_all(mine, process) for process in (first, second))
            raise PipelineError(
                f"{layout.name(second)} and {layout.name(first)} hold different values of {name}, which both use: "
                f"{layout.name(second)} has {other} and {layout.name(first)} has {one}; start all with the same "
                "weights (one torch.manual_seed before the model is built, or one checkpoint); compare_weights=False "
                "skips this check"
            )


def summarize(tensor: Tensor) -> str:
    """A short text that distinguishes a tensor from others of its shape.

    >>> summarize(torch.ones(2))
    '[1.0, 1.0], sum 2.0'
    """
    flat = tensor.detach().reshape(-1)
    shown = ", ".join(str(round(value, 6)) if isinstance(value, float) else str(value) for value in flat[:3].tolist())
    total = flat.sum(dtype=torch.float64) if flat.is_floating_point() else flat.sum()
    return f"[{shown}{', …' if flat.numel() > 3 else ''}], sum {total.item()}"

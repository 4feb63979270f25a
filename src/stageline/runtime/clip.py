"""Clipping by the norm of all gradients, where each process has a part of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stageline.runtime.shadows import Placed
from stageline.runtime.worlds import World


def clip_together(
    world: World,
    placed: Placed,
    model: Sequence[nn.Parameter],
    mine: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """As torch does it in one process: the norm of all parameters' norms, in the order of the model.

    `mine` are the parameters of the model that are here. Of one that several ranks use, the first counts it. Replicas
    have the same gradients, so each takes the norm over its own ranks.
    """
    everything = [parameter for parameter in model if parameter.requires_grad]
    norms = np.zeros(len(everything))
    first = {id(parameter): uses[0].rank for parameter, uses in placed.uses.items()}
    here = {id(parameter) for parameter in mine}
    for index, parameter in enumerate(everything):
        counts_here = first.get(id(parameter), world.here[0]) == world.here[0]
        if id(parameter) in here and counts_here and parameter.grad is not None:
            norms[index] = float(torch.linalg.vector_norm(parameter.grad, norm_type))
    known = torch.from_numpy(world.add_up(norms)).to(everything[0].dtype)
    total: Tensor = torch.linalg.vector_norm(known, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in mine:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return total

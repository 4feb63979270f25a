"""The optimizer step: the norm of the gradients over all processes, the check that they are finite, clipping, the step.

`Pipeline.clip_grad_norm_`, `Pipeline.run` and the Trainer share these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import Floats
from stageline.runtime._torch_private import foreach_mul_
from stageline.runtime.step_report import scalars_to_row
from stageline.tensors.sharded import is_sharded, local


def norms_of(names: Sequence[str], own: Mapping[str, Tensor | None], norm_type: float = 2.0) -> Floats:
    """The norm of each parameter's gradient, in the order of the model; 0 for parameters that are not in `own`."""
    gradients = {name: gradient for name, gradient in own.items() if gradient is not None}
    real = {name: gradient.abs() if gradient.is_complex() else gradient for name, gradient in gradients.items()}
    norms = {
        name: torch.linalg.vector_norm(local(real[name]), norm_type, dtype=norm_dtype([gradient]))
        for name, gradient in gradients.items()
    }
    norms.update(_norms_of_shards({name: norms[name] for name in norms if is_sharded(real[name])}, real, norm_type))
    return scalars_to_row(names, norms)


def _norms_of_shards(own: Mapping[str, Tensor], gradients: Mapping[str, Any], norm_type: float) -> dict[str, Tensor]:
    """The norms of gradients that are cut, from those of this process's parts: each part counts once.

    One sum for all that are cut alike. All processes that hold parts must call this together.
    """
    alike: dict[Any, list[str]] = {}
    for name in own:
        mesh, placements = gradients[name].device_mesh, gradients[name].placements
        cut = tuple(index for index, placement in enumerate(placements) if not placement.is_replicate())
        alike.setdefault((mesh, cut, own[name].dtype), []).append(name)
    norms: dict[str, Tensor] = {}
    for (mesh, cut, _), names in alike.items():
        if cut and not norm_type > 0:
            raise StagelineError(f"clipping sharded gradients requires norm_type > 0, got {norm_type}")
        largest = math.isinf(norm_type)
        values = torch.stack([own[name] if largest else own[name] ** norm_type for name in names])
        for dimension in cut:
            values = _combined(values, mesh.get_group(dimension), largest)
        norms.update(zip(names, (values if largest else values ** (1 / norm_type)).unbind(), strict=True))
    return norms


def _combined(values: Tensor, group: Any, largest: bool) -> Tensor:
    """The sums, or the largest, of the values of all processes of a group.

    They are added in the order of the processes: an all-reduce adds each in an order that depends on the others, and so
    on the stages of a process.
    """
    if largest:
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
        return values
    rows = values.new_zeros(dist.get_world_size(group), len(values))
    rows[dist.get_rank(group)] = values
    dist.all_reduce(rows, group=group)
    first, *others = rows.unbind()
    return sum(others, first)


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type in which a norm is computed: float32, or float64 if any gradient is.

    >>> norm_dtype([torch.ones(1, dtype=torch.bfloat16)]), norm_dtype([torch.ones(1, dtype=torch.complex128)])
    (torch.float32, torch.float64)
    """
    exact = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if exact else torch.float32


def total_norm(norms: Floats, norm_type: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of norms."""
    return torch.as_tensor(torch.linalg.vector_norm(torch.from_numpy(norms).to(dtype), norm_type))


@dataclass(frozen=True)
class StepDecision:
    """Whether a step is applied, scaled, skipped or failed."""

    norm: Tensor | None = None
    factor: Tensor | None = None
    """What the gradients are multiplied by; None leaves them as they are."""
    skipped: bool = False
    """Whether the optimizer does not step, because the gradients are not finite."""
    failed: bool = False
    """Whether that is an error."""


@dataclass(frozen=True)
class GradientRules:
    """What the gradients of a step must satisfy before the optimizer steps.

    >>> rules = GradientRules(max_norm=1.0)
    >>> rules.decide(torch.tensor(0.5)).factor is None, rules.decide(torch.tensor(math.nan)).failed
    (True, True)
    >>> round(rules.decide(torch.tensor(4.0)).factor.item(), 4)
    0.25
    """

    max_norm: float | None = None
    """Clip to this norm; None does not clip."""
    check_finite: bool = True
    """Fail if the norm is not finite."""
    skip_not_finite: bool = False
    """Skip such a step instead."""
    factor_dtype: torch.dtype | None = None
    """The dtype in which the factor is computed; None for that of the norm."""

    @property
    def need_norm(self) -> bool:
        """Whether the norm decides anything."""
        return self.max_norm is not None or self.check_finite or self.skip_not_finite

    def decide(self, norm: Tensor | None, scale: float = 1.0) -> StepDecision:
        """Decide by the norm of the gradients, which are `scale` times as large; None if no norm is needed."""
        if norm is not None and not math.isfinite(norm.item()) and (self.skip_not_finite or self.check_finite):
            return StepDecision(norm, skipped=self.skip_not_finite, failed=not self.skip_not_finite)
        factor = None
        if norm is not None and self.max_norm is not None:
            total = norm.to(self.factor_dtype or norm.dtype)
            factor = torch.clamp(self.max_norm / (total + 1e-6), max=1.0) / scale
        elif scale != 1.0:
            factor = torch.tensor(1.0 / scale, dtype=torch.float64)
        return StepDecision(norm, None if factor is None or factor.item() == 1.0 else factor)


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, in place."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in map(local, gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), members in groups.items():
        foreach_mul_(members, factor.to(device, dtype))


def step_optimizer(decision: StepDecision, gradients: Iterable[Tensor], step: Callable[[], object]) -> None:
    """Apply the decision: scale the gradients and call `step`, or skip."""
    if decision.skipped:
        return
    if decision.factor is not None:
        scale_gradients(gradients, decision.factor)
    step()


def not_finite_text(step: int, norm: float, loss: float) -> str:
    """Return the start of the error about a step whose gradients are not finite."""
    return f"the gradients of step {step} are not finite (their norm is {norm}) though the loss is {loss:.4g}"

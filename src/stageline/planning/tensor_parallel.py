"""What tensor parallel divides, and what its processes send each other, as in Megatron.

A unit is cut into pairs of layers, the first by columns and the second by rows. The outputs of the second are added up
in the forward (an all-reduce), and the gradients of the inputs of the first in the backward:

    x ─▶ [ columns ] ─▶ [ rows ] ─▶ all-reduce ─▶ y        twice in a transformer block: attention, and the MLP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from stageline.common.errors import StagelineError
from stageline.model.profile import Layer, Profile
from stageline.model.tp_plan import HEADS, plan_of, refuse_heads, style_of
from stageline.planning.mesh import all_gather, all_reduce
from stageline.planning.profiles import TIMES, SizedProfiles

WIDTHS = ("hidden_size", "intermediate_size", "n_embd", "d_model", "embed_dim")
"""What layers and configs call the widths that tensor parallel cuts."""


class CutUnit(NamedTuple):
    """What tensor parallel does with a unit."""

    split: int
    """Bytes of its parameters that are divided."""
    total: int
    """Bytes of all its parameters."""
    forward: int = 2
    """All-reduces in F."""
    backward: int = 2
    """All-reduces in B, or in I."""
    gathers: int = 0
    """Gathers of the output in F."""


ASSUMED = CutUnit(1, 1)
"""A unit with parameters of a model without a plan: all of it is divided, with two all-reduces each way."""


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallel over some processes, for units with or without a plan."""

    parts: int = 1
    units: Mapping[str, CutUnit] | None = None
    """What the model's plan says about its units; None without a plan."""
    _traffic: dict[int, tuple[Profile, tuple[Profile, Profile]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """By the id of a profile, which is kept so that no other takes its id."""

    @classmethod
    def of(cls, parts: int, model: nn.Module | None, names: tuple[str, ...]) -> TensorParallel:
        """Read the model's plan, if it has one."""
        return cls(parts, None if parts == 1 or model is None else cut_units(model, names) or None)

    def unit(self, layer: Layer) -> CutUnit:
        """Return what happens to a unit; one without parameters is left alone."""
        if not layer.parameters:
            return CutUnit(0, 1, 0, 0)
        return ASSUMED if self.units is None else self.units.get(layer.name, CutUnit(0, 1, 0, 0))

    def divide(self, profiles: SizedProfiles) -> SizedProfiles:
        """Return profiles with the parameters and the compute time of one process.

        The time that is divided is in proportion to the parameters that are.
        """
        if self.parts == 1:
            return profiles

        def divided(layer: Layer) -> Layer:
            split, total, *_ = self.unit(layer)
            splits = layer.parameters * split // total
            parameters = layer.parameters - splits + -(-splits // self.parts)
            tied = layer.tied * parameters // layer.parameters if layer.parameters else 0
            left = 1 - split / total * (1 - 1 / self.parts)
            times = {name: getattr(layer, name) * left for name in TIMES}
            return replace(layer, parameters=parameters, tied=tied, **times)

        def divided_profile(profile: Profile) -> Profile:
            return replace(profile, layers=tuple(map(divided, profile.layers)))

        return SizedProfiles.of({size: divided_profile(profile) for size, profile in profiles.profiles.items()})

    def traffic(self, profile: Profile) -> tuple[Profile, Profile]:
        """Return what a process sends, in place of the times of a profile: bytes, and hops of a ring.

        What is added up is as large as the unit's output, or its input where that is smaller (an output layer).
        """
        if id(profile) not in self._traffic:
            self._traffic[id(profile)] = profile, self._compute_traffic(profile)
        return self._traffic[id(profile)][1]

    def _compute_traffic(self, profile: Profile) -> tuple[Profile, Profile]:
        sent: list[Layer] = []
        hops: list[Layer] = []
        previous = profile.layers[0].message
        for layer in profile.layers:
            unit, size = self.unit(layer), min(layer.message, previous)
            reduction, gather = all_reduce(size, self.parts), all_gather(layer.message, self.parts)
            for rows, reduced, gathered in zip((sent, hops), reduction, gather, strict=True):
                back = unit.backward * reduced
                rows.append(
                    replace(
                        layer, forward=unit.forward * reduced + unit.gathers * gathered, backward=back,
                        backward_input=back, backward_weight=0.0,
                    )
                )  # fmt: skip
            previous = layer.message
        return replace(profile, layers=tuple(sent)), replace(profile, layers=tuple(hops))


def cut_units(model: nn.Module, units: tuple[str, ...]) -> dict[str, CutUnit]:
    """Return what the model's own plan does with each unit; empty if the model has no such plan.

    The plan's layers that are cut by rows add up their outputs, and those cut by columns the gradients of their inputs.
    """
    plan = plan_of(model)
    if not plan:
        return {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    styles = [(name, style_of(plan, name) or "") for name, _ in model.named_modules()]
    cut: dict[str, CutUnit] = {}
    for unit in units:
        own = [(name, parameter) for name, parameter in parameters if name.startswith(f"{unit}.")]
        split = sum(parameter.nbytes for name, parameter in own if _is_split(name, parameter.dim(), plan))
        total = sum(parameter.nbytes for _, parameter in own)
        inside = [style for name, style in styles if name == unit or name.startswith(f"{unit}.")]
        added = sum("rowwise" in style or style == "moe_tp_experts" for style in inside)
        columns = sum("colwise" in style or style == "replicated_with_grad_allreduce" for style in inside)
        columns -= sum(style == "embedding_colwise" for style in inside)  # tokens have no gradient
        gathers = sum(style in ("colwise_rep", "colwise_gather_output", "embedding_colwise") for style in inside)
        if total:
            cut[unit] = CutUnit(split, total, added, columns, gathers)
    return cut


def _is_split(name: str, dimensions: int, plan: Mapping[str, str]) -> bool:
    """Whether a plan splits a parameter: it names the parameter or its module, with * for numbers."""
    style = style_of(plan, name) or style_of(plan, name.rpartition(".")[0]) or ""
    return "colwise" in style or ("rowwise" in style and dimensions > 1)  # a row-wise bias is whole on every rank


def refuse_degree(model: nn.Module, degree: int) -> None:
    """Refuse a degree with which a pipeline could not cut the model's layers.

    >>> refuse_degree(nn.Linear(4, 8), 3)
    Traceback (most recent call last):
    stageline.StagelineError: tp is 3, which divides no dimension of the parameters of Linear, so no layer can be cut; \
use a tp that divides them
    """
    plan = plan_of(model)
    sizes = [size for parameter in model.parameters() if not is_lazy(parameter) for size in parameter.shape]
    if not plan and sizes and all(size % degree for size in sizes):
        raise StagelineError(
            f"tp is {degree}, which divides no dimension of the parameters of {type(model).__name__}, so no layer can "
            "be cut; use a tp that divides them"
        )
    for name, module in model.named_modules() if plan else ():
        style = style_of(plan, name)
        if style == "colwise":
            owner = model.get_submodule(name.rpartition(".")[0])
            refuse_heads(name, owner, degree, getattr(owner, "config", None))
        if style in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            size, dimension = (module.out_features, 0) if style == "colwise" else (module.in_features, 1)
            if size % degree:
                raise StagelineError(
                    f"tp is {degree}, which does not divide dimension {dimension} of {name}.weight, of size {size}; "
                    "use a tp that divides it"
                )


def dividends(model: nn.Module) -> dict[str, int]:
    """Return the numbers that a degree of tensor parallel must divide: heads and widths, by name.

    >>> dividends(nn.TransformerEncoderLayer(d_model=12, nhead=4))
    {'num_heads of MultiheadAttention': 4, 'embed_dim of MultiheadAttention': 12}
    """
    counts = {}
    for holder in _holders(model):
        for name in (*HEADS, *WIDTHS):
            count = getattr(holder, name, None)
            if type(count) is int and count > 0:
                counts[f"{name} of {type(holder).__name__}"] = count
    return counts


def _holders(model: nn.Module) -> Iterator[object]:
    """Yield what may state heads and widths: modules, and the model's config."""
    config = getattr(model, "config", None)
    if config is not None:
        yield config
    yield from model.modules()

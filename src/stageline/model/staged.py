"""A model that is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stageline.model import huggingface
from stageline.model.build.build import Description
from stageline.model.partition.partition import Partition
from stageline.model.skips import parts_of
from stageline.model.stage_module.data_flow import CallOrder, DataFlow
from stageline.model.stage_module.forward_replay import Replay
from stageline.model.stage_module.stage_module import Original, StagePart
from stageline.model.stage_module.traced import TracedModel
from stageline.model.units import Unit


@dataclass(frozen=True)
class Staged:
    """A model cut into stages, whose modules, names and tensors are still the model's own.

    >>> import stageline as sl
    >>> staged = sl.split(nn.Transformer(8, 2, 2, 2, 16, batch_first=True), stages=4)
    >>> print(staged)
    4 stages of Transformer
      0  encoder.layers.0                          600 parameters
      1  encoder.layers.1, encoder.norm            616 parameters
      2  decoder.layers.0                          904 parameters
      3  decoder.layers.1, decoder.norm            920 parameters
    >>> staged.state_dict().keys() == staged.model.state_dict().keys()
    True
    """

    model: nn.Module
    units: tuple[Unit, ...]
    """The units in the order in which the model calls them; a unit that is called twice appears twice."""
    cut: tuple[tuple[int, int], ...]
    """For each stage, its first unit and the one after its last."""
    balance: Partition | None = None
    """For a cut by cost, how even it is; `balance.chart()` draws one bar per rank."""
    traced: TracedModel | None = None
    """The graph, if the model had to be traced."""
    needs: DataFlow | None = None
    """The values that each unit is computed from, if an example showed them."""
    everything: bool = False
    """Whether all values cross all stage boundaries."""
    around: tuple[str, ...] = ()
    """Modules with parameters that belong to no unit, because the forward did not call them: every stage holds them,
    and runs them if a batch has inputs for them."""
    recipe: Description[Any] | None = field(default=None, repr=False)
    """How to create the weights, if the model was given as a function; its tensors have no memory yet."""

    @property
    def names(self) -> list[list[str]]:
        """The names of the units of each stage."""
        return [[unit.name for unit in self.units[start:stop]] for start, stop in self.cut]

    def parts(self) -> list[nn.Sequential]:
        """Return a module for each stage, which holds the stage's units under their own names."""
        if isinstance(self.model, nn.Sequential):
            return parts_of([[(unit.name, unit.module) for unit in self.units[start:stop]] for start, stop in self.cut])
        if self.traced is not None:
            return [self.traced.part(start, stop) for start, stop in self.cut]
        names = tuple(unit.name for unit in self.units)
        modules = {unit.name: Original(unit.module) for unit in self.units}
        defaults = huggingface.defaults_of(self.model)
        parts: list[nn.Sequential] = []
        for start, stop in self.cut:
            replay = Replay(CallOrder(names), start, stop, modules, defaults, self.everything)
            own = set(names[start:stop])
            if self.needs is not None:
                own |= self.needs.units_used(start, stop, stop == len(names))
            parts.append(StagePart(self.model, names, frozenset(own), replay))
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all stages, with the names of the whole model and in its order."""
        state = {name: value for part in self.parts() for name, value in part.state_dict().items()}
        return {name: state[name] for name in self.model.state_dict()}

    def __len__(self) -> int:
        return len(self.cut)

    def __str__(self) -> str:
        lines = [f"{len(self)} stages of {type(self.model).__name__}"]
        for stage, (start, stop) in enumerate(self.cut):
            units = self.units[start:stop]
            size = sum({id(unit.module): unit.size for unit in units}.values())
            lines.append(f"{stage:3}  {listed([unit.name for unit in units]):36} {size:8,} parameters")
        if self.around:
            lines.append(f"every stage holds {listed(self.around)}, which belongs to no unit: it was not called")
        return "\n".join(lines)


def listed(names: Sequence[str]) -> str:
    """Return names as text; of more than two, only the first and the last.

    >>> listed(["a", "b", "c"])
    'a … c'
    """
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"

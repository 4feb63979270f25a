"""Copies of stages that share their weights with the original and gather gradients of their own.

Two uses of one parameter must not add into one `.grad` from two ranks at once, in whatever order they come: a
tied weight is used by two stages, and a family with two directions runs every stage on two ranks. The second use
runs on a *shadow*: a module that shares every tensor's memory with the original, in which the parameters in
question are objects of their own. After the step, their gradients are added to the originals' in a fixed order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stageline.autograd import hooks
from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import has_accumulate_hooks, has_gradient_hooks, share_gradient_hooks
from stageline.runtime.guards.wrappers import wrapper_in
from stageline.schedules.placement import Placement


@dataclass(frozen=True)
class Use:
    """One use of a parameter that several stages or directions use: by which rank, and where its gradients gather."""

    rank: int
    own: nn.Parameter | None
    """The object that gathers this use's gradients; None where the rank is not here."""


@dataclass
class Placed:
    """The modules of the ranks that are here, and the uses of every parameter that has more than one."""

    modules: dict[int, dict[int, nn.Sequential]]
    """For each rank that is here, the module of each of its stages."""
    uses: dict[nn.Parameter, list[Use]]
    """In the order in which the uses' gradients are added: by direction, then by stage."""
    shadows: list[tuple[nn.Sequential, nn.Sequential]]
    """The originals and their shadows."""
    stages: dict[nn.Parameter, list[int]] = field(default_factory=dict)
    """The stages that use each of these parameters."""
    twins: dict[nn.Module, dict[int, object]] = field(default_factory=dict)
    """For each shadow: its copies of what stages share, by the originals' ids."""
    _hooks: int | None = None
    """How many hooks were registered when the originals were last looked at."""

    def start(self, rank: int | None = None) -> None:
        """Begin a step, of a rank or of all: shadows train or evaluate as their originals do, and have no gradients."""
        mine = None if rank is None else set(map(id, self.modules[rank].values()))
        for original, shadow in self.shadows:
            if mine is not None and id(shadow) not in mine:
                continue
            for module, copied in zip(original.modules(), shadow.modules(), strict=True):
                copied.training = module.training
        for parameter, uses in self.uses.items():
            for use in uses:
                if use.own is not None and use.own is not parameter and rank in (None, use.rank):
                    use.own.grad = None
                    # Each direction's hooks see the gradients of its own microbatches.
                    share_gradient_hooks(parameter, use.own)

    def refuse_hooks(self, name_of: Callable[[nn.Parameter], str]) -> None:
        """Refuse hooks and wrappers that expect a gradient which no rank has before the end of a step."""
        if self.shadows and self._hooks != hooks.registered():
            self._hooks = hooks.registered()
            for original, _ in self.shadows:
                refuse_wrapper(original)
        for parameter, stages in self.stages.items():
            if has_accumulate_hooks(parameter) or (has_gradient_hooks(parameter) and len(stages) > 1):
                users = f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else "two ranks, one a direction,"
                raise StagelineError(
                    f"the parameter {name_of(parameter)} has a hook and is used by {users} that add up its "
                    "gradient at the end of a step, so the hook would see parts of it; remove the hook and change "
                    "the gradient after the step, or use a cut and a schedule with one use of the parameter"
                )

    @property
    def scattered(self) -> list[nn.Parameter]:
        """The parameters that several ranks use."""
        return [parameter for parameter, uses in self.uses.items() if len({use.rank for use in uses}) > 1]


def place(
    parts: Sequence[nn.Sequential], placement: Placement, here: Sequence[int], holders: Sequence[object] = ()
) -> Placed:
    """Give every rank that is here the modules of its stages; second uses of a parameter run on shadows.

    `holders` are the objects that layers of several stages reach: a shadow has them, or copies of them.
    """
    order = [
        (int(placement.table[direction, stage]), stage)
        for direction in range(placement.directions)
        for stage in range(placement.stages)
    ]
    count: dict[nn.Parameter, int] = {}
    for _, stage in order:
        for parameter in parts[stage].parameters():
            count[parameter] = count.get(parameter, 0) + 1
    placed = Placed({rank: {} for rank in here}, {}, [])
    for rank, stage in order:
        part, module = parts[stage], parts[stage]
        shared = [parameter for parameter in part.parameters() if count[parameter] > 1]
        again = [parameter for parameter in shared if parameter in placed.uses]
        own: dict[nn.Parameter, nn.Parameter] = {parameter: parameter for parameter in shared}
        if rank in placed.modules:
            if again:
                refuse_wrapper(part)
                twins: dict[int, object] = {}
                module, aliases = shadow_of(part, again, twins)
                placed.twins[module] = {id(each): twins.get(id(each), each) for each in holders}
                own.update(aliases)
                placed.shadows.append((part, module))
            placed.modules[rank][stage] = module
        for parameter in shared:
            if stage not in placed.stages.setdefault(parameter, []):
                placed.stages[parameter].append(stage)
            use = Use(rank, own[parameter] if rank in placed.modules else None)
            placed.uses.setdefault(parameter, []).append(use)
    return placed


def refuse_wrapper(part: nn.Sequential) -> None:
    """Refuse a data-parallel wrapper in a stage that needs a copy."""
    name = wrapper_in(part)
    if name:
        raise StagelineError(
            f"{name} is applied to a stage with {', '.join(key for key, _ in part.named_children())}, whose parameters "
            "other stages or ranks use as well, so that it needs a copy, and the wrapper cannot be copied; use a "
            "schedule with one direction (1f1b), untie the weights, or give the pipeline replicas= instead"
        )


def shadow_of(
    module: nn.Sequential, replaced: Sequence[nn.Parameter], twins: dict[int, object] | None = None
) -> tuple[nn.Sequential, dict[nn.Parameter, nn.Parameter]]:
    """Copy a module's structure; the replaced parameters become aliases, all other tensors stay the same objects.

    `twins` gets every object that was copied, by the id of the original.
    """
    aliases = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad) for parameter in replaced
    }
    memo: dict[int, object] = {} if twins is None else twins
    memo |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo.update({id(parameter): alias for parameter, alias in aliases.items()})
    return copy.deepcopy(module, memo), aliases


def gather(placed: Placed, share: Callable[[Tensor, int], None], everywhere: bool, rank: int | None = None) -> None:
    """Add the uses of every shared parameter in their order, and give all ranks that use it the sum.

    `share` gives all processes the tensor of the rank that owns it; `everywhere` says that all ranks are here, and
    there is nobody to give it to. With `rank`, only what this rank uses.
    """
    for parameter, uses in placed.uses.items():
        if not parameter.requires_grad or (rank is not None and uses[0].rank != rank):
            continue
        total: Tensor | None = None
        for use in uses:
            grad = None if use.own is None else use.own.grad
            if not everywhere:
                grad = _shared(parameter, grad, use.rank, share)
            if grad is not None:
                with torch.no_grad():
                    total = grad if total is None else total.add_(grad)
            if use.own is not None and use.own is not parameter:
                use.own.grad = None
        if any(use.own is not None for use in uses):
            parameter.grad = total


def _shared(
    parameter: nn.Parameter, grad: Tensor | None, owner: int, share: Callable[[Tensor, int], None]
) -> Tensor | None:
    """Let all processes have the gradient of one use, and whether there is one."""
    there = torch.tensor([0.0 if grad is None else 1.0])
    share(there, owner)
    if not there.item():
        return None
    sent = torch.empty_like(parameter) if grad is None else grad.detach().clone()
    share(sent, owner)
    return sent

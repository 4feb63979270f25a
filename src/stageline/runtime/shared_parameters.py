"""Shared parameters: parameters that several stages or directions use, and the aliases that keep their gradients apart.

Two ranks must not add into one `.grad` at the same time, in an order that depends on timing. That would happen to a
tied weight, which two stages use, and with a schedule of two directions, which runs every stage on two ranks. The
second use therefore runs on a copy of the stage that shares the memory of every tensor but holds a *parameter alias* in
place of each shared parameter. After the step, the gradients of the aliases are added to those of the originals in a
fixed order.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stageline.autograd import engine
from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import has_accumulate_hooks, has_gradient_hooks, share_gradient_hooks
from stageline.runtime.guards.backward import wrapper_in
from stageline.schedules.placement import Placement
from stageline.tensors.sharded import is_sharded, local


@dataclass(frozen=True)
class Use:
    """One use of a shared parameter: the rank, and the object that collects its gradients."""

    rank: int
    own: nn.Parameter | None
    """The parameter or alias that collects the gradients of this use; None if the rank is not in this process."""


@dataclass
class Placed:
    """The stage modules of the ranks in this process, and the uses of every shared parameter."""

    modules: dict[int, dict[int, nn.Sequential]]
    """For each rank in this process, the module of each of its stages."""
    uses: dict[nn.Parameter, list[Use]]
    """The uses of each shared parameter, in the order in which their gradients are added: by direction, then stage."""
    copies: list[tuple[nn.Sequential, nn.Sequential]]
    """Pairs of a stage and its copy with parameter aliases."""
    stages: dict[nn.Parameter, list[int]] = field(default_factory=dict)
    """The stages that use each shared parameter."""
    twins: dict[nn.Module, dict[int, object]] = field(default_factory=dict)
    """For each copied stage: its copies of the objects that stages share, by the ids of the originals."""
    _hooks: int | None = None
    """How many hooks were registered when the stages were last checked for wrappers."""

    def start(self, rank: int | None = None) -> None:
        """Start a step of one rank or of all: copies take over the training mode, and aliases have no gradients."""
        mine = None if rank is None else set(map(id, self.modules[rank].values()))
        for original, copied in self.copies:
            if mine is not None and id(copied) not in mine:
                continue
            for module, twin in zip(original.modules(), copied.modules(), strict=True):
                twin.training = module.training
        for parameter, uses in self.uses.items():
            for use in uses:
                if use.own is not None and use.own is not parameter and rank in (None, use.rank):
                    use.own.grad = None
                    # Each direction's hooks see the gradients of its own microbatches.
                    share_gradient_hooks(parameter, use.own)

    def count_once(self) -> None:
        """Start a training step: where stages are not copied, earlier gradients count in the first rank alone."""
        for parameter, uses in self.uses.items():
            if any(use.own is parameter for use in uses[1:]):
                parameter.grad = None

    def refuse_hooks(self, name_of: Callable[[nn.Parameter], str]) -> None:
        """Refuse hooks and wrappers that need the whole gradient, which no rank has before the end of a step."""
        if self.copies and self._hooks != engine.registered_hooks():
            self._hooks = engine.registered_hooks()
            for original, _ in self.copies:
                refuse_wrapper(original)
        for parameter, stages in self.stages.items():
            if has_accumulate_hooks(parameter) or (has_gradient_hooks(parameter) and len(stages) > 1):
                users = f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else "two ranks, one per direction,"
                raise StagelineError(
                    f"the parameter {name_of(parameter)} has a hook and is used by {users} whose gradients are summed "
                    "at the end of a step, so the hook would see partial gradients; remove the hook and change the "
                    "gradient after the step, or choose a split and a schedule in which only one stage uses the "
                    "parameter"
                )

    @property
    def scattered(self) -> list[nn.Parameter]:
        """The parameters that several ranks use."""
        return [parameter for parameter, uses in self.uses.items() if len({use.rank for use in uses}) > 1]


def place_stages(
    parts: Sequence[nn.Sequential],
    placement: Placement,
    here: Sequence[int],
    holders: Sequence[object],
    *,
    sharded: bool = False,
) -> Placed:
    """Give every rank in this process the modules of its stages; a second use of a parameter runs on a copy.

    `parts` is empty if the model is not cut yet. `holders` are objects that layers of several stages reach. A copied
    stage has them or copies of them. `sharded` stages cannot be copied: the uses of a rank that is alone in its process
    add into one gradient.
    """
    alone = sharded and len(here) == 1 and placement.directions == 1
    order = [(rank, stage) for ranks in placement.table.tolist() for stage, rank in enumerate(ranks) if parts]
    count = Counter(parameter for _, stage in order for parameter in parts[stage].parameters())
    placed = Placed({rank: {} for rank in here}, {}, [])
    for rank, stage in order:
        part, module = parts[stage], parts[stage]
        shared = [parameter for parameter in part.parameters() if count[parameter] > 1]
        again = [parameter for parameter in shared if parameter in placed.uses and not alone]
        own: dict[nn.Parameter, nn.Parameter] = {parameter: parameter for parameter in shared}
        if rank in placed.modules:
            if again:
                refuse_wrapper(part)
                twins: dict[int, object] = {}
                module, aliases = copy_with_aliases(part, again, twins)
                placed.twins[module] = {id(holder): twins.get(id(holder), holder) for holder in holders}
                own.update(aliases)
                placed.copies.append((part, module))
            placed.modules[rank][stage] = module
        for parameter in shared:
            if stage not in placed.stages.setdefault(parameter, []):
                placed.stages[parameter].append(stage)
            use = Use(rank, own[parameter] if rank in placed.modules else None)
            uses = placed.uses.setdefault(parameter, [])
            if not alone or all(other.rank != rank for other in uses):
                uses.append(use)
    return placed


def refuse_wrapper(part: nn.Sequential) -> None:
    """Refuse a data-parallel wrapper in a stage that must be copied."""
    name = wrapper_in(part) or ("parallelize" if any(map(is_sharded, part.parameters())) else "")
    if name:
        raise StagelineError(
            f"{name} is applied to a stage with {', '.join(key for key, _ in part.named_children())}, whose "
            "parameters other stages or ranks also use, so the stage must be copied, but the wrapper cannot be "
            "copied; use a schedule "
            "with one direction (1f1b), untie the weights, or pass replicas= to the pipeline instead"
        )


def copy_with_aliases(
    module: nn.Sequential, replaced: Sequence[nn.Parameter], twins: dict[int, object]
) -> tuple[nn.Sequential, dict[nn.Parameter, nn.Parameter]]:
    """Copy the structure of a module; replaced parameters become aliases, and all other tensors stay the same objects.

    `twins` receives every copied object, by the id of the original.
    """
    aliases = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad) for parameter in replaced
    }
    twins |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twins |= {id(parameter): alias for parameter, alias in aliases.items()}
    return copy.deepcopy(module, twins), aliases


def sum_shared_gradients(
    placed: Placed, share: Callable[[Tensor, int], None], everywhere: bool, rank: int | None = None
) -> None:
    """Sum the gradients of every shared parameter in the order of its uses, and give the sum to all ranks that use it.

    `share` broadcasts a tensor from the rank that owns it. `everywhere` means that all ranks are in this process, so
    nothing is sent. With `rank`, only the parameters whose first user is this rank are summed.
    """
    for parameter, uses in placed.uses.items():
        if not parameter.requires_grad or len(uses) == 1 or (rank is not None and uses[0].rank != rank):
            continue
        total: Tensor | None = None
        here = any(use.own is not None for use in uses)
        for use in uses:
            grad = None if use.own is None or use.own.grad is None else local(use.own.grad)
            if not everywhere:
                grad = _broadcast(parameter, here, grad, use.rank, share)
            if grad is not None:
                with torch.no_grad():
                    total = grad if total is None else total.add_(grad)
            if use.own is not None and use.own is not parameter:
                use.own.grad = None
        if here:
            parameter.grad = total if total is None else _like(total, parameter)


def _like(total: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient of this process's part, in the form of its parameter."""
    if not is_sharded(parameter):
        return total
    grad = torch.empty_like(parameter)
    local(grad).copy_(total)
    return grad


def _broadcast(
    parameter: nn.Parameter, here: bool, grad: Tensor | None, owner: int, share: Callable[[Tensor, int], None]
) -> Tensor | None:
    """Broadcast the gradient of one use, which may be None; `here` says whether a rank of this process uses it."""
    elements = torch.tensor([-1 if grad is None else grad.numel()])
    share(elements, owner)
    if elements.item() < 0:
        return None
    if grad is not None:
        sent = grad.detach().clone()
    elif here:
        sent = torch.empty_like(local(parameter))
    else:  # it may have no memory here, or be whole where users have parts
        sent = torch.empty(int(elements.item()), dtype=parameter.dtype)
    share(sent, owner)
    return sent

"""The part of an optimizer that steps one rank's parameters, and the rollback of its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stageline.common.errors import StagelineError, shorten
from stageline.runtime._torch_private import mark_stepped, pytree, version_of
from stageline.runtime.optimizer_step import scale_gradients

Options: TypeAlias = list[dict[str, Any]]
"""The options of the groups of an optimizer: learning rates, momenta, weight decays."""
Make: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]


def find_optimizer(optimizer_or_make: Optimizer | Make, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer that was passed, or the one that the passed function returns; over these parameters only."""
    optimizer: Any = optimizer_or_make
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(parameters) if callable(optimizer) else None
    if not isinstance(optimizer, Optimizer):
        raise StagelineError(
            "optimizer= must be a torch optimizer, or a function from parameters to one; got "
            f"{shorten(optimizer_or_make) if optimizer is None else f'a function that returns {shorten(optimizer)}'}"
        )
    own = set(parameters)
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in own]
    if foreign:
        raise StagelineError(
            f"the optimizer has {len(foreign)} parameters that do not belong to this pipeline, the first of shape "
            f"{tuple(foreign[0].shape)}; create it with pipe.parameters()"
        )
    return optimizer


def options_of(optimizer: Optimizer) -> Options:
    """A copy of the options of its groups."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


class OptimizerPart:
    """Steps the parameters of one rank with the state and the options of the whole optimizer.

    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> whole = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5, momentum=0.9)
    >>> part = OptimizerPart(whole, list(first.parameters()))
    >>> first(torch.ones(1, 2)).sum().backward()
    >>> part.step()
    >>> len(whole.state)
    2
    """

    def __init__(self, whole: Optimizer, mine: Sequence[nn.Parameter]) -> None:
        own = set(mine)
        groups = [[parameter for parameter in group["params"] if parameter in own] for group in whole.param_groups]
        self._numbers = [number for number, group in enumerate(groups) if group]
        self.parameters = [parameter for group in groups for parameter in group]
        self._whole = len(self.parameters) == sum(len(group["params"]) for group in whole.param_groups)
        self._all = whole
        self.optimizer = whole if self._whole else self._restricted(whole, groups)

    def _restricted(self, whole: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        # A learning-rate scheduler replaces `step` by a method that would step the whole optimizer.
        part: Optimizer = object.__new__(type(whole))
        part.__dict__.update({name: value for name, value in whole.__dict__.items() if name != "step"})
        part.param_groups = [{**whole.param_groups[number], "params": groups[number]} for number in self._numbers]
        return part

    def step(self) -> None:
        """Step the parameters of this rank, with the current options of the whole optimizer."""
        if self._whole:
            self.optimizer.step()
            return
        mine = [options_of(self._all)[number] for number in self._numbers]
        for group, values in zip(self.optimizer.param_groups, mine, strict=True):
            group.update(values)
        if mine:
            self.optimizer.step()
        mark_stepped(self._all)
        for group, values in zip(self.optimizer.param_groups, mine, strict=True):
            changed = next((name for name, value in values.items() if group[name] is not value), None)
            if changed is not None:
                raise StagelineError(
                    f"{type(self.optimizer).__name__} changes {changed!r} of its groups when it steps, so it cannot "
                    "step the parameters of one rank alone; use pipe.step and optimizer.step()"
                )


class Snapshot:
    """A copy of the parameters and the optimizer state; the next `take` reuses its memory.

    >>> linear = nn.Linear(2, 2)
    >>> part = OptimizerPart(torch.optim.Adam(linear.parameters()), list(linear.parameters()))
    >>> snapshot, before = Snapshot(part), linear.weight.detach().clone()
    >>> snapshot.take()
    >>> linear(torch.ones(1, 2)).sum().backward()
    >>> part.step()
    >>> snapshot.restore()
    >>> torch.equal(linear.weight, before), len(part.optimizer.state), snapshot.bytes
    (True, 0, 24)
    """

    def __init__(self, part: OptimizerPart) -> None:
        self._part = part
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor: the tensor, and its copy."""
        self._states: dict[nn.Parameter, tuple[list[Any], Any]] = {}
        self._options: Options = []

    def take(self) -> None:
        """Copy everything."""
        before, self._copies = self._copies, {}
        state: Mapping[Any, Any] = self._part.optimizer.state
        for parameter in self._part.parameters:
            self._save(parameter, before)
        self._states = {}
        for parameter in self._part.parameters:
            if parameter in state:
                leaves, tree = pytree.tree_flatten(dict(state[parameter]))
                self._states[parameter] = ([self._save(leaf, before) for leaf in leaves], tree)
        self._options = options_of(self._part.optimizer)

    def _save(self, leaf: Any, before: Mapping[int, tuple[Tensor, Tensor]]) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        if id(leaf) not in self._copies:
            _, room = before.get(id(leaf), (None, None))
            fits = room is not None and room.shape == leaf.shape and room.dtype == leaf.dtype
            kept = room if room is not None and fits else torch.empty_like(leaf, requires_grad=False)
            self._copies[id(leaf)] = (leaf, kept.copy_(leaf.detach()))
        return leaf

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; may be called again."""
        for tensor, saved in self._copies.values():
            tensor.copy_(saved)
        state: Any = self._part.optimizer.state
        for parameter in self._part.parameters:
            if parameter in self._states:
                leaves, tree = self._states[parameter]
                state[parameter] = pytree.tree_unflatten(
                    [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves], tree
                )
            else:
                state.pop(parameter, None)
        for group, values in zip(self._part.optimizer.param_groups, self._options, strict=True):
            group.update(values)

    @property
    def bytes(self) -> int:
        """The memory of the copies."""
        return sum(saved.nbytes for _, saved in self._copies.values())


class Gradients:
    """The gradients of a step whose update may have to be repeated, kept apart from the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._versions: list[int] = []
        self._copied = True
        """Whether copies are kept, because the optimizer may change gradients as it steps."""

    def before(self) -> None:
        """Keep them, before the optimizer steps."""
        own = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._versions = [version_of(grad) for _, grad in own]
        self._kept = [(parameter, grad.clone() if self._copied else grad) for parameter, grad in own]

    def after(self) -> None:
        """Take them from the parameters, after the optimizer has stepped."""
        now = [parameter.grad for parameter, _ in self._kept]
        changed = any(
            grad is None or version_of(grad) != version for grad, version in zip(now, self._versions, strict=True)
        )
        if changed and not self._copied:
            raise StagelineError(
                "the optimizer changed gradients in place, but not in its first step; use an optimizer that does the "
                "same in every step, or use pipe.step and optimizer.step()"
            )
        self._copied = changed
        for parameter in self._parameters:
            parameter.grad = None

    def put_back(self, factor: Tensor) -> None:
        """Return them to the parameters, clipped by a factor."""
        scale_gradients([grad for _, grad in self._kept], factor)
        for parameter, grad in self._kept:
            parameter.grad = grad

    def forget(self) -> None:
        """Release them."""
        self._kept = []

    @property
    def bytes(self) -> int:
        """The memory of the gradients."""
        return sum(grad.nbytes for _, grad in self._kept)

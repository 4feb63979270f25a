"""Foreign reads: layers that read a parameter of another stage through a list, a closure, a global or an attribute.

The layer does not register such a parameter, so its stage neither holds nor trains it. If ranks are processes, the
value is stale and its gradient is lost. If they are threads, two ranks add into one gradient at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.reachability import reached_tensors
from stageline.model.stage_module.placeholder import PlaceholderTensor
from stageline.model.stage_module.stage_module import StagePart
from stageline.runtime._torch_private import pytree, storage_id
from stageline.runtime.guards.loss_reads import ReadWatch, Tensors, leaves_below


def holders_of(parts: Sequence[nn.Module]) -> dict[nn.Parameter, tuple[str, tuple[int, ...]]]:
    """The name of every parameter and the stages that hold it.

    >>> one, two = nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Sequential()
    >>> list(holders_of([one, two]).values())
    [('0.weight', (0,))]
    """
    holders: dict[nn.Parameter, tuple[str, tuple[int, ...]]] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            known, stages = holders.get(parameter, (name, ()))
            holders[parameter] = (known, (*stages, stage))
    return holders


class ForeignReads:
    """Calls the layers of one stage, and refuses any that reads a parameter that only other stages hold."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        holders: Mapping[nn.Parameter, tuple[str, tuple[int, ...]]],
        twins: Mapping[int, Any],
        *,
        alone: bool,
        functions: bool = True,
    ) -> None:
        """`module` is the module of the stage; `twins` maps other stages' parameters to this stage's copies of them.

        `alone` means that all stages are in this process. `functions` is False if a compiler runs the layers; then only
        their autograd graph is checked.
        """
        self._stage, self._alone, self._functions = stage, alone, functions
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        foreign = [(name, value, stages) for value, (name, stages) in holders.items() if id(value) not in own]
        copies = [(name, twins.get(id(value), value), stages) for name, value, stages in foreign]
        watched = [(name, value, stages) for name, value, stages in (*foreign, *copies) if id(value) not in own]
        self._tensors = Tensors((name, value) for name, value, _ in watched)
        self._stages = {name: stages for name, _, stages in watched}
        self._by_name = {name: value for name, value, _ in foreign}
        self._own = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())} | {None}

    def call(self, name: str, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer, and refuse it if it reads parameters of other stages."""
        trains = torch.is_grad_enabled()
        leaves = pytree.tree_leaves((args, kwargs))
        passed = self._own.union(storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor))

        def name_of(tensor: Tensor) -> str | None:
            known = self._tensors.exactly(tensor)
            if known is None and storage_id(tensor) not in passed:
                known = self._tensors.name(tensor)
            # Threads share memory, so only parameters that this step trains are at risk.
            return (
                known if known is None or not self._alone or (trains and self._by_name[known].requires_grad) else None
            )

        if not self._functions:
            output = layer(*args, **kwargs)
        else:
            watch = ReadWatch(name_of, unless=PlaceholderTensor)
            try:
                with watch:
                    output = layer(*args, **kwargs)
            except BaseException as error:
                if watch.names and not isinstance(error, StagelineError | KeyboardInterrupt | SystemExit):
                    raise self._refusal(name, list(watch.names)) from error
                raise
            if watch.names:
                raise self._refusal(name, list(watch.names))
        self.look(name, output, (args, kwargs))
        return output

    def look(self, name: str, output: Any, inputs: Any = ()) -> None:
        """Refuse an output whose backward would reach parameters of other stages."""
        ends = [leaf.grad_fn for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.grad_fn]
        for root in pytree.tree_leaves(output):
            if not isinstance(root, Tensor) or not root.requires_grad or root.grad_fn in ends:
                continue
            names = [known for leaf in leaves_below(root, ends) if (known := self._tensors.exactly(leaf)) is not None]
            if names:
                raise self._refusal(name, names)

    def _refusal(self, layer: str, names: list[str]) -> StagelineError:
        first, stages = names[0], self._stages[names[0]]
        reader = f"layer {layer} of stage" if layer else "the forward of the model, on stage"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        where = f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
        both = f"layer {layer} as well" if layer else "the unit that uses it as well"
        return StagelineError(
            f"{reader} {self._stage} reads the parameter {first}{more} of {where} through a plain reference: the value "
            f"would be stale there and its gradient lost. Register the parameter or its module in {both} (self.tied = "
            "module): weights that several stages register are kept equal. Or let the stage that holds it pass on the "
            "values that are needed"
        )


def readers(
    parts: Sequence[nn.Module], layers: Sequence[Sequence[tuple[str, nn.Module]]], here: Iterable[int]
) -> frozenset[int]:
    """The stages that can reach a parameter of another stage; only those are watched.

    >>> emb, head = nn.Embedding(3, 2), nn.Linear(2, 3)
    >>> parts = [nn.Sequential(emb), nn.Sequential(head)]
    >>> readers(parts, [[("emb", emb)], [("head", head)]], [0, 1])
    frozenset()
    >>> head.tied = [emb]
    >>> readers(parts, [[("emb", emb)], [("head", head)]], [0, 1])
    frozenset({1})
    """
    holders = holders_of(parts)
    memory = {storage_id(parameter): parameter for parameter in holders}
    memory.pop(None, None)
    stages: list[int] = []
    framed: set[nn.Parameter] | None = None
    for stage in here:
        part = parts[stage]
        seen = _parameters(layers[stage], (), holders, memory)
        if isinstance(part, StagePart):
            if framed is None:
                framed = _parameters((), part.frame_modules(), holders, memory)
            seen = seen | framed
        own = set(part.parameters())
        own_memory = {storage_id(tensor) for tensor in own}
        if any(parameter not in own and storage_id(parameter) not in own_memory for parameter in seen):
            stages.append(stage)
    return frozenset(stages)


def _parameters(
    layers: Sequence[tuple[str, nn.Module]],
    frames: Sequence[nn.Module],
    holders: Mapping[nn.Parameter, Any],
    memory: Mapping[int | None, nn.Parameter],
) -> set[nn.Parameter]:
    tensors = reached_tensors(layers, frames)
    if tensors is None:  # too many objects to search: assume all
        return set(holders)
    known = {id(parameter) for parameter in holders}
    return {
        tensor if isinstance(tensor, nn.Parameter) and id(tensor) in known else memory[storage_id(tensor)]
        for tensor in tensors
        if id(tensor) in known or storage_id(tensor) in memory
    }

"""Foreign reads: layers and loss functions that read a parameter of another stage.

Every stage holds and trains the parameters that its layers register. A layer can reach others through a list, a
closure, a global or an attribute, and so can loss_fn. If ranks are processes, the value is stale and its gradient is
lost. If they are threads, two ranks add into one gradient at the same time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stageline.common.errors import StagelineError
from stageline.model.reachability import reached_tensors
from stageline.model.stage_module.placeholder import PlaceholderTensor
from stageline.model.stage_module.stage_module import StagePart
from stageline.runtime._torch_private import pytree, storage_id

_VALUES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag"})
"""The attributes of a tensor that return its values; all others describe its type or shape."""
_SHAPES = [
    "__hash__", "__len__", "__repr__", "__format__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "element_size", "is_floating_point", "is_complex", "is_contiguous", "get_device", "type", "data_ptr",
    "is_same_size", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
]  # fmt: skip
_FORM = frozenset(_SHAPES)
"""Functions that use the type or shape of their arguments, not their values."""
_AS = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})
"""Functions that use only the values of their first argument."""

Holders = Mapping[nn.Parameter, tuple[str, tuple[int, ...]]]
"""The name of every parameter and the stages that hold it."""


# Recognising tensors, and recording which are read.


class NamedTensors:
    """Named tensors, recognised by identity or by memory."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], replaced: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Those that are `replaced` may still be held by somebody, and are known only as long as that."""
        self._kept = list(named)  # keeps the tensors alive: their ids are valid only that long
        self._by_id = {id(tensor): name for name, tensor in reversed(self._kept)}
        self._by_storage = {storage_id(tensor): name for name, tensor in reversed(self._kept)}
        self._by_storage.pop(None, None)
        for name, tensor in replaced:
            if id(tensor) not in self._by_id:
                self._by_id[id(tensor)] = name
                weakref.finalize(tensor, self._by_id.pop, id(tensor), None)
                storage = storage_id(tensor)
                if storage is not None and storage not in self._by_storage:
                    self._by_storage[storage] = name
                    weakref.finalize(tensor, self._by_storage.pop, storage, None)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._by_id or storage_id(tensor) in self._by_storage

    def exactly(self, tensor: Tensor) -> str | None:
        """The name of the tensor itself."""
        return self._by_id.get(id(tensor))

    def name(self, tensor: Tensor, passed: Container[int | None] = ()) -> str | None:
        """The name of the tensor, or of the one it shares memory with, unless that memory is among `passed`."""
        known = self._by_id.get(id(tensor))
        if known is None and (storage := storage_id(tensor)) not in passed:
            known = self._by_storage.get(storage)
        return known


class ReadWatch(TorchFunctionMode):
    """Records the tensors whose values are read while it is active."""

    def __init__(self, name: Callable[[Tensor], str | None], unless: type[Tensor] | None = None) -> None:
        """`name` returns the name of a tensor to record; calls with a tensor of the class `unless` are ignored."""
        super().__init__()
        self._name, self._unless = name, unless
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # the compiled graph shows the parameters it reads
            return func(*args, **kwargs)
        called = getattr(func, "__name__", "")
        reads = called not in _FORM
        if called == "__get__":
            reads = getattr(getattr(func, "__self__", None), "__name__", "") in _VALUES
        if reads:
            tensors = list(_tensors((args[:1] if called in _AS else args, {} if called in _AS else kwargs)))
            if self._unless is None or not any(isinstance(tensor, self._unless) for tensor in tensors):
                names = (self._name(tensor) for tensor in tensors)
                self.names.update((name, None) for name in names if name is not None)
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def leaves_below(root: Tensor, ends: Iterable[Any] = ()) -> Iterator[Tensor]:
    """The leaves that a backward from `root` reaches without passing the nodes `ends`.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_below((weight * 3).sum())]
    [True]
    """
    if root.grad_fn is None:
        if root.requires_grad:
            yield root
        return
    seen, waiting = {root.grad_fn, *ends}, [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def reaches(function: Any, model: NamedTensors, own: NamedTensors | None = None) -> bool:
    """Whether a function can reach tensors of the model, except `own`, through a closure, a global or an object.

    >>> layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> model = NamedTensors(layer.named_parameters())
    >>> reaches(lambda x: layer(x), model), reaches(lambda x: other(x), model)
    (True, False)
    """
    tensors = reached_tensors([("", function)])
    return tensors is None or any(tensor in model and (own is None or tensor not in own) for tensor in tensors)


def listed(names: list[str], most: int = 4) -> str:
    """At most `most` names, and how many there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, … (3 in all)'
    """
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, … ({len(names)} in all)"


# Loss functions.


def is_torch_function(function: Any) -> bool:
    """Whether a loss function is one of torch's own, which reads nothing but its arguments.

    >>> is_torch_function(nn.functional.mse_loss), is_torch_function(lambda output, target: output.sum())
    (True, False)
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    own = module is not None and module.__name__.partition(".")[0] == "torch"
    return own and isinstance(function, FunctionType) and getattr(module, function.__name__, None) is function


class LossReads:
    """Calls loss_fn, and refuses it if it reads parameters that the last stage does not hold alone.

    The first step is always watched. Later steps are watched only if loss_fn can reach such parameters; otherwise the
    autograd graph of one microbatch of each step is checked.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], model: NamedTensors, own: Iterable[Tensor], *, alone: bool
    ) -> None:
        """`model` holds the tensors of the model, `own` those that only the last stage uses.

        `alone` means that all ranks are in this process and one of them runs the last stage: a loss_fn with its own
        parameters then trains them as a plain loop does.
        """
        self._loss_fn, self._model, self._alone = loss_fn, model, alone
        self._own = NamedTensors((model.name(tensor) or "", tensor) for tensor in own)
        self._seen: set[int] = set()
        self._first = True
        self._always = reaches(loss_fn, model, self._own)
        self._step = -1

    def __call__(self, output: Any, target: Any, step: int, microbatch: int) -> Any:
        """Call loss_fn, and check what it reads where needed."""
        if self._first and microbatch in self._seen:
            self._first = self._always
        self._seen.add(microbatch)
        if not self._first and step == self._step:
            return self._loss_fn(output, target)
        self._step = step
        passed = [leaf for leaf in pytree.tree_leaves((output, target)) if isinstance(leaf, Tensor)]
        names: dict[str, None] = {}
        loss = self._call_watched(output, target, passed, names) if self._first else self._loss_fn(output, target)
        root = loss[0] if isinstance(loss, tuple) and loss else loss
        if isinstance(root, Tensor):
            self._check_graph(root, passed, names)
        return loss

    def _call_watched(self, output: Any, target: Any, passed: list[Tensor], names: dict[str, None]) -> Any:
        memory = {storage_id(leaf) for leaf in passed}
        watch = ReadWatch(lambda tensor: None if tensor in self._own else self._model.name(tensor, memory))
        try:
            with watch:
                loss = self._loss_fn(output, target)
        except Exception as error:
            if watch.names:  # it failed because the weights are missing here
                raise _refusal(list(watch.names)) from error
            raise
        names.update(watch.names)
        return loss

    def _check_graph(self, root: Tensor, passed: list[Tensor], names: dict[str, None]) -> None:
        """Refuse a loss whose backward would reach parameters of other stages."""
        ends = [leaf.grad_fn for leaf in passed if leaf.grad_fn is not None]
        passed_ids = set(map(id, passed))
        foreign = [leaf for leaf in leaves_below(root, ends) if leaf not in self._own]
        names.update((name, None) for leaf in foreign if (name := self._model.exactly(leaf)) is not None)
        if names:
            raise _refusal(list(names))
        strange = [leaf for leaf in foreign if id(leaf) not in passed_ids]
        if strange and not self._alone:
            raise _refusal_of_own(self._loss_fn, strange)


def _refusal(names: list[str]) -> StagelineError:
    many = f"{len(names)} parameters or buffers" if len(names) > 1 else "a parameter or buffer"
    return StagelineError(
        f"loss_fn reads {many} of the model that are not only on the last stage: {listed(names)}; each stage updates "
        "its own copy, so loss_fn would see stale values and lose gradients. For a penalty on parameters, use "
        "Pipeline(…, penalty=lambda name, parameter: 0.1 * parameter.pow(2).sum()), which each rank applies to its "
        "own; compute anything else that needs a weight in the stage that holds it"
    )


def _refusal_of_own(loss_fn: Any, strange: list[Tensor]) -> StagelineError:
    known = {id(own): name for name, own in loss_fn.named_parameters()} if isinstance(loss_fn, nn.Module) else {}
    names = [known.get(id(leaf), f"one of shape {tuple(leaf.shape)}") for leaf in strange]
    return StagelineError(
        f"loss_fn trains {len(names)} parameters that are not in the model: {listed(names)}; only a rank that runs the "
        "last stage would compute their gradients. Put them into the last layer of the model and pass it the targets "
        "with the inputs, or freeze them (requires_grad_(False)) if they are not trained"
    )


# Layers.


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
        holders: Holders,
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
        tensors = [*module.parameters(), *module.buffers()]
        own = set(map(id, tensors))
        self._by_name = {name: value for value, (name, _) in holders.items() if id(value) not in own}
        self._stages = {name: stages for name, stages in holders.values() if name in self._by_name}
        copies = [(name, twins.get(id(value), value)) for name, value in self._by_name.items()]
        watched = (*self._by_name.items(), *copies)
        self._tensors = NamedTensors((name, value) for name, value in watched if id(value) not in own)
        self._own = {None, *map(storage_id, tensors)}

    def call(self, name: str, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer, and refuse it if it reads parameters of other stages."""
        trains = torch.is_grad_enabled()
        leaves = pytree.tree_leaves((args, kwargs))
        passed = self._own.union(storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor))

        def name_of(tensor: Tensor) -> str | None:
            known = self._tensors.name(tensor, passed)
            if known is None or not self._alone:
                return known
            # Threads share memory, so only parameters that this step trains are at risk.
            return known if trains and self._by_name[known].requires_grad else None

        if not self._functions:
            output = layer(*args, **kwargs)
        else:
            watch = ReadWatch(name_of, unless=PlaceholderTensor)
            try:
                with watch:
                    output = layer(*args, **kwargs)
            except Exception as error:
                if watch.names and not isinstance(error, StagelineError):
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
            f"{reader} {self._stage} reads the parameter {first}{more} of {where} through a plain reference, so the "
            f"value would be stale and its gradient lost. Register the parameter or its module in {both} (self.tied = "
            "module): weights that several stages register are kept equal. Or have the stage that owns it output the "
            "needed values"
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
    holders: Holders,
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

"""Loss reads: loss_fn may read only parameters that the last stage holds alone.

Every stage updates its own parameters. If ranks are processes, loss_fn sees stale or missing values of other stages. If
they are threads, two of them would add into one gradient at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stageline.common.errors import StagelineError
from stageline.model.reachability import reached_tensors
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


class Tensors:
    """Named tensors, recognised by identity or by memory."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.named = list(named)  # keeps the tensors alive: their ids are valid only that long
        self._by_id = {id(tensor): name for name, tensor in reversed(self.named)}
        self._by_storage = {storage_id(tensor): name for name, tensor in reversed(self.named)}
        self._by_storage.pop(None, None)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._by_id or storage_id(tensor) in self._by_storage

    def name(self, tensor: Tensor) -> str | None:
        """The name of the tensor, or of the one it shares memory with."""
        return self._by_id.get(id(tensor)) or self._by_storage.get(storage_id(tensor))

    def exactly(self, tensor: Tensor) -> str | None:
        """The name of the tensor itself."""
        return self._by_id.get(id(tensor))


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
            if self._unless is not None and any(isinstance(tensor, self._unless) for tensor in tensors):
                tensors = []
            for tensor in tensors:
                name = self._name(tensor)
                if name is not None:
                    self.names[name] = None
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


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


def is_torch_function(function: Any) -> bool:
    """Whether a loss function is one of torch's own, which reads nothing but its arguments.

    >>> is_torch_function(nn.functional.mse_loss), is_torch_function(lambda output, target: output.sum())
    (True, False)
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    own = module is not None and module.__name__.partition(".")[0] == "torch"
    return own and isinstance(function, FunctionType) and getattr(module, function.__name__, None) is function


class LossReads:
    """Calls loss_fn, and refuses it if it reads parameters of other stages.

    The first step is always watched. Later steps are watched only if loss_fn can reach such parameters; otherwise the
    autograd graph of one microbatch of each step is checked.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], model: Tensors, own: Iterable[Tensor], *, alone: bool
    ) -> None:
        """`model` holds the tensors of the model, `own` those that only the last stage uses.

        `alone` means that all ranks are in this process and one of them runs the last stage: a loss_fn with its own
        parameters then trains them as a plain loop does.
        """
        self._loss_fn, self._model, self._alone = loss_fn, model, alone
        self._own = Tensors((model.name(tensor) or "", tensor) for tensor in own)
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
        ends = [leaf.grad_fn for leaf in passed if leaf.grad_fn is not None]
        names: dict[str, None] = {}
        loss = self._call_watched(output, target, passed, names) if self._first else self._loss_fn(output, target)
        root = loss[0] if isinstance(loss, tuple) and loss else loss
        if isinstance(root, Tensor):
            self._check_graph(root, ends, passed, names)
        return loss

    def _call_watched(self, output: Any, target: Any, passed: list[Tensor], names: dict[str, None]) -> Any:
        memory = {storage_id(leaf) for leaf in passed} - {None}

        def name(tensor: Tensor) -> str | None:
            known = self._model.exactly(tensor)
            if known is None and storage_id(tensor) not in memory:
                known = self._model.name(tensor)
            return None if known is None or tensor in self._own else known

        watch = ReadWatch(name)
        try:
            with watch:
                loss = self._loss_fn(output, target)
        except Exception as error:
            if watch.names:  # it failed because the weights are missing here
                raise _refusal(list(watch.names)) from error
            raise
        names.update(watch.names)
        return loss

    def _check_graph(self, root: Tensor, ends: list[Any], passed: list[Tensor], names: dict[str, None]) -> None:
        """Refuse a loss whose backward would reach parameters of other stages."""
        strange: list[Tensor] = []
        passed_ids = set(map(id, passed))
        for leaf in leaves_below(root, ends):
            known = self._model.exactly(leaf)
            if known is not None and leaf not in self._own:
                names[known] = None
            elif known is None and leaf not in self._own and id(leaf) not in passed_ids:
                strange.append(leaf)
        if names:
            raise _refusal(list(names))
        if strange and not self._alone:
            raise _refusal_of_own(self._loss_fn, strange)


def reaches(function: Any, model: Tensors, own: Tensors | None = None) -> bool:
    """Whether a function can reach tensors of the model, except `own`, through a closure, a global or an object.

    >>> layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> model = Tensors(layer.named_parameters())
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


def _refusal(names: list[str]) -> StagelineError:
    many = f"{len(names)} parameters or buffers" if len(names) > 1 else "a parameter or buffer"
    return StagelineError(
        f"loss_fn reads {many} of the model that the last stage does not hold alone: {listed(names)}; every stage "
        "updates its own, so loss_fn would see stale values and lose their gradients. For a penalty on parameters, use "
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

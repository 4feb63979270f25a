"""Recomputing activations instead of keeping them: those of whole stages, of chosen modules, or of their operators.

While a chosen module runs, autograd saves a handle in place of every tensor. The first handle that a backward opens
recomputes the module and fills all handles. I and W may both open a handle, and the module is still recomputed only
once. A handle dies with the node that saved it, and its tensor with it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from stageline.autograd._torch_private import pytree, version_of
from stageline.common.errors import StagelineError, shorten
from stageline.tensors.buffers import Buffers
from stageline.tensors.copies import detached
from stageline.tensors.random_numbers import generator_state, replayed
from stageline.tensors.thread_context import autocasts

Choice: TypeAlias = Literal["none", "stage"] | str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[Any]
"""What to recompute: nothing, every stage as a whole, or modules by name, class or a function of both."""

Policy: TypeAlias = Callable[..., Any] | Sequence[Any]
"""torch's policy for selective checkpointing: a function of context and operator, or the operators to keep."""


@dataclass(frozen=True)
class Recompute:
    """The options `recompute` and `recompute_policy` of a pipeline."""

    stages: bool = False
    """Whether every stage runs its forward again before its backward."""
    chosen: Callable[[str, nn.Module], bool] | None = None
    """Or the modules for which this is true."""
    policy: Policy | None = None
    owner: int = field(default_factory=itertools.count().__next__, compare=False, repr=False)
    """Identifies the pipeline: pipelines that share a model recompute only their own choice."""


def parse_recompute(choice: Choice, policy: Policy | None) -> Recompute:
    """Read the options `recompute` and `recompute_policy`.

    >>> parse_recompute("stage", None)
    Recompute(stages=True, chosen=None, policy=None)
    >>> parse_recompute(["*.mlp", nn.Linear], None).chosen("3.mlp", nn.Identity())
    True
    """
    if policy is not None and not (callable(policy) or isinstance(policy, list | tuple)):
        raise StagelineError(f"recompute_policy must be a function or a list of operators, got {shorten(policy)}")
    if isinstance(choice, str) and choice == "none":
        return Recompute() if policy is None else Recompute(chosen=_is_layer, policy=policy)
    if isinstance(choice, str) and choice == "stage":
        if policy is not None:
            raise StagelineError(
                "recompute='stage' recomputes whole stages, but a policy keeps some operators of modules; leave "
                "recompute out to apply the policy to every layer, or choose modules by name or class"
            )
        return Recompute(stages=True)
    items = list(choice) if isinstance(choice, list | tuple | set | frozenset) else [choice]
    for item in items:
        if isinstance(item, str) and item in ("none", "stage"):
            raise StagelineError(
                f"recompute={item!r} cannot be part of a list; a list can contain names, classes or functions"
            )
        if not (isinstance(item, str) or callable(item)):
            raise StagelineError(
                "recompute must be 'none', 'stage', or modules chosen by name ('*.mlp'), class or a function of name "
                f"and module; got {shorten(item)}"
            )

    def chosen(name: str, module: nn.Module) -> bool:
        return any(_fits(item, name, module) for item in items)

    return Recompute(chosen=chosen, policy=policy)


def _is_layer(name: str, module: nn.Module) -> bool:
    return "." not in name


def _fits(item: Any, name: str, module: nn.Module) -> bool:
    if isinstance(item, str):
        return fnmatchcase(name, item)
    if isinstance(item, type):
        return isinstance(module, item)
    return bool(item(name, module))


class _Active(threading.local):
    """Per thread: the pipeline that trains in it, and the chosen module that runs now."""

    owner = -1
    """The pipeline whose step trains in this thread; -1 for none."""
    frame: _Frame | None = None


_active = _Active()


@contextmanager
def training(options: Recompute) -> Iterator[None]:
    """Let chosen modules that run in this thread be recomputed in their backward."""
    _active.owner = options.owner
    try:
        yield
    finally:
        _active.owner = -1
        if _active.frame is not None:  # the module raised
            _active.frame.leave()


def _first_names(model: nn.Module) -> str:
    return ", ".join([name for name, _ in model.named_modules() if name][:4])


def mark(model: nn.Module, options: Recompute, choice: Choice) -> list[str]:
    """Let the chosen modules be recomputed, only in steps; return their names."""
    if options.chosen is None:
        return []
    names = []
    for name, module in model.named_modules():
        if name and options.chosen(name, module):
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise StagelineError(
                    f"module {name} is compiled by module.compile(), so recompute={shorten(choice)} cannot apply to "
                    "it; leave it out, or compile a module inside or around it"
                )
            names.append(name)
            module.register_forward_pre_hook(
                _Enter(name, options.policy, options.owner), prepend=True, with_kwargs=True
            )
            module.register_forward_hook(_leave)
    if not names:
        raise StagelineError(
            f"recompute={shorten(choice)} matches no module of the model; pass 'none' or 'stage', or modules by "
            f"name ('*.mlp'), class or a function of name and module; the first names are {_first_names(model)}"
        )
    return names


@dataclass(frozen=True)
class _Enter:
    """The hook that puts handles in place of what autograd saves."""

    name: str
    policy: Policy | None
    owner: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Of nested modules, the outermost is recomputed, with everything in it.
        if torch.compiler.is_dynamo_compiling():
            return  # a compiler decides itself what to keep
        if _active.owner == self.owner and _active.frame is None and torch.is_grad_enabled():
            _active.frame = _Frame(self.name, module, args, kwargs, self.policy)
            _active.frame.enter()


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    if _active.frame is not None and _active.frame.module is module:
        _active.frame.leave()


_inner: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Of modules that ran: whether they run a backward inside their forward, which reads what they save."""

_buffers: weakref.WeakKeyDictionary[nn.Module, Buffers] = weakref.WeakKeyDictionary()


def _versions(tree: Any) -> list[int]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Handle:
    """What autograd saves in place of a tensor."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: _Frame) -> None:
        self.frame: _Frame | None = frame
        self.tensor: Tensor | None = None


class _Enough(Exception):
    """Every tensor that is still needed was recomputed; the rest of the module need not run."""


class _Frame:
    """One run of a chosen module."""

    def __init__(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None
    ) -> None:
        self.name, self.module = name, module
        self.arguments = (args, kwargs)
        self.handles: list[weakref.ref[_Handle]] = []
        self.state = generator_state()
        self.versions = _versions(self.arguments)
        self.buffers = _buffers.setdefault(module, Buffers(module))
        self.before = self.buffers.before()
        self.autocast = autocasts()
        if policy is None:
            self.first, self.second = nullcontext(), nullcontext()
        else:
            self.first, self.second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        self._stack = ExitStack()
        self.running = True
        self._keeps = _inner.get(module, True)

    def enter(self) -> None:
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._stack.enter_context(self.first)

    def leave(self) -> None:
        _active.frame = None
        self._stack.close()
        self.running = False
        if self._keeps:
            _inner.setdefault(self.module, False)
            for handle in filter(None, (reference() for reference in self.handles)):
                handle.tensor = None
        self.buffers.after(self.before)

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(self)
        handle.tensor = tensor if self._keeps else None
        self.handles.append(weakref.ref(handle))
        return handle

    def read_inside(self, handle: _Handle) -> Tensor:
        """What a backward inside the module's forward reads."""
        if handle.tensor is None:
            raise StagelineError(
                f"module {self.name} runs a backward inside its forward (torch.autograd.grad or .backward()), but "
                "did not do so the first time, so the tensors it needs were not kept; leave the module out of "
                "recompute="
            )
        _inner[self.module] = True
        return handle.tensor

    def run_again(self) -> None:
        """Recompute the module, and fill the handles that are still alive."""
        waiting = list(self.handles)
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count < len(waiting) and (handle := waiting[count]()) is not None:
                handle.tensor, handle.frame = tensor.detach(), None
            count += 1
            if count == len(waiting):
                raise _Enough
            return tensor

        if self.versions != _versions(self.arguments):
            raise StagelineError(
                f"an input of module {self.name} was changed in place after the module ran, so the module cannot be "
                "recomputed; leave it out of recompute=, or change a copy of the input"
            )
        args, kwargs = pytree.tree_map(_detached, self.arguments)
        before, _active.owner = _active.owner, -1
        try:
            with replayed(self.state), self.buffers.as_before(self.before), ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for autocast in self.autocast:
                    stack.enter_context(autocast)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
                stack.enter_context(self.second)
                self.module(*args, **kwargs)
        except _Enough:
            pass
        finally:
            _active.owner = before
        if count != len(waiting):
            raise StagelineError(
                f"module {self.name} saved {len(waiting)} tensors in its forward and {count} when it was "
                "recomputed: it is not deterministic; leave it out of recompute="
            )
        self.arguments = ((), {})


def _unpack(handle: _Handle) -> Tensor:
    if handle.frame is not None:
        if handle.frame.running:
            return handle.frame.read_inside(handle)
        handle.frame.run_again()
    assert handle.tensor is not None
    return handle.tensor


def _detached(value: Any) -> Any:
    return detached(value, value.requires_grad) if isinstance(value, Tensor) else value

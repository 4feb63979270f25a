"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeAlias, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C._profiler import ActiveProfilerType as _ActiveProfilerType
from torch._utils import _flatten_dense_tensors
from torch.autograd import profiler as _profiler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from stageline.autograd import engine
from stageline.tensors.sharded import local

__all__ = [
    "Attributes",
    "ShardGroups",
    "attributes_of",
    "buffer_named",
    "called_as",
    "collectives_of",
    "compile_forward",
    "composable_wrappers",
    "emits_nvtx",
    "flatten_dense",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "gathered_over",
    "has_accumulate_hooks",
    "has_gradient_hooks",
    "is_packed",
    "joins_packed_parts",
    "mark_stepped",
    "optimizer_hooks",
    "other_state",
    "packed_shard",
    "parameters_of",
    "profiler_is_on",
    "profiles_this_thread",
    "pytree",
    "rootless_lists",
    "sharded_by_fsdp",
    "share_gradient_hooks",
    "share_shard",
    "sparse_values",
    "storage_id",
    "version_of",
    "watched_parts",
]

foreach_mul_ = torch._foreach_mul_
"""Multiplies each tensor of a list by a scalar tensor, in place."""

foreach_zero_ = torch._foreach_zero_
"""Sets each tensor of a list to zero, in place."""

foreach_norm: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm
"""The norm of each tensor of a list, in few kernels."""

version_of = attrgetter("_version")
"""How often a tensor was changed in place."""


profiler_is_on: Callable[[], bool] = partial(getattr, _profiler, "_is_profiler_enabled")
"""Whether torch's profiler or `emit_nvtx` runs, on this thread or another."""


profiles_this_thread: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler that was started in this thread records it, and not all threads."""


def emits_nvtx() -> bool:
    """Whether `torch.autograd.profiler.emit_nvtx` is on in this thread."""
    return torch._C._autograd._profiler_type() == _ActiveProfilerType.NVTX


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `Tensor.register_hook` was called."""
    return bool(tensor._backward_hooks)


def has_accumulate_hooks(tensor: Tensor) -> bool:
    """Whether `Tensor.register_post_accumulate_grad_hook` was called."""
    return bool(tensor._post_accumulate_grad_hooks)


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Let `target` call the gradient hooks of `source`, and no others."""
    if source._backward_hooks or target._backward_hooks:
        target._backward_hooks = OrderedDict(source._backward_hooks or {})


def storage_id(tensor: Tensor) -> int | None:
    """An identifier of the tensor's memory; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse COO tensor, which need not be coalesced."""
    return tensor._values()


flatten_dense: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
"""The elements of dense tensors, one after the other, in one copy."""


def buffer_named(module: nn.Module, name: str) -> Tensor | None:
    """A buffer of this module itself, not of a submodule; it may be None."""
    return module._buffers[name]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of this module itself, not of its submodules; they may be replaced."""
    return module._parameters


Attributes: TypeAlias = dict[str, Any]
"""The attributes of a module itself: not its parameters, buffers and submodules."""


def attributes_of(part: nn.Module) -> dict[nn.Module, Attributes]:
    """The attributes of all modules of a stage, their hooks among them."""
    kept = ("_parameters", "_buffers", "_modules")
    return {
        module: {
            name: value.copy() if isinstance(value, OrderedDict) else value
            for name, value in vars(module).items()
            if name not in kept
        }
        for module in part.modules()
    }


@contextmanager
def other_state(
    module: nn.Module, attributes: Mapping[nn.Module, Attributes], change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let a module, and those in it, have other attributes, and changed parameters and buffers, for a while."""
    states = [(inner, dict(vars(inner))) for inner in module.modules()]
    try:
        for inner, state in states:
            if inner in attributes:
                vars(inner).clear()
                vars(inner).update(attributes[inner], _modules=state["_modules"])
            for kind in ("_parameters", "_buffers"):
                tensors = state[kind].items()
                vars(inner)[kind] = {name: None if tensor is None else change(tensor) for name, tensor in tensors}
        yield
    finally:
        for inner, state in states:
            vars(inner).clear()
            vars(inner).update(state)


@contextmanager
def watched_parts(
    taken: Callable[[Any], None], joined: Callable[[Tensor, Any, Sequence[Any] | None], None]
) -> Iterator[None]:
    """Call functions for a while: with DTensors whose part is taken, and before parts become one of unknown shape."""
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    to_local, from_local = kind.to_local, kind.from_local

    def watched_to_local(self: Any, **options: Any) -> Any:
        taken(self)
        return to_local(self, **options)

    def watched_from_local(part: Tensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if options.get("shape") is None:
            joined(part, device_mesh, placements)
        return from_local(part, device_mesh, placements, **options)

    kind.to_local, kind.from_local = watched_to_local, staticmethod(watched_from_local)
    try:
        yield
    finally:
        kind.to_local, kind.from_local = to_local, staticmethod(from_local)


def optimizer_hooks(optimizer: Optimizer) -> list[Any]:
    """The functions that an optimizer calls before and after it steps."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def called_as(module: nn.Module, function: Callable[[Any], Any], value: Any) -> Any:
    """Call a module with another forward: its hooks run around `function`."""
    module.__dict__["forward"] = function
    try:
        return module(value)
    finally:
        del module.__dict__["forward"]


class ShardGroups:
    """The groups of parameters that FSDP2 gathers and reduces together, of all its modules in a stage.

    FSDP2's own hooks would gather, reduce and free when modules run. While `managed` is set, they only convert inputs
    and outputs to the dtypes of the module's mixed precision, and gather and free block by block if that was asked for.
    """

    def __init__(self, part: nn.Module) -> None:
        self._states = _states_of([part])
        modules = [module for state in self._states for module in state._modules]
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        self._blocks = [state for state in self._states if all(id(module) in inner for module in state._modules)]
        """Those inside of another module: blocks. If there is no outer one, all are blocks."""
        if len(self._blocks) == 0:
            self._blocks = self._states
        self._order: list[Any] = []
        """The blocks in the order of the last forward."""
        self._running: list[Any] = []
        """Those that the current forward has run."""
        self.managed = self._by_block = self._in_backward = False
        self.order = 0
        """A number of the order in which blocks were gathered one by one since the program began."""
        self.unused: set[nn.Parameter] = set()
        """The parameters that no microbatch used in this stage, and that had no gradient before the program."""
        self._without_gradient: set[nn.Parameter] = set()
        """The parameters that had no gradient when the program began."""
        for state in self._states:
            _take_over_hooks(state)

    @cached_property
    def _groups(self) -> list[Any]:
        for state in self._states:
            state._lazy_init()
        return [group for state in self._states for group in _groups_of(state)]

    @cached_property
    def _parameters(self) -> list[Any]:
        return [parameter for group in self._groups for parameter in group.fsdp_params]

    def __bool__(self) -> bool:
        return bool(self._states)

    def begin(self) -> None:
        """Let FSDP2 prepare its modules, as it does in their first forward, and take over the work of its hooks."""
        _ = self._groups
        for state in self._states:
            state._stageline_groups = self  # a stage may have others, for other numbers of microbatches
        self.managed, self.order, self.unused = True, 0, set()
        # Now, since another stage that uses a tied one may reduce its gradient before this one does.
        self._without_gradient = {own for own in self.parameters() if own.grad is None}

    @classmethod
    def of(cls, part: nn.Module) -> ShardGroups | None:
        """The groups whose program ran last on a stage; None if it is not sharded, or none ran."""
        return next((getattr(state, "_stageline_groups", None) for state in _states_of([part])), None)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as FSDP2 keeps them: this process's parts."""
        return [parameter.sharded_param for parameter in self._parameters]

    def sum_gradients(self) -> None:
        """Let gradients be summed, not averaged."""
        for state in self._states:
            for module in state._modules:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def gather(self, *, by_block: bool, backward: bool) -> None:
        """Start to gather all parameters; or those outside of blocks and of the first block that a forward or backward
        needs."""
        self._by_block, self._in_backward = by_block, backward
        self._order, self._running = self._running or self._order, []
        if by_block:
            first = self._order[-1:] if backward else self._order[:1]
            for state in (*(state for state in self._states if state not in self._blocks), *first):
                self._start(state)
            return
        for group in self._groups:
            group.unshard(async_op=True)

    def _start(self, state: Any) -> None:
        """Start to gather the parameters of a module, unless that was done."""
        for group in _groups_of(state):
            if group._all_gather_result is None and not group.is_unsharded:
                self.order = crc32(bytes(f"{self._groups.index(group)}", "ascii"), self.order)
            group.unshard(async_op=True)

    def wait(self) -> None:
        """Wait for the parameters whose gather was started."""
        for group in self._groups:
            group.wait_for_unshard()

    def enter(self, state: Any) -> None:
        """A block is about to run, forwards or backwards: gather it, and start with the next one."""
        if not self._by_block or state not in self._blocks:
            return
        self._start(state)
        for group in _groups_of(state):
            group.wait_for_unshard()
        order = self._order[::-1] if self._in_backward else self._order
        at = order.index(state) + 1 if state in order else len(order)
        for following in order[at : at + 1]:
            self._start(following)

    def leave(self, state: Any, output: Any) -> None:
        """A block has run forwards: free it, and gather it again when its backward begins."""
        if not self._by_block or state not in self._blocks:
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                engine.add_prehook(tensor.grad_fn, partial(self._enter_backward, state))
        if not self._in_backward:  # recomputed for a backward that follows
            self._running += [state] if state not in self._running else []
            self._free(state)

    def _enter_backward(self, state: Any, grads: Any) -> None:
        """The backward of a block begins, so that of the blocks behind it has ended: nodes run in reverse order."""
        if self._by_block and self._in_backward:
            for other in self._order[self._order.index(state) + 1 :] if state in self._order else ():
                self._free(other)
            self.enter(state)

    def _free(self, state: Any) -> None:
        for group in _groups_of(state):
            group.reshard()

    def free(self) -> None:
        """Free the gathered parameters."""
        for group in self._groups:
            group.wait_for_unshard()  # one that no block needed
            group.reshard()
        self._by_block = False

    def storages(self) -> frozenset[int]:
        """The memory of the parameters that were gathered so far, which is the same in every step."""
        known = [parameter for parameter in self._parameters if hasattr(parameter, "_unsharded_param")]
        tensors = [local(parameter._unsharded_param) for parameter in known]
        tensors += [inner for parameter in known for inner in parameter._unsharded_inner_tensors]
        return frozenset(number for tensor in tensors if (number := storage_id(tensor)) is not None)

    def add_up(self) -> None:
        """Add the gradients of a microbatch to those before it, in the dtype in which they are reduced."""
        for parameter in self._mixed:
            dtype, gathered = parameter.reduce_dtype, getattr(parameter, "_unsharded_param", None)
            if gathered is None or gathered.grad is None or gathered.grad.dtype == dtype:
                continue
            if parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = gathered.grad.to(dtype)
            else:
                parameter.unsharded_accumulated_grad += gathered.grad
            gathered.grad = None

    @cached_property
    def _mixed(self) -> list[Any]:
        """The parameters whose gradients are reduced in another dtype."""
        return [parameter for parameter in self._parameters if parameter.reduce_dtype is not None]

    def _fill_gradients(self) -> None:
        """Give zeros to parameters that were not used here: others may have used them, and FSDP2 would reduce those
        that have a gradient here with those that have one there."""
        used = set()  # a tied one may be gathered several times in a stage
        for parameter in self._parameters:
            own, gathered = parameter.sharded_param, getattr(parameter, "_unsharded_param", None)
            if gathered is None or not own.requires_grad or own.device_mesh.size() == 1:
                continue
            if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                used.add(own)
                continue
            if own in self._without_gradient:
                self.unused.add(own)
            if parameter.reduce_dtype is None:
                gathered.grad = torch.zeros_like(gathered)
            else:
                parameter.unsharded_accumulated_grad = torch.zeros_like(gathered, dtype=parameter.reduce_dtype)
        self.unused -= used

    def reduce(self) -> Any:
        """Start to reduce the gradients; return the stream in which that ends, or None."""
        self._fill_gradients()
        stream = None
        for group in reversed(self._groups):
            group.reduce_grads = group.all_reduce_grads = True
            group.reshard_after_backward = False
            group.post_backward()
            group._training_state = type(group._training_state).IDLE
            context = group.comm_ctx
            stream = context.all_reduce_stream if group._is_hsdp else context.reduce_scatter_stream
        return stream

    def finish(self) -> None:
        """Let the current stream wait for the reduced gradients."""
        for group in self._groups:
            group.finalize_backward()
            for name, empty in (("reduce_scatter_states", []), ("reduce_scatter_state", None)):
                if hasattr(group.comm_ctx, name):
                    setattr(group.comm_ctx, name, empty)

    def forget(self) -> None:
        """Drop gradients that were accumulated and not reduced, and what is gathered."""
        for parameter in self._parameters:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        for group in self._groups:
            group._all_gather_result = None  # nobody may be left who takes part in it
        self.finish()
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
        self.free()


def _groups_of(state: Any) -> list[Any]:
    """The groups of a module. With torch 2.13 there may be several; earlier, there is one or none."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _take_over_hooks(state: Any) -> None:
    """Let the hooks of a module run only while no groups do their work."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(dtype: torch.dtype | None, values: Any) -> Any:
        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return values if dtype is None else _apply_to_tensors(convert, values)

    def before(original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        owner = state._stageline_groups
        if owner is None or not owner.managed:
            return original(module, args, kwargs)
        owner.enter(state)
        dtype = state._mp_policy.param_dtype if state._mp_policy.cast_forward_inputs else None
        return cast(dtype, args), cast(dtype, kwargs)

    def after(original: Any, module: nn.Module, args: Any, output: Any) -> Any:
        owner = state._stageline_groups
        if owner is None or not owner.managed:
            return original(module, args, output)
        owner.leave(state, output)
        return cast(state._mp_policy.output_dtype, output)

    if hasattr(state, "_stageline_groups"):
        return
    state._stageline_groups = None
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    keys = {single.id for handle in handles for single in getattr(handle, "handles", (handle,))}
    for module in state._modules:
        for hooks, hook in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
            for key in keys & set(hooks):
                hooks[key] = partial(hook, hooks[key])


def compile_forward(module: nn.Module, **options: Any) -> None:
    """Compile the forward of a module in place, as `module.compile` does with its hooks, which stay outside here.

    Also under FSDP2, whose hooks no graph can contain: it also marks its modules, so that compiled code would not check
    their attributes, such as `training`.
    """
    for inner in module.modules():
        inner.__dict__.pop("_is_fsdp_managed_module", None)
    kind, unit = type(module), cast(Any, module)
    if kind not in _forwards:  # torch limits how often one piece of code is compiled
        _forwards[kind] = FunctionType(_forward.__code__.replace(), globals(), f"forward of {kind.__name__}")
    compiled = partial(torch.compile(_forwards[kind], **options), module)

    def call(*args: Any, **kwargs: Any) -> Any:
        module.__dict__["forward"] = compiled
        try:
            return unit._call_impl(*args, **kwargs)
        finally:
            del module.__dict__["forward"]

    unit._compiled_call_impl = call


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


_forwards: dict[type, Any] = {}
"""A copy of `_forward` for every class of compiled modules."""


def _states_of(parts: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's states of the modules of stages; one that was applied to several modules has one state."""
    modules: list[Any] = [module for part in parts for module in part.modules()]
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")))


def _parameters_of_fsdp(parts: Iterable[nn.Module]) -> Iterator[Any]:
    return (parameter for state in _states_of(parts) for group in _groups_of(state) for parameter in group.fsdp_params)


def sharded_by_fsdp(parts: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters of stages that FSDP2 gathers and reduces."""
    return {parameter.sharded_param for parameter in _parameters_of_fsdp(parts)}


def gathered_over(parts: Iterable[nn.Module]) -> dict[nn.Parameter, list[int]]:
    """The processes that gather and reduce each parameter of stages by FSDP2, which may not know of a new value yet."""
    found: dict[nn.Parameter, list[int]] = {}
    for sharded in _parameters_of_fsdp(parts):
        info = sharded._module_info
        found[info.module._parameters[info.param_name]] = sharded.mesh_info.mesh.mesh.flatten().tolist()
    return found


def rootless_lists(part: nn.Module) -> list[nn.Module]:
    """The modules that one call of `fully_shard` covers together, if it was not applied to a module around them."""
    states = _states_of([part])
    sharded = [module for state in states for module in state._modules]
    inner = {id(child) for module in sharded for child in module.modules() if child is not module}
    lists = (state._modules for state in states if len(state._modules) > 1)
    return [module for modules in lists for module in modules if id(module) not in inner]


def collectives_of(group: Any) -> int:
    """How many collectives this process has started in a process group; 0 if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def share_shard(parts: Iterable[nn.Module], first: tuple[nn.Module, str], second: tuple[nn.Module, str]) -> None:
    """Let a second module use the sharded parameter of a first one; where FSDP2 sharded both, also its memory.

    A module is passed with the name of its parameter.
    """
    by_place: dict[tuple[int, str], Any] = {}
    for sharded in _parameters_of_fsdp(parts):
        info = sharded._module_info
        by_place[id(info.module._parameters), info.param_name] = sharded
    one, other = (by_place.get((id(module._parameters), name)) for module, name in (first, second))
    if one is not None and other is not None:
        one.reset_sharded_param()  # it may move its part to memory with padding
        other.sharded_param, other._sharded_param_data = one.sharded_param, one._sharded_param_data
    second[0]._parameters[second[1]] = first[0]._parameters[first[1]]


def mark_stepped(optimizer: Optimizer) -> None:
    """Let learning-rate schedulers see that an optimizer has stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def composable_wrappers(module: nn.Module) -> set[str]:
    """The names of composable wrappers, such as `replicate`, that were applied to a module."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    return set() if contract is None else set(contract._get_registry(module) or ())


def packed_shard(dimension: int, packs: int) -> Any:
    """How a dimension of several matrices, one after the other, is cut: every process has its part of each of them."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dimension, split_factor=packs)


def joins_packed_parts() -> bool:
    """Whether this torch can put a dimension together again that `packed_shard` cut: 2.13 can, and 2.11 cannot."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def is_packed(placement: Any) -> bool:
    """Whether `packed_shard` returned a placement."""
    return hasattr(placement, "split_factor")

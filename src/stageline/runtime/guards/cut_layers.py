"""Layers that tensor parallel cuts: each is compared with itself uncut when it first runs.

A layer whose forward does not expect a part of its features may run without an error and compute something else: an
attention that views its features as a fixed number of heads has all heads then, of fewer features each.

Also errors of shapes in such a layer, of which the number of heads is the likely cause; and optimizers that would step
plain tensors and DTensors in one call, which torch refuses only after some updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import Attributes, other_state, pytree
from stageline.runtime.guards.backward import is_fully_sharded
from stageline.tensors.random_numbers import Generators
from stageline.tensors.sharded import arrived, is_sharded, whole
from stageline.tensors.thread_context import plain_precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOLERANCE = 1e-3
"""The largest error of an output, as a share of its largest element: layers are compared in float32, or float64."""
COARSER = 50
"""How much larger it may be where a layer computes in 16 bits whatever it is given."""
LARGEST = 2**30
"""The most elements of a module's parameters, which are all in memory for a moment."""


def watch_cut_layers(part: nn.Module, before: Mapping[nn.Module, Attributes]) -> None:
    """Compare every module of a stage that holds layers which are cut with itself uncut, when it first runs.

    `before` has the attributes of the modules before they were cut. Those of transformers are left out: their plans
    are part of the library.
    """
    owners = {
        name: mesh
        for name, mesh in _owners(part)
        if not type(part.get_submodule(name)).__module__.startswith("transformers.")
    }
    for name, mesh in owners.items():
        module = part.get_submodule(name)
        if sum(parameter.numel() for parameter in module.parameters()) > LARGEST:
            continue
        if not any(is_fully_sharded(inner) for inner in module.modules() if inner is not module):
            _Comparison(name, module, mesh, before)


def _owners(part: nn.Module) -> Iterator[tuple[str, DeviceMesh]]:
    """The modules that hold layers which are cut over tp, by name, and the processes over which they are cut."""
    for name, module in part.named_modules():
        for parameter in module.parameters(recurse=False):
            names = (parameter.device_mesh.mesh_dim_names or ()) if is_sharded(parameter) else ()
            if "tp" in names and not parameter.placements[names.index("tp")].is_replicate():
                yield name.rpartition(".")[0] or name, parameter.device_mesh["tp"]


class _Comparison:
    """Compares one module with itself uncut, once."""

    def __init__(self, name: str, module: nn.Module, mesh: DeviceMesh, before: Mapping[nn.Module, Attributes]) -> None:
        self._name, self._mesh, self._before = name, mesh, before
        self._handle = module.register_forward_pre_hook(self._compare, with_kwargs=True)

    def _compare(self, module: nn.Module, args: Any, keywords: Any) -> None:
        error = self._difference(module, args, keywords)
        if error is None or error <= TOLERANCE:
            self._handle.remove()
            return
        raise StagelineError(
            f"{self._name} ({type(module).__name__}) returns different values when its layers are cut for tp "
            f"{self._mesh.size()}: they differ from those of the whole layer by {error:.2g} of the largest. A cut "
            "attention layer has only some of the heads: its forward must view them as -1, not as a fixed number, "
            "or parallelize must divide that number"
        )

    def _difference(self, module: nn.Module, args: Any, keywords: Any) -> float | None:
        """The largest error of its outputs, as a share of the largest element; None where nothing can be compared."""
        leaves, tree = pytree.tree_flatten((args, keywords))
        generators = Generators.now()
        with torch.no_grad(), plain_precision():
            leaves = [whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if not tensors or not self._same_on_all(tensors):  # parts of a sequence: not known how it is cut
                return None
            mine, expected = (self._run(module, leaves, tree, uncut) for uncut in (False, True))
        if generators.moved():
            generators.restore()
            return None
        if len(mine) == len(expected):
            expected = [self._part_like(one, other) for one, other in zip(mine, expected, strict=True)]
        if not mine or [one.shape for one in mine] != [other.shape for other in expected]:
            return None
        error = torch.stack([_error(one, other) for one, other in zip(mine, expected, strict=True)]).max()
        dist.all_reduce(error, dist.ReduceOp.MAX, self._mesh.get_group())
        coarse = any(output.dtype.itemsize < 4 for output in expected)
        return float(error) / (COARSER if coarse else 1)

    def _part_like(self, part: Tensor, full: Tensor) -> Tensor:
        """The rows of a whole output that this process has where it returned a part, such as of a sequence."""
        size = self._mesh.size()
        for dimension in range(full.dim() - 1):  # features may be packed
            if part.shape == (*full.shape[:dimension], full.shape[dimension] / size, *full.shape[dimension + 1 :]):
                return full.chunk(size, dimension)[self._mesh.get_local_rank()]
        return full

    def _same_on_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all processes of the group have the same inputs."""
        sums = torch.stack([tensor.double().sum() for tensor in tensors])
        highest, lowest = sums.clone(), sums.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, self._mesh.get_group())
        dist.all_reduce(lowest, dist.ReduceOp.MIN, self._mesh.get_group())
        return bool((highest == lowest).all())

    def _run(self, module: nn.Module, leaves: Sequence[Any], tree: Any, uncut: bool) -> list[Tensor]:
        """The outputs of the module in evaluation mode, not in 16 bits if it can; empty if it fails."""
        before = self._before if uncut else {}

        def exact(tensor: Tensor) -> Tensor:
            tensor = whole(tensor) if uncut else tensor
            exact_type = torch.float32 if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.dtype
            return tensor.to(exact_type, copy=True)

        inputs = [exact(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, keywords = pytree.tree_unflatten(inputs, tree)
        with other_state(module, before, exact):
            module.eval()
            try:
                output = type(module).forward(module, *args, **keywords)
            except (RuntimeError, TypeError) as error:
                if isinstance(error, StagelineError | dist.DistError):
                    raise
                return []
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            return [arrived(whole(tensor)) for tensor in tensors if tensor.is_floating_point()]


# Errors.

OF_SHAPES = re.compile(r"\b(shapes?|sizes?|dim|dimensions?)\b", re.IGNORECASE)
"""What is in torch's messages about tensors of the wrong shape."""


@contextmanager
def name_cut_layers(part: nn.Module) -> Iterator[None]:
    """Name the module in an error about shapes, if the layers of that module are cut over tp."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, StagelineError | dist.DistError | torch.OutOfMemoryError):
            raise
        if not OF_SHAPES.search(str(error)) or "gloo" in str(error):
            raise
        owners = {part.get_submodule(name): (name, mesh) for name, mesh in _owners(part)}
        frames = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        running = [module for module in frames if isinstance(module, nn.Module) and module in owners]
        if not running:
            raise
        name, mesh = owners[running[-1]]
        degree = mesh.size()
        raise StagelineError(
            f"{name} ({type(running[-1]).__name__}), whose layers are cut for tp {degree}, fails: "
            f"{str(error).splitlines()[0]}. If the whole layer does not, {degree} probably does not divide the number "
            "of its heads, or its forward expects all of them: use a tp that divides that number, and a forward that "
            "views heads as -1"
        ) from error


def _error(one: Tensor, other: Tensor) -> Tensor:
    largest = other.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return (one.double() - other.double()).abs().max() / largest


# Optimizers.

_names: Any = WeakTensorKeyDictionary()
"""The names of parameters of pipelines in which some are DTensors and some are not."""


def refuse_mixed_optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Let optimizers that would step plain tensors and DTensors of a pipeline in one call fail before they do."""
    named = list(named)
    if len({is_sharded(parameter) for _, parameter in named}) > 1:
        _watch_optimizers()
        for name, parameter in named:
            _names[parameter] = name


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_mixed)


def _refuse_mixed(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if parameter.grad is not None and parameter in _names]
        by_default = group.get("foreach", False) is None and all(parameter.is_cuda for parameter in own)
        if not (by_default or group.get("foreach") or group.get("fused")):
            continue
        for dtype in {parameter.dtype for parameter in own}:
            alike = [parameter for parameter in own if parameter.dtype == dtype]
            first = {is_sharded(parameter): _names[parameter] for parameter in reversed(alike)}
            if len(first) > 1:
                raise StagelineError(
                    f"{type(optimizer).__name__} would update {first[True]}, which is a DTensor, and {first[False]}, "
                    "which is not, in one call, which torch does not support; pass foreach=False to the optimizer, use "
                    "an optimizer for each kind, or make parallelize turn all parameters into DTensors"
                )

"""Private torch API used by this package. Tested with torch 2.11 and 2.13.

Importing this module imports parts of torch's compiler, which takes a second: only `backend` and `halves` import it,
and they are imported when a unit is to be compiled.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, get_default_op_list
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

__all__ = [
    "OPERATORS",
    "REQUESTS",
    "aot_module_simplified",
    "backward_metadata",
    "boxed",
    "default_partition",
    "eager_lowering",
    "inductor",
    "mode_options",
    "restride",
    "size_hint",
    "tensors_in",
    "without_disk_cache",
]

OPERATORS = get_default_op_list()
"""Which operators are views, which are pointwise, and which are expensive."""

REQUESTS = (RestartAnalysis, SkipFrame)
"""Exceptions by which a backend asks Dynamo to do something, rather than reports a failure."""


def backward_metadata() -> Any:
    """What AOTAutograd knows about the unit that is being compiled."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


@contextmanager
def eager_lowering() -> Iterator[None]:
    """Compile the backward together with the forward, and keep both out of the cache for whole backwards."""
    with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        yield


@cache
def inductor() -> Any:
    """Inductor's module `compile_fx`, which takes seconds to import and warns of torch's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torch._inductor.compile_fx")


def restride(graph: GraphModule, examples: Sequence[Any]) -> None:
    """Give the values of a graph the strides that follow from its arguments: a compiled forward chooses its own."""
    inductor().view_to_reshape(graph)
    inductor().fake_tensor_prop(graph, examples)


def without_disk_cache() -> Any:
    """A context in which inductor neither reads nor writes its cache of compiled graphs."""
    import torch._inductor.config

    return torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


def mode_options(mode: str | None) -> dict[str, Any]:
    """The options that a mode of torch.compile stands for."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode else {}


def size_hint(size: Any) -> int:
    """A size as a number; for a dynamic one, the size of the example."""
    return size if isinstance(size, int) else int(getattr(size.node, "hint", None) or 1)


class _BoxedCode(CodeGen):
    """Generates a function that takes its arguments in a list and clears it, so that they are freed after use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
        head = f"def {self._func_name}(self, arguments):"
        return f"{head}\n    [{', '.join(names)}] = arguments\n    arguments.clear()"


def boxed(module: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that runs the nodes of a graph one by one, and takes its arguments in a list."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # some kernels return other strides than tracing assumes
    module.graph.set_codegen(_BoxedCode())
    module.recompile()
    forward = type(module).forward

    def run(arguments: list[Any]) -> Sequence[Any]:
        return forward(module, arguments)  # type: ignore[no-any-return]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def tensors_in(node: Node) -> list[Tensor]:
    """The tensors that a node returned when it was traced."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]

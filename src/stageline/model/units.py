"""The units of a model: its blocks, and the modules with parameters before, between and after them. They are never cut.

A model whose body is a stack of blocks needs no tracing. Its blocks are the children of a `ModuleList` or `Sequential`
of similar modules, or else of a `ModuleDict`; every other module with parameters is a unit of its own. A module that
contains units is a *frame*, and runs on every stage. So do modules without parameters, such as rotary tables and
dropout. The order of their calls is that of definition, unless an example shows another one.

```text
 LlamaForCausalLM            frame
   model                     frame
     embed_tokens            unit, before
     layers.0 … layers.31    units, the blocks
     norm                    unit, after
     rotary_emb              no parameters: runs on every stage
   lm_head                   unit, after
```
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from stageline.common.errors import StagelineError, nearest, place_of, shorten
from stageline.model import huggingface
from stageline.model._torch_private import buffers_of, children_of, non_persistent_buffers
from stageline.model.compiled_models import eager, inner, warn_of_wrapped
from stageline.model.stage_module.boundary import arguments
from stageline.model.stage_module.dry_run import CallOrder, DataFlow
from stageline.model.stage_module.forward_replay import Replay
from stageline.model.stage_module.stage_module import Original, StagePart


class NoStack(StagelineError):
    """A model without units to cut between."""


def refuse_lazy(model: nn.Module, prefix: str = "") -> None:
    """Refuse parameters and buffers that have no shape yet; `prefix` is put before their names."""
    named = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    for what, name in ((what, name) for what, tensors in named for name, tensor in tensors if is_lazy(tensor)):
        raise StagelineError(
            f"the {what} {prefix}{name} has no shape yet, because lazy modules get their shapes from the first "
            "batch; call the model once (model(inputs)) on every process, and then create the Pipeline"
        )


@dataclass(frozen=True)
class Unit:
    """A module that is never cut, and its name in the model."""

    name: str
    module: nn.Module
    block: bool
    """Whether it belongs to a stack of similar modules."""

    @property
    def size(self) -> int:
        """The number of elements of its parameters."""
        refuse_lazy(self.module, f"{self.name}.")
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def bytes(self) -> int:
        """The number of bytes of its parameters."""
        return sum(parameter.nbytes for parameter in self.module.parameters())


def find_units(model: nn.Module, stacks: Sequence[str] = (), kind: str = "") -> list[Unit]:
    """Return the units of a model, in the order of definition.

    `stacks` names the containers whose children are the blocks, `kind` the class of the blocks; without either, every
    outermost list of similar modules is a stack.

    >>> model = nn.Module()
    >>> model.embed, model.blocks = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    >>> model.head, model.drop = nn.Linear(4, 9), nn.Dropout()
    >>> [(unit.name, unit.block) for unit in find_units(model)]
    [('embed', False), ('blocks.0', True), ('blocks.1', True), ('head', False)]
    """
    blocks = _blocks(model, stacks, kind)
    if not blocks:
        named = [(unit.name, unit.module) for unit in _collect(model, "", set(), set()) if _has_parameters(unit.module)]
        parts = [name for name, _ in named]
        if len(parts) < 2:
            raise NoStack(
                f"{type(model).__name__} has no stack of blocks to cut: no ModuleList, Sequential or ModuleDict of "
                f"similar modules, and {len(parts)} parts with parameters ({', '.join(parts) or 'none'}); pass an "
                "nn.Sequential or a list of stages, name its blocks with by='type:ClassOfBlock', or pass example= to "
                "trace the model: sl.Pipeline(model, …, example=inputs), with inputs as for step"
            )
        return [Unit(name, child, False) for name, child in named]
    frames = {name for block in blocks for name in _ancestors(block)}
    return list(_collect(model, "", blocks, frames))


def layers_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers by name; unlike `named_children`, a layer in several places is listed in each.

    A stage of a model with its own forward is one layer.
    """
    if getattr(model, "one_layer", False):
        return [("", model)]
    return [(name, layer) for name, layer in children_of(model).items() if layer is not None]


def _collect(module: nn.Module, parent: str, blocks: set[str], frames: set[str]) -> Iterator[Unit]:
    for name, child in children_of(module).items():
        if child is None:
            continue
        path = f"{parent}.{name}" if parent else name
        if path in blocks:
            yield from _block(child, path)
        elif _is_of_frame(child):
            continue
        elif path in frames or type(child) in (nn.ModuleList, nn.ModuleDict):  # never called themselves
            yield from _collect(child, path, blocks, frames)
        elif _has_parameters(child) or _has_state(child):
            yield Unit(path, child, False)


def _block(module: nn.Module, path: str) -> Iterator[Unit]:
    """Yield a block. A container is never called, so its children are the units; the first of them starts the block."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict):
        yield Unit(path, module, True)
        return
    for index, unit in enumerate(_collect(module, path, set(), set())):
        yield replace(unit, block=index == 0)


def _is_of_frame(module: nn.Module) -> bool:
    """Whether a module only holds or computes parameters of the module around it, and is never called."""
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return True
    children = list(module.children())
    return bool(children) and all(isinstance(child, parametrize.ParametrizationList) for child in children)


def _has_state(module: nn.Module) -> bool:
    """Whether a module has buffers that are part of the model's state, which only one stage may change."""
    return any(
        name not in non_persistent_buffers(submodule)
        for submodule in module.modules()
        for name, buffer in buffers_of(submodule).items()
        if buffer is not None
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _ancestors(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _blocks(model: nn.Module, stacks: Sequence[str], kind: str) -> set[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if kind:
        names = [name for name, module in modules.items() if name and type(module).__name__ == kind]
        if not names:
            classes = sorted({type(module).__name__ for module in modules.values()})
            raise StagelineError(f"no module of the class {kind!r}{nearest(kind, classes)} in {type(model).__name__}")
        return set(_outermost(names))
    for name in stacks:
        if name not in modules:
            raise StagelineError(f"there is no module {name!r}{nearest(name, modules)} in {type(model).__name__}")
        if not children_of(modules[name]):
            raise StagelineError(
                f"{name!r} is a {type(modules[name]).__name__} without children, and no stack of blocks"
            )
    chosen = list(stacks)
    for is_stack in (_is_list, _is_dict, _is_plain_list):
        chosen = chosen or _outermost(name for name, module in modules.items() if name and is_stack(module))
    return {
        f"{name}.{child}"
        for name in chosen
        for child, module in children_of(modules[name]).items()
        if module is not None
    }


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names that are not inside of another one."""
    all_names = set(names)
    return [name for name in sorted(all_names) if all_names.isdisjoint(_ancestors(name))]


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of at least two modules with parameters, at least half of them of one class.

    A Sequential of single layers is more likely a part of the model than a stack.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = _with_parameters(module)
    if isinstance(module, nn.Sequential):
        children = [child for child in children if _has_children(child)]
    return _mostly_one_class(children)


def _is_plain_list(module: nn.Module) -> bool:
    """Whether a module is such a list, or a Sequential of single layers."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and _mostly_one_class(_with_parameters(module))


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in children_of(module).values() if child is not None and _has_parameters(child)]


def _is_dict(module: nn.Module) -> bool:
    """Whether a module is a dict of blocks: all of one class, with children of their own, unlike most heads."""
    if not isinstance(module, nn.ModuleDict):
        return False
    blocks = [child for child in children_of(module).values() if child is not None]
    return len(blocks) >= 2 and len(set(map(type, blocks))) == 1 and all(map(_has_children, blocks))


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _mostly_one_class(modules: Sequence[nn.Module]) -> bool:
    classes = Counter(map(type, modules))
    return bool(classes) and max(classes.values()) >= 2 and 2 * max(classes.values()) >= len(modules)


def listed(names: Sequence[str]) -> str:
    """Return names as text; of more than two, only the first and the last."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


def units_of(model: nn.Module, kind: str = "", stacks: Sequence[str] = ()) -> list[Unit]:
    """Return the units of a model in the order of definition: the layers of an `nn.Sequential`, or see `find_units`."""
    if isinstance(model, nn.Sequential) and not stacks and not kind:
        return [Unit(name, module, True) for name, module in children_of(model).items() if module is not None]
    units = [Unit(*inner(unit.name, unit.module), unit.block) for unit in find_units(model, stacks, kind)]
    warn_of_wrapped(model)
    return units


def in_call_order(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], DataFlow | None]:
    """Return the units in the order of their calls, and the data flow, as far as it is known.

    Without an example, a model of transformers is called with the library's own; other models keep their order.
    """
    if example is None:
        guess = huggingface.example_of(model)
        with suppress(Exception):  # the library's example does not suit every model
            return (units, None) if guess is None else _order_by_dry_run(model, units, guess)
        return units, None
    try:
        return _order_by_dry_run(model, units, example)
    except Exception as error:
        if any(tensor.is_meta for tensor in model.parameters()):
            raise _example_error(model, error) from error
    try:  # a model that cannot run without computing may still run
        return _order_by_run(model, units, example), None
    except Exception as error:
        raise _example_error(model, error) from error


def _example_error(model: nn.Module, error: Exception) -> StagelineError:
    return StagelineError(
        f"{type(model).__name__} cannot run on the example, {shorten(error, 200)}{place_of(error)}; pass a tuple of "
        "its arguments, a dict of keywords, or its only argument"
    )


def _order_by_run(model: nn.Module, units: list[Unit], example: Any) -> list[Unit]:
    """Run the model, and restore its buffers and the random state."""
    called: list[Unit] = []
    args, kwargs = arguments(example)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    hooks = [unit.module.register_forward_pre_hook(lambda *_, unit=unit: called.append(unit)) for unit in units]
    try:
        frame = eager(model, [unit.module for unit in units])
        with frame, torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*args, **{**huggingface.defaults_of(model), **kwargs})
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    return called


def _order_by_dry_run(model: nn.Module, units: list[Unit], example: Any) -> tuple[list[Unit], DataFlow]:
    by_name = {unit.name: unit for unit in units}
    modules = {unit.name: Original(unit.module) for unit in units}
    replay = Replay(CallOrder(()), 0, 0, modules, huggingface.defaults_of(model))
    part = StagePart(model, tuple(by_name), frozenset(), replay)
    names, flow = replay.order(part.frame, example)
    return [by_name[name] for name in names], flow


def uncalled(model: nn.Module, defined: Sequence[Unit], called: Sequence[Unit], with_example: bool) -> tuple[str, ...]:
    """Return the modules with parameters that belong to no called unit; warn if the user gave no example."""
    parameters = {id(parameter) for unit in called for parameter in unit.module.parameters()}
    around = [
        unit for unit in defined if any(id(parameter) not in parameters for parameter in unit.module.parameters())
    ]
    if around and called and not with_example:
        size = sum(unit.size for unit in around)
        warnings.warn(
            f"{listed([unit.name for unit in around])} of {type(model).__name__}, {size:,} parameters, belongs to no "
            "unit, because the model does not call it with the example inputs of its library; every stage runs it "
            "if a batch has inputs for it; pass example=, a batch with all inputs, to turn it into units",
            stacklevel=3,
        )
    return tuple(unit.name for unit in around)

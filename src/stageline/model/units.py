"""The units that a model is cut between: its blocks, and the modules with parameters before, between and after them.

A model whose body is a stack of blocks needs no tracing. Its blocks are found as the children of a `ModuleList` or
`Sequential` of like modules, or else of a `ModuleDict`; every other module with parameters beside the stack is a unit
of its own. What holds units is a *frame*, and runs on every stage; so does what has no parameters, such as rotary
tables and dropout.

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

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from stageline.common.errors import StagelineError, nearest


class NoStack(StagelineError):
    """A model in which there is nothing to cut between."""


def refuse_lazy(model: nn.Module, prefix: str = "") -> None:
    """Refuse parameters and buffers that have no shape yet; `prefix` is what their names start with.

    >>> refuse_lazy(nn.Sequential(nn.LazyLinear(2)))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: the parameter 0.weight has no shape yet, as in all lazy modules before their first
    batch; run one through the model (model(inputs)) on every process, and then make the Pipeline
    """
    named = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    for what, name in ((what, name) for what, tensors in named for name, tensor in tensors if is_lazy(tensor)):
        raise StagelineError(
            f"the {what} {prefix}{name} has no shape yet, as in all lazy modules before their first batch; run one "
            "through the model (model(inputs)) on every process, and then make the Pipeline"
        )


@dataclass(frozen=True)
class Unit:
    """A module that is never cut, by its name in the model."""

    name: str
    module: nn.Module
    block: bool
    """Whether it belongs to a stack of like modules."""

    @property
    def size(self) -> int:
        """How many elements its parameters have."""
        refuse_lazy(self.module, f"{self.name}.")
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def bytes(self) -> int:
        """How many bytes its parameters have."""
        return sum(parameter.nbytes for parameter in self.module.parameters())


def find_units(model: nn.Module, stacks: Sequence[str] = (), kind: str = "") -> list[Unit]:
    """The units of a model, in the order in which it defines them.

    `stacks` names the containers whose children are the blocks, `kind` the class of the blocks; without either, every
    outermost list of like modules is a stack.

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
                f"like modules, and {len(parts)} parts with parameters ({', '.join(parts) or 'none'}); give an "
                "nn.Sequential or a list of stages, name its blocks with by='type:ClassOfBlock', or give example= to "
                "have it traced: sl.Pipeline(model, …, example=inputs), with inputs as step is given them"
            )
        return [Unit(name, child, False) for name, child in named]
    frames = {name for block in blocks for name in _above(block)}
    return list(_collect(model, "", blocks, frames))


def layers_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers by name; a layer that stands in several places is listed in each, unlike in `named_children`.

    A stage of a model with a forward of its own is one layer.
    """
    if getattr(model, "one_layer", False):
        return [("", model)]
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]


def _collect(module: nn.Module, at: str, blocks: set[str], frames: set[str]) -> Iterator[Unit]:
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{at}.{name}" if at else name
        if path in blocks:
            yield from _block(child, path)
        elif _is_of_frame(child):
            continue
        elif path in frames or type(child) in (nn.ModuleList, nn.ModuleDict):  # what is never called itself
            yield from _collect(child, path, blocks, frames)
        elif _has_parameters(child) or _has_state(child):
            yield Unit(path, child, False)


def _block(module: nn.Module, path: str) -> Iterator[Unit]:
    """A block; one that only holds modules is never called, and these are units: the first of them begins the block."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict):
        yield Unit(path, module, True)
        return
    for index, unit in enumerate(_collect(module, path, set(), set())):
        yield replace(unit, block=index == 0)


def _is_of_frame(module: nn.Module) -> bool:
    """Whether a module only holds or makes parameters of the module around it, and is never called."""
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return True
    children = list(module.children())
    return bool(children) and all(isinstance(child, parametrize.ParametrizationList) for child in children)


def _has_state(module: nn.Module) -> bool:
    """Whether a module has buffers that are part of the model's state, which only one stage may change."""
    return any(
        key not in each._non_persistent_buffers_set
        for each in module.modules()
        for key, buffer in each._buffers.items()
        if buffer is not None
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _above(path: str) -> Iterator[str]:
    """The names of everything that holds a module."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def paths(model: nn.Module, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module by every name it has: one that stands in two places is there twice."""
    yield at, model
    for name, child in model._modules.items():
        if child is not None:
            yield from paths(child, f"{at}.{name}" if at else name)


def _blocks(model: nn.Module, stacks: Sequence[str], kind: str) -> set[str]:
    known = dict(paths(model))
    if kind:
        found = [name for name, module in known.items() if name and type(module).__name__ == kind]
        if not found:
            classes = sorted({type(module).__name__ for module in known.values()})
            raise StagelineError(f"no module of the class {kind!r}{nearest(kind, classes)} in {type(model).__name__}")
        return set(_outermost(found))
    for name in stacks:
        if name not in known:
            raise StagelineError(f"there is no module {name!r}{nearest(name, known)} in {type(model).__name__}")
        if not len(known[name]._modules):
            raise StagelineError(f"{name!r} is a {type(known[name]).__name__} without children, and no stack of blocks")
    chosen = list(stacks)
    for is_stack in (_is_list, _is_dict, _is_plain_list):
        chosen = chosen or _outermost(name for name, module in known.items() if name and is_stack(module))
    return {
        f"{name}.{child}" for name in chosen for child, module in known[name]._modules.items() if module is not None
    }


def _outermost(names: Iterable[str]) -> list[str]:
    """Those names that are not inside of another one."""
    found = set(names)
    return [name for name in sorted(found) if not any(above in found for above in _above(name))]


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of at least two modules with parameters, most of which are of one class.

    A Sequential of single layers is rather a part of the model than a stack.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    like = _with_parameters(module)
    if isinstance(module, nn.Sequential):
        like = [child for child in like if any(True for _ in child.children())]
    return _most_alike(like)


def _is_plain_list(module: nn.Module) -> bool:
    """The same, where a Sequential may also be of single layers."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and _most_alike(_with_parameters(module))


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    """The children with parameters; a list may hold None, too."""
    return [child for child in module._modules.values() if child is not None and _has_parameters(child)]


def _is_dict(module: nn.Module) -> bool:
    """Whether a module is a dict of blocks: all of one class, which holds other modules; heads mostly do not."""
    if not isinstance(module, nn.ModuleDict):
        return False
    held = [child for child in module._modules.values() if child is not None]
    kinds = {type(child) for child in held}
    return len(held) >= 2 and len(kinds) == 1 and all(any(True for _ in child.children()) for child in held)


def _most_alike(like: Sequence[nn.Module]) -> bool:
    kinds = Counter(map(type, like))
    return bool(kinds) and max(kinds.values()) >= 2 and 2 * max(kinds.values()) >= len(like)

"""What stages pass to each other: any tree of tensors, numbers, strings and None, sent as a flat list."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.tensors._torch_private import is_traceable_wrapper_subclass, pytree, register_namedtuple
from stageline.tensors.sharded import arrived, is_sharded

Leaf: TypeAlias = Tensor | int | float | str | bool | None
"""What a message may hold; trees are flattened before they are sent."""

TENSOR = "tensor"
"""The text of the most common tree: a single tensor."""

_learning = Lock()


def flatten(tree: Any, where: str) -> tuple[list[Leaf], str]:
    """Split a tree into its leaves and a text of its structure; refuse a leaf that no message can hold."""
    if isinstance(tree, Tensor):
        tree = arrived(tree)
        _refuse_odd(tree, where)
        return [tree], TENSOR
    leaves, spec = pytree.tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[index] = arrived(leaf)
            _refuse_odd(leaves[index], where)
    try:
        if all(map(_can_pass, leaves)):
            return leaves, _text_of(spec)
    except NotImplementedError:
        pass
    learn(tree)  # it has a class that was not registered yet
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not _can_pass(leaf):
            raise StagelineError(
                f"{where} passes on a {type(leaf).__name__}, {shorten(leaf)}; stages can pass on only tensors, "
                f"numbers, strings and None, in tuples, lists, dicts, named tuples and dataclasses{why_not(leaf)}"
            )
    try:
        return leaves, _text_of(spec)
    except NotImplementedError as error:
        raise StagelineError(
            f"{where} passes on a {type(tree).__name__} or a value in it that cannot be sent to another process; "
            "stages can pass on only tuples, lists, dicts, named tuples and dataclasses"
        ) from error


def odd_class(tensor: Tensor) -> str:
    """The kind of a tensor that is not one block of numbers; empty for plain tensors."""
    if tensor.is_nested:
        return "nested tensor"
    wraps = type(tensor) not in (Tensor, nn.Parameter) and bool(is_traceable_wrapper_subclass(tensor))
    return type(tensor).__name__ if wraps else ""


def _refuse_odd(tensor: Tensor, where: str) -> None:
    if is_sharded(tensor):  # its part is sent
        return
    if (type(tensor) is not Tensor or tensor.is_nested) and odd_class(tensor):
        parts = "its values and offsets" if tensor.is_nested else "the plain tensors that it is made of"
        raise StagelineError(
            f"{where} passes on a {odd_class(tensor)}, but stages can pass on only plain tensors; pass {parts}, and "
            "rebuild it in the stage that needs it"
        )
    if type(tensor) in (Tensor, nn.Parameter):
        return
    for name, value in tensor.__dict__.items():
        if any(leaf.requires_grad for leaf in tensors_of(pytree.tree_leaves(value))):
            raise StagelineError(
                f"{where} passes on a {type(tensor).__name__} whose attribute {name} requires grad, but gradients of "
                "attributes are not sent back between stages; pass the attribute as a separate tensor, or "
                "detach it"
            )


def refuse_layout(tensor: Tensor, stage: int, microbatch: int, *, forward: bool) -> None:
    """Refuse to pass on a sparse tensor, or another that is not strided."""
    layout = str(tensor.layout).removeprefix("torch.")
    if forward:
        raise StagelineError(
            f"stage {stage} passes on a sparse tensor, of layout {layout}, in microbatch {microbatch}, but stages "
            "can pass on only dense tensors; pass x.to_dense(), or its indices and values, and "
            "rebuild it in the stage that needs it"
        )
    raise StagelineError(
        f"the gradient of an input of stage {stage} is sparse, of layout {layout}, in microbatch {microbatch}, but "
        "stages can pass only dense tensors; use sparse=False for the embedding that looks up that input"
    )


def _can_pass(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, int, float, str))


def unflatten(leaves: Sequence[Any], text: str) -> Any:
    """Rebuild a tree that `flatten` split."""
    if text == TENSOR:
        return leaves[0]
    return pytree.tree_unflatten(list(leaves), _spec_of(text))


def learn(tree: Any) -> None:
    """Register the named tuples and dataclasses in a tree with torch's pytree, by the names of their classes."""
    if isinstance(tree, Tensor):
        return
    for node in pytree.tree_leaves(tree, is_leaf=_is_unknown):
        if _is_unknown(node):
            _learn_class(type(node))
            learn(node)


def _is_unknown(node: Any) -> bool:
    kind = type(node)
    if isinstance(node, tuple):
        return (hasattr(kind, "_fields") or _is_return_type(kind)) and not _has_name(kind)
    return dataclasses.is_dataclass(node) and kind not in pytree.SUPPORTED_NODES and not why_not(node)


def _has_name(kind: type) -> bool:
    """Whether trees with this class can be sent to another process."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    return known is not None and known.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND


def _is_return_type(kind: type) -> bool:
    """Whether it is one of torch.return_types, as max, topk and sort return them."""
    return issubclass(kind, tuple) and kind.__module__ == "torch.return_types"


def why_not(value: Any) -> str:
    """Why a dataclass cannot be part of a tree: it could not be rebuilt from the values of its fields."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return ""
    fields = dataclasses.fields(value)
    computed = [field.name for field in fields if not field.init]
    if computed:
        return f"; its field {computed[0]} is not a constructor argument; make it one"
    known = {field.name for field in fields}
    every_field = type(value).__dataclass_fields__
    lost = [name for name, field in every_field.items() if name not in known and "ClassVar" not in str(field.type)]
    if lost:
        return f"; its {lost[0]} is an InitVar, whose value is not kept; make it a field"
    return _changed_by_constructor(value, list(known)) if hasattr(value, "__post_init__") else ""


def _changed_by_constructor(value: Any, names: Sequence[str]) -> str:
    fields = {name: getattr(value, name) for name in names}
    try:
        rebuilt = type(value)(**fields)
        changed = [name for name in names if not _same(getattr(rebuilt, name), fields[name])]
    except Exception as error:
        return f"; its constructor rejects the values of its fields, {type(error).__name__}: {error}"
    return f"; its __post_init__ changes {changed[0]} each time; keep the value unchanged" if changed else ""


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or (one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two))
    return one is two or (type(one) is type(two) and bool(one == two))


def _learn_class(kind: type) -> None:
    """Name a class as other processes do: by module and qualified name, and a number if several have the same."""
    with _learning:
        if _has_name(kind):
            return
        name = base = f"{kind.__module__}.{kind.__qualname__}"
        number = 1
        while name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            name, number = f"{base}#{number + 1}", number + 1
        if _is_return_type(kind):  # registered already, without a name
            known = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
            pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind
        elif issubclass(kind, tuple):
            register_namedtuple(kind, serialized_type_name=name)
        else:
            pytree.register_dataclass(kind, serialized_type_name=name)


@lru_cache(maxsize=1024)
def _text_of(spec: pytree.TreeSpec) -> str:
    return pytree.treespec_dumps(spec)


@lru_cache(maxsize=1024)
def _spec_of(text: str) -> pytree.TreeSpec:
    for _ in range(100):
        try:
            return pytree.treespec_loads(text)
        except NotImplementedError as error:
            name = re.sub(r"^.*?(?:Deserializing|namedtuple class) (\S+) (?:in pytree|because).*$", r"\1", str(error))
            kind = _class_named(name)
            if kind is None or _has_name(kind):
                raise StagelineError(
                    f"a stage passed on a {name}, a class that this process has not seen; define it in a module that "
                    "all processes import, or pass on tuples, lists and dicts"
                ) from error
            _learn_class(kind)
    raise StagelineError(f"a stage passed on a value that cannot be read: {shorten(text)}")


def _class_named(name: str) -> type | None:
    """A named tuple or dataclass of a module that is loaded."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:end]))
        for part in parts[end:]:
            value = getattr(value, part, None)
        known = isinstance(value, type) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
        if known or (isinstance(value, type) and _is_return_type(value)):
            return value  # type: ignore[no-any-return]
    return None


def plain(batch: Any) -> Any:
    """A batch as a tree: a mapping that torch's pytree does not know, such as a tokenizer's output, becomes a dict."""
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:
        return dict(batch)
    return batch


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The leaves that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def refuse_arrays(tree: Any, what: str) -> None:
    """Refuse numpy arrays in a batch that a model is to run on."""
    learn(tree)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            raise StagelineError(
                f"{what} contains a numpy array of shape {leaf.shape}; a batch must contain tensors; pass "
                "torch.from_numpy(array)"
            )


def batch_size(tree: Any, what: str) -> int:
    """How many samples a batch has: the first dimension of its tensors, which must agree."""
    learn(tree)
    tensors = tensors_of(pytree.tree_leaves(tree))
    if any(tensor.is_nested for tensor in tensors):
        raise StagelineError(
            f"{what} contain a nested tensor, which cannot be cut into microbatches; pass a padded tensor and a mask, "
            "or build it in the first stage"
        )
    sizes = {int(tensor.shape[0]) for tensor in tensors if tensor.dim() > 0}
    if len(sizes) != 1:
        dimensions = ", ".join(map(str, sorted(sizes))) or "no tensor with a first dimension"
        raise StagelineError(
            f"{what} must contain tensors with the same first dimension, the number of samples; found {dimensions}"
        )
    return sizes.pop()


def first_samples(tree: Any, samples: int) -> Any:
    """Copy the first samples of a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:samples].clone() if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    return pytree.tree_map(cut, tree)


def split_batch(tree: Any, parts: int) -> list[Any]:
    """Cut every tensor along its first dimension, sizes differing by at most one, larger first.

    >>> [part.tolist() for part in split_batch(torch.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    learn(tree)
    leaves, spec = pytree.tree_flatten(tree)
    cut = [
        list(torch.tensor_split(leaf, parts)) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[part] for column in cut], spec) for part in range(parts)]


def join_batch(parts: Sequence[Any]) -> Any:
    """Concatenate microbatches along the first dimension; values without one become a list."""
    learn(parts[0] if parts else None)
    columns = [pytree.tree_flatten(part) for part in parts]
    joined = [
        torch.cat(list(leaves)) if isinstance(leaves[0], Tensor) and leaves[0].dim() > 0 else list(leaves)
        for leaves in zip(*(leaves for leaves, _ in columns), strict=True)
    ]
    return pytree.tree_unflatten(joined, columns[0][1])

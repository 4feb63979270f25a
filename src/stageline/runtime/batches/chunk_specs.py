"""Chunk specs: along which dimension each value of a batch is cut into microbatches, and how outputs are merged.

The specs are those of `torch.distributed.pipelining`: a tree of `TensorChunkSpec(dim)`, and None (or torch's
`_Replicate`) for values that every microbatch gets as a whole. A spec may stand for a whole subtree. Values without a
spec are cut along their first dimension; that of flex attention's BlockMask counts the samples.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stageline.common.errors import StagelineError, shorten
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.opaque_objects import refuse_opaque
from stageline.tensors.pytree import learn


class CutRule(Enum):
    """How to treat a leaf without a dimension of its own to cut along."""

    DEFAULT = "cut along the first dimension, if it has one"
    REPLICATE = "whole to every microbatch"


Keywords: TypeAlias = Mapping[int | str, Mapping[str, Any]]
"""Keyword inputs by the number of their stage; under "all", those of every stage that takes them."""

How: TypeAlias = CutRule | int
"""How a leaf is cut; a number is the dimension to cut along."""
KNOWN = "TensorChunkSpec(dim) of torch.distributed.pipelining, or None for what every microbatch gets whole"


@dataclass(frozen=True)
class ChunkSpecs:
    """The specs of a pipeline; None if everything is cut along the first dimension."""

    args: Any = None
    kwargs: Any = None
    targets: Any = None
    output: Any = None
    default: bool = field(init=False, repr=False, compare=False)
    """Whether no spec was given, so that everything is cut along its first dimension."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", not self._named())
        for name, spec in self._named():
            check_spec(spec, name)
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            raise StagelineError(f"kwargs_chunk_spec must be a dict of specs by keyword, got {shorten(self.kwargs)}")

    def _named(self) -> list[tuple[str, Any]]:
        names = ("args_chunk_spec", "kwargs_chunk_spec", "targets_chunk_spec", "output_merge_spec")
        specs = (self.args, self.kwargs, self.targets, self.output)
        return [(name, spec) for name, spec in zip(names, specs, strict=True) if spec is not None]

    def __str__(self) -> str:
        """The same text on every rank with the same specs."""
        return ", ".join(f"{name}={_text(spec)}" for name, spec in self._named())

    def refuse_unknown(self, inputs: Any, keywords: Mapping[Any, Mapping[str, Any]] | None) -> None:
        """Refuse a keyword of `kwargs_chunk_spec` that the batch does not have: it may be misspelled."""
        names = set(inputs) if isinstance(inputs, Mapping) else set[str]()
        for part in (keywords or {}).values():
            names |= set(part)
        for name in self.kwargs or {}:
            if name not in names:
                raise StagelineError(
                    f"kwargs_chunk_spec has {name!r}, but neither the inputs nor stage_kwargs have a keyword of that "
                    f"name; they have {', '.join(sorted(map(str, names))) or 'none'}"
                )

    def of_inputs(self, inputs: Any) -> Any:
        """The spec of the inputs: a tuple is positional arguments, a dict keywords, all else the only argument."""
        spec = self.args
        single = spec[0] if isinstance(spec, tuple | list) and len(spec) == 1 else None
        if isinstance(inputs, Mapping) and not isinstance(single, Mapping) and (self.kwargs is not None or spec == ()):
            return Partly(self.kwargs or {})
        if isinstance(spec, tuple | list) and len(spec) == 1 and not (isinstance(inputs, tuple) and len(inputs) == 1):
            return CutRule.REPLICATE if single is None else single
        return CutRule.DEFAULT if spec is None else spec

    def of_keyword(self, name: str) -> Any:
        """The spec of one keyword input of a stage."""
        return CutRule.DEFAULT if self.kwargs is None or name not in self.kwargs else self.kwargs[name]

    def of_targets(self, targets: Any) -> Any:
        """The spec of the targets; a tuple of one spec is that of a single value."""
        spec = self.targets
        if isinstance(spec, tuple | list) and len(spec) == 1 and not isinstance(targets, tuple | list):
            return CutRule.REPLICATE if spec[0] is None else spec[0]
        return CutRule.DEFAULT if spec is None else spec

    def refuse_merge(self) -> None:
        """Refuse to guess how to merge outputs if inputs are not cut along the first dimension."""
        cut = [leaf.split_dim for leaf in _leaf_specs((self.args, self.kwargs)) if _is_dim(leaf)]
        if self.output is None and any(cut):
            raise StagelineError(
                "the inputs are not cut along the first dimension, so it is unknown how to merge the outputs; pass "
                "output_merge_spec= to the Pipeline, such as TensorChunkSpec(1)"
            )


class Partly(dict[str, Any]):
    """Specs by keyword, for a dict that may have other keywords too."""


def _is_dim(spec: Any) -> bool:
    return type(spec).__name__ == "TensorChunkSpec" and hasattr(spec, "split_dim")


def _is_replicate(spec: Any) -> bool:
    named = getattr(spec if isinstance(spec, type) else type(spec), "__name__", "") == "_Replicate"
    return spec is None or spec is CutRule.REPLICATE or named


def _is_reducer(spec: Any) -> bool:
    return callable(getattr(spec, "reduce_fn", None)) and hasattr(spec, "init_value")


def _leaf_specs(spec: Any) -> list[Any]:
    if isinstance(spec, tuple | list | Mapping):
        parts = spec.values() if isinstance(spec, Mapping) else spec
        return [leaf for part in parts for leaf in _leaf_specs(part)]
    return [spec]


def check_spec(spec: Any, name: str) -> None:
    """Refuse a tree that contains anything other than specs."""
    for leaf in _leaf_specs(spec):
        number = _is_dim(leaf) and isinstance(leaf.split_dim, int) and not isinstance(leaf.split_dim, bool)
        reducer = name == "output_merge_spec" and _is_reducer(leaf)
        if not (number or reducer or _is_replicate(leaf)):
            raise StagelineError(f"{name} has {shorten(leaf)}; pass {KNOWN}")


def _text(spec: Any) -> str:
    if isinstance(spec, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(part)}" for key, part in spec.items()) + "}"
    if isinstance(spec, tuple | list):
        return "(" + ", ".join(map(_text, spec)) + ")"
    return str(spec.split_dim) if _is_dim(spec) else "reduced" if _is_reducer(spec) else "whole"


@dataclass(frozen=True)
class Cut:
    """A value of a batch, and how each of its leaves is cut."""

    leaves: list[Any]
    tree: pytree.TreeSpec
    how: list[How]
    where: list[str]
    """What each leaf is called in errors."""

    def sizes(self) -> list[tuple[int, str]]:
        """The number of samples of each leaf that is cut."""
        sizes: list[tuple[int, str]] = []
        for leaf, how, where in zip(self.leaves, self.how, self.where, strict=True):
            if isinstance(how, int):
                size = mask_samples(leaf) if is_mask(leaf) else int(leaf.shape[how])
                if size is not None:
                    sizes.append((size, where))
        return sizes

    def parts(self, parts: int, filled: int) -> list[Any]:
        """The first `filled` of `parts` microbatches: sizes differ by at most one, larger first."""
        columns: list[Sequence[Any]] = []
        for leaf, how in zip(self.leaves, self.how, strict=True):
            if not isinstance(how, int):
                columns.append([leaf] * filled)
            elif is_mask(leaf):
                columns.append(cut_mask(leaf, parts, filled))
            else:
                columns.append(torch.tensor_split(leaf, parts, how))
        return [pytree.tree_unflatten([column[part] for column in columns], self.tree) for part in range(filled)]


def cut_of(value: Any, spec: Any, what: str, option: str, refuse: bool = True) -> Cut:
    """How each leaf of a value is cut.

    Errors name the value `what`, and the option that replicates it `option`. `refuse=False` skips the search for
    tensors inside objects, if it was done before.

    >>> cut_of((torch.zeros(3, 4), 2), CutRule.DEFAULT, "the inputs", "").how
    [0, <CutRule.REPLICATE: 'whole to every microbatch'>]
    """
    if issubclass(type(value), Tensor) and spec is CutRule.DEFAULT and value.dim() and _dense(value):  # no weak proxy
        return Cut([value], _ONE, [0], [what])
    learn(value)
    leaves, tree = pytree.tree_flatten(value, is_leaf=is_mask)
    specs = _spread(value, spec, what)
    where = _places(value, what, len(leaves)) if refuse else [what] * len(leaves)
    how = [_how(leaf, spec, at) for leaf, spec, at in zip(leaves, specs, where, strict=True)]
    if refuse:
        for leaf, spec, at in zip(leaves, specs, where, strict=True):
            is_whole_mask = is_mask(leaf) and type(leaf) not in weakref.ProxyTypes
            if not _is_replicate(spec) and not is_whole_mask:
                refuse_opaque(leaf, at, option)
    return Cut(leaves, tree, how, where)


_ONE = pytree.tree_structure(torch.zeros(0))


def _places(value: Any, what: str, count: int) -> list[str]:
    try:
        return [what + pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(value, is_leaf=is_mask)]
    except ValueError:  # a class in it was registered without names of its parts
        return [what] * count


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _how(leaf: Any, spec: Any, where: str) -> How:
    if _is_replicate(spec):
        return CutRule.REPLICATE
    if isinstance(leaf, Tensor) and not _dense(leaf):
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        verb = "contain" if where in ("the inputs", "the targets") else "is"
        raise StagelineError(
            f"{where} {verb} a {kind} tensor, which cannot be cut into microbatches; pass a dense one, with "
            "padding and a mask if needed, or use a chunk spec of None to pass it whole to every microbatch"
        )
    if spec is CutRule.DEFAULT:
        return 0 if is_mask(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0) else CutRule.REPLICATE
    dim = int(spec.split_dim)
    if leaf is None:
        return CutRule.REPLICATE
    if is_mask(leaf):
        if dim != 0:
            raise StagelineError(f"{where} is a BlockMask, which is cut along dimension 0 alone; its spec says {dim}")
        return 0
    if not isinstance(leaf, Tensor):
        raise StagelineError(
            f"{where} is {shorten(leaf)}, but its chunk spec cuts it along dimension {dim}; only tensors can be cut: "
            "pass None as its spec"
        )
    if not -leaf.dim() <= dim < leaf.dim():
        raise StagelineError(
            f"{where} has shape {tuple(leaf.shape)}, but its chunk spec cuts it along dimension {dim}; pass an "
            "existing dimension, or None to pass the value whole to every microbatch"
        )
    return dim % leaf.dim()


def _spread(value: Any, spec: Any, where: str) -> list[Any]:
    """The spec of every leaf of a value, in their order; a spec may stand for all leaves below it."""
    if not isinstance(spec, tuple | list | Mapping):
        return [spec] * len(pytree.tree_leaves(value, is_leaf=is_mask))
    parts = _children(value)
    if parts is None or is_mask(value) or (isinstance(value, Mapping) and not isinstance(spec, Mapping)):
        kind = type(value).__name__
        raise StagelineError(
            f"the chunk spec of {where} is a {type(spec).__name__}, but the value is a {kind}; pass a tuple of specs "
            "for a tuple, a dict for a dict (kwargs_chunk_spec for inputs by keyword), and one spec for one value"
        )
    keys = list(parts)
    if isinstance(spec, Mapping):
        strange = next((key for key in spec if key not in parts), None)
        if strange is not None and not isinstance(spec, Partly):
            raise StagelineError(
                f"the chunk spec of {where} has {strange!r}, but the value has {', '.join(map(str, keys)) or 'nothing'}"
            )
        specs = {key: spec.get(key, CutRule.DEFAULT) for key in keys}
    else:
        if len(spec) != len(keys):
            raise StagelineError(
                f"the chunk spec of {where} has {len(spec)} parts, but the value has {len(keys)}; pass one spec per "
                "part, or one spec for all of them"
            )
        specs = dict(zip(keys, spec, strict=True))
    return [leaf for key in keys for leaf in _spread(parts[key], specs[key], f"{where}[{key!r}]")]


def _children(value: Any) -> dict[Any, Any] | None:
    """The parts of a container in the order of its leaves; None for what is none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def merge(outputs: Sequence[Any], spec: Any, join: Callable[[Sequence[Any]], Any]) -> Any:
    """Merge the outputs of all microbatches as the spec says, or by `join` without one."""
    if spec is None:
        return join(outputs)
    learn(outputs[0])
    flat = [pytree.tree_flatten(output) for output in outputs]
    specs = _spread(outputs[0], spec, "the outputs")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    merged = [_merge_leaf(column, spec, join) for column, spec in zip(columns, specs, strict=True)]
    return pytree.tree_unflatten(merged, flat[0][1])


def _merge_leaf(column: Sequence[Any], spec: Any, join: Callable[[Sequence[Any]], Any]) -> Any:
    first = column[0]
    if spec is CutRule.DEFAULT:
        return join(column)
    if _is_dim(spec):
        if not (isinstance(first, Tensor) and -first.dim() <= spec.split_dim < first.dim()):
            shape = f"of shape {tuple(first.shape)}" if isinstance(first, Tensor) else shorten(first)
            raise StagelineError(
                f"output_merge_spec has dimension {spec.split_dim}, but an output is {shape}; pass an existing "
                "dimension"
            )
        return torch.cat(list(column), dim=spec.split_dim)
    if _is_reducer(spec):
        total = spec.init_value
        for value in column:
            total = spec.reduce_fn(total, value)
        return total
    for number, value in enumerate(column[1:], 1):
        same = torch.equal(first, value) if isinstance(first, Tensor) and isinstance(value, Tensor) else first == value
        if not same:
            raise StagelineError(
                "output_merge_spec is None for an output, so all microbatches must return the same value, but "
                f"microbatches 0 and {number} differ"
            )
    return first


def is_mask(value: Any) -> bool:
    """Whether a value is a BlockMask; does not import flex attention."""
    library: Any = sys.modules.get("torch.nn.attention.flex_attention")
    return library is not None and isinstance(value, library.BlockMask)


def mask_samples(mask: Any) -> int | None:
    """How many samples a mask is for; None if all of them share one mask."""
    blocks = mask.kv_num_blocks
    return int(blocks.shape[0]) if blocks.dim() > 2 and blocks.shape[0] > 1 else None


def cut_mask(mask: Any, parts: int, filled: int) -> list[Any]:
    """The first `filled` of `parts` parts of a mask; each calls the mask's function with samples of the whole batch."""
    if mask_samples(mask) is None:
        return [mask] * filled
    if getattr(mask, "dq_write_order", None) is not None or getattr(mask, "dq_kv_order", None) is not None:
        raise StagelineError(
            "a BlockMask with an order of dQ writes cannot be cut into microbatches; build it without dq_write_order"
        )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    columns = {name: torch.tensor_split(tensor, parts) for name in names if (tensor := getattr(mask, name)) is not None}
    options: dict[str, Any] = {} if mask.q_indices is not None else {"compute_q_blocks": False}
    masks, first = [], 0
    for part in range(filled):
        tensors = {name: column[part] for name, column in columns.items()}
        masks.append(
            type(mask).from_kv_blocks(
                **tensors,
                BLOCK_SIZE=mask.BLOCK_SIZE,
                mask_mod=_shifted(mask.mask_mod, first),
                seq_lengths=mask.seq_lengths,
                **options,
            )
        )
        first += int(tensors["kv_num_blocks"].shape[0])
    return masks


def _shifted(function: Any, first: int) -> Any:
    """The function of a mask, for samples counted from `first`."""

    def shifted(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return function(sample + first, head, query, key)

    return shifted if first else function

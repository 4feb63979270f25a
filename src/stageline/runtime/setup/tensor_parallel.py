"""Tensor parallel by a model's own plan: which of its layers are cut over "tp", and in which style.

A plan maps names of modules or parameters, with `*` for any number, to styles. Hugging Face models have one, and any
other model may have one as its attribute `tp_plan`:

    {"layers.*.attention.q": "colwise", "layers.*.attention.o": "rowwise"}

The styles are those of torch's `parallelize_module`. Activations between the layers of a plan are whole, or cut by
heads or features; for sequence parallel, a user passes a function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.tp_plan import HEADS, refuse_counts, refuse_heads, style_of
from stageline.runtime._torch_private import is_packed, joins_packed_parts, packed_shard, parameters_of, pytree
from stageline.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WHOLE = ("replicate", "sequence_parallel")
"""Styles that leave a layer whole."""
FIRST_DIMENSION = {"colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise"}
"""Styles that cut the first dimension of a weight."""
OF_HEADS = re.compile(r"(to_|w)?(q|k|v|kv|qkv|query|key|value)(_.*)?|c_attn|in_proj")
"""Names of layers whose outputs are heads."""


def kept_whole(plan: Mapping[str, str], tied: Iterable[Sequence[str]]) -> set[str]:
    """The names of tied parameters that a plan does not cut in the same way.

    >>> sorted(kept_whole({"embedding": "embedding_rowwise"}, [["embedding.weight", "head.weight"]]))
    ['embedding.weight', 'head.weight']
    """
    styles = [(names, {style_of(plan, name.rpartition(".")[0]) for name in names}) for names in tied]
    return {name for names, kinds in styles if not kinds <= FIRST_DIMENSION for name in names}


def cut_by_plan(part: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], whole: Collection[int]) -> None:
    """Cut the layers of a stage as a plan says; parameters with the ids in `whole` stay whole.

    All that is whole becomes DTensors, too, since optimizers cannot step plain tensors and DTensors together.
    """
    cutter = _Cutter(mesh["tp"], whole)
    modules = list(part.named_modules())
    for name, module in modules:
        for own, _ in list(module.named_parameters(recurse=False)):
            parameter_style = style_of(plan, f"{name}.{own}")
            if parameter_style is not None:
                cutter.cut_parameter(f"{name}.{own}", module, own, parameter_style)
        style = style_of(plan, name)
        if style is not None:
            cutter.cut(name, module, style)
            if style == "colwise":
                owner = part.get_submodule(name.rpartition(".")[0])
                refuse_heads(name, owner, cutter.degree, getattr(owner, "config", None))
    for _, module in modules:
        if not any(True for _ in module.children()):
            cutter.replicate(module)


class _Cutter:
    """Cuts layers over the processes of a tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh, whole: Collection[int]) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        self.mesh, self.degree, self._whole = mesh, mesh.size(), whole
        gathered, split = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        self._styles: dict[str, Any] = {
            "colwise": ColwiseParallel(),
            "colwise_rep": gathered,
            "colwise_gather_output": gathered,
            "embedding_colwise": gathered,
            "rowwise": RowwiseParallel(),
            "rowwise_rep": split,
            "rowwise_split_input": split,
            "embedding_rowwise": split,
        }

    def cut(self, name: str, module: nn.Module, style: str) -> None:
        """Cut a module."""
        from torch.distributed.tensor import Partial, Replicate
        from torch.distributed.tensor.parallel import parallelize_module

        kept = any(id(parameter) in self._whole for parameter in module.parameters(recurse=False))
        if style in WHOLE or kept or self._has_odd_vocabulary(module, style):
            return
        if style == "moe_tp_experts":
            whole = [own for own, parameter in module.named_parameters(recurse=False) if not is_sharded(parameter)]
            if whole:
                raise StagelineError(
                    f"the tensor-parallel plan of the model sums the outputs of the experts {name} but does not cut "
                    f"their parameter {whole[0]}, which would be counted {self.degree} times; pass parallelize=, a "
                    "function of a stage and the mesh, or use a mesh without tp"
                )
            run_on_parts(module, self.mesh, whole_inputs=True, add_up=True)
        elif style == "replicated_with_grad_allreduce":
            # Every process has other heads, so its gradient is a term of the sum.
            self._distribute(module, Replicate())
            run_on_parts(module, self.mesh, gradients=Partial())
        elif packs := _packs(style):
            _refuse_other_class(name, module, style)
            _refuse_old_torch(name, style)
            self._distribute(module, packed_shard(0, packs))
            run_on_parts(module, self.mesh, whole_inputs=True)
        elif style not in self._styles:
            raise _unknown(name, style, self._styles)
        elif hasattr(module, "base_layer"):
            self._cut_adapter(name, module, style)
        else:
            _refuse_other_class(name, module, style)
            parallelize_module(module, self.mesh, self._styles[style])

    def replicate(self, module: nn.Module) -> None:
        """Make the parameters of a layer that no style cuts DTensors that every process has whole."""
        from torch.distributed.tensor import Replicate

        own = list(module.parameters(recurse=False))
        if own and not any(map(is_sharded, own)):
            self._distribute(module, Replicate())
            run_on_parts(module, self.mesh)

    def _has_odd_vocabulary(self, module: Any, style: str) -> bool:
        """Whether a layer stays whole because the degree does not divide its vocabulary."""
        if style == "embedding_rowwise":
            return bool(module.weight.shape[0] % self.degree)
        gathers = style in ("colwise_rep", "colwise_gather_output") and isinstance(module, nn.Linear)
        return gathers and bool(module.out_features % self.degree)

    def _cut_adapter(self, name: str, module: Any, style: str) -> None:
        """Cut a layer with LoRA: of the two small matrices, the one at the end where the layer is cut."""
        cut = getattr(module, "lora_B" if style.startswith("colwise") else "lora_A", None)
        if not cut or getattr(module, "lora_magnitude_vector", None) or style not in self._styles:
            raise StagelineError(
                f"the tensor-parallel plan cuts {name}, a {type(module).__module__}.{type(module).__qualname__}; the "
                "only adapter that can be cut is plain LoRA of linear layers; use that, or a mesh without tp"
            )
        for child in (module.base_layer, *cut.values()):
            self.cut(name, child, style)

    def cut_parameter(self, name: str, module: nn.Module, own: str, style: str) -> None:
        """Cut a parameter that is not the weight of a module of its own, as those of experts."""
        from torch.distributed.tensor import Shard

        dimensions = module.get_parameter(own).dim()
        if packs := _packs(style):
            _refuse_old_torch(name, style)
            self._distribute(module, packed_shard(max(dimensions - 2, 0), packs), own)
        elif style in ("colwise", "rowwise"):
            self._distribute(module, Shard(max(dimensions - (2 if style == "colwise" else 1), 0)), own)
        elif style not in WHOLE:
            raise _unknown(name, style, ["colwise", "rowwise"])

    def _distribute(self, module: nn.Module, placement: Any, only: str | None = None) -> None:
        from torch.distributed.tensor import distribute_tensor

        for name, whole in list(module.named_parameters(recurse=False)):
            if only in (None, name):
                cut = distribute_tensor(whole.detach(), self.mesh, [placement])
                parameters_of(module)[name] = nn.Parameter(cut, requires_grad=whole.requires_grad)


def _refuse_old_torch(name: str, style: str) -> None:
    if not joins_packed_parts():
        raise StagelineError(
            f"the tensor-parallel plan cuts {name} as {style}, but torch {torch.__version__} cannot join the parts "
            "of packed parameters; use torch 2.13, or pass parallelize=, a function of a stage and the mesh"
        )


def _packs(style: str) -> int:
    """Of how many matrices, one after the other, a weight of this style is made; 0 for other styles.

    >>> _packs("packed_colwise"), _packs("packed_colwise_3"), _packs("colwise")
    (2, 3, 0)
    """
    match = re.fullmatch(r"packed_colwise(?:_(\d+))?", style)
    return int(match[1] or 2) if match else 0


def _unknown(name: str, style: str, known: Collection[str]) -> StagelineError:
    names = ", ".join([*known, "packed_colwise", "replicated_with_grad_allreduce", "moe_tp_experts", *WHOLE])
    return StagelineError(
        f"the tensor-parallel plan of the model has the style {style!r} for {name}, but a pipeline supports only "
        f"{names}; pass "
        "parallelize=, a function of a stage and the mesh, or use a mesh without tp"
    )


def _refuse_other_class(name: str, module: nn.Module, style: str) -> None:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear | nn.Embedding) and isinstance(weight, Tensor) and weight.is_floating_point():
        return
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    kind += f" with a weight of {weight.dtype}" if isinstance(weight, Tensor) else ""
    raise StagelineError(
        f"the tensor-parallel plan of the model cuts {name} ({style}), a {kind}; only nn.Linear and nn.Embedding "
        "with floating-point weights can be cut; pass parallelize=, a function of a stage and the mesh, or use a mesh "
        "without tp"
    )


def run_on_parts(
    module: nn.Module, mesh: DeviceMesh, *, gradients: Any = None, whole_inputs: bool = False, add_up: bool = False
) -> None:
    """Let a module's forward see this process's part of its parameters, as a plain tensor.

    `gradients` is the placement of their gradients, if it is another one. With `whole_inputs`, every process computes
    a term of the gradients of the inputs, and they are added up; with `add_up`, its outputs are.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    swapped: dict[str, Any] = {}

    def shared(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def before(module: nn.Module, args: Any, keywords: Any) -> Any:
        own: dict[str, Any] = parameters_of(module)
        swapped.update({name: parameter for name, parameter in own.items() if is_sharded(parameter)})
        placements = None if gradients is None else [gradients]
        own.update({name: parameter.to_local(grad_placements=placements) for name, parameter in swapped.items()})
        return pytree.tree_map(shared, (args, keywords)) if whole_inputs else None

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        parameters_of(module).update(swapped)
        swapped.clear()
        if not add_up or output is None:
            return output
        total = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return total.to_local()

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def dimension_to_shard(parameter: nn.Parameter) -> Any:
    """Along which dimension FSDP2 shards a parameter that may be cut over tp; None for the first, the default.

    torch cannot join parts of one dimension that is packed and cut twice.
    """
    from torch.distributed.tensor import Shard

    packed = is_sharded(parameter) and any(is_packed(at) and at.dim == 0 for at in parameter.placements)
    return Shard(1) if packed and parameter.dim() > 1 else None


# What a degree must divide.


def head_counts(part: nn.Module) -> dict[nn.Module, dict[str, int]]:
    """The number of heads of every module that has one, by the names of the attributes."""
    counts = {module: {name: getattr(module, name, None) for name in HEADS} for module in part.modules()}
    return {
        module: {name: count for name, count in own.items() if type(count) is int} for module, own in counts.items()
    }


def refuse_uneven(part: nn.Module, degree: int, heads: Mapping[nn.Module, Mapping[str, int]] | None = None) -> None:
    """Refuse a degree that does not divide a dimension that is cut, or the `heads` of a whole attention."""
    for name, size, dimension in _cut_dimensions(part):
        if size % degree:
            raise StagelineError(
                f"tp is {degree}, which does not divide dimension {dimension} of {name}, of size {size}; use a tp "
                "that divides it, or leave that layer whole"
            )
        owner, _, layer = name.rpartition(".")[0].rpartition(".")
        if heads is not None and dimension == 0 and OF_HEADS.fullmatch(layer):
            module = part.get_submodule(owner)
            refuse_counts(name.rpartition(".")[0], type(module).__name__, heads.get(module, {}), degree)


def _cut_dimensions(part: nn.Module) -> Iterator[tuple[str, int, int]]:
    """The parameters that are cut over tp, by name, each with the size and number of the dimension."""
    for name, parameter in part.named_parameters():
        if not is_sharded(parameter):
            continue
        names = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, parameter.placements, strict=False):
            if axis == "tp" and getattr(placement, "dim", None) is not None:
                packs = placement.split_factor if is_packed(placement) else 1
                dimension = placement.dim % parameter.dim()
                size = parameter.shape[dimension]
                yield name, size // packs if size % packs == 0 else 1, dimension

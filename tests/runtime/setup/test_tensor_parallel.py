"""Tensor parallel inside a stage: plans of models, DTensors between stages, refusals; against the plain loop."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import stageline as sl
from stageline.planning.tensor_parallel import cut_units
from stageline.runtime._torch_private import joins_packed_parts
from stageline.tensors.sharded import local
from stageline.testing import run_ranks
from stageline.train.gpt import GPT
from support.meshes import (
    VOCABULARY,
    WIDTH,
    MeshBlock,
    MeshModel,
    compare,
    data,
    error_of,
    loss_fn,
    mesh_of,
    own_forward,
    pipeline,
    quiet,
    sequence_parallel,
    sequential,
    tensor_parallel,
)

# DTensors between stages.


def sharded_sequence(part: Any, mesh: DeviceMesh | None, *, gathered: bool = True) -> None:
    """Every layer takes and returns DTensors that are cut along the sequence; `gathered` logits are plain tensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    assert mesh is not None
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    logits: dict[str, Any] = {"output_layouts": Replicate()} if gathered else {"use_local_output": False}
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **logits),
    }
    for name, style in ends.items():
        if getattr(part, name) is not None:
            parallelize_module(getattr(part, name), mesh["tp"], style)
    for block in part.layers:
        up, down = ColwiseParallel(input_layouts=Shard(1), use_local_output=False), RowwiseParallel(**rows)
        parallelize_module(block, mesh["tp"], {"norm": SequenceParallel(), "up": up, "down": down})


def sharded_vocabulary(part: Any, mesh: DeviceMesh | None) -> None:
    """The same, and logits that stay cut by the vocabulary."""
    sharded_sequence(part, mesh, gathered=False)


def sharded_ends(part: nn.Module, mesh: Any) -> None:
    """Plain tensors that are cut along the sequence leave an embedding, and enter the next layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    styles: dict[Any, Any] = {
        nn.Embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        nn.LayerNorm: SequenceParallel(),
        nn.Linear: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for module in list(part.modules()):
        if type(module) in styles:
            parallelize_module(module, mesh["tp"], styles[type(module)])


def embedding_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), head).double()


def passes_empty_parts() -> bool:
    """Whether torch's linear layers take DTensors of which a process has an empty part: 2.13's do, and 2.11's fail."""
    return Version(torch.__version__) >= Version("2.13")


def uneven_sequences(mesh: DeviceMesh) -> dict[str, str]:
    """A sequence that tp does not divide: right as DTensors, and refused as plain tensors before a process waits."""
    four, five = mesh_of((4,), "tp"), [tensor[:, :5] for tensor in data(0)]
    if passes_empty_parts():
        compare(own_forward(), four, sharded_sequence, "1f1b", 2, max_norm=0.5)
    else:
        refused = error_of(lambda: compare(own_forward(), four, sharded_sequence, "1f1b", 2))
        assert "layers.0 (MeshBlock), whose layers are cut for tp 4, fails: view size" in refused
    expected = loss_fn(own_forward()(five[0]), five[1]).item()
    assert abs(pipeline(own_forward(), mesh, sharded_sequence).step(*five).loss - expected) < 1e-12
    pipe = pipeline(own_forward(), four, sequence_parallel)
    errors = {"uneven": error_of(lambda: pipe.step(*data(0)))}
    pipe = pipeline(embedding_and_head(), mesh, sharded_ends)
    pipe.step(*data(0))
    return errors | {"uneven stages": error_of(lambda: pipe.step(*five))}


class Turning(MeshModel):
    """After its second block, DTensors have other placements in every other microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Turn(self.layers[1])


class Turn(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = block.norm, block.up, block.down
        self.calls = 0

    def forward(self, x: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        self.calls += 1
        return x.redistribute(placements=[Replicate()]) if self.calls % 2 and isinstance(x, DTensor) else x


def turning() -> Turning:
    torch.manual_seed(0)
    return Turning().double()


class CountingNorm(nn.LayerNorm):
    """A norm with a buffer that counts its calls; tensor parallel makes the buffer a DTensor, as the weight."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def counting() -> MeshModel:
    torch.manual_seed(0)
    model = MeshModel()
    for block in model.layers:
        block.norm = CountingNorm(WIDTH)
    return model.double()


def summed(logits: Any, targets: Tensor) -> tuple[Any, dict[str, Any]]:
    """A loss and a metric that are DTensors where the logits are."""
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, {"largest": logits.detach().max()}


def sent_bytes(pipe: sl.Pipeline) -> set[int]:
    """The sizes of the messages to the next stage in the last steps of this process."""
    (executor,) = pipe.runner.executors_for(2, True).executors
    return {size for *_, traffic, _, _, _, _, size in executor.flight.sent if traffic == "forward"}


def on_dtensors(rank: int) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    options: dict[str, Any]
    for schedule, options in (("zb-h1", {}), ("zb-v", {}), ("1f1b", {"recompute": "stage"})):
        compare(own_forward(), mesh, sharded_sequence, schedule, 4, max_norm=0.5, **options)
    compare(turning(), mesh, sharded_sequence, "1f1b", 4)
    compare(counting(), mesh, sharded_sequence, "1f1b", 3, recompute="stage")
    # Parts of the hidden states cross the stages, and the tokens: half of 3 samples × 6 tokens × 8 numbers of 8 bytes.
    for fn, bytes_sent in (
        (sharded_sequence, 576 + 144),
        (sequence_parallel, 576 + 144),
        (tensor_parallel, 1152 + 144),
    ):
        pipe = pipeline(own_forward(), mesh, fn)
        pipe.step(*data(0))
        assert sent_bytes(pipe) == ({bytes_sent} if rank < 2 else set()), (fn, sent_bytes(pipe))
    # The loss, metrics and outputs are DTensors.
    with loss_parallel():
        compare(own_forward(), mesh, sharded_vocabulary, "zb-h1", 4, max_norm=0.5)
        pipe = pipeline(own_forward(), mesh, sharded_vocabulary, loss_fn=summed)
        stats = pipe.step(*data(0))
        whole = pipeline(own_forward(), mesh, tensor_parallel, loss_fn=summed)
        expected = whole.step(*data(0))
        assert abs(stats.loss - expected.loss) < 1e-12
        assert abs(stats.metrics["largest"] - expected.metrics["largest"]) < 1e-12
        output, logits = pipe.predict(data(0)[0]), whole.predict(data(0)[0])
        if rank > 1:
            assert type(output) is Tensor
            assert torch.allclose(output, logits, rtol=1e-12)
    # A failed step puts DTensor buffers back.
    counted = pipeline(counting(), mesh, sharded_sequence, loss_fn=lambda output, target: output.sum() / 0)
    errors = {"not finite": error_of(lambda: counted.step(*data(0)))}
    for name, buffer in counted.named_buffers():
        assert not local(buffer).any(), name
    # Layers that compute something else where they are cut, and optimizers that step plain tensors beside DTensors.
    compare(fixed_heads(), mesh, divide_heads, "1f1b", 3)
    cut = pipeline(fixed_heads(), mesh, cut_attention)
    errors["heads"] = error_of(lambda: cut.step(*data(0)))
    errors["again"] = error_of(lambda: cut.evaluate(*data(0)))
    compare(heads_of_parts(), mesh, partial(cut_heads_of_parts, heads=1), "zb-h1", 3)
    errors["parts"] = error_of(lambda: pipeline(heads_of_parts(), mesh, cut_heads_of_parts).step(*data(0)))
    pipe = pipeline(own_forward(), mesh, tensor_parallel)
    pipe.step(*data(0))
    before = {name: local(parameter).clone() for name, parameter in pipe.named_parameters()}
    errors["optimizer"] = error_of(torch.optim.AdamW(pipe.parameters(), foreach=True).step)
    assert all(torch.equal(local(parameter), before[name]) for name, parameter in pipe.named_parameters())
    torch.optim.AdamW(pipe.parameters(), foreach=False).step()
    tokens = distribute_tensor(data(0)[0], mesh["tp"], [Replicate()])
    errors["batch"] = error_of(lambda: pipe.step(tokens, data(0)[1]))
    return errors | uneven_sequences(mesh)


def test_dtensors_cross_stages_as_parts() -> None:
    for errors in run_ranks(on_dtensors, 4, timeout=300):
        assert "the loss of microbatch 0 is" in errors["not finite"]
        assert "the inputs contain a DTensor; pass plain tensors" in errors["batch"]
        fixed = (
            r"failed in F of stage 0, microbatch 0: .*layers.1 \(FixedHeads\) returns different values .* for tp 2: "
        )
        assert re.search(fixed + r"they differ from those of the whole layer by 0\.\d+ of the largest", errors["heads"])
        assert "layers.1 (FixedHeads) returns different values" in errors["again"]
        assert "layers.1.attention (FixedHeadsOfParts) returns different values" in errors["parts"]
        mixed = r"AdamW would update layers.\d.up.weight, which is a DTensor, and .*weight, which is not, in one call"
        assert re.search(mixed, errors["optimizer"])
        assert (
            "tp is 4, which does not divide dimension 1 of an activation, of size 6: its parts have the sizes 2, 2, 2, "
            "0, but a layer joins them as if they were equal; pad that dimension, such as the sequence, to 8, use a tp "
            "that divides it, or pass DTensors on between layers (use_local_output=False)"
        ) in errors["uneven"]
        assert (
            "failed in F of stage 0, microbatch 0: StagelineError: tp is 2, which does not divide dimension 1 of an "
            "activation, of size 5: its parts have the sizes 3, 2, but stage 0 passes them on as plain tensors; pad"
        ) in errors["uneven stages"]


# Plans of models.


def gpt(heads: int = 2, vocabulary: int = VOCABULARY, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary, 6, WIDTH, 4, heads, tied=tied).double()


def frozen_gpt() -> GPT:
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "blocks.1.qkv", "head")))
    return model


def planned_blocks() -> nn.Sequential:
    """A model whose blocks have plans, each its own."""
    model = sequential()
    model[2].tp_plan = {"up": "colwise", "down": "rowwise"}  # type: ignore[assignment]
    model[3].tp_plan = {"up": "colwise_rep"}  # type: ignore[assignment]
    return model


def planned(**plan: str) -> MeshModel:
    """A model with a plan of its own: pairs of a name in a block and a style."""
    model = own_forward()
    model.tp_plan = {f"layers.*.{name}": style for name, style in plan.items()}  # type: ignore[assignment]
    return model


class Attention(nn.Module):
    """Three heads of four features."""

    n_heads = 3

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.wo(self.wq(x).view(*x.shape[:-1], -1, 4).flatten(-2)))


class AttentionOfBranches(nn.Module):
    """The same three heads, without an attribute that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.wo(self.wq(x).view(*x.shape[:-1], -1, 4).flatten(-2)))


class FixedHeads(Attention):
    """Two heads, whatever part of the features it has: wrong where it is cut, without an error."""

    n_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wq(x).unflatten(-1, (self.n_heads, -1))
        return torch.as_tensor(x + self.wo((heads * heads.mean(-1, keepdim=True)).flatten(-2)))


class FixedHeadsOfParts(FixedHeads):
    """The same inside of a block: it takes a whole sequence, and may return a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wq(x).unflatten(-1, (self.n_heads, -1))
        return torch.as_tensor(self.wo((heads * heads.mean(-1, keepdim=True)).flatten(-2)))


class HeadsBlock(MeshBlock):
    def __init__(self) -> None:
        super().__init__()
        self.attention = FixedHeadsOfParts()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(x))


def heads_of_parts() -> MeshModel:
    model = own_forward()
    model.layers[1] = HeadsBlock()
    return model.double()


def cut_heads_of_parts(part: Any, mesh: Any, heads: int = 2) -> None:
    """Cut the sequence between the layers, and an attention, as torchtitan does."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    sequence_parallel(part, mesh)
    plan = {
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.wq": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    for module in part.modules():
        if isinstance(module, HeadsBlock):
            parallelize_module(module, mesh["tp"], plan)
            module.attention.n_heads = heads


def fixed_heads() -> MeshModel:
    model = own_forward()
    model.layers[1] = FixedHeads()
    return model.double()


def three_heads() -> MeshModel:
    model = own_forward()
    model.layers[1] = Attention()
    return model.double()


def three_branches() -> MeshModel:
    model = own_forward()
    model.layers[1] = AttentionOfBranches()
    return model.double()


def cut_attention(part: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for module in part.modules():
        if hasattr(module, "wq"):
            parallelize_module(module, mesh["tp"], {"wq": ColwiseParallel(), "wo": RowwiseParallel()})


def divide_heads(part: Any, mesh: Any) -> None:
    """Cut an attention, and let it know how many heads it has."""
    cut_attention(part, mesh)
    for module in part.modules():
        if isinstance(module, FixedHeads):
            module.n_heads = 1


def odd_width() -> MeshModel:
    model = own_forward()
    model.layers[1].up, model.layers[1].down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)
    return model.double()


class Float8Linear(nn.Linear):
    """Named as torchao's."""


def in_float8() -> MeshModel:
    model = own_forward()
    model.layers[2].up = Float8Linear(WIDTH, 2 * WIDTH)
    return model.double()


def to_float8(part: Any, mesh: Any) -> None:
    """Convert layers before they are cut."""
    for module in part.modules():
        if isinstance(module, MeshBlock):
            module.up.__class__ = Float8Linear
    tensor_parallel(part, mesh)


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the all-reduces that layers of this process start."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_c10d_functional.all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


def adds_up_as_planned(pipe: sl.Pipeline) -> None:
    """A step adds up over tp as often as a plan counts."""
    pipe.zero_grad()
    with Sums() as sums:  # type: ignore[no-untyped-call]
        pipe.step(*data(0))
    total = torch.tensor(sums.count)
    torch.distributed.all_reduce(total)
    model = gpt()
    units = cut_units(model, tuple(unit.name for unit in sl.split(model, 1, example=data(0)[0]).units))
    expected = sum(unit.forward + unit.backward for unit in units.values())
    assert int(total) == 2 * pipe.schedule.microbatches * expected > 0


def on_plans(rank: int, folder: str) -> dict[str, str]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    compare(gpt(), mesh, None, "zb-v", 4, max_norm=0.5)
    compare(sl.build(gpt, seed=3), mesh, None, "1f1b", 4, max_norm=0.5, source=gpt, seed=3)
    compare(gpt(vocabulary=VOCABULARY + 1), mesh, None, "zb-h1", 3)  # the layers of an odd vocabulary stay whole
    compare(frozen_gpt(), mesh, None, "zb-h1", 3, max_norm=0.5)
    compare(gpt(tied=True), mesh, None, "zb-h1", 3, max_norm=0.5)
    compare(planned(up="colwise_rep", down="rowwise_rep", norm="sequence_parallel"), mesh, None, "zb-h1", 3)
    compare(planned_blocks(), mesh, None, "1f1b", 3)
    # Optimizers step all parameters of a stage together, as they do by default on GPUs.
    pipe = pipeline(gpt(), mesh)
    pipe.step(*data(0))
    torch.optim.AdamW(pipe.parameters(), foreach=True).step()
    adds_up_as_planned(pipe)
    # Every process of a tensor-parallel group runs the same program.
    files = [Path(folder) / f"{name}.json" for name in ("one", "other")]
    order = sl.schedule("gpipe", ranks=2, microbatches=2)
    other = sl.schedule("1f1b", ranks=2, microbatches=2)
    if rank == 0:
        order.write(files[0])
        other.write(files[1])
    torch.distributed.barrier()
    errors = {
        "order": error_of(lambda: pipeline(gpt(), mesh, schedule=files[rank == 3], microbatches=None)),
        "heads": error_of(lambda: pipeline(gpt(heads=1), mesh)),
        "own heads": error_of(lambda: pipeline(three_heads(), mesh, cut_attention)),
        "no heads": error_of(lambda: pipeline(three_branches(), mesh, cut_attention).step(*data(0))),
        "width": error_of(lambda: pipeline(odd_width(), mesh, tensor_parallel)),
        "style": error_of(lambda: pipeline(planned(up="diagonal"), mesh)),
        "class": error_of(lambda: pipeline(planned(norm="colwise"), mesh)),
        "float8": error_of(lambda: pipeline(in_float8(), mesh, tensor_parallel)),
        "to float8": error_of(lambda: pipeline(own_forward(), mesh, to_float8)),
        "experts": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "pp", "ep"))),
    }
    pipeline(in_float8(), mesh_of((2, 2), "pp", "dp")).step(*data(rank % 2))
    return errors


@pytest.mark.skipif(not joins_packed_parts(), reason="torch cannot join the parts of packed layers, those of the GPT")
def test_models_are_cut_by_their_own_plan(tmp_path: Path) -> None:
    known = {
        "order": r"process 3 \(pp 1, tp 1\) and process 0 \(pp 0, tp 0\) differ in the schedule: .*gpipe",
        "heads": r"tp is 2, which does not divide heads 1 of Block, but blocks.\d.(qkv|up) is cut by",
        "own heads": r"tp is 2, which does not divide n_heads 3 of Attention, but layers.1.wq is cut by heads",
        "no heads": r"failed in F of stage 0, microbatch 0: .*layers.1 \(AttentionOfBranches\), whose layers are cut "
        r"for tp 2, fails: shape .* is invalid for input of size 108. If the whole layer does not, 2 probably does not "
        r"divide the number of its heads",
        "width": r"tp is 2, which does not divide dimension 0 of layers.1.up.weight, of size 15; use a tp that divides",
        "style": r"the tensor-parallel plan of the model has the style 'diagonal' for layers.\d.up, but a "
        r"pipeline supports only colwise, .*; pass parallelize=",
        "class": r"the tensor-parallel plan of the model cuts layers.\d.norm \(colwise\), a .*LayerNorm .*; only nn",
        "float8": r"layers.2.up is a Float8Linear, but float8 cannot be combined .*; use bfloat16 there, or float8 "
        r"in a mesh of pp and dp_replicate",
        "to float8": r"layers.\d.up is a Float8Linear, but float8 cannot be combined",
        "experts": r"the mesh has the dimension 'ep' of size 2, .*; expert parallelism is not supported; keep all",
    }
    for errors in run_ranks(on_plans, 4, str(tmp_path), timeout=120):
        assert list(errors) == list(known)
        for what, pattern in known.items():
            assert re.search(pattern, errors[what]), (what, errors[what])


# Models of Hugging Face.

TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def from_config(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    return make(AutoConfig.for_model(kind, **{**TINY, **options})).double()


def llama() -> Any:
    return from_config("llama")


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(llama(), adapters).double()


def with_dora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).double()


def on_huggingface(rank: int) -> dict[str, str]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    compare(sl.build(llama, seed=3), mesh, None, "zb-v", 4, max_norm=0.5, source=llama, seed=3)
    return {"heads": error_of(lambda: pipeline(from_config("llama", num_key_value_heads=1), mesh))}


def test_huggingface_models_are_cut_by_their_own_plan() -> None:
    for errors in run_ranks(on_huggingface, 4, timeout=200):
        expected = "tp is 2, which does not divide num_key_value_heads 1 of LlamaConfig, but model.layers."
        assert expected in errors["heads"]


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("qwen2", "mistral", "gemma2", "phi", "phi3", "olmo2", "cohere", "starcoder2", "glm4")},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen3_moe": {**MOE, "within": 1e-5},
    "mixtral": {"num_local_experts": 4, **MOE, "within": 1e-5},  # its router computes in float32
    "gemma3_text": {"within": 1e-5},  # its norms compute in float32
    "deepseek_v3": {**MLA, **MOE, "within": 1e-5},
}
"""Models, and options of their configs."""
PACKED = ("qwen3_moe", "mixtral", "deepseek_v3")
"""Those with layers of two matrices in one weight."""


def on_families(rank: int) -> None:
    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    for kind, options in FAMILIES.items():
        within = {"within": options["within"]} if "within" in options else {}
        model = from_config(kind, **{name: value for name, value in options.items() if name != "within"})
        if kind in PACKED and not joins_packed_parts():
            assert "cannot join the parts of packed" in error_of(lambda model=model: pipeline(model, mesh))
        else:
            compare(model, mesh, None, "zb-h1", 3, **within)
    compare(from_config("qwen3"), mesh, None, "zb-h1", 4, max_norm=0.5)
    compare(with_lora(), mesh, None, "zb-h1", 4, max_norm=0.5)
    assert "the only adapter that can be cut is plain LoRA" in error_of(lambda: pipeline(with_dora(), mesh))


@pytest.mark.mesh_matrix
@pytest.mark.timeout(600)
def test_families_of_huggingface_models_are_cut_by_their_own_plan() -> None:
    run_ranks(on_families, 4, timeout=500)

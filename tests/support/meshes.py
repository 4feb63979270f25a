"""Models, plans and the plain loop for tests of pipelines in a larger mesh."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import OrderedDict
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import stageline as sl

WIDTH, VOCABULARY, STEPS = 8, 12, 3


class MeshBlock(nn.Module):
    """Norm, two linear layers and a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.norm(x)))))


class Scale(nn.Module):
    """Scales by a buffer, which the forward counts up, and of which every process may hold a part."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: Tensor
        self.register_buffer("factors", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * whole_of(self.factors).clone()
        self.factors.add_(0.125)
        return torch.as_tensor(scaled)


class MeshModel(nn.Module):
    """A model with a forward of its own: an embedding, a stack of blocks, a norm and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MeshBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.norm(x)))


def own_forward() -> MeshModel:
    torch.manual_seed(0)
    return MeshModel().double()


def sequential(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [MeshBlock() for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).double()


def tied_sequential() -> nn.Sequential:
    """A head that uses the embedding's weight, which two processes cannot share evenly."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *(MeshBlock() for _ in range(4)), head).double()


def tied_own_forward() -> MeshModel:
    model = own_forward()
    model.head.weight = model.embedding.weight
    return model


def linear_pairs() -> nn.Sequential:
    """Layers whose inputs and outputs are those of linear layers that are cut."""
    torch.manual_seed(0)
    pairs = [nn.Sequential(OrderedDict(up=nn.Linear(WIDTH, 16), down=nn.Linear(16, WIDTH))) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *pairs, nn.Linear(WIDTH, VOCABULARY)).double()


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data(share: int, samples: int = 6, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The samples of one data coordinate."""
    generator = torch.Generator().manual_seed(100 + share)
    tokens = torch.randint(VOCABULARY, (samples, 6), generator=generator)
    return tokens.to(device), torch.randint(VOCABULARY, (samples, 6), generator=generator).to(device)


def tensor_parallel(part: nn.Module, mesh: DeviceMesh | None) -> None:
    """Cut the two linear layers of every block, as transformers are cut."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert mesh is not None
    for module in part.modules():
        if hasattr(module, "up"):
            parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(part: Any, mesh: DeviceMesh | None) -> None:
    """Cut everything: between the layers, and between stages, every process has its part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    assert mesh is not None
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name, style in ends.items():
        if getattr(part, name) is not None:
            parallelize_module(getattr(part, name), mesh["tp"], style)
    for block in part.layers:
        up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh["tp"], {"norm": SequenceParallel(), "up": up, "down": down})


def sharded(part: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """Shard every block, and then the rest of the stage."""
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    for module in part.modules():
        if isinstance(module, MeshBlock):
            fully_shard(module, mesh=mesh["dp_shard"])
    fully_shard(part, mesh=mesh["dp_shard"])
    return part


def both(part: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    tensor_parallel(part, mesh)
    return sharded(part, mesh)


def plain_loop(
    model: nn.Module, shares: list[tuple[Tensor, Tensor]], microbatches: int, max_norm: float | None = None
) -> dict[str, Any]:
    """Three steps of one process on the samples of all data coordinates."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = sum(len(inputs) for inputs, _ in shares)
    losses, norms, gradients = [], [], dict[str, Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in shares:
            for x, y in zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
                if len(x):
                    part = loss_fn(model(x), y) * (len(x) / total)
                    part.backward()  # type: ignore[no-untyped-call]
                    loss += part.item()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        gradients = {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        optimizer.step()
        losses.append(loss)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": dict(model.state_dict())}


def whole_of(tensor: Any) -> Tensor:
    return torch.as_tensor(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def assert_close(mine: Tensor, expected: Tensor, what: str, within: float = 1e-9) -> None:
    """Every element is within 1e-9 of the largest, or `within` another fraction of it."""
    assert mine.shape == expected.shape, what
    error = (mine.to(expected.device) - expected).abs().max().item()
    assert error <= within * max(expected.abs().max().item(), 1e-30), (what, error)


def train(pipe: sl.Pipeline, samples: int = 6, max_norm: float | None = None) -> dict[str, Any]:
    """The same three steps of a pipeline, on this process's share of the samples."""
    # On GPUs, torch's default updates all parameters in one call, which takes no mix of tensors and DTensors.
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=False)
    device = next(pipe.parameters()).device
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipe.step(*data(pipe.replica, samples + pipe.replica, device)).loss)
        if max_norm is not None:
            norms.append(pipe.clip_grad_norm_(max_norm).item())
        gradients = {name: whole_of(grad) for name, grad in pipe.named_gradients() if grad is not None}
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": pipe.state_dict(gather=True)}


def compare(
    model: nn.Module,
    mesh: DeviceMesh,
    fn: Any,
    schedule: str | sl.Schedule,
    microbatches: int,
    max_norm: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a pipeline and the plain loop, and compare losses, gradients and weights after three steps."""
    name = schedule if isinstance(schedule, str) else schedule.name
    what = f"{type(model).__name__} {name} M={microbatches} {mesh.mesh_dim_names}"
    source, within = options.pop("source", None) or copy.deepcopy(model), options.pop("within", 1e-9)
    pipe = sl.Pipeline(
        source, loss_fn=loss_fn, schedule=schedule, microbatches=microbatches, mesh=mesh, parallelize=fn, **options
    )
    device = next(model.parameters()).device
    shares = [data(share, 6 + share, device) for share in range(pipe.replicas)]
    expected, mine = plain_loop(model, shares, microbatches, max_norm), train(pipe, max_norm=max_norm)
    for kind in ("losses", "norms"):
        for one, other in zip(mine[kind], expected[kind], strict=True):
            assert abs(one - other) <= within * abs(other), (what, kind, one, other)
    for name, grad in mine["gradients"].items():
        assert_close(grad, expected["gradients"][name], f"{what}: gradient of {name}", within)
    assert list(mine["weights"]) == list(expected["weights"])
    for name, weight in mine["weights"].items():
        assert_close(weight, expected["weights"][name], f"{what}: {name}", within)
    return mine


def penalize(model: nn.Module, mesh: DeviceMesh, fn: Any) -> None:
    """A penalty on parameters that are cut counts once: the loss and the gradients of the plain loop."""

    def penalty(name: str, value: Any) -> Any:
        return value.abs().sum() * 1e-2 if "weight" in name else None

    pipe = pipeline(copy.deepcopy(model), mesh, fn, schedule="zb-v", penalty=penalty)
    shares = [data(share, 6 + share) for share in range(pipe.replicas)]
    loss: Any = sum(
        value for name, parameter in model.named_parameters() if (value := penalty(name, parameter)) is not None
    )
    for inputs, targets in shares:
        for x, y in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
            loss = loss + loss_fn(model(x), y) * (len(x) / sum(len(inputs) for inputs, _ in shares))
    loss.backward()
    assert abs(pipe.step(*shares[pipe.replica]).loss - loss.item()) <= 1e-9 * loss.item()
    expected: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, grad in pipe.named_gradients():
        assert_close(whole_of(grad), expected[name], f"gradient of {name} with a penalty")


def frees_whole_parameters(mesh: DeviceMesh, fn: Any) -> None:
    """A pipeline holds the parts of parameters that were cut, and not the whole ones that they were cut from."""
    for model in (sequential(), own_forward()):
        before = [weakref.ref(parameter) for parameter in model.parameters()]
        pipe = pipeline(model, mesh, fn)
        gc.collect()
        now = {id(parameter) for parameter in pipe.model.parameters()}
        assert not [1 for whole in before if (left := whole()) is not None and id(left) not in now]


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 4, {}),
    ("interleaved", 4, {"chunks": 2}),
    ("zb-h1", 4, {}),
    ("zb-v", 4, {}),
    ("zb-v", 1, {}),
    ("synthesized", 4, {}),
]
"""Schedules, one of them with fewer microbatches than ranks."""


@cache
def synthesized(ranks: int, microbatches: int) -> sl.Schedule:
    """A schedule for stages of different costs, two on every rank; the same on all processes."""
    schedules: list[Any] = [None]
    if dist.get_rank() == 0:
        stages = range(2 * ranks)
        costs = sl.Costs(
            forward=[3 + stage % 3 for stage in stages],
            backward_input=[4 + stage % 2 for stage in stages],
            backward_weight=[2 + stage % 4 for stage in stages],
            transfer=1,
        )
        plan = sl.synthesize(costs, ranks, microbatches, chunks=2, memory=2 * ranks + 1, time_limit=2)
        schedules = [plan.schedule]
    dist.broadcast_object_list(schedules)
    schedule: sl.Schedule = schedules[0]
    return schedule


def compare_schedules(
    model: nn.Module, mesh: DeviceMesh, fn: Any, cases: list[tuple[str, int, dict[str, Any]]], again: bool = False
) -> dict[str, Any]:
    """Train as the plain loop with every schedule, and with the bits of the same mesh without pp."""
    inner = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "pp")]
    ranks = mesh["pp"].size()
    alone: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for name, microbatches, options in cases:
        if microbatches not in alone:
            alone[microbatches] = compare(model, inner, fn, "1f1b", microbatches, max_norm=0.5)
        schedule = synthesized(ranks, microbatches) if name == "synthesized" else name
        for _ in range(1 + again):
            result = compare(model, mesh, fn, schedule, microbatches, max_norm=0.5, **options)
            assert_same(result, alone[microbatches], f"{mesh.mesh_dim_names} {name} {microbatches}")
    return result


def mesh_of(shape: tuple[int, ...], *names: str, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def quiet() -> None:
    """torch warns of what a test does on purpose, such as several collectives for one tensor."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def error_of(call: Any) -> str:
    try:
        call()
    except sl.StagelineError as error:
        return str(error)
    return ""


def pipeline(model: Any, mesh: DeviceMesh, fn: Any = None, **options: Any) -> sl.Pipeline:
    options = {"loss_fn": loss_fn, "microbatches": 2, **options}
    return sl.Pipeline(model, mesh=mesh, parallelize=fn, **options)


def checks(mesh: DeviceMesh, fn: Any, **options: Any) -> None:
    """`sl.check` in a mesh: right, and "different" with a layer that is wrong by a hundredth of a percent."""
    batch = data(0, samples=12)
    for model in (sequential(), own_forward()):
        report = sl.check(model, batch, loss_fn=loss_fn, mesh=mesh, parallelize=fn, microbatches=3, **options)
        assert report.verdict == "reordered", str(report)
        assert report.compared == len(dict(model.named_parameters()))

    def wrong(part: Any, inner: Any) -> None:
        fn(part, inner)
        for name, module in part.named_modules():
            if name == "2":
                module.register_forward_hook(lambda module, inputs, output: output * 1.0001)

    report = sl.check(sequential(), batch, loss_fn=loss_fn, mesh=mesh, parallelize=wrong, microbatches=3, **options)
    assert report.verdict == "different", str(report)


def assert_same(one: dict[str, Any], other: dict[str, Any], what: str = "") -> None:
    """Two runs have the same bits, as far as both have gradients."""
    lists = [f"{kind}: {one[kind]} and {other[kind]}" for kind in ("losses", "norms") if one[kind] != other[kind]]
    tensors = [
        f"{kind} of {name}"
        for kind in ("gradients", "weights")
        for name in one.get(kind, {}).keys() & other.get(kind, {}).keys()
        if not torch.equal(one[kind][name], other[kind][name])
    ]
    if lists or tensors:
        raise AssertionError("; ".join([what, *lists, *sorted(tensors)]))

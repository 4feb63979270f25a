"""Models, plans and the plain loop for tests of pipelines in a larger mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [MeshBlock() for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)).double()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data(share: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    """The samples of one data coordinate."""
    generator = torch.Generator().manual_seed(100 + share)
    tokens = torch.randint(VOCABULARY, (samples, 5), generator=generator)
    return tokens, torch.randint(VOCABULARY, (samples, 5), generator=generator)


def tensor_parallel(part: nn.Module, mesh: DeviceMesh | None) -> None:
    """Cut the two linear layers of every block, as transformers are cut."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert mesh is not None
    for module in part.modules():
        if isinstance(module, MeshBlock):
            parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


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


def assert_close(mine: Tensor, expected: Tensor, what: str) -> None:
    """Every element is within 1e-9 of the largest."""
    assert mine.shape == expected.shape, what
    error = (mine - expected).abs().max().item()
    assert error <= 1e-9 * max(expected.abs().max().item(), 1e-30), (what, error)


def train(pipe: sl.Pipeline, samples: int = 6, max_norm: float | None = None) -> dict[str, Any]:
    """The same three steps of a pipeline, on this process's share of the samples."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipe.step(*data(pipe.replica, samples + pipe.replica)).loss)
        if max_norm is not None:
            norms.append(pipe.clip_grad_norm_(max_norm).item())
        gradients = {name: whole_of(grad) for name, grad in pipe.named_gradients() if grad is not None}
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": pipe.state_dict(gather=True)}


def compare(
    model: nn.Module,
    mesh: DeviceMesh,
    fn: Any,
    schedule: str,
    microbatches: int,
    max_norm: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a pipeline and the plain loop, and compare losses, gradients and weights after three steps."""
    what = f"{type(model).__name__} {schedule} M={microbatches} {mesh.mesh_dim_names}"
    source = options.pop("source", None) or copy.deepcopy(model)
    pipe = sl.Pipeline(
        source, loss_fn=loss_fn, schedule=schedule, microbatches=microbatches, mesh=mesh, parallelize=fn, **options
    )
    shares = [data(share, 6 + share) for share in range(pipe.replicas)]
    expected, mine = plain_loop(model, shares, microbatches, max_norm), train(pipe, max_norm=max_norm)
    for kind in ("losses", "norms"):
        for one, other in zip(mine[kind], expected[kind], strict=True):
            assert abs(one - other) <= 1e-9 * abs(other), (what, kind, one, other)
    for name, grad in mine["gradients"].items():
        assert_close(grad, expected["gradients"][name], f"{what}: gradient of {name}")
    assert list(mine["weights"]) == list(expected["weights"])
    for name, weight in mine["weights"].items():
        assert_close(weight, expected["weights"][name], f"{what}: {name}")
    return mine

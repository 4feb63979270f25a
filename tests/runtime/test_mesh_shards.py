"""A pipeline whose stages FSDP2 shards, against the plain loop in float64."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import stageline as sl
from stageline.runtime._torch_private import ShardGroups
from stageline.schedules.sharding import lower_sharding
from stageline.testing import run_ranks
from support.meshes import (
    CASES,
    assert_close,
    assert_same,
    checks,
    compare,
    compare_schedules,
    data,
    error_of,
    frees_whole_parameters,
    loss_fn,
    mesh_of,
    own_forward,
    penalize,
    pipeline,
    quiet,
    sequential,
    sharded,
    tied_own_forward,
    tied_sequential,
    train,
    whole_of,
)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the gathers and reductions that this process starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            self.counts[kind.strip("_")] += kind in str(func)
        return func(*args, **(kwargs or {}))


def frozen() -> nn.Sequential:
    model = sequential()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name or name.startswith("5"))
    return model


def counts_tokens(mesh: DeviceMesh) -> None:
    """A loss per token, with different numbers of them in the replicas."""

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    model = sequential()
    pipe = pipeline(sequential(), mesh, sharded, loss_fn=summed, loss_reduction="count")
    shares = [data(share, 6 + share) for share in range(pipe.replicas)]
    count = float(sum(target.numel() for _, target in shares))
    stats = pipe.step(*shares[pipe.replica], count=count)
    loss = sum((summed(model(inputs), target) for inputs, target in shares), torch.zeros(())) / count
    loss.backward()  # type: ignore[no-untyped-call]
    assert stats.loss == pytest.approx(loss.item(), rel=1e-12)
    expected: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, grad in pipe.named_gradients():
        assert_close(whole_of(grad), expected[name], name)


def mixes_precision(mesh: DeviceMesh, schedule: str, how: str) -> None:
    """FSDP2's own mixed precision: bfloat16 in the layers, and sums in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def fn(part: Any, inner: Any) -> None:
        for layer in part:
            fully_shard(layer, mesh=inner["dp_shard"], mp_policy=policy)

    half = sequential().bfloat16()
    pipe = pipeline(
        sequential().bfloat16().float(), mesh, fn, microbatches=3, schedule=schedule, reshard_after_forward=how
    )
    loss = pipe.step(*data(pipe.replica)).loss
    total, sums = 0.0, dict[str, Tensor]()
    for share in range(2):
        for x, y in zip(*(part.tensor_split(3) for part in data(share)), strict=True):
            half.zero_grad()
            part = loss_fn(half(x), y) * (len(x) / 12)
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
            for name, parameter in half.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()
    assert loss == pytest.approx(total, rel=1e-5)
    for name, grad in pipe.named_gradients():
        mine = whole_of(grad)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, sums[name], rtol=1e-4, atol=1e-6)


def mixes_precision_as_alone(mesh: DeviceMesh) -> None:
    """With FSDP2's mixed precision, stages have the bits of FSDP2 alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def fn(part: Any, inner: Any) -> None:
        for layer in part:
            fully_shard(layer, mesh=inner["dp_shard"], mp_policy=policy)

    rows = ((mesh, "zb-h1"), (mesh["dp_shard"], "1f1b"))
    results = [train(pipeline(sequential().float(), row, fn, schedule=name), max_norm=0.5) for row, name in rows]
    assert_same(results[0], results[1])


def adapts(mesh: DeviceMesh) -> None:
    """LoRA: most parameters are frozen, and a group of FSDP2 has both kinds."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, sequential()).double()
    assert 0 < sum(parameter.requires_grad for parameter in model.parameters()) < len(list(model.parameters())) / 2
    compare(model, mesh, None, "zb-v", 4, max_norm=0.5)
    compare(model, mesh_of((2, 2), "pp", "dp_replicate"), None, "zb-h1", 4, max_norm=0.5)


class Start(nn.Embedding):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), torch.zeros((), dtype=self.weight.dtype)


class Experts(nn.Module):
    """Two experts, and a loss that grows with their imbalance, which is added to that of the layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
        x, imbalance = pair
        gates = self.router(x).softmax(-1)
        mixed = sum(expert(x) * gates[..., i : i + 1] for i, expert in enumerate(self.experts))
        return x + mixed, imbalance + gates.mean((0, 1)).square().sum()


def balances_experts(mesh: DeviceMesh) -> None:
    """The auxiliary loss of every microbatch counts by its share of the samples of all processes."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(output[0].sum(-1), target.double()) + 0.1 * output[1]

    torch.manual_seed(2)
    model = nn.Sequential(Start(12, 8), *(Experts() for _ in range(4))).double()
    for rows in (mesh, mesh_of((2, 2), "pp", "dp_replicate")):
        pipe = pipeline(copy.deepcopy(model), rows, None, schedule="zb-v", loss_fn=loss)
        shares = [data(share, 6 + share) for share in range(pipe.replicas)]
        total: Any = 0.0
        model.zero_grad()
        for inputs, targets in shares:
            for x, y in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
                total = total + loss(model(x), y) * (len(x) / sum(len(inputs) for inputs, _ in shares))
        total.backward()
        assert pipe.step(*shares[pipe.replica]).loss == pytest.approx(total.item(), rel=1e-12)
        expected: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, grad in pipe.named_gradients():
            assert_close(whole_of(grad), expected[name], name)


def follows_the_schedule(mesh: DeviceMesh) -> None:
    """A step gathers and reduces every part as often as the schedule says, and its backward is split."""
    rank = mesh.get_local_rank("pp")
    most = 0
    enter = ShardGroups.enter

    def counted(self: Any, state: Any) -> None:
        nonlocal most
        enter(self, state)
        most = max(most, sum(group.is_unsharded for group in self._groups))

    ShardGroups.enter = counted  # type: ignore[method-assign]
    for schedule, how, gathers in (("1f1b", "default", 1), ("zb-h1", "never", 1), ("zb-h1", "always", 12)):
        pipe = pipeline(sequential(), mesh, None, schedule=schedule, microbatches=6, reshard_after_forward=how)
        parts: Any = pipe.runner.stages.local_parts()
        groups = sum(any(True for _ in layer.parameters()) for part in parts for layer in part)
        sharding = pipe.schedule.sharding
        assert sharding is not None
        assert (sharding.count("UNSHARD", rank), sharding.count("REDUCE_GRAD", rank)) == (gathers, 1)
        assert "sharding" in pipe.certificate.rules
        for _ in range(2):
            with Collectives() as collectives:
                stats = pipe.step(*data(pipe.replica))
            assert stats.unsplit == 0
            expected = {"allgather_base": gathers * groups, "reduce_scatter_base": groups}
            assert collectives.counts == expected, collectives.counts
        assert most == (1 if how == "always" else groups)  # one block at a time, and the next is on its way
        most = 0
        with Collectives() as collectives:
            pipe.evaluate(*data(pipe.replica))
        once = groups if how != "always" else 6 * groups
        assert collectives.counts == {"allgather_base": once, "reduce_scatter_base": 0}
        # The measured step has the times of all shard actions.
        timeline = stats.measured()
        assert timeline.schedule.sharding == sharding
        timed = list(timeline.shard_actions())
        assert len(timed) == len(sharding)
        assert all(timeline.first_start <= action.start <= action.end <= timeline.last_end for action in timed)
        first = next(action for action in timed if action.rank == 1)
        assert first.action.kind == "UNSHARD"
        assert first.end <= next(timeline.actions(rank=1)).start
        most = 0
    ShardGroups.enter = enter  # type: ignore[method-assign]


def first_layers(part: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    if isinstance(part[0], nn.Embedding):
        fully_shard(part[0], mesh=mesh["dp_shard"])


class Modes(nn.Module):
    """A layer whose forward depends on its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x) * (2.0 if self.training else 1.0)


def compiles(mesh: DeviceMesh) -> None:
    """Compiled units have the same bits with FSDP2 as in replicas, and the backward of some is split."""
    from torch._dynamo.utils import counters  # takes seconds

    replicas = mesh_of((2, 2), "pp", "dp_replicate")
    always: dict[str, Any] = {"reshard_after_forward": "always"}
    results = [
        compare(own_forward(), rows, None, "zb-v", 4, compile="graphs", **more)
        for rows, more in ((mesh, always), (replicas, {}))
    ]  # without clipping: the norm of a parameter is rounded in another way if it is that of its parts
    assert_same(results[0], results[1])
    source = sequential()
    source[2] = Modes().double()
    before = counters["frames"]["ok"]
    pipe = pipeline(copy.deepcopy(source), mesh, None, schedule="zb-h1", compile="graphs")
    assert pipe.step(*data(pipe.replica)).unsplit < 1
    assert counters["frames"]["ok"] > before
    for training in (True, False):  # compiled code that FSDP2 manages would not look at the mode
        pipe.train(training)
        source.train(training)
        expected = sum(loss_fn(source(inputs), targets).item() for inputs, targets in map(data, range(2))) / 2
        assert pipe.evaluate(*data(pipe.replica)).loss == pytest.approx(expected, rel=1e-12)


def on_shards(rank: int) -> dict[str, str]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "dp_shard")
    compare_schedules(sequential(), mesh, sharded, CASES)
    compare_schedules(sequential(), mesh_of((2, 2), "dp_replicate", "pp"), None, [CASES[2]])
    # Every block, without a function; gathered for every action.
    compare(own_forward(), mesh, None, "zb-v", 4, max_norm=0.5, reshard_after_forward="always")
    compare(sl.build(own_forward, seed=3), mesh, sharded, "zb-h1", 4, source=own_forward, seed=3)
    compare(frozen(), mesh, sharded, "zb-v", 4, max_norm=0.5)
    counts_tokens(mesh)
    mixes_precision(mesh, "zb-h1", "default")
    balances_experts(mesh)
    follows_the_schedule(mesh)
    pipe = pipeline(sequential(), mesh)
    pipe.step(*data(pipe.replica))
    pipe.evaluate(*data(pipe.replica))
    # A schedule may bring its own shard actions.
    own = lower_sharding(sl.schedule("zb-h1", 2, 2), reshard_after_forward="always", prefetch=0)
    brought = pipeline(sequential(), mesh, schedule=own, microbatches=None)
    brought.step(*data(pipe.replica))
    assert brought.schedule.sharding == own.sharding
    other = lower_sharding(sl.schedule("1f1b", 2, 2), [0])
    refused = error_of(lambda: pipeline(sequential(), mesh, schedule=other, microbatches=None))
    often = error_of(lambda: pipeline(sequential(), mesh, reshard_after_forward="often"))
    # Between steps, only parts are in memory, also after an evaluation.
    assert all(hasattr(parameter, "full_tensor") for parameter in pipe.parameters())
    frees_whole_parameters(mesh, sharded)
    # Gradients accumulate over steps.
    pipe = pipeline(sequential(), mesh, sharded)
    pipe.step(*data(pipe.replica))
    once = {name: whole_of(grad).clone() for name, grad in pipe.named_gradients()}
    pipe.step(*data(pipe.replica))
    for name, grad in pipe.named_gradients():
        assert_close(whole_of(grad), 2 * once[name], name)
    # Weights that stages of different ranks, and of one rank, share.
    compare(tied_sequential(), mesh, None, "zb-h1", 4, max_norm=0.5)
    compare(tied_own_forward(), mesh, sharded, "zb-v", 4, max_norm=0.5)
    return {
        "tied": error_of(lambda: pipeline(tied_sequential(), mesh, first_layers)),
        "name": pipe.runner.host.layout.name(3),
        "stages": refused,
        "often": often,
    }


def test_sharded_rows_train_as_the_plain_loop() -> None:
    for errors in run_ranks(on_shards, 4, timeout=400):
        assert errors["tied"].startswith("ranks 0 and 1 use the parameter 0.weight; it is cut by (Shard(dim=0),) over")
        assert "on rank 0 and is whole on rank 1: make parallelize cut both in the same way, or" in errors["tied"]
        assert errors["name"] == "process 3 (pp 1, dp_shard 1)"
        assert "1f1b has shard actions for stages [0], but stages [0, 1] are sharded" in errors["stages"]
        assert errors["often"] == "reshard_after_forward must be default, always or never, got 'often'"


def with_more_options(rank: int) -> None:
    quiet()
    mesh = mesh_of((2, 2), "pp", "dp_shard")
    compare_schedules(own_forward(), mesh, sharded, CASES[-2:-1], again=True)
    compare_schedules(sequential(), mesh_of((2, 2), "dp_replicate", "pp"), None, [CASES[-1]])
    compare(own_forward(), mesh, sharded, "1f1b", 4, max_norm=0.5, reshard_after_forward="always")
    for model in (sequential(), own_forward()):
        compare(model, mesh, None, "zb-h1", 4, max_norm=0.5)
    for make in (sequential, own_forward):
        compare(sl.build(make, seed=3), mesh, sharded, "zb-v", 4, source=make, seed=3)
    compare(sequential(), mesh_of((4,), "dp_shard"), sharded, "1f1b", 4, max_norm=0.5)
    compare(sequential(), mesh, sharded, "1f1b", 4, recompute="stage")
    for recompute in ("stage", "*"):
        compare(own_forward(), mesh, sharded, "zb-h1", 4, recompute=recompute, reshard_after_forward="always")
    checks(mesh, sharded)
    penalize(sequential(), mesh, None)
    for schedule, how in (("1f1b", "default"), ("zb-v", "always")):
        mixes_precision(mesh, schedule, how)
    mixes_precision_as_alone(mesh)
    compiles(mesh)
    adapts(mesh)
    for schedule in ("1f1b", "zb-v"):
        compare(sl.build(tied_sequential, seed=3), mesh, None, schedule, 4, source=tied_sequential, seed=3)


@pytest.mark.mesh_matrix
@pytest.mark.timeout(600)
def test_options_compiled_units_and_adapters_in_sharded_rows() -> None:
    run_ranks(with_more_options, 4, timeout=500)

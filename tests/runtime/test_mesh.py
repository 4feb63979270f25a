"""A pipeline as one row of a larger mesh: tensor parallel, against the plain loop in float64."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import stageline as sl
from stageline.distributed.layout import Layout
from stageline.runtime.microbatches import digest
from stageline.testing import run_ranks
from support.meshes import (
    CASES,
    STEPS,
    MeshBlock,
    MeshModel,
    Scale,
    assert_close,
    assert_same,
    both,
    checks,
    compare,
    compare_schedules,
    data,
    error_of,
    frees_whole_parameters,
    linear_pairs,
    loss_fn,
    mesh_of,
    own_forward,
    penalize,
    pipeline,
    plain_loop,
    quiet,
    sequence_parallel,
    sequential,
    sharded,
    tensor_parallel,
    tied_own_forward,
    tied_sequential,
    whole_of,
)


def replaced(part: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(part)


def renamed(part: nn.Module, mesh: Any) -> None:
    for block in part.modules():
        if isinstance(block, MeshBlock):
            block.other = block.norm
            del block.norm


def halved(part: nn.Module, mesh: Any) -> None:
    for block in part.modules():
        if isinstance(block, MeshBlock):
            block.up = nn.Linear(8, 8)


def new_head(part: Any, mesh: Any) -> None:
    """Put another module with the same parameters in the place of the last layer, and cut that."""
    if getattr(part, "head", None) is not None:
        head = nn.Linear(8, 12, bias=False, device="meta")
        head.weight = part.head.weight
        part.head = head
    sequence_parallel(part, mesh)


def only_on(applies: bool, part: nn.Module, mesh: Any) -> None:
    if applies:
        tensor_parallel(part, mesh)


def fail_on(fails: bool, part: nn.Module) -> None:
    if fails:
        raise LookupError("planted")


def cause_of(call: Any) -> str:
    """The class of the exception that an error of a pipeline comes from."""
    try:
        call()
    except sl.StagelineError as error:
        inner: BaseException = error
        while inner.__cause__ is not None:
            inner = inner.__cause__
        return type(inner).__name__
    return ""


def frozen() -> MeshModel:
    """A model with frozen parameters, cut and whole ones, on both ranks."""
    model = own_forward()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embedding", "layers.0", "layers.2.up", "layers.3.norm")))
    return model


def compiled(part: nn.Module, mesh: Any) -> None:
    """Compile blocks in place."""
    tensor_parallel(part, mesh)
    for block in part.modules():
        if isinstance(block, MeshBlock):
            block.compile(backend="eager")


def wrapped(part: Any, mesh: Any) -> None:
    """Wrap blocks in what recomputes them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, block in part.named_children():
        if isinstance(block, MeshBlock):
            setattr(part, name, checkpoint_wrapper(block))


def wrapped_by_torch(part: Any, mesh: Any) -> None:
    """Put compiled blocks in the place of blocks, as torchtitan does."""
    for name, block in part.layers.named_children():
        part.layers.register_module(name, torch.compile(block, backend="eager"))


def columns(column: DeviceMesh, rank: int) -> None:
    """Every column of a mesh is a pipeline of its own, with its own weights, samples and number of steps."""
    share = rank % 2
    model = sequential()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share / 8)
    if share:
        pipeline(copy.deepcopy(model), column).step(*data(share))
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # so processes differ in the number of their groups
    pipe = pipeline(copy.deepcopy(model), column, schedule="zb-h1", microbatches=4)
    assert (pipe.ranks, pipe.replicas, pipe.replica) == (2, 1, 0)
    assert [pipe.runner.host.layout.name(at) for at in range(2)] == [
        f"process {share} (pp 0)",
        f"process {share + 2} (pp 1)",
    ]
    optimizer, losses, norms = torch.optim.AdamW(pipe.parameters(), lr=1e-2), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipe.step(*data(share)).loss)
        norms.append(pipe.clip_grad_norm_(0.5).item())
        optimizer.step()
    expected = plain_loop(model, [data(share)], 4, max_norm=0.5)
    assert_same({"losses": losses, "norms": norms, "weights": pipe.state_dict(gather=True)}, expected)
    assert "differ" in error_of(lambda: pipe.step(*data(rank)))
    assert sl.check(model, data(share), loss_fn=loss_fn, mesh=column).verdict == "equal"


def cuts_buffers(mesh: DeviceMesh) -> None:
    """Every process holds a part of a buffer that the forward changes; digests of such tensors, and of subclasses."""

    def fn(part: nn.Module, inner: Any) -> None:
        tensor_parallel(part, inner)
        for module in part.modules():
            if isinstance(module, Scale):
                module.factors = distribute_tensor(module.factors, inner["tp"], [Shard(0)])

    layers = list(sequential())
    model = nn.Sequential(*layers[:3], Scale(), *layers[3:])
    mine = compare(model, mesh, fn, "zb-h1", 4)
    assert mine["weights"]["3.factors"][0] == 0.5 + 0.125 * 4 * STEPS
    report = sl.check(model, data(0), loss_fn=loss_fn, mesh=mesh, parallelize=fn, microbatches=2)
    assert report.verdict == "reordered", str(report)
    numbers = torch.arange(4.0)
    for placement in (Replicate(), Shard(0)):
        one, other = (distribute_tensor(values, mesh["tp"], [placement]) for values in (numbers, numbers + 1))
        assert digest(one) == digest(one.clone()) != digest(other)
    kind: Any = TwoTensor
    first, second = (kind(numbers, numbers + more) for more in (0, 1))
    assert digest(first) == digest(kind(numbers, numbers)) != digest(second)


def on_tensors(rank: int) -> dict[str, Any]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    compare_schedules(sequential(), mesh, tensor_parallel, CASES)
    compare_schedules(own_forward(), mesh, tensor_parallel, CASES[-2:-1], again=True)
    turned = mesh_of((2, 2), "tp", "pp")  # in any order
    compare(sequential(), turned, tensor_parallel, "1f1b", 4)
    alone = compare(sequential(), mesh_of((4,), "tp"), tensor_parallel, "1f1b", 4, max_norm=0.5)
    assert len(alone["norms"]) == 3
    # From functions that build the layers: each process keeps only its part of a parameter.
    seen: list[bool] = []

    def on_meta(part: nn.Module, inner: DeviceMesh | None) -> None:
        assert inner is not None
        assert inner.mesh_dim_names == ("tp",)
        seen.extend(parameter.is_meta for parameter in part.parameters())
        tensor_parallel(part, inner)

    for make in (sequential, own_forward):
        compare(sl.build(make, seed=3), mesh, on_meta, "zb-h1", 4, source=make, seed=3)
    assert seen
    assert all(seen)
    # Between layers and between stages, every process has its part of the sequence; and stages of linear layers alone.
    compare(own_forward(), mesh, sequence_parallel, "zb-h1", 4, max_norm=0.5)
    compare(linear_pairs(), mesh, tensor_parallel, "zb-h1", 4, max_norm=0.5)
    # A weight that is tied, and cut in the same way at both ends.
    compare(tied_own_forward(), mesh, sequence_parallel, "zb-v", 4, max_norm=0.5)
    compare(tied_sequential(), mesh, tensor_parallel, "zb-h1", 4)  # tied, and whole
    # torch's SequenceParallel would train frozen norms.
    compare(frozen(), mesh, sequence_parallel, "zb-h1", 3, max_norm=0.5)
    compare(sl.build(frozen, seed=3), mesh, sequence_parallel, "1f1b", 3, source=frozen, seed=3)
    penalize(own_forward(), mesh, sequence_parallel)
    split = pipeline(sequential(), mesh, tensor_parallel, schedule="zb-h1")
    assert split.step(*data(0)).unsplit == 0  # the backward of a layer that is cut runs in two halves
    checks(mesh, tensor_parallel, schedule="zb-h1")
    frees_whole_parameters(mesh, tensor_parallel)
    cuts_buffers(mesh)
    # A state of the whole model goes into the parts, and what is not cut is the same on all.
    pipe = pipeline(sequential(), mesh, tensor_parallel)
    state = {name: value + 1 for name, value in sequential().state_dict().items()}
    pipe.load_state_dict(state)
    for name, value in pipe.state_dict(gather=True).items():
        assert torch.equal(value, state[name]), name
    misshapen = {**state, "0.weight": torch.ones(3)}  # a process of another stage refuses it, too
    assert "0.weight has the shape (3,), and (12, 8) in the model" in error_of(lambda: pipe.load_state_dict(misshapen))
    inf = pipe.step(*data(0)).loss
    norms = [pipe.grad_norm(norm_type).item() for norm_type in (1.0, 2.0, float("inf"))]
    grads = [whole_of(grad) for _, grad in pipe.named_gradients() if grad is not None]
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(
        gathered, [torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), float("inf")).item()]
    )
    assert norms[2] == pytest.approx(max(value for (value,) in gathered), rel=1e-12)
    # Evaluation and prediction.
    model = sequential()
    model.load_state_dict(state)
    assert pipe.evaluate(*data(0)).loss == pytest.approx(inf, rel=1e-12)
    outputs = pipe.predict(data(0)[0])
    if outputs is not None:
        assert_close(outputs, model(data(0)[0]).detach(), "outputs")
    errors = {
        "samples": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel).step(*data(rank % 2))),
        "replaced": error_of(lambda: pipeline(sequential(), mesh, replaced)),
        "renamed": error_of(lambda: pipeline(sequential(), mesh, renamed)),
        "wrapped": error_of(lambda: pipeline(sequential(), mesh, wrapped)),
        "wrapped by torch": error_of(lambda: pipeline(own_forward(), turned["pp"], wrapped_by_torch)),
        "halved": error_of(lambda: pipeline(sequential(), mesh, halved)),
        "new layer": error_of(lambda: pipeline(own_forward(), mesh, new_head)),
        "nothing": error_of(lambda: pipeline(sequential(), mesh)),
        "graphs": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, cuda_graphs=True)),
        "compile": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, compile="eager")),
        "compiled": error_of(lambda: pipeline(sequential(), mesh, compiled)),
        "two directions": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, schedule="chimera")),
        "not callable": error_of(lambda: pipeline(sequential(), mesh, "tp")),
        "unnamed": error_of(lambda: pipeline(sequential(), init_device_mesh("cpu", (2, 2)), tensor_parallel)),
        "unknown": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "pp", "shards"), sharded)),
        "context": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "pp", "cp"), sharded)),
        "too small": error_of(lambda: pipeline(sequential(), mesh_of((2,), "pp"), None)),
        "twice": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "dp", "dp_replicate"), None)),
        "parallelize": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel if rank else both)),
        "mesh": error_of(lambda: pipeline(sequential(), mesh if rank else turned, tensor_parallel)),
        "one uncut": error_of(lambda: pipeline(sequential, mesh, lambda part, inner: only_on(rank != 1, part, inner))),
        "one fails": error_of(lambda: pipeline(sequential(), mesh, lambda part, inner: fail_on(rank == 2, part))),
    }
    errors["cause"] = cause_of(lambda: pipeline(sequential(), mesh, lambda part, inner: fail_on(rank == 2, part)))
    own = mesh_of((2, 2), "pp", "tp")  # its groups cannot be used afterwards
    errors["one does not join"] = error_of(
        lambda: pipeline(sequential(), own, lambda part, inner: only_on(rank != 3, part, inner), deadline=5.0)
    )
    columns(mesh_of((2, 2), "pp", "dp")["pp"], rank)
    still = pipeline(sequential(), mesh, tensor_parallel)
    still.step(*data(0))
    assert repr(still.mesh) == repr(mesh)
    assert (still.ranks, still.replicas, still.replica) == (2, 1, 0)
    return errors


def test_tensor_parallel_rows_train_as_the_plain_loop_and_mistakes_are_named() -> None:
    results = run_ranks(on_tensors, 4, timeout=400)
    known = {
        "samples": r"process 1 \(pp 0, tp 1\) received a different batch from process 0 \(pp 0, tp 0\): the inputs "
        r"differ, and processes that differ only in pp or tp take the same samples",
        "replaced": r"parallelize returned another Sequential for stage \d; change the stage in place, and return",
        "renamed": r"parallelize changed the names of the parameters of stage \d: \d.norm.weight is gone and "
        r"\d.other.weight is new; keep the names",
        "wrapped": r"_checkpoint_wrapped_module.* is new; keep .* \(pass recompute= instead of wrapping modules\)$",
        "wrapped by torch": r"_orig_mod.* is new; keep .* \(pass compile= instead of wrapping modules\)$",
        "halved": r"parallelize changed the shape of \d.up.weight from \(16, 8\) to \(8, 8\)",
        "new layer": r"process \d \(pp 1, tp \d\) .*parallelize replaced head of stage 1 by another module \(Linear\) "
        r"and cut that; replace it in the model before the pipeline is created, and cut it in place",
        "nothing": r"the mesh has tp 2, but it is unknown which layers to cut: Sequential has no tp_plan; pass",
        "graphs": r"cuda_graphs=True cannot be combined with stages whose parameters are sharded",
        "compile": r"compile= cannot be combined with tensor-parallel layers \(the mesh has tp 2\)",
        "compiled": r"cannot be combined with tensor-parallel layers \(the mesh has tp 2\), nor can module.compile\(\)",
        "two directions": r"parallelize is applied to a stage with .*, whose parameters other stages or ranks also use",
        "not callable": r"parallelize must be a function of a stage and a mesh that changes the stage in place, got",
        "unnamed": r"mesh= must be a DeviceMesh whose dimensions are named pp, dp, dp_replicate, dp_shard, tp, in any "
        r"order, but DeviceMesh.* has no names; pass mesh_dim_names=",
        "unknown": r"the mesh has the dimension 'shards' of size 2, but a pipeline supports only pp, dp, dp_replicate, "
        r"dp_shard, tp; rename it \(did you mean 'dp_shard'\?\), or create a mesh without it",
        "context": r"the mesh has the dimension 'cp' of size 2, .*; context parallelism is not supported",
        "too small": r"the mesh \(pp 2\) contains the processes \[0, 1\], but 4 were started; it must contain each of "
        r"them once, or be part of a mesh that does, such as world\[\"pp\"\]",
        "twice": r"the mesh has both 'dp' and 'dp_replicate', which are the same dimension; keep one",
        "parallelize": r"process 0 \(pp 0, tp 0\) and process 1 \(pp 0, tp 1\) differ in parallelize: .*",
        "mesh": r"process 0 \(.*\) and process 1 \(.*\) differ in replicas and mesh: process 0 .* has .*Layout.*",
        "one uncut": r"process 1 \(pp 0, tp 1\) and process 0 \(pp 0, tp 0\) have the same stages, but parallelize "
        r"cut them differently: process 1 .* has '1.up.weight is whole.*' and process 0 .* has '1.up.weight is "
        r"cut by \(Shard\(dim=0\),\) over tp 2.*'; cut them in the same way on all processes",
        "one fails": r"^process 2 \(pp 1, tp 0\) failed to build its stages: parallelize raised an error for stage 1: "
        r"LookupError: planted$",
        "one does not join": r"^process 2 \(pp 1, tp 0\) failed to build its stages: .*; it waited for another "
        r"process: parallelize must do the same on all processes$",
    }
    causes = [errors.pop("cause") for errors in results]
    assert causes == ["PipelineError", "PipelineError", "LookupError", "PipelineError"]
    for errors in results:
        assert list(errors) == list(known)
        for what, pattern in known.items():
            assert re.search(pattern, errors[what]), (what, errors[what])


def test_a_layout_knows_its_neighbours() -> None:
    layout = Layout(((0, 4), (1, 5), (2, 6), (3, 7)), shards=2, tensors=2, names=("pp", "dp_shard", "tp"))
    assert layout.coordinates(6) == {"dp_replicate": 0, "dp_shard": 1, "tp": 0, "pp": 1}
    assert layout.neighbours(6, ["dp_shard"]) == (4, 6)
    assert layout.neighbours(6, ["dp_shard", "tp"]) == (4, 5, 6, 7)
    assert (layout.data_rows, [layout.data_row(row) for row in range(4)]) == (2, [0, 0, 1, 1])

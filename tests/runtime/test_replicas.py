"""Replicas of a pipeline: two times two processes compute what one loop over all their samples would."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import stageline as sl
from stageline.runtime.step_report import add_up
from stageline.testing import Child, FaultyStage, ForkServer, assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import Block, batch, noisy, tied_model, token_loss
from support.ports import free_port

RANKS, REPLICAS, MICROBATCHES = 2, 2, 4
LAYERS = 8
FAMILIES = {"1f1b": {}, "zb-h1": {}, "zb-v": {}, "interleaved": {"chunks": 2}, "dualpipe": {}, "chimera": {}}
Gradients = dict[str, Tensor | None]


def model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(layers)))


def data(replica: int, samples: int = 9) -> tuple[Tensor, Tensor]:
    """The samples of a replica."""
    x, y = batch()
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (samples, *x.shape[1:])
    return torch.randn(shape, generator=generator), torch.randn((samples, *y.shape[1:]), generator=generator)


def pipeline(model: nn.Module, schedule: str = "1f1b", **options: Any) -> sl.Pipeline:
    arguments = {"ranks": RANKS, "replicas": REPLICAS, "microbatches": MICROBATCHES, **options}
    return sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, **arguments)


def alone(
    plain: nn.Module,
    samples: list[int],
    schedule: sl.Schedule,
    before: list[Gradients] | None = None,
) -> tuple[Gradients, list[float], list[Gradients]]:
    """A plain loop over each replica's samples, weighed by those of all: gradients added over replicas, the losses, and
    each replica's gradients. `before` is what each replica's gradients hold already."""
    total, losses, by_replica = sum(samples), [], []
    for replica, count in enumerate(samples):
        for name, parameter in plain.named_parameters():
            held = None if before is None else before[replica][name]
            parameter.grad = None if held is None else held.clone()
        x, y = data(replica, count)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return functional.mse_loss(output, target) * (len(output) / total)

        ways = schedule.placement.direction.tolist() if schedule.placement.directions > 1 else None
        losses.append(one_process_step(plain, loss_fn, x, y, MICROBATCHES, loss_reduction="sum", directions=ways))
        by_replica.append(gradients(plain))
    return added(by_replica), losses, by_replica


def added(by_replica: list[Gradients]) -> Gradients:
    """Gradients of replicas, added in their order; a missing one counts as zeros."""
    sums: Gradients = {}
    for name in by_replica[0]:
        there = [grad for grad in (one[name] for one in by_replica) if grad is not None]
        sums[name] = sum(there[1:], start=there[0]) if there else None
    return sums


def mine(pipe: sl.Pipeline, expected: Gradients) -> tuple[Gradients, Gradients]:
    grads = dict(pipe.named_gradients())
    return grads, {name: expected[name] for name in grads}


def families(rank: int) -> dict[str, Any]:
    """Every family twice, with samples that differ between replicas: the bits, and whether both runs have the same."""
    results = {}
    for name, options in FAMILIES.items():
        samples, losses, kept = [9, 6], [], []
        for _ in range(2):
            plain = model()
            pipe = pipeline(copy.deepcopy(plain), name, **options)
            stats = pipe.step(*data(pipe.replica, samples[pipe.replica]))
            expected, alone_losses, _ = alone(plain, samples, pipe.schedule)
            assert_same_bits(*mine(pipe, expected), f"gradients of {name}")
            losses.append(stats.loss)
            kept.append({key: grad.clone() for key, grad in pipe.named_gradients() if grad is not None})
            assert stats.loss == add_up(alone_losses)
            assert stats.samples == 15
            assert stats.microbatches == len(stats.losses) == 4
        assert_same_bits(dict(kept[0]), dict(kept[1]))
        results[name] = (losses, sorted(kept[0]))
    return results


def test_gradients_are_those_of_one_loop_over_the_samples_of_all_replicas() -> None:
    results = run_ranks(families, 4)
    for name in FAMILIES:
        assert len({str(result[name][0]) for result in results}) == 1
        held = [set(result[name][1]) for result in results]
        assert held[0] == held[2]
        assert held[1] == held[3]
        assert held[0] | held[1] == {key for key, _ in model().named_parameters()}


def accumulates(rank: int) -> None:
    """Two steps accumulate, and a third adds to the sum; clipping uses the norm over all stages."""
    plain = model()
    pipe = pipeline(copy.deepcopy(plain), "zb-v", bucket_mb=0.001)
    both, samples = data(pipe.replica), [9, 9]
    pipe.step(*both, sync=False)
    expected, _, by_replica = alone(plain, samples, pipe.schedule)
    assert_same_bits(*mine(pipe, by_replica[pipe.replica]), "gradients of this replica")
    with pytest.raises(sl.StagelineError, match="accumulated with sync=False"):
        pipe.clip_grad_norm_(1.0)
    pipe.step(*both)
    expected, _, _ = alone(plain, samples, pipe.schedule, before=by_replica)
    assert_same_bits(*mine(pipe, expected), "gradients of two steps")
    nothing: Gradients = dict.fromkeys(expected)
    pipe.step(*both, sync=False)
    _, _, by_replica = alone(plain, samples, pipe.schedule, before=[expected, nothing])
    pipe.step(*both)
    expected, _, _ = alone(plain, samples, pipe.schedule, before=by_replica)
    assert_same_bits(*mine(pipe, expected), "gradients that were added up before, and of two steps")
    for name, parameter in plain.named_parameters():
        parameter.grad = expected[name]
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert pipe.clip_grad_norm_(0.1) == norm
    assert_same_bits(*mine(pipe, gradients(plain)), "clipped gradients")


class Choosy(Block):
    """Uses its second half only for samples that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.as_tensor(x + self.sometimes(x)) if float(x.detach().sum()) > 1e3 else x


def precisions(rank: int) -> None:
    """bfloat16 is added in float32 and rounded once; float32 in bfloat16, on request; frozen ones are skipped."""
    for dtype, reduce_dtype in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        plain = model(2).to(dtype)
        pipe = pipeline(copy.deepcopy(plain), reduce_dtype=reduce_dtype)
        for network in (plain, pipe.model):
            network[0].up.requires_grad_(False)  # type: ignore[index]
        by_replica = []
        for replica in range(2):
            plain.zero_grad()
            x, y = (part.to(dtype) for part in data(replica))

            def loss_fn(output: Tensor, target: Tensor) -> Tensor:
                return functional.mse_loss(output, target) * (len(output) / 18)

            one_process_step(plain, loss_fn, x, y, MICROBATCHES, loss_reduction="sum")
            by_replica.append(gradients(plain))
        pipe.step(*(part.to(dtype) for part in data(pipe.replica)))
        added_in = reduce_dtype or torch.float32
        for name, grad in pipe.named_gradients():
            first, second = by_replica[0][name], by_replica[1][name]
            if "0.up" in name:
                assert grad is first is second is None
            else:
                assert isinstance(first, Tensor)
                assert isinstance(second, Tensor)
                assert_same_bits({name: grad}, {name: (first.to(added_in) + second.to(added_in)).to(dtype)})


def unused(rank: int) -> None:
    """A parameter that one replica uses has its gradient in all; one that none uses has none."""
    torch.manual_seed(3)
    plain = nn.Sequential(Choosy(), Block())
    pipe = pipeline(copy.deepcopy(plain), "1f1b")
    x, y = data(0)
    pipe.step(x + (1e3 if pipe.replica else 0.0), y)
    grads = dict(pipe.named_gradients())
    if 0 in pipe.runner.stages.local:
        assert grads["0.sometimes.weight"] is not None
        assert grads["0.sometimes.weight"].abs().sum() > 0
        assert grads["0.never.weight"] is None
        seen = grads["0.sometimes.weight"].tolist()
        assert pipe.runner.replicas is not None
        texts = [pipe.runner.replicas.group.broadcast(str(seen), replica) for replica in range(2)]
        assert texts[0] == texts[1]


def buffers(rank: int) -> None:
    """Buffers that training changes are those of the first replica, in all of them."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = pipeline(copy.deepcopy(plain), "1f1b")
    pipe.step(torch.ones(8, 4) * torch.arange(8.0)[:, None] * (1 + pipe.replica), torch.zeros(8, 4))
    one_process_step(plain, functional.mse_loss, torch.arange(8.0)[:, None] * torch.ones(8, 4), torch.zeros(8, 4), 4)
    there = dict(plain.named_buffers())
    assert_same_bits(dict(pipe.named_buffers()), {name: there[name] for name, _ in pipe.named_buffers()})
    whole = pipe.state_dict(gather=True)
    assert list(whole) == list(plain.state_dict())


def ties(rank: int) -> tuple[Tensor, float]:
    """A weight that two stages use: added over its uses, then over replicas; the same for all who use it."""
    plain = tied_model()
    pipe = sl.Pipeline(
        copy.deepcopy(plain), loss_fn=token_loss, schedule="zb-h1", ranks=2, replicas=2, microbatches=3,
        loss_reduction="sum",
    )  # fmt: skip
    tokens = [torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    stats = pipe.step(tokens[pipe.replica], tokens[pipe.replica])
    total = 0.0
    for batch_tokens in tokens:
        total += one_process_step(plain, token_loss, batch_tokens, batch_tokens, 3, loss_reduction="sum")
    assert stats.loss == pytest.approx(total, rel=1e-6)
    for name, grad in pipe.named_gradients():
        assert grad is not None
        torch.testing.assert_close(grad, gradients(plain)[name])
    return dict(pipe.named_gradients())["0.weight"], float(pipe.clip_grad_norm_(0.5))  # type: ignore[return-value]


def dropout(rank: int) -> list[tuple[int, tuple[float, ...]]]:
    """The same twice; the replicas get the same samples."""
    results = []
    for _ in range(2):
        pipe = pipeline(noisy(), "1f1b", seed=7, loss_reduction="sum")
        results.append((pipe.replica, pipe.step(*batch()).losses))
    return results


def meshes(rank: int) -> tuple[int, list[list[int]]]:
    """Any order of processes; the same bits."""
    plain = model(4)
    expected, losses, _ = alone(plain, [9, 9], sl.schedule("1f1b", ranks=2, microbatches=MICROBATCHES))
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mixed = DeviceMesh("cpu", [[[3], [1]], [[0], [2]]], mesh_dim_names=("dp_replicate", "pp", "tp"))
    for mesh, replica in ((outer, rank % 2), (mixed, [1, 0, 1, 0][rank])):
        pipe = sl.Pipeline(copy.deepcopy(plain), loss_fn=functional.mse_loss, mesh=mesh, microbatches=MICROBATCHES)
        assert (pipe.ranks, pipe.replicas, pipe.replica, pipe.mesh) == (2, 2, replica, mesh)
        assert pipe.step(*data(pipe.replica)).loss == add_up(losses)
        assert_same_bits(*mine(pipe, expected))
    # Without a mesh of one's own, one of the pipeline's groups; and one of replicas alone.
    pipe = pipeline(copy.deepcopy(plain))
    everyone = torch.tensor([float(rank)])
    torch.distributed.all_reduce(everyone, group=pipe.mesh.get_group("dp"))
    assert everyone.item() == [2.0, 4.0, 2.0, 4.0][rank]
    lone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    single = sl.Pipeline(copy.deepcopy(plain), loss_fn=functional.mse_loss, mesh=lone, microbatches=MICROBATCHES)
    assert (single.ranks, single.replicas) == (1, 4)
    expected, losses, _ = alone(plain, [5, 6, 7, 8], single.schedule)
    assert single.step(*data(rank, 5 + rank)).loss == add_up(losses)
    for name, grad in single.named_gradients():
        torch.testing.assert_close(grad, expected[name])
    return pipe.replica, pipe.mesh.mesh.tolist()


def evaluates(rank: int) -> float:
    """The loss over the samples of all replicas, the outputs of this one's, and metrics weighed as the loss is."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return functional.mse_loss(output, target), {"half": functional.mse_loss(output, target).detach() / 2}

    plain = model(4)
    pipe = sl.Pipeline(copy.deepcopy(plain), loss_fn=loss_fn, ranks=2, replicas=2, microbatches=MICROBATCHES)
    x, y = data(pipe.replica, 9 - 3 * pipe.replica)
    evaluation = pipe.evaluate(x, y, outputs=True)
    stats = pipe.step(x, y)
    assert stats.metrics["half"] == pytest.approx(stats.loss / 2, rel=1e-6)
    x, y = (torch.cat(parts) for parts in zip(data(0, 9), data(1, 6), strict=True))
    assert evaluation.loss == pytest.approx(functional.mse_loss(plain(x), y).item(), rel=1e-6)
    assert stats.loss == evaluation.loss
    assert (evaluation.outputs is None) == (rank % 2 == 0)
    assert evaluation.outputs is None or len(evaluation.outputs) == 9 - 3 * pipe.replica
    assert pipe.predict(x[: 4 + pipe.replica]) is None or rank % 2
    return stats.loss


def overlap(rank: int) -> tuple[int, list[int]]:
    """After how many actions the sum of each bucket started, and how many actions there are."""
    pipe = pipeline(model(), "zb-v", bucket_mb=0.001)
    assert pipe.runner.replicas is not None
    group: Any = pipe.runner.replicas.group
    begun, add = [], group.all_reduce_async
    host: Any = pipe.runner.host

    def watched(flat: Tensor) -> Any:
        begun.append(host._control.done)
        return add(flat)

    group.all_reduce_async = watched
    before = host._control.done
    pipe.step(*data(pipe.replica))
    return host._control.done - before, [actions - before for actions in begun]


def sparse(rank: int) -> str:
    """Gradients that cannot be reduced fail the step on all processes; none waits for another."""
    layers = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4))
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, ranks=2, replicas=2, microbatches=2, compare_weights=False)
    with pytest.raises(sl.PipelineError) as caught:
        pipe.step(torch.arange(4), torch.zeros(4, 4))
    return str(caught.value)


def several(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for check in (accumulates, precisions, unused, buffers, ties, dropout, meshes, evaluates, overlap, sparse):
        results[check.__name__] = check(rank)
    return results


def test_replicas_train_as_one() -> None:
    results = run_ranks(several, 4)
    tied, norms = zip(*(result["ties"] for result in results), strict=True)
    assert all(torch.equal(weight, tied[0]) for weight in tied)
    assert len(set(norms)) == 1
    for losses in (result["dropout"] for result in results):
        assert losses[0] == losses[1]
    first, second = results[0]["dropout"][0][1], results[2]["dropout"][0][1]
    assert first != second
    alike = sl.Pipeline(noisy(), loss_fn=functional.mse_loss, ranks=2, microbatches=4, seed=7, loss_reduction="sum")
    assert first == alike.step(*batch()).losses
    assert [result["meshes"] for result in results] == [(0, [[0, 1], [2, 3]])] * 2 + [(1, [[0, 1], [2, 3]])] * 2
    assert len({result["evaluates"] for result in results}) == 1
    for result in results:
        assert "the gradient of 0.weight is 'torch.sparse_coo', but only dense gradients are" in result["sparse"]
    for rank in range(4):
        actions, begun = results[rank]["overlap"]
        assert begun == results[(rank + 2) % 4]["overlap"][1]  # in one order
        assert len(begun) > 4
        assert begun[0] < actions


def mistakes(rank: int) -> list[str]:
    """A failure in one replica is reported in all of them, and the next step succeeds."""
    errors = []

    def attempt(call: Any) -> None:
        try:
            call()
            errors.append("nothing")
        except sl.StagelineError as error:
            errors.append(str(error))

    attempt(lambda: pipeline(model(), replicas=None))
    attempt(lambda: pipeline(model(), replicas=3))
    attempt(lambda: pipeline(model(), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))))
    attempt(
        lambda: pipeline(
            model(), ranks=4, replicas=None, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        )
    )
    attempt(lambda: pipeline(model(), bucket_mb=25 + rank // 3))

    def odd_weights() -> None:
        network = model()
        if rank == 3:
            with torch.no_grad():
                network[6].up.bias += 1  # type: ignore[union-attr, operator]
        pipeline(network)

    attempt(odd_weights)
    plain = model()
    layers = [FaultyStage(layer) for layer in copy.deepcopy(plain)]
    pipe = pipeline(nn.Sequential(*layers), "zb-v")
    x, y = data(pipe.replica)
    expected, _, _ = alone(plain, [9, 9], pipe.schedule)
    odd = rank == 3
    attempt(lambda: pipe.step(x + odd, y))
    attempt(lambda: pipe.step(x, y[: 9 - odd]))
    attempt(lambda: pipe.step(None if pipe.replica else x, y))
    attempt(lambda: pipe.step(x, y, sync=not odd))
    attempt(lambda: pipeline(model(), loss_reduction="count").step(x, y, count=4 + pipe.replica))
    frozen = layers[3].requires_grad_(pipe.replica == 0)
    attempt(lambda: pipe.step(x, y))
    frozen.requires_grad_(True)
    attempt(lambda: pipe.step(x, y) if rank < 2 else pipe.evaluate(x, y))
    attempt(lambda: pipe.step(x, y, stage_kwargs={1: {"mask": x}} if odd else None))
    for action, microbatch in (("F", 2), ("B", 3)):
        if pipe.replica == 1:
            layers[2].plant(_planted, action, microbatch)  # type: ignore[arg-type]
        attempt(lambda: pipe.step(x, y))
    if odd:
        layers[2].plant(lambda value: value * float("nan"), "F", 1)
    attempt(lambda: pipe.step(x, y))
    pipe.zero_grad()
    pipe.step(x, y)
    grads = {name.replace(".inner", ""): grad for name, grad in pipe.named_gradients()}
    assert_same_bits(grads, {name: expected[name] for name in grads}, "gradients after all that")
    return errors


def _planted(value: Tensor) -> Tensor:
    raise ArithmeticError("planted")


def test_a_mistake_in_one_replica_is_said_in_all_and_the_next_step_is_right() -> None:
    results = run_ranks(mistakes, 4)
    kept = "no parameter was changed, and gradients may hold part of this step"
    wanted = [
        r"the schedule has 2 ranks, but 4 processes were started; start 2, or pass ranks=4, or replicas=2 \(2 × 2",
        r"3 replicas of 2 ranks need 6 processes, but 4 were started; start 6, or replicas=2",
        r"the mesh has 1 ranks and 1 replicas; the schedule has 2 ranks and replicas=2 was passed; make them agree",
        r"the mesh has 2 ranks and 2 replicas; the schedule has 4 ranks; make them agree",
        r"rank 3 and rank 0 differ in bucket_mb and reduce_dtype",
        r"rank 3 \(replica 1\) and rank 1 \(replica 0\) hold different values of 6.up.bias, which both use: rank 3",
        r"replica 1: rank 3 received a different batch from rank 2: the inputs differ",
        r"rank 3 \(replica 1\) cannot run this batch: StagelineError: there are 9 samples of inputs and 8 of targets",
        r"replica 1: no rank received the inputs",
        r"rank 3 \(replica 1\) and rank 0 \(replica 0\) differ in the call: rank 3 \(replica 1\) calls "
        r"step\(…, sync=False\) and rank 0 \(replica 0\) calls step; make the same call in all processes",
        r"rank 2 .* differ in count=: rank 2 \(replica 1\) has 5.0 and rank 0 \(replica 0\) has 4.0; pass the number "
        r"of targets of all replicas together",
        r"replicas 0 and 1 train different parameters on rank 1: \d+ and \d+ elements; freeze the same",
        r"rank 2 .* differ in the call: rank 2 \(replica 1\) calls evaluate and rank 0 \(replica 0\) calls step",
        r"rank 3 \(replica 1\) failed .*: StagelineError: stage_kwargs has 'mask' for stage 1",
        rf"rank 3 \(replica 1\) failed in F of stage 1, microbatch 2: ArithmeticError: planted; {kept}",
        rf"rank 3 \(replica 1\) failed in [BI] of stage 1, microbatch 3: ArithmeticError: planted; {kept}",
        r"rank 3 \(replica 1\) failed in F of stage 1, microbatch 1: ArithmeticError: the loss of microbatch 1 is nan",
    ]
    for rank, errors in enumerate(results):
        assert len(errors) == len(wanted)
        for message, pattern in zip(errors, wanted, strict=True):
            own = pattern.split("StagelineError: ")[-1]  # the rank that failed gets its own error
            assert re.search(own if rank == 3 else pattern, message), (rank, pattern, message)


def test_one_process_has_no_replicas() -> None:
    with pytest.raises(sl.StagelineError, match=r"replicas=2 needs a process .* torchrun --nproc-per-node 4"):
        pipeline(model())
    pipe = pipeline(model(), replicas=1)
    assert (pipe.ranks, pipe.replicas, pipe.replica) == (2, 1, 0)
    with pytest.raises(sl.StagelineError, match="use torchrun"):
        _ = pipe.mesh


def on_gpu(rank: int) -> list[float]:
    """All processes share one GPU, so gradients go through the host; twice the same bits, and those of the loop."""
    losses, kept = [], []
    for _ in range(2):
        plain = model().to("cuda")
        pipe = pipeline(copy.deepcopy(plain), "zb-v", bucket_mb=0.001)
        losses.append(pipe.step(*data(pipe.replica)).loss)
        kept.append({name: None if grad is None else grad.cpu() for name, grad in pipe.named_gradients()})
        total: Gradients = {}
        for replica in range(2):
            plain.zero_grad()
            x, y = (part.to("cuda") for part in data(replica))
            for xi, yi in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
                (functional.mse_loss(plain(xi), yi) * (len(xi) / 18)).backward()  # type: ignore[no-untyped-call]
            for name, grad in gradients(plain).items():
                assert grad is not None
                held = total.get(name)
                total[name] = grad.cpu() if held is None else held + grad.cpu()
        assert_same_bits(kept[-1], {name: total[name] for name in kept[-1]})
    assert_same_bits(kept[0], kept[1])
    return losses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replicas_on_one_gpu_add_up_through_the_host() -> None:
    results = run_ranks(on_gpu, 4)
    assert len({str(result) for result in results}) == 1


# A rank that is lost.


@pytest.fixture
def started(fork_server: ForkServer, tmp_path: Path) -> Iterator[list[Child]]:
    """Four processes that find each other by the environment; none is left."""
    port = free_port()
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        fork_server.start(
            Path(__file__).parents[1] / "support" / "replica_rank.py", "main", [rank, str(tmp_path)],
            log=tmp_path / f"log-{rank}",
            environment={**common, "RANK": str(rank), "STAGELINE_FLIGHT_DIR": str(tmp_path / "flights")},
        )
        for rank in range(4)
    ]  # fmt: skip
    yield ranks
    for rank in ranks:
        rank.signal(signal.SIGKILL)
        rank.wait(200)


def test_a_killed_rank_of_one_replica_is_named_by_all_others(started: list[Child], tmp_path: Path) -> None:
    assert started[2].wait(200) == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert started[rank].wait(200) == 0, (tmp_path / f"log-{rank}").read_text()
        text = (tmp_path / f"said-{rank}").read_text()
        assert text.startswith("rank 2 (replica 1) died (its process exited without reporting an error)"), text
        assert "this job cannot continue; restart it" in text

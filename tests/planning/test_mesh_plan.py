"""Plans for a mesh: what shards and tensor parallel divide, what is gathered; bad meshes; files; the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.cli.app import run
from stageline.planning.profiles import SizedProfiles
from stageline.planning.tensor_parallel import CutUnit, TensorParallel, cut_units
from stageline.schedules.sharding import lower_sharding
from stageline.tensors.sharded import local
from stageline.testing import run_ranks
from support.profiles import even, layer, profile_of

REQUEST: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "time_limit": 0.2}


def plan(units: int = 4, **more: Any) -> sl.Plan:
    """A plan for units with 40 bytes of parameters each."""
    return sl.plan(profile=even(units), **REQUEST | more)


def test_a_mesh_of_pipeline_ranks_alone_is_the_number_of_ranks() -> None:
    alone, mesh = plan(ranks=2), plan(mesh={"pp": 2})
    assert mesh.memory == alone.memory == plan(mesh={"pp": 2, "dp_replicate": 4}).memory
    assert (mesh.ranks, mesh.mesh, alone.mesh) == (2, {"pp": 2}, {})


def test_shards_and_tensor_parallel_divide_parameters_gradients_and_optimizer_state() -> None:
    alone, mesh = plan(ranks=2), plan(mesh={"tp": 2, "pp": 2, "dp_shard": 5}, reshard_after_forward="always")
    for whole, part in zip(alone.memory, mesh.memory, strict=True):
        assert (part.parameters, part.gradients, part.optimizer) == tuple(size / 10 for size in whole[:3])
        # Activations and messages count whole: no statement about them is safe for every model.
        assert (part.activations, part.buffers) == (whole.activations, whole.buffers)
    assert mesh.schedule == alone.schedule


def test_replicas_may_divide_the_optimizer_state() -> None:
    mesh = {"pp": 2, "dp_replicate": 4, "dp_shard": 2}
    whole, part = plan(mesh=mesh).memory[0], plan(mesh=mesh, shard_optimizer=True).memory[0]
    assert part == whole._replace(optimizer=whole.optimizer / 4)
    assert plan(ranks=2, shard_optimizer=True).memory == plan(ranks=2).memory
    with pytest.raises(sl.StagelineError, match="shard_optimizer must be True or False, got 2"):
        plan(ranks=2, shard_optimizer=2)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_gathered_depends_on_when_it_is_freed(tp: int) -> None:
    """A stage has four units of 40 bytes; gradients are as large, and whole until they are reduced."""
    by_policy = {
        policy: plan(8, mesh={"pp": 2, "dp_shard": 4, "tp": tp}, reshard_after_forward=policy).memory[0].gathered
        for policy in ("default", "never", "always")
    }
    assert by_policy == {"default": 320 / tp, "never": 320 / tp, "always": 240 / tp}  # two units at a time
    assert plan(mesh={"pp": 2, "tp": 2}).memory[0].gathered == 0


def test_the_largest_neighbouring_units_of_a_rank_are_gathered() -> None:
    sizes = (10, 60, 30, 20, 6, 4)
    profile = profile_of(*(layer(f"layers.{unit}", parameters=size) for unit, size in enumerate(sizes)))
    memory = sl.plan(
        profile=profile, mesh={"pp": 2, "dp_shard": 2}, layers_per_stage=(3, 3), gradient_bytes_per_parameter=2,
        reshard_after_forward="always", **REQUEST,
    ).memory  # fmt: skip
    assert [rank.gathered for rank in memory] == [90 + 50, 26 + 15]
    assert [rank.parameters for rank in memory] == [50, 15]


@pytest.mark.parametrize("policy", ["default", "always"])
@pytest.mark.parametrize("family", ["1f1b", "interleaved", "zb-v"])
def test_what_is_gathered_is_what_the_lowered_schedule_holds(family: str, policy: Any) -> None:
    """A simulation of the lowered schedule holds as much, beside its activations."""
    best = plan(16, mesh={"pp": 2, "dp_shard": 2}, schedule=family, reshard_after_forward=policy)
    count = 16 // best.schedule.stages
    block = 40 * min(count, 2)
    costs = sl.Costs(activation=0, residue=0, gathered=40 * count, gathered_block=block, unreduced=40 * count)
    timeline = sl.simulate(lower_sharding(best.schedule, reshard_after_forward=policy), costs)
    assert tuple(rank.gathered for rank in best.memory) == timeline.peak_memory


def test_the_copy_that_undoes_a_step_is_sharded_too() -> None:
    alone, mesh = plan(ranks=2, interlock=True), plan(mesh={"pp": 2, "dp_shard": 2}, interlock=True)
    assert mesh.memory[1].snapshot == alone.memory[1].snapshot / 2 > 0


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_a_limit_counts_what_is_gathered(schedule: str) -> None:
    """Every number between the totals of two policies is enough for one and too little for the other."""
    request: dict[str, Any] = {"mesh": {"pp": 2, "dp_shard": 8}, "schedule": schedule, "recompute": "none"}
    kept, freed = plan(16, **request), plan(16, reshard_after_forward="always", **request)
    peaks = [max(rank.total for rank in best.memory) for best in (kept, freed)]
    assert peaks[0] > peaks[1]
    limit = (peaks[0] + peaks[1]) / 2
    with pytest.raises(sl.NothingFits, match="gathered") as caught:
        plan(16, memory=limit, **request)
    assert {"reshard_after_forward": "always"} in caught.value.changes
    again = plan(16, memory=limit, reshard_after_forward="always", **request)
    assert max(rank.total for rank in again.memory) <= limit


def test_a_synthesized_order_leaves_room_for_the_largest_unit() -> None:
    request: dict[str, Any] = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "synthesized", "recompute": "none"}
    request |= {
        "reshard_after_forward": "always",
        "gradient_bytes_per_parameter": 40,
        "optimizer_bytes_per_parameter": 0,
    }
    limit = 0.9 * max(rank.total for rank in plan(8, **request).memory)
    best = plan(8, memory=limit, **request)
    assert max(rank.total for rank in best.memory) <= limit


def test_more_ranks_are_suggested_as_a_mesh() -> None:
    request: dict[str, Any] = {"mesh": {"pp": 2, "dp_shard": 2}, "recompute": "none", "reshard_after_forward": "always"}
    request["optimizer_bytes_per_parameter"] = 400
    request["memory"] = 0.9 * max(rank.total for rank in plan(8, **request).memory)
    with pytest.raises(sl.NothingFits) as caught:
        plan(8, **request)
    change = next(change for change in caught.value.changes if "mesh" in change)
    assert change == {"mesh": {"pp": 4, "dp_shard": 2}}
    plan(8, **request | change)
    assert not any("ranks" in change for change in caught.value.changes)


def test_the_mesh_is_explained() -> None:
    text = plan(mesh={"pp": 2, "dp_shard": 2, "tp": 2}).explain()
    assert "mesh        pp 2 × dp_shard 2 × tp 2 = 8 processes, parameters gathered once a step\n" in text
    assert "gathered 80 B" in text
    assert "mesh" not in plan(ranks=2).explain()


def test_a_file_keeps_the_mesh_and_older_files_have_none() -> None:
    best = plan(mesh={"pp": 2, "dp": 3, "dp_shard": 2}, reshard_after_forward="always")
    best.write("plan.json")
    copy = sl.read_plan("plan.json")
    assert copy.mesh == best.mesh == {"pp": 2, "dp_replicate": 3, "dp_shard": 2}
    assert (copy.memory, copy.reshard_after_forward) == (best.memory, "always")
    data = json.loads(Path("plan.json").read_text())
    for text, error in (({"pp": 3}, "mesh has pp 3"), ({"pp": 2, "x": 2}, "dimension 'x'"), ({"pp": 0}, "mesh")):
        Path("wrong.json").write_text(json.dumps(data | {"mesh": text}))
        with pytest.raises(sl.StagelineError, match=rf"wrong\.json: .*{error}"):
            sl.read_plan("wrong.json")
    del data["mesh"], data["reshard_after_forward"]
    for rank in data["memory"]:
        del rank["gathered"]
    Path("old.json").write_text(json.dumps(data))
    old = sl.read_plan("old.json")
    assert (old.mesh, old.reshard_after_forward, old.memory[0].gathered) == ({}, "default", 0)


@pytest.mark.parametrize(
    ("mesh", "ranks", "expected"),
    [
        ({"pp": 4}, 4, "one of ranks=, mesh= and devices=, got ranks and mesh"),
        ({"pp": 2, "dp_shards": 2}, None, r"dimension 'dp_shards' \(did you mean 'dp_shard'\?\); a plan supports pp"),
        ({"pp": 2, "cp": 2}, None, "an unknown dimension 'cp'; a plan supports pp.*; keep whole sequences on a rank"),
        ({"pp": 2, "ep": 2}, None, "unknown dimension 'ep'; a plan supports pp.*; keep all experts of a layer on"),
        ({"pp": 2, "dp": 2, "dp_replicate": 2}, None, "both dp and dp_replicate"),
        ({"pp": 2, "tp": 0}, None, "dimension tp of the mesh must be an integer >= 1, got 0"),
        ({"pp": 2, "tp": 2.0}, None, r"dimension tp of the mesh must be an integer >= 1, got 2\.0"),
        ({"pp": True}, None, "dimension pp of the mesh must be an integer >= 1, got True"),
        ({"pp": 10**9}, None, "plan needs the mesh's pp to be a whole number"),
        ((2, 2), None, r"mesh= must map dimensions to sizes, .* got \(2, 2\)"),
        (None, None, "one of ranks=, mesh= and devices=, got none of them"),
        (None, 2.5, "plan needs ranks to be a whole number"),
    ],
)  # fmt: skip
def test_a_bad_mesh_is_refused_in_one_sentence(mesh: Any, ranks: Any, expected: str) -> None:
    with pytest.raises(sl.StagelineError, match=expected) as caught:
        plan(mesh=mesh, ranks=ranks)
    assert "\n" not in str(caught.value)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(sl.StagelineError, match=r"one of default, always, never, got 'alway' \(did you mean 'always'"):
        plan(mesh={"pp": 2, "dp_shard": 2}, reshard_after_forward="alway")


def test_a_device_mesh_is_a_mesh() -> None:
    class Mesh:
        mesh_dim_names, shape = ("tp", "cp", "pp"), (2, 1, 2)  # a dimension without size is no obstacle

    assert plan(mesh=Mesh()).mesh == {"tp": 2, "pp": 2}
    Mesh.mesh_dim_names = None  # type: ignore[assignment]
    with pytest.raises(sl.StagelineError, match="a DeviceMesh with mesh_dim_names"):
        plan(mesh=Mesh())


def test_a_model_is_planned_for_one_process_of_the_mesh() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    best = sl.plan(model, torch.ones(2, 8), mesh={"dp_shard": 4}, repeats=1, **REQUEST)
    assert best.ranks == 1
    assert best.memory[0].parameters == 4 * 72 * 4 / 4
    assert best.memory[0].gathered == 2 * 4 * 72 * 4


def test_a_plan_of_the_model_says_what_tensor_parallel_splits() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    class Model(nn.Module):
        tp_plan: Any = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.norm": "sequence_parallel"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.blocks = nn.ModuleList(Block() for _ in range(11))

    model = Model()
    names = ("embed", "blocks.1", "blocks.10")
    block = 4 * (40 + 36 + 8), 4 * (40 + 32)  # all, and those that are split: the weights, and the bias of `up`
    whole, cut = CutUnit(0, 160, 0, 0), CutUnit(*block[::-1], 1, 1)
    assert cut_units(model, names) == {"embed": whole, "blocks.1": cut, "blocks.10": cut}
    layers = [layer(name, parameters=size) for name, size in zip(names, (160, block[0], block[0]), strict=True)]
    divided = TensorParallel.of(2, model, names).divide(SizedProfiles.of({1: profile_of(*layers)})).largest.layers
    assert [unit.parameters for unit in divided] == [160, 336 - 144, 336 - 144]
    assert [unit.forward for unit in divided] == [1, 1 - 144 / 336, 1 - 144 / 336]
    model.tp_plan = {}
    assert cut_units(model, names) == {}


def test_the_plan_of_a_hugging_face_model_names_its_matrices() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    unit = cut_units(model, ("model.layers.0",))["model.layers.0"]
    assert unit.total - unit.split == 2 * 16 * 4  # the two norms
    assert (unit.forward, unit.backward) == (2, 5)  # o and down; q, k, v, gate and up


def test_tied_parameters_are_divided_alike() -> None:
    profile = profile_of(layer("embed", parameters=41), layer("block"), layer("head", parameters=41, tied=41))
    divided = TensorParallel(4).divide(SizedProfiles.of({1: profile})).largest
    assert [unit.parameters for unit in divided.layers] == [11, 10, 11]
    assert divided.parameters == 21


def automatic(rank: int) -> tuple[sl.Plan, int, int]:
    """The plan of a pipeline, its rank, and the bytes of parameters that this process holds."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = sl.Pipeline(
        model, loss_fn=nn.functional.mse_loss, schedule="auto", example=torch.ones(4, 4), microbatches=2,
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp")),
    )  # fmt: skip
    assert pipe.plan is not None
    held = sum(local(parameter).nbytes for parameter in pipe.parameters())
    return pipe.plan, rank % 2, held


def test_a_process_of_a_mesh_holds_the_parameters_that_its_automatic_plan_counts() -> None:
    for best, rank, held in run_ranks(automatic, 4):
        assert (best.mesh, best.ranks) == ({"dp_shard": 2, "pp": 2}, 2)
        assert held == best.memory[rank].parameters
        assert 2 * held <= best.memory[rank].gathered <= 4 * held  # W may run after the parameters are freed


def test_the_command_takes_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    even(4).write("profile.json")
    words = ["plan", "profile.json", "-m", "4", "--schedule", "1f1b", "--json"]
    assert run([*words, "--mesh", "pp=2, dp_shard=2", "--reshard-after-forward", "always"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ranks"], data["mesh"], data["reshard_after_forward"]) == (2, {"pp": 2, "dp_shard": 2}, "always")
    for mesh, expected in (("pp", "each dimension once"), ("pp=2,pp=2", "each dimension once"), ("pp=x", "got 'x'")):
        assert run([*words, "--mesh", mesh]) != 0
        assert expected in capsys.readouterr().err
    assert run(words) != 0
    assert "plan needs exactly one of --ranks, --mesh and --devices, got none of them" in capsys.readouterr().err


class Attention(nn.Module):
    """Four heads, and a plan that cuts them."""

    n_heads = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.up, self.down = nn.Linear(8, width), nn.Linear(8, 10), nn.Linear(10, 8)
        self.tp_plan: Any = {"wq": "colwise", "up": "colwise", "down": "rowwise"}

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.wq(x).mean() + self.down(self.up(x))


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        (nn.Linear(8, 8), 3, "tp is 3, which divides no dimension of the parameters of Sequential, so no layer can"),
        (Attention(12), 3, "tp is 3, which does not divide n_heads 4 of Attention, but 0.wq is cut by heads"),
        (Attention(8), 4, "tp is 4, which does not divide dimension 0 of 0.up.weight, of size 10; use a tp that"),
    ],
)
def test_a_size_that_cannot_divide_the_layers_of_a_model_is_refused(model: nn.Module, size: int, expected: str) -> None:
    model = nn.Sequential(model, nn.Linear(8, 8))
    for options in ({"mesh": {"pp": 2, "tp": size}}, {"devices": 2 * size, "tp": [1, size], "bandwidth": 1e9}):
        with pytest.raises(sl.StagelineError, match=expected):
            sl.plan(model, torch.ones(2, 8), repeats=1, **REQUEST, **options)

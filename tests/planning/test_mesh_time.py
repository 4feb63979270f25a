"""The time of a mesh: collectives by hand, links and speeds, the search for a mesh, and that more is never slower."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.app import run
from stageline.planning import devices, search
from stageline.planning.candidates import Evaluator
from stageline.planning.devices import MeshSearch
from stageline.planning.mesh import all_gather, all_reduce, read_network
from stageline.train.gpt import GPT
from support.profiles import even, layer, profile_of

UNITS: dict[str, Any] = {"forward": 1.0, "parameters": 400, "message": 60}
REQUEST: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "recompute": "none", "time_limit": 5.0}


def plan(units: int = 4, profile: sl.Profile | None = None, **more: Any) -> sl.Plan:
    """A plan for units of 3 s, with 400 bytes of parameters and an output of 60 bytes each."""
    return sl.plan(profile=profile or even(units, **UNITS), **REQUEST | more)


def shard_times(best: sl.Plan, rank: int = 0) -> list[tuple[str, float]]:
    return [(timed.action.kind, timed.end - timed.start) for timed in best.timeline.shard_actions(rank)]


# Collectives by hand


def test_shards_gather_parameters_and_reduce_gradients_around_a_ring() -> None:
    """Three of four parts of two units of 400 bytes at 100 B/s, in three hops per unit, before and after the step."""
    alone, best = plan(ranks=2), plan(mesh={"pp": 2, "dp_shard": 4}, bandwidth={"pp": 1e9, "dp_shard": 100})
    assert shard_times(best) == [("UNSHARD", 6.0), ("RESHARD", 0.0), ("REDUCE_GRAD", 6.0)]
    assert best.step_seconds == pytest.approx(alone.step_seconds + 6 + 6)
    late = plan(mesh={"pp": 2, "dp_shard": 4}, bandwidth={"pp": 1e9, "dp_shard": 100}, transfer={"dp_shard": 0.5})
    assert list(late.collectives) == [0, 6 + 2 * 3 * 0.5, 6 + 2 * 3 * 0.5]
    assert late.step_seconds == pytest.approx(alone.step_seconds + 9 + 9)


def test_replicas_add_gradients_up_in_float32_at_least() -> None:
    """An all-reduce of 800 bytes over two replicas sends 800 bytes; gradients of two bytes are added up as four."""
    best = plan(mesh={"pp": 2, "dp_replicate": 2}, bandwidth=100, transfer={"dp_replicate": 0.25})
    assert shard_times(best) == [("REDUCE_GRAD", 8 + 2 * 0.25)]  # nothing is gathered
    half = plan(mesh={"pp": 2, "dp_replicate": 2}, bandwidth=100, parameter_bytes=2.0)
    assert shard_times(half) == [("REDUCE_GRAD", 16.0)]
    wide = plan(mesh={"pp": 2, "dp_replicate": 2}, bandwidth=100, gradient_bytes_per_parameter=8)
    assert shard_times(wide) == [("REDUCE_GRAD", 16.0)]


def test_replicas_of_shards_add_up_their_parts() -> None:
    """Over two shards, half of 800 bytes; then the 400 bytes of a shard over four replicas: 2 × 3/4 × 400."""
    best = plan(mesh={"pp": 2, "dp_replicate": 4, "dp_shard": 2}, bandwidth=100)
    assert shard_times(best) == [("UNSHARD", 4.0), ("RESHARD", 0.0), ("REDUCE_GRAD", 4.0 + 6.0)]


def test_tensor_parallel_divides_the_work_and_adds_two_all_reduces_each_way() -> None:
    """A unit of 1 + 2 s becomes 0.25 + 0.5 s, and four all-reduces of 60 bytes, each 2 × 3/4 × 60 / 900 = 0.1 s."""
    best = plan(mesh={"pp": 2, "tp": 4}, bandwidth={"pp": 1e12, "tp": 900})
    assert best.costs.forward == pytest.approx([2 * (0.25 + 0.2)] * 2)
    assert best.costs.backward == best.costs.times(2)[1].tolist() == pytest.approx([2 * (0.5 + 0.2)] * 2)
    assert best.costs.backward_weight == pytest.approx([2 * 0.25] * 2)  # I has the collectives
    assert best.collectives.tensor_parallel == pytest.approx(4 * 2 * 0.4)
    assert "two all-reduces" in " ".join(best.notes)
    again = plan(mesh={"pp": 2, "tp": 4}, bandwidth={"pp": 1e12, "tp": 900}, recompute="stage")
    assert again.costs.backward == pytest.approx([2 * (0.5 + 0.2 + 0.25 + 0.2)] * 2)  # a forward again, and its sums


def test_a_plan_of_the_model_says_how_often_it_adds_up() -> None:
    """The tokens are added up once, a block twice; of the gradients of inputs, those of up and of qkv; logits are
    gathered."""
    torch = pytest.importorskip("torch")
    model = GPT(vocab_size=16, length=4, dim=8, layers=2, heads=2)
    best = sl.plan(model, torch.zeros(1, 4, dtype=torch.long), mesh={"tp": 2}, bandwidth=1.0, repeats=1, **REQUEST)
    states, logits = 4 * 8 * 4, 4 * 16 * 4
    forward = (1 + 2 * 2) * all_reduce(states, 2)[0] + all_gather(logits, 2)[0]
    backward = (2 * 2 + 1) * all_reduce(states, 2)[0]
    assert best.collectives.tensor_parallel == pytest.approx(4 * (forward + backward))
    assert not any("Megatron" in note for note in best.notes)


def test_blocks_are_gathered_while_the_blocks_before_them_compute() -> None:
    """Gathering a unit takes 0.5 s of the 1 s in which it computes: only the first of a stage is waited for."""
    request: dict[str, Any] = {"mesh": {"pp": 1, "dp_shard": 2}, "bandwidth": 400, "reshard_after_forward": "always"}
    alone, best = plan(ranks=1), plan(**request)
    actions = 2 * 4
    assert best.step_seconds == pytest.approx(alone.step_seconds + actions * 0.5 + 2.0)  # and the reduction
    slow = plan(**request | {"bandwidth": 100})  # 2 s per unit: a forward gathers 4 units, then computes the last one
    forward, backward = slow.timeline.end[0] - slow.timeline.start[0], slow.timeline.end[1] - slow.timeline.start[1]
    assert (forward, backward) == pytest.approx((3 * 2 + 1, 8.0))


def test_without_a_bandwidth_collectives_take_no_time_and_the_plan_says_so() -> None:
    best = plan(mesh={"pp": 2, "dp_shard": 2})
    assert best.step_seconds == plan(ranks=2).step_seconds
    assert best.notes == ("without bandwidth=, collectives along dp_shard take no time",)
    assert best.timeline.shards is None


def test_a_file_keeps_the_times_of_the_mesh() -> None:
    best = plan(devices=4, bandwidth=100, tp=[1, 2])
    best.write("plan.json")
    copy = sl.read_plan("plan.json")
    assert (copy.step_seconds, copy.collectives, copy.meshes) == (best.step_seconds, best.collectives, best.meshes)
    assert shard_times(copy) == shard_times(best)


# Links and speeds


def test_a_matrix_between_processes_gives_the_slowest_link_of_each_ring() -> None:
    """Two machines of four processes: within a machine 100 B/s, between them 10 B/s."""
    matrix = [[100.0 if a // 4 == b // 4 else 10.0 for b in range(8)] for a in range(8)]
    inner = read_network(0.0, matrix, {"pp": 2, "dp_shard": 4}, 2)
    assert (inner.rate, inner.links.bandwidth) == ({"dp_shard": [100.0, 100.0]}, [[100.0, 10.0], [10.0, 100.0]])
    outer = read_network(0.0, matrix, {"dp_shard": 2, "pp": 4}, 4)
    assert outer.rate == {"dp_shard": [10.0] * 4}
    assert set(map(tuple, outer.links.bandwidth)) == {(100.0,) * 4}  # type: ignore[arg-type]
    matrix[5][6] = 1.0  # one link of the second machine
    assert read_network(0.0, matrix, {"pp": 2, "dp_shard": 4}, 2).rate == {"dp_shard": [100.0, 1.0]}


def test_a_slow_link_slows_the_stages_of_its_rank_alone() -> None:
    matrix = [[100.0] * 4 for _ in range(4)]
    matrix[2][3] = 50.0
    best = plan(mesh={"pp": 2, "dp_shard": 2}, bandwidth=matrix)
    assert (shard_times(best, 0)[0], shard_times(best, 1)[0]) == (("UNSHARD", 4.0), ("UNSHARD", 8.0))


def test_the_cut_follows_the_speed_of_the_ranks() -> None:
    best = plan(6, ranks=2, speed=[1.0, 0.5])
    assert best.layers_per_stage == (4, 2)
    assert best.costs.forward == [4.0, 4.0]
    assert plan(6, ranks=2, speed=2.0).step_seconds == plan(6, ranks=2).step_seconds / 2
    both = plan(6, mesh={"pp": 2, "dp_shard": 2}, speed=[1, 1, 1, 0.5], bandwidth=1e9)
    assert both.layers_per_stage == (4, 2)  # the slowest process of a pipeline rank counts
    v_shaped = plan(12, ranks=2, speed=[1.0, 0.5], schedule="zb-v")
    first, second, third, fourth = v_shaped.costs.times(4)[0].tolist()
    assert first + fourth == pytest.approx(second + third)


def test_speed_leaves_collectives_alone() -> None:
    best = plan(mesh={"pp": 2, "tp": 4}, bandwidth={"pp": 1e12, "tp": 900}, speed=0.5)
    assert best.costs.forward == pytest.approx([2 * (0.5 + 0.2)] * 2)


@pytest.mark.parametrize("name", ["links.json", "links.csv"])
def test_a_file_has_one_row_per_rank(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["0" if source == target else "1K" for target in range(4)] for source in range(4)]
    text = json.dumps(rows) if name.endswith("json") else "\n".join(",".join(row) for row in rows)
    Path(name).write_text(text)
    even(4, **UNITS).write("profile.json")
    words = ["plan", "profile.json", "-m", "4", "--schedule", "1f1b", "--json", "--bandwidth", name]
    assert run([*words, "--mesh", "pp=2,dp_shard=2", "--speed", "1,0.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["collectives"] == pytest.approx({"tensor_parallel": 0, "gathers": 0.6, "reductions": 0.6})
    assert data["costs"]["forward"] == [3.0, 2.0]
    assert run([*words, "--devices", "4"]) == 0
    assert len(json.loads(capsys.readouterr().out)["meshes"]) == 5
    assert run([*words, "-p", "3"]) != 0
    assert "4 rows and columns" in capsys.readouterr().err
    Path(name).write_text("[[0, 1], [2]]" if name.endswith("json") else "0,1\n2\n")
    assert run([*words, "-p", "2"]) != 0
    assert f"{name}: bandwidth must be one number, or a square matrix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"devices": 4}, "devices=4 needs bandwidth="),
        ({"devices": 4, "ranks": 2, "bandwidth": 1}, "one of ranks=, mesh= and devices=, got ranks and devices"),
        ({"devices": 4, "mesh": {"pp": 2}, "bandwidth": 1}, "got mesh and devices"),
        ({"devices": 0, "bandwidth": 1}, "devices to be a whole number from 1"),
        ({"devices": 4, "tp": 3, "bandwidth": 1}, "tp must be a list of .* sizes that divide 4 devices, got 3"),
        ({"mesh": {"pp": 2}, "tp": 2}, "tp= works only with devices="),
        ({"devices": 4, "cores": 2, "bandwidth": 1}, "share no resources; leave out cores= and links="),
        ({"mesh": {"pp": 2, "dp_shard": 2}, "cores": 1, "bandwidth": 1}, "simulated with shared cores= or links="),
        ({"devices": 4, "speed": [1, 1], "bandwidth": 1}, "speed must be one value, or one for each of the 4 devices"),
        ({"devices": 7, "bandwidth": 1}, "no mesh of 7 devices is possible: microbatches=4 cannot"),
        ({"mesh": {"pp": 2, "tp": 2}, "bandwidth": {"pp": 1}}, "no value for tp, a dimension of the mesh of size 2"),
        ({"ranks": 2, "bandwidth": {"tpp": 1}}, r"each dimension of the mesh once .* got 'tpp'"),
        ({"ranks": 2, "bandwidth": [[1, 2]]}, "a square matrix with one row per rank"),
        ({"ranks": 2, "bandwidth": [[1, 0], [1, 1]]}, "above 0 between any two ranks"),
        ({"ranks": 2, "bandwidth": "fast"}, "must be a size, like 24GiB or 10G"),
        ({"ranks": 2, "bandwidth": "none.json"}, "none.json"),
        ({"ranks": 2, "transfer": -1.0}, "transfer must be a number >= 0"),
        ({"ranks": 2, "speed": [1, 0]}, "speed must be a number above 0, or one for each of the 2 pipeline ranks"),
        ({"mesh": {"pp": 2, "tp": 3}, "speed": [1] * 4}, "2 pipeline ranks or 6 processes"),
    ],
)  # fmt: skip
def test_a_wrong_size_link_or_speed_is_refused_in_one_sentence(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(sl.StagelineError, match=expected) as caught:
        plan(**more)
    assert "\n" not in str(caught.value)


# The search for a mesh


def test_all_meshes_are_compared_with_the_chosen_one() -> None:
    best = plan(8, devices=8, microbatches=8, bandwidth=1000, tp=[1, 2, 4, 8])
    assert best.timeline.makespan == best.step_seconds
    meshes = [best.mesh, *(other.mesh for other in best.meshes)]
    assert len({tuple(mesh.items()) for mesh in meshes}) == len(meshes) == 20
    text = best.explain(rows=30)
    assert "chosen" in text
    assert "longer" in text or "as fast" in text
    assert "and 1 more mesh" not in text


def test_a_slow_network_for_one_dimension_chooses_another() -> None:
    fast: dict[str, Any] = {"pp": 1e6, "dp_shard": 1e6, "dp_replicate": 1e6, "tp": 1e6}
    assert "tp" not in plan(8, devices=4, microbatches=8, bandwidth=fast | {"tp": 1.0}, tp=[1, 2, 4]).mesh
    slow = dict.fromkeys(("dp_shard", "dp_replicate", "tp"), 1.0)
    assert plan(8, devices=4, microbatches=8, bandwidth=fast | slow, tp=[1, 2, 4]).mesh == {"pp": 4}


def test_what_does_not_fit_is_listed_and_never_chosen() -> None:
    request: dict[str, Any] = {"devices": 4, "microbatches": 8, "bandwidth": 1e9, "memory": 7000}
    best = plan(8, **request)
    assert max(rank.total for rank in best.memory) <= 7000
    too_large = [other for other in best.meshes if not other.fits]
    assert {"pp": 1, "dp_replicate": 4} in [other.mesh for other in too_large]
    assert all(other.memory > 7000 for other in too_large)
    assert "does not fit" in best.explain()
    with pytest.raises(sl.NothingFits, match=r"nothing fits any mesh: the closest plan, 1f1b on pp 4 with") as caught:
        plan(8, **request | {"memory": 500, "recompute": "none"})
    assert not any("mesh" in change or "batch" in change for change in caught.value.changes)
    enough = caught.value.changes[-1]["memory"]
    assert max(rank.total for rank in plan(8, **request | {"memory": enough, "recompute": "none"}).memory) <= enough


def test_tensor_parallel_is_tried_where_the_model_allows_it() -> None:
    torch = pytest.importorskip("torch")
    model, tokens = GPT(vocab_size=16, length=4, dim=24, layers=2, heads=6), torch.zeros(1, 4, dtype=torch.long)
    best = sl.plan(model, tokens, devices=4, bandwidth="10G", repeats=1, **REQUEST)
    sizes = {mesh.get("tp", 1) for mesh in (best.mesh, *(other.mesh for other in best.meshes))}
    assert sizes == {1, 2}
    assert any("tp divides heads of Block 6" in note for note in best.notes)
    plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    best = sl.plan(plain, torch.ones(1, 4), devices=4, bandwidth="10G", repeats=1, **REQUEST)
    assert not any("tp" in other.mesh for other in best.meshes)
    assert any("tp is 1: the model has no tp_plan" in note for note in best.notes)


def test_the_search_also_synthesizes_for_the_best_meshes() -> None:
    best = plan(8, devices=4, microbatches=8, bandwidth=1e4, schedule="auto", time_limit=1.0)
    assert all(other.seconds >= best.step_seconds * (1 - 1e-6) for other in best.meshes if other.fits)


profiles = st.lists(
    st.builds(
        lambda forward, parameters, message: {"forward": forward, "parameters": parameters, "message": message},
        st.floats(0.1, 4), st.integers(0, 500), st.integers(1, 100),
    ),
    min_size=4, max_size=6,
)  # fmt: skip
rates = st.floats(10, 1e5)


def profile_from(units: list[dict[str, Any]]) -> sl.Profile:
    return profile_of(*(layer(f"layers.{number}", **unit) for number, unit in enumerate(units)))


@settings(max_examples=8, deadline=None)
@given(profiles, rates, rates, st.floats(0, 0.1), st.sampled_from(["default", "always"]))
def test_the_chosen_mesh_is_the_best_and_equals_its_direct_plan(
    units: list[dict[str, Any]], slow: float, fast: float, latency: float, policy: str
) -> None:
    request: dict[str, Any] = {
        "profile": profile_from(units), "transfer": latency, "reshard_after_forward": policy,
        "bandwidth": {"pp": slow, "dp_replicate": slow, "dp_shard": fast, "tp": fast},
    }  # fmt: skip
    best = plan(devices=4, tp=[1, 2], **request)
    pipelines = best.mesh.get("dp_shard", 1) * best.mesh.get("dp_replicate", 1)
    direct = plan(mesh=best.mesh, **request | {"microbatches": 4 // pipelines})
    assert (best.step_seconds, best.memory, best.schedule) == (direct.step_seconds, direct.memory, direct.schedule)
    for other in best.meshes:
        assert other.seconds >= best.step_seconds * (1 - 1e-6) or not other.fits
        pipelines = other.mesh.get("dp_shard", 1) * other.mesh.get("dp_replicate", 1)
        alone = plan(mesh=other.mesh, **request | {"microbatches": 4 // pipelines})
        assert alone.step_seconds == other.seconds if other.simulated else alone.step_seconds >= other.seconds - 1e-9


@settings(max_examples=15, deadline=None)
@given(
    profiles, rates, st.floats(1, 10), st.floats(0, 0.1), st.sampled_from(["default", "always"]),
    st.sampled_from(["pp", "dp_replicate", "dp_shard", "tp"]), st.sampled_from(["1f1b", "gpipe", "interleaved"]),
)  # fmt: skip
def test_more_bandwidth_is_never_slower(
    units: list[dict[str, Any]], rate: float, factor: float, latency: float, policy: str, dimension: str, family: str
) -> None:
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    request: dict[str, Any] = {
        "profile": profile_from(units), "mesh": mesh, "transfer": latency, "reshard_after_forward": policy,
        "schedule": family, "chunks": 2 if family == "interleaved" else None, "split": "layers",
    }  # fmt: skip
    rates = dict.fromkeys(mesh, rate)
    slow, fast = (plan(bandwidth=rates | {dimension: value}, **request) for value in (rate, rate * factor))
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)
    assert slow.bound is not None
    assert slow.bound <= slow.step_seconds


def test_a_search_over_meshes_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which every simulation takes a second, only the one that runs when time is up exceeds the limit."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    simulate = Evaluator.simulate

    def simulate_in_a_second(evaluator: Evaluator, *arguments: Any) -> sl.Timeline:
        clock.now += 1.0
        return simulate(evaluator, *arguments)

    monkeypatch.setattr(Evaluator, "simulate", simulate_in_a_second)
    monkeypatch.setattr(search.PlanSearch, "_synthesize", lambda plans: None)  # it has a clock of its own
    monkeypatch.setattr(devices, "time", clock)
    monkeypatch.setattr(search, "time", clock)
    ends = []
    run_search = MeshSearch.run

    def run_and_note(meshes: MeshSearch) -> None:
        run_search(meshes)
        ends.append(clock.now)

    monkeypatch.setattr(MeshSearch, "run", run_and_note)
    plan(8, devices=8, bandwidth=20, tp=[1], microbatches=8, schedule="auto", time_limit=30.0)
    assert 27 <= ends[0] <= 31

"""Plans: the fastest that fits, its memory, suggestions if nothing fits; on disk, and in a Pipeline."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.cli.app import run
from stageline.common.units import parse_size, round_up_size
from stageline.model.partition.partition import even_sizes, partition
from stageline.planning.candidates import shape_of
from stageline.planning.costs import Links, buffers_of, stage_costs
from stageline.testing import run_ranks
from support.profiles import even, layer, profile_of


@st.composite
def profiles(draw: st.DrawFn) -> sl.Profile:
    times = st.floats(0.1, 10.0)
    sizes = st.integers(0, 1000)
    layers = []
    for unit in range(draw(st.integers(2, 9))):
        split = [draw(times), draw(times)]
        layers.append(
            layer(
                f"layers.{unit}",
                draw(times),
                backward_input=split[0],
                backward_weight=split[1],
                backward=sum(split) * draw(st.floats(0.5, 1.0)),
                **{name: draw(sizes) for name in ("activation", "residue", "parameters", "message")},
            )
        )
    return profile_of(*layers)


@st.composite
def of_any_size(draw: st.DrawFn) -> sl.Profile:
    """Layers whose times and sizes are zero, tiny, huge or random, all equal or not."""
    times = draw(
        st.sampled_from(
            [st.just(0.0), st.floats(1e-300, 1e-290), st.floats(1e60, 1e90), st.floats(0.0, 1.0), st.just(0.1)]
        )
    )
    sizes = draw(st.sampled_from([st.just(0), st.integers(0, 9), st.integers(10**30, 10**40)]))
    names = ("activation", "residue", "parameters", "message", "arriving", "leaving")
    layers = []
    for unit in range(draw(st.integers(1, 6))):
        parts = {name: draw(times) for name in ("backward_input", "backward_weight", "backward")}
        layers.append(layer(f"layers.{unit}", draw(times), **parts, **{name: draw(sizes) for name in names}))
    return profile_of(*layers)


@settings(max_examples=25)
@given(
    profile=of_any_size(),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    transfer=st.sampled_from([0.0, 0.3, 1e-300, 1e80]),
    tightness=st.sampled_from([None, 0.3, 0.8, float("inf")]),
    names=st.sampled_from([["1f1b"], ["gpipe", "zb-h1"], ["1f1b", "interleaved", "synthesized"]]),
)
def test_a_plan_for_any_costs_survives_a_round_trip(
    profile: sl.Profile, ranks: int, microbatches: int, transfer: float, tightness: float | None, names: list[str]
) -> None:
    """Rounding of derived figures must not matter."""
    request: dict[str, Any] = {
        "profile": profile,
        "ranks": min(ranks, len(profile.layers)),
        "microbatches": microbatches,
        "transfer": transfer,
        "schedule": names,
        "time_limit": 0.05,
    }
    plan = sl.plan(**request)
    if tightness is not None:  # plans that do not fit are among the alternatives
        room = (max(rank.total for rank in plan.memory) or 1.0) * tightness
        with suppress(sl.StagelineError):
            plan = sl.plan(**request, memory=room)
    plan.write("plan.json")
    again = sl.read_plan("plan.json")
    assert again.to_json() == plan.to_json()
    assert 0.0 <= plan.bubble <= 1.0
    assert all(0.0 <= other.bubble <= 1.0 for other in plan.alternatives)
    plan.timeline.write("step.json")
    assert sl.read_timeline("step.json").makespan == plan.step_seconds


def test_a_plan_for_one_rank_survives_a_round_trip() -> None:
    """A rank that never waits has a bubble of 0; rounding must not make it negative."""
    profile = profile_of(*(layer(f"layers.{unit}", time, parameters=0) for unit, time in enumerate((0.00476, 0.00923))))
    for memory in (150, 180, 199, None):
        plan = sl.plan(profile=profile, ranks=1, microbatches=12, memory=memory, time_limit=0.3)
        plan.write("plan.json")
        assert sl.read_plan("plan.json").alternatives == plan.alternatives
        assert min(plan.bubble, *(other.bubble for other in plan.alternatives), 0.0) == 0.0


def cuts_of(profile: sl.Profile, schedule: sl.Schedule) -> list[list[int]]:
    cuts = [even_sizes(len(profile.layers), schedule.stages)]
    shape = shape_of(schedule)
    if shape.placement is not None and shape.chunks <= 2:
        cuts.append(partition(profile.seconds, schedule.ranks, shape.chunks, shape.placement).layers_per_stage)
    return cuts


@settings(max_examples=12)
@given(profiles(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.5]), st.booleans())
def test_no_family_that_fits_is_faster(
    profile: sl.Profile, ranks: int, batch: int, transfer: float, capped: bool
) -> None:
    ranks = min(ranks, len(profile.layers))
    memory: float | None = None
    if capped:  # as much as an average plan needs
        plain = sl.plan(
            profile=profile, ranks=ranks, batch=batch, samples=1, schedule="1f1b", recompute="none", transfer=transfer
        )
        memory = max(rank.total for rank in plain.memory) or 1.0
    plan = sl.plan(
        profile=profile, ranks=ranks, batch=batch, samples=1, transfer=transfer, memory=memory, time_limit=2.0
    )
    assert plan.bound is not None
    assert plan.bound <= plan.step_seconds
    assert memory is None or max(rank.total for rank in plan.memory) <= memory * (1 + 1e-9)
    assert sl.verify(plan.schedule).in_order
    if plan.microbatches != batch:
        return
    for name in sl.families():
        try:
            schedule = sl.schedule(name, ranks, batch)
        except sl.ScheduleError:
            continue
        if not schedule.training or schedule.placement.directions > 1 or schedule.stages > len(profile.layers):
            continue
        for counts in cuts_of(profile, schedule):
            ends = list(pairwise(accumulate(counts, initial=0)))
            timeline = sl.simulate(schedule, profile.costs(ends, transfer=transfer))
            held = [peak + wait for peak, wait in zip(timeline.peak_memory, buffers_of(timeline), strict=True)]
            rank_of = schedule.placement.table[0].tolist()
            for (start, stop), rank in zip(ends, rank_of, strict=True):  # 4 bytes, its gradient, and 8 of AdamW
                held[rank] += 4 * sum(unit_layer.parameters for unit_layer in profile.layers[start:stop])
            if memory is None or max(held) <= memory:
                assert plan.step_seconds <= timeline.makespan * (1 + 1e-9), name


def test_the_fastest_of_the_named_families_is_chosen() -> None:
    plan = sl.plan(profile=even(8), ranks=4, microbatches=8, schedule=["gpipe", "1f1b", "zb-h1"])
    assert (plan.schedule.name, plan.layers_per_stage, plan.step_seconds) == ("zb-h1", (2, 2, 2, 2), 54.0)
    assert [alternative.schedule for alternative in plan.alternatives] == ["1f1b", "gpipe"]
    assert "22.2% longer" in plan.explain()


def test_a_schedule_is_synthesized_if_that_is_faster() -> None:
    times = zip([7, 12, 9, 11], [8, 13, 10, 12], [4, 9, 6, 8], strict=True)
    empty = {"parameters": 0, "message": 0, "residue": 50}
    uneven = profile_of(
        *(
            layer(
                f"layers.{unit}",
                forward,
                backward_input=first,
                backward_weight=second,
                backward=first + second,
                **empty,
            )
            for unit, (forward, first, second) in enumerate(times)
        )
    )
    options: dict[str, Any] = {"ranks": 4, "microbatches": 8, "memory": [400, 300, 200, 100], "recompute": "none"}
    plan = sl.plan(profile=uneven, transfer=1.0, **options)
    named = sl.plan(profile=uneven, transfer=1.0, schedule=["1f1b", "gpipe", "zb-h1"], **options)
    assert (plan.schedule.name, named.schedule.name) == ("synthesized", "1f1b")
    assert plan.step_seconds < 0.97 * named.step_seconds
    assert plan.gap is not None
    assert 0 <= plan.gap < 0.1


def test_only_synthesized_schedules_may_be_requested() -> None:
    profile = profile_of(*(layer(f"layers.{unit}", 1.0 + unit % 3) for unit in range(8)))
    for memory in (None, 4 * 640 + 800):
        plan = sl.plan(profile=profile, ranks=4, microbatches=8, memory=memory, schedule="synthesized", time_limit=0.5)
        assert plan.schedule.name == "synthesized"
        assert {row.schedule for row in plan.alternatives} <= {"synthesized"}
        best = sl.plan(profile=profile, ranks=4, microbatches=8, memory=memory, time_limit=0.5)
        assert plan.step_seconds <= 1.05 * best.step_seconds


def test_an_interrupt_during_synthesis_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **options: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("stageline.synthesis.search.lower_bound", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sl.plan(profile=even(8), ranks=4, microbatches=8, schedule="synthesized", time_limit=0.5)


def test_the_table_says_more_memory_only_if_a_plan_needs_more() -> None:
    for microbatches, verdict in ((1, "as fast"), (8, "as fast, more memory")):
        plan = sl.plan(profile=even(8), ranks=4, microbatches=microbatches, schedule=["1f1b", "gpipe"], chunks=1)
        (line,) = [line for line in plan.explain().splitlines() if line.startswith("gpipe")]
        assert line.endswith(f"B  {verdict}")


def test_the_number_of_microbatches_depends_on_the_cost_of_small_ones() -> None:
    """If the cost does not depend on the size, few microbatches are best; if it is proportional, many are."""
    flat, steep = {1: even(4), 8: even(4)}, {1: even(4), 8: even(4, forward=8.0)}
    assert sl.plan(profile=flat, ranks=2, batch=8, schedule="1f1b").microbatches == 1
    assert sl.plan(profile=steep, ranks=2, batch=8, schedule="1f1b").microbatches == 8


def test_memory_includes_all_training_state() -> None:
    plan = sl.plan(profile=even(4), ranks=2, microbatches=4, schedule="1f1b", optimizer_bytes_per_parameter=16)
    first, second = plan.memory
    assert (first.parameters, first.gradients, first.optimizer) == (80, 80, 320)
    assert (first.activations, second.activations) == (400, 200)  # two microbatches in flight, and one
    assert first.total == 880 + first.buffers
    lean = sl.plan(
        profile=even(4), ranks=2, microbatches=4, schedule="1f1b", parameter_bytes=2, gradient_bytes_per_parameter=4
    )
    assert (lean.memory[0].gradients, lean.memory[0].optimizer) == (160, 320)


def test_memory_includes_the_snapshot_of_continuous_steps() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": "1f1b", "repeats": 1}
    states: dict[str, Any] = {"optimizer_bytes_per_parameter": 4}
    plan = sl.plan(model, torch.ones(2, 16), interlock=True, **options, **states)
    plain = sl.plan(model, torch.ones(2, 16), layers_per_stage=plan.layers_per_stage, **options, **states)
    assert all(rank.snapshot == 0 for rank in plain.memory)
    more = [one.total - two.total for one, two in zip(plan.memory, plain.memory, strict=True)]
    assert more == [rank.snapshot for rank in plan.memory]
    pipe = sl.Pipeline(plan.split(model), loss_fn=functional.mse_loss, schedule=plan.schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    kept = 0
    run = pipe.run([(torch.ones(8, 16), torch.ones(8, 16))] * 4, optimizer=optimizer)
    for _ in run:
        kept = max(kept, run.snapshot_bytes)
    assert kept == sum(rank.snapshot for rank in plan.memory)
    assert "snapshot" in plan.explain()
    least = max(rank.total for rank in plan.memory)
    with pytest.raises(sl.NothingFits, match="snapshot"):
        sl.plan(model, torch.ones(2, 16), memory=0.6 * least, interlock=True, recompute="none", **options, **states)


def test_memory_includes_the_outputs_that_cuda_graphs_keep() -> None:
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": "1f1b"}
    plain = sl.plan(profile=even(4), **options)
    graphs = sl.plan(profile=even(4), cuda_graphs=True, layers_per_stage=plain.layers_per_stage, **options)
    message = even(4).layers[0].message
    assert [rank.graphs for rank in graphs.memory] == [4 * message, 4 * message]  # outputs; gradients of inputs
    assert [rank.total - rank.graphs for rank in graphs.memory] == [rank.total for rank in plain.memory]
    assert "graphs" in graphs.explain()
    with pytest.raises(sl.StagelineError, match="cuda_graphs must be True or False, got 'yes'"):
        sl.plan(profile=even(4), **options, cuda_graphs="yes")  # type: ignore[arg-type]


def test_units_are_recomputed_only_if_memory_requires_it() -> None:
    free = sl.plan(profile=even(8), ranks=4, microbatches=8, schedule="1f1b")
    need = [rank.total for rank in free.memory]
    plan = sl.plan(profile=even(8), ranks=4, microbatches=8, schedule="1f1b", memory=need[0] - 1)
    assert plan.recompute not in ("none", "stage")
    assert set(plan.recompute) <= {"layers.0", "layers.1"}
    assert max(rank.total for rank in plan.memory) < need[0]
    assert free.step_seconds < plan.step_seconds < sl.plan(
        profile=even(8), ranks=4, microbatches=8, schedule="1f1b", recompute="stage"
    ).step_seconds  # fmt: skip


def test_recomputation_costs_a_forward_and_saves_activations() -> None:
    profile = profile_of(layer("a", arriving=5), layer("b", 2.0, activation=300, leaving=7), layer("c"))
    plain, stage, units = (stage_costs(profile, [2, 1], again, Links()) for again in ("none", "stage", ("a", "b", "c")))
    assert plain.activation == [412.0, 100.0]
    assert stage.activation == [5 + 10 + 10.0, 10.0]  # some of the batch, at most an output of it; and the output
    assert units.activation == [5 + 10 + 10 + 10.0, 10.0]  # every unit keeps its input
    assert stage.backward == units.backward == [9.0, 3.0]
    assert stage.backward_weight == plain.backward_weight
    assert stage.transient == {"B": [400.0, 100.0], "I": [400.0, 100.0]}
    assert units.transient == {"B": [300.0, 100.0], "I": [300.0, 100.0]}


@pytest.mark.parametrize("limits", [{"memory": 700.0}, {"memory": 500.0}, {"memory": 700.0, "recompute": "none"},
                                   {"memory": 900.0, "recompute": "none", "schedule": "gpipe"}])  # fmt: skip
def test_every_suggested_change_fits(limits: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "profile": even(8),
        "ranks": 2,
        "batch": 8,
        "microbatches": 4,
        "samples": 2,
        "time_limit": 1.0,
    } | limits
    with pytest.raises(sl.NothingFits, match=r"nothing fits: the closest plan, .* on rank") as caught:
        sl.plan(**options)
    assert caught.value.needs > limits["memory"]
    assert caught.value.changes
    for change in caught.value.changes:
        plan = sl.plan(**(options | change))
        limit = change.get("memory", limits["memory"])
        assert max(rank.total for rank in plan.memory) <= limit * (1 + 1e-9), change


def test_sizes_may_be_strings() -> None:
    options: dict[str, Any] = {"profile": even(8), "ranks": 2, "microbatches": 4, "time_limit": 0.5}
    assert sl.plan(**options, memory="24GiB").caps == (24.0 * 2**30,) * 2
    assert sl.plan(**options, memory=["24GiB", 2.0**31]).caps == sl.plan(**options, memory="24GiB,2GiB").caps
    assert sl.plan(**options, memory=np.array([1e9, 2e9])).caps == (1e9, 2e9)  # type: ignore[arg-type]
    assert sl.plan(**options, bandwidth="10G").costs.bandwidth == 1e10
    costs = sl.Costs(activation=2**30)
    assert max(sl.synthesize(costs, 2, 4, memory="2GiB", time_limit=0.2).timeline.peak_memory) <= 2**31
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    assert len(sl.split(model, 2, by="parameters", memory="1MiB")) == 2
    with pytest.raises(sl.StagelineError, match=r"memory|fit"):
        sl.split(model, 2, by="parameters", memory="1KiB")
    with pytest.raises(sl.StagelineError, match="memory must be a size"):
        sl.split(model, 2, by="parameters", memory="lots")


@given(st.floats(1.0, 1e15))
def test_a_suggested_size_is_enough_and_little_more(value: float) -> None:
    assert value <= parse_size(round_up_size(value)) * (1 + 1e-9)
    assert parse_size(round_up_size(value)) <= max(value + 1, value * 1.011)


def test_a_plan_file_without_snapshots_can_be_read(tmp_path: Path) -> None:
    plan = sl.plan(profile=even(4), ranks=2, microbatches=4, time_limit=0.5)
    data = plan.to_json()
    for rank in data["memory"]:
        del rank["snapshot"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert sl.read_plan(tmp_path / "plan.json").memory == plan.memory


def test_a_plan_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    plan = sl.plan(profile=even(8), ranks=2, batch=8, samples=2, memory=2000.0, bandwidth=1e6, time_limit=1.0)
    plan.write(tmp_path / "plan.json")
    again = sl.read_plan(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert again.explain() == plan.explain()
    assert again.schedule == plan.schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_per_stage": [4]}, "'layers_per_stage' must have one entry for each of the 2 stages, got 1"),
        ({"layers_per_stage": [4, -1]}, r"layers_per_stage\[1\] must be an integer from 1"),
        ({"recompute": 5}, "'recompute' must be"),
        ({"recompute": []}, "'recompute' must be .* got an empty list"),
        ({"memory": [{"parameters": 1}]}, r"memory\[0\] lacks 'activations'"),
        ({"costs": {"forward": [1.0, -2.0]}}, "must be a number >= 0"),
        ({"costs": {"forward": [1.0] * 5}}, "has 5 values"),
        ({"schedule": {"format": "x"}}, "plan.json: "),
        ({"caps": ["much", 1]}, r"caps\[0\] must be a number"),
        ({"names": ["a"]}, "'names' must have one entry for each of the 4 units"),
        ({"alternatives": [1]}, r"alternatives\[0\] must be an object"),
        ({"version": 99}, "99"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    plan = sl.plan(profile=even(4), ranks=2, microbatches=2, schedule="1f1b")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json() | change))
    with pytest.raises(sl.StagelineError, match=message):
        sl.read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0, "batch": 8}, "ranks to be a whole number from 1"),
        ({"ranks": 2}, "needs microbatches="),
        ({"ranks": 2, "batch": 8}, "pass samples="),
        ({"ranks": 2, "batch": 8, "samples": 1, "microbatches": 3}, r"does not divide batch=8; .* are \[2, 4\]"),
        ({"ranks": 9, "microbatches": 2}, "the model has 4 units, but 9 ranks"),
        ({"ranks": 2, "microbatches": 2, "memory": -1}, "memory must be a number of bytes above 0"),
        ({"ranks": 2, "microbatches": 2, "memory": [1.0]}, "one for each of the 2 ranks"),
        ({"ranks": 2, "microbatches": 2, "memory": "much"}, "memory must be a size, like 24GiB or 10G; got 'much'"),
        ({"ranks": 2, "microbatches": 2, "memory": "8GB,9GB,1GB"}, "one for each of the 2 ranks"),
        ({"ranks": 2, "microbatches": 2, "recompute": "stages"}, r"did you mean 'stage'\?"),
        ({"ranks": 2, "microbatches": 2, "schedule": "1fb1"}, r"did you mean '1f1b'\?"),
        ({"ranks": 2, "microbatches": 2, "schedule": "forward-only"}, "is for inference"),
        ({"ranks": 2, "microbatches": 2, "split": "tim"}, r"did you mean 'time'\?"),
        ({"ranks": 2, "microbatches": 2, "time_limit": float("nan")}, "number of seconds above 0"),
        ({"ranks": 2, "microbatches": 2, "layers_per_stage": [1, 1]}, "must add up to 4"),
        ({"ranks": 2, "microbatches": 2, "optimizer_bytes_per_parameter": -8}, "number of bytes >= 0"),
        ({"ranks": 2, "microbatches": 2, "transfer": -1.0}, "transfer must be a number >= 0"),
        ({"ranks": 3, "microbatches": 2, "schedule": "zb-v"}, "no schedule of zb-v is possible for 4 units on 3 ranks"),
        ({"ranks": 2, "microbatches": 2, "profile": 5}, "expected a Profile"),
        ({"ranks": 2, "microbatches": 2, "profile": {0: even(4)}}, "must be an integer >= 1"),
        ({"ranks": 2, "microbatches": 2, "profile": {1: even(4), 2: even(3)}}, "profiles have different layers"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.plan(**({"profile": even(4)} | options))


def test_a_planned_pipeline_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    plan = sl.plan(model, torch.randn(4, 8), ranks=2, batch=8, recompute="stage", repeats=1, time_limit=0.5)
    assert plan.samples * plan.microbatches == 8
    pipe = sl.Pipeline(plan.split(model), loss_fn=functional.mse_loss, schedule=plan.schedule, recompute=plan.recompute)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe.step(x, y)
    found_grads = gradients(model)
    model.zero_grad()
    for part in range(plan.microbatches):
        rows = slice(part * plan.samples, (part + 1) * plan.samples)
        torch.autograd.backward(functional.mse_loss(model(x[rows]), y[rows]) * (plan.samples / 8))
    assert all(map(torch.equal, found_grads, gradients(model)))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad.clone() for grad in grads if grad is not None]


def test_a_plan_refuses_another_model() -> None:
    plan = sl.plan(profile=even(4), ranks=2, microbatches=2, schedule="1f1b")
    with pytest.raises(sl.StagelineError, match=r"the plan is for 4 units, layers\.0"):
        plan.split(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    layers = [nn.Linear(2, 2) for _ in range(6)]
    smaller = sl.plan(nn.Sequential(*layers[:4]), torch.ones(2, 2), ranks=2, microbatches=2, repeats=1, time_limit=0.5)
    with pytest.raises(sl.StagelineError, match=r"the plan is for 4 units, 0 … 3, but Sequential has also 4"):
        smaller.split(nn.Sequential(*layers))


def test_a_unit_that_is_called_twice_is_planned_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in (*self.layers, self.layers[0]):
                x = linear(x)
            return x

    plan = sl.plan(Twice(), torch.randn(2, 8), ranks=2, microbatches=2, schedule="1f1b", repeats=1)
    assert plan.names == ("layers.0", "layers.1", "layers.2", "layers.0")
    assert len(plan.split(Twice(), torch.randn(2, 8))) == 2


def test_the_command_plans_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even(8).write(tmp_path / "profile.json")
    words = ["plan", str(tmp_path / "profile.json"), "-p", "2", "--batch", "8", "--schedule", "1f1b,zb-h1"]
    files = ["-o", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "plan.svg"), "--html", str(tmp_path / "a.html")]
    assert run([*words, *files, "--memory", "2KiB"]) == 0
    output = capsys.readouterr().out
    kept = sl.read_plan(tmp_path / "plan.json")
    assert kept.caps == (2048.0, 2048.0)
    assert f"{kept.schedule.name}: 2 ranks" in output
    assert "chosen" in output
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert run([*words, "--json", "--memory", "2KiB"]) == 0
    assert json.loads(capsys.readouterr().out)["layers_per_stage"] == list(kept.layers_per_stage)


def test_the_command_suggests_changes_if_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even(4).write(tmp_path / "profile.json")
    words = ["plan", str(tmp_path / "profile.json"), "-p", "2", "-m", "4", "--time-limit", "0.5"]
    assert run([*words, "--memory", "900", "--schedule", "gpipe", "--recompute", "none"]) == 2
    error = capsys.readouterr().err
    assert "error: nothing fits" in error
    advice = re.findall(r"(--[a-z]+) (\S+?)(?: needs|[;\n])", error)
    assert dict(advice).keys() >= {"--memory", "--ranks"}
    assert "=" not in error  # not Python syntax
    for flag, value in advice:  # the suggested command runs
        fits = [*words, "--memory", "900", "--schedule", "gpipe", "--recompute", "none", flag, value]
        assert run(fits) == 0, fits
    capsys.readouterr()
    assert run([*words[:4], "--memory", "100"]) == 2
    assert "plan needs --microbatches, their number per step; or --batch" in capsys.readouterr().err
    assert run([*words, "--memory", "0"]) == 2
    assert "--memory must be a number of bytes above 0 or a size like 24GiB" in capsys.readouterr().err
    assert run([*words, "--memory", "much"]) == 2
    assert "--memory must be a size" in capsys.readouterr().err


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randn(8, 8)


def test_a_pipeline_plans_itself() -> None:
    x, y = batch()
    model, plain = nn.Sequential(*layers()), nn.Sequential(*layers())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="auto", ranks=2, microbatches=4, example=x)
    assert pipe.plan is not None
    assert (pipe.schedule, pipe.plan.microbatches, sum(pipe.plan.layers_per_stage)) == (pipe.plan.schedule, 4, 6)
    pipe.step(x, y)
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        torch.autograd.backward(functional.mse_loss(plain(x[rows]), y[rows]) * 0.25)
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_a_pipeline_chooses_its_microbatches_and_builds_only_after_that() -> None:
    x, y = batch()
    pipe = sl.Pipeline(
        lambda: nn.Sequential(*layers()), loss_fn=functional.mse_loss, schedule="auto", ranks=2, example=x,
        recompute="auto", seed=3,
    )  # fmt: skip
    assert pipe.plan is not None
    assert pipe.schedule.microbatches * pipe.plan.samples == 8
    assert pipe.plan.recompute == "none"  # there is enough memory
    assert pipe.step(x, y).microbatches == pipe.schedule.microbatches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2}, "needs example="),
        ({"example": torch.ones(4, 8)}, "needs ranks="),
        (
            {"ranks": 2, "example": torch.ones(4, 8), "group": 3},
            "nor schedule='auto' has an option 'group', .* takes chunks",
        ),
        ({"ranks": 9, "example": torch.ones(4, 8)}, "the model has 6 units, but 9 ranks"),
        ({"ranks": 2, "example": torch.ones(4, 8), "microbatches": 0}, "microbatches must be an integer >= 1"),
        ({"ranks": 2, "example": 5}, "the example must contain tensors"),
    ],
)
def test_auto_names_missing_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.Pipeline(nn.Sequential(*layers()), loss_fn=functional.mse_loss, schedule="auto", **options)


def test_auto_refuses_a_model_that_is_already_cut() -> None:
    with pytest.raises(sl.StagelineError, match="pass the model, or a function that builds it, instead of stages"):
        sl.Pipeline(layers(), loss_fn=functional.mse_loss, schedule="auto", ranks=2, example=torch.ones(4, 8))


def on_a_process(rank: int) -> tuple[str, list[list[str]], list[torch.Tensor]]:
    x, y = batch()
    pipe = sl.Pipeline(
        nn.Sequential(*layers()), loss_fn=functional.mse_loss, schedule="auto", microbatches=4, example=x, deadline=30
    )
    pipe.step(x, y)
    programs = [[str(entry) for entry in program] for program in pipe.schedule.programs]
    try:  # all ranks raise the error of rank 0
        sl.Pipeline(
            nn.Sequential(*layers()),
            loss_fn=functional.mse_loss,
            schedule="auto",
            example=torch.ones(4, 3),
            deadline=30,
        )
    except sl.StagelineError as error:
        return str(error), programs, gradients(pipe.model)
    raise AssertionError("a model that cannot run on the example was planned")


def test_processes_follow_the_plan_of_rank_0() -> None:
    first, second = run_ranks(on_a_process, 2)
    assert first[1] == second[1]
    assert first[0] == second[0] != ""
    x, y = batch()
    plain = nn.Sequential(*layers())
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        torch.autograd.backward(functional.mse_loss(plain(x[rows]), y[rows]) * 0.25)
    pipeline_grads = {tuple(grad.flatten().tolist()) for rank_result in (first, second) for grad in rank_result[2]}
    assert pipeline_grads == {tuple(grad.flatten().tolist()) for grad in gradients(plain)}


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    profile = even(8)
    options: dict[str, Any] = {"profile": profile, "microbatches": 8, "schedule": "1f1b"}
    alone, shared, enough = (sl.plan(**options, ranks=4, cores=cores) for cores in (None, 2, 4))
    work = 8 * sum(layer.forward + layer.backward for layer in profile.layers)
    assert alone.step_seconds == enough.step_seconds < work / 2 <= shared.step_seconds
    assert "4 ranks compute at most 2 at a time" in shared.explain()
    assert sl.plan(**options, ranks=4, cores=[sl.Share([0, 1], 1), sl.Share([2, 3], 1)]).step_seconds > work / 2
    shared.write("plan.json")
    assert sl.read_plan("plan.json").step_seconds == shared.step_seconds


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (3.5, 3)])
def test_the_number_of_ranks_is_chosen_for_the_cores(cores: float, ranks: int) -> None:
    best = sl.plan(profile=even(6), microbatches=12, schedule="1f1b", ranks="auto", cores=cores)
    assert best.ranks == ranks
    with pytest.raises(sl.StagelineError, match="pass the number of cores as cores="):
        sl.plan(profile=even(6), microbatches=4, ranks="auto")
    with pytest.raises(sl.StagelineError, match="cores must be a number above 0"):
        sl.plan(profile=even(6), microbatches=4, ranks=2, cores=0)


def test_the_overhead_of_a_stage_makes_many_stages_dear() -> None:
    """Without it, more stages have a smaller bubble; it counts once in every action."""
    options: dict[str, Any] = {"profile": even(12), "microbatches": 4, "ranks": 2, "schedule": ["1f1b", "interleaved"]}
    plain = sl.plan(**options)
    dear = sl.plan(**options, overhead=10 * plain.step_seconds)
    assert dear.chunks == 1 < plain.chunks
    assert dear.step_seconds > 80 * plain.step_seconds
    busy = sl.plan(**options, message_overhead=10 * plain.step_seconds)  # each stage has one message to its neighbour
    assert busy.chunks == 1
    assert busy.step_seconds == pytest.approx(dear.step_seconds)
    with pytest.raises(sl.StagelineError, match="overhead must be a number of seconds, at least 0"):
        sl.plan(**options, overhead=-1.0)

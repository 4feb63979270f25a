"""Measured steps against the plan: drifting stages are named, a new order is used, and no gradient changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.distributed.thread_host import ThreadHost
from stageline.runtime import replan
from stageline.runtime.replan import LOOK_EVERY, Watch
from stageline.synthesis.synthesize import Reordered, reorder
from stageline.testing import run_ranks
from stageline.timeline.drift import WINDOW, drift_of
from stageline.timeline.memory import peaks_of
from stageline.train.events import read_metrics

PLANNED = sl.Costs(forward=1, backward_input=1, backward_weight=1, residue=0.5)


def slower(stages: int, which: int, times: float = 1.5) -> sl.Costs:
    """What is measured when one stage is slow."""
    row = [times if stage == which else 1.0 for stage in range(stages)]
    return sl.Costs(forward=row, backward_input=row, backward_weight=row)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)))


def gradients(pipe: sl.Pipeline) -> list[Tensor]:
    return [grad.clone() for _, grad in pipe.named_gradients() if grad is not None]


def trained(ranks: int, schedule: str, steps: int = 5, **more: Any) -> tuple[sl.Pipeline, list[list[Tensor]]]:
    """The gradients of some steps, in each of which all weights change."""
    pipe = sl.Pipeline(
        model(),
        loss_fn=functional.mse_loss,
        schedule=schedule,
        ranks=ranks,
        microbatches=6,
        seed=1,
        deadline=30,
        **more,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    torch.manual_seed(pipe.replica + 2)
    history = []
    for _ in range(steps):
        x, y = torch.randn(12, 8), torch.randn(12, 8)
        pipe.zero_grad()
        pipe.step(x, y)
        history.append(gradients(pipe))
        optimizer.step()
    return pipe, history


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(len(one) == len(two) and all(map(torch.equal, one, two)) for one, two in zip(first, second, strict=True))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[sl.Costs], None]:
    """Lets steps be measured as these costs, whatever they took: no clock decides a test."""
    return lambda costs: monkeypatch.setattr(replan, "typical_costs", lambda timeline: costs)


@pytest.mark.parametrize(("schedule", "ranks", "slow"), [("1f1b", 2, 1), ("hanayo", 2, 1), ("interleaved", 2, 1),
                                                         ("gpipe", 4, 3)])  # fmt: skip
def test_reordering_changes_no_bit(
    schedule: str, ranks: int, slow: int, measured: Callable[[sl.Costs], None], caplog: pytest.LogCaptureFixture
) -> None:
    stages = sl.schedule(schedule, ranks, 6).stages
    measured(slower(stages, slow))
    with caplog.at_level(logging.WARNING, "stageline"):
        pipe, replanned = trained(ranks, schedule, replan="auto", replan_every=2, planned=PLANNED)
    plain, expected = trained(ranks, schedule)
    assert same(replanned, expected)
    (changed,) = pipe.replans  # it happens once, after the second step
    assert changed.step == 1
    assert changed.after < changed.before
    assert pipe.schedule != plain.schedule
    assert pipe.schedule.placement.table.tolist() == plain.schedule.placement.table.tolist()
    assert pipe.certificate.in_order
    assert pipe.timeline.schedule == pipe.schedule
    assert f"stage {slow} on rank" in caplog.text
    assert "re-planned" in caplog.text


def test_evaluation_and_smaller_batches_work_after_reordering(measured: Callable[[sl.Costs], None]) -> None:
    measured(slower(2, 1))
    pipe, _ = trained(2, "1f1b", steps=2, replan="auto", replan_every=2, planned=PLANNED)
    plain, _ = trained(2, "1f1b", steps=2)
    assert pipe.replans
    for samples in (12, 3):
        x, y = torch.ones(samples, 8), torch.zeros(samples, 8)
        assert pipe.step(x, y).loss == plain.step(x, y).loss
        assert same([gradients(pipe)], [gradients(plain)])
        assert pipe.eval().evaluate(x, y).loss == plain.eval().evaluate(x, y).loss
        pipe.train(), plain.train()


def ran(schedule: str, ranks: int, max_norm: float, **more: Any) -> tuple[sl.Pipeline, Any, list[Any]]:
    """Losses and norms of a run over some batches, then the weights."""
    pipe = sl.Pipeline(
        model(),
        loss_fn=functional.mse_loss,
        schedule=schedule,
        ranks=ranks,
        microbatches=6,
        seed=1,
        deadline=30,
        **more,
    )
    torch.manual_seed(2)
    batches = [(torch.randn(12, 8), torch.randn(12, 8)) for _ in range(6)]
    run = pipe.run(batches, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05), max_norm=max_norm)
    figures = [(stats.loss, stats.norm) for stats in run]
    return pipe, run, [figures, [parameter.detach().clone() for parameter in pipe.parameters()]]


@pytest.mark.parametrize("max_norm", [0.05, 100.0])  # all steps are clipped and recomputed; or none is
@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 2), ("1f1b", 4), ("interleaved", 2)])
def test_reordering_changes_no_bit_of_continuous_steps(
    schedule: str, ranks: int, max_norm: float, measured: Callable[[sl.Costs], None]
) -> None:
    measured(slower(sl.schedule(schedule, ranks, 6).stages, 1, 3.0))
    pipe, run, replanned = ran(schedule, ranks, max_norm, replan="auto", replan_every=2, planned=PLANNED)
    plain, _, expected = ran(schedule, ranks, max_norm)
    assert run.interlocks
    assert replanned[0] == expected[0]
    assert same([replanned[1]], [expected[1]])
    assert [changed.step for changed in pipe.replans] == [1]
    assert pipe.timeline.schedule == pipe.schedule != plain.schedule


def run_on_a_process(rank: int) -> tuple[list[Any], list[Any], int]:
    vars(replan)["typical_costs"] = lambda timeline: slower(2, 1, 3.0)
    pipe, run, (figures, weights) = ran("gpipe", 2, 0.05, replan="auto", replan_every=2, planned=PLANNED)
    assert run.interlocks
    return figures, weights, len(pipe.replans)


def test_processes_with_continuous_steps_reorder_together() -> None:
    results = run_ranks(run_on_a_process, 2)
    _, _, (figures, weights) = ran("gpipe", 1, 0.05)
    assert all(mine == figures and replans == 1 for mine, _, replans in results)
    assert same([[weight for _, mine, _ in results for weight in mine]], [weights])


def on_a_process(rank: int, replicas: int) -> list[tuple[list[list[Tensor]], list[list[str]], int]]:
    vars(replan)["typical_costs"] = lambda timeline: slower(2, 1)
    outcomes = []
    for mode in ("auto", "off"):
        pipe, grads = trained(
            2,
            "1f1b",
            steps=4,
            replan=mode,
            replan_every=2,
            planned=PLANNED,
            replicas=replicas if replicas > 1 else None,
        )
        programs = [[str(entry) for entry in program] for program in pipe.schedule.programs]
        outcomes.append((grads, programs, len(pipe.replans)))
    return outcomes


@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_reorder_together(replicas: int) -> None:
    changed, plain = zip(*run_ranks(on_a_process, 2 * replicas, replicas), strict=True)
    for one, two in zip(changed, plain, strict=True):
        assert same(one[0], two[0])
    assert all(programs == changed[0][1] for _, programs, _ in changed)
    assert changed[0][1] != plain[0][1]
    assert [replans for *_, replans in changed] == [1] * 2 * replicas


def look(watch: Watch, schedule: sl.Schedule, costs: sl.Costs, steps: int) -> list[Any]:
    """Watch this many steps that are measured as these costs."""
    host, results = ThreadHost(schedule.ranks), []
    for step in range(steps):
        seen = sl.simulate(schedule, costs) if watch.wants() else None
        results.append(watch.after(step, seen, schedule, host))
    return results


def test_a_straggler_is_named_once_with_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    schedule = sl.schedule("zb-h1", 4, 8)
    watch = Watch("warn", 4, None, None)
    with caplog.at_level(logging.WARNING, "stageline"):
        look(watch, schedule, sl.Costs(), 4)
        assert watch.drift is not None
        assert watch.drift.stages == ()
        assert not caplog.records  # the others are compared with the first period
        assert look(watch, schedule, slower(4, 2), 4) == [None] * 4
        (warning,) = [record.message for record in caplog.records]
        look(watch, schedule, slower(4, 2), 8)
        assert len(caplog.records) == 1
    assert "stage 2 on rank 2 takes 1.5 times the planned time (4.5 s instead of 3 s for a microbatch)" in warning
    before, after = (sl.simulate(schedule, costs).makespan for costs in (sl.Costs(), slower(4, 2)))
    assert f"({after:.3g} s instead of {before:.3g} s)" in warning


@given(st.floats(0.3, 5.0), st.sampled_from(["1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"]))
def test_a_uniform_slowdown_is_no_drift(times: float, name: str) -> None:
    schedule = sl.schedule(name, 2, 6)
    row = [times] * schedule.stages
    drift = drift_of(schedule, sl.Costs(), sl.Costs(forward=row, backward_input=row, backward_weight=row))
    assert drift.stages == ()
    assert drift.planned == pytest.approx(drift.measured)


@settings(max_examples=15)
@given(st.data(), st.sampled_from([("1f1b", 3), ("zb-h1", 3), ("zb-v", 2), ("interleaved", 2), ("gpipe", 2)]))
def test_reordering_is_faster_and_needs_no_more_memory_on_any_rank(data: st.DataObject, which: tuple[str, int]) -> None:
    schedule = sl.schedule(which[0], which[1], 5)
    row = st.lists(st.floats(0.5, 4.0), min_size=schedule.stages, max_size=schedule.stages)
    rows = [data.draw(row) for _ in range(4)]
    costs = sl.Costs(forward=rows[0], backward_input=rows[1], backward_weight=rows[2], activation=rows[3], residue=0.5)
    reordered = reorder(schedule, costs, time_limit=0.2)
    if reordered is None:
        return
    assert sl.simulate(reordered.schedule, costs).makespan == pytest.approx(reordered.after)
    assert reordered.after < reordered.before
    assert sl.verify(reordered.schedule).in_order
    for new, old in zip(peaks_of(reordered.schedule, costs), peaks_of(schedule, costs), strict=True):
        assert new <= old * (1 + 1e-9)


def test_an_interrupt_during_the_search_for_an_order_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **options: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("stageline.synthesis.search.lower_bound", interrupt)
    assert sl.synthesize(PLANNED, 2, 4).was_interrupted
    with pytest.raises(KeyboardInterrupt):
        reorder(sl.schedule("gpipe", 2, 6), slower(2, 1))


def test_backward_halves_that_were_not_measured_are_not_guessed() -> None:
    """A schedule of whole backwards says nothing of I and W; without a plan its new order has whole ones too."""
    schedule = sl.schedule("gpipe", 3, 6)
    watch = Watch("auto", 3, None, None)
    look(watch, schedule, sl.Costs(), 3)
    changes = [change for change in look(watch, schedule, slower(3, 0, 4.0), 3) if change is not None]
    for change in changes:
        assert "I" not in {action.kind for program in change.schedule.programs for action in program}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replan": "always"}, "replan must be 'off', 'warn' or 'auto', got 'always'"),
        ({"replan": "atuo"}, r"did you mean 'auto'\?"),
        ({"replan": "warn", "replan_every": 1}, "replan_every must be an integer >= 2, got 1"),
        ({"replan": "warn", "planned": 5}, "planned must be sl.Costs"),
        ({"replan": "warn", "planned": sl.Costs(forward=[1, 2, 3])}, "forward has 3 values, but the schedule has 2"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.Pipeline(model(), loss_fn=functional.mse_loss, ranks=2, microbatches=2, **options)


def test_a_job_reorders_and_trains_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(schedule: sl.Schedule, costs: sl.Costs, **options: Any) -> Reordered:
        return Reordered(sl.schedule("1f1b", schedule.ranks, schedule.microbatches), 2.0, 1.5)

    monkeypatch.setattr(replan, "typical_costs", lambda timeline: slower(2, 1, 1000.0))
    monkeypatch.setattr(replan, "reorder", other)
    losses = []
    for mode in ("auto", "off"):
        config = sl.Config.read(
            None, "training.steps=5", "training.seq_len=8", "model.dim=16", "model.n_layers=2", "model.n_heads=2",
            "parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=gpipe",
            f"parallelism.replan={mode}", "parallelism.replan_freq=2", f"job.dump_folder={tmp_path / mode}",
            "sample.tokens=0", "validation.enable=false", "checkpoint.enable=false",
        )  # fmt: skip
        losses.append(sl.Trainer(config).run().loss)
    assert losses[0] == losses[1] is not None
    (event,) = read_metrics(tmp_path / "auto" / "metrics.jsonl").of("replan")
    assert (event["step"], event["before"], event["after"]) == (2, 2.0, 1.5)
    assert "re-planned: the step should take 25.0% less" in event["said"]
    assert event["said"] in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_drift_and_a_lasting_change_is_reported_once(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages that vary by a fifth from step to step, in 200 steps that are checked every ten; then one is slow."""
    draw, factors = np.random.default_rng(seed), np.ones(4)

    def noisy(timeline: sl.Timeline) -> sl.Costs:
        forward, backward = np.exp(draw.normal(0.0, 0.2, (2, 4))) * factors
        return sl.Costs(forward=forward.tolist(), backward=(2 * backward).tolist())

    monkeypatch.setattr(replan, "typical_costs", noisy)
    schedule, host = sl.schedule("1f1b", ranks=4, microbatches=8), ThreadHost(4)
    timeline, watch = sl.simulate(schedule, sl.Costs()), Watch("warn", 10, None, None)
    for step in range(260):
        factors[2] = 4.0 if step >= 200 else 1.0
        watch.after(step, timeline if watch.wants() else None, schedule, host)
    (line,) = caplog.messages
    assert line.startswith("after step 209, stage 2 on rank 2 takes ")


def test_a_lasting_straggler_is_named_within_ten_steps() -> None:
    """It must be slow for a whole window, which may end just after the last look."""
    assert WINDOW + LOOK_EVERY - 1 <= 10

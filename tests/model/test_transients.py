"""The costs of a loss in a profile, and memory that is held only while an action runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.model import measurement
from stageline.model.measurement import CallBenchmark, PeakMeter, Timer, is_host_bound, on_host, run_round
from stageline.model.observation import capture
from stageline.model.profile import Layer, Profile, read_profile, stage_transients
from stageline.model.profiler import LOSS, with_loss

SAMPLES, WIDTH, CLASSES = 32, 16, 512


def classifier() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def profiles() -> tuple[Profile, Profile]:
    x, targets = torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,))
    plain = sl.profile(classifier(), x, repeats=1)
    return plain, sl.profile(classifier(), x, loss_fn=functional.cross_entropy, targets=targets, repeats=1)


def test_the_loss_counts_in_the_last_unit() -> None:
    plain, joint = profiles()
    assert [layer.name for layer in joint.layers] == [layer.name for layer in plain.layers]
    assert [layer.activation for layer in joint.layers[:-1]] == [layer.activation for layer in plain.layers[:-1]]
    logits = SAMPLES * CLASSES * 4
    more = joint.layers[-1].activation - plain.layers[-1].activation
    assert logits <= more <= logits + 16 * SAMPLES  # the logarithms of the probabilities, and the targets
    assert joint.layers[-1].message == plain.layers[-1].message == logits


def test_a_plan_with_the_loss_holds_it() -> None:
    x, targets = torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,))
    request: dict[str, Any] = {"ranks": 1, "microbatches": 4, "schedule": "1f1b", "repeats": 1}
    plain = sl.plan(classifier(), x, **request)
    joint = sl.plan(classifier(), x, loss_fn=functional.cross_entropy, targets=targets, **request)
    assert joint.memory[0].activations - plain.memory[0].activations >= SAMPLES * CLASSES * 4


def test_profiling_a_loss_changes_nothing() -> None:
    model, x = classifier(), torch.randn(SAMPLES, WIDTH)
    state, generator = torch.random.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    loss = lambda output, target: functional.dropout(output).sum()  # noqa: E731
    sl.profile(model, x, loss_fn=loss, targets=None, repeats=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, generator[name]) for name, value in model.state_dict().items())


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(sl.StagelineError, match=LOSS):
        sl.profile(classifier(), torch.randn(4, WIDTH), loss_fn=functional.cross_entropy, targets=torch.ones(3).long())


UNIT = Layer("0", "Block", 1.0, 1.0, 1.0, 2.0, activation=100, residue=40, parameters=0, tied=0, message=10,
             arriving=0, leaving=10, calls=1)  # fmt: skip
MEASURED = replace(
    UNIT, forward_transient=7, backward_transient=30, backward_input_transient=20, backward_weight_transient=5
)


def test_transients_of_a_stage_by_hand() -> None:
    # F of the last unit: all activations, its output and what it needs while it runs.
    assert stage_transients([UNIT, UNIT, MEASURED])["F"] == 17
    # The first unit runs when two thirds of the activations do not exist yet.
    assert stage_transients([replace(MEASURED, forward_transient=207), UNIT, UNIT])["F"] == 17
    # B of the last unit: all activations, the gradient of its output, and what it needs while it runs.
    assert stage_transients([UNIT, UNIT, MEASURED])["B"] == 40
    # I of the first unit: 200 bytes are freed, and 80 of them kept for W.
    large = replace(MEASURED, backward_input_transient=200)
    assert stage_transients([large, UNIT, UNIT])["I"] == 100 + 80 + 10 + 200 - 300
    assert stage_transients([UNIT, MEASURED])["W"] == 5
    assert stage_transients([UNIT, UNIT]) == {"F": 0, "B": 0, "I": 0, "W": 0}  # nothing was measured


def test_the_peak_of_a_plan_includes_transients() -> None:
    measured = Profile((MEASURED, MEASURED), "a machine", "cuda", "2", 1, 1)
    schedule = sl.schedule("gpipe", ranks=1, microbatches=3)
    assert sl.simulate(schedule, measured.costs([(0, 2)])).peak_memory == (3 * 200 + 40,)
    plain = replace(measured, layers=(UNIT, UNIT))
    assert sl.simulate(schedule, plain.costs([(0, 2)])).peak_memory == (600,)
    request: dict[str, Any] = {"ranks": 1, "microbatches": 3, "schedule": "gpipe", "recompute": "stage"}
    kept = sl.plan(profile=plain, **request).memory[0].activations
    assert sl.plan(profile=measured, **request).memory[0].activations == kept + 40


def test_the_loss_and_the_last_unit_have_one_peak() -> None:
    loss = replace(MEASURED, name=LOSS, activation=50, residue=0, message=4, arriving=10, leaving=0)
    (joint,) = with_loss([MEASURED, loss])
    assert joint.activation == 150
    assert joint.forward_transient == 10 + 7 - 10  # the stage adds the output of the last unit
    assert joint.backward_transient == 30 - 10  # the stage adds the gradient of the output, which is part of the peak
    assert stage_transients([joint])["B"] == 30


def test_files_without_transients_are_read_and_written(tmp_path: Path) -> None:
    plain, measured = (Profile((layer,), "a machine", "cuda", "2", 1, 1) for layer in (UNIT, MEASURED))
    for number, profile in enumerate((plain, measured)):
        path = tmp_path / f"{number}.json"
        profile.write(path)
        assert read_profile(path) == profile
    assert not any("transient" in key for key in json.loads((tmp_path / "0.json").read_text())["layers"][0])


def test_a_meter_of_the_host_measures_nothing() -> None:
    meter = PeakMeter(torch.device("cpu"))
    assert meter.above_end(lambda: 3) == meter.above_start(lambda: 3) == (0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_meter_of_a_gpu_measures_temporaries() -> None:
    meter = PeakMeter(torch.device("cuda", 0))
    size = 2**22

    def work() -> torch.Tensor:
        temporary = torch.zeros(size, dtype=torch.uint8, device="cuda")
        kept = torch.zeros(2 * size, dtype=torch.uint8, device="cuda")
        del temporary
        return kept

    assert meter.above_end(work)[0] == size
    assert meter.above_start(work)[0] == 3 * size


class FixedTimer(Timer):
    """Measures the same time for every call on the GPU."""

    engine_call = 0.1

    def __init__(self, seconds: float) -> None:
        super().__init__(torch.device("cpu"))
        self._seconds = seconds

    def __call__(self, call: Any) -> tuple[float, Any]:
        return self._seconds, call()


@pytest.mark.parametrize(("device", "host"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_slower_of_gpu_and_host_sets_the_times(device: float, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "on_host", lambda call: (host, call()))
    model, x = classifier(), torch.randn(SAMPLES, WIDTH)
    traces = capture([("0", model[0])], lambda: model(x))
    call = CallBenchmark(traces[0], traces[0].calls[0], FixedTimer(device))
    run_round([call], "alone")
    run_round([call], "host")
    host_bound = is_host_bound([call])
    assert host_bound == (host > device)
    times = call.times("host" if host_bound else "alone")
    assert times["F"] == [2.0, 2.0]
    # A stage calls autograd's engine once for all its units.
    assert times["B"] == [1.9 if host_bound else 2.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_without_the_gaps_of_its_host() -> None:
    timer = Timer(torch.device("cuda", 0))
    x = torch.randn(64, 64, device="cuda")

    def many() -> None:
        for _ in range(50):
            x.add(1)

    assert min(timer(many)[0] for _ in range(5)) < min(on_host(many)[0] for _ in range(5))
    assert timer.engine_call < 2e-3

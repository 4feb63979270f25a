"""Profiles: bytes counted by hand, figures that add up, and no side effects."""

from __future__ import annotations

import json
import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.model.neighbours import neighbours_of
from stageline.model.profile import Layer, Profile, read_profile
from stageline.model.profiler import profile_layers, profile_model
from stageline.model.samples import layer_key
from stageline.testing import SleepStage

ROWS, WIDTH = 6, 16
FLOAT = 4


def quick(model: nn.Module, args: Any, **more: Any) -> Profile:
    return profile_model(model, args, repeats=1, warmup=0, **more)


class Block(nn.Module):
    """A transformer block that takes a mask by name and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        query, key, value = self.inside(self.norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) + mask).softmax(-1)
        x = x + self.out(weights @ value) * scale
        return x + self.down(functional.gelu(self.up(x))), {"scale": scale}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.zeros(tokens.shape[1], tokens.shape[1])
        for block in (self.first, self.second):
            x, _ = block(x, mask=mask)
        return torch.as_tensor(self.head(x))


def test_an_mlp_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))
    first, relu, last = quick(model, torch.randn(ROWS, WIDTH)).layers
    assert [layer.kind for layer in (first, relu, last)] == ["Linear", "ReLU", "Linear"]
    assert [layer.name for layer in (first, relu, last)] == ["0", "1", "2"]
    # The first layer keeps its input, ReLU its output, and the last layer's input is that same memory.
    assert (first.activation, first.arriving) == (ROWS * WIDTH * FLOAT, 0)
    assert (relu.activation, relu.arriving, relu.leaving) == (ROWS * 32 * FLOAT, ROWS * 32 * FLOAT, 0)
    assert (last.activation, last.arriving, last.leaving) == (0, ROWS * 32 * FLOAT, ROWS * 8 * FLOAT)
    # W of a linear layer needs its input and the gradient of its output; ReLU has no W.
    assert first.residue == ROWS * (WIDTH + 32) * FLOAT
    assert relu.residue == 0
    assert last.residue == ROWS * (32 + 8) * FLOAT
    assert [layer.message for layer in (first, relu, last)] == [ROWS * width * FLOAT for width in (32, 32, 8)]
    assert first.parameters == (WIDTH * 32 + 32) * FLOAT


def test_a_transformer_block_counted_by_hand() -> None:
    rows, length = 2, 3
    profile = quick_gpt(rows, length)
    unit = rows * length * WIDTH * FLOAT
    square = rows * length * length * FLOAT
    norm = 2 * rows * length * FLOAT
    embedding, first, second, head = profile.layers
    assert embedding.activation == rows * length * 8  # integers
    assert embedding.residue == embedding.activation + unit
    # x, the norm's output and statistics, the three parts in one memory, attention weights, mixed values, the sum x,
    # the inputs of GELU and of the last linear layer.
    kept = unit * (1 + 1 + 3 + 1 + 1 + 2 + 2) + norm + square
    for block in (first, second):
        assert block.activation == kept
        # What W needs: the inputs of four linear layers and the norm, and the gradients of all their outputs.
        assert block.residue == unit * (1 + 1 + 1 + 1 + 2) + norm + unit * (1 + 3 + 1 + 2 + 1)
        assert block.message == unit
        assert (block.arriving, block.leaving) == (length * length * FLOAT, unit)  # the mask is added, not saved
    assert head.activation == unit


def quick_gpt(rows: int = 2, length: int = 3) -> Profile:
    model = Model()
    layers = [(name, layer) for name, layer in model.named_children()]
    return quick(model, (torch.randint(0, 10, (rows, length)),), layers=layers)


def test_times_are_positive_and_the_embedding_has_no_input_gradient() -> None:
    model = Model()
    layers = list(model.named_children())
    profile = profile_layers(layers, lambda: model(torch.randint(0, 10, (2, 3))), repeats=3, warmup=1)
    for layer in profile.layers:
        assert min(layer.forward, layer.backward_input, layer.backward_weight, layer.backward) > 0
    assert profile.seconds == tuple(
        layer.forward + layer.backward_input + layer.backward_weight for layer in profile.layers
    )
    assert profile.parameters == sum(parameter.numel() * FLOAT for parameter in model.parameters())


def test_tied_parameters_are_in_both_layers_and_once_in_the_sum() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    profile = quick(model, torch.tensor([[1, 2]]))
    assert [(layer.parameters, layer.tied) for layer in profile.layers] == [(160, 0), (160, 160)]
    assert profile.parameters == 160
    assert "tied parameters, 160 B" in str(profile)


def test_a_layer_called_twice_costs_both_calls() -> None:
    shared = nn.Linear(8, 8)
    x = torch.randn(ROWS, 8)
    (layer,) = profile_layers([("shared", shared)], lambda: shared(shared(x).relu()), repeats=1).layers
    assert layer.calls == 2
    assert layer.activation == 2 * ROWS * 8 * FLOAT
    assert layer.residue == 4 * ROWS * 8 * FLOAT


def test_a_layer_in_two_places_is_listed_in_both() -> None:
    shared = nn.Linear(8, 8)
    profile = quick(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(ROWS, 8))
    assert [(layer.name, layer.calls, layer.tied) for layer in profile.layers] == [
        ("0", 1, 0),
        ("1", 1, 0),
        ("2", 1, 288),
    ]


class Cross(nn.Module):
    """Takes and returns pytrees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, pair: tuple[Tensor, Tensor], *, extra: dict[str, Any]) -> dict[str, Any]:
        return {"both": [pair[0] * self.weight, pair[1] * extra["factor"]], "number": extra["number"]}


def test_layers_may_take_and_return_pytrees() -> None:
    first, second = Cross(), Cross()
    x = torch.ones(3, 4)

    def run() -> Any:
        extra = {"factor": torch.tensor(2.0), "number": 3}
        outputs = first((x, x), extra=extra)
        return second((outputs["both"][0], outputs["both"][1]), extra=extra)

    profile = profile_layers([("first", first), ("second", second)], run, repeats=1)
    assert [layer.message for layer in profile.layers] == [2 * 48, 2 * 48]


def test_an_in_place_layer_is_measured_on_a_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    profile = profile_model(model, x, repeats=2)
    assert [layer.activation for layer in profile.layers] == [48, 48, 0, 0]


def test_profiling_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[0].eval()
    model(torch.randn(8, 4)).sum().backward()
    model.get_parameter("3.weight").grad = None
    fired: list[Tensor] = []
    model.get_parameter("0.weight").register_post_accumulate_grad_hook(fired.append)  # type: ignore[no-untyped-call]
    model.get_parameter("3.weight").register_hook(fired.append)  # type: ignore[no-untyped-call]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {
        name: (parameter.grad, None if parameter.grad is None else parameter.grad.clone())
        for name, parameter in model.named_parameters()
    }
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    profile_model(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), repeats=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        before, values = grads[name]
        assert parameter.grad is before
        assert before is None or (values is not None and torch.equal(values, before))
    assert not fired
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    model(torch.randn(8, 4)).sum().backward()
    assert len(fired) == 2  # the hooks of parameters are restored


def test_frozen_layers_and_mixed_precision_are_measured_as_in_the_run() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).requires_grad_(False)
    model[1].requires_grad_(True)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.as_tensor(model(torch.randn(3, 4)))

    frozen, trained = profile_layers(list(model.named_children()), run, repeats=1).layers
    assert (frozen.backward_input, frozen.backward_weight, frozen.backward, frozen.activation) == (0, 0, 0, 0)
    assert trained.backward_weight > 0
    assert (frozen.message, trained.message) == (3 * 8 * 2, 3 * 4 * 2)


def test_a_simulation_of_the_costs_adds_up() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    profile = quick(model, torch.randn(ROWS, 8))
    costs = profile.costs([(0, 1), (1, 3), (3, 5)], transfer=0.5)
    unit = ROWS * 8 * FLOAT
    # A stage keeps what arrives and what leaves it, whether or not its layers save it.
    assert costs.activation == [2 * unit, 3 * unit, 2 * unit]
    assert costs.message == [unit] * 3
    timeline = sl.simulate(sl.schedule("zb-h1", ranks=3, microbatches=4), costs)
    for kind, name in (("F", "forward"), ("I", "backward_input"), ("W", "backward_weight")):
        total = sum(event.end - event.start for event in timeline.actions() if event.action.kind == kind)
        assert total == pytest.approx(4 * sum(getattr(layer, name) for layer in profile.layers))
    assert sl.simulate(sl.schedule("1f1b", ranks=1, microbatches=1), profile.costs([(0, 5)])).makespan == pytest.approx(
        sum(layer.forward + layer.backward for layer in profile.layers)
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(0, 1), (2, 3)], r"stage 1 is \(2, 3\).*starts at 1"),
        ([(0, 0), (0, 3)], r"stage 0 is \(0, 0\)"),
        ([(0, 4)], r"stage 0 is \(0, 4\)"),
        ([1, 2], "stage 0 is 1;"),
        ([(0, 2)], "end at layer 2, but the profile has 3"),
    ],
)
def test_invalid_stages_are_refused(stages: Any, message: str) -> None:
    layer = Layer("a", "Linear", 1.0, 1.0, 1.0, 2.0, 8, 8, 8, 0, 8, 0, 0, 1)
    with pytest.raises(sl.CostError, match=message):
        Profile((layer, layer, layer), "here", "cpu", "2", 1, 1).costs(stages)


def test_a_profile_survives_a_round_trip(tmp_path: Path) -> None:
    profile = quick_gpt()
    profile.write(tmp_path / "a.json")
    assert read_profile(tmp_path / "a.json") == profile
    with pytest.raises(sl.CostError, match=r"must end in \.json"):
        profile.write(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=2), "version 2 of the profile format is not supported"),
        (lambda data: data.update(format="stageline-schedule"), "not a profile"),
        (lambda data: data.pop("layers"), "'layers' is missing"),
        (lambda data: data.update(layers=[]), "'layers' is empty"),
        (lambda data: data.update(layers=[3]), r"layers\[0\] must be an object, got 3"),
        (lambda data: data.update(threads=0), "'threads' must be an integer from 1"),
        (lambda data: data.update(machine=1), "'machine' must be a string"),
        (lambda data: data["layers"][1].pop("residue"), r"layers\[1\] lacks 'residue'"),
        (lambda data: data["layers"][1].update(extra=1), r"layers\[1\] has an unknown 'extra'"),
        (lambda data: data["layers"][0].update(forward=-1.0), r"layers\[0\]\.forward must be a number from 0"),
        (lambda data: data["layers"][0].update(forward=True), r"layers\[0\]\.forward"),
        (lambda data: data["layers"][0].update(activation=1.5), r"layers\[0\]\.activation must be an integer"),
        (lambda data: data["layers"][0].update(calls=0), r"layers\[0\]\.calls must be an integer from 1"),
        (lambda data: data["layers"][0].update(name=None), r"layers\[0\]\.name must be a string"),
    ],
)
def test_bad_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    layer = Layer("a", "Linear", 1.0, 1.0, 1.0, 2.0, 8, 8, 8, 0, 8, 0, 0, 1)
    path = tmp_path / "a.json"
    Profile((layer, layer), "here", "cpu", "2", 1, 1).write(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(sl.CostError, match=message) as error:
        read_profile(path)
    assert "a.json" in str(error.value)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(sl.StagelineError, match="not JSON"):
        read_profile(tmp_path / "a.json")
    with pytest.raises(sl.StagelineError, match="cannot read"):
        read_profile(tmp_path / "none.json")


def test_the_table_is_aligned_and_names_the_machine() -> None:
    lines = str(quick_gpt()).splitlines()
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[0].split() == ["layer", "kind", "F", "I", "W", "B", "activation", "residue", "parameters", "output"]
    assert [line.split()[0] for line in lines[1:-1]] == ["embedding", "first", "second", "head", "total"]
    assert f"torch {torch.__version__}" in lines[-1]
    assert f"{torch.get_num_threads()} threads" in lines[-1]


class Fails(nn.Module):
    """Fails from a given call on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyError("lost")
        return x * 2


@pytest.mark.parametrize(("after", "where"), [(0, "when the model ran"), (1, "when it ran alone")])
def test_an_exception_names_the_layer(after: int, where: str) -> None:
    with pytest.raises(sl.StagelineError, match=rf"layer '1' \(Fails\) failed {where}.*KeyError: 'lost'"):
        quick(nn.Sequential(nn.Linear(4, 4), Fails(after)), torch.randn(2, 4))


def test_layers_that_cannot_be_measured_are_refused() -> None:
    linear, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def refused(message: str, layers: Any, run: Any = lambda: linear(x), **more: Any) -> None:
        with pytest.raises(sl.StagelineError, match=message):
            profile_layers(layers, run, **more)

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(linear(x))

    one = [("a", linear)]
    refused("run never called 'b'", [*one, ("b", unused)])
    refused(r"layer 'a' \(Linear\) ran without gradients", one, without_gradients)
    refused("run called backward", one, lambda: linear(x).sum().backward())
    refused("two layers are named 'a'", [*one, ("a", unused)])
    refused("layer 'a' is inside layer 'whole'", [*one, ("whole", nn.Sequential(linear))])
    refused("listed 2 times and was called 1 times", [*one, ("again", linear)])
    refused(r"must be \(name, module\) pairs, got 3", [3])
    refused("layers is empty", [])
    refused("repeats must be an integer >= 1, got 0", one, repeats=0)
    refused("device must be 'cpu' or 'cuda', got 'meta'", one, device="meta")
    assert linear.weight.grad is None
    assert not linear._forward_hooks
    with pytest.raises(sl.StagelineError, match=r"cannot infer the layers of a Model; pass layers="):
        profile_model(Model(), torch.tensor([[1]]))


@pytest.mark.parametrize("launcher", ["threads", "processes"])
def test_neighbours_work_while_a_model_is_measured(launcher: Any) -> None:
    """They compute in turns with the layers that are measured alone, and are gone afterwards."""
    calls = mmap.mmap(-1, 1)

    def job() -> None:
        calls[0] = (calls[0] + 1) % 256
        time.sleep(1e-4)

    with neighbours_of(lambda: job, 2, launcher) as neighbours:
        assert neighbours is not None
        assert calls[0] == 0
        assert neighbours.work()
        while calls[0] < 3:
            time.sleep(1e-4)
        neighbours.pause()
        paused = calls[0]
        time.sleep(0.01)
        assert calls[0] == paused
    assert not [thread for thread in threading.enumerate() if thread.name == "stageline neighbour"]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    measured = sl.profile(model, torch.ones(2, 4), repeats=2, neighbours=1, launcher=launcher)
    assert measured.launcher == launcher
    assert measured.speeds[0] == 1.0
    assert 0 < measured.speeds[1] <= 1
    assert model[0].weight.grad is None
    assert "2 ranks as " + launcher in str(measured)


def test_neighbours_that_fail_are_not_waited_for() -> None:
    with neighbours_of(lambda: lambda: 1 / 0, 1, "processes") as neighbours:
        assert neighbours is not None
        neighbours.work()  # it may be seen at work before it fails
        neighbours.pause()
        began = time.monotonic()
        assert not any(neighbours.work() for _ in range(20))
        assert time.monotonic() - began < 5.0  # of 5 seconds each


def test_equal_layers_have_equal_times() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    profile = sl.profile(nn.Sequential(*blocks, nn.Linear(8, 2)), torch.ones(2, 8), repeats=4)
    ranges = [layer.ranges[0] for layer in profile.layers[:4]]
    if max(low for low, _ in ranges) <= min(high for _, high in ranges):  # else one of them was slow all the time
        assert len({layer.forward for layer in profile.layers[:4]}) == 1
    assert all(low <= high for layer in profile.layers for low, high in layer.ranges)


def test_layers_with_other_options_are_not_equal() -> None:
    same, other, longer = (layer_key(SleepStage(time, width=4), [torch.ones(1, 4)]) for time in (0.01, 0.01, 0.02))
    assert same == other
    assert same != longer
    assert layer_key(nn.Dropout(0.1), []) != layer_key(nn.Dropout(0.2), [])
    assert layer_key(nn.Linear(4, 4), [torch.ones(1, 4)]) != layer_key(nn.Linear(4, 4), [torch.ones(2, 4)])


class Irregular(nn.Module):
    """Takes long in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(4)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.1 if self.calls // 4 % 2 else 0.0)
        return x * self.weight


def test_a_noisy_profile_says_so(tmp_path: Path) -> None:
    profile = sl.profile(nn.Sequential(Irregular(), nn.Linear(4, 4)), torch.ones(2, 4), repeats=3, warmup=0)
    assert profile.repeats > 3  # it went on, in vain
    assert profile.uncertainty > 0.1
    assert profile.noise.startswith("noisy: F of 0 varied ")
    assert profile.noise in str(profile)
    profile.write(tmp_path / "noisy.json")
    assert read_profile(tmp_path / "noisy.json") == profile
    plan = sl.plan(profile=profile, ranks=2, microbatches=2, time_limit=0.2)
    assert plan.is_noisy
    assert profile.noise in plan.notes
    assert "no order of this cut is faster" not in plan.explain()
    assert "noisy" in plan.explain()
    plan.write(tmp_path / "plan.json")
    assert sl.read_plan(tmp_path / "plan.json").uncertainty == plan.uncertainty

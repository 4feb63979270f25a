"""Unchanged models, cut into stages: loss and gradients equal the model's own, bit for bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import models
import stageline as sl
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients, noise, plainly

FAMILIES = ["1f1b", "interleaved", "zb-h1", "zb-v"]


def first(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output[0].flatten(0, 1), target.flatten())


def own_loss(output: Any, target: Tensor) -> Tensor:
    return torch.as_tensor(output[1])


def words(shape: tuple[int, ...] = (6, 8), seed: int = 1) -> Tensor:
    return torch.randint(0, models.WORDS, shape, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Callable[..., Tensor], tuple[str, ...]]] = {
    "gpt": (models.GPT, (words(), words()), words(), own_loss, ()),
    "uneven": (lambda: models.GPT(uneven=True), words(), words(), first, ()),
    "tied": (lambda: models.GPT(tied=True), words(), words(), first, ("transformer.wte.weight",)),
    "unet": (models.UNet, noise(6, 3, 16, 16), noise(6, 2, 16, 16), functional.mse_loss, ()),
    "resnet": (models.ResNet, noise(6, 3, 16, 16), noise(6, 2), functional.mse_loss, ()),
    "translator": (
        models.Translator,
        (words(), words((6, 5))),
        words((6, 5), 3),
        lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        (),
    ),
}


HALF = [(case, family) for number, case in enumerate(CASES) for family in FAMILIES[number % 2 :: 2]]
SWEEP = [(case, family) for case in CASES for family in FAMILIES]


@pytest.mark.parametrize(("case", "family"), SWEEP if os.environ.get("STAGELINE_SWEEP") == "full" else HALF)
def test_an_unchanged_model_gives_the_same_bits(case: str, family: str) -> None:
    make, inputs, targets, loss_fn, tied = CASES[case]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule=family, ranks=2, microbatches=3)
    for _ in range(2):
        assert pipe.step(inputs, targets).loss == plainly(plain, loss_fn, inputs, targets, 3)
    assert_same_bits(gradients(model, tied), gradients(plain, tied))
    for name in tied:  # the two uses are added separately: equal up to rounding
        ours, theirs = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert ours is not None
        torch.testing.assert_close(ours, theirs)
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert set(pipe.state_dict()) == set(names) == set(model.state_dict())


@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
@pytest.mark.parametrize("make", [models.Shared, models.HeadFirst])
def test_an_example_shows_calls_that_repeat_or_come_in_another_order(make: type[nn.Module], family: str) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    x, y = noise(6, 5), noise(6, 2)
    schedule = sl.schedule(family, 2, 3)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, example=x)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = pipe.step(x, y).loss
    assert loss == plainly(plain, functional.mse_loss, x, y, 3)
    twice = tuple(name for name, _ in model.named_parameters() if name.startswith("shared."))
    assert_same_bits(gradients(model, twice), gradients(plain, twice))
    for name in twice:
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_without_an_example_such_calls_are_refused() -> None:
    unseen = sl.split(models.Shared(), 2)
    pipe = sl.Pipeline(unseen, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError, match=r"calls shared 2 times .* 1 were expected; pass example= to Pipeline or split"
    ):
        pipe.step(noise(4, 5), noise(4, 2))


def test_residuals_outside_of_the_blocks_need_every_output_and_differ_only_by_rounding() -> None:
    torch.manual_seed(0)
    model = models.Outside()
    plain = copy.deepcopy(model)
    x, y = noise(6, 5), noise(6, 2)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="interleaved", ranks=2, microbatches=3)
    assert pipe.step(x, y).loss == plainly(plain, functional.mse_loss, x, y, 3)
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad)


def test_dropout_draws_the_same_for_any_number_of_stages() -> None:
    results = []
    for family, ranks in (("gpipe", 1), ("1f1b", 2), ("zb-v", 2), ("1f1b", 4)):
        torch.manual_seed(0)
        model = models.GPT(drop=0.2)
        pipe = sl.Pipeline(model, loss_fn=first, schedule=family, ranks=ranks, microbatches=3, seed=7)
        losses = [pipe.step(words(), words()).loss for _ in range(2)]
        results.append((losses, gradients(model)))
    for losses, grads in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(grads, results[0][1])


def test_hooks_modes_and_evaluation_stay_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = models.GPT(drop=0.5)
    seen: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("h.0", "h.3", "lm_head")):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    pipe = sl.Pipeline(model, loss_fn=first, schedule="1f1b", ranks=2, microbatches=2)
    pipe.step(words(), words())
    assert sorted(seen) == sorted(["transformer.h.0", "transformer.h.3", "lm_head"] * 2)
    pipe.eval()
    with torch.no_grad():
        logits, _ = model(words())
        assert torch.equal(pipe.predict(words())[0], logits)
        assert pipe.evaluate(words(), words()).loss == pytest.approx(float(first((logits,), words())))


def test_only_what_later_units_need_crosses_a_stage_boundary() -> None:
    """Only the hidden states in a stack; also the skips in a U-Net; images are not passed on."""
    staged = sl.split(models.UNet(), 4)
    value: Any = noise(2, 3, 16, 16)
    crossing = []
    for part in staged.parts()[:-1]:
        value = part(value)
        crossing.append([tuple(tensor.shape[1:]) for tensor in pytree.tree_leaves(value) if isinstance(tensor, Tensor)])
    assert crossing == [
        [(4, 16, 16), (8, 8, 8)],
        [(4, 16, 16), (8, 8, 8), (8, 4, 4)],
        [(4, 16, 16), (4, 8, 8)],
    ]


Answer = tuple[float, dict[str, Tensor | None], list[str]]


def on_processes(rank: int) -> list[Answer]:
    torch.set_num_threads(1)
    _, inputs, targets, loss_fn, _ = CASES["translator"]
    results = []
    for family in ("1f1b", "zb-v"):
        torch.manual_seed(0)
        pipe = sl.Pipeline(models.Translator(), loss_fn=loss_fn, schedule=family, ranks=2, microbatches=3)
        loss = pipe.step(inputs, targets).loss
        results.append((loss, dict(pipe.named_gradients()), list(pipe.state_dict(gather=True))))
    return results


def test_processes_compute_the_same() -> None:
    torch.manual_seed(0)
    plain = models.Translator()
    _, inputs, targets, loss_fn, _ = CASES["translator"]
    loss = plainly(plain, loss_fn, inputs, targets, 3)
    for answers in zip(*run_ranks(on_processes, 2), strict=True):
        assert all(answer[0] == loss for answer in answers)
        assert_same_bits({name: grad for answer in answers for name, grad in answer[1].items()}, gradients(plain))
        assert all(names == list(plain.state_dict()) for _, _, names in answers)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ({}, [["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.h.2"],
              ["transformer.h.3", "transformer.h.4", "transformer.ln_f", "lm_head"]]),
        ({"layers_per_stage": [1, 4]}, [3, 6]),
        ({"layers_per_stage": [2, 7]}, [2, 7]),
        ({"by": ["transformer.wte", "transformer.ln_f"]}, [7, 2]),
        ({"by": ["transformer.h.4"]}, [6, 3]),
        ({"by": "type:Linear"}, None),
        ({"by": "parameters"}, [4, 5]),
        ({"stack": "transformer.h"}, [5, 4]),
    ],
)  # fmt: skip
def test_where_a_model_is_cut(ask: dict[str, Any], expected: Any) -> None:
    staged = sl.split(models.GPT(blocks=5), 2, **ask)
    if expected is None:
        assert [names[0] for names in staged.names] == ["transformer.wte", "transformer.h.3.up"]
    elif isinstance(expected[0], int):
        assert [len(names) for names in staged.names] == expected
    else:
        assert staged.names == expected
    assert list(staged.state_dict()) == list(staged.model.state_dict())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"stages": 9}, r"GPT has 8 units \(transformer.wte … lm_head\), but 9 stages were requested; pass at most 8"),
        ({"stages": 0}, "stages must be an integer >= 1, got 0"),
        ({"by": "layer"}, r"by must be one of .*, got 'layer' \(did you mean 'layers'\?\)"),
        ({"by": "type:Blok"}, r"no module of the class 'Blok' \(did you mean 'Block'\?\) in GPT"),
        ({"by": ["transformer.h.0", "transformer.h.9"]}, r"no unit 'transformer.h.9' \(did you mean 'transformer.h"),
        (
            {"by": ["transformer.h.2", "transformer.h.1"]},
            "by= has 2 unit names for 2 stages; pass the first unit of each",
        ),
        ({"layers_per_stage": [4]}, "layers_per_stage has 1 numbers, but there are 2 stages"),
        ({"layers_per_stage": [4, 0]}, r"is \[4, 0\], and 0 is not a number of layers: every stage needs at least one"),
        ({"layers_per_stage": [4, True]}, "True is not a number of layers"),
        (
            {"layers_per_stage": 2},
            r"layers_per_stage must be a list with the number of blocks of each stage, such as \[2, 3, 3\]; got 2",
        ),
        (
            {"layers_per_stage": [2, 2], "by": "parameters"},
            "layers_per_stage= and by='parameters' both define where to cut; pass only one",
        ),
        ({"stages": True}, "stages must be an integer >= 1, got True"),
        ({"stages": 2.5}, "stages must be an integer >= 1, got 2.5"),
        ({"by": 3}, "by must be one of layers, parameters, time, .*, got 3"),
        ({"by": None}, "by must be one of .*, got None"),
        ({"by": [1, 2]}, r"by must be one of .*, got \[1, 2\]"),
        ({"by": "time"}, "needs a batch to run it on; pass example=, a tuple of the model's arguments, a dict"),
        ({"stack": 3}, "stack must be the name of the list of blocks, or a list of names, got 3"),
        ({"ranks": "2", "by": "parameters"}, "ranks must be an integer >= 1, got '2'"),
        ({"ranks": 3, "stages": 4, "by": "parameters"}, "fit evenly on 3 ranks; pass ranks=1 or 2 or 4"),
        ({"ranks": 2}, "ranks= needs costs: pass by='parameters', 'time' or a profile"),
        ({"placement": "v", "ranks": 1}, "ranks=, placement= need costs"),
        ({"schedule": "1f1b"}, "schedule= needs costs"),
        ({"schedule": 3, "by": "parameters"}, r"schedule must be a family name or a Schedule .*, got 3"),
        ({"schedule": "zb-v", "by": "parameters", "ranks": 2}, "zb-v on 2 ranks has 4 stages, .* pass stages=4"),
        ({"schedule": "1f1b", "by": "parameters", "placement": "v"}, "leave placement= out"),
        ({"layers_per_stage": [4, 1]}, r"\[4, 1\], 5 in total, but the model has 4 blocks \(8 units"),
        ({"stack": "transformer.g"}, r"no module 'transformer.g' \(did you mean 'transformer.h'\?\) in GPT"),
        ({"stack": "lm_head"}, "'lm_head' is a Linear without children"),
        ({"example": "text"}, "GPT cannot run on the example"),
    ],
)
def test_invalid_cuts_are_refused(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.split(models.GPT(), **{"stages": 2, **ask})


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (None, "Pipeline takes a model, a list of its stages, the result of sl.split, .*; got None"),
        ([nn.Linear(2, 2), 3], "got 3"),
    ],
)
def test_a_pipeline_refuses_other_objects(stages: Any, message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.Pipeline(stages, loss_fn=functional.mse_loss, microbatches=2)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"by": "parameters"}, r"split the model first: sl\.Pipeline\(sl\.split\(model, stages=…, by=…\), …\)"),
        ({"split": "parameters"}, r"sl\.split\(model, stages=…, by=…\)"),
        ({"layers_per_stage": [2, 2]}, r"sl\.split\(model, stages=…, layers_per_stage=…\)"),
        ({"schedule": None}, "schedule must be a family such as '1f1b', a file, or a schedule from .*, got None"),
        ({"ranks": "2"}, "ranks to be a whole number .*, got '2'"),
    ],
)
def test_a_pipeline_says_which_cuts_it_accepts(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.Pipeline(models.GPT(), **{"loss_fn": functional.mse_loss, "ranks": 2, "microbatches": 2, **ask})


def test_a_model_without_a_stack_is_refused() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(2, 2)

    with pytest.raises(
        sl.StagelineError, match=r"Alone has no stack of blocks to cut.* 1 parts with parameters \(only\)"
    ):
        sl.split(Alone(), 2)
    with pytest.raises(sl.StagelineError, match="split expects a model"):
        sl.split([nn.Linear(2, 2)], 1)  # type: ignore[arg-type]


class Chooses(nn.Module):
    """Reads its data, and uses an image later only if it is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, often: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
            if int(often.max()) > 1:
                y = y + x
        return y


def test_a_forward_that_takes_another_path_than_the_first_time_is_never_silently_wrong() -> None:
    pipe = sl.Pipeline(Chooses(), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=1)
    x, y = noise(2, 4), noise(2, 4)
    pipe.step((x, torch.tensor([1, 1])), y)
    with pytest.raises(sl.PipelineError, match=r"needs the input\.0, which the earlier stages did not pass on"):
        pipe.step((x, torch.tensor([2, 2])), y)


def lazily(rank: int, ranks: int) -> tuple[float, int, dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    pipe = sl.Pipeline(models.GPT, loss_fn=first, schedule="1f1b", ranks=ranks, microbatches=3, seed=5)
    held = sum(parameter.nbytes for parameter in pipe.model.parameters() if not parameter.is_meta)
    return pipe.step(words(), words()).loss, held, dict(pipe.named_gradients())


def test_a_process_builds_only_its_own_stages_with_bits_that_do_not_depend_on_the_ranks() -> None:
    loss, whole, grads = lazily(0, 1)
    assert (loss, whole) == lazily(0, 4)[:2]
    answers = run_ranks(lazily, 2, 2)
    assert [answer[0] for answer in answers] == [loss, loss]
    assert sum(answer[1] for answer in answers) == whole
    assert all(answer[1] < 0.6 * whole for answer in answers)
    assert_same_bits({name: grad for answer in answers for name, grad in answer[2].items()}, grads)


def test_layers_are_built_by_functions() -> None:
    makers: list[Callable[[], nn.Module]] = [partial(nn.Linear, size, size + 1) for size in range(3, 7)]
    pipe = sl.Pipeline(makers, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2, seed=1)
    whole = sl.build(lambda: nn.Sequential(*(make() for make in makers)), seed=1)
    assert_same_bits(pipe.state_dict(), dict(whole.state_dict()))
    assert pipe.step(noise(4, 3), noise(4, 7)).loss == plainly(whole, functional.mse_loss, noise(4, 3), noise(4, 7), 2)


def test_a_cut_by_cost_evens_out_blocks_of_different_size() -> None:
    torch.manual_seed(0)
    model = models.GPT(blocks=6, uneven=True)
    by_size = sl.split(model, 3, by="parameters")
    assert by_size.balance is not None
    assert by_size.balance.optimal
    by_count = sl.split(model, 3)
    largest = [
        max(sum(unit.size for unit in staged.units[a:b]) for a, b in staged.cut) for staged in (by_size, by_count)
    ]
    assert largest[0] < largest[1]
    assert by_size.balance.slowest == largest[0]
    profile = sl.profile(model, words(), repeats=1, warmup=0)
    assert [layer.name for layer in profile.layers] == [unit.name for unit in by_count.units]
    by_time = sl.split(model, 3, by=profile)
    assert by_time.balance is not None
    assert by_time.balance.slowest == pytest.approx(
        max(sum(layer.seconds for layer in profile.layers[a:b]) for a, b in by_time.cut)
    )
    assert "rank 2" in by_time.balance.chart()
    assert len(sl.split(model, 3, by="time", example=words())) == 3


def test_memory_pins_and_speeds_are_respected() -> None:
    model = models.GPT(blocks=6)
    pinned = sl.split(model, 3, by="parameters", pinned={"transformer.h.0": 1})
    assert "transformer.h.0" in pinned.names[1]
    slow = sl.split(model, 2, by="parameters", speed=[1.0, 3.0])
    assert slow.cut[0][1] < slow.cut[1][1] - slow.cut[1][0]
    staged = sl.split(model, 4, by="parameters", ranks=2, placement="v")
    assert staged.balance is not None
    assert staged.balance.rank_of == (0, 1, 1, 0)
    with pytest.raises(sl.StagelineError, match="no cut fits the memory"):
        sl.split(model, 2, by="parameters", memory=1000)
    with pytest.raises(sl.StagelineError, match="4 stages do not fit evenly on 3 ranks"):
        sl.split(model, 4, by="parameters", ranks=3)
    with pytest.raises(sl.StagelineError, match="memory= needs costs"):
        sl.split(model, 2, memory=1e9)
    with pytest.raises(
        sl.StagelineError, match="by='time' measures the model and needs a batch to run it on; pass example="
    ):
        sl.split(model, 2, by="time")
    other = sl.profile(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), repeats=1, warmup=0)
    with pytest.raises(sl.StagelineError, match=r"the profile has no layer 'transformer.wte'"):
        sl.split(model, 2, by=other)


ASIDE: dict[str, Any] = {}


def with_hooks(rank: int) -> tuple[str, list[str]]:
    """The first layer's hook stores something in a global, and the last one's reads it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].register_forward_hook(lambda module, inputs, output: ASIDE.update(seen=output.detach()))
    model[3].register_forward_hook(lambda module, inputs, output: output + ASIDE["seen"].mean())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    try:
        pipe.step(noise(4, 4), noise(4, 4))
    except sl.PipelineError as error:
        return str(error), error.__notes__
    return "", []


def test_an_error_hints_at_a_value_that_a_hook_left_on_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", str(tmp_path))
    for error, notes in run_ranks(with_hooks, 2):
        assert error.startswith("rank 1 failed in F of stage 1, microbatch 0: KeyError: 'seen'; ")
        (note,) = [text for text in notes if text.startswith("not all stages before stage 1 run in its process: ")]
        assert "store in a global or on a module, outside their outputs, are not sent between ranks" in note
    assert with_hooks(0) == ("", [])  # threads share globals


@pytest.mark.parametrize(("case", "family"), [("unet", "zb-v"), ("translator", "interleaved")])
def test_a_check_finds_the_same_bits(case: str, family: str) -> None:
    make, inputs, targets, loss_fn, _ = CASES[case]
    model = make()
    report = sl.check(model, (inputs, targets), ranks=2, schedule=family, loss_fn=loss_fn)
    assert report
    assert report.worst is None
    assert report.compared >= len(list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "a plain loop of one process" in str(report)


def test_a_check_names_what_differs() -> None:
    class Counts(nn.Module):
        """Computes a different result every time."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), [0]

        def __deepcopy__(self, memo: Any) -> Any:
            copy_of_self = Counts()
            copy_of_self.load_state_dict(self.state_dict())
            copy_of_self.calls = self.calls
            return copy_of_self

        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            return torch.as_tensor(self.linear(x) * self.calls[0])

    report = sl.check(
        nn.Sequential(nn.Linear(4, 4), Counts()), (noise(4, 4), noise(4, 4)), ranks=2, loss_fn=functional.mse_loss
    )
    assert not report
    assert report.worst is not None
    assert f"{report.worst.name} differs by" in str(report)
    assert "not the same" in str(report)


def test_a_check_of_a_model_that_draws_compares_with_one_rank() -> None:
    report = sl.check(models.GPT(drop=0.3), (words(), words()), ranks=2, loss_fn=first, schedule="zb-v")
    assert report.equal
    assert "draws random numbers" in report.reference
    tied = sl.check(models.GPT(tied=True), (words(), words()), ranks=2, loss_fn=first)
    assert tied.tied == ("transformer.wte.weight",)
    with pytest.raises(sl.StagelineError, match="a pair of inputs and targets"):
        sl.check(models.GPT(), words(), ranks=2)


class Flat(nn.Module):
    """No modules inside: nothing to cut between without a graph."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(6, 6) * 0.3))
            self.register_buffer(f"b{number}", torch.randn(6))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        a = x @ self.get_parameter("w0") + self.get_buffer("b0")
        b = torch.tanh(a) @ self.get_parameter("w1") + a
        c = functional.relu(b) @ self.get_parameter("w2") + self.get_buffer("b2")
        return {"y": (c + a) @ self.get_parameter("w3"), "z": c.sum(-1) * scale}


def of_both(output: Any, target: Tensor) -> Tensor:
    return torch.as_tensor(functional.mse_loss(output["y"], target) + output["z"].mean())


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_model_without_modules_is_traced_and_gives_the_same_bits(family: str) -> None:
    torch.manual_seed(0)
    model = Flat()
    plain = copy.deepcopy(model)
    x, y = noise(5, 6), noise(5, 6, seed=4)
    pipe = sl.Pipeline(
        model, loss_fn=of_both, schedule=family, ranks=3, microbatches=2, example={"x": x[:2], "scale": 1.0}
    )
    assert pipe.step({"x": x, "scale": 1.0}, y).loss == plainly(plain, of_both, x, y, 2)
    assert_same_bits(gradients(model), gradients(plain))
    assert sorted(pipe.state_dict()) == sorted(model.state_dict())
    assert all(len(list(part.parameters())) < 4 for part in pipe.runner.stages.parts)
    pipe.eval()
    with pytest.raises(sl.PipelineError, match="traced in training mode; split it again after"):
        pipe.predict({"x": x, "scale": 1.0})


class Unused(Flat):
    """Has modules that its forward does not call, and optionally one that it does."""

    def __init__(self, unused: int, used: bool) -> None:
        super().__init__()
        for number in range(unused):
            self.add_module(f"unused{number}", nn.Linear(3, 3))
        self.used = nn.Linear(6, 6) if used else nn.Identity()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(self.used(x), scale=scale)


@pytest.mark.parametrize("unused", [1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_modules_that_are_not_called_do_not_keep_a_model_from_being_traced(unused: int, used: bool) -> None:
    torch.manual_seed(0)
    model = Unused(unused, used)
    plain = copy.deepcopy(model)
    x, y = noise(4, 6), noise(4, 6, seed=4)
    pipe = sl.Pipeline(model, loss_fn=of_both, ranks=3, microbatches=2, example=x[:2])
    assert pipe.step(x, y).loss == plainly(plain, of_both, x, y, 2)
    assert_same_bits(gradients(model), gradients(plain))
    assert sorted(pipe.state_dict()) == sorted(model.state_dict())


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    class Looks(Flat):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            if float(x.sum()) > 0:
                x = x + 1
            return super().forward(x)

    with pytest.raises(sl.StagelineError, match=r"Looks has no stack of blocks, and torch\.export cannot trace it"):
        sl.split(Looks(), 2, example=noise(2, 6))


@pytest.mark.parametrize("name", models.EXAMPLES)
def test_every_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    models.main([name, "--schedule", "zb-v", "--steps", "2"])
    output = capsys.readouterr().out
    assert "4 stages of" in output
    assert "the same" in output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[1] < losses[0]

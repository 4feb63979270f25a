"""Continuous steps: the bits of the plain loop, whatever has to be undone, and ranks that do not wait."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyStage, SleepStage, assert_same_bits, run_ranks
from support.pipelines import tied_model, token_loss

FAMILIES = ["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"]
MAX_NORM = 0.8
"""Between the norms of the batches below: every third one is clipped."""

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.05, fused=True),
}


@pytest.fixture(autouse=True)
def no_rank_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stageline rank")]


class Centred(nn.Module):
    """Subtracts a running mean: a buffer that changes with every microbatch, and on which the next one depends."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean.clone()


def layers(count: int = 8) -> nn.Sequential:
    """With dropout, which must draw the same, and running means, which must be put back."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), Centred(), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*blocks)


def batches(count: int = 6, samples: int = 12) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    sizes = [5.0 if number % 3 == 1 else 1.0 for number in range(count)]
    return [(torch.randn(samples, 8), torch.randn(samples, 8) * size) for size in sizes]


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return functional.mse_loss(output, target), {"largest": output.abs().max(), "samples": len(target)}


def pipeline(model: Any, family: str = "zb-h2", ranks: int = 2, microbatches: int = 4, **options: Any) -> sl.Pipeline:
    return sl.Pipeline(
        model,
        loss_fn=options.pop("loss_fn", with_metrics),
        schedule=family,
        ranks=ranks,
        microbatches=microbatches,
        seed=3,
        **options,
    )


def plain(pipe: sl.Pipeline, optimizer: Any, data: Any, max_norm: float | None = MAX_NORM) -> list[Any]:
    """The loop that a run must equal."""
    steps = []
    for inputs, targets in data:
        stats = pipe.step(inputs, targets)
        norm = None if max_norm is None else float(pipe.clip_grad_norm_(max_norm))
        optimizer.step()
        pipe.zero_grad()
        steps.append((stats.loss, stats.losses, stats.metrics, norm))
    return steps


def figures(all_stats: Any) -> list[Any]:
    return [(stats.loss, stats.losses, stats.metrics, stats.norm) for stats in all_stats]


def state_of(pipe: sl.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """Weights, buffers and everything that the optimizer knows."""
    state: dict[str, Tensor | None] = {name: value.clone() for name, value in pipe.state_dict().items()}
    for name, parameter in pipe.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"{name} {key}"] = value.clone()
    return state


def assert_as_the_loop(family: str, make: Make, ranks: int = 2, microbatches: int = 4) -> None:
    data = batches()
    loop, run = pipeline(layers(), family, ranks, microbatches), pipeline(layers(), family, ranks, microbatches)
    first, second = make(loop.parameters()), make(run.parameters())
    expected = plain(loop, first, data)
    steps = run.run(data, optimizer=second, max_norm=MAX_NORM)
    assert steps.interlocks
    assert figures(steps) == expected
    norms = [norm for *_, norm in expected]
    assert min(norms) < MAX_NORM < max(norms)
    assert_same_bits(state_of(loop, first), state_of(run, second))
    assert run.steps == loop.steps == len(data)
    assert all(parameter.grad is None for parameter in run.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
def test_a_run_gives_the_bits_of_the_loop_whether_steps_are_clipped_or_not(family: str, name: str) -> None:
    assert_as_the_loop(family, OPTIMIZERS[name])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    ranks=st.integers(2, 4),
    microbatches=st.integers(2, 6),
    samples=st.lists(st.sampled_from([3, 7, 12]), min_size=2, max_size=5),
)
def test_a_run_gives_the_bits_of_the_loop_for_all_families_and_sizes(
    family: str, ranks: int, microbatches: int, samples: list[int]
) -> None:
    data = [(x[:size], y[:size]) for size, (x, y) in zip(samples, itertools.cycle(batches(3)), strict=False)]
    loop, run = pipeline(layers(), family, ranks, microbatches), pipeline(layers(), family, ranks, microbatches)
    first, second = OPTIMIZERS["AdamW"](loop.parameters()), OPTIMIZERS["AdamW"](run.parameters())
    assert plain(loop, first, data) == figures(run.run(data, optimizer=second, max_norm=MAX_NORM))
    assert_same_bits(state_of(loop, first), state_of(run, second))


def test_a_rank_begins_the_next_step_while_another_is_in_the_last_one() -> None:
    began = threading.Event()
    overlapped: list[bool] = []

    class Waits(SleepStage):
        """The first stage says that its second step begins; the last one ends its first step only then."""

        def __init__(self, number: int) -> None:
            super().__init__(0.0, 0.0, 0.0)
            self.number = number
            self.count = {"F": 0, "I": 0, "W": 0}

        def sleep(self, kind: str) -> None:
            self.count[kind] += 1
            if (self.number, kind, self.count[kind]) == (0, "F", 5):
                began.set()
            if (self.number, kind, self.count[kind]) == (3, "W", 4):
                overlapped.append(began.wait(100.0))

    pipe = pipeline([Waits(number) for number in range(4)], "zb-h2", ranks=4)
    run = pipe.run(batches(3, samples=4), optimizer=torch.optim.SGD)
    assert len(list(run)) == 3
    assert overlapped == [True]


def test_the_loop_body_sees_the_state_after_its_step() -> None:
    loop, run = pipeline(layers(), "zb-v", 4), pipeline(layers(), "zb-v", 4)
    first, second = OPTIMIZERS["AdamW"](loop.parameters()), OPTIMIZERS["AdamW"](run.parameters())
    kept = {name for name, _ in loop.named_buffers()}
    for batch, stats in zip(batches(), run.run(batches(), optimizer=second, max_norm=MAX_NORM), strict=True):
        (expected,) = plain(loop, first, [batch])
        assert figures([stats]) == [expected]
        ours, theirs = state_of(run, second), state_of(loop, first)
        assert_same_bits(
            {name: value for name, value in theirs.items() if name not in kept},
            {name: value for name, value in ours.items() if name not in kept},
        )
        torch.randn(3)  # and these draws belong to the caller alone


def assert_stopped_after(steps: int, run: sl.Pipeline, optimizer: Any, make: Make, model: Any) -> None:
    """A pipeline equals the loop after this many steps, and continues as the loop does."""
    loop = pipeline(model, run.schedule.name, run.ranks)
    first = make(loop.parameters())
    plain(loop, first, batches()[:steps])
    assert run.steps == steps
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))
    assert all(parameter.grad is None for parameter in run.parameters())
    plain(loop, first, batches()[steps:])
    list(run.run(batches()[steps:], optimizer=optimizer, max_norm=MAX_NORM))
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_leaving_the_loop_keeps_the_parameters_of_its_last_step(steps: int) -> None:
    run = pipeline(layers())
    optimizer = OPTIMIZERS["SGD"](run.parameters())
    for number, _ in enumerate(run.run(batches(), optimizer=optimizer, max_norm=MAX_NORM)):
        if number == steps - 1:
            break
    assert_stopped_after(steps, run, optimizer, OPTIMIZERS["SGD"], layers())


def collect(run: Iterator[sl.StepStats], finished: list[sl.StepStats]) -> None:
    for stats in run:
        finished.append(stats)  # one by one: those before an error count


def broken(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from batches()[:count]
    raise LookupError("no more of these")


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_a_failing_data_iterator_ends_the_run_after_the_previous_steps(steps: int) -> None:
    run = pipeline(layers())
    optimizer = OPTIMIZERS["AdamW"](run.parameters())
    finished: list[sl.StepStats] = []
    with pytest.raises(LookupError, match="no more of these"):
        collect(run.run(broken(steps), optimizer=optimizer, max_norm=MAX_NORM), finished)
    assert len(finished) == steps
    assert_stopped_after(steps, run, optimizer, OPTIMIZERS["AdamW"], layers())


def faulty() -> list[FaultyStage]:
    return [FaultyStage(layer) for layer in layers(4)]


def fail(output: Tensor) -> Tensor:
    raise ArithmeticError("planted")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("action", ["F", "B"])
def test_a_failed_step_keeps_the_parameters_of_the_previous_step(action: Any, stage: int) -> None:
    stages = faulty()
    run = pipeline(stages, "zb-h2", 4)
    optimizer = OPTIMIZERS["AdamW"](run.parameters())
    stages[stage].plant(fail, action, microbatch=3 * 4 + 1)
    finished: list[sl.StepStats] = []
    with pytest.raises(sl.PipelineError, match=rf"rank {stage} failed in [FI] of stage {stage}.*planted") as caught:
        collect(run.run(batches(), optimizer=optimizer, max_norm=1e9), finished)
    assert "the parameters are those before this step" in str(caught.value)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert len(finished) == 3
    loop = pipeline(faulty(), "zb-h2", 4)
    first = OPTIMIZERS["AdamW"](loop.parameters())
    plain(loop, first, batches()[:3], 1e9)
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))
    plain(loop, first, batches()[3:], 1e9)
    list(run.run(batches()[3:], optimizer=optimizer, max_norm=1e9))
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))


def test_a_step_that_fails_for_lack_of_clipping_is_repeated() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e20)

    def linear() -> list[nn.Module]:
        torch.manual_seed(1)
        return [nn.Linear(8, 8) for _ in range(4)]

    loop, run = pipeline(linear(), ranks=4), pipeline(linear(), ranks=4)
    first, second = make(loop.parameters()), make(run.parameters())
    expected = plain(loop, first, batches(4), 1e-21)
    assert figures(run.run(batches(4), optimizer=second, max_norm=1e-21)) == expected
    assert_same_bits(state_of(loop, first), state_of(run, second))


class Stubborn(torch.optim.SGD):
    """Fails in a step of one rank, counted over all its ranks, once."""

    left = 0

    def step(self, closure: Any = None) -> Any:
        Stubborn.left -= 1
        if Stubborn.left == 0:
            raise ArithmeticError("will not")
        return super().step(closure)


@pytest.mark.parametrize("calls", [1, 4, 7])
def test_a_failing_optimizer_fails_the_step(calls: int) -> None:
    run, loop = pipeline(layers()), pipeline(layers())
    optimizer, first = Stubborn(run.parameters(), lr=0.1), torch.optim.SGD(loop.parameters(), lr=0.1)
    Stubborn.left = calls
    finished: list[sl.StepStats] = []
    with pytest.raises(sl.PipelineError, match=r"rank \d failed in the step of its optimizer: .*will not"):
        collect(run.run(batches(), optimizer=optimizer, max_norm=1e9), finished)
    plain(loop, first, batches()[: len(finished)], 1e9)
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))
    rest = batches()[len(finished) :]
    assert figures(run.run(rest, optimizer=optimizer, max_norm=1e9)) == plain(loop, first, rest, 1e9)


def interrupted() -> Iterator[tuple[Tensor, Tensor]]:
    yield from batches()[:3]
    raise KeyboardInterrupt


def test_an_interrupt_keeps_the_parameters_of_a_complete_step() -> None:
    run, loop = pipeline(layers()), pipeline(layers())
    optimizer, first = OPTIMIZERS["SGD"](run.parameters()), OPTIMIZERS["SGD"](loop.parameters())
    finished: list[sl.StepStats] = []
    with pytest.raises(KeyboardInterrupt):
        collect(run.run(interrupted(), optimizer=optimizer, max_norm=MAX_NORM), finished)
    assert run.steps == len(finished)
    plain(loop, first, batches()[: len(finished)])
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))


class Interrupting(nn.Module):
    """Raises an interrupt in its forward number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("at", [5, 6, 9, 13])
def test_an_interrupt_in_a_stage_is_raised_even_if_the_previous_step_is_undone(at: int) -> None:
    stage = Interrupting(-1)
    run, loop = pipeline(nn.Sequential(*layers(7), stage), "zb-v"), pipeline(nn.Sequential(*layers(7)), "gpipe", 1)
    optimizer, first = OPTIMIZERS["AdamW"](run.parameters()), OPTIMIZERS["AdamW"](loop.parameters())
    stage.at = at
    finished: list[sl.StepStats] = []
    with pytest.raises(KeyboardInterrupt):
        collect(run.run(batches(), optimizer=optimizer, max_norm=0.01), finished)
    plain(loop, first, batches()[: len(finished)], 0.01)
    assert_same_bits(state_of(loop, first), state_of(run, optimizer))


def infinite(gradient: Tensor) -> Tensor:
    return gradient * float("inf")


def test_non_finite_gradients_fail_or_skip_the_step() -> None:
    for skips in (False, True):
        stages = faulty()
        run = pipeline(stages, ranks=4)
        optimizer = OPTIMIZERS["SGD"](run.parameters())
        stages[1].plant(infinite, "B", microbatch=2 * 4 + 1)
        steps = run.run(batches(5), optimizer=optimizer, skip_not_finite=skips)
        finished = [next(steps), next(steps)]
        if skips:
            finished += list(steps)
            finite = [stats.norm is not None and stats.norm < 1e9 for stats in finished]
            assert finite == [True, True, False, True, True]
        else:
            with pytest.raises(sl.PipelineError, match=r"gradients of step 2 are not finite .*skip_not_finite=True"):
                next(steps)
            assert run.steps == 2
        loop = pipeline(faulty(), ranks=4)
        first = OPTIMIZERS["SGD"](loop.parameters())
        plain(loop, first, batches(5)[:2], None)
        if skips:  # the step completes, except for its optimizer
            loop.step(*batches(5)[2])
            loop.zero_grad()
            plain(loop, first, batches(5)[3:], None)
        assert_same_bits(state_of(loop, first), state_of(run, optimizer))


def token_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randint(0, 11, (8, 3)), torch.randint(0, 11, (8, 3))) for _ in range(4)]


@pytest.mark.parametrize(("family", "interlocks"), [("zb-v", True), ("1f1b", False)])
def test_tied_weights_interlock_where_one_rank_has_both(family: str, interlocks: bool) -> None:
    loop = pipeline(tied_model(), family, loss_fn=token_loss)
    pipe = pipeline(tied_model(), family, loss_fn=token_loss)
    first, second = OPTIMIZERS["AdamW"](loop.parameters()), OPTIMIZERS["AdamW"](pipe.parameters())
    expected = plain(loop, first, token_batches(), 0.5)
    if interlocks:
        run = pipe.run(token_batches(), optimizer=second, max_norm=0.5)
    else:
        with pytest.warns(UserWarning, match=r"are not continuous.* several ranks use the parameter 0.weight"):
            run = pipe.run(token_batches(), optimizer=second, max_norm=0.5)
    assert run.interlocks == interlocks
    assert bool(run.note) != interlocks
    assert figures(run) == expected
    assert_same_bits(state_of(loop, first), state_of(pipe, second))


def test_learning_rates_change_as_in_the_loop() -> None:
    def factor(step: int) -> float:
        return 1.0 / (1 + step)

    def loop() -> Any:
        pipe = pipeline(layers())
        optimizer = OPTIMIZERS["SGD"](pipe.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for batch in batches(4):
            plain(pipe, optimizer, [batch])
            scheduler.step()
        return state_of(pipe, optimizer), optimizer.param_groups[0]["lr"]

    def run(how: str) -> Any:
        pipe = pipeline(layers())
        optimizer = OPTIMIZERS["SGD"](pipe.parameters())
        schedule = None if how == "function" else torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        schedules: dict[str, Any] = {"function": factor, "scheduler": schedule, "body": None}
        for _ in pipe.run(batches(4), optimizer=optimizer, max_norm=MAX_NORM, lr_schedule=schedules[how]):
            if how == "body" and schedule is not None:
                schedule.step()
        return state_of(pipe, optimizer), optimizer.param_groups[0]["lr"]

    expected, rate = loop()
    for how in ("function", "scheduler", "body"):
        state, last = run(how)
        assert last == rate
        assert_same_bits(expected, state)


def test_snapshot_bytes_are_reported() -> None:
    pipe = pipeline([nn.Linear(8, 8) for _ in range(2)])
    run = pipe.run(batches(3), optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    assert run.snapshot_bytes == 0
    next(run)
    weights = sum(parameter.nbytes for parameter in pipe.parameters())
    assert run.snapshot_bytes in (2 * weights, 3 * weights)  # there is no momentum before the first step
    next(run)
    assert run.snapshot_bytes == 3 * weights  # parameters, momentum, gradients
    run.close()
    assert run.snapshot_bytes == 0


def test_invalid_runs_are_refused_and_change_nothing() -> None:
    pipe = pipeline(layers())
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    optimizer = OPTIMIZERS["SGD"](pipe.parameters())
    run = pipe.run(batches(3), optimizer=optimizer)
    next(run)
    with pytest.raises(sl.StagelineError, match="a run of this pipeline is in progress"):
        pipe.step(*batches(1)[0])
    with pytest.raises(sl.StagelineError, match="a run of this pipeline is in progress"):
        next(pipe.run(batches(1), optimizer=optimizer))
    assert len(list(run)) == 2
    pipe.load_state_dict(before)
    x, y = batches(1)[0]
    wrong: Any
    chosen: Any
    for wrong, message in [
        (3, "batches must be an iterable of batches"),
        (["x"], "a batch must be a pair of inputs and targets"),
        ([x], "the targets are None"),
        ([(x, None)], "the targets are None"),
        ([(x, y[:2])], "12 samples of inputs and 2 of targets"),
        ([{"inputs": x, "target": y}], r"'target' \(did you mean 'targets'\?\)"),
        ([{"inputs": x, "targets": y, "count": 3}], "count=3 requires loss_reduction='count'"),
    ]:
        with pytest.raises(sl.StagelineError, match=message):
            list(pipe.run(wrong, optimizer=optimizer))
    for chosen, message in [
        ({"max_norm": -1.0}, "max_norm must be a number above 0"),
        ({"lr_schedule": 0.1}, "lr_schedule must be a function"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "2 parameters that do not belong to",
        ),
        ({"optimizer": "AdamW"}, "optimizer= must be a torch optimizer"),
    ]:
        with pytest.raises(sl.StagelineError, match=message):
            pipe.run(batches(1), **{"optimizer": optimizer, **chosen})
    assert_same_bits(dict(before), dict(pipe.state_dict()))
    (stats,) = pipe.run([{"inputs": x, "targets": y, "scale": 2.0}], optimizer=optimizer)
    assert stats.samples == len(x)


def test_an_optimizer_with_hooks_steps_once_for_all_parameters() -> None:
    pipe = pipeline(layers())
    optimizer = OPTIMIZERS["SGD"](pipe.parameters())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="the optimizer has hooks"):
        run = pipe.run(batches(2), optimizer=optimizer)
    assert len(list(run)) == len(calls) == 2


# Processes.


def on_processes(rank: int, families: list[str]) -> int:
    ranks = torch.distributed.get_world_size()
    for family, name in zip(families, itertools.cycle(OPTIMIZERS), strict=False):
        assert_as_the_loop(family, OPTIMIZERS[name], ranks)
    return len(families)


def test_a_run_gives_the_bits_of_the_loop_on_processes() -> None:
    assert run_ranks(on_processes, 2, FAMILIES, timeout=500) == [len(FAMILIES)] * 2


def failing_on_processes(rank: int) -> list[str]:
    """One failure after the other on the same connections; every time, all ranks equal the loop and continue."""
    errors = []
    make = OPTIMIZERS["SGD"]

    def attempt(steps: int, data: Any, plant: Callable[[list[FaultyStage]], None]) -> None:
        stages, copies = faulty()[:3], faulty()[:3]
        run, loop = pipeline(stages, "zb-h2", 3), pipeline(copies, "zb-h2", 3)
        optimizer, first = make(run.parameters()), make(loop.parameters())
        plant(stages)
        finished = []
        try:
            for stats in run.run(data, optimizer=optimizer, max_norm=1e9):
                finished.append(stats)
                if len(finished) == 4:
                    break
        except (sl.StagelineError, LookupError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert len(finished) == steps
        plain(loop, first, batches()[:steps], 1e9)
        assert_same_bits(state_of(loop, first), state_of(run, optimizer))
        rest = batches()[steps:]
        assert figures(run.run(rest, optimizer=optimizer, max_norm=1e9)) == plain(loop, first, rest, 1e9)
        assert_same_bits(state_of(loop, first), state_of(run, optimizer))

    attempt(2, batches(), lambda stages: stages[0].plant(fail, "F", 2 * 4 + 3))
    attempt(2, batches(), lambda stages: stages[1].plant(fail, "B", 2 * 4 + 3))
    attempt(2, batches(), lambda stages: stages[2].plant(fail, "F", 2 * 4 + 3))
    attempt(1, batches(), lambda stages: stages[1].plant(infinite, "B", 1 * 4 + 3))
    attempt(4, batches(), lambda stages: None)
    attempt(3, broken(3) if rank == 1 else batches(), lambda stages: None)
    attempt(2, batches()[:2] if rank == 2 else batches(), lambda stages: None)
    return errors


def test_processes_report_failures_alike_and_keep_the_parameters_of_the_previous_step() -> None:
    answers = run_ranks(failing_on_processes, 3, timeout=500)
    for number, (stage, kind) in enumerate([(0, "F"), (1, "I"), (2, "F")]):
        for errors in answers:
            assert f"PipelineError: rank {stage} failed in {kind} of stage {stage}, microbatch 3" in errors[number]
            assert "ArithmeticError: planted; the parameters are those before this step" in errors[number]
    for rank, errors in enumerate(answers):
        assert "the gradients of step 1 are not finite" in errors[3]
        lookup = "LookupError: no more of these"
        elsewhere = f"PipelineError: the batches of rank 1 failed at step 3: {lookup}"
        assert errors[4] == (lookup if rank == 1 else elsewhere)
        assert errors[5].startswith("PipelineError: rank 2 has no batch for step 2, but rank 0 has one; pass the same")
        assert len(errors) == 6


def test_weights_are_cast_anew_in_every_step_of_a_run_inside_autocast() -> None:
    """Autocast keeps its casts as long as it is open, and here it is open over all steps."""

    def without_buffers() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    expected, run = (pipeline(without_buffers(), loss_fn=functional.mse_loss) for _ in range(2))
    optimizers = [OPTIMIZERS["AdamW"](pipe.parameters()) for pipe in (expected, run)]
    losses = []
    for inputs, targets in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(expected.step(inputs, targets).loss)
        optimizers[0].step()
        expected.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [stats.loss for stats in run.run(batches(), optimizer=optimizers[1])] == losses
    assert_same_bits(state_of(run, optimizers[1]), state_of(expected, optimizers[0]))

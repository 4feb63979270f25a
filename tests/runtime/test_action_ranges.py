"""Every action is a range that torch's profiler and Nsight show, named by letter, stage and microbatch."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import stageline as sl
from stageline.runtime import _torch_private, action_ranges
from stageline.runtime.action_ranges import range_marker
from stageline.testing import run_ranks
from support.pipelines import batch, blocks

ACTION = re.compile(r"[FBIW] s\d+ m\d+")
ALL_THREADS: Any = getattr(torch.profiler, "_ExperimentalConfig")(profile_all_threads=True)  # noqa: B009


def pipeline(name: str, ranks: int, **options: Any) -> sl.Pipeline:
    return sl.Pipeline(blocks(8), loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=4, **options)


def ranges_by_thread(profiler: Any) -> list[list[str]]:
    """The names of the actions on each thread, in the order in which they began."""
    by_thread = defaultdict(list)
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if ACTION.fullmatch(event.name):
            by_thread[event.thread].append(event.name)
    return sorted(by_thread.values())


def names_of(program: Any) -> list[str]:
    return [f"{action.kind} s{action.stage} m{action.microbatch}" for action in program]


def expected(schedule: sl.Schedule) -> list[list[str]]:
    return sorted(names_of(program) for program in schedule.programs)


def test_a_trace_of_one_rank_is_its_program() -> None:
    pipe = pipeline("interleaved-zb", 1, chunks=4)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe.step(*batch(8))
    assert ranges_by_thread(profiler) == expected(pipe.schedule)
    layers = [event for event in profiler.events() if event.name == "aten::layer_norm"]
    assert any(ACTION.fullmatch(event.cpu_parent.name) for event in layers if event.cpu_parent)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_trace_of_all_threads_has_the_program_of_every_rank(name: str) -> None:
    pipe = pipeline(name, 2)
    with (
        profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as profiler,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        pipe.step(*batch(8))
    assert ranges_by_thread(profiler) == expected(pipe.schedule)
    names = {event.name for event in profiler.events()}
    assert {"send F s0 m0", "receive F s1 m0", "receive F s1 m3"} <= names


def test_a_profiler_of_one_thread_says_how_to_see_the_ranks() -> None:
    pipe = pipeline("1f1b", 2)
    with profile(activities=[ProfilerActivity.CPU]), pytest.warns(UserWarning, match="profile_all_threads=True"):
        pipe.step(*batch(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(*batch(8))


def traced(rank: int) -> tuple[list[list[str]], list[list[str]]]:
    pipe = pipeline("zb-h1", 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe.step(*batch(8))
    return ranges_by_thread(profiler), [names_of(pipe.schedule.programs[rank])]


def test_a_trace_of_a_process_is_the_program_of_its_rank() -> None:
    for measured, program in run_ranks(traced, 2):
        assert measured == program


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert isinstance(range_marker(on_gpu=False)("F s0 m0"), nullcontext)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The NVTX ranges that begin and end, without a GPU."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: events.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    return events


def test_a_gpu_gets_nvtx_ranges_with_or_without_a_profiler(pushed: list[str]) -> None:
    with range_marker(on_gpu=True)("F s2 m5"):
        pushed.append("work")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, range_marker(on_gpu=True)("B s2 m5"):
        pushed.append("work")
    assert pushed == ["F s2 m5", "work", "end", "B s2 m5", "work", "end"]
    assert [event.name for event in profiler.events() if ACTION.fullmatch(event.name)] == ["B s2 m5"]


def test_a_failed_action_ends_its_range(pushed: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), range_marker(on_gpu=True)("F s0 m0"):
        raise ZeroDivisionError
    assert pushed == ["F s0 m0", "end"]


def test_emit_nvtx_does_not_show_an_action_twice(pushed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_ranges, "emits_nvtx", lambda: True)
    monkeypatch.setattr(action_ranges, "profiler_is_on", lambda: True)
    with range_marker(on_gpu=True)("F s0 m0"):
        pass
    assert pushed == []  # torch's own observer pushes the range that `record_function` begins
    assert _torch_private.emits_nvtx() is False

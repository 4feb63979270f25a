"""Options of a pipeline: every keyword has a field, with the same default, that is checked and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.runtime.setup.handshake import facts_of
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.setup.stages import find_schedule, on_one_gpu

STRUCTURE = {"schedule", "microbatches", "ranks", "replicas", "mesh"}
"""What is run, and where; all other keywords say how."""
SPECS = {"args_chunk_spec", "kwargs_chunk_spec", "targets_chunk_spec", "output_merge_spec"}


def test_every_keyword_is_a_field_with_the_same_default() -> None:
    keywords = {
        name: default
        for name, default in (sl.Pipeline.__init__.__kwdefaults__ or {}).items()
        if name not in STRUCTURE | SPECS
    }
    options = {field.name: field.default for field in fields(PipelineOptions) if field.name != "chunk_specs"}
    assert options.pop("loss_fn") is MISSING
    assert options == keywords


def test_options_that_ranks_must_share_are_compared() -> None:
    model, schedule = nn.Linear(1, 1), sl.schedule("gpipe", ranks=1, microbatches=1)
    plain = facts_of(model, schedule, PipelineOptions(nn.functional.mse_loss))
    changed = facts_of(model, schedule, PipelineOptions(nn.functional.mse_loss, loss_reduction="sum", seed=3))
    assert {name for name in plain if plain[name] != changed[name]} == {"loss_reduction", "the seed that was passed"}


def test_the_deadline_comes_from_the_option_the_environment_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGELINE_DEADLINE", raising=False)
    assert PipelineOptions(loss_fn=nn.functional.mse_loss).seconds == 60.0
    monkeypatch.setenv("STAGELINE_DEADLINE", "7")
    assert PipelineOptions(loss_fn=nn.functional.mse_loss).seconds == 7.0
    assert PipelineOptions(loss_fn=nn.functional.mse_loss, deadline=9).seconds == 9.0
    monkeypatch.setenv("STAGELINE_DEADLINE", "soon")
    with pytest.raises(sl.StagelineError, match="STAGELINE_DEADLINE must be a number of seconds above 0, got 'soon'"):
        PipelineOptions(loss_fn=nn.functional.mse_loss)


class OnGpu(nn.Linear):
    """Says that its parameters are on a GPU."""

    places: tuple[str, ...] = ("cuda:0",)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.parametrize(("places", "expected"), [(["cuda:0"], True), (["cpu"], False), (["cuda:0", "cuda:1"], False)])
def test_a_model_on_one_gpu_is_recognized(places: list[str], expected: bool) -> None:
    model = OnGpu(2, 2)
    model.places = tuple(places)
    assert on_one_gpu(model, built=False, device="cpu") == expected
    assert on_one_gpu(nn.Linear(2, 2, device="meta"), built=True, device=places[0]) == (places[0] != "cpu")
    assert not on_one_gpu([model], built=False, device="cuda:0")  # stages that the user made


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("dualpipe", 4)])
def test_one_gpu_has_one_rank_where_the_family_allows_it(name: str, ranks: int) -> None:
    assert find_schedule(name, 4, None, 8, default=lambda: 1).ranks == ranks
    assert find_schedule(name, 4, 4, 8, default=lambda: 1).ranks == 4
    assert find_schedule(name, 4, None, 8).ranks == 4


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_are_those_of_the_job(processes: int) -> None:
    assert find_schedule("zb-v", 8, None, 8, default=lambda: processes).ranks == processes


@pytest.mark.parametrize(("family", "stages", "most"), [("zb-v", 16, 2), ("1f1b", 8, 5)])
def test_more_processes_than_the_model_has_layers_are_refused(family: str, stages: int, most: int) -> None:
    words = f"makes 8 ranks and {stages} stages with {family}, but the model has only 5 layers .* at most {most} proc"
    with pytest.raises(sl.StagelineError, match=words):
        find_schedule(family, 5, None, 8, default=lambda: 8)

"""Options of a pipeline: every keyword has a field, with the same default, that is checked and compared."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
from torch import nn

import stageline as sl
from stageline.runtime.setup.handshake import facts_of
from stageline.runtime.setup.options import PipelineOptions

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
    with pytest.raises(sl.StagelineError, match="STAGELINE_DEADLINE is a number of seconds above 0, got 'soon'"):
        PipelineOptions(loss_fn=nn.functional.mse_loss)

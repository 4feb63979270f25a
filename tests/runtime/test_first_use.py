"""What someone meets who uses a pipeline for the first time: its text, calls that are mistakes, and what they leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyTransport, run_ranks


def pipeline(**options: Any) -> sl.Pipeline:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    return sl.Pipeline(
        nn.Sequential(*layers), **{"loss_fn": functional.mse_loss, "ranks": 2, "microbatches": 2, **options}
    )


def wrong_loss(output: Tensor, target: Tensor) -> Any:
    return output.no_such_method(target)  # type: ignore[attr-defined]


def test_a_pipeline_says_what_it_is() -> None:
    assert repr(pipeline(schedule="zb-v")) == (
        "<Pipeline of Sequential: 4 stages on 2 ranks, schedule zb-v, 2 microbatches; ranks are threads of this "
        "process on cpu>"
    )
    assert repr(pipeline(schedule="gpipe", ranks=1, microbatches=1)) == (
        "<Pipeline of Sequential: 1 stage on 1 rank, schedule gpipe, 1 microbatch; in this process on cpu>"
    )
    assert "not made" in repr(sl.Pipeline.__new__(sl.Pipeline))


def test_calling_a_pipeline_hints_at_predict() -> None:
    with pytest.raises(sl.StagelineError, match=r"pipe\.predict\(inputs\) gives the outputs"):
        pipeline()(torch.ones(4, 4))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"x": x}, lambda x: [x, 3]])
def test_a_numpy_batch_says_what_to_do(wrap: Any) -> None:
    x = np.ones((4, 4), dtype=np.float32)
    pipe = pipeline()
    calls: list[Any] = [pipe.predict, lambda x: pipe.step(x, torch.ones(4, 4)), lambda x: pipe.evaluate(x, x)]
    for call in calls:
        with pytest.raises(
            sl.StagelineError, match=r"(is|are) a numpy array of shape \(4, 4\); .* torch\.from_numpy\(array\)"
        ):
            call(wrap(x))


def test_a_mistake_in_the_users_code_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback says it all; a loss that is not finite, and a run, are the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGELINE_FLIGHT_DIR", raising=False)
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    nan: Any = lambda output, target: output.sum() * float("nan")  # noqa: E731
    for loss_fn in (wrong_loss, nan):
        for ranks in (1, 2):
            pipe = pipeline(loss_fn=loss_fn, ranks=ranks)
            with pytest.raises(sl.PipelineError, match=r"no_such_method|nan") as failed:
                pipe.step(x, y)
            assert not any("stageline doctor" in note for note in getattr(failed.value, "__notes__", []))
            with pytest.raises(sl.PipelineError):
                list(pipe.run([(x, y)], optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1)))
    with pytest.raises(sl.PipelineError):
        pipeline(loss_fn=lambda output: output).step(x, y)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", "chosen")
    with pytest.raises(sl.PipelineError) as failed:
        pipeline(loss_fn=wrong_loss).step(x, y)
    assert any("stageline doctor chosen" in note for note in failed.value.__notes__)


def test_a_lost_message_leaves_a_flight_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback explains that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGELINE_FLIGHT_DIR", raising=False)
    pipe = pipeline(deadline=0.5)
    honest = pipe._world.transport
    pipe._world.transport = lambda rank: FaultyTransport(honest(rank), drop=lambda header: True)  # type: ignore[method-assign]
    with pytest.raises(sl.PipelineError) as failed:
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    assert any("stageline doctor stageline-flight" in note for note in failed.value.__notes__)
    assert len(list((tmp_path / "stageline-flight").iterdir())) == 2


def mistaken(rank: int, folder: str) -> tuple[str, str, list[str]]:
    os.chdir(folder)
    os.environ.pop("STAGELINE_FLIGHT_DIR", None)
    torch.manual_seed(0)
    pipe = pipeline(loss_fn=wrong_loss)
    shown = repr(pipe)
    try:
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    except sl.PipelineError as error:
        return shown, str(error), list(getattr(error, "__notes__", []))
    return shown, "", []


def test_a_mistake_on_processes_leaves_no_files_and_the_traceback_is_told(tmp_path: Path) -> None:
    answers = run_ranks(mistaken, 2, str(tmp_path))
    for rank, (shown, said, notes) in enumerate(answers):
        assert f"ranks are processes, this one is rank {rank} with stage {rank} on cpu>" in shown
        assert "no_such_method" in said
        assert not any("stageline doctor" in note for note in notes)
    assert any("wrong_loss" in note for note in answers[0][2])
    assert not list(tmp_path.iterdir())

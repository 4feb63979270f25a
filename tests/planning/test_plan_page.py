"""The page of a plan: every section with its units, nothing from outside, and names that cannot break it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import stageline as sl
from stageline.cli.app import run
from stageline.planning.page import sections
from stageline.train.report import make_report
from support.profiles import even, layer, profile_of

REQUEST: dict[str, Any] = {"microbatches": 8, "time_limit": 0.3, "schedule": ["1f1b", "gpipe"], "memory": "1MiB"}


def plan(**more: Any) -> sl.Plan:
    """A plan for units of 3 ms, with 4,000 bytes of parameters."""
    return sl.plan(profile=even(8, forward=1e-3, parameters=4000, message=600), **REQUEST | more)


def text_of(page: str) -> str:
    """What a reader sees, without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)))


def test_the_page_shows_cut_memory_alternatives_and_bound_with_units() -> None:
    best = plan(ranks=2)
    page = best.html()
    text = text_of(page)
    for expected in (
        "Step 108 ms", "utilisation", "Lower bound", "stage 1, rank 1", "4 units: layers.4 … layers.7", "12 ms",
        "optimizer state", "rank 0", "of 1 MiB", "gpipe", "as fast, more memory", "The planned step",
    ):  # fmt: skip
        assert expected in text, expected
    assert page.count("<!doctype") == 1
    assert '"seconds":true' in page
    assert (
        page.index("The cut")
        < page.index("Memory of each rank")
        < page.index("Alternatives")
        < page.index('id="panels"')
    )


def test_the_page_compares_meshes_and_names_collectives() -> None:
    best = plan(devices=4, bandwidth="10M", tp=[1, 2])
    text = text_of(best.html())
    assert "Meshes, and why not" in text
    assert f"collectives {len(best.meshes)}" not in text
    for other in best.meshes[:5]:
        assert " × ".join(f"{name} {size}" for name, size in other.mesh.items()) in text
    sharded = text_of(plan(mesh={"pp": 2, "dp_shard": 2}, bandwidth="10M").html())
    assert "gathers 800 µs, reductions 800 µs" in sharded
    assert "sharding: gathered parameters and gradients" in sharded


def test_the_page_states_the_samples_of_a_microbatch_if_they_are_known() -> None:
    assert "Microbatches 8 of 2 samples Stages" in text_of(plan(ranks=2, samples=2).html())
    assert "Microbatches 8 Stages" in text_of(plan(ranks=2).html())
    mesh = plan(mesh={"pp": 2, "dp_shard": 2}, samples=2)
    assert "Microbatches 8 of 2 samples, in each of 2 pipelines" in text_of(mesh.html())


def test_the_page_fetches_nothing_and_no_name_can_break_it() -> None:
    profile = profile_of(*(layer(f"</script><b>{{{{data}}}}{unit}", forward=1e-3) for unit in range(4)))
    page = sl.plan(profile=profile, ranks=2, **REQUEST).html()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "<b>{{" not in page
    assert "&lt;/script&gt;&lt;b&gt;{{data}}0" in page


def test_many_stages_and_alternatives_are_folded() -> None:
    best = sl.plan(profile=even(80, forward=1e-3), ranks=80, **REQUEST | {"schedule": "1f1b"})
    assert "… 16 more" in sections(best)
    assert len(best.html()) < 400_000


def test_an_older_plan_has_a_page_without_units() -> None:
    best = plan(ranks=2)
    data = best.to_text().replace('"unit_seconds"', '"unknown"')
    Path("old.json").write_text(data)
    old = sl.read_plan("old.json")
    assert old.unit_seconds == ()
    assert "Each column is a unit" in best.html()
    assert "Each column is a unit" not in old.html()


def test_the_command_writes_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    even(4).write("profile.json")
    words = ["plan", "profile.json", "-p", "2", "-m", "4", "--schedule", "1f1b", "--html", "plan.html"]
    assert run([*words, "--svg", "plan.svg"]) == 0
    assert "wrote the page to plan.html" in capsys.readouterr().err
    assert "Memory of each rank" in Path("plan.html").read_text()
    assert Path("plan.svg").read_text().startswith("<svg")


def test_the_report_of_a_run_has_its_plan() -> None:
    folder = Path("outputs")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"event": "step", "step": 1, "time": 1.0, "loss": 2.5}\n')
    plan(ranks=2).write(folder / "plan.json")
    text = text_of(make_report(folder).read_text())
    assert "Plan: 1f1b on 2 ranks" in text
    assert "Memory of each rank" in text
    (folder / "plan.json").write_text("{}")
    assert "Memory of each rank" not in make_report(folder).read_text()

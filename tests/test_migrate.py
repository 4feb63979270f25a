"""The guides for users of other tools: the script before and the script after compute the same losses."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import stageline as sl
from stageline.train.config.rules import validate

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "examples/migrate"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def losses_of(name: str) -> list[float]:
    """Run a script in this process and return its losses."""
    losses: list[float] = runpy.run_path(str(SCRIPTS / f"{name}.py"))["losses"]
    return losses


def on_two_ranks(name: str) -> list[float]:
    first, second = sl.launch(losses_of, name, processes=2, environment=LOOPBACK, timeout=100.0)
    assert first == second
    assert len(first) == 3
    return list(first)


def test_torch_pipelining() -> None:
    assert on_two_ranks("torch_pipelining_after") == pytest.approx(on_two_ranks("torch_pipelining_before"), rel=1e-5)


def test_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    assert on_two_ranks("deepspeed_after") == pytest.approx(on_two_ranks("deepspeed_before"), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "packages"), [("hf_trainer", ("transformers", "accelerate")), ("lightning", ("lightning",))]
)
def test_trainers_of_one_device(name: str, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.setenv("STAGELINE_RANKS", "2")
    before, after = losses_of(f"{name}_before"), losses_of(f"{name}_after")
    assert len(after) == 3
    assert after == pytest.approx(before, rel=1e-4)


def test_the_configs_are_valid_and_train(capsys: pytest.CaptureFixture[str]) -> None:
    validate(sl.Config.read(SCRIPTS / "torchtitan_after.toml"))
    config = sl.Config.read(SCRIPTS / "megatron_after.toml")
    validate(config)
    config.training.steps, config.sample.tokens, config.metrics.timeline_freq = 1, 0, 0
    config.checkpoint.enable = config.validation.enable = False
    config.parallelism.pipeline_parallel_split = "layers"
    assert sl.Trainer(config).run().why == "finished"


def test_torchtitan_options_keep_their_names_and_values() -> None:
    pytest.importorskip("torchtitan")
    before = runpy.run_path(str(SCRIPTS / "torchtitan_before.py"))
    after = sl.Config.read(SCRIPTS / "torchtitan_after.toml")
    for section in ("training", "parallelism"):
        options: Any = getattr(after, section)
        for name, value in keywords(SCRIPTS / "torchtitan_before.py", section).items():
            assert getattr(before[section], name) == getattr(options, name) == value


def keywords(script: Path, name: str) -> dict[str, Any]:
    """The keyword arguments of the call whose result a script assigns to a name."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == name:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.value.keywords}
    raise LookupError(name)


def test_the_guide_for_megatron_has_every_argument_of_its_script() -> None:
    flags = re.findall(
        r"--[a-z][a-z0-9-]+", (SCRIPTS / "megatron_before.sh").read_text().partition("pretrain_gpt.py \\")[2]
    )
    guide = (ROOT / "docs/migrate/megatron.md").read_text()
    assert len(flags) > 20
    assert not [flag for flag in flags if f"`{flag}`" not in guide]
    if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training") is not None:
        known = Path(str(importlib.util.find_spec("megatron.training.arguments").origin)).read_text()  # type: ignore[union-attr]
        assert not [flag for flag in flags if f"'{flag}'" not in known]


def test_the_guides_count_the_lines_of_the_scripts() -> None:
    for name, page in (("torch_pipelining", "torch-pipelining"), ("deepspeed", "deepspeed")):
        counts = [code_lines(SCRIPTS / f"{name}_{when}.py") for when in ("before", "after")]
        assert "{} lines become {}".format(*counts) in (ROOT / f"docs/migrate/{page}.md").read_text()


def test_the_scripts_show_their_losses() -> None:
    scripts = [path for path in SCRIPTS.glob("*.py") if "losses" in path.read_text()]
    assert len(scripts) == 8
    assert all(path.read_text().endswith('print("losses:", losses)\n') for path in scripts)


def code_lines(script: Path) -> int:
    """The lines of a script without its docstring, blank lines and comments."""
    lines = script.read_text().splitlines()[1:]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)

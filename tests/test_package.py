"""What `import stageline` promises: its names, and that it needs little and loads fast."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import stageline as sl
from stageline._moved import MOVED

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exported_names_exist_and_are_sorted() -> None:
    assert sl.__all__ == sorted(sl.__all__)
    assert all(hasattr(sl, name) for name in sl.__all__)
    public = {name for name in vars(sl) if not name.startswith("_")}
    rooms = {"errors"} | {path.parent.name for path in Path(sl.__file__).parent.glob("*/__init__.py")}
    assert public - rooms - {"Any", "TYPE_CHECKING", "annotations"} == set(sl.__all__) - {"__version__"}


def test_every_export_has_a_docstring_with_its_purpose() -> None:
    for name in set(sl.__all__) - {"__version__"}:
        assert (getattr(sl, name).__doc__ or "").strip(), name


def test_the_library_needs_only_numpy_and_does_not_import_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        allowed = sys.stdlib_module_names | {"numpy", "stageline"}
        if name.split(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import stageline as sl
from stageline.timeline import draw
s = sl.schedule("zb-v", ranks=2, microbatches=3)
t = sl.simulate(s)
print(sl.verify(s).look_ahead, [len(form(t)) > 100 for form in (draw.text, draw.html, draw.svg, draw.trace)])
assert "torch" not in sys.modules
"""
    assert run(code) == "1 [True, True, True, True]\n"


def test_the_commands_do_not_import_torch() -> None:
    code = """
import sys
import stageline as sl
from stageline.cli.app import run
sl.simulate(sl.schedule("1f1b", 2, 2)).write("run.json")
codes = [run(words.split()) for words in (
    "families", "show zb-v -p 2 -m 3", "verify 1f1b -p 2 -m 2", "simulate gpipe -p 2 -m 2", "compare -p 2 -m 4",
    "synthesize -p 2 -m 4 --memory 2", "trace run.json")]
print(codes, "torch" in sys.modules)
"""
    assert run(code).endswith("[0, 0, 0, 0, 0, 0, 0] False\n")


def test_every_dependency_gives_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    names = [requirement.split(">")[0] for requirement in project["dependencies"]]
    assert names == ["numpy", "torch", "safetensors", "typer", "rich"]
    for requirement in project["dependencies"]:
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        assert "#" in line, f"{requirement} gives no reason"


def test_constraints_pin_what_an_install_for_development_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["huggingface"] + extras["synthesis"] + extras["dev"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    assert {requirement.split(">")[0] for requirement in required if "[" not in requirement} <= pinned


def test_the_base_install_has_what_the_command_imports() -> None:
    """`pip install stageline` leaves a command that works; the extras of earlier versions stay valid."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported: set[str] = set()
    for path in (ROOT / "src/stageline/cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    required = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert imported - sys.stdlib_module_names - {"stageline"} <= required
    assert set(project["optional-dependencies"]) >= {"cli", "huggingface", "synthesis", "data", "tensorboard", "dev"}


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "stageline", "verify", "1f1b", "-p", "2", "-m", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "1f1b" in done.stdout


def test_builds_leave_no_file_of_the_package_out() -> None:
    """hatchling packs what stands in src/stageline, except for what git ignores."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["packages"] == ["src/stageline"]
    assert "src" in build["sdist"]["include"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "--others", "--ignored", "--exclude-standard", "src"]
    ignored = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert not [path for path in ignored if "__pycache__" not in path]


DOCUMENTED = {
    "model.build": ["build", "describe"],
    "model.load": ["load_weights"],
    "model.partition": ["evaluate", "partition", "uniform"],
    "model.profile": ["profile_layers", "profile_model", "read_profile"],
    "runtime.control": ["Verdict"],
    "runtime.diagnosis": ["diagnose"],
    "runtime.flight": ["Flight", "read_flight"],
    "schedules.build": ["backward", "forward", "weave"],
    "train.config": ["Config"],
    "train.logs": ["Logs", "read_metrics"],
    "train.checkpoint": ["Writer", "newest"],
    "train.data": ["Items", "Loader", "Prefetch", "open_data"],
    "train.options": ["Option", "options", "sections"],
    "train.report": ["make_report"],
    "train.settings": ["FIXED", "FREE", "WARN", "differences"],
    "train.validate": ["validate"],
}
"""What the pages of the first version imported, by module."""


@pytest.mark.parametrize("old", sorted(DOCUMENTED))
def test_module_names_of_the_first_version_still_import(old: str) -> None:
    code = f"from stageline.{old} import {', '.join(DOCUMENTED[old])}"
    names: dict[str, object] = {}
    if old in MOVED:
        sys.modules.pop(f"stageline.{old}", None)
        with pytest.warns(DeprecationWarning, match=rf"stageline\.{old} has moved to stageline\.{MOVED[old]}"):
            exec(code, names)
    else:
        exec(code, names)
    assert not any(isinstance(names[name], ModuleType) for name in DOCUMENTED[old])


def test_files_that_version_0_1_0_wrote_still_read() -> None:
    from stageline.train.checkpoint import open_checkpoint

    files = ROOT / "tests/support/version_0_1_0"
    order = sl.read_schedule(files / "schedule.json")
    assert order == sl.schedule("zb-v", ranks=2, microbatches=2)
    assert sl.read_schedule(files / "schedule.csv").programs == order.programs
    times = sl.read_timeline(files / "timeline.json")
    costs = sl.Costs(forward=1, backward_input=1, backward_weight=1, transfer=0.5)
    assert times.makespan == sl.simulate(order, costs).makespan
    profile, plan = sl.read_profile(files / "profile.json"), sl.read_plan(files / "plan.json")
    assert [layer.parameters for layer in profile.layers] == [24, 24]
    assert plan.schedule.name == "1f1b"
    assert plan.step_seconds == pytest.approx(0.00035082599)
    assert [other.schedule for other in plan.alternatives] == ["gpipe"]
    checkpoint = open_checkpoint(files / "checkpoint/step-00000007")
    assert checkpoint.step == 7
    assert not checkpoint.verify()


def test_former_names_of_classes_and_attributes_stay_valid() -> None:
    from stageline import testing

    assert testing.Nursery is testing.ForkServer
    trainer = sl.Trainer.__new__(sl.Trainer)
    trainer.host = host = object()  # type: ignore[assignment]
    assert trainer.world is host


def test_a_module_that_never_existed_is_refused_as_before() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'stageline\.runtime\.nothing'"):
        import_module("stageline.runtime.nothing")


def test_the_wheel_installs_in_a_clean_environment(tmp_path: Path) -> None:
    """Build the wheel, and install it beside the dependencies of this environment, without the network."""
    pytest.importorskip("hatchling")

    def call(*words: str | Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(word) for word in words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source / name)
    hatch = "import os, sys; os.chdir('source'); from hatchling.cli import hatchling; sys.exit(hatchling())"
    call(sys.executable, "-c", hatch, "build", "-t", "wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", "clean")
    python = tmp_path / "clean/bin/python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "-q")
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    packaged = {path.relative_to(source / "src") for path in (source / "src").rglob("*") if path.is_file()}
    assert {path for path in packaged if not (site / path).is_file()} == set()
    assert call(tmp_path / "clean/bin/stageline", "--version") == f"stageline {sl.__version__}\n"
    where = call(python, "-c", "import stageline.schedules.registry as module; print(module.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert "zb-v" in call(tmp_path / "clean/bin/stageline", "families")

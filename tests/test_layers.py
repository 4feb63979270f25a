"""Packages of the code and folders of its tests: layers, sizes, and that every module imports by itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import stageline

ROOT = Path(stageline.__file__).parent
TESTS = Path(__file__).parent

LAYERS = (
    "common", "schedules", "timeline", "synthesis", "tensors", "autograd", "model", "planning", "transport", "faults",
    "distributed", "runtime", "train", "selftest", "studio", "cli", "testing",
)  # fmt: skip
"""From the lowest to the highest, as docs/architecture.md lists them."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of the package in a file, also inside functions and for types: its line, and the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stageline":
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("stageline."))


def test_no_layer_imports_a_higher_one() -> None:
    offending = []
    for path in sorted(ROOT.rglob("*.py")):
        layer = path.relative_to(ROOT).parts[0]
        for line, module in imports(path) if layer in LAYERS else ():
            target = module.split(".")[1] if "." in module else ""
            if target != "_version" and (target not in LAYERS or LAYERS.index(target) > LAYERS.index(layer)):
                offending.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not offending, "\n".join(offending)


PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+|(?!self\b).*\._version")


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every private name of torch in a file: its line, and the expression or the import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(ast.unparse(node)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(re.match(r"_(?!_)", part) for part in parts):
                yield node.lineno, ast.unparse(node)


def test_private_names_of_torch_stand_in_torch_private() -> None:
    files = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "_torch_private.py"]
    offending = [f"{path.relative_to(ROOT)}:{line} {name}" for path in files for line, name in private_names(path)]
    assert not offending, "\n".join(offending)


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(LAYERS)


def test_no_level_has_more_than_25_files() -> None:
    levels = Counter(path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    assert not {level: files for level, files in levels.items() if files > 25}


def test_test_folders_are_named_after_packages() -> None:
    packages = {path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")}
    assert {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} <= packages
    assert not list(TESTS.glob("support/**/test_*.py"))


def test_no_test_imports_another_test() -> None:
    """What tests share stands in tests/support."""
    imports = re.compile(r"^\s*(?:from|import)\s+[\w.]*\btest_\w+", re.MULTILINE)
    assert not [path.name for path in TESTS.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))]


def test_every_test_has_a_timeout(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 600


ALONE = """
import dataclasses, functools, gc, importlib, importlib.machinery, sys, torch
# Compile every module and every method of a dataclass once, and run it again for each import.
loader = importlib.machinery.SourceFileLoader
loader.get_code = functools.cache(loader.get_code)
compiled = functools.cache(lambda text: compile(text, "<dataclass>", "exec"))
dataclasses.exec = lambda text, *scopes: exec(compiled(text), *scopes)
gc.disable()
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.partition(".")[0] == "stageline"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
"""
"""Imports each module into a process that has loaded nothing else of the package."""


def test_every_module_imports_by_itself() -> None:
    modules = [
        ".".join(("stageline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "__main__.py"
    ]
    result = subprocess.run([sys.executable, "-c", ALONE, *modules], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert not result.stdout

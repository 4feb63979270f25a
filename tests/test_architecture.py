"""The architecture page: it lists every file, and the files and functions that it names exist."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/stageline"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_list_of_packages_is_that_of_the_tree() -> None:
    """Every file with the first line of its docstring, in the order of the layers."""
    rooms = runpy.run_path(str(ROOT / "docs/make_rooms.py"))["rooms"]()
    assert rooms in PAGE, "run python docs/make_rooms.py"


def test_the_files_and_functions_on_the_page_and_in_the_guide_for_contributors_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.(?:py|md)|[\w/]+/)(?::([\w.]+))?`", PAGE + guide)
    assert len([name for _, name in named if name]) > 30  # the walks are there
    missing = [f"{path}:{name}" for path, name in named if not exists(path, name)]
    assert not missing


def test_each_package_docstring_names_the_modules_of_the_package() -> None:
    """The reading order of a package is complete; verbs and families are alike, so any of them may be read first."""
    missing = []
    for init in SOURCE.rglob("*/__init__.py"):
        package = init.parent
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        files = [path.stem for path in package.glob("*.py") if path.stem not in ("__init__", "_torch_private")]
        names = files + [f"{inner.parent.name}/" for inner in package.glob("*/__init__.py")]
        if package.relative_to(SOURCE).as_posix() not in ("cli", "schedules/families"):
            missing += [f"{package.name}: {name}" for name in names if f"`{name}`" not in docstring]
    assert not missing


def exists(path: str, name: str) -> bool:
    """Whether a path of the source or of the repository exists, and defines a function, class, method or constant."""
    file = next((root / path for root in (SOURCE, ROOT) if (root / path).exists()), None)
    if file is None or not name:
        return file is not None
    scope: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = next((node for node in scope if part in names_of(node)), None)
        if node is None:
            return False
        scope = node.body if isinstance(node, ast.ClassDef) else []
    return True


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []

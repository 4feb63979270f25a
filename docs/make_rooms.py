"""Write the list of packages in architecture.md, from the docstrings of the source: `python docs/make_rooms.py`."""

from __future__ import annotations

import ast
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/stageline"
PAGE = ROOT / "docs/architecture.md"
START, END = "<!-- written by make_rooms.py -->\n", "<!-- end -->\n"
WIDTH, COLUMN = 118, 26


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring as one line, without the final dot."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def entry(name: str, text: str) -> Iterator[str]:
    """A name with its text beside it, wrapped to the width of the page."""
    lines = textwrap.wrap(text, WIDTH - COLUMN) or [""]
    yield f"{name:<{COLUMN - 1}} {lines[0]}".rstrip()
    yield from (" " * COLUMN + line for line in lines[1:])


def listing(folder: Path, indent: str = "") -> Iterator[str]:
    """The lines of a package: its files, then its subpackages."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield from entry(indent + path.name, summary(path))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from entry(f"{indent}{package.name}/", summary(package / "__init__.py"))
        yield from listing(package, indent + "  ")


def rooms() -> str:
    """One section for each layer, from the lowest to the highest."""
    sections = []
    for layer in runpy.run_path(str(ROOT / "tests/test_layers.py"))["LAYERS"]:
        lines = "\n".join(listing(SOURCE / layer))
        sections.append(f"### {layer}/\n\n{summary(SOURCE / layer / '__init__.py')}.\n\n```text\n{lines}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}\n{rooms()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")

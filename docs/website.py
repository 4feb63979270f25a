"""Hooks of mkdocs: the pages that are not files of docs/ (README, reference, examples), and links between all of them.

See mkdocs.yml. A link to a file outside of docs/ leads to a page of the website that shows the file.
"""

from __future__ import annotations

import ast
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository that are pages of the website."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found, unused-ignore]

    texts = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in PAGES.items()}
    texts |= runpy.run_path(str(ROOT / "docs/make_reference.py"))["pages"]()
    sources = {page: path for path, page in PAGES.items()}
    markdown = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    markdown |= {sources[page]: text for page, text in texts.items() if page in sources}
    for page, text in markdown.items():
        for target in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if not path.startswith("docs/") and path not in PAGES and (ROOT / path).exists():
                texts[page_of(path)] = source_page(path)
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the website, and show examples with a prompt as such."""
    uri = page.file.src_uri
    repository_path = {page: path for path, page in PAGES.items()}.get(uri, f"docs/{uri}")

    def relink(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), match.group(1)))
        return posixpath.relpath(page_of(path), posixpath.dirname(uri) or ".")

    return LINK.sub(relink, markdown).replace("```python\n>>>", "```pycon\n>>>")


def page_of(path: str) -> str:
    """The page of the website that shows a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def source_page(path: str) -> str:
    """A file as code, or the files of a folder with the first line of their docstrings."""
    place = ROOT / path
    if place.is_dir():
        rows = [f"| `{file.name}` | {first_line(file)} |" for file in sorted(place.iterdir()) if file.is_file()]
        return f"# {path}/\n\nA folder of the repository.\n\n| file | |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    return f"# {path}\n\n```{place.suffix[1:]}\n{place.read_text(encoding='utf-8')}\n```\n"


def first_line(file: Path) -> str:
    """What a file is for: the first line of its docstring or of its comment."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return text.partition("\n")[0].lstrip("# ")

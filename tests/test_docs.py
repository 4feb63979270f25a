"""The documentation is complete, and its pictures are those that the code draws."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import stageline as sl
from stageline.cli.app import VERBS, run
from stageline.schedules.rules import RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_family_has_a_section_with_its_picture() -> None:
    text = (ROOT / "docs/families.md").read_text()
    for name in sl.families():
        assert f"\n## {name}\n\n![{name}](pictures/{name}.svg)\n" in text


def test_every_rule_has_a_paragraph_in_the_order_of_the_table() -> None:
    text = (ROOT / "docs/verify.md").read_text()
    assert re.findall(r"^\*\*(\w+)\*\* — ", text, re.MULTILINE) == list(RULES)


def test_every_verb_of_the_command_is_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for verb in ("families", "show", "verify", "simulate", "compare", "trace", "doctor"):
        assert f"`{verb}`" in text or f"stageline {verb}" in text


def test_the_errors_that_the_guide_for_several_machines_explains_are_those_of_the_code() -> None:
    """Every long part of a quoted error without numbers and addresses is in the code."""
    section = (ROOT / "docs/hosts.md").read_text().partition("## What the errors mean")[2]
    sources = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    sentences = re.sub(r"""['"]\s*\n\s*f?['"]""", "", sources)  # an error may take several lines
    quotes = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(quotes) > 10
    for quote in quotes:
        parts = [part.strip() for part in re.split(r"[\d.]+|[…:,;()]|--?\w\S*", quote)]
        for words in (part for part in parts if len(part) > 8):
            assert words in sentences, f"{quote}: no error has the words {words!r}"


def test_the_pictures_are_what_the_code_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/make_pictures.py"))["pictures"]()
    folder = ROOT / "docs/pictures"
    assert {path.name for path in folder.iterdir()} == set(drawn)
    for name, picture in drawn.items():
        assert (folder / name).read_text() == picture, f"run python docs/make_pictures.py to draw {name} again"


def test_the_chart_in_the_readme_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    command = re.search(r"bin/stageline (show .*)", text)
    assert command is not None
    assert run(command.group(1).split()) == 0
    assert f"```text\n{capsys.readouterr().out}```" in text


def test_the_reference_has_every_public_name_and_every_verb() -> None:
    pages = runpy.run_path(str(ROOT / "docs/make_reference.py"))["pages"]()
    text = "\n".join(pages.values())
    for name in set(sl.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in text
    for verb in VERBS:
        assert f"\n## stageline {verb}" in pages["reference/cli.md"]


def test_every_page_has_its_place_in_the_website() -> None:
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in pages if f" {page}\n" not in navigation]


def test_the_website_has_no_broken_link_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(site)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*', page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as they stand in links: small letters and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

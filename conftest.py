"""What every test and doctest may rely on: a folder of its own, and a registry that is put back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stageline.schedules import registry


@pytest.fixture(autouse=True)
def clean_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, and forget the families that a test declared."""
    monkeypatch.chdir(tmp_path)
    registry.families()
    known = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(known)

"""What every test and doctest may rely on: a folder of its own, and a registry that is put back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stageline.schedules import registry
from stageline.testing import Nursery


@pytest.fixture(autouse=True)
def clean_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, and forget the families that a test declared."""
    monkeypatch.chdir(tmp_path)
    registry.families()
    known = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(known)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A process that starts ranks quickly, because torch is imported already."""
    with Nursery() as server:
        yield server


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file of tokens that a small model can learn."""
    path = tmp_path / "tokens.bin"
    (np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 5], size=4000)) % 32).astype(np.uint16).tofile(path)
    return path

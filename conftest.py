"""Fixtures of every test and doctest, and the profile of property tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from stageline.schedules import registry

if TYPE_CHECKING:
    from stageline.testing import ForkServer

# A busy machine is slow: that says nothing about a property.
settings.register_profile(
    "stageline", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("stageline")


SLOWEST = ("train", "runtime", "docs", "distributed", "faults", "cli", "autograd", "model", "transport")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the folders with the slowest files first, so that no process waits long for the last one."""
    items.sort(key=lambda item: min((SLOWEST.index(part) for part in item.path.parts if part in SLOWEST), default=99))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every garbage collection of the tests."""
    gc.freeze()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Forget the families that a test registered."""
    registry.families()
    known = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(known)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread from one seed, where torch is loaded, and restore what a test changed."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = mkldnn


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """Start processes that have imported torch already, from the same server as `run_ranks`."""
    from stageline.distributed.launchers.fork_server import shared_server

    return shared_server()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Write a file of tokens that a small model can learn."""
    path = tmp_path / "tokens.bin"
    (np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 5], size=4000)) % 32).astype(np.uint16).tofile(path)
    return path

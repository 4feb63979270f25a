"""Temporary folders, and those of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stageline.common.temporary_folder import PREFIX, TemporaryFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and its children create temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next(place: Path) -> None:
    code = (
        "import os; from stageline.common.temporary_folder import TemporaryFolder; folder = TemporaryFolder('job-');"
        "(folder.path / 'file').touch(); print(folder.path, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    killed = Path(done.stdout.strip())
    assert (killed / "file").is_file(), done.stderr
    (place / f"{PREFIX}file").touch()
    (place / "stageline-runs").mkdir()  # a name that a user may choose
    with TemporaryFolder() as first:
        assert not killed.exists()
        with TemporaryFolder() as second:
            assert first.is_dir()
            assert second.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in place.iterdir()) == ["stageline-runs", f"{PREFIX}file"]


def test_a_forked_child_leaves_the_folder_alone(place: Path) -> None:
    folder = TemporaryFolder()
    pid = os.fork()
    if not pid:
        folder.remove()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert folder.path.is_dir()
    folder.remove()
    assert not folder.path.exists()

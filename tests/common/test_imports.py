"""Where libraries are."""

from __future__ import annotations

import sys

import pytest

from stageline.common.imports import library_folders


def test_packages_outside_of_the_virtual_environment_are_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/usr/lib/python3/dist-packages", "/home/me/project"])
    assert "/usr/lib/python3/dist-packages" in library_folders()
    assert "/home/me/project" not in library_folders()
    assert pytest.__file__.startswith(library_folders())

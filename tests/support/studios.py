"""A studio in a process of its own, as the command starts it; requests to it; a browser that looks at it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

TYPES = {"f4": "<f4", "i4": "<i4", "u1": "u1"}


class Response(NamedTuple):
    """A response of a studio."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def arrays(self) -> Any:
        """The body as JSON with arrays, as the page reads it."""
        (size,) = struct.unpack_from("<I", self.body)

        def with_arrays(value: dict[str, Any]) -> Any:
            if not isinstance(value.get("array"), list):
                return value
            kind, offset, length = value["array"]
            return np.frombuffer(self.body, TYPES[kind], length, 4 + size + offset)

        return json.loads(self.body[4 : 4 + size], object_hook=with_arrays)


class RunningStudio:
    """A process that serves a studio."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path

    def request(self, path: str, data: object = None, *, token: str | None = None, **headers: str) -> Response:
        """Ask for a path below the token; with data, as POST."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        body = None if data is None else json.dumps(data)
        prefix = self.path if token is None else f"/{token}/"
        connection.request("GET" if data is None else "POST", prefix + path, body, headers)
        answer = connection.getresponse()
        response = Response(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return response

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def studio(*arguments: str | Path) -> Iterator[RunningStudio]:
    """Start `stageline studio` on any free port, and end it after the block."""
    command = [sys.executable, "-m", "stageline", "studio", "--port", "0", "--no-browser", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if not line.startswith("studio at "):
            process.kill()
            raise AssertionError(process.stderr.read())
        running = RunningStudio(process, line.removeprefix("studio at ").strip().partition("#")[0])
        try:
            yield running
        finally:
            if process.poll() is None:
                running.stop()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; skip the test by name if it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make install")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("chromium is not installed; as root, make chromium installs it through apt")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()

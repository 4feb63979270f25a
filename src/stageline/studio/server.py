"""The server of the studio: on this machine only, until Ctrl-C."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from stageline.common.errors import StagelineError
from stageline.common.imports import require
from stageline.studio.app import EXTRA, Studio, make_app

HOST = "127.0.0.1"
DEFAULT_PORT = 8765


def serve(
    runs: Sequence[Path] = (),
    *,
    port: int | None = None,
    browser: bool = True,
    on_start: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until an interrupt; `on_start` gets its address.

    Without a port, 8765 is tried first, and then any free one.
    """
    uvicorn = require("uvicorn", "stageline studio", EXTRA)
    studio = Studio(secrets.token_urlsafe(24), runs)
    app = make_app(studio)
    with listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/{studio.token}/"
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        on_start(address + ("#runs" if runs else ""))
        if browser:
            webbrowser.open(address + ("#runs" if runs else ""))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        try:
            with suppress(KeyboardInterrupt):  # uvicorn has answered what was asked, and raises the signal again
                server.run(sockets=[listener])
        finally:
            studio.close()


def listen(port: int | None) -> socket.socket:
    """Return a socket at a port of this machine; raise `StagelineError` if the requested one cannot be used.

    >>> with listen(0) as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, candidate))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if port is not None or error.errno != errno.EADDRINUSE:
                raise StagelineError(
                    f"cannot listen at {HOST}:{candidate}: {error.strerror or error}; use another --port, or leave it "
                    "out for a free one"
                ) from None
    raise AssertionError("port 0 is always free")

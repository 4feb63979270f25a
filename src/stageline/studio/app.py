"""The routes of the studio, and who may call them.

The page can read files of this machine, so a request must prove that it comes from the page: the first part of every
path is the token, which only the printed address has; `Host` must be this server, so that no other name can be pointed
at it (DNS rebinding); and `Origin`, where a browser sends it, must be the page's own.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from stageline.common.checked_json import parse_json
from stageline.common.errors import StagelineError
from stageline.common.imports import require
from stageline.studio import export, schedules
from stageline.studio.arrays import pack
from stageline.studio.plans import Profiles
from stageline.studio.runs import LiveRuns
from stageline.studio.synthesis import Searches

PAGES = Path(__file__).with_name("pages")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MAX_BODY = 64 * 2**20
"""Maximum bytes of a request; a profile of a thousand layers has less than one MiB."""
EXTRA = "'stageline[studio]'"

Answer = Callable[[Any], Any]


class Studio:
    """What a studio knows: its token, its searches, its runs, and the profiles that were dropped on it."""

    def __init__(self, token: str, runs: Sequence[Path] = ()) -> None:
        """Raise `StagelineError` if a folder holds no run."""
        self.token = token
        self.searches = Searches()
        self.runs = LiveRuns(runs)
        self.profiles = Profiles()

    def simulate(self, data: object) -> bytes:
        """Return the times of the page's panels."""
        return pack(schedules.simulated(schedules.read_request(data), self.searches.schedules))

    def export(self, data: Any) -> export.ExportedFile:
        """Return the panels as a file."""
        request = schedules.read_request(data)
        return export.export(request, str(data.get("format")), self.searches.schedules, self.searches.arguments)

    def close(self) -> None:
        """End the searches."""
        self.searches.stop()


def make_app(studio: Studio) -> Any:
    """Return the ASGI application."""
    applications = require("starlette.applications", "stageline studio", EXTRA)
    routing = require("starlette.routing", "stageline studio", EXTRA)
    guard = Guard(studio.token)

    def get(path: str, answer: Callable[[Any], Any]) -> Any:
        return routing.Route(f"/{{token}}{path}", _endpoint(guard, lambda request, _: answer(request)))

    def post(path: str, answer: Callable[[Any], Any]) -> Any:
        return routing.Route(f"/{{token}}{path}", _endpoint(guard, lambda _, data: answer(data)), methods=["POST"])

    searches, runs, profiles = studio.searches, studio.runs, studio.profiles
    routes = [
        get("/", lambda _: page("index.html")),
        get("/pages/{name}", lambda request: page(request.path_params["name"])),
        get("/api/catalogue", lambda _: schedules.catalogue()),
        post("/api/simulate", studio.simulate),
        post("/api/export", studio.export),
        post("/api/synthesis", lambda data: {"job": searches.start(data)}),
        get("/api/synthesis/{job}", lambda request: searches.find(request.path_params["job"]).to_json()),
        post("/api/synthesis/stop", lambda _: searches.stop()),
        post("/api/runs", lambda data: pack(runs.answer(data))),
        post("/api/runs/timelines", lambda data: pack(runs.timelines(data))),
        get("/api/profiles", lambda _: [profile.name for profile in runs.profiles()]),
        post("/api/profile", profiles.add),
        post("/api/profile/run", lambda data: profiles.add_run(data, runs.profiles())),
        post("/api/plan", lambda data: pack(profiles.evaluate(data))),
        post("/api/plan/search", profiles.search),
        # Whatever else is asked for is refused with the same sentence, so that a path tells nothing.
        routing.Route("/{path:path}", _endpoint(guard, _missing), methods=["GET", "POST"]),
    ]
    return applications.Starlette(routes=routes)


class Guard:
    """Refuses requests that do not come from the page."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def reason_to_refuse(self, request: Any) -> str:
        """Return why a request is refused; empty if it is not."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        port = request.scope["server"][1]
        if host not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return f"this studio answers only at http://127.0.0.1:{port}"
        if origin is not None and origin != f"http://{host}":
            return "another page may not use this studio"
        token = request.path_params.get("token", "").encode()
        if not hmac.compare_digest(token, self._token):
            return "this is not the address of this studio: open the one that stageline studio printed"
        return ""


def page(name: str) -> Any:
    """Return a file of the page."""
    path = PAGES / name
    if path.parent != PAGES or path.suffix not in MEDIA_TYPES or not path.is_file():
        raise LookupError(name)
    return export.ExportedFile("", MEDIA_TYPES[path.suffix], path.read_text(encoding="utf-8"))


def _missing(request: Any, _: Any) -> Any:
    raise LookupError(request.url.path)


def _endpoint(guard: Guard, answer: Callable[[Any, Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """Return an endpoint that checks the request, and computes the answer outside the event loop."""
    concurrency = require("starlette.concurrency", "stageline studio", EXTRA)

    async def endpoint(request: Any) -> Any:
        refusal = guard.reason_to_refuse(request)
        if refusal:
            return response({"error": refusal}, 403)
        try:
            data = parse_json(await _body(request)) if request.method == "POST" else None
            return response(await concurrency.run_in_threadpool(answer, request, data))
        except StagelineError as error:
            return response({"error": str(error)}, 400)
        except LookupError:
            return response({"error": "there is no such page"}, 404)
        except Exception:  # the page shows a sentence, the terminal the cause
            logging.getLogger("uvicorn.error").exception("the studio failed to answer %s", request.url.path)
            return response({"error": "the studio failed to answer; its terminal shows the error"}, 500)

    return endpoint


async def _body(request: Any) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise StagelineError(f"a request may have at most {MAX_BODY // 2**20} MiB")
    return bytes(body)


def response(answer: Any, status: int = 200) -> Any:
    """Return an answer as HTTP: arrays, a file, or JSON."""
    responses = require("starlette.responses", "stageline studio", EXTRA)
    headers = dict(HEADERS)
    if isinstance(answer, bytes):
        return responses.Response(answer, status, headers, "application/octet-stream")
    if isinstance(answer, export.ExportedFile):
        if answer.name:
            headers["content-disposition"] = f'attachment; filename="{answer.name}"'
        return responses.Response(answer.text, status, headers, answer.media_type)
    return responses.JSONResponse(answer, status, headers)

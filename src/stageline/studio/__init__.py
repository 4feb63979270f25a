"""The local web page: schedules to explore, live runs, and cuts of a profile.

The server only computes: what the browser shows is drawn by the plain JavaScript modules in `pages`. Starlette and
uvicorn (the extra `studio`) are imported when the server starts, never by importing this package.

Read in order: `arrays` (how timelines travel to the page), `addresses`, `schedules`, `export`, `synthesis` and
`synthesis_process`, `plans`, `runs`, `app` (routes and who may call them), `server`.
"""

from stageline.studio.server import serve

__all__ = ["serve"]

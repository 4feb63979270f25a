"""Searches in the background: the page asks how far they are, and gets their schedules."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from stageline.common.checked_json import PositiveInt, Range, from_json, parse_json
from stageline.common.errors import StagelineError
from stageline.schedules.io import schedule_from
from stageline.schedules.schedule import Schedule
from stageline.studio.addresses import pack_schedule
from stageline.studio.schedules import MAX_ACTIONS, StageCosts

MAX_SEARCHES = 16
"""Results that are kept; the oldest are forgotten first."""


@dataclass(frozen=True)
class SearchRequest:
    """What to search for."""

    ranks: PositiveInt
    microbatches: PositiveInt
    costs: StageCosts = field(default_factory=StageCosts)
    chunks: Annotated[int, Range(1, 8)] = 1
    placement: Literal["loop", "v"] = "loop"
    memory: Annotated[float, Range(above=0)] | None = None
    time_limit: Annotated[float, Range(above=0, maximum=600)] = 10.0

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `synthesize` that are not the default."""
        chosen: dict[str, Any] = {"chunks": self.chunks, "placement": self.placement, "memory": self.memory}
        default = {"chunks": 1, "placement": "loop", "memory": None}
        return {name: value for name, value in chosen.items() if value != default[name]} | {
            "time_limit": self.time_limit
        }


class BackgroundSearch:
    """One search: a process, and a thread that reads its lines."""

    def __init__(self, request: SearchRequest) -> None:
        """Start the process."""
        self.request = request
        self.progress: list[list[Any]] = []
        """Seconds, best value, lower bound and step of every improvement."""
        self.error = ""
        self.final: dict[str, Any] = {}
        self.schedule: Schedule | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stageline.studio.synthesis_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        costs = request.costs.make(request.ranks, request.chunks).to_json()
        sizes = {"ranks": request.ranks, "microbatches": request.microbatches}
        self._text = json.dumps({"costs": costs, **sizes, **request.arguments})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(self._text)
            for line in process.stdout:
                self._take(parse_json(line))
        except (OSError, StagelineError) as error:
            self.error = self.error or f"the search failed: {error}"
        code = process.wait()
        if self.schedule is None and not self.error:
            self.error = "stopped" if code < 0 else f"the search ended with exit code {code}"

    def _take(self, line: dict[str, Any]) -> None:
        self.error = line.get("error", "")
        if "progress" in line:
            self.progress.append(line["progress"])
        if "schedule" in line:
            schedule = schedule_from(parse_json(line["schedule"]))
            self.final = {name: line[name] for name in ("gap", "best", "was_cut")} | {"packed": pack_schedule(schedule)}
            self.schedule = schedule

    @property
    def is_done(self) -> bool:
        """Whether it has a schedule or an error."""
        return not self._reader.is_alive()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._reader.join(10)

    def to_json(self) -> dict[str, Any]:
        """Return its state for the page."""
        return {"progress": self.progress, "done": self.is_done, "error": self.error, **self.final}


class Searches:
    """The searches of a studio; a new one ends the one that runs."""

    def __init__(self) -> None:
        self._searches: dict[str, BackgroundSearch] = {}

    def start(self, data: object) -> str:
        """Start a search and return its name."""
        request = from_json(SearchRequest, data, "request", prefix="")
        if 3 * request.ranks * request.microbatches * request.chunks > MAX_ACTIONS:
            raise StagelineError(f"a schedule of this size has more than {MAX_ACTIONS:,} actions; use fewer")
        self.stop()
        name = secrets.token_hex(4)  # addresses are shared: another studio must not know it as a search of its own
        self._searches[name] = BackgroundSearch(request)
        for oldest in list(self._searches)[:-MAX_SEARCHES]:
            del self._searches[oldest]
        return name

    def find(self, name: str) -> BackgroundSearch:
        """Return a search by its name."""
        if name not in self._searches:
            raise StagelineError(f"synthesis {name!r} no longer exists; press Synthesize to start another one")
        return self._searches[name]

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The schedules of finished searches."""
        return {name: search.schedule for name, search in self._searches.items() if search.schedule is not None}

    @property
    def arguments(self) -> Mapping[str, Mapping[str, object]]:
        """The arguments of all searches."""
        return {name: search.request.arguments for name, search in self._searches.items()}

    def stop(self) -> None:
        """End what runs."""
        for search in self._searches.values():
            if not search.is_done:
                search.stop()

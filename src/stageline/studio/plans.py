"""The page of plans: a profile, a cut of its layers that the user drags, and what a step then takes and holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from stageline.common.checked_json import PositiveInt, Range, from_json
from stageline.common.errors import StagelineError
from stageline.common.files import read_text
from stageline.model.profile import Profile, profile_from_text
from stageline.schedules.registry import families
from stageline.schedules.schedule import Schedule
from stageline.studio.arrays import structure_of, times_of
from stageline.studio.schedules import PanelRequest, ScheduleRequest, schedule_of
from stageline.timeline.costs import LARGEST_COST
from stageline.timeline.simulate import simulate

MAX_PROFILES = 16
"""Profiles that are kept; the oldest are forgotten first."""

Cost = Annotated[float, Range(0, LARGEST_COST)]


@dataclass(frozen=True)
class Upload:
    """A file that was dropped on the page."""

    name: str
    text: str


@dataclass(frozen=True)
class RunRequest:
    """The run whose profile the page wants, by its index in the list of profiles."""

    run: Annotated[int, Range(0)]


class RunProfile(NamedTuple):
    """The profile of a run that the studio follows."""

    name: str
    path: Path


@dataclass(frozen=True)
class CutRequest:
    """A way to train the model of a profile."""

    profile: str
    ranks: PositiveInt
    microbatches: PositiveInt
    family: str = "1f1b"
    options: Mapping[str, PositiveInt] = field(default_factory=dict)
    counts: tuple[PositiveInt, ...] | None = None
    """The number of layers of every stage; None for a balanced cut."""
    recompute: Literal["none", "stage"] = "none"
    transfer: Cost = 0.0
    bandwidth: Annotated[float, Range(above=0, maximum=LARGEST_COST)] | None = None
    optimizer_bytes: Cost = 8.0
    memory: Annotated[float, Range(above=0)] | None = None
    time_limit: Annotated[float, Range(above=0, maximum=60)] = 4.0
    """Seconds of a search for the best plan."""


class Profiles:
    """The profiles that were dropped on the page."""

    def __init__(self) -> None:
        self._profiles: dict[str, Profile] = {}

    def add_run(self, data: object, profiles: Sequence[RunProfile]) -> dict[str, Any]:
        """Keep the profile of one of these runs, and return its layers."""
        index = from_json(RunRequest, data, "request", prefix="").run
        if index >= len(profiles):
            raise StagelineError(f"there is no profile {index}; there are {len(profiles)}, counted from 0")
        return self.add({"name": profiles[index].name, "text": read_text(profiles[index].path, "profile")})

    def add(self, data: object) -> dict[str, Any]:
        """Keep a profile, and return its layers."""
        upload = from_json(Upload, data, "request", prefix="")
        profile = profile_from_text(upload.text, upload.name)
        name = hashlib.sha256(upload.text.encode()).hexdigest()[:16]
        self._profiles.pop(name, None)
        self._profiles[name] = profile
        for oldest in list(self._profiles)[:-MAX_PROFILES]:
            del self._profiles[oldest]
        layers = [
            [layer.name, layer.kind, layer.seconds, layer.forward, layer.activation, layer.parameters]
            for layer in profile.layers
        ]
        where = f"{profile.machine}, {profile.device}, torch {profile.torch}"
        return {"profile": name, "name": upload.name, "where": where, "layers": layers}

    def find(self, name: str) -> Profile:
        """Return a profile that was dropped."""
        if name not in self._profiles:
            raise StagelineError("this studio no longer has the profile; drop it on the page again")
        return self._profiles[name]

    def evaluate(self, data: object) -> dict[str, Any]:
        """Return the times and the memory of a cut."""
        from stageline.planning.candidates import Candidate, Cuts, Evaluator, shape_of
        from stageline.planning.costs import Links, RankMemory, StateBytes
        from stageline.planning.mesh import Network
        from stageline.planning.mesh_costs import MeshTime
        from stageline.planning.profiles import SizedProfiles
        from stageline.planning.request import PlanRequest

        request = from_json(CutRequest, data, "request", prefix="")
        profile, schedule = self.find(request.profile), _schedule(request)
        if schedule.stages > len(profile.layers):
            raise StagelineError(
                f"{schedule.name} has {schedule.stages} stages, but the profile has {len(profile.layers)} layers; use "
                "fewer ranks or chunks"
            )
        shape = shape_of(schedule)
        counts = request.counts
        if counts is None or len(counts) != schedule.stages or sum(counts) != len(profile.layers):
            counts = Cuts(profile).of(shape, request.recompute == "stage")[0]
        evaluator = Evaluator(
            PlanRequest(
                SizedProfiles.of({1: profile}),
                request.ranks,
                ((request.microbatches, 1),),
                states=StateBytes(optimizer=request.optimizer_bytes),
                time=MeshTime(network=Network(Links(request.transfer, request.bandwidth))),
            )
        )
        candidate = Candidate(shape, request.microbatches, 1, counts, request.recompute)
        timeline = simulate(schedule, evaluator.costs(candidate))
        memory = evaluator.memory(timeline, candidate)
        return {
            "counts": list(counts),
            "ranks": [schedule.rank_of(stage) for stage in range(schedule.stages)],
            "panel": {"structure": structure_of(timeline), "times": times_of(timeline)},
            "memory": [list(rank) for rank in memory],
            "parts": list(RankMemory._fields),
        }

    def search(self, data: object) -> dict[str, Any]:
        """Return the fastest family, cut and recomputation that the planner finds within the memory."""
        from stageline.planning.planner import plan

        request = from_json(CutRequest, data, "request", prefix="")
        best = plan(
            profile=self.find(request.profile),
            ranks=request.ranks,
            microbatches=request.microbatches,
            memory=request.memory,
            transfer=request.transfer,
            bandwidth=request.bandwidth,
            optimizer_bytes_per_parameter=request.optimizer_bytes,
            schedule=[name for name, family in families().items() if family.training],
            recompute="none",
            time_limit=request.time_limit,
        )
        options = {name: value for name, value in best.schedule.options.items() if value is not None}
        return {"family": best.schedule.name, "options": options, "counts": list(best.layers_per_stage)}


def _schedule(request: CutRequest) -> Schedule:
    panel = PanelRequest(request.family, request.options)
    schedule = schedule_of(ScheduleRequest(request.ranks, request.microbatches, (panel,)), panel, {})
    if not schedule.training:
        raise StagelineError(f"{schedule.name} is for inference only; choose a family that trains")
    return schedule

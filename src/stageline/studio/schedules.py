"""The page of schedules: families and costs to arrays of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any
from zlib import crc32

from stageline.common.checked_json import PositiveInt, Range, from_json
from stageline.common.errors import ScheduleError, StagelineError
from stageline.schedules.registry import families, schedule
from stageline.schedules.schedule import Schedule
from stageline.studio.addresses import unpack_schedule
from stageline.studio.arrays import structure_of, times_of
from stageline.timeline.costs import LARGEST_COST, Costs
from stageline.timeline.draw.palette import LOOKS
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

MAX_ACTIONS = 200_000
"""The page draws at most this many actions of one schedule."""
SYNTHESIZED = "synthesized"

Cost = Annotated[float, Range(0, LARGEST_COST)]


@dataclass(frozen=True)
class StageCosts:
    """The sliders: what one of P equal parts of the model costs, and how much longer some of the parts take."""

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    transfer: Cost = 0.0
    activation: Cost = 1.0
    residue: Cost = 1.0
    factors: Mapping[str, Cost] = field(default_factory=dict)
    """By part of the model, how much longer it takes; 1 if it is not here."""

    def make(self, ranks: int, chunks: int) -> Costs:
        """Return the costs of the stages of a schedule that cuts each part of the model into so many stages.

        >>> StageCosts(forward=2, factors={"1": 3}).make(ranks=2, chunks=2).forward
        [1.0, 1.0, 3.0, 3.0]
        """
        return self.whole(ranks).refined(chunks)

    def whole(self, ranks: int) -> Costs:
        """Return the costs of a schedule with one stage per rank."""
        times: dict[str, Any] = {name: getattr(self, name) for name in ("forward", "backward_input", "backward_weight")}
        if any(part.isdecimal() and int(part) < ranks and factor != 1 for part, factor in self.factors.items()):
            factors = [self.factors.get(str(part), 1.0) for part in range(ranks)]
            times = {name: [time * factor for factor in factors] for name, time in times.items()}
        return Costs(**times, transfer=self.transfer, activation=self.activation, residue=self.residue)


@dataclass(frozen=True)
class PanelRequest:
    """One chart: a family with its options, or the result of a synthesis."""

    family: str
    options: Mapping[str, PositiveInt] = field(default_factory=dict)
    job: str = ""
    """The synthesis, if the family is "synthesized"."""
    packed: str = ""
    """Its schedule as in the address, for a studio that did not run that synthesis; empty if it is too large."""
    known: str = ""
    """The schedule whose structure the page has already."""
    idle: bool = False
    """Whether the page shows the idle time of each rank."""


@dataclass(frozen=True)
class ScheduleRequest:
    """What the page of schedules shows."""

    ranks: PositiveInt
    microbatches: PositiveInt
    panels: tuple[PanelRequest, ...]
    costs: StageCosts = field(default_factory=StageCosts)

    def __post_init__(self) -> None:
        size = 2 * self.ranks * self.microbatches
        if size > MAX_ACTIONS:
            raise StagelineError(
                f"{self.ranks} ranks and {self.microbatches} microbatches have at least {size:,} actions; this page "
                f"draws up to {MAX_ACTIONS:,}: use fewer, or stageline simulate"
            )


def read_request(data: object) -> ScheduleRequest:
    """Return the checked request of the page."""
    return from_json(ScheduleRequest, data, "request", prefix="")


def catalogue() -> dict[str, Any]:
    """Return the families and their options, and the colours of the charts."""
    return {
        "families": [
            {
                "name": family.name,
                "description": family.description,
                "constraints": family.constraints,
                "options": family.options,
                "training": family.training,
            }
            for family in families().values()
        ],
        "looks": {letter: [look.meaning, look.fill, look.pale, look.ink] for letter, look in LOOKS.items()},
    }


@lru_cache(maxsize=32)
def _schedule(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, int], ...]) -> Schedule:
    chunks = max([1, *(value for _, value in options)])
    if 2 * ranks * microbatches * chunks > MAX_ACTIONS:
        raise ScheduleError(
            f"{name} with {ranks} ranks, {microbatches} microbatches and {dict(options)} has more than "
            f"{MAX_ACTIONS:,} actions; use fewer of them"
        )
    return schedule(name, ranks, microbatches, **dict(options))


def schedule_of(request: ScheduleRequest, panel: PanelRequest, synthesized: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule of a panel; `synthesized` has the results of finished searches."""
    if panel.family == SYNTHESIZED:
        result = synthesized.get(panel.job) or (unpack_schedule(panel.packed) if panel.packed else None)
        if result is None:
            lost = "this studio does not have the synthesized schedule of this address; " if panel.job else ""
            raise ScheduleError(f"{lost}press Synthesize to search for a schedule for these costs")
        if (result.ranks, result.microbatches) != (request.ranks, request.microbatches):
            raise ScheduleError(
                f"this schedule was synthesized for {result.ranks} ranks and {result.microbatches} microbatches; press "
                "Synthesize to search again"
            )
        return result
    known = families().get(panel.family)
    options = {name: value for name, value in panel.options.items() if known is None or name in known.options}
    return _schedule(panel.family, request.ranks, request.microbatches, tuple(sorted(options.items())))


def timeline_of(request: ScheduleRequest, panel: PanelRequest, synthesized: Mapping[str, Schedule]) -> Timeline:
    """Return the simulated step of a panel."""
    built = schedule_of(request, panel, synthesized)
    return simulate(built, request.costs.make(request.ranks, max(1, built.stages // request.ranks)))


def simulated(request: ScheduleRequest, synthesized: Mapping[str, Schedule]) -> dict[str, Any]:
    """Return the times of every panel, with the structures that the page lacks; errors stand in their panel.

    >>> request = read_request({"ranks": 2, "microbatches": 4, "panels": [{"family": "1f1b"}, {"family": "dualpipe"}]})
    >>> answer = simulated(request, {})["panels"]
    >>> answer[0]["times"]["makespan"], answer[0]["structure"]["stages"]
    (15.0, 2)
    >>> simulated(read_request({"ranks": 3, "microbatches": 4, "panels": [{"family": "dualpipe"}]}), {})["panels"]
    [{'error': 'dualpipe needs an even number of ranks, got 3; nearest: 2'}]
    """
    panels: list[dict[str, Any]] = []
    for panel in request.panels:
        try:
            timeline = timeline_of(request, panel, synthesized)
        except StagelineError as error:
            panels.append({"error": str(error)})
            continue
        options = ",".join(f"{name}={value}" for name, value in sorted(timeline.schedule.options.items()))
        synthesis = f"{panel.job}/{crc32(panel.packed.encode())}"
        identity = f"{panel.family}/{synthesis}/{request.ranks}/{request.microbatches}/{options}"
        answer: dict[str, Any] = {"id": identity, "times": times_of(timeline, idle=panel.idle)}
        if panel.known != identity:
            answer["structure"] = structure_of(timeline)
        panels.append(answer)
    return {"panels": panels}

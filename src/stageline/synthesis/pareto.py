"""`pareto`: the shortest schedule for each of several memory caps, compared with the named families.

Each cap starts from the schedule of the cap below it, so more memory never gives a longer step. A lower bound for a cap
holds for all smaller ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stageline.common.errors import StagelineError, shorten
from stageline.common.units import Size, parse_sizes
from stageline.schedules.placement import Placement
from stageline.schedules.registry import families, whole
from stageline.schedules.registry import schedule as build_schedule
from stageline.synthesis.baselines import objective_of
from stageline.synthesis.problem import SLACK, Objective, Problem, problem_of
from stageline.synthesis.search import SearchProgress
from stageline.synthesis.synthesize import Synthesis, synthesize
from stageline.timeline.costs import Costs
from stageline.timeline.draw.tradeoff import Mark, tradeoff_html, tradeoff_svg
from stageline.timeline.simulate import simulate


@dataclass(frozen=True)
class FamilyPoint:
    """A named family: its peak memory on a rank, and its objective value."""

    name: str
    memory: float
    value: float
    chunks: int
    weight_copies: int
    in_placement: bool
    """Whether it has the placement of the curve; if not, it may lie below the curve."""


@dataclass(frozen=True)
class ParetoPoint:
    """The schedule synthesized for one memory cap."""

    cap: float
    synthesis: Synthesis


@dataclass(frozen=True)
class ParetoCurve:
    """Memory against time: one synthesized schedule per cap, and every named family that can be built."""

    objective: Objective
    points: tuple[ParetoPoint, ...]
    """From the smallest cap to the largest; the objective value never increases."""
    families: tuple[FamilyPoint, ...]
    """From the smallest memory to the largest."""

    def value_at(self, memory: float) -> float | None:
        """Return the objective value of the curve at a memory size; None below its smallest cap."""
        values = [point.synthesis.achieved for point in self.points if point.cap <= memory * (1 + SLACK)]
        return min(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the schedules."""
        return {
            "objective": self.objective,
            "points": [{"cap": point.cap, **point.synthesis.to_json()} for point in self.points],
            "families": [vars(family) for family in self.families],
        }

    def svg(self) -> str:
        """Return a picture: the curve, its lower bound, and the families as points."""
        return tradeoff_svg(*self._drawing())

    def html(self, title: str | None = None) -> str:
        """Return a self-contained page with the picture and the table of its points."""
        return tradeoff_html(*self._drawing(), title=title or f"Memory against {self.objective}")

    def _drawing(self) -> tuple[list[tuple[float, float, float]], list[Mark], str]:
        curve = [(point.cap, point.synthesis.achieved, point.synthesis.lower_bound) for point in self.points]
        marks = [Mark(family.name, family.memory, family.value, family.in_placement) for family in self.families]
        return curve, marks, self.objective


def pareto(
    costs: Costs,
    ranks: int,
    microbatches: int,
    *,
    caps: Sequence[Size] | None = None,
    points: int = 8,
    chunks: int = 1,
    placement: str = "loop",
    objective: str = "makespan",
    split: bool | None = None,
    time_limit: float = 2.0,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: Callable[[float, SearchProgress], None] | None = None,
) -> ParetoCurve:
    """Synthesize a schedule for each of several memory caps, and place the named families beside them.

    `caps` are memory caps of a rank, in the unit of the costs. By default there are about `points` of them, from the
    smallest that allows a schedule to two microbatches per rank, and one for the memory of each family in this
    placement. `time_limit` applies to each cap, and `progress` is called with the cap too; the other arguments are
    those of `synthesize`.

    >>> import stageline as sl
    >>> costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    >>> curve = sl.pareto(costs, ranks=4, microbatches=8, caps=[4, 5, 7], time_limit=20)
    >>> [(point.cap, point.synthesis.achieved) for point in curve.points]
    [(4.0, 278.0), (5.0, 265.0), (7.0, 257.0)]
    >>> [(family.memory, family.value) for family in curve.families if family.name == "zb-h1"]
    [(4.0, 278.0)]
    """
    problem = problem_of(costs, ranks, microbatches, None, chunks, placement, objective, split)
    named = _family_points(problem)
    count = whole("pareto", "points", points)
    limits = _default_caps(problem, named, count) if caps is None else _checked_caps(caps)
    curve: list[ParetoPoint] = []
    for cap in limits:
        synthesis = synthesize(
            costs,
            ranks,
            microbatches,
            memory=cap,
            chunks=chunks,
            placement=problem.pattern,
            objective=objective,
            split=split,
            time_limit=time_limit,
            tolerance=tolerance,
            seed=seed,
            start=curve[-1].synthesis.schedule if curve else None,
            progress=_with_cap(progress, cap),
        )
        curve.append(ParetoPoint(cap, synthesis))
        if synthesis.was_interrupted:
            break
    return ParetoCurve(problem.objective, tuple(_shared(curve)), tuple(named))


def _with_cap(
    progress: Callable[[float, SearchProgress], None] | None, cap: float
) -> Callable[[SearchProgress], None] | None:
    return None if progress is None else lambda state: progress(cap, state)


def _shared(curve: list[ParetoPoint]) -> list[ParetoPoint]:
    """Give every cap the schedules that fit it and the lower bounds that hold for it, of larger caps too."""
    shared = curve[-1:]
    for point in reversed(curve[:-1]):
        above, synthesis = shared[0].synthesis, point.synthesis
        fits = max(above.timeline.peak_memory) <= point.cap * (1 + SLACK)
        if fits and above.achieved < synthesis.achieved:
            synthesis = replace(above, lower_bound=synthesis.lower_bound, named=synthesis.named)
        bound = min(synthesis.achieved, max(synthesis.lower_bound, above.lower_bound))
        shared.insert(0, ParetoPoint(point.cap, replace(synthesis, lower_bound=bound)))
    return shared


def _checked_caps(caps: Sequence[Size]) -> list[float]:
    try:
        sizes = np.asarray(parse_sizes(caps), dtype=np.float64)
    except (TypeError, ValueError):
        sizes = np.zeros((0, 0))
    if sizes.ndim != 1 or not len(sizes) or not (sizes >= 0).all():
        raise StagelineError(f"caps must be memory sizes like 4,6,8 or 16GiB,24GiB, got {shorten(caps)}")
    return sorted({float(size) for size in sizes})


def _default_caps(problem: Problem, named: list[FamilyPoint], points: int) -> list[float]:
    """Return caps in equal ratios, in whole microbatches where possible, and the memory of the families."""
    least = max(problem.least_memory)
    microbatch = max(sum(max(problem.activation[stage]) for stage in stages) for stages in problem.stages_of)
    most = max(least, microbatch * min(problem.microbatches, 2 * problem.ranks))
    caps = {float(cap) for cap in np.geomspace(least, most, max(points, 1))} if least > 0 else {most}
    if microbatch > 0:
        caps = {max(least, round(cap / microbatch) * microbatch) for cap in caps}
    caps |= {family.memory for family in named if family.in_placement and least <= family.memory <= most}
    return sorted(caps)


def _family_points(problem: Problem) -> list[FamilyPoint]:
    """Simulate every training family; those with more stages per rank cut each stage into equal parts."""
    ranks, count = problem.ranks, problem.microbatches
    family_points = []
    for name, family in families().items():
        options = {"chunks": problem.chunks} if "chunks" in family.options and problem.chunks > 1 else {}
        try:
            schedule = build_schedule(name, ranks, count, **options)
            chunks, rest = divmod(schedule.stages, ranks * problem.chunks)
            if rest or not schedule.training:
                continue
            timeline = simulate(schedule, problem.costs.refined(chunks))
        except StagelineError:
            continue
        expected = Placement.of_pattern(problem.pattern, ranks, problem.chunks)
        family_points.append(
            FamilyPoint(
                name,
                max(timeline.peak_memory),
                objective_of(problem, timeline),
                schedule.stages // ranks,
                schedule.placement.directions,
                schedule.placement.table.tolist() == expected.table.tolist(),
            )
        )
    return sorted(family_points, key=lambda point: (point.memory, point.value))

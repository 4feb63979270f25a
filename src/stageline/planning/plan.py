"""`plan`: the fastest way to train a model on so many ranks that fits their memory, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stageline.common.checked_json import NonNegative, PositiveInt
from stageline.common.units import Size, parse_size
from stageline.model.profile.profile import Profile
from stageline.planning.advice import nothing_fits
from stageline.planning.memory import RankMemory
from stageline.planning.request import (
    SYNTHESIZED,
    again_of,
    bytes_of,
    caps_of,
    check_sizes,
    names_of,
    one_of,
    positive,
    sizes_of,
    splits_of,
    states_of,
)
from stageline.planning.search import Search
from stageline.planning.stage_costs import Again, Links
from stageline.planning.trial import Asked, Found, place_of
from stageline.schedules.registry import schedule, whole
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.timeline.costs import Costs, PerPair
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline, share_above

if TYPE_CHECKING:
    from stageline.model.staged import Staged


@dataclass(frozen=True)
class Alternative:
    """Another way to train, and what it would take."""

    schedule: str
    chunks: PositiveInt
    microbatches: PositiveInt
    layers_per_stage: tuple[PositiveInt, ...]
    recompute: Again
    seconds: NonNegative
    bubble: NonNegative
    memory: NonNegative
    """The bytes of the fullest rank."""
    rank: int
    """Which that is."""
    fits: bool

    @classmethod
    def of(cls, found: Found) -> Alternative:
        """What a search found, shortly."""
        totals = [rank.total for rank in found.memory]
        fullest = max(range(len(totals)), key=totals.__getitem__)
        return cls(
            found.name, found.shape.chunks, found.microbatches, found.counts, found.again, found.seconds,
            found.bubble, totals[fullest], fullest, found.fits,
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How to train a model: the cut, the microbatches, what is computed once more, the order; and what it will take.

    >>> import torch, stageline as sl
    >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    >>> found = sl.plan(model, torch.ones(4, 16), ranks=2, microbatches=4, time_limit=0.5)
    >>> found.microbatches, sum(found.layers_per_stage), found.recompute
    (4, 8, 'none')
    >>> pipe = sl.Pipeline(found.split(model), loss_fn=nn.functional.mse_loss, schedule=found.schedule)
    >>> pipe.step(torch.ones(16, 16), torch.ones(16, 16)).microbatches
    4
    """

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    """How many units every stage has."""
    recompute: Again
    """What `Pipeline(recompute=…)` takes: "none", "stage", or the names of units."""
    costs: Costs
    """Of the stages, in seconds and bytes."""
    memory: tuple[RankMemory, ...]
    """The most bytes of every rank, in parts."""
    caps: tuple[float, ...] | None
    """The bytes that every rank may hold, where there is a limit."""
    bound: float | None
    """No order of this cut takes less, where that is known."""
    alternatives: tuple[Alternative, ...]
    """What else was simulated: those that fit by their time, then those that do not."""
    samples: int
    """In a microbatch."""
    names: tuple[str, ...]
    """Of the units."""
    notes: tuple[str, ...] = ()
    """What one should know of how it was found."""
    timeline: Timeline = field(init=False)
    """The planned step."""

    def __post_init__(self) -> None:
        """Simulate the step."""
        object.__setattr__(self, "timeline", simulate(self.schedule, self.costs))

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return self.schedule.ranks

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return self.schedule.microbatches

    @property
    def chunks(self) -> int:
        """How many stages a rank holds."""
        return self.schedule.chunks

    @property
    def step_seconds(self) -> float:
        """How long a step is expected to take: its makespan."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The share of the makespan that the busiest rank does not compute."""
        return share_above(self.timeline.makespan, self.timeline.ideal)

    @property
    def gap(self) -> float | None:
        """How much of the bound the step is above it, at most: 0 where no order of this cut is better."""
        if self.bound is None:
            return None
        above = self.step_seconds - self.bound
        return above / self.bound if self.bound > 0 and above > 1e-9 * self.bound else 0.0

    def split(self, model: nn.Module | Callable[[], nn.Module], example: Any = None) -> Staged:
        """Cut the model as planned, between the units that were profiled, which the plan knows by name.

        `example` is needed where the forward uses weights of a unit outside of it.
        """
        from stageline.model.split import split, split_by_units

        if not self.names:
            return split(model, self.schedule.stages, layers_per_stage=self.layers_per_stage, example=example)
        return split_by_units(model, self.names, self.layers_per_stage, example)

    def explain(self, rows: int = 12) -> str:
        """Say why this and not the next best: what it takes, and a table of the alternatives."""
        from stageline.planning.explain import explain

        return explain(self, rows)

    def write(self, path: str | Path) -> None:
        """Write it as JSON, for `sl.read_plan`."""
        from stageline.planning.io import write_plan

        write_plan(self, path)

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain data: what `write` writes."""
        from stageline.planning.io import to_json

        return to_json(self)

    def __repr__(self) -> str:
        """Show what people ask for first."""
        peak = max(rank.total for rank in self.memory)
        return (
            f"<Plan: {self.schedule.name}, {self.ranks} ranks × {self.chunks}, {self.microbatches} microbatches, "
            f"{1e3 * self.step_seconds:.4g} ms, bubble {self.bubble:.1%}, {peak / 2**30:.3g} GiB>"
        )


def plan(
    model: nn.Module | None = None,
    example: Any = None,
    *,
    ranks: int,
    batch: int | None = None,
    microbatches: int | None = None,
    memory: Size | Sequence[Size] | None = None,
    profile: Profile | Mapping[int, Profile] | None = None,
    samples: int | None = None,
    recompute: Again = "auto",
    schedule: str | Sequence[str] | Schedule = "auto",
    chunks: int | None = None,
    split: str = "time",
    layers_per_stage: Sequence[int] | None = None,
    transfer: PerPair = 0.0,
    bandwidth: PerPair | str | None = None,
    parameter_bytes: float | None = None,
    gradient_bytes_per_parameter: float | None = None,
    optimizer_bytes_per_parameter: float = 8.0,
    interlock: bool = False,
    time_limit: float = 5.0,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Find the fastest way to train a model on so many ranks that fits their memory.

    `example` is one microbatch, and `microbatches` says how many of them a step has. Or `batch` says how many samples a
    step has: then the number of microbatches is chosen among its divisors, and the model is measured on fewer samples
    of the example too. Instead of model and example, `profile` is what `sl.profile` measured, on whatever machine, or
    several by their samples; `samples` says how many one alone was measured with, where `batch` is given.

    `memory` is what a rank may hold, in bytes or as text like "24GiB", or one for each; where the model is on a GPU,
    that is what it has unless given. Parameters, gradients, the optimizer's state (8 bytes for a parameter: AdamW in
    float32), activations and messages count; with `interlock` also what `Pipeline.run` keeps to take a step back.
    `recompute` is "auto" (units or stages where memory asks for it), "none", "stage" or names of units. `schedule` may
    name one family or several, or be a schedule whose cut is looked for; `chunks` is how many stages a rank has;
    `split` is what the cut balances ("time", "parameters" or "layers"), or `layers_per_stage` says it. Messages take
    `transfer` seconds, and their bytes over `bandwidth`, one number or one for each pair of ranks. The search takes
    about `time_limit` seconds after what is measured.

    >>> import torch, stageline as sl
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    >>> found = sl.plan(model, torch.ones(4, 32), ranks=3, batch=16, schedule=["1f1b", "gpipe"], repeats=1)
    >>> found.schedule.name in ("1f1b", "gpipe"), found.samples * found.microbatches
    (True, 16)
    >>> sl.plan(ranks=4, batch=8)
    Traceback (most recent call last):
    stageline.StagelineError: plan needs a model and an example, one microbatch to run it on, or profile=
    """
    ranks = whole("plan", "ranks", ranks)
    tell = progress or (lambda text: None)
    several = batch is not None
    sizes = sizes_of(model, example, profile, samples, several, microbatches, repeats, tell)
    splits = splits_of(sizes, batch, microbatches)
    if parameter_bytes is None:
        parameter_bytes = 4.0 if model is None else bytes_of(model)
    asked = Asked(
        sizes,
        ranks,
        splits,
        caps=caps_of(memory, ranks, model),
        states=states_of(parameter_bytes, gradient_bytes_per_parameter, optimizer_bytes_per_parameter, interlock),
        links=Links(transfer, parse_size(bandwidth, "bandwidth") if isinstance(bandwidth, str) else bandwidth),
        again=again_of(recompute, sizes),
        names=names_of(schedule),
        given=schedule if isinstance(schedule, Schedule) else None,
        chunks=None if chunks is None else whole("plan", "chunks", chunks),
        by=one_of("split", split, ("time", "parameters", "layers")),
        pinned=None if layers_per_stage is None else tuple(int(count) for count in layers_per_stage),
        synthesis=schedule == "auto" or (not isinstance(schedule, Schedule) and SYNTHESIZED in schedule),
        time_limit=positive("time_limit", time_limit),
        seed=seed,
    )
    check_sizes(asked)
    return find(asked, tell)


def find(asked: Asked, tell: Callable[[str], None] = lambda text: None) -> Plan:
    """The best plan for what is asked, or an error that says what to change."""
    search = Search(asked, tell)
    search.run()
    best = search.best
    if best is None:
        raise nothing_fits(search, tell)
    made = best.schedule or schedule(best.name, asked.ranks, best.microbatches, **best.options)
    verify(made)
    notes = [asked.sizes.note([samples for _, samples in asked.splits])]
    notes += ["the time limit ended the search before all was tried"] if search.was_cut else []
    others = [each for each in search.found if each is not best]
    return Plan(
        schedule=made,
        layers_per_stage=best.counts,
        recompute=best.again,
        costs=search.prices.costs(place_of(best)),
        memory=best.memory,
        caps=asked.caps,
        bound=search.floor(best),
        alternatives=tuple(_distinct(map(Alternative.of, others), Alternative.of(best))),
        samples=best.samples,
        names=tuple(layer.name for layer in asked.sizes.any.layers),
        notes=tuple(note for note in notes if note),
    )


def _distinct(found: Any, best: Alternative) -> list[Alternative]:
    """The best cut of every kind of plan; the chosen kind is not among its own alternatives."""
    kinds: dict[Any, Alternative] = {}
    for each in found:
        again = each.recompute if isinstance(each.recompute, str) else "units"
        kinds.setdefault((each.schedule, each.chunks, each.microbatches, again), each)
    chosen = best.recompute if isinstance(best.recompute, str) else "units"
    kinds.pop((best.schedule, best.chunks, best.microbatches, chosen), None)
    return list(kinds.values())

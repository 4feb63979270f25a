"""Verification: check all rules, and return a certificate of what holds for a schedule that passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError, shorten
from stageline.common.units import format_sizes
from stageline.schedules import action as kinds
from stageline.schedules.channels import Channel, Channels, least_look_ahead
from stageline.schedules.rules import RULES
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import most_gathered


@dataclass(frozen=True, eq=False)
class Certificate:
    """The properties of a schedule that passed all rules.

    >>> import stageline as sl
    >>> c = sl.verify(sl.schedule("zb-h1", ranks=2, microbatches=4))
    >>> c.look_ahead, c.receive_buffers, c.peak_activations, c.peak_residues, c.in_order
    (1, (2, 2), (2, 1), (1, 2), True)
    >>> print(c.channels[0])
    1 → 0 backward: 1I0 1I1 1I2 1I3
    """

    schedule: Schedule
    rules: tuple[str, ...]
    """The rules it passed; "channels" is optional, and missing if messages are reordered. "sharding" is missing if no
    stage is sharded."""
    channels: Channels
    """The order of the messages on each channel."""
    look_ahead: int
    """The minimum number of receives to post ahead on every channel so that blocking sends cannot deadlock."""
    receive_buffers: tuple[int, ...]
    """The receive buffers that each rank needs for it: look-ahead + 1 per incoming channel, or the number of its
    messages if that is smaller; more if early messages are parked."""
    peak_activations: tuple[int, ...]
    """For each rank, the maximum number of (stage, microbatch) pairs between the start of F and the end of B or I (in
    inference, the end of F)."""
    peak_residues: tuple[int, ...]
    """For each rank, the maximum number of (stage, microbatch) pairs between the end of I and the end of W."""
    peak_held: tuple[int, ...]
    """For each rank, the maximum of both together."""
    in_order: bool
    """Whether the gradients of every stage are computed and accumulated in microbatch order: the stage is on one rank,
    its B and I together run in that order, and so do its B and W together."""
    peak_gathered: tuple[int, ...] = ()
    """For each rank, the maximum number of stages whose parameters are gathered; empty if no stage is sharded."""

    @property
    def in_channel_order(self) -> bool:
        """Whether the messages of every channel are used in the order in which they were sent."""
        return not self.channels.reordered.any()

    @property
    def reordered_channels(self) -> tuple[Channel, ...]:
        """The channels whose messages are used out of order."""
        return tuple(self.channels[index] for index in np.flatnonzero(self.channels.reordered).tolist())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.schedule.ranks,
            "stages": self.schedule.stages,
            "microbatches": self.schedule.microbatches,
            "actions": self.schedule.num_actions,
            "rules": list(self.rules),
            "look_ahead": self.look_ahead,
            "receive_buffers": list(self.receive_buffers),
            "peak_activations": list(self.peak_activations),
            "peak_residues": list(self.peak_residues),
            "peak_held": list(self.peak_held),
            **({"peak_gathered": list(self.peak_gathered)} if self.peak_gathered else {}),
            "in_order": self.in_order,
            "in_channel_order": self.in_channel_order,
            "channels": [
                {
                    "source": channel.source,
                    "target": channel.target,
                    "traffic": channel.traffic,
                    "messages": [str(message) for message in channel.messages],
                    **({"taken": [str(message) for message in channel.taken]} if channel.is_reordered else {}),
                }
                for channel in self.channels
            ],
        }

    def __str__(self) -> str:
        schedule, channels, reordered = self.schedule, self.channels, self.reordered_channels
        order = "each taken in the order sent"
        if reordered:
            ends = ", ".join(f"{channel.source} → {channel.target} {channel.traffic}" for channel in reordered[:4])
            order = f"those of {len(reordered)} taken out of order: {ends}{', …' if len(reordered) > 4 else ''}"
        lines = [
            f"{schedule.name}: {format_sizes(schedule.ranks, schedule.stages, schedule.microbatches)}, "
            f"{schedule.num_actions} actions",
            f"  passes            {', '.join(self.rules)}",
            f"  channels          {len(channels)}, with {len(channels.senders)} messages, {order}",
            f"  look-ahead        {self.look_ahead} (receives to post ahead so that blocking sends cannot deadlock)",
            f"  receive buffers   {_per_rank(self.receive_buffers)}",
            f"  peak activations  {_per_rank(self.peak_activations)}",
            f"  peak residues     {_per_rank(self.peak_residues)} (between I and W)",
            *([f"  gathered stages   {_per_rank(self.peak_gathered)}"] if self.peak_gathered else []),
            f"  in order          {'yes' if self.in_order else 'no'} "
            "(gradients of every stage added in the order of the microbatches)",
        ]
        return "\n".join(lines)


def _per_rank(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]} on every rank"
    shown = " ".join(map(str, values[:16]))
    return f"{shown}{' …' if len(values) > 16 else ''} (rank 0, 1, …)"


def verify(schedule: Schedule) -> Certificate:
    """Prove that a schedule is complete and free of deadlocks; raise `ScheduleError` if it is not.

    >>> import stageline as sl
    >>> print(sl.verify(sl.schedule("1f1b", ranks=4, microbatches=8)))
    1f1b: 4 ranks, 4 stages, 8 microbatches, 64 actions
      passes            placement, known, owner, overlap, complete, progress, channels
      channels          6, with 48 messages, each taken in the order sent
      look-ahead        1 (receives to post ahead so that blocking sends cannot deadlock)
      receive buffers   2 4 4 2 (rank 0, 1, …)
      peak activations  4 3 2 1 (rank 0, 1, …)
      peak residues     0 on every rank (between I and W)
      in order          yes (gradients of every stage added in the order of the microbatches)
    """
    ensure_progress(schedule)
    channels = schedule.channels
    skipped = {"channels"} if channels.reordered.any() else set()
    skipped |= {"sharding"} if schedule.sharding is None else set()
    look_ahead = least_look_ahead(schedule)
    activations, residues, held = _peaks(schedule)
    buffers = np.bincount(channels.targets(), weights=channels.buffers(look_ahead), minlength=schedule.ranks)
    return Certificate(
        schedule=schedule,
        rules=tuple(name for name in RULES if name not in skipped),
        channels=channels,
        look_ahead=look_ahead,
        receive_buffers=tuple(int(count) for count in buffers),
        peak_activations=activations,
        peak_residues=residues,
        peak_held=held,
        in_order=_in_order(schedule),
        peak_gathered=() if schedule.sharding is None else most_gathered(schedule.sharding),
    )


def ensure_progress(schedule: Schedule) -> None:
    """Check the rules that simulation and execution rely on, once per schedule."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, as sl.schedule and sl.read_schedule return, got {shorten(schedule)}")
    if not schedule.__dict__.get("_progresses"):
        for name, check in RULES.items():
            if name != "channels":
                check(schedule)
        schedule.__dict__["_progresses"] = True


def _peaks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the maximum number of activations, residues and both that each rank holds."""
    by_rank = []
    for part in schedule.slices():
        kind = schedule.action_kinds[part]
        freed = ((kind == kinds.B) | (kind == kinds.I) | (not schedule.training)).astype(np.int64)
        activations = np.cumsum((kind == kinds.F) - freed) + freed  # held until the end of the action
        head = np.flatnonzero(schedule.pair_starts[part])
        activations[head] = activations[head + 1]
        deferred = (kind == kinds.I).astype(np.int64) - (kind == kinds.W)
        residues = np.cumsum(deferred) - deferred  # held before the action
        by_rank.append((activations.max(initial=0), residues.max(initial=0), (activations + residues).max(initial=0)))
    return tuple(tuple(int(peak) for peak in peaks) for peaks in zip(*by_rank, strict=True))


def _in_order(schedule: Schedule) -> bool:
    """Whether each stage computes (B, I) and accumulates (B, W) its gradients in microbatch order, on one rank.

    B and W accumulate the weight gradients, so for a stage that mixes whole and split backwards, both count.
    """
    kind = schedule.action_kinds
    return all(runs_in_order(schedule, (kind == kinds.B) | (kind == half)) for half in (kinds.I, kinds.W))


def runs_in_order(schedule: Schedule, selected: NDArray[np.bool_]) -> bool:
    """Whether every stage runs the selected actions in microbatch order, on one rank."""
    seen: set[int] = set()
    for part in schedule.slices():
        index = np.flatnonzero(selected[part])
        stage, microbatch = schedule.stage_ids[part][index], schedule.microbatch_ids[part][index]
        order = np.argsort(stage, kind="stable")
        same_stage = np.diff(stage[order]) == 0
        own = set(np.flatnonzero(np.bincount(stage)).tolist())  # np.unique imports numpy.ma, which takes long
        if own & seen or ((np.diff(microbatch[order]) < 0) & same_stage).any():
            return False
        seen |= own
    return True

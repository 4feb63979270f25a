"""What verification found out about a schedule that passed: data that prints and goes into JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stageline.common.errors import ScheduleError, shorten
from stageline.schedules import action as kinds
from stageline.schedules.channels import Channel, Channels, least_look_ahead
from stageline.schedules.rules import RULES
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is true of a schedule that passed every rule.

    >>> import stageline as sl
    >>> c = sl.verify(sl.schedule("zb-h1", ranks=2, microbatches=4))
    >>> c.look_ahead, c.receive_buffers, c.peak_activations, c.peak_residues, c.in_order
    (1, (2, 2), (2, 1), (1, 2), True)
    >>> print(c.channels[0])
    1 → 0 backward: 1I0 1I1 1I2 1I3
    """

    schedule: Schedule
    rules: tuple[str, ...]
    """The rules it passed; "channels" is a fact and not a condition, and is missing where messages are reordered."""
    channels: Channels
    """The order of the messages on each channel; `channel.is_reordered` where they are taken in another one."""
    look_ahead: int
    """The fewest receives to post ahead on every channel so that blocking sends cannot deadlock."""
    receive_buffers: tuple[int, ...]
    """What that costs each rank: look-ahead + 1 on every channel that leads to it, or its messages if fewer; and more
    where messages that come early are parked."""
    peak_activations: tuple[int, ...]
    """The most (stage, microbatch) pairs of each rank whose F has begun and whose B or I has not ended (in inference:
    whose F has not ended)."""
    peak_residues: tuple[int, ...]
    """The most (stage, microbatch) pairs of each rank whose I has ended and whose W has not."""
    peak_held: tuple[int, ...]
    """The most of both together."""
    in_order: bool
    """Whether every stage's gradients are computed and added in the order of the microbatches: it lives on one rank,
    its B and I together run in that order, and so do its B and W together."""

    @property
    def in_channel_order(self) -> bool:
        """Whether every rank takes the messages of each channel in the order in which they were sent."""
        return not self.channels.reordered.any()

    @property
    def reordered_channels(self) -> tuple[Channel, ...]:
        """The channels whose messages are taken in another order than they were sent; early ones are parked."""
        return tuple(self.channels[index] for index in np.flatnonzero(self.channels.reordered).tolist())

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain data."""
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
        """Say it in a few lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        schedule = self.schedule
        yield (
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, "
            f"{schedule.microbatches} microbatches, {schedule.num_actions} actions"
        )
        yield f"  passes            {', '.join(self.rules)}"
        count = f"{len(self.channels)}, with {len(self.channels.senders)} messages"
        other = self.reordered_channels
        yield f"  channels          {count}, " + (
            f"those of {len(other)} taken in another order than sent: {_ends(other)}"
            if other
            else "each taken in the order sent"
        )
        yield f"  look-ahead        {self.look_ahead} (receives to post ahead so that blocking sends cannot deadlock)"
        yield f"  receive buffers   {_per_rank(self.receive_buffers)}"
        yield f"  peak activations  {_per_rank(self.peak_activations)}"
        yield f"  peak residues     {_per_rank(self.peak_residues)} (between I and W)"
        order = "yes" if self.in_order else "no"
        yield f"  in order          {order} (gradients of every stage added in the order of the microbatches)"


def _ends(channels: Sequence[Channel]) -> str:
    shown = ", ".join(f"{channel.source} → {channel.target} {channel.traffic}" for channel in channels[:4])
    return shown + (", …" if len(channels) > 4 else "")


def _per_rank(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]} on every rank"
    shown = " ".join(map(str, values[:16]))
    return f"{shown}{' …' if len(values) > 16 else ''} (rank 0, 1, …)"


def verify(schedule: Schedule) -> Certificate:
    """Prove that a schedule is complete and cannot deadlock, or raise `ScheduleError` saying why not.

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
    look_ahead = least_look_ahead(schedule)
    activations, residues, held = _peaks(schedule)
    buffers = np.bincount(channels.targets(), weights=channels.buffers(look_ahead), minlength=schedule.ranks)
    return Certificate(
        schedule=schedule,
        rules=tuple(name for name in RULES if name != "channels" or not channels.reordered.any()),
        channels=channels,
        look_ahead=look_ahead,
        receive_buffers=tuple(int(count) for count in buffers),
        peak_activations=activations,
        peak_residues=residues,
        peak_held=held,
        in_order=_in_order(schedule),
    )


def ensure_progress(schedule: Schedule) -> None:
    """Ask the rules that a simulation and a run rely on, once per schedule."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, as sl.schedule or sl.read_schedule make it, got {shorten(schedule)}")
    if not schedule.__dict__.get("_progresses"):
        for name, check in RULES.items():
            if name != "channels":
                check(schedule)
        schedule.__dict__["_progresses"] = True


def _peaks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The most activations, residues and both that each rank holds while it runs any of its actions."""
    found = []
    for mine in schedule.slices():
        plain = schedule.action_kinds[mine]
        gives_back = ((plain == kinds.B) | (plain == kinds.I) | (not schedule.training)).astype(np.int64)
        activations = np.cumsum((plain == kinds.F) - gives_back) + gives_back  # held until the action's end
        head = np.flatnonzero(schedule.pair_starts[mine])
        activations[head] = activations[head + 1]
        puts_off = (plain == kinds.I).astype(np.int64) - (plain == kinds.W)
        residues = np.cumsum(puts_off) - puts_off  # what there was before the action
        found.append((activations.max(initial=0), residues.max(initial=0), (activations + residues).max(initial=0)))
    return tuple(tuple(int(peak) for peak in peaks) for peaks in zip(*found, strict=True))


def _in_order(schedule: Schedule) -> bool:
    """Whether each stage computes (B, I) and adds (B, W) its gradients in the order of the microbatches, on one rank.

    A B adds to the weights where it stands, a split backward where its W stands: of a stage that mixes them, neither
    the B nor the W alone tell the order of the additions.
    """
    plain = schedule.action_kinds
    for half in (kinds.I, kinds.W):
        index = np.flatnonzero((plain == kinds.B) | (plain == half))
        stage, microbatch = schedule.stage_ids[index], schedule.microbatch_ids[index]
        # Actions are numbered rank by rank, so a stage on two ranks is in order only if it happens to be so
        # rank after rank: between ranks there is no order, so that is ruled out below.
        order = np.argsort(stage, kind="stable")
        same = np.diff(stage[order]) == 0
        if (np.diff(microbatch[order])[same] < 0).any():
            return False
        rank = schedule.graph.rank[index][order]
        if (np.diff(rank)[same] != 0).any():
            return False
    return True

"""List scheduling in one pass: whenever a rank is free, it takes one of the actions that are ready.

A rank has lanes: sequences of forwards, or of backwards, that it runs in order. It checks the first action of each
lane, in the order that the rule sets, and fills gaps with weight gradients:

    free at t ──▶ has the input of the next I arrived?  run I
              ──▶ has the input of the next F arrived, and does it fit in memory?  run F
              ──▶ does a W fit before the next arrival, or does an F wait for memory?  run W
              ──▶ otherwise wait; the next arrival is known because its sender has started

Lanes keep a schedule valid. Within a stage they follow microbatch order, and where several stages share a channel all
ranks have the same lanes, so messages are received in the order in which they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.synthesis.problem import SLACK, Problem

Code: TypeAlias = int
"""An action as one integer: (kind × stages + stage) × microbatches + microbatch."""
Programs: TypeAlias = list[list[Code]]
"""The actions of every rank in order."""
EVENTS_PER_CHECK = 5000
"""How many events pass before the clock is read."""


@dataclass(frozen=True)
class PriorityRule:
    """How a rank chooses its next action. By default: I before F, F as early as memory allows, W in gaps."""

    ahead: tuple[float, ...] | None = None
    """Per rank, the maximum number of activations it holds (F started, I not finished)."""
    max_deferred: float = math.inf
    """The maximum number of weight gradients a rank defers."""
    patience: float | tuple[float, ...] = 0.0
    """A ready F yields to an I that arrives within this fraction of F's duration; one number, or one per rank."""
    gap: float | tuple[float, ...] = 1.0
    """A W runs if the next arrival is at least this fraction of its duration away; one number, or one per rank."""
    target: float = math.inf
    """The objective value to aim at: a rank idles before an arrival only while it can still end within this time."""
    alternate: bool = False
    """Whether, of an F and an I that are both ready, the one runs whose kind the rank did not run last."""
    forward_first: bool = False
    """Whether F runs before I if both are ready."""
    whole: bool = False
    """Whether backwards run whole (B) instead of split (I and W)."""
    group: int = 0
    """With several chunks: how many microbatches a chunk runs before the next chunk; 0 means one per rank.

    A negative value runs chunks along diagonals, with that many turns per microbatch.
    """
    order: tuple[int, ...] = (3, 2, 1, 0)
    """On a V placement: priority of F down (0), F up (1), B up (2) and B down (3); empty for shared lanes."""


def per_rank(value: float | tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return one value per rank."""
    return value if isinstance(value, tuple) else (value,) * ranks


@dataclass(frozen=True)
class ProgramPlan:
    """The programs of all ranks and their objective value."""

    programs: Programs
    value: float
    how: str
    """The method that produced it."""
    rule: PriorityRule | None = None
    schedule: Schedule | None = None
    """The schedule, if the programs alone do not describe it because it has overlapped pairs."""


def schedule_of(problem: Problem, programs: Programs) -> Schedule:
    """Convert programs to a schedule."""
    runs = []
    size = problem.stages * problem.microbatches
    for program in programs:
        codes = np.asarray(program, dtype=np.int64)
        rest = codes % size
        columns = (codes // size, rest // problem.microbatches, rest % problem.microbatches)
        runs.append(np.stack(columns, axis=1).astype(np.int32))
    return Schedule.from_runs(runs, problem.placement, name="synthesized")


class Board:
    """The tables of a problem, flattened and indexed by action code."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.size = problem.stages * problem.microbatches
        """Number of actions of one kind."""
        self.durations = [time for table in problem.times for row in table for time in row]
        self.transient = [size for table in problem.transients for row in table for size in row]
        self.activation, self.residue, self.forward_hop, self.backward_hop = (
            [value for row in table for value in row]
            for table in (problem.activation, problem.residue, problem.forward_hop, problem.backward_hop)
        )
        self.caps = [cap * (1 + SLACK) for cap in problem.caps]
        """Memory caps with rounding tolerance."""
        self.spare = [max(map(self._spare, stages)) for stages in problem.stages_of]
        """Memory that a rank leaves free when it runs an F, so that every backward can run."""

    def _spare(self, stage: int) -> float:
        problem = self.problem
        _, during_whole, during_input, during_weight = (np.array(table[stage]) for table in problem.transients)
        growth = np.subtract(problem.residue[stage], problem.activation[stage])
        need = during_whole if problem.split is False else np.maximum(during_input, growth + during_weight)
        return max(0.0, float(need.max()))

    def work(self, rank: int, whole: bool) -> float:
        """Return the total duration of the actions of a rank."""
        times = self.problem.times
        kinds_run = (kinds.F, kinds.B) if whole else (kinds.F, kinds.I, kinds.W)
        return sum(sum(times[kind][stage]) for kind in kinds_run for stage in self.problem.stages_of[rank])

    def lanes(self, rule: PriorityRule) -> list[list[list[Code]]]:
        """Return the lanes of every rank under a rule: forwards and backwards, split into down and up on a V."""
        problem = self.problem
        count = problem.microbatches
        backward_base = (kinds.B if rule.whole else kinds.I) * self.size
        forwards, backwards = self._common_order(rule.group)
        lanes_per_rank = []
        for stages in problem.stages_of:
            forward_codes = [(chunk, stages[chunk] * count + m) for chunk, m in forwards]
            backward_codes = [(chunk, backward_base + stages[chunk] * count + m) for chunk, m in backwards]
            if rule.order and problem.pattern == "v":
                # Messages down the ranks and messages up the ranks share no channel.
                lanes = [[code for chunk, code in forward_codes if chunk % 2 == direction] for direction in (0, 1)]
                lanes += [[code for chunk, code in backward_codes if chunk % 2 == direction] for direction in (1, 0)]
            else:
                lanes = [[code for _, code in lane] for lane in (forward_codes, backward_codes)]
            lanes_per_rank.append(lanes)
        return lanes_per_rank

    def _common_order(self, group: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the order of (chunk, microbatch) that all ranks share, for forwards and for backwards."""
        count, chunks, ranks = self.problem.microbatches, self.problem.chunks, self.problem.ranks
        size = min(group or ranks, count)
        last = max(count // size - 1, 0)  # a short last group joins the one before it

        def turn(m: int, chunks_before: int) -> tuple[int, ...]:
            if group < 0:
                # Along diagonals: a microbatch returns to a rank after as many turns as there are ranks.
                return -group * m + ranks * chunks_before, m
            return min(m // size, last), chunks_before, m

        pairs = [(chunk, m) for chunk in range(chunks) for m in range(count)]
        forwards = sorted(pairs, key=lambda pair: turn(pair[1], pair[0]))
        return forwards, sorted(pairs, key=lambda pair: turn(pair[1], chunks - 1 - pair[0]))


class _State:
    """The state of one pass: what every rank has run, holds, defers and waits for."""

    def __init__(self, board: Board, rule: PriorityRule) -> None:
        problem = board.problem
        self.board, self.rule = board, rule
        ranks = problem.ranks
        self.lanes = board.lanes(rule)
        self.is_v = len(self.lanes[0]) == 4
        self.order = rule.order if self.is_v else ((0, 1) if rule.forward_first else (1, 0))
        self.forwards = 2 if self.is_v else 1
        self.max_held = rule.ahead or (math.inf,) * ranks
        self.patience, self.gap = (per_rank(value, ranks) for value in (rule.patience, rule.gap))
        self.base = (kinds.B if rule.whole else kinds.I) * board.size
        self.arrival = [math.inf] * (self.base + board.size)
        self.arrival[: problem.microbatches] = [0.0] * problem.microbatches
        self.positions = [[0] * len(lanes) for lanes in self.lanes]
        self.deferred: list[list[Code]] = [[] for _ in range(ranks)]
        self.num_weights_run = [0] * ranks
        self.num_held = [0] * ranks
        self.level = [0.0] * ranks
        self.free = [0.0] * ranks
        self.first_start = [0.0] * ranks
        self.idle_left = [rule.target - board.work(rank, rule.whole) for rank in range(ranks)]
        """How long every rank may still idle if it is to reach the target."""
        self.counts_start = problem.objective == "makespan"
        """Whether the time before the first action counts as idle."""
        self.ran_forward = [False] * ranks
        self.programs: Programs = [[] for _ in range(ranks)]
        self.heap = [(0.0, rank) for rank in range(ranks)]

    def choose(self, now: float, rank: int) -> Code:
        """Return the action that a free rank runs now, or -1 to wait."""
        rule, board, positions, lanes = self.rule, self.board, self.positions[rank], self.lanes[rank]
        activation, transient, arrival = board.activation, board.transient, self.arrival
        spare, num_held, room = board.spare[rank], self.num_held[rank], board.caps[rank] - self.level[rank]
        num_deferred = len(self.deferred[rank]) - self.num_weights_run[rank]
        patience, next_arrival, next_backward = self.patience[rank], math.inf, math.inf
        blocked = False
        order = self.order
        if rule.alternate and not self.is_v:
            order = (1, 0) if self.ran_forward[rank] else (0, 1)
        for lane in order if num_deferred <= rule.max_deferred else ():
            position = positions[lane]
            if position == len(lanes[lane]):
                continue
            code = lanes[lane][position]
            arrives = arrival[code]
            if lane < self.forwards:
                need = activation[code] + max(transient[code], spare)
                if num_held >= self.max_held[rank] and (lane == 0 or not self.is_v):
                    continue
                if need > room and (num_held or num_deferred or activation[code] + transient[code] > room):
                    blocked |= arrives <= now
                    continue
                # If no microbatch can finish yet, leave room for the first one that comes back up.
                must_reserve = self.is_v and lane == 0 and positions[1] <= positions[3] and positions[1] < len(lanes[1])
                if must_reserve and need + activation[lanes[1][positions[1]]] > room:
                    continue
                if arrives <= now and patience and next_backward < now + patience * board.durations[code]:
                    continue
            else:
                next_backward = min(next_backward, arrives)
                key = code - self.base
                growth = 0.0 if rule.whole else board.residue[key] - activation[key]
                if max(transient[code], growth) > room:
                    blocked = True
                    continue
            if arrives <= now:
                positions[lane] += 1
                return code
            next_arrival = min(next_arrival, arrives)
        if num_deferred:
            code = self.deferred[rank][self.num_weights_run[rank]]
            wait = next_arrival - now
            has_gap = (
                blocked
                or num_deferred > rule.max_deferred
                or wait >= self.gap[rank] * board.durations[code]
                or wait > self.idle_left[rank]
            )
            if has_gap and transient[code] <= room:
                self.num_weights_run[rank] += 1
                return code
        return -1

    def commit(self, now: float, rank: int, code: Code) -> None:
        """Run an action: update the memory of its rank and the arrival time of its output."""
        board, problem = self.board, self.board.problem
        size, count = board.size, problem.microbatches
        end = now + board.durations[code]
        if not self.programs[rank]:
            self.first_start[rank] = now
        if self.programs[rank] or self.counts_start:
            self.idle_left[rank] -= now - self.free[rank]
        self.programs[rank].append(code)
        self.free[rank] = end
        heappush(self.heap, (end, rank))
        target = -1
        if code < size:
            self.ran_forward[rank] = True
            self.num_held[rank] += 1
            self.level[rank] += board.activation[code]
            target, arrives = code + count, end + board.forward_hop[code]
            if target >= size:
                target, arrives = self.base + code, end
        elif code < kinds.W * size:
            key = code - self.base
            self.ran_forward[rank] = False
            self.num_held[rank] -= 1
            self.level[rank] -= board.activation[key]
            if not self.rule.whole:
                self.level[rank] += board.residue[key]
                self.deferred[rank].append(kinds.W * size + key)
            if key >= count:
                target, arrives = code - count, end + board.backward_hop[key]
        else:
            self.level[rank] -= board.residue[code - kinds.W * size]
        if target >= 0:
            self.arrival[target] = arrives
            receiver = problem.rank_of[target % size // count]
            if receiver != rank:
                heappush(self.heap, (arrives, receiver))


def list_schedule(board: Board, rule: PriorityRule, is_over: Callable[[], bool] = lambda: False) -> ProgramPlan | None:
    """Schedule event by event with one rule; return None if memory leaves every rank blocked, or time is up."""
    state = _State(board, rule)
    heap, free = state.heap, state.free
    num_events = 0
    while heap:
        num_events += 1
        if num_events % EVENTS_PER_CHECK == 0 and is_over():
            return None
        now, rank = heappop(heap)
        if free[rank] <= now:
            code = state.choose(now, rank)
            if code >= 0:
                state.commit(now, rank, code)
    num_run = sum(map(len, state.programs))
    if num_run < board.size * (2 if rule.whole else 3):
        return None
    starts = state.first_start if board.problem.objective == "span" else [0.0] * len(free)
    value = max(end - start for start, end in zip(starts, free, strict=True))
    return ProgramPlan(state.programs, value, "list scheduling", rule)

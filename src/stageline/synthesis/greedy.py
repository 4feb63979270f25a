"""One pass of list scheduling: every rank takes, whenever it is free, one of the actions that are ready.

A rank has lanes: sequences of forwards, or of backwards, that it runs in their order. It looks at the first action of
each lane, in the order of the rule, and weight gradients fill what is left:

    free at t ──▶ is the next I here?  run it       ──▶ does the next F fit the memory, and is it here?  run it
              ──▶ is there time for a W before something arrives, or does an F wait for memory?  run a W
              ──▶ else wait: what arrives next is known, because its sender has begun

Lanes are what keeps a schedule valid: on a stage they are in the order of the microbatches, and where several stages
share a channel, all ranks have the same lanes, so that messages are taken in the order sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule
from stageline.synthesis.problem import SLACK, Problem

Code: TypeAlias = int
"""An action as one number: (kind × stages + stage) × microbatches + microbatch."""
Programs: TypeAlias = list[list[Code]]
"""The actions of every rank in their order."""


@dataclass(frozen=True)
class Rule:
    """How a rank chooses. The defaults run I before F, F as early as memory allows, and W where there is room."""

    ahead: tuple[float, ...] | None = None
    """For every rank, the most activations it holds (F begun, I not ended), beside its memory."""
    owed: float = math.inf
    """The most weight gradients that a rank puts off."""
    patience: float = 0.0
    """A ready F gives way to an I that arrives within this share of its time."""
    gap: float = 1.0
    """A W runs where the next arrival is at least this share of its time away."""
    forward_first: bool = False
    """Whether F goes before I where both are ready."""
    whole: bool = False
    """Whether backwards run as a whole."""
    group: int = 0
    """With several chunks: how many microbatches a chunk runs before the next chunk does; 0 is one per rank.

    Below 0 chunks are not run in groups but along diagonals, so many turns for a microbatch.
    """
    order: tuple[int, ...] = (3, 2, 1, 0)
    """On a V: which goes first of F down (0), F up (1), B up (2) and B down (3); none for one order of down and up."""


@dataclass(frozen=True)
class Plan:
    """The programs of all ranks and how long they take, by the objective."""

    programs: Programs
    value: float
    how: str
    """How it was found."""
    rule: Rule | None = None
    schedule: Schedule | None = None
    """The schedule itself, where it is more than its programs: some of its actions are overlapped pairs."""


def schedule_of(problem: Problem, programs: Programs, name: str = "synthesized") -> Schedule:
    """Make programs into a schedule."""
    runs = []
    size = problem.stages * problem.microbatches
    for program in programs:
        codes = np.asarray(program, dtype=np.int64)
        rest = codes % size
        columns = (codes // size, rest // problem.microbatches, rest % problem.microbatches)
        runs.append(np.stack(columns, axis=1).astype(np.int32))
    return Schedule.from_runs(runs, problem.placement, name=name)


@dataclass(frozen=True, eq=False)
class Board:
    """What every pass over a problem needs, laid out once: all tables by the number of the action."""

    problem: Problem

    @cached_property
    def size(self) -> int:
        """How many actions of one kind there are."""
        return self.problem.stages * self.problem.microbatches

    @cached_property
    def taken(self) -> list[float]:
        """The time of every action."""
        return [time for table in self.problem.times for row in table for time in row]

    @cached_property
    def transient(self) -> list[float]:
        """The memory of every action while it runs."""
        return [size for table in self.problem.transients for row in table for size in row]

    @cached_property
    def activation(self) -> list[float]:
        """The activation of every stage and microbatch."""
        return [size for row in self.problem.activation for size in row]

    @cached_property
    def residue(self) -> list[float]:
        """The residue of every stage and microbatch."""
        return [size for row in self.problem.residue for size in row]

    @cached_property
    def ahead(self) -> list[float]:
        """How long the output of every stage and microbatch travels."""
        return [time for row in self.problem.ahead for time in row]

    @cached_property
    def back(self) -> list[float]:
        """How long the gradient of every stage and microbatch travels."""
        return [time for row in self.problem.back for time in row]

    @cached_property
    def caps(self) -> list[float]:
        """The caps, with room for rounding."""
        return [cap * (1 + SLACK) for cap in self.problem.caps]

    @cached_property
    def spare(self) -> list[float]:
        """What a rank keeps free beside what it holds, so that every backward can run."""
        problem, found = self.problem, []
        for mine in problem.stages_of:
            most = 0.0
            for stage in mine:
                for m in range(problem.microbatches):
                    size, kept = problem.activation[stage][m], problem.residue[stage][m]
                    if problem.split is False:
                        most = max(most, problem.transients[kinds.B][stage][m])
                    else:
                        rest = kept - size + max(0.0, problem.transients[kinds.W][stage][m])
                        most = max(most, problem.transients[kinds.I][stage][m], rest)
            found.append(most)
        return found

    def lanes(self, rule: Rule) -> list[list[list[Code]]]:
        """The lanes of every rank under a rule: forwards and backwards, on a V those down and those up apart."""
        problem = self.problem
        count = problem.microbatches
        back = (kinds.B if rule.whole else kinds.I) * self.size
        forwards, backwards = self._common_order(rule.group)
        found = []
        for mine in problem.stages_of:
            forth = [(chunk, mine[chunk] * count + m) for chunk, m in forwards]
            behind = [(chunk, back + mine[chunk] * count + m) for chunk, m in backwards]
            if rule.order and is_snake(problem.placement):
                # What goes down and what comes up share no channel.
                lanes = [[code for chunk, code in forth if chunk % 2 == way] for way in (0, 1)]
                lanes += [[code for chunk, code in behind if chunk % 2 == way] for way in (1, 0)]
            else:
                lanes = [[code for _, code in lane] for lane in (forth, behind)]
            found.append(lanes)
        return found

    def _common_order(self, group: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The order of (chunk, microbatch) that all ranks share, forwards and backwards."""
        problem, count, chunks = self.problem, self.problem.microbatches, self.problem.chunks
        every = [(chunk, m) for chunk in range(chunks) for m in range(count)]
        if group < 0:
            # Along diagonals: a microbatch comes round after as many turns as there are ranks.
            turns = -group

            def forward(at: tuple[int, int]) -> tuple[int, int]:
                return turns * at[1] + problem.ranks * at[0], at[1]

            def backward(at: tuple[int, int]) -> tuple[int, int]:
                return turns * at[1] + problem.ranks * (chunks - 1 - at[0]), at[1]

            return sorted(every, key=forward), sorted(every, key=backward)
        size = min(group or problem.ranks, count)
        last = max(count // size - 1, 0)  # a short last group is folded into the one before it
        return (
            sorted(every, key=lambda at: (min(at[1] // size, last), at[0], at[1])),
            sorted(every, key=lambda at: (min(at[1] // size, last), -at[0], at[1])),
        )


def is_snake(placement: Placement) -> bool:
    """Whether stages go down the ranks and up again, so that each has several."""
    row = placement.table[0]
    return len(row) > placement.ranks > 1 and bool(row[placement.ranks] == placement.ranks - 1)


class _Pass:
    """The state of one pass: what every rank has run, holds, owes and waits for."""

    def __init__(self, board: Board, rule: Rule) -> None:
        problem = board.problem
        self.board, self.rule = board, rule
        ranks = problem.ranks
        self.lanes = board.lanes(rule)
        self.vee = len(self.lanes[0]) == 4
        self.order = rule.order if self.vee else ((0, 1) if rule.forward_first else (1, 0))
        self.forwards = 2 if self.vee else 1
        self.limit = rule.ahead or (math.inf,) * ranks
        self.base = (kinds.B if rule.whole else kinds.I) * board.size
        self.arrive = [math.inf] * (self.base + board.size)
        self.arrive[: problem.microbatches] = [0.0] * problem.microbatches
        self.at = [[0] * len(mine) for mine in self.lanes]
        self.owed: list[list[Code]] = [[] for _ in range(ranks)]
        self.paid = [0] * ranks
        self.held = [0] * ranks
        self.level = [0.0] * ranks
        self.free = [0.0] * ranks
        self.begun = [0.0] * ranks
        self.programs: Programs = [[] for _ in range(ranks)]
        self.heap = [(0.0, rank) for rank in range(ranks)]

    def choose(self, now: float, rank: int) -> Code:
        """What a free rank runs at this moment; −1 to wait."""
        rule, board, pointers, mine = self.rule, self.board, self.at[rank], self.lanes[rank]
        activation, transient, arrive = board.activation, board.transient, self.arrive
        spare, held, room = board.spare[rank], self.held[rank], board.caps[rank] - self.level[rank]
        debts = len(self.owed[rank]) - self.paid[rank]
        soon = due = math.inf  # when the next action arrives, and the next backward
        blocked = False
        for lane in self.order if debts <= rule.owed else ():
            place = pointers[lane]
            if place == len(mine[lane]):
                continue
            code = mine[lane][place]
            there = arrive[code]
            if lane < self.forwards:
                need = activation[code] + max(transient[code], spare)
                if held >= self.limit[rank] and (lane == 0 or not self.vee):
                    continue
                if need > room and (held or debts or activation[code] + transient[code] > room):
                    blocked |= there <= now
                    continue
                # Where nothing has come up yet that could be finished, leave room for the first that does.
                tight = self.vee and lane == 0 and pointers[1] <= pointers[3] and pointers[1] < len(mine[1])
                if tight and need + activation[mine[1][pointers[1]]] > room:
                    continue
                if there <= now and rule.patience and due < now + rule.patience * board.taken[code]:
                    continue
            else:
                due = min(due, there)
                key = code - self.base
                grows = 0.0 if rule.whole else board.residue[key] - activation[key]
                if max(transient[code], grows) > room:
                    blocked = True
                    continue
            if there <= now:
                pointers[lane] += 1
                return code
            soon = min(soon, there)
        if debts:
            code = self.owed[rank][self.paid[rank]]
            wanted = blocked or debts > rule.owed or soon - now >= rule.gap * board.taken[code]
            if wanted and transient[code] <= room:
                self.paid[rank] += 1
                return code
        return -1

    def commit(self, now: float, rank: int, code: Code) -> None:
        """Run it: what it takes and gives back, and who gets its output when."""
        board, problem = self.board, self.board.problem
        size, count = board.size, problem.microbatches
        done = now + board.taken[code]
        if not self.programs[rank]:
            self.begun[rank] = now
        self.programs[rank].append(code)
        self.free[rank] = done
        heappush(self.heap, (done, rank))
        target = -1
        if code < size:
            self.held[rank] += 1
            self.level[rank] += board.activation[code]
            target, arrived = code + count, done + board.ahead[code]
            if target >= size:
                target, arrived = self.base + code, done
        elif code < kinds.W * size:
            key = code - self.base
            self.held[rank] -= 1
            self.level[rank] -= board.activation[key]
            if not self.rule.whole:
                self.level[rank] += board.residue[key]
                self.owed[rank].append(kinds.W * size + key)
            if key >= count:
                target, arrived = code - count, done + board.back[key]
        else:
            self.level[rank] -= board.residue[code - kinds.W * size]
        if target >= 0:
            self.arrive[target] = arrived
            other = problem.rank_of[target % size // count]
            if other != rank:
                heappush(self.heap, (arrived, other))


def run_greedy(board: Board, rule: Rule) -> Plan | None:
    """Let every rank choose by the rule, event by event; None where memory leaves nobody anything to do."""
    state = _Pass(board, rule)
    heap, free = state.heap, state.free
    while heap:
        now, rank = heappop(heap)
        if free[rank] <= now:
            code = state.choose(now, rank)
            if code >= 0:
                state.commit(now, rank, code)
    done = sum(map(len, state.programs))
    if done < board.size * (2 if rule.whole else 3):
        return None
    begun = state.begun if board.problem.objective == "span" else [0.0] * len(free)
    value = max(end - start for start, end in zip(begun, free, strict=True))
    return Plan(state.programs, value, "list scheduling", rule)

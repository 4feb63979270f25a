"""How long given programs take: the same answer as `simulate`, for programs that change all the time.

It walks from rank to rank, each as far as its inputs have been made. Memory is looked at apart, for the ranks whose
program changed.
"""

from __future__ import annotations

from stageline.schedules import action as kinds
from stageline.synthesis.greedy import Board, Code, Plan, Programs


def times_of(board: Board, programs: Programs) -> list[float] | None:
    """The end of every action by its code (−1 for those that are not there), or None where ranks wait in a circle."""
    problem = board.problem
    size, count = board.size, problem.microbatches
    taken, ahead, back = board.taken, board.ahead, board.back
    whole_base, input_base, weight_base = kinds.B * size, kinds.I * size, kinds.W * size
    last = size - count
    ends = [-1.0] * (4 * size)
    at = [0] * problem.ranks
    free = [0.0] * problem.ranks
    lengths = [len(program) for program in programs]
    asleep: dict[Code, int] = {}
    awake = list(range(problem.ranks))
    left = sum(lengths)
    while awake:
        rank = awake.pop()
        program, place, now, length = programs[rank], at[rank], free[rank], lengths[rank]
        while place < length:
            code = program[place]
            if code < size:
                if code >= count:
                    source = ends[code - count]
                    if source < 0:
                        asleep[code - count] = rank
                        break
                    source += ahead[code - count]
                    if source > now:
                        now = source
            elif code < weight_base:
                key = code % size
                if key < last:
                    key += count
                    source = ends[input_base + key]
                    if source < 0:
                        source = ends[whole_base + key]
                        if source < 0:
                            asleep[key + size] = rank
                            break
                    source += back[key]
                    if source > now:
                        now = source
                elif ends[key] < 0:
                    break  # its own forward comes later
            now += taken[code]
            ends[code] = now
            place += 1
            if asleep:
                key = code if code < size else (code % size + size if code < weight_base else -1)
                other = asleep.pop(key, -1)
                if other >= 0:
                    awake.append(other)
        left -= place - at[rank]
        at[rank], free[rank] = place, now
    return None if left else ends


def value_of(board: Board, programs: Programs, ends: list[float]) -> float:
    """The objective of programs whose ends are known."""
    if board.problem.objective == "makespan":
        return max(ends[program[-1]] for program in programs if program)
    taken = board.taken
    return max(ends[program[-1]] - (ends[program[0]] - taken[program[0]]) for program in programs if program)


def peak_of(board: Board, program: list[Code]) -> float:
    """The most memory that a program needs."""
    size = board.size
    activation, residue, transient = board.activation, board.residue, board.transient
    whole_base, input_base, weight_base = kinds.B * size, kinds.I * size, kinds.W * size
    level = most = 0.0
    for code in program:
        if code < size:
            level += activation[code]
            most = max(most, level + transient[code])
        elif code >= weight_base:
            most = max(most, level + transient[code])
            level -= residue[code - weight_base]
        elif code >= input_base:
            most = max(most, level + transient[code])
            level += residue[code - input_base] - activation[code - input_base]
            most = max(most, level)
        else:
            most = max(most, level + transient[code])
            level -= activation[code - whole_base]
    return most


def judged(board: Board, programs: Programs | None, how: str) -> Plan | None:
    """Programs at the true costs, if they run and fit."""
    if programs is None:
        return None
    ends = times_of(board, programs)
    if ends is None or any(peak_of(board, mine) > cap for mine, cap in zip(programs, board.caps, strict=True)):
        return None
    return Plan(programs, value_of(board, programs, ends), how)

"""Fast simulation of programs: the same end times as `simulate`, for programs that change constantly.

It advances one rank at a time, as far as the inputs are available. Memory is checked separately, only for the ranks
whose program changed.
"""

from __future__ import annotations

from stageline.schedules import action as kinds
from stageline.synthesis.list_scheduling import Board, Code, ProgramPlan, Programs


def end_times(board: Board, programs: Programs) -> list[float] | None:
    """Return the end of every action by code (−1 if it is not in the programs), or None on a deadlock."""
    problem = board.problem
    size, count = board.size, problem.microbatches
    durations, forward_hop, backward_hop = board.durations, board.forward_hop, board.backward_hop
    whole_base, input_base, weight_base = kinds.B * size, kinds.I * size, kinds.W * size
    last = size - count
    ends = [-1.0] * (4 * size)
    positions = [0] * problem.ranks
    free = [0.0] * problem.ranks
    lengths = [len(program) for program in programs]
    waiting: dict[Code, int] = {}
    runnable = list(range(problem.ranks))
    num_left = sum(lengths)
    while runnable:
        rank = runnable.pop()
        program, position, now, length = programs[rank], positions[rank], free[rank], lengths[rank]
        while position < length:
            code = program[position]
            if code < size:
                if code >= count:
                    ready = ends[code - count]
                    if ready < 0:
                        waiting[code - count] = rank
                        break
                    ready += forward_hop[code - count]
                    if ready > now:
                        now = ready
            elif code < weight_base:
                key = code % size
                if key < last:
                    key += count
                    ready = ends[input_base + key]
                    if ready < 0:
                        ready = ends[whole_base + key]
                        if ready < 0:
                            waiting[key + size] = rank
                            break
                    ready += backward_hop[key]
                    if ready > now:
                        now = ready
                elif ends[key] < 0:
                    break  # the forward of this microbatch comes later
            now += durations[code]
            ends[code] = now
            position += 1
            if waiting:
                key = code if code < size else (code % size + size if code < weight_base else -1)
                waiter = waiting.pop(key, -1)
                if waiter >= 0:
                    runnable.append(waiter)
        num_left -= position - positions[rank]
        positions[rank], free[rank] = position, now
    return None if num_left else ends


def objective_value(board: Board, programs: Programs, ends: list[float]) -> float:
    """Return the objective value of programs with known end times."""
    if board.problem.objective == "makespan":
        return max(ends[program[-1]] for program in programs if program)
    durations = board.durations
    return max(ends[program[-1]] - (ends[program[0]] - durations[program[0]]) for program in programs if program)


def peak_memory_of(board: Board, program: list[Code]) -> float:
    """Return the peak memory of a program."""
    size = board.size
    activation, residue, transient = board.activation, board.residue, board.transient
    whole_base, input_base, weight_base = kinds.B * size, kinds.I * size, kinds.W * size
    level = peak = 0.0
    for code in program:
        if code < size:
            level += activation[code]
            peak = max(peak, level + transient[code])
        elif code >= weight_base:
            peak = max(peak, level + transient[code])
            level -= residue[code - weight_base]
        elif code >= input_base:
            peak = max(peak, level + transient[code])
            level += residue[code - input_base] - activation[code - input_base]
            peak = max(peak, level)
        else:
            peak = max(peak, level + transient[code])
            level -= activation[code - whole_base]
    return peak


def evaluate(board: Board, programs: Programs | None, how: str) -> ProgramPlan | None:
    """Return a plan with the true costs, or None if the programs deadlock or exceed the memory."""
    if programs is None:
        return None
    ends = end_times(board, programs)
    if ends is None or any(
        peak_memory_of(board, program) > cap for program, cap in zip(programs, board.caps, strict=True)
    ):
        return None
    return ProgramPlan(programs, objective_value(board, programs, ends), how)

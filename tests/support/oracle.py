"""A second opinion on schedules, by brute force: programs are executed step by step, in plain Python.

Nothing here shares code or arrays with the package. A schedule is read through `programs`, `rank_of`, its sizes
and whether it trains; everything else is computed again, slowly, from the definitions.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import stageline as sl


class Task(NamedTuple):
    """One computation of one stage for one microbatch."""

    kind: str
    stage: int
    microbatch: int


Entry = tuple[Task, ...]
"""One task, or the forward and the backward of an overlapped pair."""

Channel = tuple[int, int, str]
"""Sender, receiver, and "F" or "B" for the traffic."""


class Plan:
    """A schedule, read into lists of tasks."""

    def __init__(self, schedule: sl.Schedule) -> None:
        self.programs: list[list[Entry]] = [[_tasks(entry) for entry in one] for one in schedule.programs]
        self.ranks, self.stages, self.microbatches = schedule.ranks, schedule.stages, schedule.microbatches
        self.training = schedule.training
        self.rank_of = schedule.rank_of
        self.tasks = [task for program in self.programs for entry in program for task in entry]
        self._present = set(self.tasks)

    def source(self, task: Task) -> Task | None:
        """Name the task of the neighbouring stage whose output this one takes."""
        kind, stage, microbatch = task
        if kind == "F" and stage > 0:
            return Task("F", stage - 1, microbatch)
        if kind in "BI" and stage < self.stages - 1:
            whole = Task("B", stage + 1, microbatch)
            return whole if whole in self._present else Task("I", stage + 1, microbatch)
        return None

    def needs(self, task: Task) -> list[Task]:
        """List all that must have been done before this task."""
        needed = []
        if task.kind in "BI":
            needed.append(Task("F", task.stage, task.microbatch))
        if task.kind == "W":
            needed.append(Task("I", task.stage, task.microbatch))
        source = self.source(task)
        return needed if source is None else [*needed, source]

    def home(self, task: Task) -> int:
        return self.rank_of(task.stage, task.microbatch)

    def inbox(self, task: Task) -> Channel | None:
        """Name the channel by which the input of a task comes, if it comes from another rank."""
        source = self.source(task)
        if source is None or self.home(source) == self.home(task):
            return None
        return self.home(source), self.home(task), "F" if task.kind == "F" else "B"

    def outbox(self, task: Task) -> Channel | None:
        """Name the channel by which the output of a task goes, if it goes to another rank."""
        step = {"F": 1, "B": -1, "I": -1}.get(task.kind)
        if step is None or not 0 <= task.stage + step < self.stages:
            return None
        there = self.rank_of(task.stage + step, task.microbatch)
        return None if there == self.home(task) else (self.home(task), there, "F" if step == 1 else "B")


def _tasks(entry: sl.Action | sl.Overlap) -> Entry:
    parts = (entry.forward, entry.backward) if isinstance(entry, sl.Overlap) else (entry,)
    return tuple(Task(part.kind, part.stage, part.microbatch) for part in parts)


# ---- Is it right? ----


def judge(schedule: sl.Schedule) -> str | None:
    """Name the first reason for which a schedule is broken, by the rule that should say so; None if it is right."""
    plan = Plan(schedule)
    if any(task.stage >= plan.stages or task.microbatch >= plan.microbatches for task in plan.tasks):
        return "known"
    for rank, program in enumerate(plan.programs):
        if any(plan.home(task) != rank for entry in program for task in entry):
            return "owner"
    pairs = [entry for program in plan.programs for entry in program if len(entry) == 2]
    if any(first.kind != "F" or second.kind not in "BI" for first, second in pairs):
        return "overlap"
    if not _exactly_once(plan):
        return "complete"
    if not _finishes(plan):
        return "progress"
    return None


def keeps_channel_order(schedule: sl.Schedule) -> bool:
    """Whether every message of a right schedule is taken in the order in which those of its channel are sent."""
    return _takes_what_was_sent(Plan(schedule))


def _exactly_once(plan: Plan) -> bool:
    count = Counter(plan.tasks)
    allowed = ({"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}) if plan.training else ({"F": 1},)
    for stage in range(plan.stages):
        for microbatch in range(plan.microbatches):
            counts = {k: n for k in "FBIW" if (n := count[Task(k, stage, microbatch)])}
            if counts not in allowed:
                return False
    return True


def _finishes(plan: Plan) -> bool:
    """Let every rank run its next entry whenever all that it needs is done, until nothing moves."""
    done: set[Task] = set()
    at = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(plan.programs):
            while at[rank] < len(program):
                entry = program[at[rank]]
                if not all(need in done for task in entry for need in plan.needs(task)):
                    break
                done.update(entry)
                at[rank] += 1
                moved = True
    return len(done) == len(plan.tasks)


def _takes_what_was_sent(plan: Plan) -> bool:
    """Run it again with one queue per channel: whoever takes from a queue gets what lies in front."""
    queues: defaultdict[Channel, deque[Task]] = defaultdict(deque)
    at = [0] * plan.ranks
    left = sum(len(program) for program in plan.programs)
    while left:
        for rank, program in enumerate(plan.programs):
            while at[rank] < len(program):
                entry = program[at[rank]]
                inputs = [(plan.source(task), box) for task in entry if (box := plan.inbox(task))]
                if not all(queues[box] for _, box in inputs):
                    break
                if any(queues[box].popleft() != wanted for wanted, box in inputs):
                    return False
                for task in entry:
                    if box := plan.outbox(task):
                        queues[box].append(task)
                at[rank] += 1
                left -= 1
    return True


# ---- What is true of it? ----


def channel_orders(schedule: sl.Schedule) -> dict[Channel, list[Task]]:
    """For each channel, the tasks whose outputs it carries, in the order of the sender's program."""
    return _sending_orders(Plan(schedule))


def taking_orders(schedule: sl.Schedule) -> dict[Channel, list[Task]]:
    """For each channel, the tasks whose outputs it carries, in the order of the receiver's program."""
    plan = Plan(schedule)
    orders: defaultdict[Channel, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        if (box := plan.inbox(task)) and (source := plan.source(task)):
            orders[box].append(source)
    return dict(orders)


def _sending_orders(plan: Plan) -> dict[Channel, list[Task]]:
    orders: defaultdict[Channel, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        if box := plan.outbox(task):
            orders[box].append(task)
    return dict(orders)


def least_look_ahead(schedule: sl.Schedule) -> int:
    """Try 0, 1, 2, … receives posted ahead, until no rank is left blocked in a send."""
    plan = Plan(schedule)
    ahead = 0
    while not _finishes_with_rendezvous(plan, ahead):
        ahead += 1
    return ahead


def _finishes_with_rendezvous(plan: Plan, ahead: int) -> bool:
    """Run it with sends that hold their rank at its entry until the matching receive is posted.

    A channel delivers in the order sent. A rank that has reached an entry has posted, on every channel, the receives
    up to the last one that any entry up to this one takes, and `ahead` more. A rank continues with its next entry when
    all messages of this one have found their receives.
    """
    # For each channel, the receiver's position of each of its receives, and which message it takes, as they are sent.
    takes: defaultdict[Channel, list[tuple[int, int]]] = defaultdict(list)
    orders = _sending_orders(plan)
    for program in plan.programs:
        for position, entry in enumerate(program):
            for task in entry:
                if (box := plan.inbox(task)) and (source := plan.source(task)):
                    takes[box].append((position, orders[box].index(source)))
    at = [0] * plan.ranks
    has_run = [False] * plan.ranks
    sent: Counter[Channel] = Counter()  # messages that have found their receive, by channel
    done: set[Task] = set()
    waiting: list[list[Channel]] = [[] for _ in range(plan.ranks)]

    def posted(box: Channel) -> int:
        up_to_here = 1 + max((number for position, number in takes[box] if position <= at[box[1]]), default=-1)
        return min(len(takes[box]), up_to_here + ahead)

    def has_come(task: Task) -> bool:
        box, source = plan.inbox(task), plan.source(task)
        return box is None or source is None or orders[box].index(source) < sent[box]

    def step(rank: int) -> bool:
        entry = plan.programs[rank][at[rank]]
        if not has_run[rank]:
            local = [need for task in entry for need in plan.needs(task) if plan.home(need) == rank]
            if not all(need in done for need in local) or not all(map(has_come, entry)):
                return False
            done.update(entry)
            has_run[rank] = True
            waiting[rank] = [box for task in entry if (box := plan.outbox(task))]
            return True
        for box in waiting[rank]:
            if sent[box] < posted(box):
                sent[box] += 1
                waiting[rank].remove(box)
                return True
        if waiting[rank]:
            return False
        at[rank] += 1
        has_run[rank] = False
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(plan.ranks):
            while at[rank] < len(plan.programs[rank]) and step(rank):
                moved = True
    return len(done) == len(plan.tasks)


def posted_at_once(schedule: sl.Schedule, ahead: int) -> list[int]:
    """For each rank, the most receives it has posted at once on each of its channels, added up."""
    plan = Plan(schedule)
    orders = _sending_orders(plan)
    most: Counter[Channel] = Counter()
    for rank, program in enumerate(plan.programs):
        boxes = [box for box in orders if box[1] == rank]
        delivered: Counter[Channel] = Counter()  # up to the last one that was needed so far
        taken: Counter[Channel] = Counter()
        for entry in program:
            here = [(box, source) for task in entry if (box := plan.inbox(task)) and (source := plan.source(task))]
            for box, source in here:
                delivered[box] = max(delivered[box], orders[box].index(source) + 1)
            for box in boxes:
                most[box] = max(most[box], min(len(orders[box]), delivered[box] + ahead) - taken[box])
            taken.update(box for box, _ in here)
    return [sum(count for box, count in most.items() if box[1] == rank) for rank in range(plan.ranks)]


class Held(NamedTuple):
    """The most a rank holds at once: activations, residues, and both together."""

    activations: int
    residues: int
    both: int


def most_held(schedule: sl.Schedule) -> list[Held]:
    """Walk through each program, keeping sets of what is held while each entry runs."""
    peaks = []
    for program in Plan(schedule).programs:
        activations: set[tuple[int, int]] = set()
        residues: set[tuple[int, int]] = set()
        peak = Held(0, 0, 0)
        for entry in program:
            activations |= {task[1:] for task in entry if task.kind == "F"}
            a, r = len(activations), len(residues)
            peak = Held(max(peak.activations, a), max(peak.residues, r), max(peak.both, a + r))
            for task in entry:
                if task.kind in "BI":
                    activations.remove(task[1:])
                if task.kind == "I":
                    residues.add(task[1:])
                if task.kind == "W":
                    residues.remove(task[1:])
        peaks.append(peak)
    return peaks


def in_order(schedule: sl.Schedule) -> bool:
    """Run every program; whether each stage computed and added its gradients by rising microbatch, on one rank."""
    computed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    added: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, program in enumerate(Plan(schedule).programs):
        for task in (task for entry in program for task in entry):
            if task.kind in "BI":
                computed[task.stage].append((rank, task.microbatch))
            if task.kind in "BW":
                added[task.stage].append((rank, task.microbatch))
    for places in (*computed.values(), *added.values()):
        microbatches = [microbatch for _, microbatch in places]
        if microbatches != sorted(microbatches) or len({rank for rank, _ in places}) > 1:
            return False
    return True


# ---- When does it run? ----


@dataclass
class Prices:
    """What everything costs, with nothing left out; times before the factor of the microbatch."""

    forward: list[float]
    backward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    overlap: list[float] | None
    latency: list[list[float]]
    bandwidth: list[list[float]] | None
    message: list[float]
    scale: list[float]

    def of(self, task: Task) -> float:
        row = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}
        return row[task.kind][task.stage] * self.scale[task.microbatch]

    def of_entry(self, entry: Entry) -> float:
        if len(entry) == 2 and self.overlap is not None:
            factor = sum(self.scale[task.microbatch] for task in entry) / 2
            return self.overlap[entry[0].stage] * factor
        return sum(self.of(task) for task in entry)

    def of_message(self, source: int, target: int, boundary: int, microbatch: int) -> float:
        """Price what crosses from stage `boundary` to the next, or comes back over the same boundary."""
        time = self.latency[source][target]
        if self.bandwidth is not None:
            time += self.message[boundary] * self.scale[microbatch] / self.bandwidth[source][target]
        return time


class Gap(NamedTuple):
    """The idle time of a rank by its cause."""

    warmup: float
    transfer: float
    peer: float
    drain: float


class Step(NamedTuple):
    """When everything ran."""

    start: dict[Task, float]
    end: dict[Task, float]
    arrival: dict[Task, float]
    """When the input of a task was on its rank, for tasks that take the output of another stage."""


def play(schedule: sl.Schedule, prices: Prices) -> Step:
    """Keep a queue of coming events, ends of entries and arrivals of messages, and let each one start what it can."""
    plan = Plan(schedule)
    step = Step({}, {}, {})
    at = [0] * plan.ranks
    running = [False] * plan.ranks
    done: set[Task] = set()
    arrived: set[Task] = set()
    events: list[tuple[float, int, str, int, Task | None]] = []
    taker = {source: task for task in plan.tasks if (source := plan.source(task))}

    def start_what_can(rank: int, now: float) -> None:
        if running[rank] or at[rank] == len(plan.programs[rank]):
            return
        entry = plan.programs[rank][at[rank]]
        for task in entry:
            source = plan.source(task)
            local = [need for need in plan.needs(task) if need != source]
            if not all(need in done for need in local) or (source is not None and task not in arrived):
                return
        running[rank] = True
        finish = now + prices.of_entry(entry)
        for task in entry:
            step.start[task], step.end[task] = now, finish
        heapq.heappush(events, (finish, len(step.start) + len(step.arrival), "end", rank, None))

    def finish_entry(rank: int, now: float) -> None:
        entry = plan.programs[rank][at[rank]]
        done.update(entry)
        running[rank] = False
        at[rank] += 1
        for task in entry:
            if task in taker:
                there = plan.home(taker[task])
                boundary = min(task.stage, taker[task].stage)
                wait = 0.0 if there == rank else prices.of_message(rank, there, boundary, task.microbatch)
                step.arrival[taker[task]] = now + wait
                number = len(step.start) + len(step.arrival)
                heapq.heappush(events, (now + wait, number, "arrival", there, taker[task]))

    for rank in range(plan.ranks):
        start_what_can(rank, 0.0)
    while events:
        now, _, what, rank, task = heapq.heappop(events)
        if what == "end":
            finish_entry(rank, now)
        elif task is not None:
            arrived.add(task)
        start_what_can(rank, now)
    return step


def gaps(schedule: sl.Schedule, step: Step) -> list[Gap]:
    """Divide the idle time of each rank by what its next entry waited for last."""
    plan = Plan(schedule)
    finish = max(step.end.values())
    gaps = []
    for program in plan.programs:
        if not program:
            gaps.append(Gap(0.0, 0.0, 0.0, finish))
            continue
        transfer = peer = 0.0
        free = step.end[program[0][0]]
        for entry in program[1:]:
            inputs = [(step.arrival[task], step.end[source]) for task in entry if (source := plan.source(task))]
            if inputs:
                arrival, sent = max(inputs, key=lambda pair: pair[0])
                peer += max(0.0, sent - free)
                transfer += max(0.0, arrival - max(sent, free))
            free = step.end[entry[0]]
        gaps.append(Gap(step.start[program[0][0]], transfer, peer, finish - free))
    return gaps


@dataclass
class Memory:
    """What everything holds, per stage, before the factor of the microbatch."""

    activation: Sequence[float]
    residue: Sequence[float]
    transient: dict[str, list[float]]
    scale: Sequence[float]


def levels(program: Sequence[Entry], memory: Memory) -> Iterator[tuple[Entry, float, float]]:
    """For each entry of a rank: what the rank holds while it runs, and what after it."""

    def size(rows: Sequence[float], task: Task) -> float:
        return rows[task.stage] * memory.scale[task.microbatch]

    held: dict[tuple[str, int, int], float] = {}
    for entry in program:
        for task in entry:
            if task.kind == "F":
                held["activation", task.stage, task.microbatch] = size(memory.activation, task)
        during = sum(held.values()) + sum(size(memory.transient[task.kind], task) for task in entry)
        for task in entry:
            if task.kind in "BI":
                del held["activation", task.stage, task.microbatch]
            if task.kind == "I":
                held["residue", task.stage, task.microbatch] = size(memory.residue, task)
            if task.kind == "W":
                del held["residue", task.stage, task.microbatch]
        yield entry, during, sum(held.values())


def peak_memory(schedule: sl.Schedule, memory: Memory) -> list[float]:
    """The most memory each rank holds, during an entry or after one."""
    return [
        max((max(during, after) for _, during, after in levels(program, memory)), default=0.0)
        for program in Plan(schedule).programs
    ]

"""The ranks of a job on several hosts: what the launcher of each host does, and what the one that leads decides."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stageline.common import interrupts
from stageline.common.errors import PipelineError, StagelineError
from stageline.common.handshake import check_tls
from stageline.common.machine import cores, is_loopback, port_range
from stageline.common.trust import job_secret
from stageline.distributed._torch_private import TCPStore
from stageline.distributed.attempts import LAUNCHER, MEMORY, NUMBER, SEAT, Announcements, Attempt
from stageline.distributed.launchers.fork_server import ForkServer, shared_server
from stageline.distributed.launchers.hosts import HostEntry, HostNetwork, HostPlace, listen_anywhere, read_table
from stageline.distributed.launchers.launcher import Job, Outcome, first_failure
from stageline.distributed.launchers.processes import PATIENCE, Ranks, job_folder
from stageline.distributed.launchers.replacements import Replacements, follows, is_loss
from stageline.distributed.state_memory import StateMemory, host_memory

SETTLE = 0.5
"""Seconds after which a launcher that takes over the lead has heard the last orders of the one before."""
LONGEST_TEXT = 4000
"""Characters of an error that other hosts learn."""
_UNKNOWN = (0, False)
"""What `Announcements.shape` returns before rank 0 has described the job."""
FAREWELL = 3.0
"""Seconds in which the launchers of other hosts learn how the job ended."""


class HostLauncher:
    """Starts the ranks of this host, of a job on several hosts; a launcher like it runs on each of the others."""

    def __init__(self, place: HostPlace, *, logs: Path | None = None, patience: float = PATIENCE) -> None:
        self._place, self._logs, self._patience = place, logs, patience
        self.ranks = 0
        """The ranks of all hosts, once they have met."""

    def run(self, job: Job) -> list[Outcome]:
        """Run the ranks of this host; return their outcomes, and that of the rank that failed first on any host."""
        secret = job_secret({**os.environ, **job.environment})
        if not secret:
            raise StagelineError(
                "the launchers of several hosts need a shared secret; set STAGELINE_SECRET or "
                "STAGELINE_SECRET_FILE to the same secret on all hosts (openssl rand -hex 32)"
            )
        check_tls({**os.environ, **job.environment})
        _check_ports(job, self._place)
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        server = shared_server()
        server.preload(job.modules)
        listener = listen_anywhere(besides=self._place.port)  # of host 0, which may be in the range
        port, timeout = listener.getsockname()[1], datetime.timedelta(seconds=300)
        store = TCPStore(
            "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        policy = f"--max-restarts {job.recovery.max_restarts} --on-loss {','.join(job.recovery.on_loss)}"
        facts = {"ranks": job.processes, "spares": job.recovery.spares, "store": port}
        with (
            job_folder(server) as folder,
            HostNetwork(self._place, secret, facts, policy) as network,
        ):
            network.meet()
            self.ranks = seats = sum(entry.ranks for entry in network.table.values())
            if not seats:
                raise StagelineError(
                    "no host of this job has ranks: all were started with -n 0; start at least one with -n 1 or more"
                )
            with host_memory(seats if job.recovery.enabled else 0) as paths:
                network.memory = StateMemory(paths)
                ranks = HostRanks(job, folder, server, self._logs, self._patience, network, store, paths)
                forget = interrupts.at_end(ranks.part)  # before Ctrl-C ends the command
                try:
                    return ranks.run()
                except KeyboardInterrupt:
                    ranks.part()
                    raise
                finally:
                    forget()
                    ranks.kill()
                    del store


def _check_ports(job: Job, place: HostPlace) -> None:
    ports, processes = port_range(), job.processes + job.recovery.spares
    needed = processes + 2 + (place.number > 0 or (ports is not None and place.port in ports))
    if ports is not None and len(ports) < needed:
        raise StagelineError(
            f"STAGELINE_PORTS={ports[0]}-{ports[-1]} has {len(ports)} ports, and a host with {processes} ranks and "
            f"spares needs {needed}: one for each, and for the failure monitor, the store and the launcher"
        )


class Seating:
    """Where the seats and the spare processes of a job are at its start: those of the first host come first.

    >>> seating = Seating({0: HostEntry("a", 1, 2, 0, 0), 1: HostEntry("b", 1, 1, 1, 0)})
    >>> seating.seats, seating.spares
    ({0: (0, 0), 1: (0, 1), 2: (1, 0)}, {3: (1, 1)})
    """

    def __init__(self, table: Mapping[int, HostEntry]) -> None:
        places = [(host, slot) for host, entry in table.items() for slot in range(entry.ranks)]
        self.seats = dict(enumerate(places))
        """The host of every seat, and its number there."""
        rest = [(host, entry.ranks + slot) for host, entry in table.items() for slot in range(entry.spares)]
        self.spares = {len(places) + number: place for number, place in enumerate(rest)}
        """The same of every spare process."""


class HostRanks(Ranks):
    """The processes of one host. The launcher that leads decides for all; all do what its last order says.

    An order is a state, not an event: how often each seat has been started, the attempt, the signal that ends the ranks
    and, at the end, the rank that failed. Every launcher repeats the last order in its status, so that another one can
    take over the lead.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        server: ForkServer,
        logs: Path | None,
        patience: float,
        network: HostNetwork,
        store: Any,
        memory: Sequence[str],
    ) -> None:
        super().__init__(job, folder, server, logs, patience)
        self._network, self._port, self._memory = network, store.port, memory
        self._seating = Seating(network.table)
        self._announcements = Announcements(store)
        self._recovers = job.recovery.enabled
        self._starts: dict[int, int] = {}
        """How often this host has started a process for a seat."""
        self._attempt = self._locate(Attempt(0, (), "", 0.0, {seat: seat for seat in self._seating.seats}))
        starts = dict.fromkeys(self._seating.seats, 1)
        self._order: dict[str, Any] = {"serial": 0, "losses": 0, "stop": 0, "over": "", "result": None, "spares": {}}
        self._order |= {"starts": starts, "attempt": self._attempt.to_text(), "members": sorted(network.members)}
        self._order["table"] = network.table
        if network.order is not None:
            self._order = _read_order(network.order)
            self._attempt = Attempt.parse(self._order["attempt"])
        self._leads_since: float | None = None
        self._stop_at: float | None = None
        self._late_at = None if job.timeout is None else time.monotonic() + job.timeout
        self._parting, self._stopped = "", False
        self._disagree_since: float | None = None

    def run(self) -> list[Outcome]:
        """Run the ranks of this host until the job has ended on all hosts."""
        if self._recovers:
            self._announcements.make(self._attempt)
        if self._network.order is None:
            self._start_spares(self._seating.spares)
        self._obey()
        while self._order["result"] is None:
            self._server.read_events(0.05)
            self._collect()
            self._check_hosts()
            self._tell()
            for status in self._statuses().values():  # whoever takes over the lead has to know
                self._hear_progress(status)
            self._take_newest_order()
            if self._network.leader == self._network.number:
                self._lead()
            self._obey()
        self._tell()
        self.kill()
        self._network.drain(FAREWELL)
        return self._results()

    def part(self) -> None:
        """Tell the other hosts that the job was interrupted on this one."""
        network = self._network
        self._parting = self._parting or f"the job was interrupted on host {network.number}"
        network.tell({**network.status, "parting": self._parting})
        network.close()

    def _check_hosts(self) -> None:
        """Stop if this host is cut off from the others, or if somebody ended the job on another one."""
        network = self._network
        for status in network.statuses.values():
            if status.get("parting"):
                self._parting = str(status["parting"])
                self.part()
                raise StagelineError(self._parting)
        if why := network.cut_off:
            raise StagelineError(why)
        leaders = {int(status["leader"]) for status in self._statuses().values() if "leader" in status}
        if not leaders & network.lost.keys():
            self._disagree_since = None
            return
        self._disagree_since = self._disagree_since or time.monotonic()
        if time.monotonic() - self._disagree_since > network.place.timeout:
            raise StagelineError(
                f"host {network.number} cannot reach host {min(leaders)}, which coordinates the others"
            )

    def _results(self) -> list[Outcome]:
        culprit = self._order["result"]
        own = {outcome.rank: outcome for outcome in self._outcomes}
        if culprit:
            own.setdefault(culprit["rank"], Outcome(**culprit))
            return sorted(own.values(), key=lambda outcome: outcome.rank != culprit["rank"])
        return [replace(outcome, failure="", error=None) for outcome in own.values()]

    # What this host does.

    def _environment(self, seat: int) -> dict[str, str]:
        """The environment of a process on this host, without its rank."""
        table, addresses = self._network.table, [entry.address for entry in self._network.table.values()]
        here = table[self._network.number]
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores() // max(1, here.ranks))),
            **os.environ,
            "WORLD_SIZE": str(len(self._seating.seats)),
            "MASTER_ADDR": self._attempt.store[0],
            "MASTER_PORT": str(self._attempt.store[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **self._job.environment,
            SEAT: str(seat),
            LAUNCHER: str(self._port),
        }
        if self._recovers:
            environment |= {NUMBER: "0", MEMORY: os.pathsep.join(self._memory)}
        if not torch.cuda.is_available() and all(map(is_loopback, addresses)):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _start_spares(self, places: Mapping[int, tuple[int, int]]) -> None:
        for spare, (host, _) in places.items() if self._recovers else ():
            if host == self._network.number:
                self._spares[spare] = self._call(spare, self._environment(spare))

    def _obey(self) -> None:
        """Do what the last order says: start processes, stop them, and announce the attempt to the ranks."""
        attempt = Attempt.parse(self._order["attempt"])
        if self._recovers:
            if self._order["over"]:
                self._announcements.end(self._order["over"])
            if attempt.number > self._announcements.newest():
                self._announcements.make(attempt)
        self._attempt = attempt
        self._network.readmit(self._order["table"])
        self._network.members = set(self._order["members"])
        new = {spare: place for spare, place in self._order["spares"].items() if spare not in self._seating.spares}
        self._seating.spares |= new
        self._start_spares(new)
        takers = {seat: spare for spare, seat in attempt.spares.items()}
        for seat, count in self._order["starts"].items():
            host = attempt.places.get(seat, self._seating.seats[seat])[0]
            if host != self._network.number or count <= self._starts.get(seat, 0):
                continue
            self._starts[seat] = count
            self._outcomes = [outcome for outcome in self._outcomes if outcome.rank != seat]
            spare = self._spares.pop(takers[seat], None) if seat in takers else None
            if spare is not None:
                self._running[seat], self._folders[seat] = spare, self._folders[takers[seat]]
            else:
                self._start_seat(seat, attempt)
        if self._order["stop"]:
            self._end_by(self._order["stop"])
        blamed = self._order.get("kill")
        if blamed is not None and blamed[0] == attempt.number and blamed[1] in self._running:
            self._running[blamed[1]].signal(signal.SIGKILL)

    def _start_seat(self, seat: int, attempt: Attempt) -> None:
        environment = self._environment(seat)
        place = attempt.place(seat) or {NUMBER: str(attempt.number)}  # without a rank, it waits for an attempt with one
        if not self._recovers:
            place = {name: value for name, value in place.items() if name != NUMBER}
        self._running[seat] = self._call(seat, environment | place)

    def _end_by(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.kill()
        elif not self._stopped:
            self._stopped = True
            self._end(signal.SIGTERM)

    def _tell(self) -> None:
        """Publish the status of this host."""
        announced: dict[str, Any] = {}
        number = self._attempt.number
        if self._recovers:
            mine = self._announcements
            announced = {"completed": mine.completed(), "shape": mine.shape(), "blamed": mine.blamed(number)}
            announced["arrived"] = [seat for seat in self._starts if mine.arrived(seat, number)]
        self._network.tell(
            {
                "order": self._order,
                "starts": dict(self._starts),
                "running": sorted(self._running),
                "spares": sorted(self._spares),
                "ended": [_to_json(outcome) for outcome in self._outcomes],
                "attempt": number,
                "leader": self._network.leader,
                "parting": self._parting,
                "returning": self._network.returning,
                **announced,
            }
        )

    def _collect(self) -> None:
        super()._collect()
        for number in [number for number, child in self._spares.items() if child.poll() is not None]:
            del self._spares[number]

    def _take_newest_order(self) -> None:
        """Follow the last order of the launcher that leads; the one that takes over starts from the newest of all."""
        network = self._network
        for host, status in self._statuses().items():
            order = status["order"]
            if network.leader in (host, network.number) and order["serial"] > self._order["serial"]:
                self._order = _read_order(order)

    def _statuses(self) -> dict[int, Mapping[str, Any]]:
        statuses = self._network.statuses
        return {host: statuses[host] for host in self._network.present if "order" in statuses.get(host, ())}

    # What the one that leads decides.

    def _locate(self, attempt: Attempt) -> Attempt:
        """Add to an attempt where its seats are, and where the ranks meet."""
        table = self._network.table
        before = self._seating.seats if not attempt.number else self._attempt.places
        places = {seat: before.get(seat, self._seating.seats[seat]) for seat in attempt.ranks}
        for spare, seat in attempt.spares.items():
            host, slot = self._seating.spares[spare]
            lost_host, lost_slot = places[seat]
            places[seat] = (host, lost_slot if host == lost_host else slot)
        leads = self._network.leader if attempt.number else 0
        hosts = {host: (table[host].address, table[host].port) for host in self._network.present}
        return replace(attempt, places=places, hosts=hosts, store=(table[leads].address, table[leads].store))

    def _lead(self) -> None:
        now = time.monotonic()
        if self._leads_since is None:
            self._leads_since = now if self._network.number else 0.0
            self._replacements = None
            if self._recovers:
                self._replacements = Replacements(self._job.recovery, len(self._seating.seats), self._announcements)
                self._replacements.resume(self._attempt, self._order["losses"])
                self._replacements.locate = self._locate
        if now - self._leads_since < SETTLE:
            return
        self._tell()
        statuses = {**self._statuses(), self._network.number: self._network.status}
        for status in statuses.values():
            self._hear(status)
        outcomes, running = self._survey(statuses)
        self._change(members=self._network.present)
        attempt = self._recovery(outcomes, running, statuses)
        if attempt is not None:
            self._change(
                attempt=attempt.to_text(),
                starts={seat: count + (seat in attempt.replaced) for seat, count in self._order["starts"].items()},
                losses=self._order["losses"] if self._replacements is None else self._replacements.losses,
                stop=0,
                kill=None,
            )
            self._stop_at = None
            return
        self._readmit(statuses)
        self._finish(outcomes, running, now)

    def _readmit(self, statuses: Mapping[int, Mapping[str, Any]]) -> None:
        """Give launchers that were started again the places of hosts that were lost, if no rank is there.

        Their seats that nobody took wait for the next attempt; their other processes are spare ones.
        """
        rules, table = self._replacements, dict(self._order["table"])
        if rules is None or rules.given_up or self._order["stop"]:
            return
        for status in statuses.values():
            for number, entry in read_table(status["returning"]).items():
                if number not in self._network.lost or number in _hosts_of(self._attempt):
                    continue
                since = 1 + max(known.since for known in table.values())
                table[number] = entry._replace(since=since)
                seats = [seat for seat, place in self._places().items() if place[0] == number]
                taken = {self._places()[seat][1] for seat in seats}
                free = [slot for slot in range(entry.ranks + entry.spares) if slot not in taken]
                first = 1 + max([*self._seating.seats, *self._seating.spares])
                spares = {first + count: (number, slot) for count, slot in enumerate(free)}
                others = {spare: place for spare, place in self._order["spares"].items() if place[0] != number}
                self._change(table=table, spares={**others, **spares})
                self._network.readmit(table)
                sys.stderr.write(f"stageline: host {number} ({entry.address}) is back\n")
                return

    def _places(self) -> dict[int, tuple[int, int]]:
        """The host of every seat, also of those that do not take part, and its number there."""
        return {**self._seating.seats, **self._attempt.places}

    def _hear_progress(self, status: Mapping[str, Any]) -> None:
        """Remember what rank 0 announced on another host: that the job trains, and what it could do without."""
        if not self._recovers or status.get("completed") is None:
            return
        mine = self._announcements
        ahead, shape = status["completed"] - mine.completed(), tuple(status["shape"])
        if shape != _UNKNOWN and (ahead > 0 or (ahead == 0 and mine.shape() == _UNKNOWN)):
            mine.describe(per_replica=shape[0], replans=shape[1])
        if ahead > 0:
            mine.complete(status["completed"])

    def _hear(self, status: Mapping[str, Any]) -> None:
        """Repeat what the ranks of another host announced, to the rules that decide."""
        if not self._recovers or status.get("completed") is None:
            return
        mine = self._announcements
        if status["attempt"] == self._attempt.number:
            for seat in status["arrived"]:
                mine.arrive(seat, self._attempt.number)
            if status["blamed"] and mine.blamed(self._attempt.number) is None:
                mine.blame(status["blamed"][0], self._attempt.number, status["blamed"][1])

    def _survey(self, statuses: Mapping[int, Mapping[str, Any]]) -> tuple[list[Outcome], set[int]]:
        """The ranks that have ended, on any host, and those that run or are about to start."""
        outcomes, running = list[Outcome](), set[int]()
        for seat, count in self._order["starts"].items():
            host = self._attempt.places.get(seat, self._seating.seats[seat])[0]
            status = statuses.get(host)
            if host in self._network.lost:
                if seat in self._attempt.ranks:
                    address, how = self._network.table[host].address, self._network.lost[host]
                    failure = f"was on host {host} ({address}), which is lost: {how}"
                    outcomes.append(
                        Outcome(seat, failure=failure, code=-signal.SIGKILL, moment=self._network.lost_at[host])
                    )
            elif status is None or _count(status["starts"], seat) < count or seat in status["running"]:
                running.add(seat)
            else:
                outcomes += [_from_json(row) for row in status["ended"] if row["rank"] == seat]
        return sorted(outcomes, key=lambda outcome: outcome.moment), running

    def _recovery(
        self, outcomes: Sequence[Outcome], running: set[int], statuses: Mapping[int, Mapping[str, Any]]
    ) -> Attempt | None:
        rules = self._replacements
        if rules is None or self._order["stop"]:
            return None
        rules.spares = [spare for status in statuses.values() for spare in status["spares"]]
        lost = self._network.lost
        rules.stranded = [seat for seat, (host, _) in self._places().items() if host in lost]
        blamed = rules.blamed()
        if blamed in running and self._order.get("kill") != [rules.number, blamed]:
            self._change(kill=[rules.number, blamed])
        return rules.next(outcomes, running) or self._leave_lost_store(rules)

    def _leave_lost_store(self, rules: Replacements) -> Attempt | None:
        """An attempt with another store, if the ranks have not met at the one of a host that is lost."""
        stores = {(entry.address, entry.store): host for host, entry in self._network.table.items()}
        host = stores.get(self._attempt.store)  # None if its launcher was started again
        if host is not None and host not in self._network.lost:
            return None
        return rules.regroup("the host of their store was lost")

    def _finish(self, outcomes: Sequence[Outcome], running: set[int], now: float) -> None:
        """End the job on all hosts: after a failure, when it takes too long, or because all ranks have ended."""
        rules = self._replacements
        culprit = first_failure(outcomes if rules is None else rules.explain(outcomes))
        late = self._late_at is not None and now > self._late_at
        over = "" if rules is None else rules.given_up
        if over and not self._order["over"]:
            self._change(over=over)
        active = running & set(self._attempt.ranks)
        if late or not active:
            if late:
                culprit = Outcome(min(active, default=0), failure=f"did not end within {self._job.timeout:g} s", code=1)
            row = None if culprit is None else _to_json(culprit)
            result = {} if row is None else {name: row[name] for name in ("rank", "failure", "code")}
            self._change(stop=int(signal.SIGKILL), result=result)
        elif culprit is not None:
            self._stop_at = self._stop_at or now + self._patience
            if now > self._stop_at + 2.0:
                self._change(stop=int(signal.SIGKILL))
            elif now > self._stop_at:
                self._change(stop=int(signal.SIGTERM))

    def _change(self, **values: Any) -> None:
        if any(self._order.get(name) != value for name, value in values.items()):
            self._order = {**self._order, **values, "serial": self._order["serial"] + 1}


def _read_order(order: Mapping[str, Any]) -> dict[str, Any]:
    """An order as another host sent it; the keys of JSON are text."""
    starts = {int(seat): count for seat, count in order["starts"].items()}
    spares = {int(spare): tuple(place) for spare, place in order["spares"].items()}
    return {**order, "starts": starts, "spares": spares, "table": read_table(order["table"])}


def _hosts_of(attempt: Attempt) -> set[int]:
    return {host for host, _ in attempt.places.values()}


def _count(starts: Mapping[Any, int], seat: int) -> int:
    """How often a host has started a seat; the keys are text if they come from another one."""
    return starts.get(seat, starts.get(str(seat), 0))


def _to_json(outcome: Outcome) -> dict[str, Any]:
    """How a rank ended, for another host; an exception of its own is its text."""
    failure = outcome.failure
    if len(failure) > LONGEST_TEXT:
        failure = f"{failure[:12]} …\n{failure[-LONGEST_TEXT:]}"
    return {
        "rank": outcome.rank,
        "failure": failure,
        "code": -int(signal.SIGKILL) if is_loss(outcome) else outcome.code,
        "follows": follows(outcome) and outcome.error is not None,
        "moment": round(time.time() - time.monotonic() + outcome.moment, 1),
    }


def _from_json(row: Mapping[str, Any]) -> Outcome:
    error = PipelineError(row["failure"]) if row["follows"] else None
    return Outcome(row["rank"], None, error, row["failure"], row["code"], row["moment"])

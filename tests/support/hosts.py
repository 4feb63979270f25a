"""Hosts made of network namespaces: each has its own interfaces, firewall, hostname, /etc/hosts, folder and clock.

                 bridge (a namespace of its own)
        ╭───────────────┼───────────────╮            10.77.0.1, 10.77.0.2, … or fd77::1, fd77::2, …
      host0           host1           host2          with two interfaces, eth1 has 10.78.0.1, …

A namespace lives as long as the process that holds it, and that process ends with the test's: nothing is left behind.
Ranks are forked from a server that has imported torch, and enter a host before they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pytest

from stageline.testing import Child, ForkServer

Names = Literal["known", "loopback", "unknown"]
"""Whether hostnames resolve: all of them; a host's own, to 127.0.1.1, as on Debian; or none."""

PORT = 29500
NAMESPACES = {"net": "net", "uts": "uts", "time": "time", "mount": "mnt"}
"""The options of nsenter, and the files in /proc/PID/ns."""
PREFIXES = {4: ("10.77.0.", "10.78.0."), 6: ("fd77::", "fd78::")}
_SETTINGS = "/proc/sys/net/ipv6/conf/{}/accept_dad"


class Holder:
    """A process that keeps namespaces alive."""

    def __init__(self, *options: str, script: str = "") -> None:
        """`options` of `unshare`; the script runs in the new namespaces, as root of them."""
        setup = f"set -e; ip link set lo up; for conf in all default; do echo 0 > {_SETTINGS.format('$conf')}; done"
        self._process = subprocess.Popen(
            ["unshare", "--net", *options, "sh", "-c", f"{setup}; {script or ':'}; echo $$; exec cat"],
            stdin=subprocess.PIPE,  # `cat` ends when this process does
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(self._process.communicate()[1].strip())
        self.pid = int(line)

    def run(self, *command: str) -> str:
        """Run a command in the namespaces, and return its output."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def command(self, *command: str) -> list[str]:
        """A command that runs in the namespaces, for `subprocess`."""
        return [
            "nsenter",
            f"--target={self.pid}",
            *(f"--{name}" for name in NAMESPACES),
            f"--wd={os.getcwd()}",
            *command,
        ]

    def close(self) -> None:
        """End the process; the namespaces end with the last process in them."""
        self._process.communicate()


class Host:
    """One host of a network."""

    def __init__(self, number: int, holder: Holder, bridge: Holder, folder: Path, addresses: Sequence[str]) -> None:
        self.name, self.addresses = f"host{number}", list(addresses)
        self.folder = folder
        """The files of this host, seen from outside; the host sees them at `Network.shared_path`, if not shared."""
        self._number, self._holder, self._bridge = number, holder, bridge

    @property
    def address(self) -> str:
        """The address of its first interface."""
        return self.addresses[0]

    def run(self, *command: str) -> str:
        """Run a command on the host, and return its output."""
        return self._holder.run(*command)

    def command(self, *command: str) -> list[str]:
        """A command that runs on the host, for `subprocess`."""
        return self._holder.command(*command)

    def start(
        self,
        server: ForkServer,
        script: str | Path,
        function: str,
        arguments: Sequence[Any] = (),
        *,
        log: str | Path,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Call a function of a script in a new process on the host, as `ForkServer.start` does."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        variables = {"GLOO_SOCKET_IFNAME": "", "TMPDIR": str(self.folder / "tmp"), **(environment or {})}
        call = [self._holder.pid, str(Path(script).resolve()), function, list(arguments)]
        return server.start(__file__, "call_on_host", call, log=log, environment=variables)

    def cut(self, interface: int = 0) -> None:
        """Cut the cable of an interface: packets are lost, and nobody is told."""
        self._bridge.run("ip", "link", "set", f"port{self._number}-{interface}", "down")

    def restore(self, interface: int = 0) -> None:
        """Plug it in again."""
        self._bridge.run("ip", "link", "set", f"port{self._number}-{interface}", "up")

    def signal(self, number: int) -> None:
        """Send a signal to all processes on the host, as when a virtual machine is paused."""
        namespace = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if int(process) != self._holder.pid and os.readlink(f"/proc/{process}/ns/net") == namespace:
                    os.kill(int(process), number)

    def open_ports(self, first: int, last: int) -> None:
        """Start a firewall that lets others connect to these ports alone; what this host connects to is answered."""
        needs("nft")
        rules = (
            "table inet filter { chain input { type filter hook input priority 0; policy drop; iif lo accept;"
            " ct state established,related accept; meta l4proto { icmp, ipv6-icmp } accept;"
            f" tcp dport {first}-{last} accept; counter; }}; }}"
        )
        self.run("nft", rules)

    def blocked_packets(self) -> int:
        """How many packets the firewall has dropped."""
        words = self.run("nft", "list", "chain", "inet", "filter", "input").split()
        return int(words[words.index("packets") + 1])

    def relay_ports(self, first: int, last: int, relay: int) -> None:
        """Lead the connections of this host to these ports through a relay on the host (see `relay.py`)."""
        needs("nft")
        self.run(
            "nft",
            "table inet relay { chain output { type nat hook output priority 0; meta mark 77 accept; "
            f"oif lo accept; tcp dport {first}-{last} redirect to :{relay}; }}; }}",
        )

    def write_hosts(self, text: str) -> None:
        """Write its /etc/hosts."""
        (self.folder / "hosts").write_text(text)


class Network:
    """Hosts that reach each other, until `close`."""

    def __init__(
        self,
        folder: Path,
        hosts: int = 2,
        *,
        version: Literal[4, 6] = 4,
        interfaces: Literal[1, 2] = 1,
        names: Names = "known",
        separate: bool = True,
        clocks: Sequence[float] = (),
    ) -> None:
        """Start hosts, or skip the test where that is not allowed.

        `folder` is for their files. Hosts with `separate` files see those of `Host.folder` at `shared_path`, and have
        that path in common otherwise. `clocks` are the seconds by which the monotonic clock of each host is ahead.
        """
        needs("ip", "unshare", "nsenter")
        self.shared_path = folder / "shared"
        self.shared_path.mkdir(parents=True)
        self._folder, self._names, self._holders = folder, names, list[Holder]()
        self.hosts: list[Host] = []
        try:
            bridge = self._hold(script="; ".join(_new_bridge(number) for number in range(interfaces)))
            for number in range(hosts):
                addresses = [f"{prefix}{number + 1}" for prefix in PREFIXES[version][:interfaces]]
                own = folder / f"host{number}"
                own.mkdir()
                (own / "hosts").touch()
                holder = self._hold(
                    "--uts",
                    "--mount",
                    *_clock_options(clocks[number] if clocks else 0.0),
                    script=f"hostname host{number}; mount --bind {own}/hosts /etc/hosts; "
                    + (f"mount --bind {own} {self.shared_path}" if separate else ":"),
                )
                for interface, address in enumerate(addresses):
                    _connect(bridge, holder, number, interface, address)
                self.hosts.append(Host(number, holder, bridge, own, addresses))
            for host in self.hosts:
                host.write_hosts(self._hosts_file(host))
        except BaseException:
            self.close()
            raise

    def _hold(self, *options: str, script: str) -> Holder:
        try:
            holder = Holder(*options, script=script)
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here (unshare --net {' '.join(options)}): {error}")
        self._holders.append(holder)
        return holder

    def _hosts_file(self, host: Host) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        if self._names == "known":
            lines += [f"{other.address} {other.name}" for other in self.hosts]
        elif self._names == "loopback":
            lines.append(f"127.0.1.1 {host.name}")
        return "".join(f"{line}\n" for line in lines)

    def start(
        self,
        server: ForkServer,
        script: str | Path,
        function: str = "main",
        arguments: Sequence[Any] = (),
        *,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Child]:
        """Start ranks on the hosts, as many on each, in the environment that torchrun would set; `rank-N.log`."""
        ranks = ranks or len(self.hosts)
        local, port = ranks // len(self.hosts), (environment or {}).get("MASTER_PORT", str(PORT))
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": port, **(environment or {})}
        return [
            self.hosts[rank // local].start(
                server,
                script,
                function,
                arguments,
                log=self.log(rank),
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % local)},
            )
            for rank in range(ranks)
        ]

    def log(self, rank: int) -> Path:
        """The file with the output of a rank that `start` started."""
        return self._folder / f"rank-{rank}.log"

    def wait(self, ranks: Sequence[Child], timeout: float = 100.0) -> list[str]:
        """Wait until these ranks have ended, kill those that have not in time, and return what they wrote."""
        end = time.monotonic() + timeout
        for rank in ranks:
            with contextlib.suppress(TimeoutError):
                rank.wait(max(0.1, end - time.monotonic()))
        for rank in ranks:
            if rank.poll() is None:
                rank.signal(9)
                rank.wait(60)
        return [self.log(number).read_text() for number in range(len(ranks))]

    def close(self) -> None:
        """End the hosts."""
        for holder in self._holders:
            holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def needs(*programs: str, root: bool = True) -> None:
    """Skip the test without root or one of these programs."""
    if root and os.geteuid() != 0:
        pytest.skip("network namespaces need root (CAP_NET_ADMIN and CAP_SYS_ADMIN)")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"this test needs the program {program}")


def _new_bridge(number: int) -> str:
    return f"ip link add bridge{number} type bridge; ip link set bridge{number} up"


def _clock_options(seconds: float) -> list[str]:
    if not seconds:
        return []
    return ["--time", f"--monotonic={seconds:g}", f"--boottime={seconds:g}", "--fork", "--kill-child"]


def _connect(bridge: Holder, host: Holder, number: int, interface: int, address: str) -> None:
    """Connect an interface of a host to its bridge."""
    port, device = f"port{number}-{interface}", f"eth{interface}"
    peer = ["type", "veth", "peer", "name", device, "netns", str(host.pid)]
    bridge.run("ip", "link", "add", port, *peer)
    bridge.run("ip", "link", "set", port, "master", f"bridge{interface}", "up")
    host.run("ip", "address", "add", f"{address}/{64 if ':' in address else 24}", "dev", device)
    host.run("ip", "link", "set", device, "up")


def enter(pid: int) -> None:
    """Enter the namespaces of another process; this one must have one thread."""
    here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as files:
        for handle in [_open(f"/proc/{pid}/ns/{name}", files) for name in NAMESPACES.values()]:
            if libc.setns(handle, 0):
                raise OSError(ctypes.get_errno(), "setns failed")
    os.chdir(here)


def _open(path: str, files: contextlib.ExitStack) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    files.callback(os.close, handle)
    return handle


def call_on_host(pid: int, script: str, function: str, arguments: list[Any]) -> None:
    """In a forked process: call a function of a script on a host."""
    enter(pid)
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)(*arguments)

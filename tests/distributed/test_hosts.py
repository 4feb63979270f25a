"""Jobs on several hosts, which are network namespaces (see `support/hosts.py`)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stageline.testing import ForkServer
from support.hosts import Network, needs
from support.relay import Relay

RANK = Path(__file__).parents[1] / "support" / "host_rank.py"

ECHO = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])), reuse_port=True)
print("ready", flush=True)
link, _ = server.accept()
while data := link.recv(100):
    link.sendall(data)
"""
CLIENT = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)
for line in sys.stdin:
    link.sendall(line.encode())
    sys.stdout.write(link.makefile().readline())
    sys.stdout.flush()
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "network") as network:
        yield network


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ask(client: subprocess.Popen[str], text: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{text}\n")
    client.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_hosts_of_the_tests_have_firewalls_and_cables(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    assert second.run("hostname").strip() == "host1"
    (second.folder / "own").touch()
    assert "own" in second.run("ls", str(two_hosts.shared_path))
    assert "own" not in first.run("ls", str(two_hosts.shared_path))
    first.open_ports(5000, 5001)
    processes = []
    try:
        for port in (5000, 6000):
            processes.append(started(first.command(sys.executable, "-S", "-c", ECHO, str(port))))
            assert line_of(processes[-1]) == "ready"
        client = started(second.command(sys.executable, "-S", "-c", CLIENT, "host0", "5000"))
        blocked = started(second.command(sys.executable, "-S", "-c", CLIENT, "host0", "6000"))
        processes += [client, blocked]
        ask(client, "through the firewall")
        assert line_of(client) == "through the firewall"
        first.cut()
        ask(client, "after the cut")
        time.sleep(0.2)
        first.restore()
        assert line_of(client) == "after the cut"
        assert "timed out" in blocked.communicate(timeout=30)[1]
        assert first.blocked_packets() > 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_relay_of_the_tests_delays_caps_holds_and_resets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Relay(listener.getsockname()) as relay,
        socket.create_connection(("127.0.0.1", relay.port)) as client,
    ):
        link, _ = listener.accept()
        relay.delay = 0.1
        began = time.monotonic()
        client.sendall(b"late")
        assert link.recv(100) == b"late"
        assert time.monotonic() - began >= 0.1
        relay.delay, relay.bandwidth = 0.0, 1e6
        began, received = time.monotonic(), 0
        client.sendall(bytes(300_000))
        while received < 300_000:
            received += len(link.recv(1 << 16))
        assert time.monotonic() - began >= 0.25
        relay.held = True
        client.sendall(b"held")
        link.settimeout(0.1)
        with pytest.raises(TimeoutError):
            link.recv(100)
        relay.held = False
        link.settimeout(10)
        assert link.recv(100) == b"held"
        assert relay.reset() == 2
        with pytest.raises(ConnectionResetError):
            link.recv(100)
        link.close()


# ---- jobs without a variable ----


def run(network: Network, server: ForkServer, *arguments: Any, function: str = "main", **options: Any) -> list[str]:
    """Run ranks on the hosts to their end, and return what they wrote."""
    ranks = network.start(server, RANK, function, arguments, **options)
    return network.wait(ranks)


def assert_done(outputs: list[str], addresses: list[str]) -> None:
    """All ranks trained, with the gradients of one process, and listened at these addresses."""
    for output, address in zip(outputs, addresses, strict=True):
        assert f"done at {address}|" in output, outputs


def name_first_host(network: Network) -> dict[str, str]:
    """Let other hosts know host0 by name, which calls itself 127.0.1.1, as on Debian."""
    for host in network.hosts[1:]:
        host.write_hosts(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{network.hosts[0].address} host0\n")
    return {"MASTER_ADDR": "host0"}


def test_a_name_that_resolves_to_loopback_and_a_firewall_with_one_range_of_ports(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """No variable says where anything is. gloo, which has no option for its ports, opens no connection."""
    needs("nft")
    with Network(tmp_path / "network", names="loopback") as network:
        environment = name_first_host(network) | {"STAGELINE_PORTS": "29500-29503", "MASTER_PORT": "29500"}
        for host in network.hosts:
            host.open_ports(29500, 29503)
        outputs = run(network, fork_server, ranks=4, environment=environment)
        assert_done(outputs, [network.hosts[rank // 2].address for rank in range(4)])
        assert outputs[0].count("their connections trust anyone who can reach torch's store") == 1
        assert not any("trust anyone" in output for output in outputs[1:])
        assert [host.blocked_packets() for host in network.hosts] == [0, 0]


KINDS: Mapping[str, dict[str, Any]] = {
    "names that are unknown": {"names": "unknown"},
    "only IPv6": {"version": 6, "names": "unknown"},
    "two interfaces, and the names are those of the other": {"hosts": 3, "interfaces": 2},
}


@pytest.mark.host_matrix
@pytest.mark.parametrize("replicas", [1, 2], ids=["one pipeline", "two replicas"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_each_other_on_every_kind_of_host(
    kind: str, replicas: int, tmp_path: Path, fork_server: ForkServer
) -> None:
    """The replicas of a rank sum their gradients over gloo, which uses the same interface."""
    options = KINDS[kind]
    with Network(tmp_path / "network", **options) as network:
        if "interfaces" in options:
            for host in network.hosts:
                host.write_hosts(f"127.0.0.1 localhost\n{host.addresses[1]} {host.name}\n")
        ranks = 2 * len(network.hosts)
        outputs = run(network, fork_server, 60.0, replicas, ranks=ranks)
        assert_done(outputs, [network.hosts[rank // 2].address for rank in range(ranks)])


@pytest.mark.host_matrix
def test_a_group_of_the_script_needs_one_variable(tmp_path: Path, fork_server: ForkServer) -> None:
    with Network(tmp_path / "network", names="loopback") as network:
        variable = {"GLOO_SOCKET_IFNAME": "eth0"}
        outputs = run(network, fork_server, function="script_makes_group", environment=variable)
        assert_done(outputs, [host.address for host in network.hosts])


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import host_rank
if __name__ == "__main__":
    host_rank.main(60.0)
"""


@pytest.mark.host_matrix
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_needs_no_variable(rendezvous: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with Network(tmp_path / "network", names="loopback") as network:
        first = network.hosts[0].address
        launchers = []
        for number, host in enumerate(network.hosts):
            options = ["--node-rank", str(number), "--master-addr", first, "--master-port", "29500"]
            if rendezvous == "c10d":
                options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400", "--local-addr", host.address]
                options += ["--rdzv-conf", f"is_host={str(number == 0).lower()}", "--rdzv-id", "job"]
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            launchers.append(started(host.command(*command, *options, "script.py", str(RANK.parent))))
        outputs = []
        try:
            outputs += ["\n".join(launcher.communicate(timeout=200)) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.terminate()  # it ends its rank
                launcher.wait(60)
        assert all(f"done at {host.address}|" in "".join(outputs) for host in network.hosts), outputs


# ---- what cannot be reached ----


def test_a_blocked_port_is_named_on_both_sides_within_the_deadline(two_hosts: Network, fork_server: ForkServer) -> None:
    for host in two_hosts.hosts:
        host.open_ports(29500, 29500)
    began = time.monotonic()
    outputs = run(two_hosts, fork_server, 4.0)
    assert time.monotonic() - began < 30
    for output in outputs:
        assert "PipelineError: rank 1 cannot reach rank 0's machine: nothing answers at 10.77.0.1, port " in output
        assert "ports in STAGELINE_PORTS" in output


@pytest.mark.host_matrix
def test_a_peer_that_only_gloo_cannot_reach_is_named(two_hosts: Network, fork_server: ForkServer) -> None:
    for host in two_hosts.hosts:
        host.open_ports(29500, 29509)
    outputs = run(two_hosts, fork_server, 6.0, 2, ranks=4, environment={"STAGELINE_PORTS": "29500-29509"})
    for rank, output in enumerate(outputs):
        peer = (rank + 2) % 4
        error = f"rank {rank} cannot connect to rank {peer} at 10.77.0.{peer // 2 + 1} over gloo within 6 s"
        assert error in output, outputs
        assert "net.ipv4.ip_local_port_range" in output


@pytest.mark.host_matrix
def test_a_host_that_is_not_there_is_named_with_address_and_port(two_hosts: Network, fork_server: ForkServer) -> None:
    two_hosts.hosts[0].cut()
    outputs = run(two_hosts, fork_server, 4.0)
    assert "rank 1 never started: it did not connect within 4 s" in outputs[0]
    assert "nothing answers at MASTER_ADDR=10.77.0.1, MASTER_PORT=29500 within 4 s" in outputs[1]


@pytest.mark.host_matrix
def test_a_host_with_another_version_is_named(two_hosts: Network, fork_server: ForkServer) -> None:
    for output in run(two_hosts, fork_server, 6.0, function="of_another_version"):
        assert "StagelineError: rank 1 runs stageline 0.0.9 and torch " in output
        assert output.count("install the same versions on all hosts") == 1


@pytest.mark.host_matrix
def test_a_second_job_on_the_same_port_is_refused_and_does_not_disturb_the_first(
    two_hosts: Network, fork_server: ForkServer, tmp_path: Path
) -> None:
    first, _ = two_hosts.hosts
    ranks = two_hosts.start(fork_server, RANK, "main", [30.0, 1, 40])
    end = time.monotonic() + 60
    while f":{29500:04X} " not in first.run("cat", "/proc/net/tcp6"):
        assert time.monotonic() < end
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": first.address, "MASTER_PORT": "29500"}
    second = first.start(fork_server, RANK, "main", [5.0], log=tmp_path / "second.log", environment=place)
    assert second.wait(60) == 3
    text = (tmp_path / "second.log").read_text()
    assert "rank 0 cannot listen at MASTER_ADDR=10.77.0.1, MASTER_PORT=29500; another job may use that port" in text
    assert all("done at" in output for output in two_hosts.wait(ranks))


# ---- who may connect ----


SECRET = "a secret of sufficient length"


@pytest.mark.host_matrix
def test_hosts_with_different_secrets_do_not_meet(two_hosts: Network, fork_server: ForkServer) -> None:
    for host, text in zip(two_hosts.hosts, (SECRET, "another secret of that length"), strict=True):
        (host.folder / "secret").write_text(text)
    variables = {"STAGELINE_SECRET_FILE": str(two_hosts.shared_path / "secret")}
    outputs = run(two_hosts, fork_server, 6.0, environment=variables)
    assert "TrustError: rank 1 does not have the secret of rank 0: set STAGELINE_SECRET" in outputs[1]
    assert "PipelineError: rank 1 does not have the secret of rank 0: set STAGELINE_SECRET" in outputs[0]
    (two_hosts.hosts[1].folder / "secret").write_text(SECRET)
    outputs = run(two_hosts, fork_server, 30.0, environment=variables)
    assert all("done at" in output and "trust anyone" not in output for output in outputs)


def certificates(folder: Path) -> dict[str, str]:
    """A certificate that signed itself, which is thus also its authority."""
    needs("openssl")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ranks"
    subprocess.run([*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, timeout=60)
    files = {"CERT": "cert.pem", "KEY": "key.pem", "CA": "cert.pem"}
    return {f"STAGELINE_TLS_{name}": str(folder / file) for name, file in files.items()}


@pytest.mark.host_matrix
def test_a_job_over_tls(two_hosts: Network, fork_server: ForkServer, tmp_path: Path) -> None:
    variables = certificates(tmp_path) | {"STAGELINE_SECRET": SECRET}
    outputs = run(two_hosts, fork_server, ranks=4, environment=variables)
    assert all("done at" in output for output in outputs), outputs


# ---- machines that are lost ----


def wait_for_steps(network: Network, ranks: int) -> None:
    """Wait until all ranks train."""
    end = time.monotonic() + 100
    while not all(network.log(rank).exists() and "step 3" in network.log(rank).read_text() for rank in range(ranks)):
        assert time.monotonic() < end, [network.log(rank).read_text() for rank in range(ranks)]
        time.sleep(0.05)


@pytest.mark.host_matrix
def test_the_first_of_three_machines_is_named_when_it_is_cut_off(tmp_path: Path, fork_server: ForkServer) -> None:
    """It has rank 0, the store and the failure monitor; the standby on the second machine takes over."""
    with Network(tmp_path / "network", 3) as network:
        ranks = network.start(fork_server, RANK, "main", (4.0, 1, 100_000, 0.01))
        wait_for_steps(network, 3)
        network.hosts[0].cut()
        outputs = network.wait(ranks)
        for output in outputs[1:]:
            assert "PipelineError: rank 0 froze: no sign of life for " in output, outputs
            assert "its machine 10.77.0.1 is not reached" in output
        assert "PipelineError: rank 1 froze" in outputs[0] or "PipelineError: rank 2 froze" in outputs[0], outputs


@pytest.mark.host_matrix
def test_packets_lost_for_less_than_the_deadline_cost_only_time(two_hosts: Network, fork_server: ForkServer) -> None:
    ranks = two_hosts.start(fork_server, RANK, "main", (20.0, 1, 200, 0.02), ranks=4)
    wait_for_steps(two_hosts, 4)
    two_hosts.hosts[1].cut()
    time.sleep(5.0)
    two_hosts.hosts[1].restore()
    assert_done(two_hosts.wait(ranks), [two_hosts.hosts[rank // 2].address for rank in range(4)])


@pytest.mark.host_matrix
def test_clocks_of_machines_that_started_at_different_times_are_aligned(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """A day apart; the timeline has one scale, says how well the clocks agree, and knows the machines."""
    with Network(tmp_path / "network", clocks=(0.0, 86_400.0)) as network:
        for output in run(network, fork_server, ranks=4):
            match = re.search(r"clocks (\S+) makespan (\S+) machines (\d)", output)
            assert match is not None, output
            uncertainty, makespan, machines = (float(number) for number in match.groups())
            assert 0 < uncertainty < 10
            assert 0 < makespan < 60
            assert machines == 2

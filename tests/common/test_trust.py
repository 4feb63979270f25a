"""The secret of a job: who can read it, what proves it, and what an attacker who reads the whole store can do."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stageline as sl
from stageline.common import trust
from stageline.common.errors import TrustError
from stageline.common.handshake import open_connection
from stageline.common.trust import SecretFile, Sharing, read_secret
from stageline.distributed.bootstrap import _channels
from stageline.testing import assert_same_bits, one_process_step, run_ranks


class Pinboard:
    """A store that anybody can read."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.kept[key] = value

    def get(self, key: str, /) -> bytes:
        return self.kept[key].encode()


def test_only_its_owner_can_read_the_secret_until_it_is_removed() -> None:
    file = SecretFile("hidden")
    folder = Path(file.path).parent
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_secret(file.path) == "hidden"
    file.remove()
    file.remove()
    assert not folder.exists()


def test_a_secret_file_that_others_can_read_or_create_is_refused(tmp_path: Path) -> None:
    file = SecretFile("hidden")
    link = Path(file.path).with_name("link")
    link.symlink_to(file.path)
    with pytest.raises(TrustError, match=r"cannot read the secret .*symbolic links"):
        read_secret(str(link))
    link.unlink()
    os.chmod(file.path, 0o640)
    with pytest.raises(TrustError, match="others can read it"):
        read_secret(file.path)
    os.chmod(file.path, 0o600)
    Path(file.path).parent.chmod(0o755)
    with pytest.raises(TrustError, match="others can read it or its folder"):
        read_secret(file.path)
    if os.geteuid() == 0:
        Path(file.path).parent.chmod(0o700)
        os.chown(file.path, 12345, 12345)
        with pytest.raises(TrustError, match="it belongs to user 12345, and this is user 0"):
            read_secret(file.path)
    file.remove()
    with pytest.raises(TrustError, match=r"must run as one user and see the same files"):
        read_secret(file.path)


def test_the_secret_of_a_killed_rank_is_removed_by_the_next() -> None:
    code = (
        "import os; from stageline.common.trust import SecretFile; file = SecretFile('x'); "
        "print(file.path, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    path = Path(done.stdout.strip())
    assert path.is_file(), done.stderr
    mine = SecretFile("y")
    assert not path.parent.exists()
    assert Path(mine.path).is_file()
    mine.remove()


def test_a_secret_in_the_store_is_refused_on_one_machine() -> None:
    store = Pinboard()
    store.set("key", "text planted")
    with pytest.raises(TrustError, match=r"rank 1 read 'text' under key in the store.*someone else wrote to the store"):
        Sharing(store, "key", 1, here=True)("")


def test_one_warning_says_that_links_trust_the_store_across_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_warned", False)
    store = Pinboard()
    with pytest.warns(UserWarning, match="their connections trust anyone who can reach torch.s store"):
        Sharing(store, "control", 0, here=False)("known")
    Sharing(store, "links", 0, here=False)("known")  # warnings are errors here
    assert Sharing(store, "control", 1, here=False)("") == Sharing(store, "links", 1, here=False)("") == "known"


def test_a_secret_of_the_launcher_keeps_the_store_blind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Pinboard()
    monkeypatch.setenv("STAGELINE_SECRET", "1234567890abcdef")
    assert Sharing(store, "links", 0, here=False)("10.0.0.1:5000:token") == "10.0.0.1:5000:token"
    assert "token" not in str(store.kept)
    assert Sharing(store, "links", 1, here=False)("") == "10.0.0.1:5000:token"
    store.set("control", store.get("links").decode())
    wrong = "rank 1 does not have the secret of rank 0: set STAGELINE_SECRET or STAGELINE_SECRET_FILE to the same"
    with pytest.raises(TrustError, match=wrong):  # of another key
        Sharing(store, "control", 1, here=False)("")
    (tmp_path / "secret").write_text("it has a different secret of this job\n")
    monkeypatch.setenv("STAGELINE_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(TrustError, match=wrong):
        Sharing(store, "links", 1, here=False)("")
    store.set("plain", "text 10.0.0.1:5000:token")
    with pytest.raises(TrustError, match=wrong):  # rank 0 has none
        Sharing(store, "plain", 1, here=False)("")
    (tmp_path / "secret").write_text("short")
    with pytest.raises(TrustError, match=r"STAGELINE_SECRET_FILE=.* has 5 characters, but at least 16 are needed"):
        Sharing(store, "links", 1, here=False)
    monkeypatch.setenv("STAGELINE_SECRET_FILE", str(tmp_path / "absent"))
    with pytest.raises(TrustError, match="cannot read the secret of this job from the file of STAGELINE_SECRET_FILE"):
        Sharing(store, "links", 1, here=False)


def knock(address: tuple[str, int], message: bytes) -> None:
    """Send something to a port, whoever listens; the effect shows later."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as link:
        link.sendall(message)


def train_beside_a_stranger(rank: int) -> int:
    """One step, before which an attacker who has read the store tries everything possible."""
    del os.environ["STAGELINE_SECRET"]  # as if torchrun had started the ranks
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    one_process_step(plain, nn.functional.mse_loss, x, y, microbatches=2)
    pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2)
    store = dist.distributed_c10d._get_default_store()
    (watch,) = _channels.values()
    part = f"stageline/{watch.name}/1/stageline/links/0/1"
    keys = {"token": f"{part}/token", "0": f"{part}/0", "1": f"{part}/1", "": f"{watch.name}/stageline/control/0/2"}
    assert store.check(list(keys.values()))
    known = {name: store.get(key).decode() for name, key in keys.items()}
    assert known["token"].startswith("file ")
    assert known[""].startswith("file ")
    dist.barrier()
    assert not Path(known["token"][5:]).exists(), "all ranks have read it"
    words = [word for value in known.values() for word in (value, *value.split("|"), *value.split(" "))]
    for target in range(2):
        host, port, _ = known[str(target)].split("|")
        for word in words:
            for kind in ("forward", "exchange", "collective"):
                facts = {"source": 1 - target, "target": target, "kind": kind, "call": False}
                with pytest.raises(TrustError, match="it has a different secret"):
                    open_connection(host, int(port), word, facts, timeout=60.0)
            knock((host, int(port)), word.encode())
    assert watch.control._channel is not None
    monitor = watch.control._channel.connection
    assert monitor is not None
    for word in words:
        for other in range(2):
            knock(monitor.socket.getpeername(), json.dumps({"hello": other, "token": word}).encode() + b"\n")
    assert watch.control.lost is None
    pipe.step(x, y)
    mine = dict(pipe.named_gradients())
    assert_same_bits(mine, {name: value.grad for name, value in plain.named_parameters() if name in mine})
    return len(words)


def test_reading_the_store_is_not_enough_to_take_a_link_or_to_end_the_job() -> None:
    assert all(count > 8 for count in run_ranks(train_beside_a_stranger, 2, timeout=200))

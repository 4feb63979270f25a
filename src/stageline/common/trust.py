"""Authentication of the ranks of a job: a shared secret, and proofs that a rank knows it.

A launcher gives all ranks a secret, STAGELINE_SECRET or STAGELINE_SECRET_FILE. Without it, rank 0 draws one. On one
machine, that is in a file that only its owner can read, and torch's store, which anyone who reaches it can read, holds
only the file's name. A rank never sends the secret: it sends a keyed digest of values that both ends chose for this
connection, so a recorded proof is useless. Needs only the standard library.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from stageline.common.errors import TrustError, shorten

_LONGEST = 4096
_SHORTEST = 16
"""The fewest characters of a secret that a user chose."""
_warned = False


class Store(Protocol):
    """The part of a torch.distributed store that is used."""

    def set(self, key: str, value: str, /) -> object:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""


def new_nonce() -> str:
    """Return random text that is used once.

    >>> len(new_nonce()), new_nonce() == new_nonce()
    (32, False)
    """
    return secrets.token_hex(16)


def proof(secret: str, *facts: object) -> str:
    """Return a digest of these facts that only someone who knows the secret can compute: 64 hexadecimal digits.

    The facts include values that both ends chose for this connection, and which end this is, so that a proof is valid
    only once.

    >>> proof("secret", "rank", 1) == proof("secret", "rank", 1), proof("secret", "rank", 1) == proof("secret", "rank1")
    (True, False)
    """
    parts = [str(fact).encode() for fact in facts]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), text, "sha256").hex()


def proves(claimed: object, secret: str, *facts: object) -> bool:
    """Whether a claimed proof is valid; compares in constant time.

    >>> proves(proof("secret", 1), "secret", 1), proves("0" * 64, "secret", 1), proves(None, "secret", 1)
    (True, False, False)
    """
    return hmac.compare_digest(str(claimed).encode(), proof(secret, *facts).encode())


class SecretFile:
    """A file that only its owner can read, in a new folder that only its owner can enter.

    >>> file = SecretFile("shared secret")
    >>> read_secret(file.path)
    'shared secret'
    >>> file.remove()
    """

    def __init__(self, text: str) -> None:
        """Write the file; call `remove` as soon as all ranks have read it."""
        import tempfile  # the failure monitor, which writes no file, starts sooner without it

        from stageline.common.temporary_folder import TemporaryFolder

        try:
            self._folder = TemporaryFolder("secret-")  # mode 0700
            self.path = str(self._folder.path / "secret")
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise TrustError(
                f"rank 0 cannot write the secret of this job to {tempfile.gettempdir()}: {error}; set TMPDIR to a "
                "writable folder"
            ) from error

    def remove(self) -> None:
        """Remove the file and its folder; a no-op the second time, and in a forked child."""
        self._folder.remove()


def read_secret(path: str) -> str:
    """Read a secret; raise `TrustError` if another user could have written or read it."""
    try:
        folder = os.lstat(os.path.dirname(path))
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not stat.S_ISDIR(folder.st_mode):
            raise _unreadable(path, "it is not a file in a folder")
        if {status.st_uid, folder.st_uid} != {os.geteuid()}:
            raise _unreadable(path, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        if (status.st_mode | folder.st_mode) & 0o077:
            raise _unreadable(path, "others can read it or its folder")
        return file.read(_LONGEST).decode(errors="replace")


def _unreadable(path: str, why: str) -> TrustError:
    return TrustError(
        f"cannot read the secret of this job from {shorten(path, 100)}: {why}; the ranks of a machine must run as one "
        "user and see the same files. If they are on several machines, set LOCAL_WORLD_SIZE, as torchrun does, to the "
        "number of ranks on each"
    )


def job_secret(environment: Mapping[str, str] | None = None) -> str:
    """The secret that the launcher or the user gave this rank; empty if there is none.

    >>> job_secret({}), job_secret({"STAGELINE_SECRET": "correct horse battery staple"})
    ('', 'correct horse battery staple')
    """
    variables = os.environ if environment is None else environment
    path, text = variables.get("STAGELINE_SECRET_FILE", ""), variables.get("STAGELINE_SECRET", "")
    name = "STAGELINE_SECRET"
    if path:
        name = f"the file of STAGELINE_SECRET_FILE={shorten(path, 100)}"
        try:
            text = Path(path).read_text(encoding="utf-8")[:_LONGEST].strip()
        except (OSError, ValueError) as error:
            raise TrustError(f"cannot read the secret of this job from {name}: {error}") from error
    if (path or text) and len(text) < _SHORTEST:
        raise TrustError(
            f"{name} has {len(text)} characters, but at least {_SHORTEST} are needed; create one with openssl rand "
            "-hex 32"
        )
    return text


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a launcher adds to the environment of all ranks of a job: a new secret, unless the user gave one.

    >>> secret_variables({"STAGELINE_SECRET_FILE": "/run/secrets/job"}), list(secret_variables({}))
    ({}, ['STAGELINE_SECRET'])
    """
    if environment.get("STAGELINE_SECRET_FILE") or environment.get("STAGELINE_SECRET"):
        return {}
    return {"STAGELINE_SECRET": secrets.token_hex(32)}


def seal(secret: str, name: str, text: str) -> str:
    """The text for those who know the secret: nobody else can read or change it, or take it for one of another name.

    >>> sealed = seal("a secret", "address", "10.0.0.1:5000")
    >>> unseal("a secret", "address", sealed), unseal("another", "address", sealed), unseal("a secret", "key", sealed)
    ('10.0.0.1:5000', None, None)
    """
    nonce, data = new_nonce(), text.encode()
    hidden = bytes(one ^ other for one, other in zip(data, _stream(secret, nonce, len(data)), strict=True)).hex()
    return f"{nonce} {hidden} {proof(secret, 'sealed', name, nonce, hidden)}"


def unseal(secret: str, name: str, sealed: str) -> str | None:
    """The text; None if it was not sealed under this name by someone who knows the secret."""
    nonce, hidden, claim = (*sealed.split(" "), "", "")[:3]
    if not proves(claim, secret, "sealed", name, nonce, hidden):
        return None
    data = bytes.fromhex(hidden)
    return bytes(one ^ other for one, other in zip(data, _stream(secret, nonce, len(data)), strict=True)).decode()


def _stream(secret: str, nonce: str, size: int) -> bytes:
    """Bytes that only those who know the secret can compute: keyed digests of a nonce and a counter."""
    blocks = (bytes.fromhex(proof(secret, "stream", nonce, number)) for number in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def ranks_here(variables: Mapping[str, str]) -> int | None:
    """How many ranks the launcher says that it started on this machine; None if it does not say.

    A process with an NCCL_HOSTID poses as a machine of its own, to share a GPU over NCCL.

    >>> ranks_here({"LOCAL_WORLD_SIZE": "4"}), ranks_here({"LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "a"})
    (4, None)
    """
    text = variables.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and not variables.get("NCCL_HOSTID") else None


def one_machine(ranks: int, environment: Mapping[str, str] | None = None) -> bool:
    """Whether all ranks are on this machine, according to the environment of the launcher.

    >>> one_machine(4, {"LOCAL_WORLD_SIZE": "4"}), one_machine(4, {"LOCAL_WORLD_SIZE": "2"})
    (True, False)
    >>> one_machine(4, {"MASTER_ADDR": "127.0.0.1"}), one_machine(4, {"MASTER_ADDR": "10.0.0.5"})
    (True, False)
    >>> one_machine(4, {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "a"})
    True
    """
    variables = os.environ if environment is None else environment
    local_ranks, machines = ranks_here(variables), variables.get("SLURM_NNODES", "")
    if local_ranks is not None:
        return local_ranks >= ranks
    if machines.isdecimal():
        return int(machines) == 1
    addresses = [variables.get(name, "") for name in ("STAGELINE_CONTROL_HOST", "STAGELINE_HOST", "MASTER_ADDR")]
    return all(address in ("", "localhost", "::1") or address.startswith("127.") for address in addresses)


class Sharing:
    """Shares a text of rank 0 with all ranks of a job; on one machine, with nobody else.

    >>> class DictStore(dict):
    ...     set = dict.__setitem__
    ...     get = lambda self, key: self[key].encode()
    >>> store = DictStore()
    >>> first, second = (Sharing(store, "key", rank, here=True) for rank in range(2))
    >>> first("a secret"), second(""), "a secret" in str(store)
    ('a secret', 'a secret', False)
    >>> first.done()
    """

    def __init__(self, store: Store, key: str, rank: int, *, here: bool) -> None:
        """Share through a key of the store. `here` means that all ranks are on this machine."""
        self._store, self._key, self._rank, self._here = store, key, rank, here
        self._file: SecretFile | None = None
        self._secret = job_secret()

    def __call__(self, text: str) -> str:
        """Return the text of rank 0; rank 0 does not wait for the others."""
        if self._rank == 0:
            self._store.set(self._key, self._offer(text))
            return text
        kind, _, value = self._store.get(self._key).decode(errors="replace").partition(" ")
        if kind == "sealed" or (self._secret and kind != "none"):
            opened = unseal(self._secret, self._key, value) if self._secret and kind == "sealed" else None
            if opened is None:
                raise TrustError(
                    f"rank {self._rank} does not have the secret of rank 0: set STAGELINE_SECRET or "
                    "STAGELINE_SECRET_FILE to the same secret on all hosts"
                )
            return opened
        if kind == "file":
            return read_secret(value)
        if kind == "none":  # an empty value cannot be stored: `get` would wait for it
            return ""
        if kind == "text" and not self._here:
            return value
        raise TrustError(
            f"rank {self._rank} read {shorten(kind, 20)} under {self._key} in the store, where rank 0 of a job on one "
            "machine stores the name of a file; someone else wrote to the store, or the ranks have different values "
            "of LOCAL_WORLD_SIZE"
        )

    def _offer(self, text: str) -> str:
        if not text:
            return "none"
        if self._secret:
            return f"sealed {seal(self._secret, self._key, text)}"
        if self._here:
            self._file = SecretFile(text)
            return f"file {self._file.path}"
        _warn()
        return f"text {text}"

    def done(self) -> None:
        """Remove the file, when all ranks have the text or the job ends."""
        if self._file is not None:
            self._file.remove()


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "the ranks are on several machines and have no secret, so their connections trust anyone who can reach "
            "torch's store; set STAGELINE_SECRET or STAGELINE_SECRET_FILE on all hosts, or use a trusted network",
            stacklevel=2,
        )

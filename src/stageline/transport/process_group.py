"""Ranks as processes of a torch.distributed process group: each message is a typed header and then the bytes.

For the time of a step, every channel has a thread at its receiving end that takes the messages as they come, so
receives are always posted ahead; sends are handed to the process group, which does not wait for the receiver.
Nothing on the wire is pickled: a header is a few hundred bytes of JSON, and tensors are their bytes.

A receive is posted for a header and as many bytes of tensors as the message before it on its channel had. If a message
has just as many, it goes out in one piece; if not, its header goes first and its tensors follow. Both ends know the
message before, so shapes may change at any time, and while they do not, every message is one transfer.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.transport.protocol import Header, Leaf, Message, PeerFailed, Traffic, TransportError
from stageline.transport.threads import ThreadHub

HEAD = 4096
"""Bytes of the first part of every message; a longer header announces its length and follows as a second part."""

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
FAILED = -1
"""The stage that a note of failure is from."""

TAGS: dict[Traffic, int] = {"forward": 1, "backward": 2}


def pack(message: Message) -> list[Tensor]:
    """Turn a message into byte tensors: the header (of fixed size, or announced), then all tensors in one piece.

    >>> header = Header(0, 1, "forward", 0, 0, 0)
    >>> [len(part) for part in pack(Message(header, [torch.zeros(3), 2, None], "*", [True, False, False]))]
    [4096, 12]
    """
    described: list[Any] = []
    pieces: list[Tensor] = []
    for leaf in message.leaves:
        if isinstance(leaf, Tensor):
            described.append([str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.device.type])
            pieces.append(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        else:
            described.append(leaf)
    head = message.header
    fields = [head.source, head.target, head.traffic, head.stage, head.microbatch, head.step]
    text = json.dumps([fields, described, message.tree, [bool(want) for want in message.wants_gradient]]).encode()
    first = torch.zeros(HEAD, dtype=torch.uint8)
    parts = [first]
    if len(text) <= HEAD - 8:
        first[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:
        parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    first[:8] = torch.tensor([len(text)]).view(torch.uint8)
    if sum(piece.numel() for piece in pieces):
        parts.append(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    return parts


def unpack(text: bytes, payload: Tensor | None) -> Message:
    """Build the message again, refusing what is not one."""
    try:
        fields, described, tree, wants = json.loads(text)
        header = Header(*fields)
        leaves: list[Leaf] = []
        at = 0
        for item in described:
            if isinstance(item, list):
                dtype, shape = DTYPES[item[0]], [int(size) for size in item[1]]
                size = dtype.itemsize * int(torch.Size(shape).numel())
                piece = torch.empty(0, dtype=torch.uint8) if payload is None else payload[at : at + size]
                # A copy of its own, aligned and not kept alive by its neighbours.
                leaf = piece.clone().view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
                # What left a GPU arrives on this process's own.
                leaves.append(leaf if item[2] == "cpu" else leaf.to(str(item[2])))
                at += size
            else:
                leaves.append(item)
        return Message(header, leaves, str(tree), [bool(want) for want in wants])
    except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as error:
        raise TransportError(f"a message that cannot be read arrived: {type(error).__name__}: {error}") from error


def payload_bytes(text: bytes) -> int:
    """How many bytes of tensors follow a header."""
    _, described, _, _ = json.loads(text)
    return sum(
        DTYPES[item[0]].itemsize * int(torch.Size(item[1]).numel()) for item in described if isinstance(item, list)
    )


class ProcessGroupTransport:
    """One process's end. `begin` is told how many messages each channel will bring in this step."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use the default group, or one of the caller's."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._inbox = ThreadHub(self.ranks)
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._owed: dict[tuple[int, Traffic], int] = {}
        self._last_out: dict[tuple[int, Traffic], int] = {}
        self._last_in: dict[tuple[int, Traffic], int] = {}
        self._threads: list[threading.Thread] = []

    def begin(
        self, expected: Mapping[tuple[int, Traffic], int], owed: Mapping[tuple[int, Traffic], int] | None = None
    ) -> None:
        """Post the receives of a step; `owed` is how many messages each channel from here will carry."""
        self._owed = dict(owed or {})
        self._inbox.reset()
        self._threads = [
            threading.Thread(target=self._receive_all, args=(source, traffic, count), daemon=True)
            for (source, traffic), count in expected.items()
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, deadline: float) -> None:
        """Wait until everything is sent and received."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait(datetime.timedelta(seconds=deadline))
        for thread in self._threads:
            thread.join(deadline)
            if thread.is_alive():
                raise TransportError(f"rank {self.rank} waited {deadline:g} s for its messages to be taken")
        self._threads = []

    def send(self, message: Message) -> None:
        """Hand the message to the process group; its bytes are kept until the step is over."""
        head = message.header
        channel = (head.target, head.traffic)
        self._owed[channel] = self._owed.get(channel, 0) - 1
        parts = pack(message)
        size = len(parts[-1]) if len(parts) > 1 else 0
        if len(parts) == 2 and size == self._last_out.get(channel, 0) and not _is_long(parts[0]):
            parts = [torch.cat(parts)]
        self._last_out[channel] = 0 if _is_long(parts[0]) else size
        for part in parts:
            work = dist.isend(part, group_dst=head.target, group=self.group, tag=TAGS[head.traffic])
            self._sent.append((work, part))

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the channel."""
        return self._inbox.take(header, deadline)

    def fail(self, error: BaseException, where: str) -> None:
        """Stop this rank's own waits, and send a note of failure in place of every message that it still owes.

        So every receive that was posted comes to its end, the news travels from rank to rank, and no message is left
        on the way that the next step could take for its own.
        """
        self._inbox.set_failure(self.rank, error, where)
        origin = error.origin if isinstance(error, PeerFailed) else self.rank
        for (target, traffic), count in self._owed.items():
            for _ in range(count):
                header = Header(self.rank, target, traffic, FAILED, FAILED, FAILED)
                self.send(Message(header, [origin, where, f"{type(error).__name__}: {error}"], "", [False] * 3))

    def close(self) -> None:
        """Nothing is left behind between steps."""

    def _receive_all(self, source: int, traffic: Traffic, count: int) -> None:
        try:
            for _ in range(count):
                message = self._receive_one(source, traffic)
                if message.header.stage == FAILED:
                    origin, where, said = message.leaves
                    self._inbox.set_failure(int(origin), RuntimeError(str(said)), str(where))  # type: ignore[arg-type]
                else:
                    self._inbox.put(message)
        except BaseException as error:
            self._inbox.set_failure(source, error, f"receiving from rank {source} failed")

    def _receive_one(self, source: int, traffic: Traffic) -> Message:
        tag, channel = TAGS[traffic], (source, traffic)
        expected = self._last_in.get(channel, 0)
        buffer = torch.zeros(HEAD + expected, dtype=torch.uint8)
        dist.recv(buffer, group_src=source, group=self.group, tag=tag)
        length = int(buffer[:8].view(torch.int64)[0])
        if not 0 < length < 1 << 30:
            raise TransportError(f"rank {source} sent a header of {length} bytes")
        long = _is_long(buffer)
        if long:
            longer = torch.empty(length, dtype=torch.uint8)
            dist.recv(longer, group_src=source, group=self.group, tag=tag)
            text = bytes(longer.numpy())
        else:
            text = bytes(buffer[8 : 8 + length].numpy())
        size = payload_bytes(text)
        payload: Tensor | None = None
        if size and size == expected and not long:
            payload = buffer[HEAD:]
        elif size:
            payload = torch.empty(size, dtype=torch.uint8)
            dist.recv(payload, group_src=source, group=self.group, tag=tag)
        self._last_in[channel] = 0 if long else size
        return unpack(text, payload)


def _is_long(head: Tensor) -> bool:
    """Whether the header does not fit into the first part of the message and follows it."""
    return int(head[:8].view(torch.int64)[0]) > HEAD - 8

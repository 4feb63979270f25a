"""Ranks as processes, on connections of their own: each message is a typed header and then the bytes of its tensors.

A rank writes its messages itself as far as the network takes them at once, and reads what it waits for itself, so a
small message wakes one thread, the one that needs it. A thread that lives as long as the step receives
messages that are large, or staged from a GPU, while the rank computes.

In every step, each channel carries a number of messages that both ends know. The sender refuses one more, and sends
failure notes in place of those that it cannot send. So a failed step leaves no message in transit.

```text
 tensors of the host   header and bytes, over TCP
 tensors of a GPU      the same, through pinned memory (gpu/host_staging.py); or only the header, and the tensors over
                       NCCL (gpu/payloads.py)
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stageline.common.errors import PeerFailed, TransportError
from stageline.transport import wire
from stageline.transport.gpu.host_staging import Staging, pinned
from stageline.transport.gpu.payloads import Payloads
from stageline.transport.protocol import Header, Message, Traffic, check_message
from stageline.transport.tcp.channels import Guess, Inbound
from stageline.transport.tcp.exchange import TURNS, Exchange, other_turn
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import Outbound, Outbox
from stageline.transport.threads import Arrive, ThreadHub, receive_timeout, stopped_waiting
from stageline.transport.wire import Announcement, Pattern, TensorMeta

FAILED = -1
"""The stage in the header of a failure note."""

GRACE = 10.0
"""The least number of seconds to wait for the end of a step: with a short deadline, notes still have to arrive."""

LARGE = 1 << 18
"""Above this many bytes, a thread receives a channel's messages, since the network cannot buffer many of them."""

Channel = tuple[int, Traffic]
"""The rank at the other end, and the traffic."""

Arrival = tuple[Message | TransportError, Arrive]
"""A message, or why it cannot be read, and what to call when it is taken."""


class SocketTransport:
    """One process's end of all its channels."""

    def __init__(self, links: Links, payloads: Payloads | None = None, number: int = 0) -> None:
        """Send over these connections; `payloads` carry the tensors of some channels separately from the headers.

        `number` identifies the transport among those of other pipelines on the same connections.
        """
        self._number = number
        self.rank = links.rank
        self.ranks = links.ranks
        self._links = links
        self._payloads = Payloads() if payloads is None else payloads
        self._inbox = ThreadHub(self.ranks)
        self._outbox = Outbox()
        self._owed: dict[Channel, int] | None = None
        self._inbound: dict[Channel, Inbound] = {}
        self._outbound: dict[Channel, Outbound] = {}
        self._inline: dict[Channel, Inbound] = {}
        """The channels that the rank reads itself in this step."""
        self._large: set[Channel] = set()
        """The channels whose messages are large."""
        self._patterns: dict[Channel, Pattern] = {}
        """The form of the last message of each channel."""
        self._threads: list[threading.Thread] = []
        self._turn = number
        self._broken = self._lost = ""
        self._device: torch.device | None = None
        self._staging: Staging | None = None
        self.arrived = 0.0

    def begin(
        self,
        expected: Mapping[Channel, int],
        owed: Mapping[Channel, int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Begin a step; `expected` and `owed` say how many messages each channel receives and sends.

        `device` is where tensors from a GPU are to arrive, unless this rank sends some of its own.
        """
        if self._broken:
            raise TransportError(
                f"rank {self.rank} lost its connections in an earlier step: {self._broken}; restart the processes"
            )
        self._turn += TURNS
        self._owed = None if owed is None else dict(owed)
        self._device = device if device is not None and device.type == "cuda" else self._device
        if self._inbox.failure is not None:
            self._inbox.reset()
        if self._links.alarmed:
            self._links.reset()
        self._inline, self._threads = {}, []
        threads: list[threading.Thread] = []
        for channel, count in expected.items():
            inbound = self._inbound.get(channel)
            if inbound is None:
                inbound = self._inbound[channel] = self._links.inbound(*channel)
            inbound.left = count
            # Where tensors travel separately, the rank itself must receive them: in the order of its stream.
            apart = (channel[0], self.rank, channel[1]) in self._payloads
            if apart or (self._device is None and channel not in self._large):
                self._inline[channel] = inbound
            else:
                name = f"stageline {channel[1]} from {channel[0]}"
                threads.append(threading.Thread(target=self._receive_all, args=(inbound,), name=name, daemon=True))
        for thread in threads:
            thread.start()
            self._threads.append(thread)  # `finish` waits only for those that started

    def finish(self, deadline: float) -> None:
        """Wait until everything is sent and received; a message that was expected but not sent is a failure."""
        if self._owed is not None and any(self._owed.values()):
            missing = TransportError(f"rank {self.rank} ended its step without sending it")
            self._send_notes(self.rank, f"rank {self.rank} has no more to send", missing)
        self._owed = {}
        try:
            end = time.monotonic() + max(deadline, GRACE)
            while (late := self._late(time.monotonic() + 0.1)) is not None:
                if self._outbox.failed:
                    raise late
                if self._lost:
                    raise TransportError(self._lost)
                if time.monotonic() > end:
                    if not any(self.patience(rank) for rank in range(self.ranks) if rank != self.rank):
                        raise late
                    end = time.monotonic() + max(deadline, GRACE)  # a rank is slow, but alive
            if self._broken:
                raise TransportError(self._broken)
        except TransportError as error:
            self._broken = self._broken or str(error)
            raise TransportError(f"rank {self.rank} could not end its step: {error}") from error
        self._threads = []

    def _late(self, end: float) -> TransportError | None:
        """What has not been sent or received by that moment; None if everything has, or never will be."""
        try:
            self._outbox.flush(end)
        except TransportError as error:
            return error
        for (source, traffic), inbound in self._inline.items():
            while inbound.left and not self._broken:
                if self._take(inbound, end, wakeful=False) is None and inbound.left and time.monotonic() > end:
                    return TransportError(f"{traffic} from {source}, messages did not arrive")
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return TransportError(f"{thread.name.removeprefix('stageline ')}, messages did not arrive")
        return None

    @property
    def kept(self) -> int:
        """How many messages the network has not accepted yet."""
        return self._outbox.kept

    def send(self, message: Message) -> None:
        """Send what the network accepts; a thread sends the rest."""
        head = message.header
        if head.traffic == "forward" and any(type(leaf) is not Tensor for leaf in message.leaves):
            wire.refuse_classes(message)
        channel: Channel = (head.target, head.traffic)
        if head.traffic not in wire.TRAFFIC or not 0 <= head.target < self.ranks or head.target == self.rank:
            raise TransportError(f"rank {self.rank} cannot send {head} to rank {head.target}: there is no such channel")
        if self._owed is not None:
            if self._owed.get(channel, 0) <= 0:
                raise TransportError(
                    f"rank {self.rank} has sent all {head.traffic} messages that rank {head.target} expects in this "
                    f"step, but tries to send one more: {head}"
                )
            self._owed[channel] -= 1
        self._send(message, channel)

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the channel."""
        inbound = self._inline.get((header.source, header.traffic))
        if inbound is None:
            taken, self.arrived = self._inbox.take(header, deadline)
            return taken
        message, arrive = self._await(inbound, header, deadline)
        self.arrived = time.perf_counter()
        if isinstance(message, TransportError):
            raise TransportError(f"rank {header.target} expected {header}: {message}") from message
        if arrive is not _as_expected:
            arrive()
            check_message(message, header)
        return message

    def _await(self, inbound: Inbound, header: Header, deadline: float) -> Arrival:
        end = time.monotonic() + deadline
        pattern = self._patterns.get((header.source, header.traffic))
        guess: Guess | None = None
        if pattern is not None:  # prepare for a message like the one before
            head, message, room = wire.expect(header, self._turn, pattern)
            guess = Guess(head, _Opened(message, pattern.contents.size, None, _EMPTY), room)
        while True:
            arrival = self._take(inbound, end, guess)
            if arrival is not None:
                return arrival
            if self._inbox.failure is not None:
                raise stopped_waiting(header, self._inbox.failure)
            if time.monotonic() >= end:
                if not self.patience(header.source):
                    raise receive_timeout(header, deadline)
                end = time.monotonic() + deadline

    def interrupt(self, culprit: int, text: str, *, final: bool = False) -> None:
        """Wake this rank if it waits for a message, since another one failed. May be called from any thread.

        With `final`, that rank is lost, and `finish` does not wait for it.
        """
        if final:
            self._lost = text
        self._inbox.set_failure(culprit, TransportError(text), f"rank {culprit} failed")
        self._links.wake()

    @property
    def patience(self) -> Callable[[int], bool]:
        """Called when a deadline has passed: whether to keep waiting for that rank."""
        return self._inbox.patience

    @patience.setter
    def patience(self, ask: Callable[[int], bool]) -> None:
        self._inbox.patience = ask

    def fail(self, error: BaseException, where: str) -> None:
        """Stop this rank's own waits, and send a failure note in place of every message that it still owes.

        So every receive ends, the news travels from rank to rank, and no message is left that the next step could
        mistake for its own.
        """
        self._inbox.set_failure(self.rank, error, where)
        self._send_notes(error.origin if isinstance(error, PeerFailed) else self.rank, where, error)

    def close(self, patience: float = 0.1) -> None:
        """After a rank was lost, shut down the connections, and with them the threads."""
        end = time.monotonic() + patience
        self._links.hang_up()
        self._outbox.close(patience)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))

    def exchange(self, ranks: Sequence[int]) -> Exchange:
        """An exchange of numbers between some of the ranks, this one among them; all of them create it."""
        return Exchange(self._links, self._outbox, ranks, self._number)

    # Sending.

    def _send_notes(self, origin: int, where: str, error: BaseException) -> None:
        owed, self._owed = self._owed or {}, {}
        for (target, traffic), count in owed.items():
            for _ in range(count):
                header = Header(self.rank, target, traffic, FAILED, FAILED, FAILED)
                note = Message(header, [origin, where, f"{type(error).__name__}: {error}"], "", [False] * 3)
                try:
                    self._send(note, (target, traffic))
                except (TransportError, RuntimeError) as lost:  # that rank is gone; the others must still be told
                    self._broken = self._broken or f"nothing can be sent to rank {target}: {lost}"
                    break

    def _send(self, message: Message, channel: Channel) -> None:
        link = self._outbound.get(channel)
        if link is None:
            link = self._outbound[channel] = self._links.outbound(*channel)
        ends = (self.rank, *channel)
        if ends not in self._payloads and all(leaf.is_cpu for leaf in message.leaves if isinstance(leaf, Tensor)):
            pieces, owners = wire.encode(message, self._turn)
            self._outbox.send(link, pieces, None, owners)
            return
        apart = partial(self._payloads.carries, channel=ends)
        tensors = [wire.base_of(leaf) for leaf in message.leaves if isinstance(leaf, Tensor)]
        own = [tensor for tensor in tensors if not apart(tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in own)
        text = wire.encode_announcement(message, apart)
        pieces, ready = [memoryview(wire.write_head(self._turn, text, size))], None
        kept: list[Tensor] = []
        if any(tensor.is_cuda for tensor in own):
            kept = [pinned(size)]
            ready = self._fill(kept[0], own)
            pieces.append(wire.memory_of(kept[0]))
        else:
            for tensor in own:
                if tensor.numel():
                    held, memory = wire.pieces_of(tensor.cpu())
                    kept.append(held)
                    pieces.append(memory)
        self._outbox.send(link, pieces, ready, kept)
        for tensor in filter(apart, tensors):
            self._outbox.keep(self._payloads.send(tensor, ends))

    def _fill(self, payload: Tensor, tensors: Sequence[Tensor]) -> Callable[[], object] | None:
        """Copy the bytes of tensors one after the other; if some are on a GPU, return how to wait for them."""
        places = wire.cut(payload, [tensor.numel() * tensor.element_size() for tensor in tensors])
        from_device: list[tuple[Tensor, Tensor]] = []
        for tensor, place in zip(tensors, places, strict=True):
            if tensor.is_cuda and tensor.numel():
                from_device.append((tensor, place))
            else:
                place.copy_(wire.bytes_of(tensor.cpu()))
        if not from_device:
            return None
        staging = self._stage(from_device[0][0].device)
        event = staging.to_host([tensor for tensor, _ in from_device], [place for _, place in from_device])
        return event.synchronize

    def _stage(self, device: torch.device | None = None) -> Staging:
        """The streams beside the compute stream, created when the first tensor of a GPU is sent or received."""
        if self._staging is None:
            self._device = device or self._device or torch.device("cuda", torch.cuda.current_device())
            self._staging = Staging(self._device)
        return self._staging

    # Receiving.

    def _receive_all(self, inbound: Inbound) -> None:
        """Receive all messages of a step, on a separate thread."""
        channel = (inbound.source, self.rank, inbound.kind)
        while inbound.left and not self._broken:
            arrival = self._take(inbound, time.monotonic() + 1.0, wakeful=False)
            if arrival is not None:
                self._inbox.put(channel, *arrival)  # type: ignore[arg-type]

    def _take(
        self, inbound: Inbound, end: float, guess: Guess | None = None, *, wakeful: bool = True
    ) -> Arrival | None:
        """The next message that arrives in time and is not a failure note; a broken channel delivers none."""
        try:
            while inbound.left:
                if not inbound.connected:
                    self._links.connect(inbound, end - time.monotonic(), wakeful=wakeful)
                opened = inbound.take(self._open, end, self._links.alarm if wakeful else None, guess)
                if opened is None:
                    return None
                inbound.left -= 1
                arrival = self._read(inbound, opened)
                if arrival is not None:
                    return arrival
        except Exception as error:
            self._broken = self._broken or f"receiving from rank {inbound.source} failed: {error}"
            self._inbox.set_failure(inbound.source, error, f"receiving from rank {inbound.source} failed")
            self._links.wake()
        return None

    def _open(self, prefix: wire.Prefix, text: bytes) -> tuple[_Opened, list[memoryview]]:
        """Read the header of a message, and allocate memory for its tensors."""
        if prefix.turn != self._turn:
            raise TransportError(other_turn(prefix.turn, self._turn))
        announcement = _read(text, prefix)
        if not prefix.payload:
            return _Opened(announcement, prefix.payload, None, _EMPTY), []
        contents = None if isinstance(announcement, TransportError) else announcement.contents
        if contents is not None and contents.size != prefix.payload:
            raise TransportError(
                f"received {prefix.payload} bytes, but the header announced {contents.size}: {contents.metas}"
            )
        if contents is not None and contents.simple:
            tensors = [wire.room_for(meta) for meta in contents.metas]
            header = announcement.header  # type: ignore[union-attr]
            if len(text) < wire.ROOM and contents.kinds is None:
                self._patterns[(header.source, header.traffic)] = Pattern(text[text.index(b"\n") :], contents)
            return _Opened(announcement, prefix.payload, tensors, _EMPTY), [
                wire.memory_of(tensor) for tensor in tensors if tensor.numel()
            ]
        staged = contents is not None and any(meta.device == "cuda" and not meta.apart for meta in contents.metas)
        payload = pinned(prefix.payload) if staged else torch.empty(prefix.payload, dtype=torch.uint8)
        return _Opened(announcement, prefix.payload, None, payload), [wire.memory_of(payload)]

    def _read(self, inbound: Inbound, opened: _Opened) -> Arrival | None:
        announcement = opened.announcement
        if isinstance(announcement, Message):
            return announcement, _as_expected
        if isinstance(announcement, TransportError):
            if (inbound.source, self.rank, inbound.kind) in self._payloads:
                raise announcement  # without it, tensors that travel separately cannot be received
            return announcement, _nothing
        if announcement.header.stage == FAILED:
            origin, where, text = announcement.contents.leaves
            self._inbox.set_failure(int(str(origin)), RuntimeError(str(text)), str(where))
            self._links.wake()
            return None
        traffic: Traffic = "forward" if inbound.kind == "forward" else "backward"
        if opened.size > LARGE:
            self._large.add((inbound.source, traffic))
        if opened.tensors is not None:
            return announcement.message(opened.tensors), _nothing
        tensors, arrive = self._tensors(announcement, opened.payload, inbound.source, traffic)
        return announcement.message(tensors), arrive

    def _tensors(
        self, announcement: Announcement, payload: Tensor, source: int, traffic: Traffic
    ) -> tuple[list[Tensor], Arrive]:
        """The tensors of a message, and what to call when it is taken."""
        metas = announcement.contents.metas
        tensors: dict[int, Tensor] = {}
        arrivals: list[Arrive] = []
        staged: list[tuple[int, Tensor, TensorMeta]] = []
        pieces = iter(wire.cut(payload, [meta.size for meta in metas if not meta.apart]))
        for index, meta in enumerate(metas):
            if meta.apart:
                tensors[index] = self._payloads.receive(meta, (source, self.rank, traffic))
            elif meta.device == "cuda":
                staged.append((index, next(pieces), meta))
            else:
                tensor = wire.fill(wire.room_for(meta), next(pieces))
                tensors[index] = tensor if meta.device == "cpu" else tensor.to(meta.device)
        if staged:
            copies, landed = self._stage().to_device([place for _, place, _ in staged], [meta for _, _, meta in staged])
            tensors.update(zip((index for index, _, _ in staged), copies, strict=True))
            arrivals.append(landed)

        def arrive_all() -> None:
            for arrive in arrivals:
                arrive()

        return [tensors[index] for index in range(len(metas))], arrive_all


class _Opened(NamedTuple):
    """A message whose header has arrived, and the memory that its tensors are read into."""

    announcement: Announcement | Message | TransportError
    """What the header says, or why it cannot be read; or the whole message, if it is the expected one."""
    size: int
    tensors: list[Tensor] | None
    """The tensors themselves, if their bytes go straight into them."""
    payload: Tensor
    """The bytes of all tensors otherwise."""


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _read(text: bytes, prefix: wire.Prefix) -> Announcement | TransportError:
    try:
        wire.check_text(text, prefix)
        return wire.decode_announcement(text)
    except TransportError as error:
        return error


def _as_expected() -> None:
    """Marks a message that is exactly as expected and needs no other check."""


def _nothing() -> None:
    """Nothing to do: the tensors are already in memory."""

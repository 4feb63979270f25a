"""Ranks as processes of a torch.distributed process group: each message is a typed header and then the bytes.

For the time of a step, every channel has a thread at its receiving end that takes the messages as they come, so
receives are always posted ahead; sends are handed to the process group, which does not wait for the receiver.

A receive is posted for a header and as many bytes of tensors as the message before it on its channel had. If a message
has just as many, it goes out in one piece; if not, its header goes first and its tensors follow. Both ends know the
message before, so shapes may change at any time, and while they do not, every message is one transfer.

Every step, each channel carries just as many messages as both ends were told: one more is refused by the sender, and in
place of those that it cannot send it sends notes. So a step that failed leaves nothing on the way.

```text
 tensors of the host   header and bytes over gloo
 tensors of a GPU      the same, through pinned memory (cuda.py); or only the header, and the tensors over NCCL
                       (payloads.py)
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.transport import wire
from stageline.transport.cuda import Staging, pinned
from stageline.transport.outbox import Outbox
from stageline.transport.payloads import PayloadGroups
from stageline.transport.protocol import Header, Message, PeerFailed, Traffic, TransportError
from stageline.transport.threads import Arrive, ThreadHub
from stageline.transport.wire import HEAD, Described, Letter

FAILED = -1
"""The stage that a note of failure is from."""

TAGS: dict[Traffic, int] = {"forward": 1, "backward": 2}

GRACE = 10.0
"""Seconds that the end of a step is waited for at least: ranks whose deadline is short still have to hear of it."""

Channel = tuple[int, Traffic]
"""The rank at the other end, and the traffic."""


class ProcessGroupTransport:
    """One process's end. `begin` is told how many messages each channel will bring in this step."""

    def __init__(self, group: dist.ProcessGroup | None = None, payloads: PayloadGroups | None = None) -> None:
        """Send over a group of gloo, the default one unless given; `payloads` carry tensors apart from the headers."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._payloads = payloads
        self._inbox = ThreadHub(self.ranks)
        self._outbox = Outbox()
        self._owed: dict[Channel, int] | None = None
        self._last_out: dict[Channel, int] = {}
        self._last_in: dict[Channel, tuple[int, bool]] = {}
        """How many bytes the last message had, and whether some were of a GPU."""
        self._threads: list[threading.Thread] = []
        self._turn = 0
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
        """Post the receives of a step; `owed` is how many messages each channel from here will carry.

        `device` is where tensors that left a GPU are to arrive, unless this rank sends some of its own.
        """
        if self._broken:
            raise TransportError(
                f"rank {self.rank} lost touch in an earlier step: {self._broken}; start the processes again"
            )
        self._turn += 1
        self._owed = None if owed is None else dict(owed)
        self._device = device if device is not None and device.type == "cuda" else self._device
        self._inbox.reset()
        self._threads = [
            threading.Thread(
                target=self._receive_all,
                args=(source, traffic, count),
                name=f"stageline {traffic} from {source}",
                daemon=True,
            )
            for (source, traffic), count in expected.items()
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, deadline: float) -> None:
        """Wait until everything is sent and received; a message that was announced and not sent is a failure."""
        missing = TransportError(f"rank {self.rank} ended its step without sending it")
        self._send_notes(self.rank, f"rank {self.rank} has no more to send", missing)
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
                    end = time.monotonic() + max(deadline, GRACE)  # a rank that is slow, and lives
            if self._broken:
                raise TransportError(self._broken)
        except TransportError as error:
            self._broken = self._broken or str(error)
            raise TransportError(f"rank {self.rank} could not end its step: {error}") from error
        self._threads = []

    def _late(self, end: float) -> TransportError | None:
        """What is not sent or not received at that moment; None if everything is."""
        try:
            self._outbox.flush(end)
        except TransportError as error:
            return error
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return TransportError(f"{thread.name.removeprefix('stageline ')}, messages did not come")
        return None

    @property
    def kept(self) -> int:
        """How many pieces of messages are kept because they are still on their way."""
        return self._outbox.kept

    def send(self, message: Message) -> None:
        """Hand the message to the process group; its bytes are kept until they are gone."""
        head = message.header
        channel: Channel = (head.target, head.traffic)
        if head.traffic not in TAGS or not 0 <= head.target < self.ranks or head.target == self.rank:
            raise TransportError(f"rank {self.rank} cannot send {head} to rank {head.target}: there is no such channel")
        if self._owed is not None:
            if self._owed.get(channel, 0) <= 0:
                raise TransportError(
                    f"rank {self.rank} has sent all {head.traffic} messages that rank {head.target} expects in this "
                    f"step, and would send one more: {head}"
                )
            self._owed[channel] -= 1
        self._send(message, channel)

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the channel."""
        message, self.arrived = self._inbox.take(header, deadline)
        return message

    def interrupt(self, culprit: int, text: str, *, final: bool = False) -> None:
        """Wake this rank if it waits for a message: another one failed. May be called from any thread.

        If that one is lost, the end of the step, which all ranks come to together otherwise, is not waited for.
        """
        if final:
            self._lost = text
        self._inbox.set_failure(culprit, TransportError(text), f"rank {culprit} failed")

    @property
    def patience(self) -> Callable[[int], bool]:
        """Asked when a deadline has passed: whether there is reason to go on waiting for that rank."""
        return self._inbox.patience

    @patience.setter
    def patience(self, ask: Callable[[int], bool]) -> None:
        self._inbox.patience = ask

    def fail(self, error: BaseException, where: str) -> None:
        """Stop this rank's own waits, and send a note of failure in place of every message that it still owes.

        So every receive that was posted comes to its end, the news travels from rank to rank, and no message is left
        on the way that the next step could take for its own.
        """
        self._inbox.set_failure(self.rank, error, where)
        self._send_notes(error.origin if isinstance(error, PeerFailed) else self.rank, where, error)

    def close(self, patience: float = 0.1) -> None:
        """After a rank was lost: end the threads that do not wait for just that one. Between steps there is none."""
        end = time.monotonic() + patience
        self._outbox.close(patience)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def stuck(self) -> bool:
        """Whether a thread waits for a rank that was lost, where nothing can stop it."""
        return self._outbox.busy or any(thread.is_alive() for thread in self._threads)

    # Sending.

    def _send_notes(self, origin: int, where: str, error: BaseException) -> None:
        owed, self._owed = self._owed or {}, {}
        for (target, traffic), count in owed.items():
            for _ in range(count):
                header = Header(self.rank, target, traffic, FAILED, FAILED, FAILED)
                note = Message(header, [origin, where, f"{type(error).__name__}: {error}"], "", [False] * 3)
                try:
                    self._send(note, (target, traffic))
                except (TransportError, RuntimeError) as lost:  # a rank that is gone; the others must hear of it
                    self._broken = self._broken or f"nothing can be sent to rank {target}: {lost}"
                    break

    def _send(self, message: Message, channel: Channel) -> None:
        apart = self._payloads.carries if self._payloads is not None else lambda tensor: False
        tensors = [wire.base_of(leaf) for leaf in message.leaves if isinstance(leaf, Tensor)]
        own = [tensor for tensor in tensors if not apart(tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in own)
        text = wire.write_text(message, apart)
        staged = any(tensor.is_cuda for tensor in own)
        buffer = pinned(HEAD + size) if staged else torch.empty(HEAD + size, dtype=torch.uint8)
        prefix = wire.write_prefix(buffer, self._turn, text, size)
        ready = self._fill(buffer[HEAD:], own)
        parts = [buffer]
        if prefix.long or size != self._last_out.get(channel, 0):
            parts = [buffer[:HEAD], buffer[HEAD:]] if size else [buffer[:HEAD]]
        if prefix.long:
            parts.insert(1, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._last_out[channel] = 0 if prefix.long else size
        for part in parts:
            self._outbox.send(self._poster(part, channel), channel[0], ready)
        if self._payloads is not None:
            for tensor in (each for each in tensors if apart(each)):
                sent = self._payloads.send(tensor, self.rank, *channel)
                if tensor.is_cuda:
                    self._outbox.keep(sent)
                else:
                    self._outbox.send(lambda sent=sent: sent, channel[0])  # type: ignore[misc]

    def _poster(self, part: Tensor, channel: Channel) -> Callable[[], tuple[Any, object]]:
        target, traffic = channel
        return lambda: (dist.isend(part, group_dst=target, group=self.group, tag=TAGS[traffic]), part)

    def _fill(self, payload: Tensor, tensors: Sequence[Tensor]) -> Callable[[], object] | None:
        """Copy the bytes of tensors one after the other; where some are of a GPU, say how to wait for them."""
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
        """The streams beside the compute stream, made when the first tensor of a GPU is sent or received."""
        if self._staging is None:
            self._device = device or self._device or torch.device("cuda", torch.cuda.current_device())
            self._staging = Staging(self._device)
        return self._staging

    # Receiving: on threads of their own.

    def _receive_all(self, source: int, traffic: Traffic, count: int) -> None:
        try:
            for _ in range(count):
                self._receive_one(source, traffic)
        except BaseException as error:
            self._broken = self._broken or f"receiving from rank {source} failed: {error}"
            self._inbox.set_failure(source, error, f"receiving from rank {source} failed")

    def _receive_one(self, source: int, traffic: Traffic) -> None:
        channel: Channel = (source, traffic)
        expected, on_device = self._last_in.get(channel, (0, False))
        buffer = self._room(HEAD + expected, on_device)
        self._fetch(buffer, channel)
        prefix = wire.read_prefix(buffer)
        if prefix.turn != self._turn:
            raise TransportError(f"a message of turn {prefix.turn} came in turn {self._turn}")
        text = wire.text_in(buffer, prefix)
        if prefix.long:
            longer = torch.empty(prefix.text, dtype=torch.uint8)
            self._fetch(longer, channel)
            text = bytes(longer.numpy())
        in_one_piece = prefix.payload == expected and not prefix.long
        letter = _read(text, prefix)
        if isinstance(letter, Letter):
            on_device = any(each.device == "cuda" and not each.apart for each in letter.described())
        payload = buffer[HEAD:]
        if not in_one_piece:
            payload = self._room(prefix.payload, on_device)
            if prefix.payload:
                self._fetch(payload, channel)
        self._last_in[channel] = (0 if prefix.long else prefix.payload, on_device)
        if isinstance(letter, TransportError):
            if self._payloads is not None:
                raise letter  # what travels apart cannot be taken off the wire without it
            self._inbox.put((source, self.rank, traffic), letter)
        elif letter.header.stage == FAILED:
            origin, where, said = letter.leaves
            self._inbox.set_failure(int(str(origin)), RuntimeError(str(said)), str(where))
        else:
            tensors, arrive = self._tensors(letter, payload, source, traffic)
            self._inbox.put((source, self.rank, traffic), letter.message(tensors), arrive)

    def _room(self, size: int, on_device: bool) -> Tensor:
        return pinned(size) if on_device and size else torch.empty(size, dtype=torch.uint8)

    def _fetch(self, buffer: Tensor, channel: Channel) -> None:
        dist.recv(buffer, group_src=channel[0], group=self.group, tag=TAGS[channel[1]])

    def _tensors(self, letter: Letter, payload: Tensor, source: int, traffic: Traffic) -> tuple[list[Tensor], Arrive]:
        """The tensors of a message, and what is to be done when it is taken."""
        described = letter.described()
        own = [each for each in described if not each.apart]
        if sum(each.size for each in own) != len(payload):
            raise TransportError(f"{len(payload)} bytes arrived, and the header tells of other tensors: {own}")
        found: dict[int, Tensor] = {}
        arrivals: list[Arrive] = []
        staged: list[tuple[int, Tensor, Described]] = []
        pieces = iter(wire.cut(payload, [each.size for each in own]))
        for index, each in enumerate(described):
            if each.apart:
                assert self._payloads is not None
                staging = self._stage() if each.device == "cuda" else None
                found[index], arrive = self._payloads.receive(each, source, self.rank, traffic, staging)
                arrivals += [] if arrive is None else [arrive]
            elif each.device == "cuda":
                staged.append((index, next(pieces), each))
            else:
                piece = next(pieces)
                alone = len(described) == 1 and each.strides is None and each.size > 0
                # A single tensor stays where it arrived; of several, each gets memory that the others do not keep.
                tensor = piece.view(each.dtype).view(each.shape) if alone else wire.fill(wire.room_for(each), piece)
                found[index] = tensor if each.device == "cpu" else tensor.to(each.device)
        if staged:
            copies, landed = self._stage().to_device([place for _, place, _ in staged], [each for _, _, each in staged])
            found.update(zip((index for index, _, _ in staged), copies, strict=True))
            arrivals.append(landed)

        def arrive_all() -> None:
            for arrive in arrivals:
                arrive()

        tensors = [found[index] for index in range(len(described))]
        return [
            tensor if each.expanded is None else tensor.expand(each.expanded)
            for tensor, each in zip(tensors, described, strict=True)
        ], arrive_all


def _read(text: bytes, prefix: wire.Prefix) -> Letter | TransportError:
    try:
        wire.check_text(text, prefix)
        return wire.read_text(text)
    except TransportError as error:
        return error

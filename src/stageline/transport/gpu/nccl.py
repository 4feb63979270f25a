"""NCCL, called directly: communicators that are made in parallel, use the caller's streams, and can be aborted.

torch's process groups would make a communicator at the first message of every pair of ranks, one after the other, run
each receive on a stream of their own, and end the process when a peer dies. Here, all communicators of a rank are
made at once and ahead of the first step, a receive runs in the compute stream without events, and a wait for a lost
rank ends when another thread aborts its communicator.

The library is the one that torch has loaded. Signatures are those of NCCL 2.10 and later; used with 2.28.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.common.errors import TransportError

_BYTE = 1
_TYPES = {
    torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SUM = 0
_PENDING = 7
"""`ncclInProgress`."""


class NcclError(TransportError):
    """A communicator failed, or was aborted: what other ranks wait for on their GPUs may never be sent."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_HANDLE, _STREAM, _SIZE, _INT = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_HANDLE), _INT, _UniqueId, _INT),
    "ncclCommDestroy": (_HANDLE,),
    "ncclCommAbort": (_HANDLE,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (ctypes.c_void_p, _SIZE, _INT, _INT, _HANDLE, _STREAM),
    "ncclRecv": (ctypes.c_void_p, _SIZE, _INT, _INT, _HANDLE, _STREAM),
    "ncclBroadcast": (ctypes.c_void_p, ctypes.c_void_p, _SIZE, _INT, _INT, _HANDLE, _STREAM),
    "ncclAllReduce": (ctypes.c_void_p, ctypes.c_void_p, _SIZE, _INT, _INT, _HANDLE, _STREAM),
}


@cache
def library() -> ctypes.CDLL | None:
    """The NCCL library of this process; None if there is none, as where torch has it built in."""
    if not torch.distributed.is_nccl_available():
        return None
    try:
        loaded = ctypes.CDLL("libnccl.so.2")
        for name, arguments in _ARGUMENTS.items():
            getattr(loaded, name).argtypes = arguments
        loaded.ncclGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError):
        return None
    return loaded


def version() -> str:
    """The version of NCCL, such as "2.28.9"; empty without NCCL."""
    if library() is None:
        return ""
    number = _INT()
    _call("ncclGetVersion", ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL, without Python's interpreter lock; an error code becomes an exception."""
    loaded = library()
    assert loaded is not None
    code = getattr(loaded, name)(*arguments)
    if code not in (0, _PENDING):
        text = loaded.ncclGetErrorString(code).decode(errors="replace")
        raise NcclError(f"{name} failed with code {code}: {text}; set NCCL_DEBUG=WARN for details")


def new_id() -> str:
    """The id of a new communicator, which all its members need."""
    unique = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique))
    return bytes(unique.internal).hex()


class Seat(NamedTuple):
    """A place in a new communicator: its id, how many members it has, and which of them this process is."""

    id: str
    members: int
    number: int


class Sent:
    """Tensors that a stream still reads."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def is_completed(self) -> bool:
        """Whether the stream has read them."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Let the compute stream wait for it."""
        self._event.wait()


class Communicator:
    """This process's end of a communicator; one thread uses it, and any thread may abort it."""

    def __init__(self, handle: int, seat: Seat, device: torch.device) -> None:
        self.seat, self.device = seat, device
        self._handle: int | None = handle
        # What it sends waits for the receiver there, and the compute stream goes on.
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def send(self, piece: Tensor, peer: int) -> Sent:
        """Send contiguous memory once it is computed; it must be kept until it is sent."""
        with self._after_compute_stream():
            self._run("ncclSend", piece.data_ptr(), piece.nbytes, _BYTE, peer, stream=self._stream)
        return Sent(self._stream)

    def receive(self, room: Tensor, peer: int) -> None:
        """Fill contiguous memory, in the order of the compute stream."""
        stream = torch.cuda.current_stream(self.device)
        self._run("ncclRecv", room.data_ptr(), room.nbytes, _BYTE, peer, stream=stream)

    def all_reduce(self, tensor: Tensor) -> Sent:
        """Add up a contiguous tensor over all members, in place, beside the compute stream."""
        kind, at = _TYPES[tensor.dtype], tensor.data_ptr()
        with self._after_compute_stream():
            self._run("ncclAllReduce", at, at, tensor.numel(), kind, _SUM, stream=self._stream)
        return Sent(self._stream)

    def broadcast(self, tensor: Tensor, member: int) -> Sent:
        """Copy a contiguous tensor of one member to all, in place, beside the compute stream."""
        at = tensor.data_ptr()
        with self._after_compute_stream():
            self._run("ncclBroadcast", at, at, tensor.nbytes, _BYTE, member, stream=self._stream)
        return Sent(self._stream)

    def _after_compute_stream(self) -> Any:
        self._computed.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._computed)
        return torch.cuda.device(self.device)

    def _run(self, name: str, *arguments: Any, stream: Any) -> None:
        with self._lock:
            if self._handle is None:
                raise NcclError("the communicator was aborted because a rank was lost")
            _call(name, *arguments, self._handle, stream.cuda_stream)

    def abort(self) -> None:
        """End what waits on it, on the GPU and on the host; it cannot be used again."""
        self._end("ncclCommAbort")

    def close(self) -> None:
        """Release it, once nothing uses it."""
        self._end("ncclCommDestroy")

    def _end(self, how: str) -> None:
        free = self._lock.acquire(timeout=1.0)  # a call that waits for a lost rank holds it, and ends with the abort
        handle, self._handle = self._handle, None
        if free:
            self._lock.release()
        if handle is not None:
            _call(how, handle)


def connect(seats: Mapping[Any, Seat], device: torch.device) -> dict[Any, Communicator]:
    """Take all these seats at once; returns when every member of every communicator has taken its own."""
    with torch.cuda.device(device):
        handles = {name: _HANDLE() for name in seats}
        _call("ncclGroupStart")
        for name, seat in seats.items():
            unique = _UniqueId.from_buffer_copy(bytes.fromhex(seat.id))
            _call("ncclCommInitRank", ctypes.byref(handles[name]), seat.members, unique, seat.number)
        _call("ncclGroupEnd")
        return {name: Communicator(handles[name].value or 0, seat, device) for name, seat in seats.items()}


def open_channels(pairs: Sequence[Communicator]) -> None:
    """Send a byte through each, from member 0 to member 1: the first message makes the connections."""
    if not pairs:
        return
    device = pairs[0].device
    with torch.cuda.device(device):
        room = torch.zeros(len(pairs), dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        _call("ncclGroupStart")
        for number, pair in enumerate(pairs):
            if pair.seat.number == 0:
                pair.send(room[number], 1)
            else:
                pair.receive(room[number], 0)
        _call("ncclGroupEnd")
        torch.cuda.synchronize(device)

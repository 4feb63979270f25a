"""Random numbers that depend on the seed, the step, the microbatch and the layer's name, and on nothing else.

So dropout draws the same for every number of ranks, every schedule and every transport, and once more when an
activation is recomputed. Threads share torch's one default generator, so a layer that draws holds it alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_generator = threading.RLock()


def draws(layer: nn.Module) -> bool:
    """Whether a layer may draw random numbers: a module or number named for dropout, or for drawing, in it.

    >>> draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), draws(nn.Linear(2, 2))
    (True, False)
    """
    for module in layer.modules():
        words = type(module).__name__.lower()
        if any(word in words for word in ("drop", "noise", "random", "stochastic", "gumbel", "sampl", "rrelu")):
            return True
        for name, value in vars(module).items():
            if "drop" in name.lower() and isinstance(value, int | float) and value > 0:
                return True
        if getattr(module, "draws_random_numbers", False):
            return True
    return False


class _Inside(threading.local):
    """Whether this thread draws from a generator of a layer's own, and what it must hold to draw at all."""

    layer = False
    turn: AbstractContextManager[Any] = nullcontext()


_inside = _Inside()


def draw_in_turn(turn: AbstractContextManager[Any]) -> None:
    """Let this thread draw only while it holds this, too: so that its caller can keep it from drawing for a while."""
    _inside.turn = turn


@contextmanager
def generator_alone() -> Iterator[None]:
    """While this lasts, no other thread of the runtime draws."""
    with _inside.turn, _generator:
        yield


@contextmanager
def random_numbers(seed: int, step: int, microbatch: int, layer: str) -> Iterator[None]:
    """Let what runs inside draw from a generator of its own; afterwards the default one is as it was before."""
    words = f"{seed}/{step}/{microbatch}/{layer}".encode()
    own = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1
    with generator_alone():
        default = Generators.now()
        # Not torch.manual_seed, which writes down the stack for devices that are not in use: milliseconds a call.
        torch.default_generator.manual_seed(own)
        for device in _devices():
            torch.cuda.default_generators[device].manual_seed(own)
        before, _inside.layer = _inside.layer, True
        try:
            yield
        finally:
            _inside.layer = before
            default.restore()


@dataclass(frozen=True)
class Generators:
    """The state of torch's default generators: of the host and of each GPU in use."""

    states: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> Generators:
        """Take it."""
        return cls((torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _devices())))

    def restore(self) -> None:
        """Let the generators go on from it."""
        torch.set_rng_state(self.states[0])
        for device, state in enumerate(self.states[1:]):
            torch.cuda.set_rng_state(state, device)

    def moved(self) -> bool:
        """Whether something was drawn since."""
        now = Generators.now().states
        return any(not torch.equal(before, after) for before, after in zip(self.states, now, strict=False))


def generator_state() -> Generators | None:
    """The generators' state, if what runs now draws from a generator of its layer's own."""
    return Generators.now() if _inside.layer else None


@contextmanager
def replayed(state: Generators | None) -> Iterator[None]:
    """Let what runs inside draw what was drawn after the state was taken."""
    if state is None:
        yield
        return
    with generator_alone():
        default = Generators.now()
        state.restore()
        try:
            yield
        finally:
            default.restore()


def _devices() -> list[int]:
    """The GPUs whose generators are in use."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

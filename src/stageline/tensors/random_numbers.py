"""Random numbers that depend only on the seed, the step, the microbatch and the layer's name.

So dropout draws the same for every number of ranks, every schedule and every transport, and again when an activation is
recomputed. Threads share torch's default generator, so a layer that draws holds it alone.
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
    """Whether a layer may draw random numbers: it has a module or a number named for dropout or for drawing."""
    modules = list(layer.modules())
    rates = (value for module in modules for name, value in vars(module).items() if _is_rate(name, value))
    return any(map(_is_named_for_drawing, modules)) or any(rate > 0 for rate in rates)


def _is_named_for_drawing(module: nn.Module) -> bool:
    words = type(module).__name__.lower()
    named = any(word in words for word in ("drop", "noise", "random", "stochastic", "gumbel", "sampl", "rrelu"))
    return named or getattr(module, "draws_random_numbers", False)


def _is_rate(name: str, value: object) -> bool:
    return "drop" in name.lower() and isinstance(value, int | float)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropout_rates(layer: nn.Module) -> list[tuple[nn.Module, str]] | None:
    """Return the attributes that decide whether a layer draws: it does not while all are 0. None if others may, too.

    >>> [(type(module).__name__, name) for module, name in dropout_rates(nn.Sequential(nn.Dropout(0.0), nn.ReLU()))]
    [('Dropout', 'p')]
    >>> dropout_rates(nn.RReLU())
    """
    rates: list[tuple[nn.Module, str]] = []
    for module in layer.modules():
        if getattr(module, "_stageline_class", type(module)) in _DROPOUTS:
            rates.append((module, "p"))
            continue
        if _is_named_for_drawing(module):
            return None
        rates += [(module, name) for name, value in vars(module).items() if _is_rate(name, value)]
    return rates


class _Inside(threading.local):
    """Per thread: whether it draws for a layer, and the lock that it must hold to draw."""

    layer = False
    turn: AbstractContextManager[Any] = nullcontext()


_inside = _Inside()


def draw_in_turn(turn: AbstractContextManager[Any]) -> None:
    """Let this thread draw only while it holds the lock `turn`, so that other threads can keep it from drawing."""
    _inside.turn = turn


@contextmanager
def generator_alone() -> Iterator[None]:
    """Keep other threads of the runtime from drawing."""
    with _inside.turn, _generator:
        yield


def seed_of(words: str) -> int:
    """Return a seed for a generator from words."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def random_numbers(seed: int, step: int, microbatch: int, layer: str) -> Iterator[None]:
    """Seed the generators for what runs inside; restore them afterwards."""
    own = seed_of(f"{seed}/{step}/{microbatch}/{layer}")
    with generator_alone():
        default = Generators.now()
        # Not torch.manual_seed, which records the stack for devices that are not in use: milliseconds per call.
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
        """The current state."""
        return cls((torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _devices())))

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.states[0])
        for device, state in enumerate(self.states[1:]):
            torch.cuda.set_rng_state(state, device)

    def moved(self) -> bool:
        """Whether something was drawn since."""
        now = Generators.now().states
        return any(not torch.equal(before, after) for before, after in zip(self.states, now, strict=False))


def generator_state() -> Generators | None:
    """The generators' state, if the current thread draws for a layer."""
    return Generators.now() if _inside.layer else None


@contextmanager
def replayed(state: Generators | None) -> Iterator[None]:
    """Let what runs inside draw the numbers that followed this state."""
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

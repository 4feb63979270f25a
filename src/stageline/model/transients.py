"""Memory that an action holds only while it runs: of one unit, and of a stage that runs its units one by one.

A stage's activations are counted from the start of its F to the end of its B. While unit u runs forward, only those of
the units up to u exist, beside its input, its output and its temporaries. In the backward, those of the units after u
are freed already, and the gradient of its output exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from stageline.model.profile import Layer

Value = TypeVar("Value")


class PeakMeter:
    """Measures how far the memory of a GPU rises above its level before or after a call; nothing on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def above_end(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what the call leaves allocated, and its result."""
        peak, value = self._peak(call)
        return (0 if self._device is None else max(0, peak - torch.cuda.memory_allocated(self._device))), value

    def above_start(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what was allocated before the call, and its result."""
        before = 0 if self._device is None else torch.cuda.memory_allocated(self._device)
        peak, value = self._peak(call)
        return max(0, peak - before), value

    def _peak(self, call: Callable[[], Value]) -> tuple[int, Value]:
        if self._device is None:
            return 0, call()
        torch.cuda.reset_peak_memory_stats(self._device)
        value = call()
        return torch.cuda.max_memory_allocated(self._device), value


def stage_transients(layers: Sequence[Layer]) -> dict[str, float]:
    """Return the memory that F, B, I and W of a stage hold beside its activations, and W beside its residues.

    >>> from stageline.model.profile import Layer
    >>> layer = Layer("0", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 0, 8, 1, 5, 20, 10, 30)
    >>> stage_transients([layer]), stage_transients([layer, layer])["B"]
    ({'F': 13.0, 'B': 28.0, 'I': 18.0, 'W': 30.0}, 28.0)
    """
    if not any(map(_any_transient, layers)):  # not measured
        return dict.fromkeys("FBIW", 0.0)
    total = sum(layer.activation for layer in layers)
    held = list(accumulate(layer.activation for layer in layers))
    later = [sum(layer.residue for layer in layers[index + 1 :]) for index in range(len(layers))]
    places = list(zip(layers, held, later, strict=True))
    peaks = {
        "F": [now + layer.arriving + layer.leaving + layer.forward_transient for layer, now, _ in places],
        "B": [now + layer.message + layer.backward_transient for layer, now, _ in places],
        "I": [now + residue + layer.message + layer.backward_input_transient for layer, now, residue in places],
        "W": [total + layer.backward_weight_transient for layer in layers],
    }
    return {kind: float(max(0, max(levels) - total)) for kind, levels in peaks.items()}


def _any_transient(layer: Layer) -> bool:
    return bool(
        layer.forward_transient
        or layer.backward_transient
        or layer.backward_input_transient
        or layer.backward_weight_transient
    )

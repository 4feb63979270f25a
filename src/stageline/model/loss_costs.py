"""The costs of a loss function, as part of the last unit of a model: logits and their gradients can be large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from stageline.model.profile import Layer
from stageline.model.transients import stage_transients

LOSS = "loss_fn"
"""The name under which a loss is measured."""


class LossLayer(nn.Module):
    """A loss function as a layer after the model."""

    def __init__(self, function: Callable[[Any, Any], Any], targets: Any) -> None:
        super().__init__()
        self.function, self.targets = function, targets

    def forward(self, output: Any) -> Any:
        """Return the loss of the model's output."""
        return self.function(output, self.targets)


def with_loss(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Add the costs of the loss, which is the last layer, to those of the layer before it.

    >>> head = Layer("1", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 0, 8, 1)
    >>> loss = Layer(LOSS, "LossLayer", 0.5, 0.5, 0.0, 0.5, 8, 0, 0, 0, 4, 0, 0, 1)
    >>> (joint,) = with_loss([head, loss])
    >>> joint.name, joint.forward, joint.backward, joint.activation, joint.message
    ('1', 1.5, 2.5, 88, 8)
    """
    *others, last, loss = layers
    transients = stage_transients([last, replace(loss, message=0)])  # the gradient of a loss is one number
    joint = replace(
        last,
        forward=last.forward + loss.forward,
        backward_input=last.backward_input + loss.backward_input,
        backward_weight=last.backward_weight + loss.backward_weight,
        backward=last.backward + loss.backward,
        activation=last.activation + loss.activation,
        residue=last.residue + loss.residue,
        # The input and the output of a unit, and the gradient of its output, are added for a stage.
        forward_transient=max(0, round(transients["F"]) - last.arriving - last.leaving),
        backward_transient=max(0, round(transients["B"]) - last.message),
        backward_input_transient=max(0, round(transients["I"]) - last.message),
        backward_weight_transient=round(transients["W"]),
    )
    return (*others, joint)

"""The optimizer with its parameter groups and its state by name, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.tensors.sharded import is_sharded, part_like, processes_of
from stageline.train.config.config import Config, LRScheduler
from stageline.train.config.config import Optimizer as OptimizerConfig

_FUSED = ("AdamW", "Adam", "SGD")

State = dict[str, dict[str, Tensor]]
"""For every parameter name, its state tensors by slot name."""


class Optimizer:
    """One or two torch optimizers over named parameters, with float32 master weights for bfloat16 and float16 models.

    Weight decay applies to matrices, not to norms, biases and other vectors. Muon takes the matrices between embedding
    and head, and AdamW the rest.

    >>> layer = nn.Linear(2, 2)
    >>> config = OptimizerConfig(name="SGD", lr=0.5, beta1=0.0, weight_decay=0.1)
    >>> optimizer = Optimizer(config, layer.named_parameters())
    >>> [(group["names"], group["weight_decay"]) for group in optimizer.groups]
    [(['weight'], 0.1), (['bias'], 0.0)]
    """

    def __init__(
        self,
        config: OptimizerConfig,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        outer: Iterable[str] = (),
        updates: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`outer` names the parameters of embedding and head, which Muon leaves to AdamW.

        `updates` says which parameters get gradients here: the state of the others, with their master weights, is in
        other replicas.
        """
        self.config = config
        half = (torch.bfloat16, torch.float16)
        self.parameters = {
            name: parameter
            for name, parameter in named_parameters
            if parameter.requires_grad and (updates(name) or parameter.dtype not in half)
        }
        self.masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
            if parameter.dtype in half
        }
        trained = self._trained()
        inner = {name for name, parameter in trained.items() if parameter.dim() == 2 and name not in set(outer)}
        muon = {name: trained[name] for name in trained if config.name == "Muon" and name in inner}
        rest = {name: trained[name] for name in trained if name not in muon}
        self._optimizers = [
            self._make(kind, members)
            for kind, members in (("Muon", muon), ("AdamW" if config.name == "Muon" else config.name, rest))
            if members
        ]
        for group in self.groups:
            group["initial_lr"] = group["lr"]
        self._owners = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _make(self, kind: str, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        config = self.config
        # torch cannot step tensors that are cut over different processes together.
        forms = {name: (tensor.dim() <= 1, tuple(processes_of(tensor))) for name, tensor in parameters.items()}
        members = {form: [name for name in parameters if forms[name] == form] for form in sorted(set(forms.values()))}
        groups = [
            {
                "params": [parameters[name] for name in names],
                "names": names,
                "weight_decay": 0.0 if is_vector else config.weight_decay,
            }
            for (is_vector, _), names in members.items()
        ]
        options: dict[str, Any] = {"lr": config.lr}
        if kind in ("AdamW", "Adam"):
            options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
        elif kind in ("SGD", "Muon"):
            options |= {"momentum": config.beta1}
        is_fused = config.implementation in ("auto", "fused")
        if kind == "SGD" and config.implementation == "auto":  # torch cannot step parts of tensors with a fused SGD
            is_fused = not any(map(is_sharded, parameters.values()))
        if kind in _FUSED and is_fused:
            options["fused"] = True
        elif kind != "Muon":
            options["foreach"] = config.implementation != "for-loop"
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
        return optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, with the names of their parameters."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def single(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, if one alone steps the parameters of the model."""
        return self._optimizers[0] if len(self._optimizers) == 1 and not self.masters else None

    def set_rate(self, factor: float) -> None:
        """Set every group to this fraction of its maximum learning rate."""
        for group in self.groups:
            group["lr"] = group["initial_lr"] * factor

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients to step with, by name; those of master weights are float32."""
        grads = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        for name, master in self.masters.items():
            if name in grads:
                master.grad = grads[name].float()
                grads[name] = master.grad
        return grads

    def step(self) -> None:
        """Step, and copy master weights into the parameters."""
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def state(self) -> State:
        """Return the state by parameter name, including master weights."""
        state: State = {}
        for name, parameter in self._trained().items():
            slots = self._owners[parameter].state.get(parameter, {})
            state[name] = {slot: torch.as_tensor(value) for slot, value in slots.items() if value is not None}
            if name in self.masters:
                state[name]["master"] = self.masters[name].detach()
        return state

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a state."""
        for name, parameter in self._trained().items():
            slots = dict(state.get(name, {}))
            master = slots.pop("master", None)
            if name in self.masters:
                with torch.no_grad():
                    weights = self.parameters[name] if master is None else master
                    self.masters[name].copy_(part_like(weights, self.masters[name]))
            owner = self._owners[parameter]
            owner.state.pop(parameter, None)
            if slots:
                for slot, value in slots.items():
                    is_mismatch = value.dim() > 0 and value.shape != parameter.shape
                    if is_mismatch and self.config.name != "Adafactor":
                        raise StagelineError(
                            f"the state {slot} of {name} has shape {tuple(value.shape)}, but the parameter has shape "
                            f"{tuple(parameter.shape)}; the state belongs to another model"
                        )
                owner.state[parameter] = place_slots(slots, parameter, owner)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: self.masters.get(name, parameter) for name, parameter in self.parameters.items()}


def place_slots(
    slots: Mapping[str, Tensor], parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Copy the state of a parameter to where torch's kernels expect it: a step count may stay on the host."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return {
        slot: value.clone() if slot == "step" and not on_device else _place(value, parameter)
        for slot, value in slots.items()
    }


def _place(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Copy a state to the device of its parameter, and cut it as the parameter is cut."""
    copy = value.to(parameter.device, copy=True)
    return part_like(copy, parameter) if copy.shape == parameter.shape else copy


def outer_parameters(model: nn.Module) -> list[str]:
    """Return the names of the embedding weights, and of the last matrix, which is the head."""
    embeddings = [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for parameter_name, _ in module.named_parameters(recurse=False)
    ]
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    return [*embeddings, *(name for name in matrices[-1:] if name not in embeddings)]


def rate(schedule: LRScheduler, step: int, steps: int) -> float:
    """Return the fraction of the maximum learning rate at a step, counted from 0.

    Warm-up, then constant, then decay: over all remaining steps, or over the last `decay_ratio` of all steps (WSD).

    >>> wsd = LRScheduler(warmup_steps=2, decay_ratio=0.5, decay_type="linear", min_lr_factor=0.0)
    >>> [round(rate(wsd, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    remaining = max(steps - min(schedule.warmup_steps, steps), 0)
    num_decay = remaining if schedule.decay_ratio < 0 else min(round(schedule.decay_ratio * steps), remaining)
    decay_step = step - (steps - num_decay)
    if schedule.decay_type == "constant" or decay_step <= 0 or num_decay == 0:
        return 1.0
    progress = min(decay_step / num_decay, 1.0)
    shape = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * shape


def warm_up_note(config: Config) -> str:
    """Return a note if the warm-up lasts for the whole run, else an empty string."""
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if warmup < steps:
        return ""
    top = "to optimizer.lr in the last step" if steps == warmup else f"up to {steps / warmup:.0%} of optimizer.lr"
    return (
        f"lr_scheduler.warmup_steps is {warmup} and training.steps is {steps}: the learning rate rises until the end, "
        f"{top}"
    )

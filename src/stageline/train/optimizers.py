"""The optimizer, its groups of parameters, its state by names, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.train.config import Config, LRScheduler
from stageline.train.config import Optimizer as Asked

_FUSED = ("AdamW", "Adam", "SGD")

State = dict[str, dict[str, Tensor]]
"""For every parameter by name, its slots by theirs."""


class Optimizer:
    """One or two optimizers of torch over named parameters; those of a bfloat16 model work on float32 masters.

    Matrices decay; norms, biases and other vectors do not. Muon takes the matrices between embedding and head, and
    AdamW all the rest.

    >>> layer = nn.Linear(2, 2)
    >>> optimizer = Optimizer(Asked(name="SGD", lr=0.5, beta1=0.0, weight_decay=0.1), layer.named_parameters())
    >>> [(group["names"], group["weight_decay"]) for group in optimizer.groups]
    [(['weight'], 0.1), (['bias'], 0.0)]
    """

    def __init__(self, asked: Asked, named: Iterable[tuple[str, nn.Parameter]], *, outer: Iterable[str] = ()) -> None:
        """`outer` names the parameters of embedding and head, which Muon leaves to AdamW."""
        self.asked = asked
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
            if parameter.dtype in (torch.bfloat16, torch.float16)
        }
        given = {name: self.masters.get(name, parameter) for name, parameter in self.parameters.items()}
        inner = {name for name, each in given.items() if each.dim() == 2 and name not in set(outer)}
        muon = {name: given[name] for name in given if asked.name == "Muon" and name in inner}
        rest = {name: given[name] for name in given if name not in muon}
        self._made = [
            self._make(kind, part)
            for kind, part in (("Muon", muon), ("AdamW" if asked.name == "Muon" else asked.name, rest))
            if part
        ]
        for group in self.groups:
            group["initial_lr"] = group["lr"]

    def _make(self, kind: str, part: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        asked = self.asked
        groups = [
            {"params": list(chosen.values()), "names": list(chosen), "weight_decay": decay}
            for chosen, decay in (
                ({name: each for name, each in part.items() if each.dim() > 1}, asked.weight_decay),
                ({name: each for name, each in part.items() if each.dim() <= 1}, 0.0),
            )
            if chosen
        ]
        options: dict[str, Any] = {"lr": asked.lr}
        if kind in ("AdamW", "Adam"):
            options |= {"betas": (asked.beta1, asked.beta2), "eps": asked.eps}
        elif kind in ("SGD", "Muon"):
            options |= {"momentum": asked.beta1}
        options |= self._how(kind, part.values())
        found = getattr(torch.optim, kind, None)
        if found is None:
            raise StagelineError(f"optimizer.name is {kind!r}, which torch {torch.__version__} does not have")
        made: torch.optim.Optimizer = found(groups, **options)
        return made

    def _how(self, kind: str, parameters: Iterable[Tensor]) -> dict[str, bool]:
        """How torch is to run it: fused where it has that."""
        how, devices = self.asked.implementation, {each.device.type for each in parameters}
        able = kind in _FUSED and devices <= {"cpu", "cuda"}
        if how == "fused" and kind in _FUSED and not able:
            raise StagelineError(f"optimizer.implementation is 'fused', and torch has no fused {kind} for {devices}")
        if kind == "Muon":
            return {}
        if kind == "Adafactor":
            return {"foreach": how in ("auto", "foreach", "fused")}
        return {"fused": True} if able and how in ("auto", "fused") else {"foreach": how in ("auto", "foreach")}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, with the names of their parameters."""
        return [group for made in self._made for group in made.param_groups]

    def set_rate(self, factor: float) -> float:
        """Let every group have this share of its highest learning rate; give back the rate of the first."""
        for group in self.groups:
            group["lr"] = group["initial_lr"] * factor
        return float(self.groups[0]["lr"]) if self.groups else self.asked.lr * factor

    def gradients(self) -> dict[str, Tensor]:
        """The gradients to step with, by name; those of masters are float32."""
        found = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        for name, master in self.masters.items():
            if name in found:
                master.grad = found[name].float()
                found[name] = master.grad
        return found

    def step(self) -> None:
        """Step, and round masters into the parameters that the model computes with."""
        for made in self._made:
            made.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def state(self) -> State:
        """The state by names of parameters, masters included."""
        found: State = {}
        for name, parameter in self._given().items():
            slots = self._owner(parameter).state.get(parameter, {})
            found[name] = {slot: torch.as_tensor(value) for slot, value in slots.items() if value is not None}
            if name in self.masters:
                found[name]["master"] = self.masters[name].detach()
        return found

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a state."""
        for name, parameter in self._given().items():
            slots = dict(state.get(name, {}))
            master = slots.pop("master", None)
            if name in self.masters:
                with torch.no_grad():
                    self.masters[name].copy_(self.parameters[name] if master is None else master)
            owner = self._owner(parameter)
            owner.state.pop(parameter, None)
            if slots:
                for slot, value in slots.items():
                    wrong = value.dim() > 0 and value.shape != parameter.shape
                    if wrong and self.asked.name != "Adafactor":
                        raise StagelineError(
                            f"the state {slot} of {name} has shape {tuple(value.shape)} and the parameter "
                            f"{tuple(parameter.shape)}: it is of another model"
                        )
                # A step count stays where torch's own kernels want it; all else lies with the parameter.
                fused = any(group.get("fused") for group in owner.param_groups)
                owner.state[parameter] = {
                    slot: value.clone() if slot == "step" and not fused else value.to(parameter.device, copy=True)
                    for slot, value in slots.items()
                }

    def _given(self) -> dict[str, nn.Parameter]:
        return {name: self.masters.get(name, parameter) for name, parameter in self.parameters.items()}

    def _owner(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        for made in self._made:
            if any(parameter is each for group in made.param_groups for each in group["params"]):
                return made
        raise AssertionError("every parameter is in a group")


def outer_parameters(model: nn.Module) -> list[str]:
    """The names of the weights of embeddings, and of the last matrix, which is the head.

    >>> outer_parameters(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)))
    ['0.weight', '2.weight']
    """
    embeddings = [
        f"{name}.{each}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for each, _ in module.named_parameters(recurse=False)
    ]
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    return [*embeddings, *(name for name in matrices[-1:] if name not in embeddings)]


def rate(asked: LRScheduler, step: int, steps: int) -> float:
    """The share of the highest learning rate at a step, counted from 0, of so many.

    Warm-up, then as it is, then the decay: over all that is left, or over the last share of the steps (WSD).

    >>> wsd = LRScheduler(warmup_steps=2, decay_ratio=0.5, decay_type="linear", min_lr_factor=0.0)
    >>> [round(rate(wsd, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < asked.warmup_steps:
        return (step + 1) / asked.warmup_steps
    left = max(steps - min(asked.warmup_steps, steps), 0)
    span = left if asked.decay_ratio < 0 else min(round(asked.decay_ratio * steps), left)
    into = step - (steps - span)
    if asked.decay_type == "constant" or into <= 0 or span == 0:
        return 1.0
    share = min(into / span, 1.0)
    shape = {
        "linear": 1.0 - share,
        "sqrt": 1.0 - math.sqrt(share),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * share)),
    }[asked.decay_type]
    return asked.min_lr_factor + (1.0 - asked.min_lr_factor) * shape


def warm_up_note(config: Config) -> str:
    """What to say of a warm-up that leaves no step to the rest; nothing where it is shorter than the run.

    >>> warm_up_note(Config.read(None, "training.steps=12"))
    'lr_scheduler.warmup_steps is 30 and training.steps is 12: the learning rate only rises, up to 40% of optimizer.lr'
    >>> warm_up_note(Config.read(None, "training.steps=31"))
    ''
    """
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if warmup < steps:
        return ""
    far = "to optimizer.lr in the last step" if steps == warmup else f"up to {steps / warmup:.0%} of optimizer.lr"
    return f"lr_scheduler.warmup_steps is {warmup} and training.steps is {steps}: the learning rate only rises, {far}"

"""A model's own plan for tensor parallel: how each of its layers is divided, by layer name.

    {"layers.*.attention.q": "colwise", "layers.*.attention.o": "rowwise"}

Hugging Face models have one, and any other model may have one as its attribute `tp_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError

HEADS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_heads", "n_kv_heads", "n_head",
    "heads", "nhead",
)  # fmt: skip
"""What attention layers and their configs call the number of their heads."""


def plan_of(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan of a model, by names of its modules; empty if neither it nor a module in it has one.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> plan_of(model)
    {}
    >>> model.tp_plan = {"*": "colwise"}
    >>> plan_of(nn.Sequential(model, nn.Tanh(), model))
    {'0.*': 'colwise'}
    """
    plans: dict[str, str] = {}
    inside: list[str] = []  # a module's plan covers what is in it
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in inside):
            continue
        for attribute in ("tp_plan", "_tp_plan"):
            # An adapter passes on the attributes of the model that it wraps, and has other names.
            own = attribute in vars(module) or hasattr(type(module), attribute)
            plan = getattr(module, attribute) if own else None
            if isinstance(plan, Mapping) and plan:
                plans |= {f"{path}.{name}" if path else name: str(style) for name, style in plan.items()}
                inside.append(path)
                break
    return plans


def style_of(plan: Mapping[str, str], name: str) -> str | None:
    """The style of a module or parameter; None if a plan does not name it.

    >>> style_of({"layers.*.up": "colwise"}, "layers.3.up"), style_of({"0.*": "rowwise"}, "0.1")
    ('colwise', 'rowwise')
    """
    parts = name.split(".")
    numbered = ["*" if part.isdigit() else part for part in parts]
    keys = (".".join([*parts[:exact], *numbered[exact:]]) for exact in range(len(parts) + 1))
    return next((plan[key] for key in keys if key in plan), None)


def refuse_heads(name: str, owner: nn.Module, degree: int, config: Any = None) -> None:
    """Refuse a degree that does not divide the heads of the attention that a layer belongs to."""
    holders = [owner] if config is None or "attention" not in type(owner).__name__.lower() else [owner, config]
    for holder in holders:
        counts = {attribute: getattr(holder, attribute, None) for attribute in HEADS}
        refuse_counts(name, type(holder).__name__, counts, degree)


def refuse_counts(name: str, holder: str, counts: Mapping[str, Any], degree: int) -> None:
    """Refuse a degree that does not divide one of the numbers of heads of a class, by name."""
    for attribute, count in counts.items():
        if type(count) is int and count % degree:
            raise StagelineError(
                f"tp is {degree}, which does not divide {attribute} {count} of {holder}, but {name} is cut by heads; "
                "use a tp that divides it"
            )

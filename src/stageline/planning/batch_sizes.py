"""What a model costs at any size of a microbatch: measured at some, in between and beyond on straight lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError, shorten
from stageline.model.profile.profile import Layer, Profile
from stageline.model.profile.profiler import profile as measure_profile
from stageline.model.split import split
from stageline.model.units import refuse_lazy
from stageline.tensors.pytree import batch_size, refuse_arrays

TIMES = ("forward", "backward_input", "backward_weight", "backward")
BYTES = ("activation", "residue", "message", "arriving", "leaving")


@dataclass(frozen=True)
class Sizes:
    """Profiles of one model, each of a microbatch of so many samples."""

    profiles: Mapping[int, Profile]
    """By the number of samples, the smallest first."""

    @classmethod
    def of(cls, given: Mapping[int, Profile]) -> Sizes:
        """Sort them, and make sure that they are of one model."""
        if not given:
            raise StagelineError("there is no profile; give one or more, by the samples of their microbatch")
        found = dict(sorted(given.items()))
        for samples, each in found.items():
            if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
                raise StagelineError(f"a profile is of a microbatch of 1 or more samples, got {shorten(samples)}")
            if not isinstance(each, Profile):
                raise StagelineError(
                    f"expected a Profile, as sl.profile and sl.read_profile make it, got {shorten(each)}"
                )
        names = [[layer.name for layer in each.layers] for each in found.values()]
        if any(first != second for first, second in pairwise(names)):
            raise StagelineError("the profiles have different layers; give profiles of one model, at several sizes")
        return cls(found)

    @property
    def any(self) -> Profile:
        """The largest."""
        return self.profiles[max(self.profiles)]

    def at(self, samples: int) -> Profile:
        """What it would cost with so many samples in a microbatch.

        >>> layer = Layer("0", "Linear", 3.0, 1.0, 1.0, 2.0, 8, 8, 4, 0, 8, 0, 0, 1)
        >>> small = Profile((layer,), "a machine", "cpu", "2.13", 1, 1)
        >>> large = replace(small, layers=(replace(layer, forward=5.0, activation=32),))
        >>> found = Sizes.of({2: small, 8: large}).at(4)
        >>> round(found.layers[0].forward, 3), found.layers[0].activation
        (3.667, 16)
        """
        if samples in self.profiles:
            return self.profiles[samples]
        known = list(self.profiles)
        if len(known) == 1:  # in proportion
            only = self.profiles[known[0]]
            return _mixed(only, only, (samples / known[0], 0.0), (0.0, 0.0))
        upper = min(max(bisect_left(known, samples), 1), len(known) - 1)
        low, high = known[upper - 1], known[upper]
        share = (samples - low) / (high - low)
        # Beyond what was measured a line may lead anywhere: fewer samples cost their share, more at least as much.
        least = (samples / low, 0.0) if samples < low else (0.0, 1.0) if samples > high else (0.0, 0.0)
        return _mixed(self.profiles[low], self.profiles[high], (1.0 - share, share), least)

    def note(self, sizes: Sequence[int]) -> str:
        """Say which sizes were measured, and what was done for others; empty where all were."""
        known = list(self.profiles)
        if all(size in self.profiles for size in sizes):
            return ""
        said = " and ".join(map(str, known)) if len(known) < 3 else f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
        how = "scaled in proportion" if len(known) == 1 else "taken from straight lines between and beyond them"
        return f"measured with {said} samples in a microbatch; other sizes are {how}"


def _mixed(low: Profile, high: Profile, parts: tuple[float, float], least: tuple[float, float]) -> Profile:
    """Of every value these parts of the first and of the second, and at least those."""
    layers = []
    for one, two in zip(low.layers, high.layers, strict=True):
        changed: dict[str, Any] = {}
        for name in (*TIMES, *BYTES):
            values = getattr(one, name), getattr(two, name)
            mixed, floor = (weigh[0] * values[0] + weigh[1] * values[1] for weigh in (parts, least))
            changed[name] = max(mixed, floor) if name in TIMES else round(max(mixed, floor))
        layers.append(replace(one, **changed))
    return replace(low, layers=tuple(layers))


def by_calls(found: Profile, names: Sequence[str]) -> Profile:
    """A layer for every call of a unit, also where the model calls one twice.

    >>> layer = Layer("a", "Linear", 2.0, 2.0, 2.0, 4.0, 8, 8, 4, 0, 8, 0, 0, 2)
    >>> twice = by_calls(Profile((layer,), "a machine", "cpu", "2.13", 1, 1), ["a", "a"])
    >>> [(each.forward, each.calls) for each in twice.layers]
    [(1.0, 1), (1.0, 1)]
    """
    if list(names) == [layer.name for layer in found.layers]:
        return found
    by_name = {layer.name: layer for layer in found.layers}
    layers: list[Layer] = []
    for name in names:
        layer = by_name[name]
        shares: dict[str, Any] = {each: getattr(layer, each) / layer.calls for each in TIMES}
        shares |= {each: getattr(layer, each) // layer.calls for each in ("activation", "residue")}
        layers.append(replace(layer, calls=1, **shares))
    return replace(found, layers=tuple(layers))


def first_samples(tree: Any, samples: int) -> Any:
    """A microbatch of its own of the first samples."""

    def cut(leaf: Any) -> Any:
        return leaf[:samples].clone() if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    return pytree.tree_map(cut, tree)


def measure(
    model: nn.Module,
    example: Any,
    *,
    several: bool,
    repeats: int = 3,
    warmup: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Sizes:
    """Profile a model on the example, and if `several` on fewer of its samples too.

    >>> import torch
    >>> found = measure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(9, 4), several=True, repeats=1)
    >>> list(found.profiles)
    [1, 3, 9]
    """
    refuse_lazy(model)
    refuse_arrays(example, "the example")
    try:
        whole = batch_size(example, "the example")
    except StagelineError as error:
        if several:
            raise StagelineError(
                f"{error}; or give microbatches= in place of batch=, and one microbatch as example"
            ) from None
        whole = 1
    names = [unit.name for unit in split(model, 1, example=example).units]
    found: dict[int, Profile] = {}
    for samples in sorted({1, isqrt(whole), whole} if several else {whole}, reverse=True):
        tell(f"measuring {len(names)} units with {samples} samples")
        part = example if samples == whole else first_samples(example, samples)
        try:
            found[samples] = by_calls(measure_profile(model, part, repeats=repeats, warmup=warmup), names)
        except Exception:
            if samples == whole:
                raise  # a smaller one may be too small for the model, and then nobody wants to know its cost
    return Sizes.of(found)

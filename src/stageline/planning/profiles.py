"""Profiles of a model for several microbatch sizes: measured for some, and interpolated linearly for others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt
from typing import Any

from torch import nn

from stageline.autograd.graphs.options import Compile
from stageline.common.errors import StagelineError, shorten
from stageline.model.neighbours import Launcher
from stageline.model.profile import Layer, Profile
from stageline.model.profiler import profile as measure_profile
from stageline.model.split import split
from stageline.model.units import refuse_lazy
from stageline.tensors.pytree import batch_size, first_samples, refuse_arrays

TIMES = ("forward", "backward_input", "backward_weight", "backward")
TRANSIENTS = ("forward_transient", "backward_transient", "backward_input_transient", "backward_weight_transient")
BYTES = ("activation", "residue", "message", "arriving", "leaving", *TRANSIENTS)


@dataclass(frozen=True)
class SizedProfiles:
    """Profiles of one model for several microbatch sizes."""

    profiles: Mapping[int, Profile]
    """By number of samples, in ascending order."""
    _estimates: dict[int, Profile] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, profiles: Mapping[int, Profile]) -> SizedProfiles:
        """Sort profiles, and check that they are of one model."""
        if not profiles:
            raise StagelineError("got no profiles; pass at least one, keyed by the number of samples in its microbatch")
        for samples, profile in sorted(profiles.items()):
            if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
                raise StagelineError(
                    f"the number of samples of a profile must be an integer >= 1, got {shorten(samples)}"
                )
            if not isinstance(profile, Profile):
                raise StagelineError(f"expected a Profile from sl.profile or sl.read_profile, got {shorten(profile)}")
        names = [[layer.name for layer in profile.layers] for profile in profiles.values()]
        if any(first != second for first, second in pairwise(names)):
            raise StagelineError("the profiles have different layers; pass profiles of one model for several sizes")
        return cls(dict(sorted(profiles.items())))

    @property
    def largest(self) -> Profile:
        """The profile with the most samples."""
        return self.profiles[max(self.profiles)]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(layer.name for layer in self.largest.layers)

    def at(self, samples: int) -> Profile:
        """Return the estimated costs for this number of samples in a microbatch.

        >>> layer = Layer("0", "Linear", 3.0, 1.0, 1.0, 2.0, 8, 8, 4, 0, 8, 0, 0, 1)
        >>> small = Profile((layer,), "a machine", "cpu", "2.13", 1, 1)
        >>> large = replace(small, layers=(replace(layer, forward=5.0, activation=32),))
        >>> estimate = SizedProfiles.of({2: small, 8: large}).at(4)
        >>> round(estimate.layers[0].forward, 3), estimate.layers[0].activation
        (3.667, 16)
        """
        if samples in self.profiles:
            return self.profiles[samples]
        if samples not in self._estimates:
            self._estimates[samples] = self._estimate(samples)
        return self._estimates[samples]

    def _estimate(self, samples: int) -> Profile:
        sizes = list(self.profiles)
        if len(sizes) == 1:  # in proportion
            only = self.profiles[sizes[0]]
            return _combine(only, only, (samples / sizes[0], 0.0), (0.0, 0.0))
        upper = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        share = (samples - low) / (high - low)
        # Limit the extrapolation: fewer samples cost at least their share, and more at least as much.
        least = (samples / low, 0.0) if samples < low else (0.0, 1.0) if samples > high else (0.0, 0.0)
        return _combine(self.profiles[low], self.profiles[high], (1.0 - share, share), least)

    @property
    def noisiest(self) -> Profile:
        """The profile whose measurements varied most."""
        return max(self.profiles.values(), key=lambda profile: profile.uncertainty)

    def note(self, sizes: Sequence[int]) -> str:
        """Say which sizes were measured, and how others were estimated; empty if all were measured."""
        measured = list(map(str, self.profiles))
        if all(size in self.profiles for size in sizes):
            return ""
        listed = " and ".join([", ".join(measured[:-1]), measured[-1]] if len(measured) > 1 else measured)
        how = "scaled in proportion" if len(measured) == 1 else "interpolated and extrapolated linearly"
        samples = "sample" if measured == ["1"] else "samples"
        return f"measured with {listed} {samples} in a microbatch; other sizes are {how}"


def _combine(low: Profile, high: Profile, weights: tuple[float, float], least: tuple[float, float]) -> Profile:
    """Return a weighted sum of all costs, but at least the sum with the weights `least`."""
    layers = []
    for one, two in zip(low.layers, high.layers, strict=True):
        combined: dict[str, Any] = {}
        for name in (*TIMES, *BYTES):
            first, second = getattr(one, name), getattr(two, name)
            value = max(weights[0] * first + weights[1] * second, least[0] * first + least[1] * second)
            combined[name] = value if name in TIMES else round(value)
        layers.append(replace(one, **combined))
    return replace(low, layers=tuple(layers))


def by_calls(profile: Profile, names: Sequence[str]) -> Profile:
    """Return a profile with one layer for every call of a unit; `names` are the calls in order.

    >>> layer = Layer("a", "Linear", 2.0, 2.0, 2.0, 4.0, 8, 8, 4, 0, 8, 0, 0, 2)
    >>> twice = by_calls(Profile((layer,), "a machine", "cpu", "2.13", 1, 1), ["a", "a"])
    >>> [(layer.forward, layer.calls) for layer in twice.layers]
    [(1.0, 1), (1.0, 1)]
    """
    if list(names) == [layer.name for layer in profile.layers]:
        return profile
    by_name = {layer.name: layer for layer in profile.layers}
    layers: list[Layer] = []
    for name in names:
        layer = by_name[name]
        shares: dict[str, Any] = {field: getattr(layer, field) / layer.calls for field in TIMES}
        shares |= {field: getattr(layer, field) // layer.calls for field in ("activation", "residue")}
        shares["ranges"] = tuple((low / layer.calls, high / layer.calls) for low, high in layer.ranges)
        layers.append(replace(layer, calls=1, **shares))
    return replace(profile, layers=tuple(layers))


def measure_sizes(
    model: nn.Module,
    example: Any,
    *,
    several: bool,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    compile: Compile = False,
    repeats: int = 3,
    neighbours: int = 0,
    launcher: Launcher = "processes",
    progress: Callable[[str], None] = lambda text: None,
) -> SizedProfiles:
    """Profile a model, and its loss if there is one, on the example; if `several`, also on fewer of its samples.

    Neighbours compute beside the largest number of samples.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> list(measure_sizes(model, torch.ones(9, 4), several=True, repeats=1).profiles)
    [1, 3, 9]
    """
    refuse_lazy(model)
    refuse_arrays(example, "the example")
    try:
        all_samples = batch_size(example, "the example")
    except StagelineError as error:
        if several:
            raise StagelineError(
                f"{error}; or pass microbatches= instead of batch=, and one microbatch as example"
            ) from None
        all_samples = 1
    names = [unit.name for unit in split(model, 1, example=example).units]
    profiles: dict[int, Profile] = {}
    options: Any = {"compile": compile, "repeats": repeats, "warmup": 1}
    for samples in sorted({1, isqrt(all_samples), all_samples} if several else {all_samples}, reverse=True):
        progress(f"measuring {len(names)} units with {samples} samples")
        part = example if samples == all_samples else first_samples(example, samples)
        its_targets = targets if samples == all_samples or targets is None else first_samples(targets, samples)
        try:
            beside = neighbours if samples == all_samples else 0
            measured = measure_profile(
                model, part, loss_fn=loss_fn, targets=its_targets, neighbours=beside, launcher=launcher, **options
            )
            profiles[samples] = by_calls(measured, names)
        except Exception:
            if samples == all_samples:
                raise  # a smaller microbatch may be too small for the model, and is then not a candidate
    return SizedProfiles.of(profiles)

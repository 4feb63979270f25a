"""The measured costs of a model's layers, in seconds and bytes: as a table, a file, and costs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from stageline.common.checked_json import PositiveInt, Range, check_format, field, from_json, json_lines, parse_json
from stageline.common.errors import CostError, JsonError, shorten
from stageline.common.files import read_text, write_text
from stageline.common.units import format_range, format_seconds, format_size, format_table, format_uncertainty
from stageline.timeline.costs import LARGEST_COST, Costs, PerPair

FORMAT = "stageline-profile"
VERSION = 1
NOISY = 0.1
"""Measurements that vary by more than this fraction are noisy."""

CERTAINTY = ("uncertainty", "speeds", "launcher")
"""Fields of a profile that a file may omit."""

Cost = Annotated[float, Range(0, LARGEST_COST)]
Bytes = Annotated[int, Range(0, LARGEST_COST)]


@dataclass(frozen=True)
class Layer:
    """The cost of one layer for one microbatch: times in seconds, memory in bytes."""

    name: str
    kind: str
    """Its class name."""
    forward: Cost
    """F, with autograd."""
    backward_input: Cost
    """I, alone."""
    backward_weight: Cost
    """W, alone."""
    backward: Cost
    """B: both at once."""
    activation: Bytes
    """Held from F to B: what it saves for the backward and no earlier layer saved."""
    residue: Bytes
    """Held from I to W."""
    parameters: Bytes
    """Its parameters; shared ones count in every layer that has them."""
    tied: Bytes
    """Those of its parameters that an earlier layer also has."""
    message: Bytes
    """Its output."""
    arriving: Bytes
    """Its input, if not part of `activation`; a stage that starts here holds it too."""
    leaving: Bytes
    """Its output, if not part of `activation`; a stage that ends here holds it too."""
    calls: PositiveInt
    """Number of calls per forward; times and memory are totals of all calls."""
    forward_transient: Bytes = 0
    """Held only while F runs, beside input, output and activation; on the host, transients are not measured."""
    backward_transient: Bytes = 0
    """Held only while B runs, beside the activation and the gradient of the output."""
    backward_input_transient: Bytes = 0
    """Held only while I runs, beside the activation and the gradient of the output."""
    backward_weight_transient: Bytes = 0
    """Held only while W runs, beside the residue."""
    ranges: tuple[tuple[Cost, Cost], ...] = ()
    """The shortest and the longest measurement of F, I, W and B of this layer alone; empty if not known."""

    @property
    def seconds(self) -> float:
        """Total time of F, I and W."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Profile:
    """The costs of a model's layers, in the order in which data passes through them."""

    layers: tuple[Layer, ...]
    machine: str
    device: str
    torch: str
    """The version of torch."""
    threads: int
    """Number of torch threads, for CPU."""
    repeats: int
    """Number of measurements; times are means in which outliers count little, over equal layers."""
    uncertainty: Cost = 0.0
    """How far the measurements of all layers together are from their middle, as a fraction of it."""
    speeds: tuple[Annotated[float, Range(maximum=1, above=0)], ...] = ()
    """The speed of a rank while 1, 2, … of them compute on this machine; empty if that was not measured."""
    launcher: str = ""
    """Whether these were "processes" or "threads"; empty if that was not measured."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Total time of F, I and W of each layer."""
        return tuple(layer.seconds for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Bytes of all parameters; shared ones count once."""
        return sum(layer.parameters - layer.tied for layer in self.layers)

    @property
    def noise(self) -> str:
        """What varied most, and by how much a plan may be off; empty if the measurements are stable.

        >>> layer = Layer("blocks.3", "Block", 0.5, 0.5, 0.5, 1.0, 8, 8, 8, 0, 8, 0, 0, 1, ranges=((0.213, 0.816),))
        >>> Profile((layer,), "a machine", "cpu", "2.13", 1, 5, uncertainty=0.3).noise
        'noisy: F of blocks.3 varied 213–816 ms in 5 measurements; the plan may be off by 30%'
        """
        varied = [
            (high - low, f"{kind} of {layer.name} varied {format_range(low, high)}")
            for layer in self.layers
            for kind, (low, high) in zip("FIWB", layer.ranges, strict=False)
        ]
        if self.uncertainty <= NOISY or not varied:
            return ""
        off = f"the plan may be off by {format_uncertainty(self.uncertainty)}"
        return f"noisy: {max(varied)[1]} in {self.repeats} measurements; {off}"

    def scaled(self, factor: float) -> Profile:
        """Return a profile whose layers take `factor` times as long.

        >>> layer = Layer("0", "Linear", 1.0, 1.0, 1.0, 2.0, 8, 8, 8, 0, 8, 0, 0, 1, ranges=((1.0, 1.5),))
        >>> profile = Profile((layer,), "a machine", "cpu", "2.13", 1, 5).scaled(0.5)
        >>> profile.layers[0].backward, profile.layers[0].ranges
        (1.0, ((0.5, 0.75),))
        """
        return replace(
            self,
            layers=tuple(
                replace(
                    layer,
                    forward=factor * layer.forward,
                    backward_input=factor * layer.backward_input,
                    backward_weight=factor * layer.backward_weight,
                    backward=factor * layer.backward,
                    ranges=tuple((factor * low, factor * high) for low, high in layer.ranges),
                )
                for layer in self.layers
            ),
        )

    def costs(
        self, stages: Sequence[tuple[int, int]], *, transfer: PerPair = 0.0, bandwidth: PerPair | None = None
    ) -> Costs:
        """Return the costs of stages, given as (start, stop) of their layers, in seconds and bytes.

        >>> import stageline as sl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> costs = sl.profile(model, torch.randn(3, 4), repeats=1).costs([(0, 2), (2, 3)])
        >>> costs.activation, costs.message     # F keeps 3 × 4 and 3 × 8 numbers, then 3 × 8
        ([144.0, 96.0], [96.0, 24.0])
        """
        self._check_stages(stages)
        parts = [self.layers[start:stop] for start, stop in stages]

        def total(name: str) -> list[float]:
            return [float(sum(getattr(layer, name) for layer in part)) for part in parts]

        activation = [
            size
            + part[0].arriving
            + (0 if part is parts[-1] else part[-1].leaving)  # the loss consumes the last output
            for size, part in zip(total("activation"), parts, strict=True)
        ]
        transients = [stage_transients(part) for part in parts]
        transient = {kind: [stage[kind] for stage in transients] for kind in "FBIW"}
        return Costs(
            forward=total("forward"),
            backward_input=total("backward_input"),
            backward_weight=total("backward_weight"),
            backward=total("backward"),
            activation=activation,
            residue=total("residue"),
            transient=transient if any(map(any, transient.values())) else 0.0,
            message=[float(part[-1].message) for part in parts],
            transfer=transfer,
            bandwidth=bandwidth,
            in_seconds=True,
        )

    def _check_stages(self, stages: Sequence[tuple[int, int]]) -> None:
        expected = 0
        for stage, span in enumerate(stages):
            is_pair = isinstance(span, Sequence) and len(span) == 2 and all(isinstance(end, int) for end in span)
            if not is_pair or span[0] != expected or not expected < span[1] <= len(self.layers):
                raise CostError(
                    f"stage {stage} is {shorten(span)}; pass (first layer, layer after the last), with at least one "
                    f"layer; this stage starts at {expected}, and there are {len(self.layers)} layers"
                )
            expected = span[1]
        if expected != len(self.layers):
            raise CostError(f"the stages end at layer {expected}, but the profile has {len(self.layers)} layers")

    def __str__(self) -> str:
        header = ("layer", "kind", "F", "I", "W", "B", "activation", "residue", "parameters", "output")
        times = ("forward", "backward_input", "backward_weight", "backward")
        sizes = ("activation", "residue")
        rows = [
            [
                layer.name if layer.calls == 1 else f"{layer.name} ×{layer.calls}",
                layer.kind,
                *(format_seconds(getattr(layer, name)) for name in times),
                *(format_size(getattr(layer, name)) for name in (*sizes, "parameters", "message")),
            ]
            for layer in self.layers
        ]
        sums = [format_seconds(sum(getattr(layer, name) for layer in self.layers)) for name in times]
        sums += [format_size(sum(getattr(layer, name) for layer in self.layers)) for name in sizes]
        rows.append(["total", "", *sums, format_size(self.parameters), ""])
        lines = format_table([header, *rows], left={0, 1})
        tied = sum(layer.tied for layer in self.layers)
        if tied:
            lines.append(
                f"tied parameters, {format_size(tied)}, are counted in every layer that has them, and once in the total"
            )
        environment = f"{self.machine}, {self.device}, torch {self.torch}, {self.threads} threads"
        varied = f"{self.repeats} measurements, ± {self.uncertainty:.1%}" if self.repeats > 1 else "1 measurement"
        lines.append(f"{environment}, {varied}")
        if self.speeds:
            count = len(self.speeds)
            what = f"{count} ranks as {self.launcher} that compute at once"
            lines.append(f"{what} run at {self.speeds[-1]:.0%} of the speed of one alone")
        return "\n".join([*lines, self.noise] if self.noise else lines)

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON. An existing file is replaced atomically.

        >>> import stageline as sl, torch
        >>> profile = sl.profile(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4), repeats=1)
        >>> profile.write("profile.json")
        >>> read_profile("profile.json") == profile
        True
        """
        target = Path(path)
        if target.suffix.lower() != ".json":
            raise CostError(f"profiles are written as JSON; the file name must end in .json, got {target.name!r}")
        write_text(target, self.to_text(), CostError)

    def to_text(self) -> str:
        """Return the JSON that `write` writes, with one line per layer."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        data |= {name: getattr(self, name) for name in ("machine", "device", "torch", "threads", "repeats")}
        data |= {name: value for name in CERTAINTY if (value := getattr(self, name))}
        data["layers"] = [
            {
                name: value
                for name, value in asdict(layer).items()
                if value or not name.endswith(("_transient", "ranges"))
            }
            for layer in self.layers
        ]
        return "".join(json_lines(data, ("layers",)))


def stage_transients(layers: Sequence[Layer]) -> dict[str, float]:
    """Return the memory that F, B, I and W of a stage hold beside its activations, and W beside its residues.

    A stage's activations are counted from the start of its F to the end of its B. While unit u runs forward, only those
    of the units up to u exist, beside its input, its output and its temporaries. In the backward, those of the units
    after u are freed already, and the gradient of its output exists.

    >>> layer = Layer("0", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 0, 8, 1, 5, 20, 10, 30)
    >>> stage_transients([layer]), stage_transients([layer, layer])["B"]
    ({'F': 13.0, 'B': 28.0, 'I': 18.0, 'W': 30.0}, 28.0)
    """
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    if not any(getattr(layer, f"{kind}_transient") for layer in layers for kind in kinds):  # not measured
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


def read_profile(path: str | Path) -> Profile:
    """Read a profile that `Profile.write` wrote.

    >>> import stageline as sl, torch
    >>> sl.profile(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4), repeats=1).write("profile.json")
    >>> read_profile("profile.json").layers[0].parameters
    80
    """
    return profile_from_text(read_text(Path(path), "profile", CostError), Path(path))


def profile_from_text(text: str, source: str | Path) -> Profile:
    """Return the profile of a text that `Profile.to_text` made; errors name the source."""
    try:
        data = check_format(parse_json(text), FORMAT, VERSION, "profile")
        layers = [
            from_json(Layer, row, f"layers[{index}]", allow_unknown=False)
            for index, row in enumerate(field(data, "layers", list))
        ]
        if not layers:
            raise JsonError("'layers' is empty; a profile has at least one")
        machine, device, torch = (field(data, name, str) for name in ("machine", "device", "torch"))
        threads, repeats = (field(data, name, PositiveInt) for name in ("threads", "repeats"))
        hints = get_type_hints(Profile, include_extras=True)
        certainty = {name: field(data, name, hints[name]) for name in CERTAINTY if name in data}
        return Profile(tuple(layers), machine, device, torch, threads, repeats, **certainty)
    except JsonError as error:
        raise CostError(f"{source}: {error}") from None


def __getattr__(name: str) -> Any:
    if name in ("profile_layers", "profile_model"):  # the first version had them here
        from stageline.model import profiler

        return getattr(profiler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

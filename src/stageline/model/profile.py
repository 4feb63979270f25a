"""What the layers of a model cost: seconds and bytes, measured, as a table, a file and costs of stages."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import CostError, StagelineError, shorten
from stageline.model.capture import Seen, capture, held, storages_of
from stageline.model.measure import Alone, Timer, one_round, untouched
from stageline.model.units import layers_of
from stageline.schedules.files import check_format, parse_json, read_text, write_aside
from stageline.schedules.files import field as take
from stageline.timeline.costs import LARGEST_COST, Costs, PerPair

FORMAT = "stageline-profile"
VERSION = 1


@dataclass(frozen=True)
class Layer:
    """What one layer costs for one microbatch: times in seconds, memory in bytes."""

    name: str
    kind: str
    """Its class."""
    forward: float
    """F, with a graph for the backward."""
    backward_input: float
    """I, alone."""
    backward_weight: float
    """W, alone."""
    backward: float
    """B: both in one."""
    activation: int
    """Kept from F to B: what it saves for the backward and no layer before it saved."""
    residue: int
    """What stays from I to W."""
    parameters: int
    """Its parameters; tied ones in every layer that has them."""
    tied: int
    """Those of them that a layer before it has too."""
    message: int
    """Its output."""
    arriving: int
    """Its input, as far as it is not in `activation`; a stage that begins here keeps it too."""
    leaving: int
    """Its output, as far as it is not in `activation`; a stage that ends here keeps it too."""
    calls: int
    """How often the model calls it; times and memory are those of all calls."""

    @property
    def seconds(self) -> float:
        """F, I and W together."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Profile:
    """What the layers of a model cost, in the order in which data passes them."""

    layers: tuple[Layer, ...]
    machine: str
    device: str
    torch: str
    """Its version."""
    threads: int
    """Of torch, where the processor computes."""
    repeats: int
    """How many times everything was measured; times are medians."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """F, I and W of each layer together."""
        return tuple(layer.seconds for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(layer.parameters - layer.tied for layer in self.layers)

    def costs(
        self, stages: Sequence[tuple[int, int]], *, transfer: PerPair = 0.0, bandwidth: PerPair | None = None
    ) -> Costs:
        """Costs of stages, each the layers from a start to before a stop; seconds and bytes.

        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> costs = profile_model(model, torch.randn(3, 4), repeats=1).costs([(0, 2), (2, 3)])
        >>> costs.activation, costs.message     # F keeps 3 × 4 and 3 × 8 numbers, then 3 × 8
        ([144.0, 96.0], [96.0, 24.0])
        """
        self._check_stages(stages)
        parts = [self.layers[start:stop] for start, stop in stages]

        def total(name: str) -> list[float]:
            return [float(sum(getattr(layer, name) for layer in part)) for part in parts]

        activation = [
            own
            + part[0].arriving
            + (0 if part is parts[-1] else part[-1].leaving)  # the last output goes into the loss
            for own, part in zip(total("activation"), parts, strict=True)
        ]
        return Costs(
            forward=total("forward"),
            backward_input=total("backward_input"),
            backward_weight=total("backward_weight"),
            backward=total("backward"),
            activation=activation,
            residue=total("residue"),
            message=[float(part[-1].message) for part in parts],
            transfer=transfer,
            bandwidth=bandwidth,
        )

    def _check_stages(self, stages: Sequence[tuple[int, int]]) -> None:
        expected = 0
        for stage, pair in enumerate(stages):
            fine = isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(end, int) for end in pair)
            if not fine or pair[0] != expected or not expected < pair[1] <= len(self.layers):
                raise CostError(
                    f"stage {stage} is {shorten(pair)}; stages are one or more layers each, from a start to before a "
                    f"stop, and this one starts at {expected}, of {len(self.layers)} layers"
                )
            expected = pair[1]
        if expected != len(self.layers):
            raise CostError(f"the stages end at layer {expected}, and the profile has {len(self.layers)} layers")

    def __str__(self) -> str:
        """As a table."""
        head = ("layer", "kind", "F", "I", "W", "B", "activation", "residue", "parameters", "output")
        times = ("forward", "backward_input", "backward_weight", "backward")
        sizes = ("activation", "residue")
        rows = [
            [
                layer.name if layer.calls == 1 else f"{layer.name} ×{layer.calls}",
                layer.kind,
                *(_time(getattr(layer, name)) for name in times),
                *(_bytes(getattr(layer, name)) for name in (*sizes, "parameters", "message")),
            ]
            for layer in self.layers
        ]
        sums = [_time(sum(getattr(layer, name) for layer in self.layers)) for name in times]
        sums += [_bytes(sum(getattr(layer, name) for layer in self.layers)) for name in sizes]
        rows.append(["total", "", *sums, _bytes(self.parameters), ""])
        table = [list(head), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        tied = sum(layer.tied for layer in self.layers)
        notes = (
            [f"tied parameters, {_bytes(tied)}, are in every layer that has them and once in the total"] if tied else []
        )
        where = f"{self.machine}, {self.device}, torch {self.torch}, {self.threads} threads, medians of {self.repeats}"
        return "\n".join([*lines, *notes, where])

    def write(self, path: str | Path) -> None:
        """Write it as JSON; an existing file is replaced only when done.

        >>> profile = profile_model(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), repeats=1)
        >>> profile.write("profile.json")
        >>> read_profile("profile.json") == profile
        True
        """
        target = Path(path)
        if target.suffix.lower() != ".json":
            raise CostError(f"a profile is written as JSON: end the name in .json, not {target.name!r}")
        write_aside(target, self._lines())

    def to_text(self) -> str:
        """The JSON that `write` writes."""
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """A layer on one line."""
        head = {"format": FORMAT, "version": VERSION}
        head |= {name: getattr(self, name) for name in ("machine", "device", "torch", "threads", "repeats")}
        yield "{\n" + "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        yield '  "layers": [\n    ' + ",\n    ".join(json.dumps(asdict(layer)) for layer in self.layers) + "\n  ]\n}\n"


def read_profile(path: str | Path) -> Profile:
    """Read a profile that `Profile.write` wrote.

    >>> profile_model(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), repeats=1).write("profile.json")
    >>> read_profile("profile.json").layers[0].parameters
    80
    """
    source = Path(path)
    return parse_profile(read_text(source, "profile"), str(source))


def parse_profile(text: str, source: str) -> Profile:
    """Read the JSON of a profile; errors name where it came from.

    >>> profile = profile_model(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), repeats=1)
    >>> parse_profile(profile.to_text(), "another rank") == profile
    True
    """
    try:
        data = check_format(parse_json(text), FORMAT, VERSION, "profile")
        layers = [_layer(row, index) for index, row in enumerate(take(data, "layers", list))]
        if not layers:
            raise CostError("'layers' is empty; a profile has one or more")
        words = {name: take(data, name, str) for name in ("machine", "device", "torch")}
        counts = {name: take(data, name, int) for name in ("threads", "repeats")}
        for name, count in counts.items():
            if count < 1:
                raise CostError(f"{name!r} must be 1 or more, got {shorten(count)}")
    except StagelineError as error:
        raise CostError(f"{source}: {error}") from None
    return Profile(layers=tuple(layers), **words, **counts)


def _layer(row: object, index: int) -> Layer:
    if not isinstance(row, Mapping):
        raise CostError(f"layer {index} must be an object, got {shorten(row)}")
    known = [each.name for each in fields(Layer)]
    if set(row) != set(known):
        wrong = sorted(set(map(str, row)) ^ set(known))[0]
        what = "lacks" if wrong in known else "has an unknown"
        raise CostError(f"layer {index} {what} {shorten(wrong)}; a layer has: {', '.join(known)}")
    for each in fields(Layer):
        value = row[each.name]
        if each.type == "str":
            right, expected = isinstance(value, str), "a string"
        else:
            kinds = int if each.type == "int" else int | float
            least = 1 if each.name == "calls" else 0
            right = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= LARGEST_COST
            expected = f"a {'whole ' if each.type == 'int' else ''}number from {least} upwards"
        if not right:
            raise CostError(f"{each.name!r} of layer {index} must be {expected}, got {shorten(value)}")
    values: dict[str, Any] = {name: float(row[name]) if name in _TIMES else row[name] for name in known}
    return Layer(**values)


_TIMES = frozenset(each.name for each in fields(Layer) if each.type == "float")


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    run: Callable[[], Any],
    *,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
) -> Profile:
    """Measure layers, given by name in the order in which data passes them; `run` runs the whole model's forward once.

    The run shows what every layer is called with; then each is run alone with that. Gradients, buffers, random numbers
    and modes are left as they were.

    >>> body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    >>> x = torch.randn(3, 4)
    >>> profile = profile_layers([("body", body), ("head", head)], lambda: head(body(x).relu()), repeats=1)
    >>> [(layer.name, layer.parameters, layer.message) for layer in profile.layers]
    [('body', 160, 96), ('head', 72, 24)]
    """
    layers = _checked(layers)
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise StagelineError(f"{name} must be a whole number from {least} upwards, got {shorten(value)}")
    modules = list(dict.fromkeys(module for _, module in layers))
    with untouched(modules):
        seen = capture(layers, run)
        where = torch.device(device) if device is not None else _device_of(seen)
        timer, own = Timer(where), held(modules)
        work = [[Alone(each, call, timer) for call in each.calls] for each in seen]
        residues = [sum(call.residue(own) for call in calls) for calls in work]
        every = [call for calls in work for call in calls]
        for turn in range(warmup + repeats):
            one_round(every, keep=turn >= warmup)
    found: list[Layer] = []
    known: set[Any] = set()
    for each, calls, residue in zip(seen, work, residues, strict=True):
        weights = storages_of(list(each.module.parameters()))
        found.append(_found(each, calls, residue, weights, known))
        known |= set(weights)
    return Profile(tuple(found), _machine(where), str(where), torch.__version__, torch.get_num_threads(), repeats)


def _found(each: Seen, calls: Sequence[Alone], residue: int, weights: Mapping[Any, int], known: set[Any]) -> Layer:
    def outside(storages: Mapping[Any, int]) -> int:
        return sum(size for key, size in storages.items() if key not in each.saved and key not in weights)

    return Layer(
        name=each.name,
        kind=type(each.module).__name__,
        forward=sum(call.median("F") for call in calls),
        backward_input=sum(call.median("I") for call in calls),
        backward_weight=sum(call.median("W") for call in calls),
        backward=sum(call.median("B") for call in calls),
        activation=sum(each.saved.values()),
        residue=residue,
        parameters=sum(weights.values()),
        tied=sum(size for key, size in weights.items() if key in known),
        message=each.message,
        arriving=outside(each.inputs),
        leaving=outside(each.outputs),
        calls=len(calls),
    )


def profile_model(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Sequence[tuple[str, nn.Module]] | None = None,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
) -> Profile:
    """Measure the layers of a model that is called as `model(*args, **kwargs)`: those given, or an nn.Sequential's own.

    `args` is a tuple, or the only argument.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    >>> profile = profile_model(model, torch.tensor([[1, 2, 3]]), repeats=1)
    >>> [layer.kind for layer in profile.layers], profile.parameters
    (['Embedding', 'Linear'], 360)
    """
    if layers is None:
        if not isinstance(model, nn.Sequential):
            raise StagelineError(
                f"the layers of a {type(model).__name__} are not known; give layers=[(name, module), …] in the order "
                "in which data passes them"
            )
        layers = layers_of(model)
    given = args if isinstance(args, tuple) else (args,)
    return profile_layers(
        layers, lambda: model(*given, **(kwargs or {})), repeats=repeats, warmup=warmup, device=device
    )


def _checked(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Refuse what are no layers, and layers that would be counted twice."""
    pairs = list(layers)
    for pair in pairs:
        fine = isinstance(pair, tuple) and len(pair) == 2
        if not fine or not isinstance(pair[0], str) or not isinstance(pair[1], nn.Module):
            raise StagelineError(f"layers are pairs of a name and a module, got {shorten(pair)}")
    if not pairs:
        raise StagelineError("layers is empty; give one or more pairs of a name and a module")
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise StagelineError(f"two layers are named {twice[0]!r}; give each a name of its own")
    by_module = {module: name for name, module in pairs}
    for name, module in pairs:
        for inner in module.modules():
            if inner is not module and inner in by_module:
                raise StagelineError(f"layer {by_module[inner]!r} lies within layer {name!r}; list one of them")
    return pairs


def _device_of(seen: Sequence[Seen]) -> torch.device:
    """Where the layers compute: a GPU if any is there."""
    tensors: list[Tensor] = [tensor for each in seen for tensor in each.module.parameters()]
    tensors += [leaf for each in seen for call in each.calls for leaf in call.leaves if isinstance(leaf, Tensor)]
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()}, {os.cpu_count()} processors"


def _time(seconds: float) -> str:
    """In units a person reads.

    >>> _time(0.00123), _time(2.5), _time(0.0)
    ('1.23 ms', '2.5 s', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0"


def _bytes(size: int) -> str:
    """In units a person reads.

    >>> _bytes(1536), _bytes(0), _bytes(3 * 2**30)
    ('1.5 KiB', '0', '3 GiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size} B" if size else "0"

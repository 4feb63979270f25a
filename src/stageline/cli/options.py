"""The options that several verbs share: which schedule, at which costs."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from stageline.common.errors import CostError, ScheduleError, shorten
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import find_family, schedule
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs

SIZES, COSTS = "Which schedule", "Costs"


def _option(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class Sizes:
    """The options that say how large a schedule of a family is."""

    ranks: Annotated[int | None, _option("-p", "--ranks", help="How many ranks.", panel=SIZES)] = None
    microbatches: Annotated[int | None, _option("-m", "--microbatches", help="How many microbatches.", panel=SIZES)] = (
        None
    )
    chunks: Annotated[int | None, _option("--chunks", help="Stages that a rank holds.", panel=SIZES)] = None
    group: Annotated[int | None, _option("--group", help="Microbatches in a group (interleaved).", panel=SIZES)] = None
    waves: Annotated[int | None, _option("--waves", help="Waves (hanayo).", panel=SIZES)] = None
    option: Annotated[
        list[str] | None,
        _option("--option", metavar="KEY=VALUE", help="Any other option of the family; repeat it.", panel=SIZES),
    ] = None
    load: Annotated[
        list[str] | None,
        _option("--load", metavar="FILE.py", help="Load a file or module with families of your own.", panel=SIZES),
    ] = None

    def load_families(self) -> None:
        """Import the user's own families."""
        for name in self.load or []:
            load_families(name)

    def of_family(self) -> dict[str, Any]:
        """The options for the family itself."""
        given = {"chunks": self.chunks, "group": self.group, "waves": self.waves}
        return {key: value for key, value in given.items() if value is not None} | _pairs(self.option or [])

    def make(self, name: str) -> Schedule:
        """Make a schedule of a family, or read it from a file."""
        self.load_families()
        if Path(name).suffix.lower() in (".json", ".csv"):
            if self.ranks is not None or self.microbatches is not None or self.of_family():
                raise ScheduleError(f"{name} is a file and says its own sizes: leave out -p, -m and the like")
            return read_schedule(name)
        found = find_family(name)
        if self.ranks is None or self.microbatches is None:
            missing = "-p RANKS" if self.ranks is None else "-m MICROBATCHES"
            raise ScheduleError(f"{found.name} needs {missing}, like: stageline show {found.name} -p 4 -m 8")
        return schedule(name, self.ranks, self.microbatches, **self.of_family())


def _cost(*names: str, help: str, metavar: str = "TIME[,…]") -> Any:
    return _option(*names, help=help, panel=COSTS, metavar=metavar)


@dataclass(frozen=True)
class Prices:
    """The options that say what actions cost; one number, or one per stage with commas between."""

    forward: Annotated[str | None, _cost("--forward", help="Time of F, or one per stage. Default 1.")] = None
    backward_input: Annotated[str | None, _cost("--backward-input", help="Time of I. Default 1.")] = None
    backward_weight: Annotated[str | None, _cost("--backward-weight", help="Time of W. Default 1.")] = None
    backward: Annotated[str | None, _cost("--backward", help="Time of B. Default: I + W.")] = None
    overlap: Annotated[str | None, _cost("--overlap", help="Time of an overlapped pair. Default: F + B.")] = None
    transfer: Annotated[
        str | None, _cost("--transfer", help="Time of a message between two ranks. Default 0.", metavar="TIME")
    ] = None
    activation: Annotated[
        str | None, _cost("--activation", help="Memory from F to B or I. Default 1.", metavar="SIZE[,…]")
    ] = None
    residue: Annotated[str | None, _cost("--residue", help="Memory from I to W. Default 1.", metavar="SIZE[,…]")] = None
    transient: Annotated[
        str | None, _cost("--transient", help="Memory of an action while it runs. Default 0.", metavar="SIZE[,…]")
    ] = None
    scale: Annotated[
        str | None, _cost("--scale", help="A factor per microbatch, for different lengths.", metavar="X,X…")
    ] = None
    costs: Annotated[
        Path | None,
        _option("--costs", metavar="FILE.json", help="Costs from a file; the options above win.", panel=COSTS),
    ] = None

    def make(self, default: Costs | None = None) -> Costs:
        """Put the costs together; what neither an option nor a file says is as the default has it."""
        base = {} if default is None else default.to_json()
        if self.costs:
            base = Costs.read(self.costs).to_json()
        for field in fields(self):
            text = getattr(self, field.name)
            if field.name != "costs" and text is not None:
                base[field.name] = _numbers(field.name, text)
        if isinstance(base.get("scale"), float):
            base["scale"] = [base["scale"]]
        return Costs.from_json(base)


def _numbers(name: str, text: str) -> float | list[float]:
    flag = "--" + name.replace("_", "-")
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise CostError(f"{flag} takes a number, or one per stage like 10,10,12; got {shorten(text)}") from None
    return values[0] if len(values) == 1 else values


def _pairs(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ScheduleError(f"--option takes KEY=VALUE, got {shorten(pair)}")
        if key in ("name", "ranks", "microbatches"):
            raise ScheduleError(f"--option {key} is given otherwise: the schedule's name first, then -p and -m")
        found[key] = int(value) if re.fullmatch("-?[0-9]+", value) else value
    return found


def load_families(name: str) -> None:
    """Import a file or module that declares families."""
    path = Path(name)
    try:
        if path.suffix == ".py":
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise ImportError("not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            import_module(name)
    except ScheduleError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file raises is told in one line
        raise ScheduleError(f"cannot load families from {name}: {type(error).__name__}: {error}") from error


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a verb take groups of options: each parameter named here becomes all the options of its class."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(verb).parameters.values()
            if parameter.name not in groups
        ]
        parameters = [parameter for parameter in own if parameter.default is inspect.Parameter.empty]
        for group in groups.values():
            types = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
                )
                for field in fields(group)
            ]
        parameters += [parameter for parameter in own if parameter.default is not inspect.Parameter.empty]

        @wraps(verb)
        def call(**given: Any) -> None:
            made = {
                name: group(**{field.name: given.pop(field.name) for field in fields(group)})
                for name, group in groups.items()
            }
            verb(**given, **made)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


Target = Annotated[
    str,
    typer.Argument(metavar="SCHEDULE", help="A family (see `stageline families`), or a .json or .csv file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it as SVG.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Draw it as a page with hover and zoom.")]
Width = Annotated[int | None, typer.Option("--width", help="Columns. Default: the terminal's.", min=30, max=2000)]

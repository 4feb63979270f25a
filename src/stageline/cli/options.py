"""Options that several verbs share: which schedule, at which costs, and where the output goes."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

from stageline.cli.output import save
from stageline.common.errors import CostError, ScheduleError, shorten
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import families, find_family, schedule
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import check_option, lower_sharding
from stageline.timeline import draw
from stageline.timeline.costs import Costs
from stageline.timeline.timeline import Timeline

# Options by the panel of the help that lists them.
_size = partial(Option, rich_help_panel="Schedule")
_cost = partial(Option, rich_help_panel="Costs", metavar="TIME[,…]")
output_option = partial(Option, rich_help_panel="Output")


def complete_families(incomplete: str) -> list[str]:
    """Return the schedule families whose names begin so, for the completion of a shell.

    >>> complete_families("zb-")
    ['zb-h1', 'zb-h2', 'zb-v']
    """
    return [name for name in families() if name.startswith(incomplete)]


def complete_family_list(incomplete: str) -> list[str]:
    """Complete the last of several families that are separated by commas, with those that are not in the list yet.

    >>> complete_family_list("zb-h1,zb-")
    ['zb-h1,zb-h2', 'zb-h1,zb-v']
    """
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in complete_families(last) if name not in before.split(",")]


ScheduleName = Annotated[
    str,
    Argument(
        metavar="SCHEDULE",
        help="A family (see stageline families), or a .json or .csv file.",
        show_default=False,
        autocompletion=complete_families,
    ),
]
Json = Annotated[bool, output_option("--json", help="Print JSON.")]
Load = Annotated[list[str] | None, _size(metavar="FILE.py", help="Import a file or module that declares families.")]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options for the size of a schedule."""

    ranks: Annotated[int | None, _size("-p", "--ranks", help="Number of ranks.")] = None
    microbatches: Annotated[int | None, _size("-m", "--microbatches", help="Number of microbatches.")] = None
    chunks: Annotated[int | None, _size(help="Stages per rank.")] = None
    group: Annotated[int | None, _size(help="Microbatches per group (interleaved).")] = None
    waves: Annotated[int | None, _size(help="Number of waves (hanayo).")] = None
    option: Annotated[
        list[str] | None, _size(metavar="KEY=VALUE", help="Another option of the family; repeatable.")
    ] = None
    shard: Annotated[
        str | None,
        _size(
            metavar="WHEN", help="Shard all stages (FSDP2). When to free gathered parameters: default, always or never."
        ),
    ] = None
    load: Load = None

    def family_options(self) -> dict[str, Any]:
        """Return the options of the family itself."""
        named = {"chunks": self.chunks, "group": self.group, "waves": self.waves}
        return {key: value for key, value in named.items() if value is not None} | _key_values(self.option or [])

    def make(self, name: str) -> Schedule:
        """Create a schedule of a family, or read it from a file; add its shard actions."""
        plain = self._make(name)
        if self.shard is None:
            return plain
        return lower_sharding(plain, reshard_after_forward=check_option("--shard", self.shard))

    def _make(self, name: str) -> Schedule:
        load_families(self.load)
        if Path(name).suffix.lower() in (".json", ".csv"):
            if self.ranks is not None or self.microbatches is not None or self.family_options():
                raise ScheduleError(
                    f"{name} is a schedule file, which defines its own sizes; leave out -p, -m and family options"
                )
            return read_schedule(name)
        family = find_family(name)
        if self.ranks is None or self.microbatches is None:
            missing = "-p RANKS" if self.ranks is None else "-m MICROBATCHES"
            raise ScheduleError(f"{family.name} needs {missing}, for example stageline show {family.name} -p 4 -m 8")
        return schedule(name, self.ranks, self.microbatches, **self.family_options())


@dataclass(frozen=True)
class CostOptions:
    """Options for the costs of actions: one number, or one per stage separated by commas."""

    forward: Annotated[str | None, _cost(help="Time of F, a forward. Default: 1.")] = None
    backward_input: Annotated[str | None, _cost(help="Time of I, the gradient of the input. Default: 1.")] = None
    backward_weight: Annotated[str | None, _cost(help="Time of W, the gradient of the weights. Default: 1.")] = None
    backward: Annotated[str | None, _cost(help="Time of B, a whole backward. Default: I + W.")] = None
    overlap: Annotated[str | None, _cost(help="Time of an overlapped pair. Default: F + B.")] = None
    transfer: Annotated[str | None, _cost(help="Time of a message between ranks. Default: 0.", metavar="TIME")] = None
    activation: Annotated[
        str | None, _cost(help="Memory of activations, from F to B or I. Default: 1.", metavar="SIZE[,…]")
    ] = None
    residue: Annotated[str | None, _cost(help="Saved-for-W memory, from I to W. Default: 1.", metavar="SIZE[,…]")] = (
        None
    )
    transient: Annotated[
        str | None, _cost(help="Memory of an action while it runs. Default: 0.", metavar="SIZE[,…]")
    ] = None
    gather: Annotated[str | None, _cost(help="Time to gather the parameters of a sharded stage. Default: 0.")] = None
    reduce: Annotated[str | None, _cost(help="Time to reduce the gradients of a sharded stage. Default: 0.")] = None
    gathered: Annotated[
        str | None, _cost(help="Memory of the gathered parameters of a stage. Default: 0.", metavar="SIZE[,…]")
    ] = None
    unreduced: Annotated[
        str | None, _cost(help="Memory of a stage's gradients until they are reduced. Default: 0.", metavar="SIZE[,…]")
    ] = None
    scale: Annotated[str | None, _cost(help="Multipliers of the costs, one per microbatch.", metavar="X,…")] = None
    costs: Annotated[
        Path | None, _cost(metavar="FILE.json", help="Read costs from a file; the options above override it.")
    ] = None

    def make(self, default: Costs | None = None) -> Costs:
        """Return the costs: of the options, then of the file or `default`."""
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


@dataclass(frozen=True)
class DrawingOptions:
    """Options of verbs that draw timelines."""

    svg: Annotated[Path | None, output_option(metavar="FILE", help="Write an SVG drawing.")] = None
    html: Annotated[Path | None, output_option(metavar="FILE", help="Write an HTML page with hover and zoom.")] = None
    width: Annotated[
        int | None,
        output_option(metavar="COLUMNS", help="Width of the chart. Default: the terminal's.", min=30, max=2000),
    ] = None
    json: Json = False

    def save(self, timelines: Timeline | Sequence[Timeline], *title: str, names: Sequence[str] | None = None) -> None:
        """Write the drawing and the page, if they were requested."""
        save(self.svg, lambda: draw.svg(timelines, names=names), "the drawing")
        save(self.html, lambda: draw.html(timelines, *title, names=names), "the page")


def _numbers(name: str, text: str) -> float | list[float]:
    flag = "--" + name.replace("_", "-")
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise CostError(f"{flag} takes a number, or one per stage like 10,10,12; got {shorten(text)}") from None
    return values[0] if len(values) == 1 else values


def _key_values(pairs: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ScheduleError(f"--option takes KEY=VALUE, got {shorten(pair)}")
        if key in ("name", "ranks", "microbatches"):
            raise ScheduleError(
                f"--option cannot set {key}; pass the schedule's name as the argument, and its sizes as -p and -m"
            )
        values[key] = int(value) if re.fullmatch("-?[0-9]+", value) else value
    return values


def load_families(names: list[str] | None) -> None:
    """Import the files or modules that declare families."""
    for name in names or []:
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
        except (Exception, SystemExit) as error:  # whatever a user's file raises is reported in one line
            is_missing = isinstance(error, FileNotFoundError) and error.filename == str(Path(name).resolve())
            cause = "no such file" if is_missing else f"{type(error).__name__}: {error}"
            raise ScheduleError(f"cannot load families from {name}: {cause}") from error


def expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a group of options by its options, which typer does not do by itself."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        if group := groups.get(parameter.name):
            types, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
            parameters += [
                inspect.Parameter(field.name, kind, default=field.default, annotation=types[field.name])
                for field in fields(group)
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(verb)
    def call(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        verb(**arguments)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call

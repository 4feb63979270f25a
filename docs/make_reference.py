"""The reference of the website, as Markdown: the public names from their docstrings, and the command from its options.

`python docs/make_reference.py FOLDER` writes the pages; `make docs` builds them into the website.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

import stageline
from stageline.cli.app import make_app

SOURCE = Path(__file__).parent.parent / "src/stageline"
WIDTH = 100
TOPICS = {
    "Schedules": ("schedules",),
    "Timelines and costs": ("timeline",),
    "Synthesis and plans": ("synthesis", "planning"),
    "Models": ("model",),
    "Pipelines and ranks": ("runtime", "distributed"),
    "Training jobs": ("train",),
    "Errors": ("common",),
}
"""The pages of the public names, and the packages that each has."""


def pages() -> dict[str, str]:
    """Every page by its path in the website."""
    topics = {f"reference/{file_name(title)}.md": topic_page(title, packages) for title, packages in TOPICS.items()}
    return topics | {"reference/cli.md": command_page()}


def file_name(title: str) -> str:
    """A title as a file name."""
    return title.lower().replace(" ", "-")


# Public names


def topic_page(title: str, packages: tuple[str, ...]) -> str:
    """The public names of some packages, each with its signature and its docstring."""
    parts = [f"# {title}\n\nPublic names of `stageline`, imported as `sl`. Written from the docstrings."]
    for module, names in stageline._MODULES.items():
        if module.split(".")[0] in packages:
            path = SOURCE / f"{module.replace('.', '/')}.py"
            scope = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text("utf-8")).body
            parts += [entry(name, scope) for name in names.split()]
    return "\n\n".join(parts) + "\n"


def entry(name: str, scope: list[ast.stmt]) -> str:
    """The section of a public name."""
    for node in scope:
        match node:
            case ast.FunctionDef() if node.name == name and not is_overload(node):
                return f"## {name}\n\n{fenced(f'sl.{name}', node)}\n\n{prose(node)}"
            case ast.ClassDef() if node.name == name:
                return "\n\n".join([f"## {name}", *class_parts(node)])
    raise LookupError(f"{name} is neither a function nor a class")


def is_overload(node: ast.FunctionDef) -> bool:
    """Whether a function only declares types."""
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def class_parts(node: ast.ClassDef) -> Iterator[str]:
    """A class: how it is created, its docstring, its fields, and its methods."""
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    if "__init__" in methods:
        yield fenced(f"sl.{node.name}", methods["__init__"])
    yield prose(node)
    fields = list(fields_of(node))
    if fields:
        yield "| field | type | |\n| --- | --- | --- |\n" + "\n".join(fields)
    for name, method in methods.items():
        if not name.startswith("_") and ast.get_docstring(method) and not is_overload(method):
            yield f"### {node.name}.{name}\n\n{fenced(f'{node.name}.{name}', method)}\n\n{prose(method)}"


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """The public fields of a dataclass as rows of a table, with the docstrings that follow them."""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            text = ast.unparse(field.annotation).replace("|", "\\|")
            about = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                about = " ".join(str(after.value.value).split())
            yield f"| `{ast.unparse(field.target)}` | `{text}` | {about} |"


def fenced(name: str, function: ast.FunctionDef) -> str:
    """The signature of a function as code: in one line, or with one parameter per line."""
    arguments = ast.unparse(function.args)
    parameters = [part for part in split_top(arguments) if part not in ("self", "cls")]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    is_property = any("property" in ast.unparse(decorator) for decorator in function.decorator_list)
    line = f"{name}{returns}" if is_property else f"{name}({', '.join(parameters)}){returns}"
    if len(line) > WIDTH and parameters:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){returns}"
    return f"```python\n{line}\n```"


def split_top(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def prose(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: examples become code."""
    lines: list[str] = []
    in_example = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if line.startswith(">>> ") and not in_example:
            in_example = True
            lines += ["", "```pycon"]
        elif in_example and not line:
            in_example = False
            lines.append("```")
        lines.append(line)
    return "\n".join([*lines, "```"] if in_example else lines)


# The command


def command_page() -> str:
    """Every verb of the command: what it does, its usage and its options."""
    command: Any = typer.main.get_command(make_app())
    parts = ["# Command line", "Written from the command itself; `stageline VERB --help` prints the same."]
    for name, verb in command.commands.items():
        inner = getattr(verb, "commands", None)
        parts += [verb_part(f"{name} {part}", inner[part]) for part in inner] if inner else [verb_part(name, verb)]
    return "\n\n".join(parts) + "\n"


def verb_part(name: str, verb: Any) -> str:
    """The section of a verb."""
    text, _, examples = (verb.help or "").partition("\n\nExamples:\n")
    rows = [option_row(option) for option in verb.params if not getattr(option, "hidden", False)]
    parts = [f"## stageline {name}", text]
    if examples.strip():
        parts.append(f"```console\n{examples.strip()}\n```")
    if rows:
        parts.append("| argument or option | |\n| --- | --- |\n" + "\n".join(rows))
    if name == "train":
        parts.append("Every option of a [config](../config.md#all-options) is a flag, too.")
    return "\n\n".join(parts)


def option_row(option: Any) -> str:
    """An argument or option as a row of a table: its names, its values and its help."""
    is_option = option.param_type_name == "option"
    names = [f"`{flag}`" for flag in [*option.opts, *option.secondary_opts]] if is_option else []
    value = option.metavar
    shown = " ".join([", ".join(names), f"`{value}`" if value else ""]).strip()
    text = re.sub(r"\[/?\w+\]", "", option.help or "")
    default = option.default
    has_default = default not in (None, False, "", ()) and not callable(default) and option.show_default
    return f"| {shown} | {text}{f' Default: {default}.' if has_default else ''} |".replace("…|", "… |")


if __name__ == "__main__":
    for page_name, page in pages().items():
        path = Path(sys.argv[1]) / page_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")

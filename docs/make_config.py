"""Write the tables of options into docs/config.md, from the dataclasses: python docs/make_config.py."""

from __future__ import annotations

from pathlib import Path

from stageline.train.config.io import Option, options, sections, toml_value

PAGE = Path(__file__).parent / "config.md"
START, END = "<!-- options: written by docs/make_config.py -->", "<!-- end of options -->"
RESUME = {"same": "**same**", "warning": "warning", "free": ""}


def tables() -> str:
    """A heading and a table for every section."""
    return "\n".join(_section(section, (holder.__doc__ or "").strip()) for section, holder in sections().items())


def _section(section: str, sentence: str) -> str:
    head = f"### {section}\n\n{sentence}\n\n| option | value | default | resume | |\n| --- | --- | --- | --- | --- |\n"
    return head + "".join(_row(option) for option in options().values() if option.section == section)


def _row(option: Option) -> str:
    cells = (
        f"`{option.name}`",
        ", ".join(f"`{choice}`" for choice in option.choices) or option.expected,
        f"`{toml_value(option.default)}`",
        RESUME[option.resume],
        option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("*.", "\\*.") for cell in cells) + " |\n"


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

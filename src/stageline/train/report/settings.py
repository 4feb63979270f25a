"""The configuration as it was written, with what differs from the defaults marked, and the environment."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import escape
from typing import Any

from stageline.train.config import Config
from stageline.train.report.run import Run

LONGEST = 2000


def changed(settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """The settings that are not the default, by section and name, with what the default is.

    >>> changed({"training": {"steps": 200, "seed": 7}, "activation_checkpoint": {"modules": []}})
    {('training', 'seed'): 0}
    """
    found = {}
    for section, defaults in asdict(Config()).items():
        for name, default in defaults.items():
            usual = list(default) if isinstance(default, tuple) else default
            if settings.get(section, {}).get(name, usual) != usual:
                found[section, name] = default
    return found


def configuration(run: Run) -> str:
    """The text of the configuration, line by line."""
    if not run.config:
        return '<p class="soft">There is no config.toml.</p>'
    differs = changed(run.settings)
    section, lines = "", []
    for line in run.config.splitlines():
        head = re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(#.*)?", line)
        section = head[1] if head else section
        name = re.match(r"\s*([\w-]+)\s*=", line)
        shown = escape(line)
        if name and (section, name[1]) in differs:
            default = differs[section, name[1]]
            words = json.dumps(default)
            shown = f'<mark title="{escape(f"default: {words}")}">{shown}</mark>'
        lines.append(shown)
    settings = "setting differs" if len(differs) == 1 else "settings differ"
    summary = f"config.toml: {len(differs) or 'no'} {settings} from the defaults"
    short = ", ".join(f"{section}.{name}" for section, name in differs)
    opened = f'<p class="soft">{escape(short)}</p>' if short else ""
    return f"{opened}<details><summary>{summary}</summary><pre>{chr(10).join(lines)}</pre></details>"


def environment(run: Run) -> str:
    """What it ran on and with."""
    if not run.environment:
        return '<p class="soft">There is no environment.json.</p>'
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name)[:LONGEST])}</th><td>{escape(_value(value))}</td></tr>'
        for name, value in run.environment.items()
    )
    return f'<table class="pairs">{rows}</table>'


def _value(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}" if abs(value) < 10**300 else "a very large number"
    else:
        text = ", ".join(map(_value, value)) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"

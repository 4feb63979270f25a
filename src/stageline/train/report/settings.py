"""The configuration as written, with non-default settings marked, and the environment."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import escape
from typing import Any

from stageline.train.config.config import Config
from stageline.train.report.run import Run

MAX_LENGTH = 2000


def non_defaults(settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return the settings that differ from the default, by section and name, with their default.

    >>> non_defaults({"training": {"steps": 200, "seed": 7}, "activation_checkpoint": {"modules": []}})
    {('training', 'seed'): 0}
    """
    differences = {}
    for section, defaults in asdict(Config()).items():
        for name, default in defaults.items():
            normalised = list(default) if isinstance(default, tuple) else default
            if settings.get(section, {}).get(name, normalised) != normalised:
                differences[section, name] = default
    return differences


def configuration(run: Run) -> str:
    """Return the text of the configuration, with non-default lines marked."""
    if not run.config:
        return '<p class="soft">There is no config.toml.</p>'
    differences = non_defaults(run.settings)
    section, lines = "", []
    for line in run.config.splitlines():
        section_match = re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(#.*)?", line)
        section = section_match[1] if section_match else section
        name = re.match(r"\s*([\w-]+)\s*=", line)
        markup = escape(line)
        if name and (section, name[1]) in differences:
            default = differences[section, name[1]]
            default_text = json.dumps(default)
            markup = f'<mark title="{escape(f"default: {default_text}")}">{markup}</mark>'
        lines.append(markup)
    verb = "setting differs" if len(differences) == 1 else "settings differ"
    summary = f"config.toml: {len(differences) or 'no'} {verb} from the defaults"
    names = ", ".join(f"{section}.{name}" for section, name in differences)
    overview = f'<p class="soft">{escape(names)}</p>' if names else ""
    return f"{overview}<details><summary>{summary}</summary><pre>{chr(10).join(lines)}</pre></details>"


def environment(run: Run) -> str:
    """Return a table of the environment."""
    if not run.environment:
        return '<p class="soft">There is no environment.json.</p>'
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name)[:MAX_LENGTH])}</th><td>{escape(_value(value))}</td></tr>'
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
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"

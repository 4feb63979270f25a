"""The page of a self-test: one file, without scripts or links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: .5rem 0 } th, td { padding: .2rem .7rem; text-align: left }
td, th { border-bottom: 1px solid #d8dee4 } td.number { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b42318 } .good { color: #1a7f37 } h2 { margin-top: 2rem }
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the page of a result's JSON data.

    >>> "All checks passed" in page({"ok": True, "launcher": "processes", "started": "", "seconds": 1.0, "ranks": [],
    ...     "families": [], "pairs": [], "kill": None, "problems": []})
    True
    """
    ranks = result["ranks"]
    hosts = len({rank["host"] for rank in ranks})
    title = f"Stageline self-test: {len(ranks)} ranks on {hosts} host{'s' if hosts != 1 else ''}"
    verdict = (
        '<p class="good">All checks passed.</p>'
        if result["ok"]
        else f'<p class="bad">Failed:</p><ul>{"".join(f"<li>{escape(text)}</li>" for text in result["problems"])}</ul>'
    )
    how = f"Started by {result['launcher']} at {result['started']}, {result['seconds']:.1f} s"
    sections = [
        f"<h1>{escape(title)}</h1><p>{escape(how)}</p>{verdict}",
        _section("Bits", ("family", "verdict", "", "seconds"), map(_family, result["families"])),
        _section("Links", ("ranks", "latency, µs", "GB/s"), map(_pair, result["pairs"])),
        _kill(result["kill"]),
        _section("Ranks", ("rank", "host", "versions", "GPUs", "cores", "variables"), map(_rank, ranks)),
    ]
    head = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return head + "\n".join(filter(None, sections)) + "\n"


def _section(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:,.3g}</td>'
    return f"<td>{escape(str(value))}</td>"


def _family(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["name"], row["verdict"], row["text"], float(row["seconds"])


def _pair(row: Mapping[str, Any]) -> tuple[object, ...]:
    return f"{row['first']} – {row['second']}", float(row["latency_us"]), float(row["gbytes_per_s"])


def _kill(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    errors = [(rank, text or "was killed") for rank, text in enumerate(row["errors"])]
    title = f"Kill test, rank {row['killed']}: the others raised within {row['seconds']:.2f} s"
    return _section(title, ("rank", "error"), errors)


def _rank(row: Mapping[str, Any]) -> tuple[object, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    variables = ", ".join(f"{name}={value}" for name, value in row["variables"].items())
    return row["rank"], f"{row['host']}, {row['system']}", versions, ", ".join(row["gpus"]), row["cores"], variables

"""Drawings of timelines: terminal, SVG, HTML page, Perfetto trace.

Read in order: `palette` (colours and labels that all renderers share), `terminal`, `svg`, `page`, `trace`, and
`tradeoff` (memory against time). Renderers read a `Timeline` or plain points; nothing here computes times.
"""

from stageline.timeline.draw.page import html
from stageline.timeline.draw.svg import svg
from stageline.timeline.draw.terminal import text
from stageline.timeline.draw.trace import trace

__all__ = ["html", "svg", "text", "trace"]

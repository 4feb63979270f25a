"""Drawings of timelines: terminal, SVG, HTML page, Perfetto trace.

All renderers share the colours of `palette`. They read a `Timeline` and compute nothing of their own.
"""

from stageline.timeline.draw.page import html
from stageline.timeline.draw.svg import svg
from stageline.timeline.draw.terminal import text
from stageline.timeline.draw.trace import trace

__all__ = ["html", "svg", "text", "trace"]

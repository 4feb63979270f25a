"""Render timelines: as text, as SVG, as a page with hover and zoom, and as a Chrome/Perfetto trace."""

from stageline.timeline.draw.page import html
from stageline.timeline.draw.svg import svg
from stageline.timeline.draw.terminal import text
from stageline.timeline.draw.trace import trace

__all__ = ["html", "svg", "text", "trace"]

"""The studio in Chromium: time from moving a slider to the painted frame, with charts of 10,000 actions.

python benchmarks/studio.py [--drags 50]

Needs playwright and Chromium (make install and make chromium). The mouse drags the slider of F; every time is from
the browser's input event to the frame that shows the new charts, including the simulation on the server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.studios import chromium, studio

CASES = {
    "one chart, 9,984 actions (1f1b, 16 ranks, 312 microbatches)": "ranks=16&microbatches=312&a=1f1b&b=none",
    "two charts, 9,728 actions each (1f1b and eager-1f1b, 16 ranks)": "ranks=16&microbatches=304&a=1f1b&b=eager-1f1b",
    "one chart, 9,984 actions with the critical path (zb-h1)": "ranks=16&microbatches=208&a=zb-h1&b=none&critical=yes",
}
GOAL = 100.0
WATCH = """
window.times = []; window.changed = 0; window.pending = null;
document.addEventListener("input", event => { window.pending ??= event.timeStamp; }, true);
document.addEventListener("drawn", () => {
  if (window.pending === null) return;
  const began = window.pending, channel = new MessageChannel();
  window.pending = null;
  // A message that is posted inside the frame arrives after the frame is painted.
  channel.port1.onmessage = () => window.times.push(performance.now() - began);
  channel.port2.postMessage(0);
});
"""
PAINTED = """before => new Promise((resolve, reject) => {
  const began = performance.now();
  (function look() {
    if (window.times.length > before) resolve();
    else if (performance.now() - began > 10000) reject(new Error("no frame within 10 s"));
    else setTimeout(look, 2);
  })();
})"""


def drag(page: Any, drags: int) -> list[float]:
    """Move the slider back and forth; wait for the frame after every move."""
    box = page.locator("#control-f").bounding_box()
    middle, height = box["x"] + box["width"] / 4, box["y"] + box["height"] / 2
    page.evaluate(WATCH)
    page.mouse.move(middle, height)
    page.mouse.down()
    for index in range(drags):
        before = page.evaluate("window.times.length")
        page.mouse.move(middle + 8 + (index * 7) % 60, height)
        page.evaluate(PAINTED, before)
    page.mouse.up()
    return [float(time) for time in page.evaluate("window.times")][:drags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drags", type=int, default=50)
    drags = parser.parse_args().drags
    with studio() as running, chromium() as browser:
        for name, state in CASES.items():
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{running.address}#schedules?{state}")
            page.wait_for_selector("canvas.gantt")
            times = sorted(drag(page, drags))
            median, late = statistics.median(times), times[int(0.95 * (len(times) - 1))]
            verdict = "within" if median <= GOAL else "above"
            print(f"{name}: median {median:.1f} ms, 95% {late:.1f} ms, {verdict} the goal of {GOAL:.0f} ms")
            page.close()


if __name__ == "__main__":
    main()

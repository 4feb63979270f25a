"""The pages of the studio in a real browser; skipped by name where playwright or Chromium is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stageline as sl
from stageline.timeline import draw
from stageline.train.events import MetricsFile
from stageline.train.report import make_comparison
from support.profiles import even
from support.studios import RunningStudio, chromium, studio

pytest.importorskip("starlette", reason="the extra studio is not installed")
pytest.importorskip("uvicorn", reason="the extra studio is not installed")

WIDE: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Visitor(NamedTuple):
    """A browser, the studio that it visits, and the run that the studio follows."""

    browser: Any
    studio: RunningStudio
    run: Path

    def open(self, state: str, **options: Any) -> Any:
        """Open a page of the studio; anything on its console, and any request to elsewhere, fails the test."""
        page = self.browser.new_context(**options).new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: pytest.fail(f"console: {message.text}"))
        page.on("pageerror", lambda error: pytest.fail(f"error of the page: {error}"))
        page.on("request", lambda request: self._check(request.url))
        page.goto(f"{self.studio.address}#{state}")
        return page

    def _check(self, url: str) -> None:
        assert url.startswith((self.studio.address, "blob:" + self.studio.address.rsplit("/", 2)[0])), url


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    run = tmp_path_factory.mktemp("run")
    with MetricsFile(run / "metrics.jsonl") as file:
        for step in range(1, 4):
            file.write({"event": "step", "step": step, "loss": 3.0 / step, "tokens_per_s": 1e4, "time": float(step)})
    with chromium() as browser, studio(run) as running:
        yield Visitor(browser, running, run)


def figure(page: Any, panel: str, name: str) -> Any:
    """The value of a figure of a panel."""
    return page.get_by_label(f"{panel} schedule").locator(f'.figures div:has(dt:text-is("{name}")) dd')


def text(locator: Any) -> str:
    return str(locator.inner_text()).strip()


def wait_until(page: Any, locator: Any, pattern: str) -> None:
    """Wait until the text of an element matches."""
    locator.filter(has_text=re.compile(pattern)).first.wait_for()
    assert re.search(pattern, text(locator))


def has_no_sideways_scroll(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_charts_follow_the_sliders_and_the_address_follows_the_charts(visitor: Visitor) -> None:
    page = visitor.open("schedules?a=1f1b&b=gpipe", **WIDE)
    wait_until(page, figure(page, "First", "Makespan"), r"^33\s*$")
    box = page.locator("#control-f").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 12)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12, steps=4)
    page.mouse.up()
    forward = float(page.locator("#control-f").input_value())
    page.wait_for_url(re.compile(rf"forward={forward:g}(&|$)"))
    assert 1.5 < forward < 2.5
    wait_until(page, figure(page, "First", "Makespan"), rf"^{11 * (forward + 2):g}\s*$")
    other = visitor.open(page.url.partition("#")[2], **WIDE)  # the address is the view
    wait_until(other, figure(other, "First", "Makespan"), rf"^{11 * (forward + 2):g}\s*$")
    page.get_by_label("Transfer", exact=True).focus()  # and by keyboard
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("transfer=0.05"))
    page.get_by_text("time and memory of each rank").first.click()
    page.get_by_role("columnheader", name="drain").wait_for()
    page.get_by_label("Cap", exact=True).fill("3")
    wait_until(page, figure(page, "First", "Peak memory"), "^4 above cap$")


def test_an_action_says_what_it_waits_for(visitor: Visitor) -> None:
    page = visitor.open("schedules?a=1f1b&b=none", **WIDE)
    chart = page.locator("canvas.gantt")
    chart.focus()
    for key in ("ArrowDown", "ArrowRight"):  # rank 1, second action
        page.keyboard.press(key)
    waits = page.locator(".waits")
    wait_until(page, waits, r"F of stage 1, microbatch 1[\s\S]*its input from F1 of stage 0 on rank 0, finished at 2")
    box = chart.bounding_box()
    chart.click(position={"x": 62 + (box["width"] - 68) * 11.5 / 33, "y": 8})  # B0 on rank 0 runs from 10 to 12
    wait_until(page, waits, r"B of stage 0, microbatch 0[\s\S]*its gradient from B0 of stage 1")


def test_a_tap_shows_the_tooltip_on_a_phone(visitor: Visitor) -> None:
    page = visitor.open("schedules?a=1f1b&b=none", **PHONE, color_scheme="dark")
    chart = page.locator("canvas.gantt")
    box = chart.bounding_box()
    assert page.locator("#tip").evaluate("tip => getComputedStyle(tip).visibility") == "hidden"
    page.touchscreen.tap(box["x"] + 34 + (box["width"] - 40) * 11 / 33, box["y"] + 8)
    wait_until(page, page.locator("#tip"), r"B of stage 0, microbatch 0")
    assert page.locator("#tip").evaluate("tip => getComputedStyle(tip).visibility") == "visible"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 23, 26)"
    for state in ("schedules", "runs", "plan"):
        page.goto(f"{visitor.studio.address}#{state}")
        page.locator(f'nav a[aria-current][href="#{state}"]').wait_for()
        assert has_no_sideways_scroll(page)


def test_the_page_that_was_opened_last_is_the_one_shown(visitor: Visitor) -> None:
    """Pages that load slowly come neither after it nor below it, and do not write their address over its own."""
    page = visitor.open("runs", **WIDE)
    page.get_by_text("Loss").first.wait_for()
    waiting: list[Any] = []
    page.route("**/api/catalogue", lambda route: waiting.append(route))
    for count, state in enumerate(("schedules", "plan", "runs"), 1):
        page.evaluate(f"location.hash = '#{state}'")
        while len(waiting) < count:
            page.wait_for_timeout(10)
    for route in reversed(waiting):
        route.continue_()
    page.get_by_text("Loss").first.wait_for()
    page.unroute("**/api/catalogue")
    page.evaluate("location.hash = '#plan'; history.replaceState(null, '', '#runs')")  # before the event of the first
    page.locator(".drop").wait_for()
    page.wait_for_url(re.compile("#plan$"))
    page.evaluate("location.hash = '#runs'")
    page.get_by_text("Loss").first.wait_for()
    assert page.locator("#page > *").count() == 1, page.locator("#page").inner_html()[:500]
    assert page.url.endswith("#runs")


def test_a_synthesis_becomes_the_second_schedule_and_is_exported(visitor: Visitor) -> None:
    page = visitor.open("schedules?ranks=2&microbatches=4", **WIDE)
    page.get_by_role("button", name="Synthesize").click()
    wait_until(page, page.get_by_label("Second schedule").locator("h2"), "^synthesized$")
    wait_until(page, figure(page, "Second", "Makespan"), r"^13\s*$")
    assert "This is optimal" in page.content()
    page.get_by_label("Schedule", exact=True).select_option("b")
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "synthesized.csv"
    with studio() as elsewhere:  # the address is the view, also there
        other = visitor.browser.new_context(**WIDE).new_page()
        other.goto(f"{elsewhere.address}#{page.url.partition('#')[2]}")
        wait_until(other, figure(other, "Second", "Makespan"), r"^13\s*$")


def test_a_run_is_followed(visitor: Visitor) -> None:
    page = visitor.open("runs", **WIDE)
    chart = page.locator("figure:has-text('Loss')").locator("output")
    wait_until(page, chart, "step 3: 1.0000")
    with MetricsFile(visitor.run / "metrics.jsonl") as file:
        file.write({"event": "step", "step": 4, "loss": 0.5, "tokens_per_s": 1e4, "time": 4.0})
        file.write({"event": "end", "step": 4, "why": "finished", "time": 4.0})
    wait_until(page, chart, "step 4: 0.5000")
    wait_until(page, page.locator("article.run"), "Finished, at step 4")
    wait_until(page, page.locator("section:has-text('Events')").last, r"1970-01-01 00:00:04")


def test_the_cut_of_a_profile_is_dragged(visitor: Visitor, tmp_path: Path) -> None:
    even(8).write(tmp_path / "profile.json")
    page = visitor.open("plan?ranks=2", **WIDE)
    page.locator("input[type=file]").set_input_files(tmp_path / "profile.json")
    makespan = page.locator('.figures div:has(dt:text-is("Makespan")) dd')
    makespan.wait_for()
    before = text(makespan)
    ribbon = page.locator("canvas.cut")
    box = ribbon.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 6 / 8, box["y"] + 50, steps=3)
    page.mouse.up()
    page.wait_for_url(re.compile("counts=6,2"))
    ribbon.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("counts=7,1"))
    page.get_by_text("Border 1 of 1: between layers.6 and layers.7").wait_for()
    assert text(makespan) != before
    waiting: list[Any] = []
    page.route("**/api/plan", lambda route: waiting.append(route))
    for _ in range(3):  # faster than the answers
        page.keyboard.press("ArrowLeft")
    for count in (1, 2):
        while len(waiting) < count:
            page.wait_for_timeout(10)
        page.keyboard.press("ArrowLeft")
        waiting[-1].continue_()
    page.unroute("**/api/plan")
    page.wait_for_url(re.compile("counts=2,6"))
    page.get_by_text("Border 1 of 1: between layers.1 and layers.2").wait_for()


def test_the_address_of_a_plan_opens_the_profile_of_a_run_with_its_cut(visitor: Visitor, tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "run" / "metrics.jsonl") as file:
        file.write({"event": "step", "step": 1, "loss": 3.0})
    even(8).write(tmp_path / "run" / "profile.json")
    with studio(tmp_path / "run") as running:
        context = visitor.browser.new_context(**WIDE)
        page, second = context.new_page(), context.new_page()
        page.goto(f"{running.address}#plan?ranks=2")
        page.get_by_role("button", name="Profile of run").click()
        page.get_by_text("Border 1 of 1: between layers.3 and layers.4").wait_for()
        page.locator("canvas.cut").focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.wait_for_url(re.compile("counts=6,2"))
        second.goto(page.url)
        second.get_by_text("Border 1 of 1: between layers.5 and layers.6").wait_for()
        page.get_by_role("button", name="Another profile").click()
        page.wait_for_url(re.compile("#plan\\?ranks=2$"))


def test_a_plan_that_fails_dims_the_one_before(visitor: Visitor, tmp_path: Path) -> None:
    even(4).write(tmp_path / "profile.json")
    page = visitor.browser.new_context(**WIDE).new_page()  # the console of `visitor.open` may not show a refusal
    page.goto(f"{visitor.studio.address}#plan?ranks=2")
    page.locator("input[type=file]").set_input_files(tmp_path / "profile.json")
    chart = page.locator("canvas.gantt")
    chart.wait_for()
    is_dimmed = "chart => getComputedStyle(chart.closest('.work > div:not(.drop)')).opacity < 0.5"
    assert not chart.evaluate(is_dimmed)
    ranks = page.get_by_label("Ranks, exactly")
    ranks.fill("9")
    page.get_by_role("alert").filter(has_text="4").wait_for()
    assert chart.evaluate(is_dimmed)
    ranks.fill("2")
    page.get_by_role("alert").wait_for(state="hidden")
    assert not chart.evaluate(is_dimmed)


def test_a_tap_shows_the_tooltip_of_a_timeline_in_a_file(visitor: Visitor, tmp_path: Path) -> None:
    timeline = sl.simulate(sl.schedule("1f1b", ranks=4, microbatches=8))
    (tmp_path / "timeline.html").write_text(draw.html(timeline), encoding="utf-8")
    page = visitor.browser.new_context(**PHONE).new_page()
    page.goto((tmp_path / "timeline.html").as_uri())
    box = page.locator("canvas").bounding_box()
    page.touchscreen.tap(box["x"] + 72 + (box["width"] - 80) * 11 / 33, box["y"] + 8)
    wait_until(page, page.locator("#tip"), "stage 0, microbatch 0")
    assert page.locator("#tip").is_visible()


def test_two_fingers_zoom_a_timeline_in_a_file_and_one_scrolls_its_page(visitor: Visitor, tmp_path: Path) -> None:
    timeline = sl.simulate(sl.schedule("1f1b", ranks=40, microbatches=40))
    (tmp_path / "timeline.html").write_text(draw.html(timeline), encoding="utf-8")
    page = visitor.browser.new_context(**PHONE).new_page()
    page.goto((tmp_path / "timeline.html").as_uri())
    drawn = "document.querySelector('canvas').clientHeight > 900 && new Promise(done => requestAnimationFrame(done))"
    page.wait_for_function(drawn)
    devices = page.context.new_cdp_session(page)

    def touch(kind: str, *points: tuple[int, int]) -> None:
        devices.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})

    while page.evaluate("view.to - view.from > data.until / 2"):  # a busy browser may miss a gesture
        touch("touchStart", (200, 400), (220, 400))
        for apart in (20, 40, 60):
            touch("touchMove", (200 - apart, 400), (220 + apart, 400))
        touch("touchEnd")
    shown = page.evaluate("[view.from, view.to]")
    while page.evaluate("scrollY") == 0:
        touch("touchStart", (200, 600))
        for y in (500, 400, 300):
            touch("touchMove", (200, y))
        touch("touchEnd")
    assert page.evaluate("[view.from, view.to]") == shown
    page = visitor.browser.new_context(**WIDE).new_page()
    page.goto((tmp_path / "timeline.html").as_uri())
    page.wait_for_function(drawn)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, 200)
    page.wait_for_function("scrollY > 0 && view.to === data.until")
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -200)
    page.wait_for_function("view.to - view.from < data.until")


def test_runs_of_different_lengths_say_where_they_end(visitor: Visitor, tmp_path: Path) -> None:
    """Each value is of the step that the chart names, or says its own; a logarithmic axis says so."""
    for name, num_steps in (("short", 2), ("long", 40)):
        with MetricsFile(tmp_path / name / "metrics.jsonl") as file:
            for step in range(1, num_steps + 1):
                file.write({"event": "step", "step": step, "loss": 2.0, "grad_norm": 1e4 if step == 1 else 1.0})
    make_comparison([tmp_path / "short", tmp_path / "long"], tmp_path / "comparison.html")
    with studio(tmp_path) as running:
        for address in (f"{running.address}#runs", (tmp_path / "comparison.html").as_uri()):
            page = visitor.browser.new_page()
            page.goto(address)
            chart = page.locator("figure:has-text('Loss')")
            wait_until(page, chart.locator("output"), r"step 40: .*short.* 2\.0000 at 2")
            plot = chart.locator("[tabindex]").first
            plot.focus()
            page.keyboard.press("ArrowLeft")
            wait_until(page, chart.locator("output"), r"step 39: .*short.* 2\.0000 at 2")
            page.locator("figcaption:visible", has_text=re.compile(r"Gradient norm.*logarithmic")).wait_for()


def test_an_address_with_wrong_values_shows_the_defaults(visitor: Visitor) -> None:
    page = visitor.open("nosuch?ranks=four&forward=", **WIDE)
    wait_until(page, figure(page, "First", "Makespan"), r"^33\s*$")
    assert page.title() == "Schedules · Stageline studio"
    ranks = page.get_by_label("Ranks, exactly")
    ranks.fill("0")
    assert not ranks.evaluate("input => input.validity.valid")

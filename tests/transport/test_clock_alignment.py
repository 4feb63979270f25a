"""Clocks of ranks that count from different moments: aligned before the first step, and never compared if not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import stageline as sl
from stageline.cli.app import make_app
from stageline.common.errors import TransportError
from stageline.distributed.thread_host import ThreadHost
from stageline.runtime.replan import Watch
from stageline.timeline import draw
from stageline.timeline.explain import typical_costs
from stageline.timeline.timeline import Transfers
from stageline.transport.clock_alignment import Alignment, offset_of
from stageline.transport.tcp import exchange
from stageline.transport.tcp.exchange import Exchange
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import Outbox
from support.ports import free_port

RANK = Path(__file__).parents[1] / "support" / "clock_rank.py"
SHIFTED = ["unshare", "--time", "--monotonic", "100000", "--boottime", "100000"]


# ---- the exchange ----


@given(
    apart=st.floats(-1e6, 1e6),
    there=st.floats(0, 1e-2),
    work=st.floats(0, 1e-2),
    back=st.floats(0, 1e-2),
)
@settings(max_examples=50)
def test_the_other_clock_is_within_the_uncertainty(apart: float, there: float, work: float, back: float) -> None:
    """However unequal the two ways are."""
    sent = 50.0
    heard = sent + there + apart
    reading = offset_of(sent, heard, heard + work, sent + there + work + back)
    assert abs(reading.offset - apart) <= reading.uncertainty + 1e-9
    assert reading.uncertainty == pytest.approx((there + back) / 2, abs=1e-9)


class ShiftedTime:
    """The module `time`, with a clock for every thread."""

    def __init__(self, real: Any) -> None:
        self._real, self._of = real, threading.local()
        self.later = 0.0
        """Seconds that have passed beside the real ones."""

    def shift(self, seconds: float, rate: float = 1.0) -> None:
        """Set the clock of this thread ahead, and how fast it counts the later seconds."""
        self._of.shift, self._of.rate = seconds, rate

    def perf_counter(self) -> float:
        ahead, rate = getattr(self._of, "shift", 0.0), getattr(self._of, "rate", 1.0)
        return float(self._real.perf_counter()) + float(ahead) + self.later * float(rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def align_all(clock: ShiftedTime, shifts: list[float], rates: list[float], later: Sequence[float]) -> Any:
    """The alignments of all ranks, after so many seconds each; and what each clock shows at the end."""
    ends, waiting = [Links(rank, len(shifts)) for rank in range(len(shifts))], threading.Barrier(len(shifts))

    def call(rank: int) -> tuple[list[Alignment], float]:
        clock.shift(shifts[rank], rates[rank])
        row, alignments = Exchange(ends[rank], Outbox(), range(len(shifts))), []
        for seconds in later:
            waiting.wait(60)
            clock.later = seconds
            waiting.wait(60)
            alignments.append(row.align(lambda: None))
        waiting.wait(60)
        return alignments, clock.perf_counter()

    try:
        for end in ends:
            end.meet([peer.address for peer in ends], "0" * 32)
        with ThreadPoolExecutor(len(shifts)) as pool:
            return [result.result(100.0) for result in [pool.submit(call, rank) for rank in range(len(shifts))]]
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("fan", [1, 2, 16])
def test_every_rank_learns_how_far_all_clocks_are_apart(fan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shifts = [5.0, 100000.0, 5.0, -3000.0, 0.0]
    clock = ShiftedTime(time)
    monkeypatch.setattr(exchange, "time", clock)
    monkeypatch.setattr(exchange, "FAN", fan)
    results = [alignments[0] for alignments, _ in align_all(clock, shifts, [1.0] * 5, [0.0])]
    for alignment in results:
        assert (alignment.offsets, alignment.uncertainties) == (results[0].offsets, results[0].uncertainties)
        assert not alignment.exact
        for shift, offset, uncertainty in zip(shifts, alignment.offsets, alignment.uncertainties, strict=True):
            assert abs(offset - (shifts[0] - shift)) <= uncertainty + 1e-9
        # The same clock as the first rank's is known to be the same, and adds nothing.
        assert alignment.offsets[2] == alignment.uncertainties[2] == 0.0


def test_the_uncertainty_covers_a_clock_that_drifts_until_it_is_aligned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains 40 µs a second: after 100 s it is 4 ms ahead of where it was."""
    shifts, rates = [0.0, 1000.0], [1.0, 1.0 + 4e-5]
    clock = ShiftedTime(time)
    monkeypatch.setattr(exchange, "time", clock)
    results = align_all(clock, shifts, rates, [0.0, 100.0])
    apart = -1000.0 - 4e-3
    for (first, second), now in results:
        assert abs(first.offsets[1] - apart) > 3.9e-3 - first.uncertainties[1]
        assert abs(first.offsets[1] - apart) <= first.uncertainty(now)
        assert first.uncertainty(now) >= 0.01, "100 µs a second for two clocks"
        assert abs(second.offsets[1] - apart) <= second.uncertainties[1] + 1e-9
        assert second.uncertainty(now) < first.uncertainty(now)


def test_a_rank_that_is_lost_meanwhile_ends_the_exchange() -> None:
    def lost() -> None:
        raise TransportError("rank 1 is lost")

    ends = [Links(rank, 2) for rank in range(2)]
    try:
        for end in ends:
            end.meet([peer.address for peer in ends], "0" * 32)
        with pytest.raises(TransportError, match="rank 1 is lost"):
            Exchange(ends[0], Outbox(), range(2)).align(lost)
    finally:
        for end in ends:
            end.close()


# ---- two hosts ----


def measured(folder: Path, second: list[str]) -> dict[str, sl.Timeline]:
    """What two processes measured, the second of which is started by a command of its own."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*(second if rank else []), sys.executable, str(RANK), str(rank), str(folder)],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return {path.stem: sl.read_timeline(path) for path in folder.iterdir()}


def test_hosts_with_other_uptimes_give_the_makespan_and_the_bubble_of_one_clock(tmp_path: Path) -> None:
    allowed = subprocess.run([*SHIFTED, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("a time namespace is not allowed here (unshare --time)")
    timelines = measured(tmp_path, SHIFTED)
    assert len(timelines) == 4
    for name, timeline in timelines.items():
        assert timeline.uncertainty is not None, name
        assert 0.0 < timeline.uncertainty < 0.05
        # 20 ms for F and 40 ms for B: 5 times 60 ms where nothing else runs, and more on a busy machine.
        assert 0.29 < timeline.makespan < 10.0
        assert timeline.bubble is not None
        assert 0.1 < timeline.bubble < 0.95
        moved = timeline.transfers
        early = float((moved.sent - timeline.start[moved.receivers]).max())
        assert early <= timeline.uncertainty + 0.01  # no input is taken before it was made
    assert "±" in repr(timelines["step-0"])


# ---- messages ----

ALIGNED = sl.simulate(sl.schedule("1f1b", 2, 4), sl.Costs(forward=0.01, backward=0.02))
MEASURED = replace(ALIGNED, costs=None, uncertainty=0.002)
APART = replace(ALIGNED, costs=None, uncertainty=None)


def test_a_timeline_tells_its_uncertainty_in_words_pictures_and_files(tmp_path: Path) -> None:
    assert MEASURED.bubble == ALIGNED.bubble
    assert MEASURED.bubble_uncertainty == pytest.approx(0.002 / 0.15)
    assert "(bubble 20.0% ± 1.3%)" in repr(MEASURED)
    assert "bubble 20.0% ± 1.3%" in draw.text(MEASURED)
    assert "bubble 20.0% ± 1.3%" in draw.svg(MEASURED)
    assert '"bubbleUncertainty":0.0133' in draw.html(MEASURED)
    assert MEASURED.figures()["uncertainty"] == sl.explain(None, MEASURED).to_json()["uncertainty"] == 0.002
    MEASURED.write(tmp_path / "run.json")
    assert sl.read_timeline(tmp_path / "run.json").uncertainty == 0.002
    output = CliRunner().invoke(make_app(), ["trace", str(tmp_path / "run.json")]).output
    assert "aligned to ± 2 ms" in output
    assert "±" not in draw.text(ALIGNED)


def test_a_timeline_of_clocks_that_were_not_aligned_says_so_and_gives_no_bubble(tmp_path: Path) -> None:
    assert APART.bubble is None
    assert APART.bubble_uncertainty is None
    assert not APART.is_aligned
    assert "not aligned" in repr(APART)
    assert (APART.busy, APART.ideal, APART.span) == (ALIGNED.busy, ALIGNED.ideal, ALIGNED.span)
    for tell in (
        lambda: APART.makespan, lambda: APART.idle, lambda: APART.critical_path, lambda: draw.text(APART),
        lambda: draw.svg(APART), lambda: draw.html(APART), lambda: draw.trace(APART),
        lambda: sl.explain(None, APART), lambda: sl.compare(ALIGNED, APART).makespan,
    ):  # fmt: skip
        with pytest.raises(sl.ScheduleError, match="were not aligned"):
            tell()
    APART.write(tmp_path / "run.json")
    assert sl.read_timeline(tmp_path / "run.json").uncertainty is None
    result = CliRunner().invoke(make_app(), ["trace", str(tmp_path / "run.json")])
    assert result.exit_code == 0
    assert "clocks of its ranks not aligned" in result.output
    figures = json.loads(CliRunner().invoke(make_app(), ["trace", str(tmp_path / "run.json"), "--json"]).output)
    assert (figures["makespan"], figures["bubble"], figures["uncertainty"]) == (None, None, None)


def test_what_actions_took_is_known_without_aligned_clocks_and_transfers_are_not() -> None:
    costs = typical_costs(APART)
    assert costs.forward == pytest.approx([0.01, 0.01])
    assert costs.transfer == 0.0


def test_nothing_is_planned_from_a_step_of_clocks_that_were_not_aligned() -> None:
    watch = Watch("auto", 2, sl.Costs(), None)
    for step in range(4):
        assert watch.after(step, APART, APART.schedule, ThreadHost(2)) is None
    assert watch.drift is None


def without_uncertainty(timeline: sl.Timeline, path: Path) -> sl.Timeline:
    """A file that was written before timelines had uncertainties."""
    timeline.write(path)
    data = json.loads(path.read_text())
    del data["uncertainty"]
    path.write_text(json.dumps(data))
    return sl.read_timeline(path)


def test_a_file_that_says_nothing_of_clocks_is_judged_by_its_messages(tmp_path: Path) -> None:
    assert without_uncertainty(replace(ALIGNED, costs=None), tmp_path / "old.json").bubble == ALIGNED.bubble
    start, end = ALIGNED.start.copy(), ALIGNED.end.copy()
    second = slice(int(ALIGNED.schedule.bounds[1]), None)
    for shift in (1e5, -1e5):
        start[second], end[second] = ALIGNED.start[second] + shift, ALIGNED.end[second] + shift
        moved = ALIGNED.transfers
        sent = end[ALIGNED.schedule.graph.source[moved.receivers]]
        apart = replace(ALIGNED, costs=None, start=start, end=end, transfers=Transfers(moved.receivers, sent, sent))
        assert without_uncertainty(apart, tmp_path / "old.json").bubble is None


@pytest.mark.parametrize("value", [-1.0, "much", True, [0.0], float("inf")])
def test_an_uncertainty_that_is_none_is_refused(value: object, tmp_path: Path) -> None:
    ALIGNED.write(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**data, "uncertainty": value}))
    with pytest.raises(sl.ScheduleError, match=r"uncertainty|number"):
        sl.read_timeline(tmp_path / "run.json")

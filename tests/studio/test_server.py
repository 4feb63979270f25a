"""The server of the studio: what it answers, and whom."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import random
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stageline as sl
from stageline.cli.app import run
from stageline.studio.addresses import pack_schedule, unpack_schedule
from stageline.studio.app import Studio, make_app
from stageline.studio.server import listen
from stageline.train.events import MetricsFile
from support.profiles import even
from support.studios import Response, RunningStudio, studio

pytest.importorskip("starlette", reason="the extra studio is not installed")
pytest.importorskip("uvicorn", reason="the extra studio is not installed")

SHOWN = {
    "ranks": 4,
    "microbatches": 8,
    "panels": [{"family": "1f1b"}, {"family": "interleaved", "options": {"chunks": 2}}],
}


def write_run(folder: Path, num_steps: int, **config: Any) -> Path:
    """A run with so many steps, a planned and a measured timeline."""
    folder.mkdir(parents=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in config.items()]
    (folder / "config.toml").write_text("\n".join(["[training]", *lines, ""]))
    with MetricsFile(folder / "metrics.jsonl") as file:
        file.write({"event": "start", "step": 0, "resumed": False, "time": 1.0})
        for step in range(1, num_steps + 1):
            memory = {"memory_by_process": [100, 200]} if step == 1 else {}
            file.write({"event": "step", "step": step, "loss": 3.0 / step, "time": 1.0 + step, **memory})
        file.write({"event": "recovery", "step": num_steps, "lost": ["rank 1"], "action": "restart", "state": "memory"})
    timeline = sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=4))
    (folder / "timeline").mkdir()
    timeline.write(folder / "timeline" / "planned.json")
    timeline.write(folder / "timeline" / f"step-{num_steps:08}.json")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStudio]:
    runs = tmp_path_factory.mktemp("runs")
    even(8).write(write_run(runs / "a", 3, steps=10) / "profile.json")
    write_run(runs / "b", 2, steps=20)
    with studio(runs) as running:
        yield running
        assert running.stop() == 0  # Ctrl-C is the normal end
        assert running.process.stderr is not None
        assert running.process.stderr.read() == "studio ended\n"


def test_only_the_page_itself_may_call(served: RunningStudio) -> None:
    host = f"{served.host}:{served.port}"
    assert served.request("").status == 200
    assert served.request("", token="x").status == 403
    assert served.request("api/simulate", SHOWN, token="x").status == 403
    assert served.request("", Host="studio.example.com").status == 403
    assert served.request("", Host=f"127.0.0.1.example.com:{served.port}").status == 403
    assert served.request("api/simulate", SHOWN, Origin="http://example.com").status == 403
    assert served.request("api/simulate", SHOWN, Origin="null").status == 403
    assert served.request("api/simulate", SHOWN, Origin=f"http://{host}").status == 200
    assert served.request("", Host=f"localhost:{served.port}").status == 200
    for path in ("pages/../app.py", "pages/%2e%2e%2fapp.py", "pages/nothing.js", "nothing"):
        assert served.request(path).status in (403, 404)


def test_every_answer_forbids_foreign_content(served: RunningStudio) -> None:
    answers = [served.request(path) for path in ("", "pages/main.js", "nothing", "api/catalogue")]
    for response in (*answers, served.request("", token="x")):
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["referrer-policy"] == "no-referrer"  # the token stays here
        assert response.headers["x-content-type-options"] == "nosniff"


def test_it_listens_on_this_machine_only(served: RunningStudio) -> None:
    assert served.host == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", served.port), timeout=5)


def test_times_are_those_of_simulate(served: RunningStudio) -> None:
    costs = {"forward": 2, "backward_input": 3, "backward_weight": 1, "transfer": 0.5, "factors": {"1": 1.5}}
    panels = served.request("api/simulate", {**SHOWN, "costs": costs}).arrays["panels"]
    own = sl.Costs(forward=[2, 3, 2, 2], backward_input=[3, 4.5, 3, 3], backward_weight=[1, 1.5, 1, 1], transfer=0.5)
    for panel, expected in zip(
        panels,
        (
            sl.simulate(sl.schedule("1f1b", ranks=4, microbatches=8), own),
            sl.simulate(sl.schedule("interleaved", ranks=4, microbatches=8, chunks=2), own.refined(2)),
        ),
        strict=True,
    ):
        times = panel["times"]
        np.testing.assert_allclose(times["start"], expected.start, rtol=1e-6)
        np.testing.assert_allclose(times["end"], expected.end, rtol=1e-6)
        assert times["makespan"] == expected.makespan
        assert times["bubble"] == expected.bubble
        assert times["peak"] == list(expected.peak_memory)
        path = [expected.schedule.action(int(index)) for index in times["critical"]]
        assert path == [timed.action for timed in expected.critical_path]
    known = {**SHOWN, "panels": [{"family": "1f1b", "known": panels[0]["id"]}]}
    again = served.request("api/simulate", known).arrays["panels"][0]
    assert "structure" not in again
    assert again["times"]["idle"] is None
    with_idle = {**SHOWN, "panels": [{"family": "1f1b", "idle": True}]}
    idle = served.request("api/simulate", with_idle).arrays["panels"][0]["times"]["idle"]
    assert idle == [list(causes) for causes in sl.simulate(sl.schedule("1f1b", ranks=4, microbatches=8)).idle]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranks": 0}, "'ranks' must be an integer from 1 to 2147483647, got 0"),
        ({"ranks": 2000, "microbatches": 2000}, "have at least 8,000,000 actions; this page draws up to 200,000"),
        ({"costs": {"forward": -1}}, "costs.forward must be a number from 0"),
        ({"panels": [{}]}, "lacks 'family'"),
    ],
)
def test_a_wrong_request_gets_a_sentence(served: RunningStudio, change: dict[str, Any], sentence: str) -> None:
    response = served.request("api/simulate", SHOWN | change)
    assert response.status == 400
    assert sentence in response.json["error"]


@pytest.mark.parametrize(
    "path", ["simulate", "export", "synthesis", "runs", "runs/timelines", "profile", "profile/run", "plan"]
)
def test_a_request_that_is_no_object_gets_a_sentence(served: RunningStudio, path: str) -> None:
    response = served.request(f"api/{path}", [1])
    assert (response.status, response.json) == (400, {"error": "'request' must be an object, got [1]"})


def test_a_defect_of_the_studio_reaches_the_page_as_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    defective = Studio("token")
    defective.runs.profiles = lambda: [][0:1] + 1  # type: ignore[method-assign, operator]
    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/token/api/profiles", "query_string": b"", "root_path": "",
             "server": ("127.0.0.1", 80), "headers": [(b"host", b"127.0.0.1:80")]}  # fmt: skip
    asyncio.run(make_app(defective)(scope, receive, send))
    assert messages[0]["status"] == 500
    assert json.loads(messages[1]["body"]) == {"error": "the studio failed to answer; its terminal shows the error"}
    assert "the studio failed to answer /token/api/profiles" in caplog.text


def test_a_synthesis_of_another_studio_is_not_one_of_this_studio(served: RunningStudio) -> None:
    served.request("api/synthesis", {"ranks": 2, "microbatches": 4, "time_limit": 1})
    shown = {"ranks": 2, "microbatches": 4, "panels": [{"family": "synthesized", "job": "1"}]}
    (panel,) = served.request("api/simulate", shown).arrays["panels"]
    assert panel["error"].startswith("this studio does not have the synthesized schedule of this address; press Synth")


def test_an_address_carries_a_synthesized_schedule_to_another_studio(served: RunningStudio) -> None:
    job, answer = synthesize(served)
    shown = {**SHOWN, "ranks": 2, "microbatches": 4, "panels": [{"family": "synthesized", "job": job}]}
    (here,) = served.request("api/simulate", shown).arrays["panels"]
    shown["panels"] = [{"family": "synthesized", "job": "of another studio", "packed": answer["packed"]}]
    (there,) = served.request("api/simulate", shown).arrays["panels"]
    assert there["times"]["makespan"] == here["times"]["makespan"]
    assert there["structure"]["stage"].tolist() == here["structure"]["stage"].tolist()
    script = served.request("api/export", {**shown, "format": "python"}).body.decode()
    assert "schedule = sl.read_schedule('synthesized.json')" in script
    for damaged in (
        answer["packed"][:-9],
        "%",
        "AAAA",
        "eJwDAAAAAAE",
        pack(b'{"programs": [1]}'),
        pack(b"0" * 5 * 2**20),
    ):
        shown["panels"] = [{"family": "synthesized", "packed": damaged}]
        (panel,) = served.request("api/simulate", shown).arrays["panels"]
        assert panel["error"].startswith("cannot read the synthesized schedule of this address: ")


def pack(plain: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(plain)).decode().rstrip("=")


@pytest.mark.parametrize("name", sorted(sl.families()))
def test_schedules_of_thousands_of_actions_fit_into_an_address(name: str) -> None:
    schedule = sl.schedule(name, ranks=8, microbatches=64)
    packed = pack_schedule(schedule)
    assert 0 < len(packed) < 3000
    assert unpack_schedule(packed) == schedule


def test_a_schedule_that_is_too_long_for_an_address_is_left_out() -> None:
    shuffled = random.Random(0).sample(range(3000), 3000)
    schedule = sl.Schedule.from_programs([[f"0{kind}{microbatch}" for kind in "FB" for microbatch in shuffled]])
    assert pack_schedule(schedule) == ""


def test_a_family_that_does_not_fit_is_an_error_of_its_panel(served: RunningStudio) -> None:
    shown = {**SHOWN, "ranks": 3, "panels": [{"family": "dualpipe"}, {"family": "gpipe"}]}
    first, second = served.request("api/simulate", shown).arrays["panels"]
    assert first == {"error": "dualpipe needs an even number of ranks, got 3; nearest: 2 or 4"}
    assert second["times"]["makespan"] > 0


def synthesize(served: RunningStudio, **request: Any) -> tuple[str, Any]:
    job = served.request("api/synthesis", {"ranks": 2, "microbatches": 4, "time_limit": 2, **request}).json["job"]
    deadline = time.monotonic() + 60
    while not (answer := served.request(f"api/synthesis/{job}").json)["done"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return job, answer


def test_a_synthesis_runs_in_the_background_and_becomes_a_panel(served: RunningStudio) -> None:
    job, answer = synthesize(served, memory=2)
    assert answer["error"] == ""
    assert answer["gap"] == 0
    *_, (_, achieved, bound, _) = answer["progress"]
    shown = {**SHOWN, "ranks": 2, "microbatches": 4, "panels": [{"family": "synthesized", "job": job}]}
    panel = served.request("api/simulate", shown).arrays["panels"][0]
    assert panel["times"]["makespan"] == achieved == bound
    assert max(panel["times"]["peak"]) <= 2
    script = served.request("api/export", {**shown, "format": "python"}).body.decode()
    assert "sl.synthesize(costs, ranks=2, microbatches=4, memory=2.0" in script
    _, refused = synthesize(served, memory=0.5)
    assert "memory" in refused["error"]


def test_exports_hold_what_is_shown(served: RunningStudio, tmp_path: Path) -> None:
    one = {**SHOWN, "panels": [{"family": "zb-h1"}]}
    expected = sl.schedule("zb-h1", ranks=4, microbatches=8)

    def export(name: str, shown: dict[str, Any]) -> Response:
        response = served.request("api/export", {**shown, "format": name})
        assert response.status == 200
        return response

    for ending in ("json", "csv"):
        response = export(ending, one)
        assert response.headers["content-disposition"] == f'attachment; filename="zb-h1.{ending}"'
        (tmp_path / f"s.{ending}").write_bytes(response.body)
        assert sl.read_schedule(tmp_path / f"s.{ending}").programs == expected.programs
    assert export("svg", SHOWN).body.decode().count('class="t"') == 2
    assert json.loads(export("perfetto", SHOWN).body)["traceEvents"]
    scope: dict[str, Any] = {}
    exec(compile(ast.parse(export("python", one).body), "exported", "exec"), scope)
    assert scope["timeline"].makespan == sl.simulate(expected).makespan
    refused = served.request("api/export", {**SHOWN, "format": "csv"})
    assert "holds one schedule, got 2" in refused.json["error"]


def next_update(running: RunningStudio, known: dict[str, Any], version: str) -> dict[str, Any]:
    """Ask until a run has another version: a file that was slow to read is not read again at once."""
    end = time.monotonic() + 60
    while True:
        (update,) = running.request("api/runs", {"known": [known]}).arrays["runs"]
        if update["version"] != version:
            return dict(update)
        assert time.monotonic() < end
        time.sleep(0.01)


def test_runs_are_followed_while_jobs_write_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    with studio(folder) as running:
        (first,) = running.request("api/runs", {}).arrays["runs"]
        assert first["steps"]["step"].tolist() == [1, 2, 3]
        assert first["memory"][1]["memory"].tolist() == [200]
        assert [event["kind"] for event in first["events"]] == ["start", "recovery"]
        known = {"version": first["version"], "generation": first["generation"], "steps": 3}
        assert running.request("api/runs", {"known": [known]}).arrays["runs"] == [{"version": first["version"]}]
        with MetricsFile(folder / "metrics.jsonl") as file:
            file.write({"event": "step", "step": 4, "loss": 0.5, "time": 9.0})
        update = next_update(running, known, first["version"])
        assert (update["from"], update["steps"]["step"].tolist()) == (3, [4])
        with MetricsFile(folder / "metrics.jsonl", resume_step=2) as file:  # a resume removes later steps
            file.write({"event": "start", "step": 2, "resumed": True, "time": 10.0})
        update = next_update(running, {**known, "steps": 4}, update["version"])
        assert (update["from"], update["steps"]["step"].tolist()) == (0, [1, 2])
        assert running.stop(signal.SIGTERM) == 0


def test_runs_are_compared(served: RunningStudio) -> None:
    answer = served.request("api/runs", {}).arrays
    assert [run["name"] for run in answer["runs"]] == ["a", "b"]
    assert answer["differences"] == [{"option": "training.steps", "values": ["10", "20"]}]
    timelines = served.request("api/runs/timelines", {"run": 0}).arrays
    assert timelines["step"] == 3
    assert [panel["name"] for panel in timelines["panels"]] == ["planned", "measured"]
    assert len(timelines["parts"]["rows"]) == 2 + 2
    assert served.request("api/runs/timelines", {"run": 0, "step": 3}).arrays == {"step": 3}
    assert "there is no run 7" in served.request("api/runs/timelines", {"run": 7}).json["error"]


def test_the_cut_of_a_profile_has_the_time_and_memory_of_a_plan(served: RunningStudio) -> None:
    profile = even(8)
    uploaded = served.request("api/profile", {"name": "p.json", "text": profile.to_text()}).json
    assert len(uploaded["layers"]) == 8
    assert served.request("api/profiles").json == ["a"]
    assert served.request("api/profile/run", {"run": 0}).json == {**uploaded, "name": "a"}
    assert served.request("api/profile/run", {"run": 1}).status == 400
    request = {"profile": uploaded["profile"], "ranks": 2, "microbatches": 4, "family": "1f1b"}
    balanced = served.request("api/plan", request).arrays
    assert balanced["counts"] == [4, 4]
    uneven = served.request("api/plan", {**request, "counts": [6, 2]}).arrays
    own = sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=4), profile.costs([(0, 6), (6, 8)]))
    assert uneven["panel"]["times"]["makespan"] == own.makespan > balanced["panel"]["times"]["makespan"]
    planned = sl.plan(
        profile=profile, ranks=2, microbatches=4, schedule="1f1b", layers_per_stage=[6, 2], recompute="none"
    )
    assert uneven["memory"] == [list(rank) for rank in planned.memory]
    best = served.request("api/plan/search", {**request, "time_limit": 0.3}).json
    assert "error" not in best, best
    assert sum(best["counts"]) == 8
    refused = served.request("api/profile", {"name": "p.json", "text": "{}"})
    assert refused.status == 400
    assert refused.json["error"].startswith("p.json: ")
    too_many = served.request("api/plan", {**request, "ranks": 16}).json["error"]
    assert "has 16 stages, but the profile has 8 layers" in too_many


def test_a_busy_port_is_refused_unless_any_will_do() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(sl.StagelineError, match=f"cannot listen at 127.0.0.1:{port}: .*use another --port"):
            listen(port)


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["studio", str(tmp_path / "nothing"), "--no-browser"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from stageline.cli import main; main()"
    words = [sys.executable, "-c", code, "studio", "--no-browser"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: stageline studio needs uvicorn, which cannot be imported")
    assert result.stderr.endswith("pip install 'stageline[studio]'\n")
    assert result.stderr.count("\n") == 1

"""The command as people use it: its output, its files, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stageline as sl
from stageline.cli.app import make_app, run

Capture = pytest.CaptureFixture[str]


def call(words: str, capsys: Capture, code: int = 0) -> str:
    """Run a command line; return its stdout, or its stderr if it fails."""
    assert run(words.split()) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out if code == 0 else err


def test_show_draws_the_chart_with_bubble_span_and_memory(capsys: Capture) -> None:
    out = call("show zb-v -p 4 -m 8 --width 110", capsys)
    assert "rank 3 ......F0f0F1f1F2f2F3f3i0w0" in out
    assert "makespan 51  bubble 5.9%" in out
    assert "span     48  bubble 0.0%" in out
    assert "peak memory 8 microbatches of one stage on every rank" in out


def test_piped_output_is_plain_and_a_terminal_gets_colour() -> None:
    command = [sys.executable, "-m", "stageline", "show", "1f1b", "-p", "2", "-m", "2"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "\x1b" not in plain.stdout
    environment = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "PATH": "", "COLUMNS": "60"}
    coloured = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    assert "\x1b[" in coloured.stdout


def test_show_writes_every_picture_and_the_schedule(tmp_path: Path, capsys: Capture) -> None:
    names = {"svg": "a.svg", "html": "a.html", "trace": "a.trace.json", "write": "a.csv"}
    files = " ".join(f"--{option} {tmp_path / name}" for option, name in names.items())
    call(f"show interleaved -p 2 -m 4 --chunks 3 {files}", capsys)
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]
    assert sl.read_schedule(tmp_path / "a.csv") == sl.schedule("interleaved", 2, 4, chunks=3)


def test_schedules_are_shown_with_their_shards(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "sharded.json"
    words = ["show", "zb-h1", "-p", "2", "-m", "3", "--shard", "always", "--gather", "0.5", "--reduce", "1"]
    assert run([*words, "--write", str(file)]) == 0
    assert "gather of parameters" in capsys.readouterr().out
    assert run(["verify", str(file)]) == 0
    assert "sharding" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"][0][:3] == ["0UNSHARD", "0F0", "0RESHARD"]
    assert run(["show", "zb-h1", "-p", "2", "-m", "3", "--shard", "often"]) != 0
    assert "--shard must be default, always or never, got 'often'" in capsys.readouterr().err


def test_files_are_shown_verified_and_simulated(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.json"
    sl.schedule("dualpipe", 4, 8).write(path)
    assert "dualpipe: 4 ranks" in call(f"show {path}", capsys)
    assert "look-ahead        1" in call(f"verify {path}", capsys)
    assert "critical path" in call(f"simulate {path} --overlap 2", capsys)
    assert "leave out -p" in call(f"show {path} -p 4 -m 8", capsys, code=2)


def test_json_of_every_verb_agrees_with_the_library(capsys: Capture) -> None:
    s = sl.schedule("zb-h1", 4, 8)
    costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    t = sl.simulate(s, costs)
    options = "-p 4 -m 8 --forward 10 --backward-input 11 --backward-weight 7 --transfer 1 --json"
    shown = json.loads(call(f"show zb-h1 {options}", capsys))
    assert shown["makespan"] == 278
    assert shown["programs"] == [[str(entry) for entry in program] for program in s.programs]
    assert json.loads(call(f"simulate zb-h1 {options}", capsys)) == json.loads(json.dumps(t.to_json()))
    verified = json.loads(call("verify zb-h1 -p 4 -m 8 --json", capsys))
    assert verified == {"valid": True, **json.loads(json.dumps(sl.verify(s).to_json()))}
    compared = json.loads(call(f"compare {options}", capsys))
    makespans = [row["makespan"] for row in compared["families"]]
    assert makespans == sorted(makespans)
    assert {row["family"]: row["makespan"] for row in compared["families"]}["zb-h1"] == 278
    listed = json.loads(call("families --json", capsys))
    assert [row["name"] for row in listed] == sorted(sl.families())
    assert all(row["description"] for row in listed)


def test_compare_gives_every_family_the_same_work(capsys: Capture) -> None:
    """A family that cuts a rank's share into chunks computes as long as one that does not."""
    rows = json.loads(call("compare -p 4 -m 8 --json", capsys))["families"]
    busy = {row["family"]: row["makespan"] * (1 - row["bubble"]) for row in rows}
    assert busy == pytest.approx(dict.fromkeys(busy, 24.0))
    assert len(busy) == len(sl.families()) - 1


def test_compare_leaves_out_what_does_not_fit(capsys: Capture) -> None:
    out = call("compare -p 3 -m 8 --memory 3", capsys)
    assert "left out: chimera: chimera needs an even number of ranks, got 3" in out
    assert "left out: gpipe: needs 8 of memory; the limit is 3" in out
    assert any(line.startswith("1f1b ") for line in out.splitlines())
    assert "no family fits" in call("compare -p 3 -m 8 --memory 0.1", capsys, code=2)


def test_compare_draws_all_on_one_axis(tmp_path: Path, capsys: Capture) -> None:
    files = f"--svg {tmp_path / 'a.svg'} --html {tmp_path / 'a.html'}"
    out = call(f"compare -p 4 -m 8 --charts --width 90 {files}", capsys)
    assert out.count("rank 3 ") == len(sl.families()) - 1
    assert max(map(len, out.splitlines())) <= 90
    assert (tmp_path / "a.svg").read_text().count("makespan") == len(sl.families()) - 1


def test_costs_come_from_a_file_and_options_win(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(sl.Costs(forward=[1, 2], backward=3).to_json()))
    assert json.loads(call(f"simulate 1f1b -p 2 -m 1 --costs {path} --json", capsys))["makespan"] == 9
    assert json.loads(call(f"simulate 1f1b -p 2 -m 1 --costs {path} --forward 5 --json", capsys))["makespan"] == 16


def test_the_users_families_are_loaded_from_a_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "my_families.py"
    path.write_text(
        "import stageline as sl\n"
        "@sl.family('mine-from-file', 'one after the other')\n"
        "def mine(ranks, microbatches, *, depth=1):\n"
        "    return [[f'{r}{k}{m}' for m in range(microbatches) for k in 'FB'] for r in range(ranks)]\n"
    )
    assert "makespan 12" in call(f"show mine-from-file -p 2 -m 2 --load {path} --option depth=3", capsys)
    assert "has no option 'dept'" in call(f"show mine-from-file -p 2 -m 2 --load {path} --option dept=3", capsys, 2)
    missing = call("show 1f1b -p 2 -m 2 --load nowhere.py", capsys, code=2)
    assert missing == "error: cannot load families from nowhere.py: no such file\n"


def test_a_file_of_families_that_fails_is_one_clear_error(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad_families.py"
    path.write_text("import sys\nsys.exit(3)\n")
    assert "cannot load families from" in call(f"show 1f1b -p 2 -m 2 --load {path}", capsys, code=2)
    path.write_text(
        "import stageline as sl\n"
        "@sl.family('crash-from-file', 'fails')\n"
        "def crash(ranks, microbatches):\n"
        "    return [[1 / 0]]\n"
    )
    assert "ZeroDivisionError" in call(f"show crash-from-file -p 2 -m 2 --load {path}", capsys, code=2)
    assert "left out: crash-from-file: the family" in call(f"compare -p 2 -m 2 --load {path}", capsys)


def test_json_is_plain_ascii_whatever_the_locale(capsys: Capture) -> None:
    out = call("families --json", capsys)
    assert out.isascii()
    assert "P−1−r" in json.loads(out)[0]["description"]


ERRORS = {
    "show 1f1 -p 2 -m 2": "did you mean '1f1b'",
    "show zbv -p 0 -m 2": "ranks to be a whole number from 1",
    "show zb-v -p 2 -m -3": "microbatches to be a whole number from 1",
    "show zb-v -p 2": "needs -m MICROBATCHES",
    "show zb-v": "needs -p RANKS",
    "show zb-v -p 99999999 -m 2": "got 99999999",
    "show zb-v -p 1048576 -m 1048576": "actions, the maximum",
    "show gpipe -p 2 -m 2 --chunks 2": "gpipe has no option 'chunks'",
    "show interleaved -p 2 -m 2 --chunks 0": "chunks to be a whole number",
    "show dualpipe -p 4 -m 7": "nearest: 8",
    "show chimera -p 5 -m 7": "nearest: 4 or 6",
    "show 1f1b -p 2 -m 2 --forward nan": "forward must be a number >= 0, got nan",
    "show 1f1b -p 2 -m 2 --forward -1": "forward must be a number >= 0, got -1",
    "show 1f1b -p 2 -m 2 --forward 1,2,3": "forward has 3 values, but the schedule has 2 stages",
    "show 1f1b -p 2 -m 2 --forward many": "--forward takes a number",
    "show 1f1b -p 2 -m 2 --scale 1,2,3": "scale has 3 factors for 2 microbatches",
    "show 1f1b -p 2 -m 2 --costs nowhere.json": "cannot read nowhere.json: No such file",
    "show 1f1b -p 2 -m 2 --option depth": "--option takes KEY=VALUE",
    "show nowhere.csv": "cannot read nowhere.csv: No such file",
    "show 1f1b -p 2 -m 2 --svg /no/such/a.svg": "cannot write the drawing to /no/such/a.svg",
    "show 1f1b -p 2 -m 2 --write a.txt": "must end in .json or .csv",
    "verify 1f1b -p two -m 2": "'-p' / '--ranks': must be an integer, got 'two'",
    "verify 1f1b -p 2 -m 2.5": "'-m' / '--microbatches': must be an integer, got '2.5'",
    "show 1f1b -p 2 -m 2 --width 3": "'--width': must be an integer between 30 and 2000, got '3'",
    "selftest --deadline 0": "'--deadline': must be a number >= 1, got '0'",
    "launch -n some job.py": "'--processes' / '-n': must be an integer >= 0, got 'some'",
    "simulate": "SCHEDULE",
    "doctor": "FILE|FOLDER",
    "doctor nowhere": "cannot read nowhere: No such file",
    "doctor .": "has no flight records",
    "compare -m 4": "compare needs -p RANKS",
    "compare -p 0 -m 4": "ranks to be a whole number from 1",
    "compare -p 4 -m 8 --memory nan": "'--memory': must be a number >= 0, got 'nan'",
    "compare -p 4 -m 8 --option foo=3": "no family has an option 'foo'",
    "show 1f1b -p 2 -m 2 --option ranks=3": "--option cannot set ranks",
    "nonsense": "nonsense",
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_one_line_and_exit_code_two(words: str, capsys: Capture) -> None:
    err = call(words, capsys, code=2)
    assert ERRORS[words] in " ".join(err.replace("│", "").split())


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("show zb-h", ["zb-h1", "zb-h2"]),
        ("selftest --families 1f1b,zb-h1,zb-", ["1f1b,zb-h1,zb-h2", "1f1b,zb-h1,zb-v"]),
        ("plan config.json --schedule zb-v,gp", ["zb-v,gpipe"]),
        ("plan config.json --schedule sy", ["synthesized"]),
    ],
)
def test_a_shell_completes_families_also_in_lists(
    words: str, completions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("_STAGELINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"stageline {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    run([])
    assert capsys.readouterr().out.split() == completions


@pytest.mark.parametrize("verb", ["generate", "launch", "selftest"])
def test_the_help_has_the_limits_of_numbers_and_the_help_of_arguments(verb: str, capsys: Capture) -> None:
    """Whichever version of typer prints it."""
    texts = {"generate": ("N>=1", "Folder of a run"), "launch": ("1<=N<=65535", "Arguments of"), "selftest": ("N>=2",)}
    out = call(f"{verb} --help", capsys)
    for text in texts[verb]:
        assert text in out
    assert "[[" not in out


def test_a_broken_schedule_names_rule_and_place(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    err = call(f"verify {path}", capsys, code=2)
    assert err.startswith("error [progress]: rank 1, position 0: 1B0 needs 1F0")
    assert run(["verify", str(path), "--json"]) == 2
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["valid"], verdict["rule"], verdict["rank"], verdict["position"]) == (False, "progress", 1, 0)


VERBS = [
    "families",
    "show",
    "verify",
    "simulate",
    "compare",
    "trace",
    "doctor",
    "inspect",
    "launch",
    "profile",
    "check",
    "train",
]
VERBS += ["report", "studio", "generate", "synthesize", "plan", "selftest"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(verb: str, capsys: Capture) -> None:
    assert f"stageline {verb}" in call(f"{verb} --help", capsys).split("Usage:")[1].split("\n", 1)[1]


def test_all_verbs_are_listed(capsys: Capture) -> None:
    assert {command.name for command in make_app().registered_commands} == set(VERBS)
    assert all(verb in call("--help train", capsys) for verb in VERBS), "only a verb in the first place is meant"
    assert "stageline 0." in call("--version", capsys)


def test_a_reader_who_stops_early_is_no_error() -> None:
    line = f"{sys.executable} -m stageline show gpipe -p 60 -m 60 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


MODELS = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.ones(4, 4), torch.ones(4, 2), nn.functional.mse_loss

def alone():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 9)
    def forward(self, input_ids, labels):
        logits = self.head(self.layers(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

words = torch.arange(8) % 9

def own():
    return Own(), {"input_ids": words, "labels": words}

def own_by_position():
    return Own(), (words, words)

def own_and_targets():
    return Own(), {"input_ids": words, "labels": words}, words

def without_loss():
    return make()[:3]

def inputs_alone():
    return make()[:2]

def swapped():
    model, inputs, targets, loss_fn = make()
    return model, inputs, loss_fn, targets

def wrong():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_of_a_test.py").write_text(MODELS)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 16,
              "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_a_test", raising=False)
    return tmp_path


def test_models_are_inspected_profiled_and_checked(models: Path, capsys: Capture) -> None:
    out = call("inspect models_of_a_test:make --stages 2", capsys)
    assert "Sequential: 3 units" in out
    assert "30 parameters" in out
    assert "2 of 4" not in call("check models_of_a_test:make", capsys)
    assert json.loads(call("check models_of_a_test:make --json", capsys))["equal"] is True
    out = call("profile models_of_a_test:make --stages 2 --repeats 1 --output profile.json", capsys)
    assert "rank 1" in out
    assert (models / "profile.json").exists()
    assert json.loads(call("profile models_of_a_test:make --repeats 1 --json", capsys))["layers"]


@pytest.mark.parametrize("name", ["make", "own", "own_by_position", "own_and_targets"])
def test_every_form_in_the_help_is_checked(name: str, models: Path, capsys: Capture) -> None:
    """A loss function, or a model whose output has a loss, given its inputs with or without targets."""
    assert json.loads(call(f"check models_of_a_test:{name} --json", capsys))["verdict"] == "equal"


def test_the_help_names_what_a_function_may_return(capsys: Capture) -> None:
    for verb in ("check", "profile", "inspect"):
        out = " ".join(call(f"{verb} --help", capsys).replace("│", " ").split())
        assert "a model, (model, inputs), (model, inputs, targets) or (model, inputs, targets, loss_fn)" in out


def test_a_config_of_hugging_face_is_a_model(models: Path, capsys: Capture) -> None:
    pytest.importorskip("transformers")
    inspected = json.loads(call("inspect . --stages 4 --json", capsys))
    assert inspected["model"] == "LlamaForCausalLM"
    assert [unit["stage"] for unit in inspected["units"]] == [0, 0, 1, 2, 3, 3, 3]
    assert "the same" in call("check config.json --samples 4 --length 8 --schedule zb-h1", capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "inspect models_of_a_test:make --by p.json",
            "--by must be layers, parameters, time or type:ClassOfBlock",
        ),
        ("inspect nothing", "MODEL must be package.module:function or a config.json, got 'nothing'"),
        ("inspect models_of_a_test:mke", "has no function 'mke' (did you mean 'make'?)"),
        ("inspect no_such_module:make", "cannot import no_such_module"),
        ("inspect models_of_a_test:wrong", "returned int; it must return a model"),
        (
            "inspect none.json",
            "cannot read none.json: No such file or directory; expected the config.json of a Hugging",
        ),
        (
            "check models_of_a_test:alone",
            "does not return a batch; it must return (model, inputs, targets, loss_fn)",
        ),
        ("check models_of_a_test:without_loss", "has no loss; it must return (model, inputs, targets, loss_fn)"),
        ("check models_of_a_test:inputs_alone", "has no loss; it must return (model, inputs, targets, loss_fn)"),
        (
            "check models_of_a_test:swapped",
            "returned a function as the targets; it must return a model, (model, inputs)",
        ),
        ("profile models_of_a_test:alone", "does not return inputs"),
        ("inspect models_of_a_test:alone --stages 9", "has 2 units (0, 1), but 9 stages were requested"),
    ],
)
def test_models_that_cannot_be_loaded_are_one_error(words: str, message: str, models: Path, capsys: Capture) -> None:
    assert message in " ".join(call(words, capsys, code=2).split())


def test_what_the_users_code_raises_is_one_line_with_its_place(models: Path, capsys: Capture) -> None:
    (models / "raises.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(-1, 'x')\n")
    out = call("inspect raises:make", capsys, code=2)
    assert out.startswith("error: raises:make failed: TypeError: ")
    assert out.endswith(", at raises.py:4 in make; --traceback shows the full traceback\n")
    assert out.count("\n") == 1
    with pytest.raises(TypeError):
        run(["inspect", "raises:make", "--traceback"])
    (models / "broken.py").write_text("def make(:\n")
    assert "SyntaxError: invalid syntax (broken.py, line 1), at broken.py:1" in call(
        "check broken:make", capsys, code=2
    )

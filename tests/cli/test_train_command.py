"""`stageline train` as people use it: its flags, its help, its errors, and the config it trains with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.cli.app import run
from stageline.cli.train import as_settings
from stageline.train.config.config import Config
from stageline.train.config.io import Option, flag_value, options, read_config
from stageline.train.config.rules import GPT_UNITS

Capture = pytest.CaptureFixture[str]


class Trainers:
    """Takes the place of the trainer and keeps the configs it receives."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def __call__(self, config: Config) -> Trainers:
        self.configs.append(config)
        return self

    def run(self) -> None:
        pass

    def train_on(self, processes: int, config: Config) -> None:
        assert processes > 1
        self.configs.append(config)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Trainers:
    recorder = Trainers()
    for name, function, replacement in (("trainer", "Trainer", recorder), ("launch", "train_on", recorder.train_on)):
        module = ModuleType(f"stageline.train.{name}")
        setattr(module, function, replacement)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return recorder


def train(*words: str) -> int:
    return run(["train", *words])


def refused(capsys: Capture, *words: str) -> list[str]:
    """Return the lines of the error."""
    assert train(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_job_is_made_of_file_settings_and_flags_in_the_order_given(trainers: Trainers, capsys: Capture) -> None:
    Path("job.toml").write_text("[training]\nsteps = 7\nseed = 3\n")
    words = "--training.steps 8 --set training.steps=9 job.toml --model.dim=64 --checkpoint.load_step -1"
    assert train(*words.split(), "--sample.prompt", "def ", "--compile.enable", "--no-checkpoint.enable") == 0
    (config,) = trainers.configs
    settings = ["training.steps=9", "model.dim=64", "compile.enable=true", "checkpoint.enable=false"]
    assert config == Config.read("job.toml", *settings, "sample.prompt='def '")
    assert capsys.readouterr() == ("", "")
    assert train("--set=training.steps=9", "--training.steps", "8") == 0
    assert trainers.configs[-1].training.steps == 8
    assert train() == 0
    assert trainers.configs[-1] == Config()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--compile.enable", True),
        ("--compile.enable=true", True),
        ("--compile.enable true", True),
        ("--compile.enable=false", False),
        ("--compile.enable false", False),
        ("--compile.enable --no-compile.enable", False),
        ("--no-compile.enable --compile.enable job.toml", True),
    ],
)
def test_switches(words: str, value: bool, trainers: Trainers) -> None:
    Path("job.toml").write_text("")
    assert train(*words.split()) == 0
    assert trainers.configs[-1].compile.enable is value


@pytest.mark.parametrize("option", options().values(), ids=lambda option: option.key)
def test_every_option_is_a_flag_in_three_spellings(option: Option) -> None:
    text = flag_value(option.sample)
    wanted = read_config(None, [f"{option.key}={text}"])
    for words in ([f"--{option.key}", text], [f"--{option.key}={text}"], [f"--{option.key.replace('_', '-')}", text]):
        (setting,) = as_settings(words)
        assert read_config(None, [setting.removeprefix("--set=")]) == wanted


@given(st.lists(st.text() | st.sampled_from([f"--{key}" for key in options()]) | st.text().map("--".__add__)))
def test_no_words_are_lost(words: list[str]) -> None:
    """Whatever is typed is a file, a setting, a switch or an error."""
    rewritten = list(as_settings(words))
    assert bool(rewritten) == bool(words)
    for word in words:
        assert word.startswith("-") or any(word in result for result in rewritten)


def test_all_errors_of_words_and_file_are_reported_at_once(trainers: Trainers, capsys: Capture) -> None:
    Path("job.toml").write_text("[training]\nsteps = 0\n")
    words = "--trainig.seed 4 job.toml model.dim=3 --no-training.seed --chek --training.steps --job.description"
    lines = refused(capsys, *words.split(), "--model.dim=x", "--qqqqqq", "7", "-p", "second.toml")
    assert lines == [
        "error: 11 errors in the config:",
        "  'model.dim=3' is neither an option nor a .toml file; did you mean --set model.dim=3?",
        "  unknown option --chek; did you mean --check?",
        "  got two config files, job.toml and second.toml; pass only one",
        "  job.toml: training.steps must be an integer >= 1, got 0; for example steps = 800",
        "  unknown option --trainig.seed; did you mean --training.seed?",
        "  unknown option --no-training.seed; did you mean --training.seed?",
        "  --training.steps has no value; write --training.steps=800",
        "  --job.description has no value; write '--job.description=the first run'",
        '  model.dim must be an integer >= 1, got "x"; for example model.dim=64',
        "  unknown option --qqqqqq",
        "  unknown option -p",
    ]
    assert trainers.configs == []


def test_the_printed_config_is_the_one_of_the_words(trainers: Trainers, capsys: Capture) -> None:
    assert train("--print-config", "--training.steps", "7", "--job.description", 'say "hi"\n') == 0
    Path("printed.toml").write_text(capsys.readouterr().out)
    assert Config.read("printed.toml") == Config.read(None, "training.steps=7", 'job.description=say "hi"\n')
    assert trainers.configs == []


def test_a_check_reports_wrong_combinations_and_trains_nothing(trainers: Trainers, capsys: Capture) -> None:
    assert train("--check") == 0
    assert capsys.readouterr().out == "the config is valid\n"
    (line,) = refused(capsys, "--check", "--model.n_heads", "3")
    assert line.startswith("error: model.dim is 64, which is not a multiple of model.n_heads 3; use 63 or 66")
    assert refused(capsys, "--model.n_heads", "3") == [line]
    assert train("--check", "--print-config") == 0
    assert capsys.readouterr().err == "the config is valid\n"
    assert trainers.configs == []


def test_a_check_finds_what_the_run_would_refuse(capsys: Capture) -> None:
    """Without torch for the built-in model, and with it for what only it knows."""
    Path("mine.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))\n"
    )
    Path("full").mkdir()
    Path("full/file").touch()
    many = ("--parallelism.pipeline_parallel_degree", "40")
    (line,) = refused(capsys, "--check", *many)
    assert line.startswith("error: parallelism.pipeline_parallel_degree is 40, which makes 40 stages")
    assert "with model.n_layers 7, there are 11; use at most 11 ranks" in line
    assert refused(capsys, *many) == [line]  # the run says the same
    for words, expected in (
        ("--parallelism.pipeline_parallel_degree 8 --parallelism.pipeline_parallel_schedule zb-v", "makes 16 stages"),
        ("--parallelism.pipeline_parallel_degree 8 --parallelism.pipeline_parallel_chunks 2", "makes 16 stages"),
        ("--model.name mine:make --parallelism.pipeline_parallel_degree 40 --training.loss mse", "mine:make has 8"),
        ("--model.name module_that_is_not_there:make", "cannot import module_that_is_not_there"),
        ("--training.loss module_that_is_not_there:loss", "cannot import module_that_is_not_there"),
        ("--model.vocab_size 100", "model.vocab_size is 100"),
        (
            "--activation_checkpoint.mode selective --activation_checkpoint.modules foo",
            "matches no module of the model",
        ),
        ("--checkpoint.load_step 5", "has no checkpoint of step 5"),
        ("--checkpoint.initial_load_path nowhere", "which does not exist"),
        ("--job.dump_folder full", "contains other files but no run"),
    ):
        assert expected in "\n".join(refused(capsys, "--check", *words.split())), words
    for words in (
        "--parallelism.pipeline_parallel_degree 11",
        "--parallelism.data_parallel_replicate_degree 2",
        "--activation_checkpoint.mode selective --activation_checkpoint.modules blocks.*",
    ):
        assert train("--check", *words.split()) == 0, words
    assert not Path("outputs").exists()  # nothing is written


def test_the_units_of_the_built_in_model_are_known_without_building_it() -> None:
    from stageline.model.split import split
    from stageline.train.gpt import GPT

    for layers in (1, 3):
        model = GPT(vocab_size=7, length=4, dim=4, layers=layers, heads=2)
        assert len(split(model, 1).units) == layers + GPT_UNITS


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_the_terminal_and_has_every_option(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert train("job.toml", "--help") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    for option in options().values():
        flag = f"--[no-]{option.key}" if option.type is bool else f"--{option.key} <"
        assert sum(line.startswith(f"│ {flag}") for line in lines) == 1, flag
    shown = " ".join(out.replace("│", " ").split())
    for example in ("stageline train job.toml", "--set optimizer.lr=3e-4", "torchrun --nproc-per-node 4"):
        assert out.index(example) < out.index("╭")
    assert "KEY=VALUE" in shown
    assert all(option.help in shown for option in options().values())
    assert "Number of optimizer steps. [>= 1; default: 800]" in shown


def test_help_check_and_the_printed_config_leave_torch_alone() -> None:
    code = """
import sys
from stageline.cli.app import run
codes = [run(["train", *words.split()]) for words in ("--help", "--check", "--print-config", "--training.stps 3")]
import stageline as sl
sl.Config.read(None, "training.steps=3")
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("[0, 0, 0, 2] False\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("job.toml --training.lo", ["--training.local_batch_size", "--training.loss", "--training.loss_weights"]),
        ("--no-compile.e", ["--no-compile.enable"]),
        ("--pri", ["--print-config"]),
        ("--training.dtype b", ["bfloat16"]),
        ("--parallelism.pipeline_parallel_schedule zb-h", ["zb-h1", "zb-h2"]),
    ],
)
def test_flags_and_choices_are_completed(
    words: str, completions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    line = f"stageline train {words}"
    monkeypatch.setenv("_STAGELINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    run([])
    assert capsys.readouterr().out.split() == completions

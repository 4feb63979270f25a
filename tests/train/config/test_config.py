"""The configuration of a training job: reading, writing, errors and comparisons as a user sees them."""

from __future__ import annotations

import json
import math
import runpy
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.app import run
from stageline.common.checked_json import Range
from stageline.train.config.config import Config
from stageline.train.config.io import (
    FIXED,
    FREE,
    WARN,
    Option,
    differences,
    flag_value,
    from_dict,
    options,
    read_config,
    to_dict,
    toml_value,
    write_toml,
)
from stageline.train.config.ranks import close_degrees, open_degrees
from stageline.train.config.rules import find_errors, validate
from support.instances import examples

ROOT = Path(__file__).parents[3]
TEXTS = st.one_of(st.text(), st.text(st.sampled_from("\"'\\\n\r\t\x00\x7f#=[]é\u2028😀 a")))


def accepted_values(option: Option) -> st.SearchStrategy[Any]:
    """All values that an option accepts."""
    one: st.SearchStrategy[Any]
    limits = option.range or Range()
    if option.choices:
        one = st.sampled_from(option.choices)
    elif option.type is bool:
        one = st.booleans()
    elif option.type is str:
        one = TEXTS
    elif option.type is int:
        one = st.integers(*(int(limit) if math.isfinite(limit) else None for limit in limits[:2]))
    else:
        low, high = max(limits.minimum, limits.above), min(limits.maximum, limits.below)
        one = st.floats(
            low if math.isfinite(low) else None,
            high if math.isfinite(high) else None,
            exclude_min=math.isfinite(limits.above),
            exclude_max=math.isfinite(limits.below),
            allow_nan=False,
            allow_infinity=False,
        )
    return st.lists(one, max_size=3).map(tuple) if option.is_list else one


SETTINGS = st.lists(st.sampled_from(list(options())), max_size=12, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: accepted_values(options()[key]) for key in keys})
)


def config_with(settings: dict[str, Any]) -> Config:
    config = Config(parallelism=open_degrees())
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    close_degrees(config.parallelism)
    return config


def read_text(tmp_path: Path, text: str, *settings: str) -> Config:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode())
    return read_config(path, settings)


def refused(*settings: str) -> str:
    with pytest.raises(sl.StagelineError) as error:
        read_config(None, settings)
    return str(error.value)


@given(SETTINGS)
@settings(max_examples=examples(100))
def test_what_is_written_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    config = config_with(values)
    assert read_text(tmp_path_factory.getbasetemp(), write_toml(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert read_config(None, [f"{key}={toml_value(value)}" for key, value in values.items()]) == config


@given(SETTINGS)
@example({"model.name": 300 * "a"})  # longer than the name of a file may be
@example({"training.dataset_path": 300 * "a"})
@example({"job.dump_folder": 300 * "a"})
def test_values_that_a_file_can_hold_are_accepted(values: dict[str, Any]) -> None:
    """Only rules across options may fail, and their errors name at least one of the options that were set."""
    for error in find_errors(config_with(values)):
        assert any(key in error for key in values), error


def test_every_option_is_explained_with_its_bounds_choices_and_default() -> None:
    text = write_toml(Config.read(None, "training.steps=7"))
    assert tomllib.loads(text)["training"]["steps"] == 7
    lines = text.splitlines()
    assert "steps = 7  # default: 800" in lines
    assert "seed = 0  # default" in lines
    assert "# Must be one of none, selective, full." in lines
    assert "# Must be a number >= 0 and < 1." in lines
    prose = " ".join(line.removeprefix("# ") for line in lines)
    assert all(option.help in prose for option in options().values())


def test_options_accept_their_defaults_and_examples() -> None:
    for option in options().values():
        assert option.accept(option.default) == option.default
        assert option.accept(option.sample) == option.sample
        assert option.parse(flag_value(option.sample)) == option.sample
        assert option.help.endswith("."), option.key


@pytest.mark.parametrize(
    "option",
    [option for option in options().values() if option.range and not option.is_list],
    ids=lambda option: option.key,
)
def test_numbers_are_accepted_within_their_bounds_and_refused_beyond(option: Option) -> None:
    def neighbour(edge: float, towards: float) -> float:
        if not math.isfinite(edge):
            return edge
        return int(edge + math.copysign(1, towards)) if option.type is int else math.nextafter(edge, towards)

    assert option.range
    low, high, above, below = option.range
    inside = [low, high, neighbour(above, math.inf), neighbour(below, -math.inf)]
    outside = [above, below, neighbour(low, -math.inf), neighbour(high, math.inf)]
    for value in filter(math.isfinite, inside):
        assert option.get(read_config(None, [f"{option.key}={value}"])) == value
    for value in filter(math.isfinite, outside):
        message = refused(f"{option.key}={value}")
        assert message.startswith(f"{option.key} must be {option.expected}, got {value}; for example ")


WRONG: dict[str, Any] = {"int": 5, "float": 1.5, "bool": True, "str": "ten", "list": ["a", 1], "table": {"a": 1}}


@pytest.mark.parametrize("option", options().values(), ids=lambda option: option.key)
def test_values_of_another_type_are_refused_with_file_option_value_type_and_example(
    option: Option, tmp_path: Path
) -> None:
    fits = {"int", "float"} if option.type is float else {option.type.__name__}
    for name in WRONG.keys() - (set() if option.is_list or option.choices else fits):
        text = "{a = 1}" if name == "table" else toml_value(WRONG[name])
        with pytest.raises(sl.StagelineError) as error:
            read_text(tmp_path, f"[{option.section}]\n{option.name} = {text}\n")
        message = str(error.value)
        assert message.startswith(f"{tmp_path / 'job.toml'}: {option.key} must be {option.expected}, got ")
        assert name == "table" or f"got {text}" in message
        assert message.endswith(f"; for example {option.name} = {toml_value(option.sample)}")


def test_an_integer_is_a_number_and_a_boolean_is_not(tmp_path: Path) -> None:
    lr = read_text(tmp_path, "[optimizer]\nlr = 1\n").optimizer.lr
    assert (lr, type(lr)) == (1.0, float)
    assert "optimizer.lr must be a number > 0, got true" in refused("optimizer.lr=true")
    assert "training.steps must be an integer >= 1, got 1000.0" in refused("training.steps=1e3")


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("job.dump_folder=runs/a", "job.dump_folder", "runs/a"),
        ('job.dump_folder="runs/a"', "job.dump_folder", "runs/a"),
        ("job.description=a = b", "job.description", "a = b"),
        ("job.description=300", "job.description", "300"),
        ('job.description="1"\nx = 2', "job.description", '"1"\nx = 2'),
        ("job.description=", "job.description", ""),
        ("sample.prompt=def ", "sample.prompt", "def "),
        ("model.dropout=0.1", "model.dropout", 0.1),
        ("model.dropout=.5", "model.dropout", 0.5),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("training.steps=1_000", "training.steps", 1000),
        ("compile.enable=true", "compile.enable", True),
        ('activation_checkpoint.modules=["blocks.*.mlp"]', "activation_checkpoint.modules", ("blocks.*.mlp",)),
        ("activation_checkpoint.modules=blocks.*.mlp,head", "activation_checkpoint.modules", ("blocks.*.mlp", "head")),
        ("activation_checkpoint.modules=", "activation_checkpoint.modules", ()),
        ("training.loss_weights=1,.5", "training.loss_weights", (1.0, 0.5)),
    ],
)
def test_settings_are_toml_or_plain_text(setting: str, key: str, value: Any) -> None:
    assert read_config(None, [setting]) == config_with({key: value})


def test_the_last_setting_wins_over_earlier_ones_over_the_file_over_defaults(tmp_path: Path) -> None:
    text = "[training]\nsteps = 7\nseed = 3\n"
    config = read_text(tmp_path, text, "training.steps=8", "model.dim=64", "training.steps=9")
    assert (config.training.steps, config.training.seed, config.model.dim) == (9, 3, 64)
    assert config.training.seq_len == Config().training.seq_len


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=1", "did you mean training.steps? (or validation.steps)"),
        ("optimizer.seed=1", "did you mean training.seed?"),
        ("training.stps=1", "did you mean training.steps?"),
        ("trainig.steps=1", "did you mean training.steps?"),
        ("trainig.stepz=1", "did you mean training.steps?"),
        ("validaton.steps=1", "did you mean validation.steps?"),
        ("learning.max_nrm=1", "did you mean training.max_norm?"),
        ("training.global-batch-size=1", "did you mean training.global_batch_size?"),
        ("qqqqqq=1", "unknown option qqqqqq"),
        ("training.dtype=bfloat6", "must be one of float32, bfloat16, got \"bfloat6\" (did you mean 'bfloat16'?)"),
        ("=1", "does not name an option; write section.name=value"),
        ("--training.steps", "--training.steps has no value; write --training.steps=800"),
        ("--training.stps=3", "unknown option --training.stps; did you mean --training.steps?"),
        ("training.steps", "training.steps has no value; write training.steps=800"),
        ("optimizer.lr=nan", "optimizer.lr must be a number > 0, got nan"),
        (f"optimizer.lr={'9' * 400}", "optimizer.lr must be a number > 0, got 9999"),
        (
            "training.seed=9223372036854775808",
            "from 0 to 9223372036854775807, got 9223372036854775808",
        ),
        ("job.description=\udcff", "must be valid Unicode"),
        ('activation_checkpoint.modules=["a"', "which is not TOML"),
    ],
)
def test_wrong_settings_are_refused_with_a_suggestion(setting: str, message: str) -> None:
    assert message in refused(setting)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 5\n", "steps = 5 is not in a section; did you mean training.steps?"),
        (
            "[trainin]\nsteps = 5\n",
            "unknown section [trainin] (did you mean 'training'?); the sections are job, model,",
        ),
        ("[training]\nstep = 5\n", "unknown option training.step; did you mean training.steps?"),
        ("[compile]\nsteps = 5\n", "unknown option compile.steps; did you mean training.steps?"),
        ("[training.optimizer]\nlr = 5\n", "unknown option training.optimizer"),
        ("training = 5\n", "training is a section, not an option: write [training]"),
        (
            "[training]\nsteps = ten\n",
            "job.toml, line 2, column 9: invalid value; strings need quotes",
        ),
        ("[training\n", "job.toml, line 1, column 10: expected ']'"),
        ("[job]\ndescription = 'a", "job.toml, line 2, column 17: "),
    ],
)
def test_wrong_files_are_refused_with_the_place_and_a_suggestion(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(sl.StagelineError) as error:
        read_text(tmp_path, text)
    assert str(tmp_path / "job.toml") in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"[job]\ndescription = '\xff'\n")
    for name, message in {
        "job.tml": "No such file or directory (did you mean '",
        "nowhere/job.toml": "No such file",
        "job.toml": "is not valid UTF-8: byte 21 is 0xff",
        ".": "Is a directory",
    }.items():
        with pytest.raises(sl.StagelineError) as error:
            read_config(tmp_path / name)
        assert message in str(error.value)


def test_all_errors_are_reported_at_once_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(sl.StagelineError) as error:
        read_text(tmp_path, "[training]\nsteps = 0\nsed = 1\n[modl]\n", "model.dim=x", "nothing=3")
    lines = str(error.value).splitlines()
    assert lines[0] == "5 errors in the config:"
    for line, key in zip(lines[1:], ("training.steps", "training.sed", "[modl]", "model.dim", "nothing"), strict=True):
        assert line.startswith("  ")
        assert key in line


def test_differences_are_listed_in_words_and_some_are_ignored() -> None:
    now = Config.read(None, "training.seed=1", "job.dump_folder=b", "compile.enable=true")
    expected = [
        'job.dump_folder is "b" but was "outputs"',
        "training.seed is 1 but was 0",
        "compile.enable is true but was false",
    ]
    assert differences(now, Config()) == expected
    assert differences(now, Config(), ignore=["job", "compile.enable"]) == expected[1:2]
    assert differences(now, now) == []
    with pytest.raises(sl.StagelineError, match=r"did you mean training\.seed"):
        differences(now, now, ignore=["training.sed"])


def test_what_a_resumed_run_may_change() -> None:
    assert set(options()) == FIXED | WARN | FREE
    assert not FIXED & WARN
    sections = {name: {key for key in options() if key.startswith(f"{name}.")} for name in to_dict(Config())}
    assert sections["model"] | sections["lr_scheduler"] <= FIXED
    assert sections["optimizer"] - {"optimizer.implementation"} <= FIXED
    assert {"training.dataset", "training.dataset_path", "training.seq_len", "training.seed", "training.dtype"} <= FIXED
    assert {"training.loss", "training.mixed_precision_param", "validation.fraction"} <= FIXED
    assert {"training.steps"} | sections["compile"] <= WARN
    assert (
        sections["checkpoint"] | sections["metrics"] | sections["job"] | sections["comm"] | sections["sample"] <= FREE
    )
    assert not sections["parallelism"] & FIXED


def test_plain_data_of_older_and_newer_versions() -> None:
    assert from_dict({}) == Config()
    assert from_dict({"training": {"steps": 5}}) == Config.read(None, "training.steps=5")
    with pytest.raises(
        sl.StagelineError, match=r"does not know warp, training\.warp: a newer version wrote this config"
    ):
        from_dict({"training": {"warp": 9, "steps": 5}, "warp": {"speed": 9}})
    with pytest.raises(sl.StagelineError, match="training is a section, not an option"):
        from_dict({"training": 5})
    with pytest.raises(sl.StagelineError, match="must be a dict of sections, got 5"):
        from_dict(5)  # type: ignore[arg-type]
    with pytest.raises(sl.StagelineError, match=r'training\.steps must be an integer >= 1, got "5"'):
        from_dict({"training": {"steps": "5"}})


def test_python_reads_writes_and_compares_configs(tmp_path: Path) -> None:
    config = sl.Config.read(None, "training.steps=5", "model.dropout=0.1")
    (tmp_path / "a.toml").write_text(config.to_toml())
    assert sl.Config.read(tmp_path / "a.toml") == config
    assert sl.Config.from_dict(config.to_dict()) == config
    assert sl.Config.read(tmp_path / "a.toml", "training.steps=6") != config


def test_a_hub_that_cannot_be_reached_is_one_fast_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    for variable, value in (("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(variable, value)
    began = time.monotonic()
    name = "nobody/Nothing-1B"
    for option in ("model.name", "checkpoint.initial_load_path"):
        values = ("parallelism.launcher=threads", "model.dim=16", "job.dump_folder=hub", f"{option}={name}")
        assert run(["train", *(f"--{value}" for value in values)]) == 2
        error = capsys.readouterr().err
        assert f"there is no folder {name}, and the Hugging Face hub at http://127.0.0.1:9 cannot be reached" in error
        assert "Connection refused" in error
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("model.dim=100 model.n_heads=8", "96 or 104 for model.dim, or 5 or 10 for model.n_heads"),
        (f"model.dim={2**61 - 1} model.n_heads=1000000", f"{2**61 - 1}, which is not a multiple of"),
        ("model.name=gpd", "model.name is \"gpd\"; it must be gpt (did you mean 'gpt'?), an existing"),
        ("model.name=broken", "broken/config.json has no model_type"),
        ("model.tokenizer_path=byts", "use a tokenizer.json, or auto, bytes, python (did you mean 'bytes'?)"),
        ("training.dataset=pyton", "one of python, text, memmap, dataset (did you mean 'python'?)"),
        ("training.dataset=text", "training.dataset_path is empty; set it"),
        ("training.dataset=text training.dataset_path=here.txt,there.txt", '"there.txt", which does not exist'),
        ("training.dataset_path=here.txt", "set training.dataset to text, memmap or dataset"),
        ("validation.dataset_path=there.txt", 'validation.dataset_path contains "there.txt"'),
        ("validation.dataset_path=here.txt validation.enable=false", "enable validation, or remove the path"),
        ("training.loss=mae", "one of cross_entropy, weighted_cross_entropy, mse, own (did you mean 'mse'?)"),
        ("training.loss=weighted_cross_entropy", "training.loss_weights is empty; set one weight per class"),
        ("training.loss_weights=1,2", "has 2 weights, but training.loss is cross_entropy, which does not use them"),
        ("training.local_batch_size=7", "does not divide training.local_batch_size 7; use 1 or 7 for the"),
        ("training.local_batch_size=1", "does not divide training.local_batch_size 1; use 1 for the"),
        ("training.global_batch_size=40", "not a multiple of training.local_batch_size 16; use 32 or 48, or 0"),
        ("training.global_batch_size=48 parallelism.data_parallel_replicate_degree=2",
         "local_batch_size 16 × 2 replicas (parallelism.data_parallel_replicate_degree); use 32 or 64"),
        ("lr_scheduler.decay_ratio=-0.5", "lr_scheduler.decay_ratio is -0.5; it must be -1, or a fraction"),
        ("lr_scheduler.decay_ratio=0.975", "use at most 20 warm-up steps, or at least 1201 steps"),
        ("activation_checkpoint.mode=selective", "for example activation_checkpoint.modules=blocks.*.mlp"),
        ("activation_checkpoint.modules=head", "mode is none; use selective, or remove the modules"),
        ("parallelism.pipeline_parallel_schedule=zb-w", "no schedule family is named 'zb-w' (did you mean 'zb-v'?)"),
        ("parallelism.pipeline_parallel_schedule=forward-only", "for inference only; use a family that trains"),
        ("parallelism.pipeline_parallel_schedule=dualpipe training.local_batch_size=8 "
         "parallelism.pipeline_parallel_degree=4", "got 4; nearest: 8"),
        ("parallelism.pipeline_parallel_schedule=1f1b parallelism.pipeline_parallel_chunks=2",
         "is 1f1b, which has no option for chunks; use 0, or a family with chunks"),
        ("parallelism.pipeline_parallel_schedule_csv=there.csv", "cannot read there.csv: No such file"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv parallelism.pipeline_parallel_schedule=gpipe",
         "parallelism.pipeline_parallel_schedule is gpipe; set only one of them"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv parallelism.pipeline_parallel_degree=2",
         "a schedule for 4 ranks, but parallelism.pipeline_parallel_degree is 2; use 4"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv training.local_batch_size=8",
         "a schedule for 8 microbatches, but training.local_batch_size 8 / "),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_with_a_way_out(settings: str, message: str) -> None:
    Path("here.txt").write_text("text")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{}")
    sl.schedule("1f1b", 4, 8).write("1f1b.csv")
    (error,) = find_errors(Config.read(None, *settings.split(" ")))
    assert message in error


@pytest.mark.parametrize(
    "assignments",
    [
        "training.steps=1",
        "model.name=some.module:make model.dim=100 model.n_heads=8",
        "training.loss=weighted_cross_entropy training.loss_weights=1,2",
        "training.dataset=text training.dataset_path=here.txt,here.txt",
        "training.dataset=some.module:make training.dataset_path=anything",
        "parallelism.pipeline_parallel_schedule=Interleaved1F1B parallelism.pipeline_parallel_chunks=2",
        "parallelism.pipeline_parallel_schedule_csv=1f1b.csv",
        "lr_scheduler.decay_ratio=0.2 activation_checkpoint.mode=selective activation_checkpoint.modules=head",
    ],
)
def test_options_that_go_together_are_accepted(assignments: str) -> None:
    Path("here.txt").write_text("text")
    sl.schedule("1f1b", 4, 8).write("1f1b.csv")
    validate(Config.read(None, *assignments.split(" ")))


def test_wrong_values_set_in_python_are_refused() -> None:
    config = Config()
    config.training.steps, config.model.dim = 0, "wide"  # type: ignore[assignment]
    errors = [error.split(";")[0] for error in find_errors(config)]
    assert errors == ['model.dim must be an integer >= 1, got "wide"', "training.steps must be an integer >= 1, got 0"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_example_configs_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = Config.read(path)
    validate(config)
    assert config != Config()
    assert config.job.description


def test_the_page_lists_all_options_as_they_are() -> None:
    module = runpy.run_path(str(ROOT / "docs/make_config.py"))
    assert module["PAGE"].read_text() == module["page"](), "run python docs/make_config.py"
    assert module["tables"]().count("\n| `") == len(options())

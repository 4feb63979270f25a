"""The configuration of a training job: what is read, written, refused and compared, in the words of a user."""

from __future__ import annotations

import json
import math
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageline as sl
from stageline.train.config.config import Config
from stageline.train.config.io import (
    FIXED,
    FREE,
    WARN,
    argument,
    differences,
    from_dict,
    read_config,
    to_dict,
    write_toml,
)
from stageline.train.config.options import Option, options, value_text
from stageline.train.config.rules import mistakes, validate

ROOT = Path(__file__).parents[2]
TEXTS = st.one_of(st.text(), st.text(st.sampled_from("\"'\\\n\r\t\x00\x7f#=[]é\u2028😀 a")))


def values(option: Option) -> st.SearchStrategy[Any]:
    """All values that an option takes."""
    one: st.SearchStrategy[Any]
    if option.choices:
        one = st.sampled_from(option.choices)
    elif option.type is bool:
        one = st.booleans()
    elif option.type is str:
        one = TEXTS
    elif option.type is int:
        low = None if option.minimum is None else int(option.minimum)
        one = st.integers(low, None if option.maximum is None else int(option.maximum))
    else:
        low_, high_ = (
            option.minimum if option.above is None else option.above,
            option.maximum if option.below is None else option.below,
        )
        one = st.floats(low_, high_, exclude_min=option.above is not None, exclude_max=option.below is not None,
                        allow_nan=False, allow_infinity=False)  # fmt: skip
    return st.lists(one, max_size=3).map(tuple) if option.many else one


SETTINGS = st.lists(st.sampled_from(list(options())), max_size=12, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: values(options()[key]) for key in keys})
)


def configured(said: dict[str, Any]) -> Config:
    """The config with some values of its own."""
    config = Config()
    for key, value in said.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def read_text(tmp_path: Path, text: str, *sets: str) -> Config:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode())
    return read_config(path, sets)


def refused(*sets: str) -> str:
    with pytest.raises(sl.StagelineError) as error:
        read_config(None, sets)
    return str(error.value)


@given(SETTINGS)
def test_what_is_written_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, said: dict[str, Any]) -> None:
    config = configured(said)
    assert read_text(tmp_path_factory.getbasetemp(), write_toml(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert read_config(None, [f"{key}={value_text(value)}" for key, value in said.items()]) == config


@given(SETTINGS)
def test_a_config_that_files_can_say_has_no_field_that_is_refused(said: dict[str, Any]) -> None:
    """What remains are options that do not go together, which name at least one of those that were set."""
    for sentence in mistakes(configured(said)):
        assert any(key in sentence for key in said), sentence


def test_every_option_is_explained_with_its_bounds_choices_and_default() -> None:
    text = write_toml(Config.read(None, "training.steps=7"))
    assert tomllib.loads(text)["training"]["steps"] == 7
    lines = text.splitlines()
    assert "steps = 7  # default: 200" in lines
    assert "seed = 0  # default" in lines
    assert "# It takes one of none, selective, full." in lines
    assert "# It takes a number from 0 to below 1." in lines
    prose = " ".join(line.removeprefix("# ") for line in lines)
    assert all(option.help in prose for option in options().values())


def test_defaults_are_values_that_the_options_take() -> None:
    for option in options().values():
        assert option.accept(option.default) == option.default
        assert option.accept(option.sample) == option.sample
        assert option.parse(argument(option.sample)) == option.sample
        assert option.help.endswith("."), option.key


@pytest.mark.parametrize(
    "option", [each for each in options().values() if each.bounds and not each.many], ids=lambda option: option.key
)
def test_numbers_are_taken_within_their_bounds_and_refused_beyond(option: Option) -> None:
    def neighbour(edge: float, towards: float) -> float:
        return int(edge + math.copysign(1, towards)) if option.type is int else math.nextafter(edge, towards)

    inside = [edge for edge in (option.minimum, option.maximum) if edge is not None]
    inside += [neighbour(option.above, math.inf)] if option.above is not None else []
    inside += [neighbour(option.below, -math.inf)] if option.below is not None else []
    outside = [edge for edge in (option.above, option.below) if edge is not None]
    outside += [neighbour(option.minimum, -math.inf)] if option.minimum is not None else []
    outside += [neighbour(option.maximum, math.inf)] if option.maximum is not None else []
    for value in inside:
        assert getattr(getattr(read_config(None, [f"{option.key}={value}"]), option.section), option.name) == value
    for value in outside:
        assert f"{option.key} is {value}; it takes {option.takes}, like " in refused(f"{option.key}={value}")


WRONG: dict[str, Any] = {"int": 5, "float": 1.5, "bool": True, "str": "ten", "list": ["a", 1], "table": {"a": 1}}


@pytest.mark.parametrize("option", options().values(), ids=lambda option: option.key)
def test_values_of_another_type_are_refused_with_file_option_value_type_and_example(
    option: Option, tmp_path: Path
) -> None:
    fits = {"int", "float"} if option.type is float else {option.type.__name__}
    for name in WRONG.keys() - (set() if option.many or option.choices else fits):
        text = "{a = 1}" if name == "table" else value_text(WRONG[name])
        with pytest.raises(sl.StagelineError) as error:
            read_text(tmp_path, f"[{option.section}]\n{option.name} = {text}\n")
        said = str(error.value)
        assert said.startswith(f"{tmp_path / 'job.toml'}: {option.key} is ")
        assert name == "table" or f" is {text}" in said
        assert f"it takes {option.takes}" in said
        assert option.choices or said.endswith(f", like {option.name} = {value_text(option.sample)}")


def test_whole_numbers_are_numbers_and_truth_is_not(tmp_path: Path) -> None:
    lr = read_text(tmp_path, "[optimizer]\nlr = 1\n").optimizer.lr
    assert (lr, type(lr)) == (1.0, float)
    assert "optimizer.lr is true; it takes a number above 0" in refused("optimizer.lr=true")
    assert "training.steps is 1e3, no whole number" in refused("training.steps=1e3")


@pytest.mark.parametrize(
    ("said", "key", "value"),
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
def test_settings_are_toml_or_bare_text(said: str, key: str, value: Any) -> None:
    assert read_config(None, [said]) == configured({key: value})


def test_the_last_setting_wins_over_earlier_ones_over_the_file_over_defaults(tmp_path: Path) -> None:
    text = "[training]\nsteps = 7\nseed = 3\n"
    config = read_text(tmp_path, text, "training.steps=8", "model.dim=64", "training.steps=9")
    assert (config.training.steps, config.training.seed, config.model.dim) == (9, 3, 64)
    assert config.training.seq_len == Config().training.seq_len


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("steps=1", "did you mean training.steps? (or validation.steps)"),
        ("optimizer.seed=1", "did you mean training.seed?"),
        ("training.stps=1", "did you mean training.steps?"),
        ("trainig.steps=1", "did you mean training.steps?"),
        ("trainig.stepz=1", "did you mean training.steps?"),
        ("validaton.steps=1", "did you mean validation.steps?"),
        ("learning.max_nrm=1", "did you mean training.max_norm?"),
        ("training.global-batch-size=1", "did you mean training.global_batch_size?"),
        ("qqqqqq=1", "there is no option qqqqqq"),
        ("training.dtype=bfloat6", "it takes one of float32, bfloat16 (did you mean 'bfloat16'?)"),
        ("=1", "names no option; write it as section.key=value"),
        ("training.steps", "training.steps has no value; write it as training.steps=200"),
        ("optimizer.lr=nan", "optimizer.lr is nan, not finite"),
        (f"optimizer.lr={'9' * 400}", ", too large for a number; it takes a number above 0"),
        ("training.seed=9223372036854775808", "it takes a whole number from 0 to 2**63 - 1"),
        ("job.description=\udcff", "not valid Unicode"),
        ('activation_checkpoint.modules=["a"', "no list in TOML"),
    ],
)
def test_settings_that_say_nothing_known_are_refused_with_what_was_meant(said: str, meant: str) -> None:
    assert meant in refused(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = 5\n", "steps = 5 stands outside of a section; did you mean training.steps?"),
        ("[trainin]\nsteps = 5\n", "there is no section [trainin] (did you mean 'training'?); there are job, model,"),
        ("[training]\nstep = 5\n", "there is no option training.step; did you mean training.steps?"),
        ("[compile]\nsteps = 5\n", "there is no option compile.steps; did you mean training.steps?"),
        ("[training.optimizer]\nlr = 5\n", "there is no option training.optimizer"),
        ("training = 5\n", "training is a section and no option: write [training]"),
        (
            "[training]\nsteps = ten\n",
            "job.toml is no TOML at line 2, column 9: invalid value; a text stands in quotes",
        ),
        ("[training\n", "job.toml is no TOML at line 1, column 10: expected ']'"),
        ("[job]\ndescription = 'a", "job.toml is no TOML at line 2, column 17: "),
    ],
)
def test_files_are_refused_with_the_place_and_what_was_meant(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(sl.StagelineError) as error:
        read_text(tmp_path, text)
    assert str(tmp_path / "job.toml") in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"[job]\ndescription = '\xff'\n")
    for name, said in {
        "job.tml": "No such file or directory (did you mean '",
        "nowhere/job.toml": "No such file",
        "job.toml": "is no text in UTF-8: byte 21 is 0xff",
        ".": "Is a directory",
    }.items():
        with pytest.raises(sl.StagelineError) as error:
            read_config(tmp_path / name)
        assert said in str(error.value)


def test_all_mistakes_are_said_at_once_each_in_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(sl.StagelineError) as error:
        read_text(tmp_path, "[training]\nsteps = 0\nsed = 1\n[modl]\n", "model.dim=x", "nothing=3")
    lines = str(error.value).splitlines()
    assert lines[0] == "5 mistakes in the config:"
    for line, said in zip(lines[1:], ("training.steps", "training.sed", "[modl]", "model.dim", "nothing"), strict=True):
        assert line.startswith("  ")
        assert said in line


def test_differences_are_said_in_words_and_some_are_ignored() -> None:
    now = Config.read(None, "training.seed=1", "job.dump_folder=b", "compile.enable=true")
    said = [
        'job.dump_folder is "b" and was "outputs"',
        "training.seed is 1 and was 0",
        "compile.enable is true and was false",
    ]
    assert differences(now, Config()) == said
    assert differences(now, Config(), ignore=["job", "compile.enable"]) == said[1:2]
    assert differences(now, now) == []
    with pytest.raises(sl.StagelineError, match=r"did you mean training\.seed"):
        differences(now, now, ignore=["training.sed"])


def test_what_may_change_when_a_run_goes_on() -> None:
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
    with pytest.raises(sl.StagelineError, match="training is a section and no option"):
        from_dict({"training": 5})
    with pytest.raises(sl.StagelineError, match="is a dict of sections, got 5"):
        from_dict(5)  # type: ignore[arg-type]
    with pytest.raises(sl.StagelineError, match=r'training\.steps is "5", a text'):
        from_dict({"training": {"steps": "5"}})


def test_python_reads_writes_and_compares_configs(tmp_path: Path) -> None:
    config = sl.Config.read(None, "training.steps=5", "model.dropout=0.1")
    (tmp_path / "a.toml").write_text(config.to_toml())
    assert sl.Config.read(tmp_path / "a.toml") == config
    assert sl.Config.from_dict(config.to_dict()) == config
    assert sl.Config.read(tmp_path / "a.toml", "training.steps=6") != config


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("model.dim=100 model.n_heads=8", "96 or 104 for model.dim, or 5 or 10 for model.n_heads"),
        (f"model.dim={2**61 - 1} model.n_heads=1000000", f"{2**61 - 1} and model.n_heads is 1000000, which does not"),
        ("model.name=gpd", "model.name is \"gpd\"; it takes gpt (did you mean 'gpt'?), a config.json"),
        ("model.name=broken", "broken/config.json has no model_type"),
        ("model.tokenizer_path=byts", "there is no such file; give a tokenizer.json, or bytes (did you mean 'bytes'?)"),
        ("training.dataset=pyton", "one of python, text, memmap, dataset (did you mean 'python'?)"),
        ("training.dataset=text", "training.dataset_path is empty; say where the data is"),
        ("training.dataset=text training.dataset_path=here.txt,there.txt", 'names "there.txt", and there is no such'),
        ("training.dataset_path=here.txt", "training.dataset is text, memmap or dataset"),
        ("validation.dataset_path=there.txt", 'validation.dataset_path names "there.txt"'),
        ("validation.dataset_path=here.txt validation.enable=false", "enable it, or leave the path out"),
        ("training.loss=mae", "it takes one of cross_entropy, weighted_cross_entropy, mse, own (did you mean 'mse'?)"),
        ("training.loss=weighted_cross_entropy", "training.loss_weights is empty; give one weight for each class"),
        ("training.loss_weights=1,2", "has 2 weights, and training.loss is cross_entropy, which has no use for them"),
        ("training.local_batch_size=7", "leaves 1 of the 7 samples of training.local_batch_size; take 1 or 7 for the"),
        ("training.local_batch_size=1", "is more than the 1 samples of training.local_batch_size; take 1 for the"),
        ("training.global_batch_size=40", "no multiple of training.local_batch_size 16; take 32 or 48, or 0"),
        ("training.global_batch_size=48 parallelism.data_parallel_replicate_degree=2",
         "local_batch_size 16 × 2 replicas (parallelism.data_parallel_replicate_degree); take 32 or 64"),
        ("lr_scheduler.decay_ratio=-0.5", "lr_scheduler.decay_ratio is -0.5; it takes -1, or a share"),
        ("lr_scheduler.decay_ratio=0.95", "take up to 10 for the warm-up, or at least 601 for the steps"),
        ("activation_checkpoint.mode=selective", "name modules, like activation_checkpoint.modules=blocks.*.mlp"),
        ("activation_checkpoint.modules=head", "mode is none; take selective, or leave the modules out"),
        ("parallelism.pipeline_parallel_schedule=zb-w", "no schedule family is named 'zb-w' (did you mean 'zb-v'?)"),
        ("parallelism.pipeline_parallel_schedule=forward-only", "which is for inference; take one that trains"),
        ("parallelism.pipeline_parallel_schedule=dualpipe training.local_batch_size=8", "got 4; nearest: 8"),
        ("parallelism.pipeline_parallel_schedule=1f1b parallelism.pipeline_parallel_chunks=2",
         "is 1f1b, which leaves no choice; take 0, or a family that has chunks"),
        ("parallelism.pipeline_parallel_schedule_csv=there.csv", "cannot read there.csv: No such file"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv parallelism.pipeline_parallel_schedule=gpipe",
         "parallelism.pipeline_parallel_schedule is gpipe; leave one of them out"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv parallelism.pipeline_parallel_degree=2",
         "a schedule for 4 ranks, and parallelism.pipeline_parallel_degree is 2; take 4"),
        ("parallelism.pipeline_parallel_schedule_csv=1f1b.csv training.local_batch_size=8",
         "a schedule for 8 microbatches, and training.local_batch_size 8 / "),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_with_what_would(sets: str, said: str) -> None:
    Path("here.txt").write_text("text")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{}")
    sl.schedule("1f1b", 4, 8).write("1f1b.csv")
    found = mistakes(Config.read(None, *sets.split(" ")))
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "sets",
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
def test_options_that_go_together_are_taken(sets: str) -> None:
    Path("here.txt").write_text("text")
    sl.schedule("1f1b", 4, 8).write("1f1b.csv")
    validate(Config.read(None, *sets.split(" ")))


def test_fields_that_python_set_wrongly_are_refused_too() -> None:
    config = Config()
    config.training.steps, config.model.dim = 0, "wide"  # type: ignore[assignment]
    found = [sentence.split(";")[0] for sentence in mistakes(config)]
    assert found == ['model.dim is "wide", a text', "training.steps is 0"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_read_and_go_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = Config.read(path)
    validate(config)
    assert config != Config()
    assert config.job.description


def test_the_page_lists_all_options_as_they_are() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_config.py"))
    assert made["PAGE"].read_text() == made["page"](), "run python docs/make_config.py"
    assert made["tables"]().count("\n| `") == len(options())

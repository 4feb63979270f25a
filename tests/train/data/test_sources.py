"""Data sets, functions, validation data, batches, and whether data matches a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline import StagelineError
from stageline.train.config.config import Config
from stageline.train.data import Indexed, Items, Loader, Source, Stream, Tokens, check_same, open_data, split
from stageline.train.data.source import collate
from support.instances import examples
from support.texts import job, text_of, tokens_of, train_tokenizer


def parts(config: Config) -> tuple[Indexed, Indexed]:
    data = open_data(config)
    assert not isinstance(data.train, Stream)
    assert data.validation is not None
    assert not isinstance(data.validation, Stream)
    return data.train, data.validation


# Data sets


def write_lines(path: str, rows: list[Any]) -> None:
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def test_lines_of_json_are_documents() -> None:
    write_lines("a.jsonl", [{"text": "one\u2028line", "n": 1}, {"text": None}, {"text": "two"}])
    config = job("dataset", "a.jsonl", validation__enable=False)
    assert bytes(tokens_of(open_data(config))) == "one\u2028line".encode() + b"\xfftwo"
    config.training.dataset_column = "txt"
    with pytest.raises(StagelineError, match=r"line 1 of a\.jsonl has no column 'txt' \(did you mean 'text'\?\)"):
        open_data(config)
    Path("a.jsonl").write_text('{"text": "a"}\n{"text"\n')
    config.training.dataset_column = "text"
    with pytest.raises(StagelineError, match=r"line 2 of a\.jsonl is not JSON"):
        open_data(config)


def test_a_column_of_tokens_is_taken_as_it_is() -> None:
    write_lines("a.jsonl", [{"input_ids": [1, 2, 70_000]}, {"input_ids": []}, {"input_ids": [4, 5, 6]}])
    config = job("dataset", "a.jsonl", training__dataset_column="input_ids", validation__enable=False)
    with pytest.raises(StagelineError, match=r"the vocabulary size of .* is unknown"):
        open_data(config)
    config.model.vocab_size = 70_001
    data = open_data(config)
    assert tokens_of(data) == [1, 2, 70_000, 4, 5, 6]
    assert data.tokenizer is None
    write_lines("a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": "text"}])
    with pytest.raises(StagelineError, match=r"a\.jsonl contains <U4"):
        open_data(config)


def test_another_column_is_other_data() -> None:
    write_lines("a.jsonl", [{"text": "the stage", "other": "of the line"}])
    train_tokenizer()
    config = job("dataset", "a.jsonl", model__tokenizer_path="tokenizer.json", validation__enable=False, seq_len=1)
    first = open_data(config, cache="kept")
    config.training.dataset_column = "other"
    second = open_data(config, cache="kept")
    assert first.tokenizer is not None
    assert [first.tokenizer.decode(tokens_of(data)) for data in (first, second)] == ["the stage", "of the line"]
    assert first.train.fingerprint != second.train.fingerprint


def test_what_is_no_data_set_is_told_what_one_is() -> None:
    Path("folder").mkdir()
    Path("folder/a.txt").write_text("hello")
    for path in ("folder", "folder/a.txt", "nowhere"):
        with pytest.raises(StagelineError, match=r"a folder written by save_to_disk, or \.jsonl or \.parquet files"):
            open_data(job("dataset", path))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("saved").mkdir()
    Path("saved/dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(StagelineError, match=r"the dataset saved needs datasets, .*; run pip install datasets"):
        open_data(job("dataset", "saved"))
    Path("a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(StagelineError, match=r"a\.parquet needs pyarrow\.parquet, .*; run pip install pyarrow"):
        open_data(job("dataset", "a.parquet"))


def test_a_saved_data_set_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"document {at}" for at in range(2500)], "n": list(range(2500))})
    rows.save_to_disk("saved")
    data = open_data(job("dataset", "saved", validation__enable=False))
    assert bytes(tokens_of(data)) == b"\xff".join(f"document {at}".encode() for at in range(2500))
    assert "tokens of 2,500 rows" in data.describe()
    assert data.train.fingerprint == open_data(job("dataset", "saved", validation__enable=False)).train.fingerprint
    with pytest.raises(StagelineError, match=r"saved has no column 'texts' \(did you mean 'text'\?\): it has text, n"):
        open_data(job("dataset", "saved", training__dataset_column="texts"))
    rows.to_parquet("a.parquet")
    assert tokens_of(open_data(job("dataset", "a.parquet"))) == tokens_of(data)
    both = datasets.DatasetDict({"train": rows, "validation": rows.select(range(9))})
    both.save_to_disk("both")
    train, validation = parts(job("dataset", "both"))
    assert isinstance(train, Tokens)
    assert isinstance(validation, Tokens)
    assert (train.tokens, validation.tokens) == (len(tokens_of(data)), 9 * 11 - 1)
    datasets.DatasetDict({"test": rows}).save_to_disk("tests")
    with pytest.raises(StagelineError, match="has no split 'train': it has test"):
        open_data(job("dataset", "tests"))


def test_a_streamed_data_set_resumes_where_it_was() -> None:
    datasets = pytest.importorskip("datasets")

    def loader() -> Loader:
        rows = datasets.Dataset.from_dict({"input_ids": [[at, at + 1] for at in range(10)]})
        return Loader(Stream(rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=1)), batch=3)

    uninterrupted = loader().samples(0, 45)[0]["input_ids"]
    first = loader()
    for position in range(0, 24, 3):
        first.batch(position)
    again = loader()
    position = again.load_state_dict(json.loads(json.dumps(first.state_dict(21))))
    tokens = torch.cat([again.batch(at)[0]["input_ids"] for at in range(position, 45, 3)])
    assert torch.equal(tokens, uninterrupted[21:])


# Functions

MODULE = """
import numpy as np, torch

def rows():
    for at in range(5):
        yield [at, at + 1, at + 2]

def listed(config):
    return [{"input_ids": torch.full((config.training.seq_len,), at)} for at in range(10)]

def array():
    return np.arange(100, dtype=np.uint16)

def number():
    return 5

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, at):
        return torch.full((2, 2), float(at)), at

class Endless(torch.utils.data.IterableDataset):
    def __len__(self):
        return 3
    def __iter__(self):
        yield from ([at, at] for at in range(3))
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Path("data_of_a_test.py").write_text(MODULE)
    yield "data_of_a_test"
    sys.modules.pop("data_of_a_test", None)


def test_a_generator_is_called_again_for_every_epoch(module: str) -> None:
    data = open_data(job(f"{module}:rows"))
    assert data.validation is None
    assert data.describe() == f"{module}:rows: a stream of samples, no validation data"
    loader = Loader(data.train, batch=12)
    assert loader.batch(0)[0][:, 0].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert loader.samples(0, 2)[1].tolist() == [[1, 2], [2, 3]]


def test_functions_return_what_they_like(module: str) -> None:
    listed, held = parts(job(f"{module}:listed", validation__fraction=0.2))
    assert (listed.length, held.length) == (8, 2)
    inputs, targets = Loader(listed, batch=8).batch(0)
    assert sorted(inputs["input_ids"][:, 0].tolist()) == list(range(8))
    assert targets is None
    images, targets = Loader(parts(job(f"{module}:Images"))[0], batch=19, seed=1).batch(0)
    assert images.shape == (19, 2, 2)
    assert images[:, 0, 0].tolist() == targets.tolist() != sorted(targets.tolist())
    assert isinstance(open_data(job(f"{module}:Endless")).train, Stream)
    tokens, held = parts(job(f"{module}:array"))
    assert (tokens.length, held.length) == (23, 1)
    validated = open_data(job(f"{module}:rows", validation__dataset_path=f"{module}:Images"))
    assert validated.validation is not None
    assert validated.validation.length == 20


def test_functions_that_are_not_there_are_named(module: str) -> None:
    for dataset, says in {
        f"{module}:row": r"no function 'row' \(did you mean 'rows'\?\)",
        "no_such_module:rows": "cannot import no_such_module",
        f"{module}:number": "is 5, of type int; it must be an iterable",
        ":rows": "':rows' is not a function name; write package.module:function",
    }.items():
        with pytest.raises(StagelineError, match=says):
            open_data(job(dataset))
    with pytest.raises(StagelineError, match=r"validation\.dataset_path is 'a\.txt', but .* a function"):
        open_data(job(f"{module}:rows", validation__dataset_path="a.txt"))


def test_tokens_of_a_stream_are_checked_too(module: str) -> None:
    loader = Loader(open_data(job(f"{module}:rows", model__vocab_size=6)).train, batch=4)
    loader.batch(0)
    with pytest.raises(StagelineError, match=r":rows has the token 6 at position 2 of sample 4, but .* is 5"):
        loader.batch(4)


# Batches


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([[1, 2, 3], [1, 2]], r"sample 10 of mine is .*\(3,\) and sample 11 is .*\(2,\); .*truncate or pad"),
        ([(1, 2), [1, 2]], "is a tuple of 2 and sample 11 is neither dict nor tuple"),
        ([{"a": 1}, {"b": 1}], "is a dict of a and sample 11 is a dict of b"),
        ([(1, 2, 3)], "sample 10 of mine is a tuple of 3; a sample is"),
        (["text"], "sample 10 of mine holds a str, 'text'"),
        ([[1.0, 2.0]], r"torch.float32 of shape \(2,\), which is not a row of tokens"),
        ([5], r"torch.int64 of shape \(\), which is not a row of tokens"),
    ],
)
def test_samples_that_are_not_alike_are_refused(samples: list[Any], says: str) -> None:
    with pytest.raises(StagelineError, match=says):
        collate(samples, [10, 11][: len(samples)], "mine")


def test_samples_are_trees_of_anything_that_is_a_tensor() -> None:
    row = np.array([1, 2, 60_000], np.uint16)
    row.flags.writeable = False
    inputs, targets = collate([row], [0], "mine")
    assert (inputs.tolist(), targets.tolist(), inputs.dtype) == ([[1, 2]], [[2, 60_000]], torch.int64)
    inputs, targets = collate([({"x": row}, 0.5), ({"x": row}, 1.5)], [0, 1], "mine")
    assert inputs["x"].shape == (2, 3)
    assert torch.equal(targets, torch.tensor([0.5, 1.5]))


# Validation data


@settings(max_examples=examples(100))
@given(st.integers(1, 9), st.integers(2, 300), st.floats(0.001, 0.999))
def test_what_is_held_back_is_at_the_end_and_never_trained_on(seq_len: int, samples: int, fraction: float) -> None:
    source = Tokens(np.arange(samples * seq_len + 1 + seq_len // 2), seq_len, digest="x")
    train, held = split(source, fraction)
    targets = [Loader(part, batch=1, shuffle=False).samples(0, part.length)[1].flatten() for part in (train, held)]
    assert torch.cat(targets).tolist() == list(range(1, samples * seq_len + 1))
    assert held.length == min(max(round(samples * fraction), 1), samples - 1)
    assert len({source.fingerprint, train.fingerprint, held.fingerprint}) == 3


def test_too_little_to_hold_back_says_how_much_is_needed() -> None:
    Path("a.txt").write_text("x" * 8)
    with pytest.raises(StagelineError, match=r"a\.txt is too small .* 8 tokens, but 9 are needed: .*\+ 1 = 5 for"):
        open_data(job("text", "a.txt"))
    Path("a.txt").write_text("x" * 9)
    assert [part.length for part in parts(job("text", "a.txt"))] == [1, 1]
    with pytest.raises(StagelineError, match="it has 1 sample, but 2 are needed"):
        split(Items([(1, 2)], name="mine"), 0.5)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(StagelineError, match="it must be between 0 and 1"):
            open_data(job("text", "a.txt", validation__fraction=fraction))


def test_data_of_its_own_is_validated_on() -> None:
    Path("a.txt").write_text("x" * 50)
    Path("b.txt").write_text("y" * 21)
    train, held = parts(job("text", "a.txt", validation__dataset_path="b.txt"))
    assert isinstance(train, Tokens)
    assert (train.tokens, held.length) == (50, 5)
    assert parts(job("python", validation__dataset_path="b.txt"))[1].length == 5


# The data of a checkpoint


def test_the_same_data_somewhere_else_is_the_same() -> None:
    Path("a.txt").write_text("x" * 50)
    saved = json.loads(json.dumps(open_data(job("text", "a.txt")).train.identity()))
    Path("a.txt").rename("b.txt")
    check_same(saved, open_data(job("text", "b.txt")).train)


def test_other_data_is_found_out() -> None:
    Path("a.txt").write_text("abc " * 50)
    train_tokenizer("one.json")
    train_tokenizer("two.json", words="entirely other")

    def now(**more: Any) -> Source:
        return open_data(job("text", "a.txt", **more)).train

    saved = now().identity()
    check_same(saved, now())
    others: list[tuple[dict[str, Any], str]] = [
        ({"model__tokenizer_path": "one.json"}, "its tokenizer had the fingerprint bytes and has"),
        ({"validation__fraction": 0.5}, "it had 189 tokens and has 101 now"),
        ({"validation__enable": False}, "it had 189 tokens and has 200 now"),
        ({"seq_len": 5}, r"training\.seq_len was 4 and is 5 now"),
    ]
    for more, says in others:
        with pytest.raises(StagelineError, match=says):
            check_same(saved, now(**more))
    with pytest.raises(StagelineError, match="its tokenizer had the fingerprint"):
        check_same(now(model__tokenizer_path="one.json").identity(), now(model__tokenizer_path="two.json"))
    Path("a.txt").write_text("abc " * 49 + "abx ")
    with pytest.raises(StagelineError, match=r"its content has changed.*initial_load_path"):
        check_same(saved, now())
    with pytest.raises(StagelineError, match="it was 'tokens' and is items now"):
        check_same(saved, Items([1]))
    with pytest.raises(StagelineError, match="does not identify its data"):
        check_same({}, now())
    assert text_of("a.txt").endswith("abx ")


@pytest.mark.parametrize("size", [10, 5000, 300_000])
def test_a_changed_file_of_tokens_is_found_out(size: int) -> None:
    tokens = np.arange(size, dtype="<u2")
    tokens.tofile("t.bin")
    config = job("memmap", "t.bin", model__vocab_size=1 << 16, validation__enable=False)
    saved = open_data(config).train.identity()
    check_same(saved, open_data(config).train)
    for changed in (tokens + 1, np.append(tokens[:-1], tokens[:1]), np.append(tokens[-1:], tokens[1:])):
        changed.astype("<u2").tofile("t.bin")
        with pytest.raises(StagelineError, match="its content has changed"):
            check_same(saved, open_data(config).train)
    tokens[:-1].tofile("t.bin")
    with pytest.raises(StagelineError, match=rf"had {size:,} tokens and has {size - 1:,} now"):
        check_same(saved, open_data(config).train)
    config.training.dataset_dtype = "uint8"
    tokens.tofile("t.bin")
    with pytest.raises(StagelineError, match="is not the data that the checkpoint was trained on"):
        check_same(saved, open_data(config).train)

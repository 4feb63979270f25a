"""Data of every kind, what is refused, and whether data matches a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline import StagelineError
from stageline.train.config.config import Config
from stageline.train.data import Bytes, File, Loader, Tokens, documents, open_data
from stageline.train.data.byte_pairs import BytePairs, python_tokenizer
from stageline.train.data.documents import _statements
from stageline.train.data.opening import ConcatenatedArray, memmap_tokens
from stageline.train.data.tokenizer import encode_documents
from support.instances import examples
from support.texts import job, text_of, tokens_of, train_tokenizer

# What there is


def test_the_embedded_data_is_a_few_megabytes_and_always_the_same() -> None:
    first, second = open_data(Config()), open_data(Config())
    assert first.train.identity() == second.train.identity()
    assert isinstance(first.train, Tokens)
    assert 500_000 < len(first.train.array) < 1_500_000
    assert first.tokenizer is not None
    text = first.tokenizer.decode(tokens_of(first))
    assert "class ArgumentParser" in text
    description = first.describe()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f" tokens of the standard library of Python {version}, " in description
    assert "windows of 128, " in description
    assert first.vocab_size == 1024
    plain = open_data(Config.read(None, "model.tokenizer_path=bytes"))
    assert bytes(tokens_of(plain)).replace(b"\xff", b"").decode() == text


def test_a_python_without_its_source_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(StagelineError, match=rf"not in {tmp_path}; set training.dataset to text"):
        open_data(Config())


def test_folders_are_read_whole_and_in_order() -> None:
    for name, text in {
        "t/b/z.txt": "one",
        "t/b.txt": "two",
        "t/a/c/d.md": "três",
        "t/.hidden": "no",
        "u.txt": "x",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    assert text_of("t") == "três|two|one"
    assert text_of("u.txt, t") == "x|três|two|one"
    Path("with, comma.txt").write_text("a whole file name")
    assert text_of("with, comma.txt") == "a whole file name"


def test_text_that_cannot_be_read_is_named() -> None:
    Path("t").mkdir()
    with pytest.raises(StagelineError, match="the folder t contains no files"):
        open_data(job("text", "t"))
    Path("t/a.txt").write_text("")
    with pytest.raises(StagelineError, match="t has no tokens: it is empty"):
        open_data(job("text", "t"))
    Path("t/b.txt").write_bytes(b"abc\xe9def")
    with pytest.raises(StagelineError, match=r"t/b\.txt is not UTF-8: byte 3 is 0xe9"):
        open_data(job("text", "t"))
    with pytest.raises(StagelineError, match="nowhere does not exist"):
        open_data(job("text", "t,nowhere"))
    with pytest.raises(StagelineError, match="dataset_path is empty"):
        open_data(job("text"))


def test_kinds_are_known_by_name() -> None:
    with pytest.raises(StagelineError, match=r'"memap"; it must be one of python, text.*\(did you mean .memmap.\?\)'):
        open_data(job("memap"))
    with pytest.raises(StagelineError, match=r'python, which needs no path, .* is "x\.txt"; .* to text'):
        open_data(job("python", "x.txt"))


def test_the_embedded_data_is_code_with_one_statement_per_line() -> None:
    (text,) = _statements(
        ["def f(a,  # one\n      b):\n    '''Two.'''\n    return '''3\n4'''\nx = [\n" + "1,\n" * 50 + "]\n"]
    )
    assert text == "def f(a, b):\n    return '3\\n4'\n"
    library = open_data(Config())
    assert library.tokenizer is not None
    lines = library.tokenizer.decode(tokens_of(library)).splitlines()
    assert not any(line.lstrip().startswith(("#", '"""')) for line in lines)
    assert max(map(len, lines)) < 400  # only the headers of blocks may be long


def test_the_embedded_data_is_made_once_and_again_if_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def statements(sources: Any) -> list[str]:
        texts.append("x = 1\n" * 1000)
        return texts[-1:]

    monkeypatch.setattr(documents, "_statements", statements)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (tokens_of(open_data(Config())) for _ in range(2))
    assert len(texts) == 1
    assert first == second
    (file,) = (tmp_path / "cache" / "stageline").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert tokens_of(open_data(Config())) == first
    assert len(texts) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not a folder
    open_data(Config())
    assert len(texts) == 3


def test_other_merges_are_another_tokenizer() -> None:
    assert BytePairs("python", [(97, 98)]).fingerprint != BytePairs("python", [(97, 99)]).fingerprint


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)))
def test_bytes_bring_back_any_text(letters: list[int]) -> None:
    text = "".join(map(chr, letters))
    assert Bytes().decode(Bytes().encode(text)) == text
    assert Bytes.separator not in Bytes().encode(text)


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.sampled_from("ab_ \n\t01(=é😀")) | st.text())
def test_byte_pairs_bring_back_any_text(text: str) -> None:
    tokenizer = python_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.num_bytes(tokens) == len(text.encode())
    assert tokenizer.separator not in tokens


def test_transformers_reads_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = python_tokenizer()
    for name, contents in tokenizer.files().items():
        (tmp_path / name).write_bytes(contents)
    again = File(tmp_path / "tokenizer.json")
    texts = [
        "",
        "    def né(self, a12=  'x'):\n\t\r\n\n        return \x0c self._name  # 😀\n",
        Path(__file__).read_text(),
    ]
    assert [tokens.tolist() for tokens in tokenizer.encode_all(texts)] == [
        tokens.tolist() for tokens in again.encode_all(texts)
    ]
    assert (again.size, again.separator) == (1024, 255)


# Tokenizers from files


def test_text_is_encoded_with_a_tokenizer_file(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer()
    Path("a.txt").write_text("the stage of the line, and more than eight tokens")
    Path("b.txt").write_text("né")
    data = open_data(job("text", "a.txt,b.txt", model__tokenizer_path="tokenizer.json"))
    assert data.tokenizer is not None
    assert data.vocab_size == tokenizer.size
    tokens = tokens_of(data)
    assert len(tokens) < 50
    assert tokens.count(0) == 1
    at = tokens.index(0)
    assert tokenizer.decode(tokens[:at]) == Path("a.txt").read_text()
    assert tokenizer.decode(tokens[at + 1 :]) == "né"
    assert isinstance(data.train, Tokens)
    assert data.train.array[:].dtype == np.uint16
    assert File(".").fingerprint == tokenizer.fingerprint


def test_the_separator_is_the_one_of_the_config_beside_it() -> None:
    assert train_tokenizer(separator="STOP").separator is None
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "STOP"}}))
    assert File("tokenizer.json").separator == 0


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer()
    monkeypatch.setattr("stageline.train.data.tokenizer.MAX_CHARACTERS", 40)
    documents = ["the line\n" * 30, "x" * 100, "", "end"]
    for codec in (tokenizer, Bytes()):
        tokens = np.concatenate(list(encode_documents(codec, documents)))
        ends = np.flatnonzero(tokens == codec.separator)
        assert [codec.decode(part[part != codec.separator]) for part in np.split(tokens, ends)] == [
            *documents[:2],
            "end",
        ]


def test_tokens_are_kept_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    train_tokenizer()
    Path("a.txt").write_text("the stage of the line")
    config = job("text", "a.txt", model__tokenizer_path="tokenizer.json", validation__enable=False)
    plain, kept = open_data(config), open_data(config, cache="kept")
    assert len(list(Path("kept").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("stageline.train.data.documents.encode_documents", None)
        again = open_data(config, cache="kept")
    assert tokens_of(plain) == tokens_of(kept) == tokens_of(again)
    assert plain.train.identity() == kept.train.identity() == again.train.identity()
    Path("a.txt").write_text("the stage of the other line")
    assert tokens_of(open_data(config, cache="kept")) == tokens_of(open_data(config)) != tokens_of(again)
    Path("file").write_text("")
    with pytest.raises(StagelineError, match="cannot write tokens to file/tokens"):
        open_data(config, cache="file")


def test_tokenizers_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StagelineError, match=r"nowhere\.json: No such file.*tokenizer_path must be bytes, or"):
        File("nowhere.json")
    Path("bad.json").write_text("{}")
    with pytest.raises(StagelineError, match=r"bad\.json is not a tokenizer\.json"):
        File("bad.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(StagelineError, match=r"bad\.json needs tokenizers.*; run pip install tokenizers"):
        File("bad.json")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    assert open_data(job("python", model__vocab_size=300)).vocab_size == 300
    with pytest.raises(StagelineError, match=r"model\.vocab_size is 200, but the tokenizer bytes has 256"):
        open_data(job("python", model__vocab_size=200))


# Files of tokens


def test_files_of_tokens_are_not_read_into_memory() -> None:
    with Path("big.bin").open("wb") as file:
        file.truncate(1 << 36)  # 64 GB of zeros that take no space
        file.seek(5 * 2 * 1024 * 4)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    source = memmap_tokens("big.bin", "uint16", seq_len=1024)
    assert source.length == ((1 << 35) - 1) // 1024
    assert isinstance(source.array, np.memmap)
    inputs, targets = source.read(np.array([20, source.length - 1]))
    assert inputs[0, :4].tolist() == [7, 8, 9, 0]
    assert targets[0, :3].tolist() == [8, 9, 0]
    Loader(source, batch=4, seed=1).batch(10**8)


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_a_file_of_tokens_is_read_as_it_was_written(name: str) -> None:
    numbers = np.arange(60_000, 60_101)
    if name.endswith("npy"):
        np.save(name, numbers.astype(np.int32))
    else:
        numbers.astype("<u2").tofile(name)
    data = open_data(job("memmap", name, model__vocab_size=70_000))
    assert tokens_of(data) == numbers.tolist()
    assert data.tokenizer is None
    assert data.describe() == f"memmap: 97 tokens in {name}, 24 windows of 4, 1 for validation"


def test_a_folder_of_token_files_is_one_row() -> None:
    Path("shards").mkdir()
    for at in range(3):
        np.arange(at * 10, at * 10 + 10, dtype="<u2").tofile(f"shards/{at}.bin")
    Path("shards/readme.txt").write_text("not tokens")
    data = open_data(job("memmap", "shards", model__vocab_size=30, validation__enable=False))
    assert Loader(data.train, batch=7, shuffle=False).batch(0)[1].flatten().tolist() == list(range(1, 29))
    assert data.describe() == "memmap: 30 tokens in 3 files, 7 windows of 4, no validation data"


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_joined_arrays_are_as_one(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes))
    joined = ConcatenatedArray(np.split(whole, np.cumsum(sizes)[:-1]))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert np.array_equal(joined[start:stop], whole[start:stop])


def test_tokens_outside_of_the_vocabulary_are_found_when_they_are_read() -> None:
    tokens = np.zeros(1000, "<i4")
    tokens[[777, 778]] = 300, -1
    tokens.tofile("t.bin")
    config = job("memmap", "t.bin", model__vocab_size=300, training__dataset_dtype="int32", validation__enable=False)
    loader = Loader(open_data(config).train, batch=1, shuffle=False)
    loader.samples(0, 194)
    with pytest.raises(
        StagelineError,
        match=r"t\.bin has the token 300 at position 777, but the largest token in the vocabulary is 299",
    ):
        loader.samples(0, 200)
    config.model.vocab_size = 301
    with pytest.raises(StagelineError, match=r"the token -1 at position 778"):
        Loader(open_data(config).train, batch=1, shuffle=False).samples(0, 200)


BROKEN: dict[str, tuple[Callable[[str], Any], str]] = {
    "empty.bin": (lambda name: Path(name).touch(), "empty.bin is empty"),
    "odd.bin": (lambda name: Path(name).write_bytes(b"abc"), "has 3 bytes, which is not a multiple of 2 .*uint16"),
    "bad.npy": (lambda name: Path(name).write_bytes(b"abc"), "is not a .npy file of numbers"),
    "floats.npy": (
        lambda name: np.save(name, np.ones(9)),
        r"float64 of shape \(9,\); .* one-dimensional array of integers",
    ),
    "square.npy": (lambda name: np.save(name, np.ones((3, 3), int)), r"int64 of shape \(3, 3\)"),
    "none.npy": (lambda name: np.save(name, np.ones(0, int)), "none.npy is empty"),
    "words.npy": (lambda name: np.save(name, np.array([{}], object), allow_pickle=True), "not a .npy file of numbers"),
    "short.bin": (lambda name: np.zeros(4, "<u2").tofile(name), r"4 tokens, but a sample .*seq_len 4 needs 5"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_of_tokens_are_refused(name: str) -> None:
    make, says = BROKEN[name]
    make(name)
    with pytest.raises(StagelineError, match=says):
        open_data(job("memmap", name, model__vocab_size=9))


def test_a_file_of_unknown_vocabulary_size_is_an_error() -> None:
    np.zeros(100, "<u2").tofile("t.bin")
    with pytest.raises(StagelineError, match=r"the vocabulary size of t\.bin is unknown; set model\.vocab_size"):
        open_data(job("memmap", "t.bin"))
    assert open_data(job("memmap", "t.bin", model__name="llama/config.json")).vocab_size == 0
    data = open_data(job("memmap", "t.bin", training__dataset_dtype="uint8"))
    assert (data.vocab_size, data.tokenizer is not None) == (256, True)

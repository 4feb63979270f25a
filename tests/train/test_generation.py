"""Text from a trained model: the same for any number of ranks, with a cache or without, and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.cli.app import run
from stageline.train.checkpoint import Writer, open_checkpoint
from stageline.train.config.config import Config
from stageline.train.data.byte_pairs import BytePairs, python_tokenizer
from stageline.train.data.tokenizer import Bytes
from stageline.train.generation import Sampling, generate
from stageline.train.generation_job import _tokenizer
from stageline.train.gpt import GPT

Capture = pytest.CaptureFixture[str]


def make_gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(256, 16, 16, 4, 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    sizes = ("training.seq_len=16", "model.dim=16", "model.n_layers=4", "model.n_heads=2", "model.tokenizer_path=bytes")
    config = Config.read(None, *sizes, f"job.dump_folder={folder}", "sample.prompt=class ")
    (folder / "config.toml").write_text(config.to_toml())
    with Writer(folder / "checkpoint") as writer:
        weights = dict(make_gpt().named_parameters())
        writer.save(3, weights, state={"config": config.to_dict()}, assets=Bytes().files())
    return folder


def generated(folder: Path, capsys: Capture, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["generate", str(folder), "--tokens", "24", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_the_text_does_not_depend_on_the_ranks(trained: Path, capfd: Capture) -> None:
    options = ("--prompt", "def é", "--seed", "5", "--top-k", "50", "--top-p", "0.9", "--temperature", "0.7")
    texts = [generated(trained, capfd, *options, "--launcher", "threads", "-p", ranks) for ranks in ("1", "3")]
    texts.append(generated(trained, capfd, *options, "-p", "2"))  # processes
    assert texts[0].startswith("def é")
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != generated(trained, capfd, "--prompt", "def é", "--launcher", "threads", "-p", "1", "--greedy")


def test_the_prompt_of_the_run_and_one_checkpoint(trained: Path, capsys: Capture) -> None:
    one = ("--greedy", "--launcher", "threads", "-p", "1")
    text = generated(trained, capsys, *one)
    assert text.startswith("class ")
    assert text == generated(trained / "checkpoint/step-00000003", capsys, *one, "--prompt", "class ")


def test_text_is_drawn_as_the_run_does_unless_told_otherwise(trained: Path, capsys: Capture) -> None:
    one = ("--launcher", "threads", "-p", "1")
    text, sample = generated(trained, capsys, *one), Config().sample
    assert text == generated(
        trained, capsys, *one, "--temperature", str(sample.temperature), "--top-p", str(sample.top_p)
    )
    assert text != generated(trained, capsys, *one, "--temperature", "5", "--top-p", "1")


def test_a_run_keeps_the_merges_it_was_trained_with(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config, other = Config.read(None, "model.tokenizer_path=python"), BytePairs("python", [(100, 101)])
    for name, tokenizer in (("same", python_tokenizer()), ("other", other)):
        with Writer(tmp_path / name) as writer:
            writer.save(1, {"weight": torch.zeros(1)}, assets=tokenizer.files())
        with open_checkpoint(tmp_path / name / "step-00000001") as checkpoint:
            assert _tokenizer("", config, checkpoint).encode("def ").tolist() == tokenizer.encode("def ").tolist()
            assert isinstance(_tokenizer("python", config, checkpoint), BytePairs)


@pytest.mark.parametrize(
    ("folder", "words", "text"),
    [
        ("run", "--top-p 1.5", "--top-p is 1.5; it must be above 0 and at most 1"),
        ("run", "--top-k -1", "--top-k is -1; it must be at least 1"),
        ("run", "--temperature -1", "--temperature is -1.0; it must be at least 0"),
        ("run", "--greedy --temperature 0.5", "--temperature is 0.5, but --greedy always picks the most likely token"),
        ("run", "-p 9", "--ranks is 9, but the model has only 8 units to split; use at most 8 ranks"),
        ("run", "--greedy --top-k 5", "--top-k is 5, but --greedy always picks the most likely token"),
        ("run", "--step -7", "'--step': must be an integer >= -1, got '-7'"),
        ("run", "-p 1 --tokenizer python", "the tokenizer python has 1,024 tokens, but the model in"),
        ("run", "-p 1 --tokenizer nowhere.json", "cannot read the tokenizer nowhere.json: No such file"),
        ("run", "--prompt \udcff", r"--prompt must be UTF-8 text, got '\udcff'"),
        ("run", "--step 7 -p 1", "has no checkpoint of step 7; it has 3"),
        ("run/nothing", "", "nothing does not exist; expected the folder of a run"),
        ("empty", "", "empty has no checkpoint; a run saves one"),
        ("tokens", "-p 1", "has no tokenizer: the run was trained on tokens from an unknown tokenizer"),
        ("other", "-p 1", "was not saved by stageline train"),
    ],
)
def test_mistakes_are_one_clear_error(
    trained: Path, tmp_path: Path, folder: str, words: str, text: str, capsys: Capture
) -> None:
    (tmp_path / "run").symlink_to(trained)
    (tmp_path / "empty").mkdir()
    for name, state in (("tokens", {"config": {"training": {"dataset": "memmap"}}}), ("other", {})):
        with Writer(tmp_path / name) as writer:
            writer.save(1, {"weight": torch.ones(1)}, state=state)
    assert text in generated(tmp_path / folder, capsys, *words.split(), "--launcher", "threads", code=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_does_not_change_the_tokens(ranks: int) -> None:
    model = make_gpt().double()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=ranks, microbatches=1, schedule="gpipe")
    for prompt in ([1], [2, 3, 4, 5], list(range(20))):
        tokens = [
            list(
                generate(
                    pipe, prompt, 18, length=16, share=lambda token: token, sampling=Sampling(), use_cache=use_cache
                )
            )
            for use_cache in (True, False)
        ]
        assert tokens[0] == tokens[1]
        assert len(set(tokens[0])) > 3
    assert not model.cache.enabled


def test_drawing_follows_top_k_and_top_p() -> None:
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    for options, allowed in (
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_k": 3, "top_p": 0.9}, {1, 3, 2}),
        ({}, {0, 1, 2, 3}),
    ):
        sampling = Sampling(temperature=1.0, **options)
        assert {sampling.pick(logits) for _ in range(400)} == allowed

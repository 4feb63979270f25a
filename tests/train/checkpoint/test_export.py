"""A trained model opened by other libraries: transformers, peft, torch.distributed.checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import stageline as sl
from stageline.cli.app import run
from stageline.train.checkpoint import Writer, open_checkpoint
from stageline.train.config.config import Config
from stageline.train.data.tokenizer import Bytes
from stageline.train.gpt import GPT
from stageline.train.trainer import Trainer

Capture = pytest.CaptureFixture[str]


def save_gpt(folder: Path, *, tied: bool) -> GPT:
    config = Config.read(None, "model.n_heads=2", f"model.tie_embeddings={str(tied).lower()}")
    torch.manual_seed(0)
    model = GPT(256, 16, 24, 2, 2, tied=tied)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with Writer(folder) as writer:
        state = {"config": config.to_dict()}
        writer.save(3, dict(model.named_parameters()), state=state, assets=Bytes().files())
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_the_built_in_gpt_opens_as_a_gpt2(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_gpt(tmp_path / "c", tied=tied)
    assert run(["checkpoint", "convert", str(tmp_path / "c"), str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, 256, (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def né(a,  b):\n\treturn a\n"
    assert tokenizer(text)["input_ids"] == Bytes().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (255, 256)


def test_other_formats_keep_the_names_of_the_gpt(tmp_path: Path) -> None:
    model = save_gpt(tmp_path / "c", tied=False)
    for words in (["own", "--format", "safetensors"], ["own.safetensors"]):
        assert run(["checkpoint", "convert", str(tmp_path / "c"), str(tmp_path / words[0]), *words[1:]]) == 0
        fresh = GPT(256, 16, 24, 2, 2)
        sl.load_weights(fresh, tmp_path / words[0])
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), fresh.parameters(), strict=True))


def test_a_model_that_is_not_of_hugging_face_is_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    with Writer(tmp_path / "c") as writer:
        writer.save(1, {"weight": torch.ones(2)})
    words = ["checkpoint", "convert", str(tmp_path / "c"), str(tmp_path / "out")]
    assert run([*words, "--format", "huggingface"]) == 2
    assert "use --format safetensors" in capsys.readouterr().err
    assert run(words) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def adapted_llama() -> nn.Module:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


def lora_samples() -> list[tuple[Tensor, Tensor]]:
    rows = torch.arange(9 * 8).reshape(8, 9) % 64
    return [(row[:-1], row[1:]) for row in rows]


def test_a_lora_run_saves_what_peft_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = Config.read(
        None, "training.steps=2", "training.local_batch_size=4", "validation.enable=false", "optimizer.lr=0.1",
        "parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=gpipe",
        "lr_scheduler.warmup_steps=0", f"job.dump_folder={tmp_path / 'run'}",
    )  # fmt: skip
    trainer = Trainer(config, model=adapted_llama, data=lora_samples())
    trainer.run()
    trained: Any = trainer.pipe.model
    for out in (tmp_path / "run/adapter", tmp_path / "adapter"):
        if out.parent == tmp_path:
            assert run(["checkpoint", "convert", str(tmp_path / "run/checkpoint"), str(out)]) == 0
        assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        fresh: Any = adapted_llama()
        base = fresh.unload()
        again = peft.PeftModel.from_pretrained(base, out)
        names = {name for name, parameter in trained.named_parameters() if "lora" in name or "modules_to_save" in name}
        loaded = dict(again.named_parameters())
        assert names
        assert all(torch.equal(loaded[name], dict(trained.named_parameters())[name]) for name in names)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_torch_are_written_and_read(tmp_path: Path, capsys: Capture) -> None:
    model = save_gpt(tmp_path / "c", tied=False)
    out = tmp_path / "dcp"
    assert run(["checkpoint", "convert", str(tmp_path / "c"), str(out), "--format", "dcp"]) == 0
    state = {name: torch.empty_like(parameter) for name, parameter in model.named_parameters()}
    load(state, checkpoint_id=out, no_dist=True)
    assert all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())
    optimizer = {"state": {"head.weight": {"exp_avg": torch.ones(2)}}, "lr": 0.1}
    save({"model": state, "optimizer": optimizer}, checkpoint_id=tmp_path / "nested", no_dist=True)
    for number, folder in enumerate((out, tmp_path / "nested")):
        back = tmp_path / f"back-{number}"
        words = ["checkpoint", "convert", str(folder), str(back), "--format", "stageline"]
        capsys.readouterr()
        assert run(words) == 2
        assert "can execute arbitrary code; if you trust its source, pass --trust-pickle" in capsys.readouterr().err
        assert run([*words, "--trust-pickle"]) == 0
        with open_checkpoint(back) as checkpoint:
            assert checkpoint.verify() == []
            tensors = checkpoint.read_model()
        assert set(tensors) == set(state)
        assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_a_damaged_checkpoint_of_torch_is_one_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(json.dumps({}).encode())
    assert run(["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--trust-pickle"]) == 2
    error = capsys.readouterr().err
    assert "dcp/.metadata: UnpicklingError: " in error
    assert error.count("Error: ") == 1
    assert not (tmp_path / "out").exists()

"""Unchanged models of transformers: losses and gradients equal those of the unsplit model."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients, pieces

transformers = pytest.importorskip("transformers")

WORDS = 97


def config(kind: str, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **sizes | more)


def causal(kind: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: transformers.AutoModelForCausalLM.from_config(config(kind, **more))


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "loss_type": "ForCausalLM",
}  # fmt: skip
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip


def text(padded: bool = True, labels: bool = True) -> dict[str, Any]:
    words = torch.randint(3, WORDS, (6, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(words)
    if padded:
        mask[0, :4] = mask[3, :2] = 0
    batch = {"input_ids": words, "attention_mask": mask}
    return batch | ({"labels": words.masked_fill(mask == 0, -100)} if labels else {})


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    model: nn.Module = peft.get_peft_model(causal("llama")(), settings)
    return model


CLASSES = torch.tensor([0, 1, 0, 1, 1, 0])
IMAGES = torch.randn((6, 3, 16, 16), generator=torch.Generator().manual_seed(2))
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (causal("llama"), text()),
    "llama without padding": (causal("llama"), text(padded=False)),
    "llama, tied": (causal("llama", tie_word_embeddings=True), text()),
    "mistral": (causal("mistral", sliding_window=8), text()),
    "mixtral": (causal("mixtral", **EXPERTS), text()),
    "mixtral with its own loss of experts": (
        causal("mixtral", **EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1), text(),
    ),
    "qwen2": (causal("qwen2"), text()),
    "qwen3": (causal("qwen3", head_dim=8), text()),
    "gemma2": (causal("gemma2", head_dim=8, sliding_window=4), text()),
    "gemma3": (causal("gemma3_text", head_dim=8, sliding_window=4), text()),
    "phi3": (causal("phi3"), text()),
    "gpt2": (causal("gpt2", **GPT2), text()),
    "gpt_neox": (causal("gpt_neox"), text()),
    "opt": (
        causal("opt", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0), text(),
    ),
    "deepseek_v3": (causal("deepseek_v3", **DEEPSEEK), text()),
    "lora": (adapted, text()),
    "bert": (lambda: transformers.BertForMaskedLM(config("bert", **BERT)), text()),
    "bert that classifies": (
        lambda: transformers.BertForSequenceClassification(config("bert", **BERT)),
        text(labels=False) | {"labels": CLASSES},
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(config("vit", **BERT, image_size=16, patch_size=4)),
        {"pixel_values": IMAGES, "labels": CLASSES},
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            config(
                "t5", d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4,
                dropout_rate=0.0, decoder_start_token_id=0,
            )
        ),
        text(labels=False) | {"labels": text()["labels"][:, :7].contiguous()},
    ),
}  # fmt: skip
TIED = (
    "model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight", "shared.weight",
    "bert.embeddings.word_embeddings.weight",
)  # fmt: skip


def own_loss(output: Any, target: Any) -> Tensor:
    return torch.as_tensor(output.loss)


def make(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]().train()


def plainly(model: nn.Module, batch: dict[str, Any], parts: int) -> float:
    total = 0.0
    for part in pieces(batch, parts):
        loss = model(**part).loss * (len(part["labels"]) / len(batch["labels"]))
        loss.backward()
        total += loss.item()
    return total


BOTH = [(case, ("1f1b", "zb-v")[number % 2]) for number, case in enumerate(CASES)]
SWEEP = [(case, family) for case in CASES for family in ("1f1b", "zb-v", "interleaved")]


@pytest.mark.parametrize(("case", "family"), SWEEP if os.environ.get("STAGELINE_SWEEP") == "full" else BOTH)
def test_a_model_of_the_library_gives_its_own_bits(case: str, family: str) -> None:
    model, batch = make(case), CASES[case][1]
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=own_loss, schedule=family, ranks=2, microbatches=3)
    assert pipe.step(batch, batch["labels"]).loss == plainly(plain, batch, 3)
    ours, theirs = gradients(model), gradients(plain)
    differ = [name for name in theirs if not _same(ours[name], theirs[name])]
    assert set(differ) <= set(TIED), differ
    for name in differ:  # a tied weight: its two uses are added separately
        torch.testing.assert_close(ours[name], theirs[name])
    assert sorted(pipe.state_dict()) == sorted(model.state_dict())


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def on_processes(rank: int, case: str) -> tuple[float, dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    batch = CASES[case][1]
    pipe = sl.Pipeline(make(case), loss_fn=own_loss, schedule="interleaved", ranks=2, microbatches=3)
    return pipe.step(batch, batch["labels"]).loss, dict(pipe.named_gradients())


def test_processes_compute_the_same() -> None:
    case = "mixtral with its own loss of experts"
    plain = make(case)
    loss = plainly(plain, CASES[case][1], 3)
    answers = run_ranks(on_processes, 2, case)
    assert [answer[0] for answer in answers] == [loss, loss]
    assert_same_bits({name: grad for _, grads in answers for name, grad in grads.items()}, gradients(plain))


def test_the_loss_is_averaged_over_the_tokens_of_the_whole_batch() -> None:
    """As in the library's trainer: each microbatch's sum divided by the number of tokens in the batch."""
    model, batch = make("llama"), text()
    plain = copy.deepcopy(model)
    tokens = (batch["labels"][:, 1:] != -100).sum()
    batch = {**batch, "num_items_in_batch": tokens}
    pipe = sl.Pipeline(model, loss_fn=own_loss, schedule="1f1b", ranks=2, microbatches=3, loss_reduction="sum")
    loss = pipe.step(batch, batch["labels"]).loss
    total = 0.0
    for part in pieces(batch, 3):
        loss_of_part = plain(**part).loss
        loss_of_part.backward()
        total += loss_of_part.item()
    assert loss == total
    assert_same_bits(gradients(model), gradients(plain))


def test_dropout_draws_the_same_for_any_number_of_stages() -> None:
    results = []
    for family, ranks in (("gpipe", 1), ("1f1b", 2), ("zb-v", 2)):
        torch.manual_seed(0)
        model = causal("gpt2", **GPT2 | {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})().train()
        pipe = sl.Pipeline(model, loss_fn=own_loss, schedule=family, ranks=ranks, microbatches=3, seed=5)
        results.append((pipe.step(text(), text()["labels"]).loss, gradients(model, TIED)))
    for loss, grads in results[1:]:
        assert loss == results[0][0]
        assert_same_bits(grads, results[0][1])


def test_no_cache_is_sent_or_kept() -> None:
    model = make("llama")
    staged = sl.split(model, 3)
    value: Any = {"input_ids": text()["input_ids"]}
    for part in staged.parts()[:-1]:
        value = part(value)
        assert len(value[3]) == 1
    assert staged.parts()[-1](value).past_key_values is None


def test_hidden_states_are_collected_over_stages() -> None:
    model = make("llama").eval()
    inputs = {"input_ids": text()["input_ids"], "output_hidden_states": True}
    value: Any = inputs
    with torch.no_grad():
        for part in sl.split(model, 3).parts():
            value = part(value)
        expected = model(**inputs).hidden_states
    assert len(value.hidden_states) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(value.hidden_states, expected, strict=True))


def test_a_batch_that_enables_a_cache_or_calls_a_unit_twice_is_refused_with_advice() -> None:
    words = torch.randint(3, WORDS, (4, 8))
    pipe = sl.Pipeline(causal("llama")(), loss_fn=sl.own_loss, ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError, match=r"the batch has use_cache=True; a pipeline does not support a key-value cache, .* omit"
    ):
        pipe.step({"input_ids": words, "labels": words, "use_cache": True})
    model = causal("gpt2", **GPT2)()
    batch = {"input_ids": words, "labels": words, "token_type_ids": words}
    pipe = sl.Pipeline(sl.split(model, 2), loss_fn=sl.own_loss, ranks=2, microbatches=2)
    with pytest.raises(
        sl.PipelineError, match=r"calls transformer\.wte 2 times .* pass example= to Pipeline or split, a"
    ):
        pipe.step(batch)
    pipe = sl.Pipeline(model, loss_fn=sl.own_loss, ranks=2, microbatches=2, example=batch)
    assert pipe.step(transformers.BatchEncoding(batch)).loss == pytest.approx(
        float(model(**batch).loss.detach()), rel=1e-5
    )

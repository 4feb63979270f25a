"""Small cases of less common architectures: the same bits as a plain loop, or a clear error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients, pieces


def words(low: int = 3, high: int = 50, length: int = 8) -> Tensor:
    return torch.randint(low, high, (4, length), generator=torch.Generator().manual_seed(1))


def plainly(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor | None]:
    for piece in pieces(batch, 2):
        (sl.own_loss(model(**piece)) / 2).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def piped(model: nn.Module, batch: dict[str, Any], **options: Any) -> dict[str, Tensor | None]:
    pipe = sl.Pipeline(model, loss_fn=sl.own_loss, ranks=2, microbatches=2, **options)
    pipe.step(batch)
    return gradients(model)


# Lists that hold None, and lists of lists, as x-transformers has them.


class Optional(nn.Module):
    """Each layer is a list of norms, of which some are None, a part that computes, and a residual that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(4), None]), nn.Linear(4, 4), None])  # type: ignore[list-item]
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts: Any
        for parts in self.layers:
            norms, linear, residual = parts
            assert residual is None
            assert norms[1] is None
            x = torch.tanh(linear(norms[0](x)))
        return x


class Gaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        self.layers = nn.ModuleList([layers[0], None, layers[1], None, *layers[2:]])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return x


@pytest.mark.parametrize("kind", [Optional, Gaps])
@pytest.mark.parametrize("with_example", [False, True])
def test_lists_may_hold_none_and_lists(kind: type[nn.Module], with_example: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    example = batch[0][:2] if with_example else None
    for family in ("1f1b", "zb-h1"):
        report = sl.check(model, batch, ranks=4, schedule=family, loss_fn=nn.functional.mse_loss, example=example)
        assert report.equal, str(report)
    assert len(sl.split(kind(), stages=4).names) == 4


# Models of transformers.


def built(config: str, model: str, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


TEXT: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def llava() -> Any:
    transformers = pytest.importorskip("transformers")
    return built(
        "LlavaConfig", "LlavaForConditionalGeneration", image_token_index=55, image_seq_length=4,
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=8),
        text_config=transformers.LlamaConfig(**TEXT),
    )  # fmt: skip


def blip2() -> Any:
    text = {
        "model_type": "opt", "vocab_size": 60, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
        "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 40, "tie_word_embeddings": False,
    }  # fmt: skip
    former = {**TEXT, "vocab_size": 50, "num_hidden_layers": 2, "encoder_hidden_size": 16}
    model = built(
        "Blip2Config", "Blip2ForConditionalGeneration", vision_config=VISION, qformer_config=former, text_config=text,
        num_query_tokens=4, image_token_index=55,
    )  # fmt: skip
    return model.eval()


def pictures() -> dict[str, Any]:
    ids = words(length=10)
    ids[:, 1:5] = 55
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "pixel_values": images, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [llava, blip2])
def test_a_cache_that_an_inner_config_enables_is_not_filled(make: Any) -> None:
    model, batch = make(), pictures()
    example = {name: value[:2] for name, value in batch.items()}
    grads = piped(copy.deepcopy(model), batch, example=example)
    torch.testing.assert_close(grads, plainly(model, batch))


def test_a_plan_knows_its_units_by_name(tmp_path: Path) -> None:
    model, batch = llava(), pictures()
    example = {name: value[:2] for name, value in batch.items()}
    sl.plan(model, example, ranks=2, microbatches=2, repeats=1, time_limit=0.5).write(tmp_path / "plan.json")
    plan = sl.read_plan(tmp_path / "plan.json")
    staged = plan.split(copy.deepcopy(model))
    assert tuple(unit.name for unit in staged.units) == plan.names
    assert not staged.around
    sl.Pipeline(staged, loss_fn=sl.own_loss, schedule=plan.schedule).step(batch)
    assert_same_bits(gradients(staged.model), plainly(model, batch))


def test_split_warns_about_a_tower_that_belongs_to_no_unit() -> None:
    warning = r"model\.vision_tower\.embeddings … .*projector of Llava.* belongs to no unit.*pass example="
    with pytest.warns(UserWarning, match=warning):
        staged = sl.split(llava(), stages=2)
    assert "every stage holds model.vision_tower.embeddings … model.multi_modal_projector" in str(staged)
    example = {name: value[:2] for name, value in pictures().items()}
    assert not sl.split(llava(), stages=2, example=example).around


@pytest.mark.filterwarnings("ignore")
def test_a_unit_that_the_model_never_calls_does_no_harm() -> None:
    model = built(
        "Wav2Vec2ConformerConfig", "Wav2Vec2ConformerForCTC", vocab_size=20, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        conv_depthwise_kernel_size=3, apply_spec_augment=False, layerdrop=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        conformer_conv_dropout=0.0, ctc_zero_infinity=True,
    )  # fmt: skip
    batch = {"input_values": torch.randn(4, 200), "labels": words(1, 20, 3)}
    example = {name: value[:2] for name, value in batch.items()}
    assert_same_bits(piped(copy.deepcopy(model), batch, example=example), plainly(model, batch))


@pytest.mark.filterwarnings("ignore")
def test_an_attribute_that_a_library_block_sets_and_nobody_reads_is_allowed() -> None:
    settings = {**TEXT, "lru_width": 16, "attention_window_size": 8, "num_key_value_heads": 1}
    model = built("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", **settings, tie_word_embeddings=False)
    batch = {"input_ids": words(), "labels": words()}
    assert_same_bits(piped(copy.deepcopy(model), batch), plainly(model, batch | {"use_cache": False}))


@pytest.mark.filterwarnings("ignore")
def test_blocks_that_fill_a_dict_for_later_ones_are_refused_by_name() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    model = built(
        "Gemma3nTextConfig", "Gemma3nForCausalLM", **{**TEXT, "num_hidden_layers": 6}, vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8, num_key_value_heads=1, head_dim=8, num_kv_shared_layers=2, layer_types=kinds,
        laurel_rank=4, sliding_window=4, activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(sl.PipelineError, match=r"model\.layers\.2 changes data of a UserDict among its inputs"):
        piped(model, {"input_ids": words(), "labels": words()})


def bart() -> Any:
    return built(
        "BartConfig", "BartForConditionalGeneration", vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=40, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def with_bart(rank: int) -> tuple[float, list[str]]:
    torch.set_num_threads(1)
    pipe = sl.Pipeline(bart, loss_fn=sl.own_loss, ranks=2, microbatches=2, seed=0)
    loss = pipe.step({"input_ids": words(), "labels": words()}).loss
    return loss, [name for name, parameter in pipe.named_parameters() if parameter.is_meta]


def test_a_stage_allocates_everything_that_it_runs() -> None:
    pytest.importorskip("transformers")
    pipe = sl.Pipeline(bart, loss_fn=sl.own_loss, ranks=2, microbatches=2, seed=0)
    loss = pipe.step({"input_ids": words(), "labels": words()}).loss
    assert run_ranks(with_bart, 2, timeout=300.0) == [(loss, []), (loss, [])]


def texts() -> dict[str, Any]:
    return {"input_ids": words(), "labels": words()}


def llama() -> Any:
    return built("LlamaConfig", "LlamaForCausalLM", **TEXT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(("make", "batch"), [(bart, texts), (llama, texts), (llava, pictures), (blip2, pictures)])
def test_a_function_that_builds_a_model_takes_an_example(make: Any, batch: Any, schedule: str) -> None:
    """Buffers outside of the units have no memory yet during the dry run."""
    inputs = batch()
    example = {name: value[:2] for name, value in inputs.items()}
    pipe = sl.Pipeline(
        make, loss_fn=sl.own_loss, schedule=schedule, ranks=2, microbatches=2, seed=0, example=example
    )  # fmt: skip
    assert not any(tensor.is_meta for tensor in (*pipe.model.parameters(), *pipe.model.buffers()))
    plain = copy.deepcopy(pipe.model)
    pipe.step(inputs)
    torch.testing.assert_close(gradients(pipe.model), plainly(plain, inputs))


def bart_by_example(rank: int) -> float:
    torch.set_num_threads(1)
    pipe = sl.Pipeline(bart, loss_fn=sl.own_loss, ranks=2, microbatches=2, seed=0, example=texts())
    assert not any(parameter.is_meta for parameter in pipe.parameters())
    return pipe.step(texts()).loss


def test_processes_build_their_stages_by_an_example() -> None:
    pytest.importorskip("transformers")
    loss = sl.Pipeline(bart, loss_fn=sl.own_loss, ranks=2, microbatches=2, seed=0).step(texts()).loss
    assert run_ranks(bart_by_example, 2, timeout=300.0) == [loss, loss]

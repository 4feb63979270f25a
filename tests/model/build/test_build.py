"""Building on ranks: memory only for a rank's own part, the same bits for any number of ranks, no garbage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from stageline.common.errors import StagelineError
from stageline.model.build import tape
from stageline.model.build import weights as load
from stageline.model.build.build import build, describe
from stageline.model.build.weights import load_weights
from stageline.testing import run_ranks

Factory = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all allocated memory with NaN, so that unwritten values show."""
    clean = tape.allocate

    def dirty(nbytes: int) -> torch.UntypedStorage:
        storage = clean(nbytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        return storage

    monkeypatch.setattr(tape, "allocate", dirty)


class Block(nn.Module):
    """Tables, a mask, attributes that are tensors, and values read on the host."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.truncated = nn.Parameter(torch.empty(width, 200))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        inverse = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 5, 5))
        self.register_buffer("polar", torch.polar(torch.ones(4), inverse))
        self.register_buffer("table", torch.from_numpy(np.arange(6.0)) * 2)
        self.register_buffer("listed", torch.tensor([1.5, 2.5]))
        self.plain = inverse * 2
        self.several = ([torch.arange(3)], {"a": torch.linspace(0, 1, 4)})
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 3)] + torch.arange(2).tolist() + [inverse.numpy()[0]]
        with torch.no_grad():
            self.linear.weight[:, 0] = 7.0
            self.linear.weight[2:4].mul_(0).add_(inverse.mean())


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(11, 8, padding_idx=2),
        *(Block() for _ in range(3)),
        nn.MultiheadAttention(8, 2),
        nn.BatchNorm1d(8),
        nn.LSTM(8, 4),
        nn.Linear(8, 11),
    )


def llama(**changes: Any) -> Factory:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 61, "num_key_value_heads": 2, **changes})
    return lambda: transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, vocab_size=61, num_key_value_heads=2, num_local_experts=4)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-any-return]


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama()(), config)  # type: ignore[no-any-return]


FACTORIES: dict[str, Factory] = {
    "small": small,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(40, 40)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(40, 40)),
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 48, batch_first=True), 2),
    "llama": lambda: llama()(),
    "tied llama": lambda: llama(tie_word_embeddings=True)(),
    "llama3": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )(),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "lora": lora,
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def held_bytes(values: Any) -> int:
    """Return the bytes of all storages that are not on the meta device, each counted once."""
    real = (tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor) and not tensor.is_meta)
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in real}.values())


def everything(model: nn.Module) -> list[Any]:
    """Return everything that the modules of a model hold, including attributes."""
    return [vars(module) for module in model.modules()]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", FACTORIES)
def test_every_tensor_equals_that_of_the_constructor(name: str) -> None:
    built, plain = tensors(build(FACTORIES[name])), tensors(FACTORIES[name]())
    again = tensors(FACTORIES[name]())
    assert list(built) == list(plain)
    for key, value in plain.items():
        mine = built[key]
        assert (mine.shape, mine.stride(), mine.dtype) == (value.shape, value.stride(), value.dtype), key
        assert (type(mine), mine.requires_grad, mine.is_leaf) == (type(value), value.requires_grad, value.is_leaf), key
        assert not mine.isnan().any(), key
        if torch.equal(value, again[key]):
            assert bits(mine) == bits(value), key
        else:
            assert not torch.equal(mine, value), key
            spread = value.float().std()
            assert mine.numel() < 500 or abs(mine.float().std() - spread) < 0.15 * spread, key
    same = {a for a in plain for b in plain if a != b and plain[a] is plain[b]}
    assert same == {a for a in built for b in built if a != b and built[a] is built[b]}


@pytest.mark.parametrize("name", ["small", "tied llama", "mixtral", "lora", "copied layers"])
def test_one_two_and_eight_owners_get_the_same_bits_and_only_their_own_memory(name: str) -> None:
    factory = FACTORIES[name]
    whole = tensors(build(factory, seed=3))
    names = list(whole)
    for owners in (2, 8):
        for rank in range(owners):
            own = set(names[len(names) * rank // owners : len(names) * (rank + 1) // owners])
            description = describe(factory)
            assert held_bytes(everything(description.model)) == 0
            model = description.materialise(own.__contains__, seed=3)
            part = tensors(model)
            owned = {id(part[name]) for name in own}
            for key, value in part.items():
                assert value.is_meta == (id(value) not in owned), key
                assert value.is_meta or bits(value) == bits(whole[key]), key
            assert held_bytes(everything(model)) == description.nbytes(own.__contains__)
            assert held_bytes(part) == sum({id(part[name]): part[name].nbytes for name in own}.values())


def built_part(rank: int, ranks: int) -> dict[str, bytes]:
    model = build(small, lambda name: int(name.split(".")[0]) % ranks == rank, seed=5)
    return {name: bits(tensor) for name, tensor in tensors(model).items() if not tensor.is_meta}


def test_another_process_gets_the_bits_of_this_one() -> None:
    (there,), here = run_ranks(built_part, 1, 2), built_part(1, 2)
    assert there
    assert not set(there) & set(here)
    assert {**there, **here} == built_part(0, 1)


def test_bits_depend_on_seed_and_names_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, other = tensors(build(small, seed=0)), tensors(build(small, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    name = "1.linear.weight"
    assert bits(first[name]) == bits(tensors(build(small, seed=0))[name])
    assert bits(first[name]) != bits(other[name])
    assert bits(first["1.linear.bias"]) != bits(first["2.linear.bias"])
    longer = tensors(build(lambda: nn.Sequential(*small(), nn.Linear(3, 3)), seed=0))
    assert bits(first[name]) == bits(longer[name])


def test_attributes_that_are_tensors_come_along_with_their_module() -> None:
    model: Any = build(lambda: nn.Sequential(Block(), Block()), lambda name: name == "0.scale")
    plain = Block()
    assert torch.equal(model[0].plain, plain.plain)
    assert torch.equal(model[0].several[0][0], torch.arange(3))
    assert torch.equal(model[0].several[1]["a"], torch.linspace(0, 1, 4))
    assert model[0].rates == plain.rates
    assert model[1].plain.is_meta
    assert model[1].several[1]["a"].is_meta
    assert isinstance(model[1].several, tuple)


class Shared(nn.Module):
    """One draw in two parameters that are copies, and two that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(6, 4)
        self.first, self.second = (nn.Parameter(half.clone()) for half in drawn.chunk(2))
        storage = torch.rand(10)
        self.low, self.high = nn.Parameter(storage[:4]), nn.Parameter(storage[4:])


def test_one_draw_in_two_parameters_has_the_same_bits_for_either_owner() -> None:
    whole = tensors(build(Shared))
    assert whole["low"].untyped_storage()._cdata == whole["high"].untyped_storage()._cdata
    assert not torch.equal(whole["first"], whole["second"])
    for name in whole:
        own = build(Shared, {name}.__contains__)
        assert bits(tensors(own)[name]) == bits(whole[name])
        assert held_bytes(everything(own)) == whole[name].nbytes


def test_parts_can_be_materialised_one_after_another() -> None:
    whole = tensors(build(Shared, seed=4))
    description = describe(Shared)
    for name in ("low", "second", "high"):
        description.materialise({name}.__contains__, seed=4)
    kept = description.model.low
    model = description.materialise(seed=4)
    assert model.low is kept
    assert all(bits(tensor) == bits(whole[name]) for name, tensor in tensors(model).items())


def test_parameters_keep_their_attributes_and_tied_ones_have_either_name() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        model[0].weight.is_special = True  # type: ignore[union-attr]
        return model.requires_grad_(False)

    for name in ("0.weight", "1.weight"):
        model: Any = build(tied, {name}.__contains__)
        assert model[0].weight is model[1].weight
        assert model[0].weight.is_special
        assert not model[0].weight.requires_grad
        assert bits(model[0].weight) == bits(tensors(build(tied))["0.weight"])


def test_a_default_dtype_and_real_tensors_are_preserved() -> None:
    known = torch.arange(4.0)

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.float64)
            try:
                self.ratio = nn.Parameter(torch.arange(3) / 7)
            finally:
                torch.set_default_dtype(torch.float32)
            self.known = nn.Parameter(known)
            self.moved = nn.Parameter(torch.ones(3).to("cpu").bfloat16().to(device="cpu", dtype=torch.float16))
            self.moved.data = torch.from_numpy(np.full(3, 2.0, dtype=np.float16))

    model = build(Typed)
    assert torch.equal(model.ratio, torch.arange(3, dtype=torch.float64) / 7)
    assert torch.equal(model.known, known)
    assert torch.equal(model.moved, torch.full((3,), 2.0, dtype=torch.float16))
    assert build(Typed, lambda name: False).known.is_meta


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Parameter(torch.empty(4, 4))
        self.partly = nn.Parameter(torch.empty(4, 4))
        self.derived = nn.Parameter(torch.empty(4) * 2)
        self.inside = nn.Parameter(torch.empty(9)[2:4].zero_())
        with torch.no_grad():
            self.pieces[:, :2].normal_()
            self.pieces[:, 2:].zero_()
            self.partly[:, :2].fill_(1.0)


def test_unwritten_memory_is_refused_by_name_or_zero() -> None:
    assert not build(Unwritten, lambda name: name == "pieces").pieces.isnan().any()
    assert build(Unwritten, lambda name: name == "inside").inside.tolist() == [0.0, 0.0]
    with pytest.raises(StagelineError, match="'partly' of Unwritten, the parameter 'derived' of Unwritten"):
        build(Unwritten)
    model = build(Unwritten, unwritten="zeros")
    assert model.partly.tolist() == [[1.0, 1.0, 0.0, 0.0]] * 4
    assert model.derived.tolist() == [0.0] * 4


class Reads(nn.Module):
    """Draws until the values are in range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        while (self.weight < 0).any():
            nn.init.uniform_(self.weight, -0.1, 1.0)


def test_what_cannot_be_recorded_is_refused_by_name_or_constructed() -> None:
    with pytest.raises(StagelineError, match=r"random numbers of 'weight' of Reads, at .*test_build.py:\d+ in Reads"):
        build(lambda: nn.Sequential(nn.Linear(2, 2), Reads()))
    orthogonal = nn.utils.parametrizations.orthogonal
    with pytest.raises(StagelineError, match="'weight' of Linear"):
        build(lambda: orthogonal(nn.Linear(4, 4)))
    whole = build(Reads, seed=2, otherwise="construct")
    assert (whole.weight >= 0).all()
    pair: Any = build(
        lambda: nn.Sequential(Reads(), nn.Linear(2, 2)), {"0.weight"}.__contains__, seed=2, otherwise="construct"
    )
    assert bits(pair[0].weight) == bits(whole.weight)
    assert pair[1].weight.is_meta
    assert build(Unwritten, otherwise="construct", unwritten="zeros").partly[0, 3] == 0.0


def test_an_error_that_the_constructor_swallows_still_ends_the_build() -> None:
    def swallows() -> nn.Module:
        layer = nn.Linear(2, 2)
        try:
            layer.weight.sum().item()
        except ValueError:
            nn.init.zeros_(layer.weight)
        return layer

    with pytest.raises(StagelineError, match="reads a value that depends on the random numbers"):
        build(swallows)


def test_errors_name_invalid_input() -> None:
    with pytest.raises(StagelineError, match="the constructor returned 3"):
        build(lambda: 3)  # type: ignore[type-var]
    with pytest.raises(StagelineError, match="'weight' of LazyLinear: its shape is not known yet"):
        build(lambda: nn.LazyLinear(3))
    with pytest.raises(StagelineError, match="otherwise is 'maybe'"):
        build(small, otherwise="maybe")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="mine"):
        build(lambda: {}["mine"])  # type: ignore[index]
    known = torch.zeros(3)
    with pytest.raises(StagelineError, match="into a tensor from outside the constructor"):
        build(lambda: nn.ParameterList([known.normal_()]))


# Weights from files.


def save_sharded(folder: Path, state: dict[str, Tensor], shards: int) -> None:
    names = list(state)
    places = {name: f"model-{at % shards}.safetensors" for at, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: state[name].contiguous() for name in names if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the tensors that are read from files."""
    names: list[str] = []

    original: Any = vars(load)["safe_open"]

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.opened = original(*args, **kwargs)

        def __enter__(self) -> Counting:
            self.opened.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.opened.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.opened, name)

        def get_tensor(self, name: str) -> Any:
            names.append(name)
            return self.opened.get_tensor(name)

    monkeypatch.setattr(load, "safe_open", Counting)
    return names


@pytest.mark.parametrize("shards", [1, 3])
def test_only_what_the_model_holds_is_read(tmp_path: Path, read: list[str], shards: int) -> None:
    state = small().state_dict()
    if shards == 1:
        save_file(state, tmp_path / "model.safetensors")
    else:
        save_sharded(tmp_path, state, shards)
    model = build(small, lambda name: name.startswith("1."))
    result = load_weights(model, tmp_path)
    own = [name for name in state if name.startswith("1.")]
    assert sorted(read) == sorted(own)
    assert (sorted(result.loaded), result.missing, result.unexpected) == (sorted(own), (), ())
    for name in own:
        assert bits(model.state_dict()[name]) == bits(state[name])


def test_each_process_reads_only_the_slices_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mesh dimensions cut dimensions of the tensor, the same one too, evenly or not; as FSDP2 over tp does."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it registers the backend)

    whole = torch.arange(60.0).view(10, 6)
    save_file({"weight": whole}, tmp_path / "w.safetensors")
    original: Any = vars(load)["safe_open"]
    sizes: list[int] = []

    class Slices:
        def __init__(self, opened: Any) -> None:
            self.opened, self.get_shape, self.get_dtype = opened, opened.get_shape, opened.get_dtype

        def __getitem__(self, where: Any) -> Any:
            sizes.append(self.opened[where].nbytes)
            return self.opened[where]

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.opened = original(*args, **kwargs)

        def __enter__(self) -> Any:
            opened = self.opened.__enter__()
            return SimpleNamespace(keys=opened.keys, get_slice=lambda name: Slices(opened.get_slice(name)))

        def __exit__(self, *error: Any) -> None:
            self.opened.__exit__(*error)

    monkeypatch.setattr(load, "safe_open", Counting)
    cuts: dict[int, tuple[Any, ...]] = {  # one rank each: torch remembers results for equal meshes
        5: (Shard(0), Shard(1)),
        6: (Replicate(), Shard(1)),
        3: (Shard(0), Shard(0)),
        1: (_StridedShard(0, split_factor=4), Shard(0)),
        7: (_StridedShard(0, split_factor=2), Replicate()),
    }
    for rank, placements in cuts.items():
        dist.init_process_group("fake", rank=rank, world_size=8)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        layer = nn.Linear(6, 10, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(0 * whole, mesh, placements, src_data_rank=None))
        sizes.clear()
        load_weights(layer, tmp_path / "w.safetensors")
        assert isinstance(layer.weight, DTensor)
        assert torch.equal(layer.weight.to_local(), expected.to_local())
        assert sum(sizes) == expected.to_local().nbytes
        dist.destroy_process_group()


def test_tied_weights_are_loaded_once_under_any_name(tmp_path: Path, read: list[str]) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    save_file({"1.weight": torch.ones(5, 4)}, tmp_path / "w.safetensors")
    model = build(tied)
    load_weights(model, tmp_path / "w.safetensors")
    assert tensors(model)["0.weight"].eq(1).all()
    assert read == ["1.weight"]


def test_names_can_differ_and_dtypes_can_be_cast(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"x.weight": torch.ones(2, 2, dtype=torch.bfloat16), "x.bias": torch.ones(2)}, file)
    layer = nn.Linear(2, 2)
    before = bits(layer.weight)
    with pytest.raises(StagelineError, match=r"'x.weight' in .* is torch.bfloat16, but 'weight' of the model is .*32"):
        load_weights(layer, file, lambda name: f"x.{name}")
    assert bits(layer.weight) == before
    load_weights(layer, file, lambda name: f"x.{name}", cast=True)
    assert layer.weight.eq(1).all()
    result = load_weights(layer, file, lambda name: "x.bias" if name == "bias" else None, strict=False)
    assert (result.loaded, result.missing, result.unexpected) == (("bias",), (), ("x.weight",))


def test_mismatched_files_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    layer = nn.Linear(2, 2)
    before = bits(layer.weight)
    save_file({"weight": torch.ones(2, 2)}, file)
    with pytest.raises(StagelineError, match=r"tensors missing in .*w.safetensors: 'bias'"):
        load_weights(layer, file)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(3)}, file)
    with pytest.raises(StagelineError, match=r"'bias' in .* has shape \(3,\), but 'bias' of the model has \(2,\)"):
        load_weights(layer, file)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2), "extra": torch.ones(2)}, file)
    with pytest.raises(StagelineError, match=r"tensors not in the model, but in .*: 'extra'"):
        load_weights(layer, file)
    file.write_bytes(b"\x10" * 40)
    with pytest.raises(StagelineError, match="not a safetensors file"):
        load_weights(layer, file)
    with pytest.raises(StagelineError, match="does not exist; expected"):
        load_weights(layer, tmp_path / "none")
    assert bits(layer.weight) == before


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"weight": "../outside.safetensors"}}, "outside its folder"),
        ({"weight_map": {"weight": "/etc/passwd"}}, "outside its folder"),
        ({"weight_map": {"weight": "gone.safetensors"}}, "does not exist"),
        ({"weight_map": {"weight": "w.safetensors", "bias": "w.safetensors"}}, "which does not contain it"),
        ({"weight_map": ["weight"]}, "is not an index"),
        ([], "is not an index"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "outside.safetensors")
    save_file({"weight": torch.ones(2, 2)}, folder / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StagelineError, match=message):
        load_weights(nn.Linear(2, 2), folder)

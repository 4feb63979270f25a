"""How a batch is cut into microbatches: along which dimension, what is replicated, and what cannot be cut."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections import OrderedDict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import microbatch
from torch.nn import functional
from torch.utils import _pytree as pytree

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients

TensorChunkSpec: Any = microbatch.TensorChunkSpec
_Replicate: Any = microbatch._Replicate
FAMILIES = ["gpipe", "zb-h1", "interleaved", "zb-v"]


def backward(loss: Any) -> None:
    loss.backward()


class Scaled(nn.Module):
    """A layer that multiplies each sample by a keyword input, in any container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, info: Any = None) -> Tensor:
        scale = info if isinstance(info, Tensor) or info is None else read(info)
        return torch.as_tensor(self.inner(x) if scale is None else self.inner(x) * scale)


def read(info: Any) -> Any:
    if isinstance(info, dict):
        return info["scale"]
    return info() if callable(info) else info.scale


@dataclass
class Data:
    scale: Tensor
    name: str = "data"


@dataclass(frozen=True, slots=True)
class Slotted:
    scale: Tensor


class Named(NamedTuple):
    scale: Tensor


class Registered:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


pytree.register_pytree_node(Registered, lambda node: ([node.scale], None), lambda leaves, _: Registered(*leaves))


@dataclass
class Derived:
    scale: Tensor
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.scale


@dataclass
class Grows:
    scale: Tensor

    def __post_init__(self) -> None:
        self.scale = 2 * self.scale


@dataclass
class Starts:
    scale: Tensor
    factor: InitVar[float] = 1.0

    def __post_init__(self, factor: float) -> None:
        self.scale = self.scale * factor


@dataclass
class Checks:
    scale: Tensor

    def __post_init__(self) -> None:
        assert self.scale.dim() == 2


class Plain:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def read(self) -> Any:
        return self.scale


class WithSlots:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Deep:
    def __init__(self, scale: Any) -> None:
        self.inner = {"list": [Plain(scale)]}


class MyDict(dict[str, Any]):
    pass


def scaled_pipe(model: nn.Module, **options: Any) -> sl.Pipeline:
    arguments = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, **options}
    return sl.Pipeline(model, loss_fn=functional.mse_loss, **arguments)


def loop(model: Any, x: Tensor, y: Tensor, infos: list[Any], parts: int) -> None:
    """What a pipeline of `Scaled` layers must equal; `infos` are the keyword inputs of each microbatch."""
    for number, (xi, yi) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
        value = xi
        for layer in model:
            value = layer(value, info=infos[number])
        backward(functional.mse_loss(value, yi) * (len(xi) / len(x)))


@pytest.mark.parametrize("kind", [Data, Slotted, Named, Registered, Checks, lambda scale: OrderedDict(scale=scale)])
def test_containers_of_tensors_in_stage_kwargs_are_cut(kind: Any) -> None:
    """Each microbatch gets its own samples of a dataclass, named tuple or registered class."""
    model = nn.Sequential(Scaled(), Scaled())
    plain = copy.deepcopy(model)
    x, y, scale = torch.randn(9, 4), torch.randn(9, 4), torch.randn(9, 1)
    pipe = scaled_pipe(model, schedule="zb-h1")
    pipe.step(x, y, stage_kwargs={"all": {"info": kind(scale)}})
    loop(plain, x, y, list(scale.tensor_split(4)), 4)
    assert_same_bits(gradients(model), gradients(plain))


def closure(scale: Tensor) -> Any:
    return lambda: scale


OPAQUE = {
    "a class": Plain,
    "slots": WithSlots,
    "deep inside": Deep,
    "a dict of another class": lambda scale: MyDict(scale=scale),
    "a dataclass with a field that its constructor does not take": Derived,
    "a dataclass that changes what it is given": Grows,
    "a dataclass that forgets what it was given": lambda scale: Starts(scale, factor=3.0),
    "a closure": closure,
    "a partial function": lambda scale: functools.partial(torch.mul, scale),
    "a bound method": lambda scale: Plain(scale).read,
    "a set": lambda scale: {scale},
    "an iterator": lambda scale: iter([scale]),
    "an array inside": lambda scale: Plain(scale.numpy()),
    "a tuple that holds one": lambda scale: (scale, Plain(scale)),
}


@pytest.mark.parametrize("kind", OPAQUE.values(), ids=OPAQUE)
def test_an_object_that_holds_tensors_is_refused_by_name(kind: Any) -> None:
    """It cannot be cut, and every microbatch would get all of it."""
    x, y, scale = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 1)
    pipe = scaled_pipe(nn.Sequential(Scaled(), Scaled()))
    words = r"stage_kwargs\[0\]\['info'\].* contains tensors .* cannot cut .*pass kwargs_chunk_spec=\{'info': None\}"
    with pytest.raises(sl.StagelineError, match=words):
        pipe.step(x, y, stage_kwargs={0: {"info": kind(scale)}})
    with pytest.raises(
        sl.StagelineError, match=r"the targets\[1\].* contains tensors|the targets\[1\]\[1\].* contains"
    ):
        pipe.step(x, (y, kind(scale)))
    with pytest.raises(sl.StagelineError, match=r"the inputs\[1\].* contains tensors|the inputs\[1\]\[1\].* contains"):
        pipe.step((x, kind(scale)), y)
    assert all(grad is None for grad in gradients(pipe.model).values())


ROWS: Any = torch.zeros(8, 1)
ONE = torch.tensor(3.0)


class OfItsClass:
    scale = torch.zeros(8, 1)

    def __call__(self) -> Any:
        return self.scale


class ByGlobal:
    def __call__(self) -> Any:
        return ROWS


class WithOne:
    """Reads a global number, which is the same for every microbatch."""

    scale = 3.0

    def __call__(self) -> Any:
        return ONE


def read_rows() -> Any:
    return ROWS


def rows_one_by_one() -> Any:
    yield from ROWS


READERS: dict[str, Any] = {
    "a function that reads a global": lambda: ROWS,
    "a function inside of one": lambda: [2 * row for row in (lambda: ROWS)()],
    "a function that calls one": lambda: read_rows(),
    "a function that reads an attribute of a class": lambda: OfItsClass.scale,
    "an attribute of the class": OfItsClass(),
    "an attribute of a class above": type("Below", (OfItsClass,), {})(),
    "the class itself": OfItsClass,
    "a method that reads a global": ByGlobal(),
    "a weak reference": weakref.ref(ROWS),
    "a weak proxy": weakref.proxy(ROWS),
    "weak values": weakref.WeakValueDictionary({"rows": ROWS}),
    "a generator": rows_one_by_one(),
}


@pytest.mark.parametrize("value", READERS.values(), ids=READERS)
def test_an_object_whose_code_reads_tensors_is_refused_by_name(value: Any) -> None:
    """Every microbatch would read all rows of a global, of an attribute of a class or behind a weak reference."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = scaled_pipe(nn.Sequential(Scaled(), Scaled()))
    words = r"stage_kwargs\[0\]\['info'\].* contains tensors .* cannot cut .*pass kwargs_chunk_spec=\{'info': None\}"
    with pytest.raises(sl.StagelineError, match=words):
        pipe.step(x, y, stage_kwargs={0: {"info": value}})
    assert all(grad is None for grad in gradients(pipe.model).values())


@pytest.mark.parametrize("value", [WithOne(), functional.gelu, lambda: ONE * math.pi, math, weakref.ref(WithOne)])
def test_code_that_reads_no_rows_goes_to_every_microbatch(value: Any) -> None:
    class Deaf(nn.Linear):
        def forward(self, value: Tensor, info: Any = None) -> Tensor:
            return super().forward(value) if info is not None else value

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = scaled_pipe(nn.Sequential(Deaf(4, 4), Deaf(4, 4)))
    pipe.step(x, y, stage_kwargs={"all": {"info": value}})
    assert all(grad is not None for grad in gradients(pipe.model).values())


def test_an_object_without_tensors_goes_to_every_microbatch() -> None:
    model = nn.Sequential(Scaled(), Scaled())
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    scaled_pipe(model).step(x, y, stage_kwargs={"all": {"info": Plain(3.0)}})
    loop(plain, x, y, [Plain(3.0)] * 4, 4)
    assert_same_bits(gradients(model), gradients(plain))


def test_an_object_that_is_said_to_be_for_all_goes_to_every_microbatch() -> None:
    model = nn.Sequential(Scaled(), Scaled())
    plain = copy.deepcopy(model)
    x, y, scale = torch.randn(8, 4), torch.randn(8, 4), torch.randn(1, 4)
    scaled_pipe(model, kwargs_chunk_spec={"info": None}).step(x, y, stage_kwargs={"all": {"info": Plain(scale)}})
    loop(plain, x, y, [scale] * 4, 4)
    assert_same_bits(gradients(model), gradients(plain))


def test_tensors_of_one_keyword_must_agree_on_the_samples() -> None:
    pipe = scaled_pipe(nn.Sequential(Scaled(), Scaled()))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(sl.StagelineError, match=r"8 samples of inputs and 3 of stage_kwargs\[0\]\['info'\]\[1\]"):
        pipe.step(x, y, stage_kwargs={0: {"info": (torch.ones(8, 1), torch.ones(3, 1))}})


def test_tensors_that_are_not_dense_are_refused_by_name() -> None:
    pipe = scaled_pipe(nn.Sequential(Scaled(), Scaled()))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for value in (torch.eye(8).to_sparse(), torch.nested.nested_tensor([torch.ones(2)] * 8, layout=torch.jagged)):
        with pytest.raises(sl.StagelineError, match=r"is a (nested|sparse_coo) tensor, which cannot be cut"):
            pipe.step(x, y, stage_kwargs={0: {"info": value}})
        with pytest.raises(sl.StagelineError, match=r"the inputs contain a (nested|sparse_coo) tensor"):
            pipe.step(value, y)


def test_numpy_batches_say_what_to_do() -> None:
    pipe = scaled_pipe(nn.Sequential(Scaled(), Scaled()))
    x, y = np.zeros((8, 4), dtype=np.float32), torch.randn(8, 4)
    for call in (
        lambda: pipe.step(x, y),
        lambda: pipe.step(y, x),
        lambda: pipe.predict({"x": x}),
        lambda: pipe.step(y, y, stage_kwargs={0: {"info": x}}),
    ):
        with pytest.raises(sl.StagelineError, match=r"(is|are) a numpy array of shape \(8, 4\).*torch.from_numpy"):
            call()


class Attends(nn.Module):
    """Attention with a mask of the caller's: flex attention, or its mask in full, as its backward needs a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask, flex_attention

        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        if not torch.is_grad_enabled():
            attended: Any = flex_attention(q, k, v, block_mask=mask)
            return torch.as_tensor(x + attended.squeeze(1))
        full = create_mask(mask.mask_mod, len(x), 1, x.shape[1], x.shape[1], device="cpu")
        return x + functional.scaled_dot_product_attention(q, k, v, attn_mask=full).squeeze(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("samples", [4, 5])
def test_a_block_mask_is_cut_with_its_function(samples: int) -> None:
    """Each microbatch attends within its own documents, and a mask for all samples goes to every microbatch."""
    from torch.nn.attention.flex_attention import create_block_mask

    length = 16
    documents = torch.randint(0, 3, (samples, length)).sort(-1).values
    x, y = torch.randn(samples, length, 8), torch.randn(samples, length, 8)

    def mask_of(rows: Tensor) -> Any:
        def same(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (rows[b, q] == rows[b, k]) & (q >= k)

        return create_block_mask(same, len(rows), None, length, length, device="cpu", BLOCK_SIZE=8)

    model = nn.Sequential(Attends(), Attends())
    plain: Any = copy.deepcopy(model)
    common = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu", BLOCK_SIZE=8)
    pipe = scaled_pipe(model, microbatches=2)
    masks: dict[int | str, Any] = {0: {"mask": mask_of(documents)}, 1: {"mask": common}}
    predicted = pipe.predict(x, stage_kwargs=masks)
    pipe.step(x, y, stage_kwargs=masks)
    outputs = []
    for xi, yi, rows in zip(x.tensor_split(2), y.tensor_split(2), documents.tensor_split(2), strict=True):
        with torch.no_grad():
            outputs.append(plain[1](plain[0](xi, mask=mask_of(rows)), mask=common))
        out = plain[1](plain[0](xi, mask=mask_of(rows)), mask=common)
        backward(functional.mse_loss(out, yi) * (len(xi) / samples))
    assert torch.equal(predicted, torch.cat(outputs))
    assert_same_bits(gradients(model), gradients(plain))
    with pytest.raises(sl.StagelineError, match=f"{samples} samples of inputs and 3 of stage_kwargs"):
        pipe.step(x, y, stage_kwargs={0: {"mask": mask_of(documents[:3])}})


class Rows(nn.Module):
    """A layer over (time, samples, width), with a table that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, factor: Any = 1.0) -> Any:
        return torch.tanh(self.inner(x)) + table * factor, table, factor


def rows_pipe(model: nn.Module, name: str, **options: Any) -> sl.Pipeline:
    specs: dict[str, Any] = {
        "args_chunk_spec": (TensorChunkSpec(1), None, _Replicate()),
        "targets_chunk_spec": TensorChunkSpec(1),
        "output_merge_spec": (TensorChunkSpec(1), None, None),
        **options,
    }
    chunks: dict[str, Any] = {"chunks": 2} if name == "interleaved" else {}
    return sl.Pipeline(
        list(model.children()), loss_fn=rows_loss, schedule=name, ranks=2, microbatches=3, **specs, **chunks
    )


def rows_loss(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


def rows_batch() -> tuple[Any, Tensor]:
    torch.manual_seed(3)
    return (torch.randn(5, 7, 4), torch.randn(4), torch.tensor(0.5)), torch.randn(5, 7, 4)


def rows_loop(model: Any, inputs: Any, target: Tensor) -> Tensor:
    outputs = []
    for xi, yi in zip(inputs[0].tensor_split(3, 1), target.tensor_split(3, 1), strict=True):
        value = (xi, *inputs[1:])
        for layer in model:
            value = layer(*value)
        outputs.append(value[0])
        backward(rows_loss(value, yi) * (xi.shape[1] / 7))
    return torch.cat(outputs, 1).detach()


def stages_of(name: str) -> int:
    return 4 if name in ("interleaved", "zb-v") else 2


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_cut_along_the_dimension_of_their_spec(name: str) -> None:
    """Including uneven parts; replicated values and numbers without a dimension go whole to every microbatch."""
    model = nn.Sequential(*(Rows() for _ in range(stages_of(name))))
    plain = copy.deepcopy(model)
    inputs, target = rows_batch()
    pipe = rows_pipe(model, name)
    stats = pipe.step(inputs, target)
    expected = rows_loop(plain, inputs, target)
    assert stats.samples == 7
    assert_same_bits(gradients(model), gradients(plain))
    rows, table, factor = pipe.predict(inputs)
    assert torch.equal(rows, expected)
    assert torch.equal(table, inputs[1])
    assert factor == 0.5


def rows_rank(rank: int) -> tuple[Any, Any, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(Rows(), Rows())
    inputs, target = rows_batch()
    pipe = rows_pipe(model, "zb-h1")
    pipe.step(inputs if rank == 0 else None, target if rank == 1 else None)
    outputs = pipe.predict(inputs if rank == 0 else None)
    errors = []
    for mistake in (
        lambda: pipe.step((inputs[0], inputs[1]), target),
        lambda: rows_pipe(model, "zb-h1", args_chunk_spec=(TensorChunkSpec(rank), None, None)),
    ):
        try:
            mistake()
        except sl.StagelineError as error:
            errors.append(str(error))
    return dict(pipe.named_gradients()), None if outputs is None else outputs[0], errors


def test_chunk_specs_on_processes() -> None:
    """Each process gets its part of the batch; a mismatch is reported on every rank."""
    torch.manual_seed(0)
    plain = nn.Sequential(Rows(), Rows())
    (first, _, errors), (second, outputs, other) = run_ranks(rows_rank, 2)
    expected = rows_loop(plain, *rows_batch())
    assert_same_bits({**first, **second}, gradients(plain))
    assert torch.equal(outputs, expected)
    for words in (errors, other):
        assert len(words) == 2
        assert "the chunk spec of the inputs has 3 parts, but the value has 2" in words[0]
        assert "the chunk specs" in words[1]


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + table if mask is None else torch.tanh(layer(x)) * mask + table
        return x


def test_keywords_have_specs_by_name() -> None:
    """Of inputs that are a dict; keywords without a spec are cut along the first dimension."""
    model = Keywords()
    plain = copy.deepcopy(model)
    x, y, table = torch.randn(6, 4), torch.randn(6, 4), torch.randn(1, 4)
    mask = torch.rand(4, 6)
    pipe = sl.Pipeline(
        nn.Sequential(OrderedDict(model=Transposed(model))),
        loss_fn=functional.mse_loss,
        schedule="gpipe",
        ranks=1,
        microbatches=4,
        kwargs_chunk_spec={"table": None, "mask": TensorChunkSpec(-1)},
        args_chunk_spec=(),
    )
    whole = sl.Pipeline(
        copy.deepcopy(plain),
        loss_fn=functional.mse_loss,
        ranks=2,
        microbatches=4,
        kwargs_chunk_spec={"table": None},
        example={"x": x, "table": table},
    )
    whole.step({"x": x, "table": table}, y)
    for xi, yi in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        backward(functional.mse_loss(plain(xi, table), yi) * (len(xi) / 6))
    assert_same_bits(gradients(whole.model), gradients(plain))
    plain.zero_grad()
    pipe.step({"x": x, "table": table, "mask": mask}, y)
    for xi, yi, mi in zip(x.tensor_split(4), y.tensor_split(4), mask.tensor_split(4, 1), strict=True):
        backward(functional.mse_loss(plain(xi, table, mi.T), yi) * (len(xi) / 6))
    assert_same_bits(gradients(model), gradients(plain))
    with pytest.raises(
        sl.StagelineError, match="kwargs_chunk_spec has 'mask', but neither the inputs nor stage_kwargs"
    ):
        pipe.step({"x": x, "table": table}, y)


class Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.inner(batch["x"], batch["table"], batch["mask"].T)


def test_specs_that_do_not_fit_are_refused_in_words() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    cut, whole = TensorChunkSpec(1), None

    def pipe(**specs: Any) -> sl.Pipeline:
        return sl.Pipeline(layers, loss_fn=functional.mse_loss, microbatches=2, **specs)

    mistakes: list[tuple[Any, str]] = [
        (lambda: pipe(args_chunk_spec=(1,)), "args_chunk_spec has 1; pass TensorChunkSpec"),
        (lambda: pipe(kwargs_chunk_spec=cut), "kwargs_chunk_spec must be a dict of specs by keyword"),
        (lambda: pipe(kwargs_chunk_spec={"x": "0"}), "kwargs_chunk_spec has '0'"),
        (lambda: pipe(schedule="auto", ranks=2, args_chunk_spec=cut), "schedule='auto' measures"),
        (lambda: pipe(args_chunk_spec=TensorChunkSpec(2)).step(x, y), r"shape \(6, 4\).* along dimension 2"),
        (lambda: pipe(args_chunk_spec=(cut, cut)).step(x, y), "the chunk spec of the inputs is a tuple"),
        (lambda: pipe(args_chunk_spec=(cut,)).step(x, y), "4 samples of inputs and 6 of targets"),
        (lambda: pipe(args_chunk_spec=(cut, cut)).step((x,), y), "has 2 parts, but the value has 1"),
        (lambda: pipe(args_chunk_spec=cut).step((x, 3), y), r"the inputs\[1\] is 3, .* only tensors can be cut"),
        (
            lambda: pipe(args_chunk_spec=(whole,), targets_chunk_spec=(whole,)).step(x, (y,)),
            "nothing can be cut into 2",
        ),
        (lambda: pipe(args_chunk_spec=cut).predict(x), "pass output_merge_spec= to the Pipeline"),
        (lambda: pipe(output_merge_spec=(whole,)).predict(x), "the chunk spec of the outputs is a tuple"),
        (lambda: pipe(output_merge_spec=TensorChunkSpec(3)).predict(x), "has dimension 3, but an output is of shape"),
    ]
    for mistake, words in mistakes:
        with pytest.raises(sl.StagelineError, match=words):
            mistake()


def test_outputs_are_merged_as_their_spec_says() -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"sum": x.sum(), "rows": x, "columns": x.T, "width": 4}

    layers = [nn.Linear(4, 4), Ends()]
    reducer: Any = microbatch.sum_reducer
    merged = {"sum": reducer, "columns": TensorChunkSpec(1), "width": None}
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, microbatches=3, output_merge_spec=merged)
    x = torch.randn(7, 4)
    merged = pipe.predict(x)
    rows = layers[0](x)
    assert torch.allclose(merged["sum"], rows.sum(), atol=1e-5)
    assert torch.allclose(merged["rows"], rows)
    assert torch.allclose(merged["columns"], rows.T)
    assert merged["width"] == 4


def half(x: Tensor) -> Tensor:
    return x / 2


OUTSIDE = nn.Linear(4, 4)


def reads_global(x: Tensor) -> Any:
    return OUTSIDE(x)


def calls_one(x: Tensor) -> Any:
    return reads_global(x)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_plain_functions_are_layers(name: str) -> None:
    """Functions of torch, of the user's, lambdas and partial ones, beside modules in a list of stages."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    layers: list[Any] = [first, torch.relu, functools.partial(functional.leaky_relu, negative_slope=0.1), last]
    if name != "zb-v":
        layers = [first, torch.tanh, half, lambda x: x + 1, functional.gelu, last]
    plain: Any = copy.deepcopy(nn.ModuleList([first, last]))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule=name, microbatches=3).step(x, y)
    for xi, yi in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        value = plain[0](xi)
        for function in layers[1:-1]:
            value = function(value)
        backward(functional.mse_loss(plain[1](value), yi) * (len(xi) / 6))
    assert_same_bits(gradients(nn.ModuleList([first, last])), gradients(plain))


def test_functions_stand_beside_functions_that_build_layers() -> None:
    layers: list[Any] = [lambda: nn.Linear(4, 4), torch.relu, lambda: nn.Linear(4, 4)]
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, microbatches=2, seed=0)
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(
        sl.Pipeline([torch.relu, torch.neg], loss_fn=functional.mse_loss, microbatches=2).predict(-torch.ones(2)),
        0 * torch.ones(2),
    )


def test_functions_with_weights_are_refused_by_name() -> None:
    linear, weight = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    mistakes: list[tuple[Any, str]] = [
        (linear.forward, "the function forward, which uses the parameter weight of a Linear"),
        (lambda x: linear(x), "the parameter weight of a Linear"),
        (lambda x: x * weight, r"a tensor of shape \(4,\) that requires grad"),
        (functools.partial(functional.linear, weight=linear.weight), "that requires grad"),
        (nn.BatchNorm1d(4, affine=False).forward, "the buffer running_mean of a BatchNorm1d"),
        (reads_global, "the function reads_global, which uses the parameter weight of a Linear"),
        (calls_one, "the parameter weight of a Linear"),
        (nn.ReLU, r"layer 1 is the class ReLU, not a layer; pass an instance: ReLU\(…\)"),
        (lambda: nn.ReLU(), "takes no input, but the list also contains layers"),
    ]
    for function, words in mistakes:
        with pytest.raises(sl.StagelineError, match=words):
            sl.Pipeline([nn.Linear(4, 4), function], loss_fn=functional.mse_loss, microbatches=2)


def test_targets_may_be_for_all_samples() -> None:
    """One target for the whole batch, which every microbatch is compared with."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, target = torch.randn(6, 4), torch.randn(1, 4)

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        return (output - wanted).square().mean()

    for spec in ((None,), _Replicate()):
        piped, plain = copy.deepcopy(model), copy.deepcopy(model)
        pipe = sl.Pipeline(piped, loss_fn=loss_fn, ranks=2, microbatches=4, targets_chunk_spec=spec)
        pipe.step(x, target)
        for xi in x.tensor_split(4):
            backward(loss_fn(plain(xi), target) * (len(xi) / 6))
        assert_same_bits(gradients(piped), gradients(plain))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_inputs_that_require_grad_get_it_along_their_dimension(name: str) -> None:
    """What is replicated adds up the gradients of all microbatches."""
    model = nn.Sequential(Rows(), Rows())
    plain = copy.deepcopy(model)
    (x, table, factor), target = rows_batch()
    mine = (x.clone().requires_grad_(), table.clone().requires_grad_(), factor)
    other = (x.clone().requires_grad_(), table.clone().requires_grad_(), factor)
    rows_pipe(model, name).step(mine, target)
    rows_loop(plain, other, target)
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits({"x": mine[0].grad, "table": mine[1].grad}, {"x": other[0].grad, "table": other[1].grad})

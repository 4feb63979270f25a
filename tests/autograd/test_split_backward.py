"""The backward in two halves: every product once, in the half where it belongs, with the bits of the whole."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stageline.autograd import engine
from stageline.autograd.split_backward import SplitBackward
from stageline.testing import assert_same_bits, run_ranks


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def products(self) -> int:
        return sum(
            count for name, count in self.counts.items() if name in ("mm", "addmm", "bmm", "convolution_backward")
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).chunk(3, dim=-1)
        return torch.as_tensor(self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v))


class Scale(nn.Module):
    """A bare parameter, and one that only an added constant depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.exp(self.shift) * 0.1


class Shared(nn.Module):
    """One linear layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(torch.tanh(self.linear(x))))


class Thrice(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(torch.tanh(super().forward(x))))


class Embedded(nn.Module):
    """An embedding that is added on the way, and a norm made of single operators."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(5))
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Custom.calls += 1
        return 2 * x * weight * grads[0], (x * x * grads[0]).sum(dim=(0, 1))


class Custom(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(Square.apply(x, self.weight))  # type: ignore[no-untyped-call]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(self.conv(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 0.0),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)), 0.0),
    "attention": (Attention, 0.0),
    "bare parameters": (Scale, 0.0),
    "convolution": (Convolution, 0.0),
    "a layer used twice": (Shared, 0.0),
    "three times": (Thrice, 0.0),
    "an embedding": (Embedded, 0.0),
    "a group norm": (lambda: nn.Sequential(nn.GroupNorm(1, 5), nn.Linear(8, 8)), 0.0),
    "normalised weights": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), 0.0),
    "a custom function": (Custom, 1.0),
    "no parameters": (nn.Tanh, 0.0),
    "all together": (
        lambda: nn.Sequential(nn.Linear(8, 8), Attention(), Scale(), Convolution(), Custom(), Shared()),
        8 / (72 + 216 + 64 + 16 + 90 + 8 + 72),
    ),
}


def both_ways(
    build: Callable[[], nn.Module],
) -> tuple[nn.Module, nn.Module, SplitBackward, Tensor, Tensor, Count, Count, Count]:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    plain = build()
    x = torch.randn(4, 5, 8)
    grad = torch.randn(4, 5, 8)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Count() as whole:
        output = plain(other)
        whole.counts.clear()
        output.backward(grad)
    output = model(mine)
    split = SplitBackward([output], [grad], [mine])
    with Count() as first:
        (input_grad,) = split.input_gradients()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(value is None for value in before.values()), "I leaves every parameter alone"
    with Count() as second:
        split.weight_gradients()
    assert input_grad is not None
    assert other.grad is not None
    return model, plain, split, input_grad, other.grad, whole, first, second


@pytest.mark.parametrize("name", MODULES)
def test_the_halves_give_the_bits_of_the_whole(name: str) -> None:
    build, unsplit = MODULES[name]
    model, plain, split, input_grad, expected, _, _, _ = both_ways(build)
    assert torch.equal(input_grad, expected)
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )
    share = split.unsplit / split.total if split.total else 0.0
    assert share == pytest.approx(unsplit, abs=0.02)


@pytest.mark.parametrize("name", ["linear", "norm", "attention", "convolution", "a layer used twice", "three times"])
def test_every_matrix_product_runs_once_and_in_its_own_half(name: str) -> None:
    build, _ = MODULES[name]
    _, _, _, _, _, whole, first, second = both_ways(build)
    if name == "convolution":  # one call of its kernel gives either half
        assert (first.products(), second.products(), whole.products()) == (1, 1, 1)
        return
    assert first.products() + second.products() == whole.products()
    weights = {"linear": 2, "norm": 1, "attention": 2, "convolution": 1, "a layer used twice": 2, "three times": 3}
    assert second.products() == weights[name], "W runs the products of weight gradients and no others"


def compare_norms(rank: int) -> int:
    """Split the backward of norms and convolutions in all memory formats; return how many were compared."""
    compared = 0
    for dimensions, form in ((2, torch.channels_last), (3, torch.channels_last_3d), (2, torch.contiguous_format)):
        batch_norm: Any = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
        instance_norm: Any = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dimensions]
        convolution: Any = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        builders: list[Callable[[], nn.Module]] = [
            lambda: nn.GroupNorm(2, 4),
            lambda: nn.GroupNorm(4, 4),
            lambda norm=batch_norm: norm(4),  # type: ignore[misc]
            lambda norm=batch_norm: norm(4).eval(),  # type: ignore[misc]
            lambda norm=instance_norm: norm(4, affine=True),  # type: ignore[misc]
            lambda: nn.LayerNorm(5),
            lambda: nn.RMSNorm(5),
            lambda conv=convolution: conv(4, 4, 3, padding=1, groups=2),  # type: ignore[misc]
        ]
        for build in builders:
            for dtype in (torch.float32, torch.bfloat16):
                for frozen in ("", "weight", "bias"):
                    torch.manual_seed(0)
                    model = build()
                    if frozen and getattr(model, frozen, None) is not None:
                        getattr(model, frozen).requires_grad_(False)
                    model = model.to(dtype).to(memory_format=form)  # type: ignore[call-overload]
                    x = torch.randn(3, 4, *[5] * dimensions).to(dtype).to(memory_format=form)
                    compare_halves(model, x)
                    compared += 1
    return compared


def compare_halves(model: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = model(mine), plain(other)
    grad = torch.randn(output.shape).to(output.dtype)
    expected.backward(grad)
    split = SplitBackward([output], [grad], [mine])
    (input_grad,) = split.input_gradients()
    split.weight_gradients()
    assert_same_bits(
        {"input": input_grad} | {key: parameter.grad for key, parameter in model.named_parameters()},
        {"input": other.grad} | {key: parameter.grad for key, parameter in plain.named_parameters()},
    )


def test_norms_in_all_memory_formats_have_the_bits_of_the_whole() -> None:
    """torch crashes if only the weight gradients of a group norm on channels_last are requested."""
    assert run_ranks(compare_norms, 1) == [3 * 8 * 2 * 3]


def test_batched_products_run_once_and_in_their_own_half() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bti,bio->bto", x, self.weight)

    model, plain, _, input_grad, expected, whole, first, second = both_ways(Experts)
    assert (first.products(), second.products(), whole.products()) == (1, 1, 2)
    assert torch.equal(input_grad, expected)
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )


def test_a_custom_function_runs_its_backward_once() -> None:
    Custom.calls = 0
    both_ways(Custom)
    assert Custom.calls == 2  # once in the plain model, once here


FIRST: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "an embedding": (
        lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda: torch.randint(0, 10, (3, 4)),
        2,
    ),
    "a linear layer": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)),
        lambda: torch.randn(3, 4, 8),
        1,
    ),
    "a custom function": (lambda: nn.Sequential(Custom(), nn.Linear(8, 8)), lambda: torch.randn(3, 4, 8), 1),
    "one layer": (lambda: nn.Linear(8, 8), lambda: torch.randn(3, 4, 8), 0),
    "a bare weight": (lambda: nn.Embedding(10, 8), lambda: torch.randint(0, 10, (3, 4)), 0),
    "a weight used at both ends": (lambda: Ends(), lambda: torch.randint(0, 8, (3, 8)), 1),
}


class Ends(nn.Module):
    """Embedding and head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(torch.tanh(functional.embedding(tokens, self.weight)), self.weight)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_stage_stops_where_the_data_enters(name: str) -> None:
    """Nobody waits for a gradient of its input; I still runs what leads to the first layer, and W that layer."""
    build, data, products = FIRST[name]
    torch.manual_seed(0)
    model, inputs = build(), data()
    plain = copy.deepcopy(model)
    output = plain(inputs)
    grad = torch.randn_like(output)
    with Count() as whole:
        output.backward(grad)
    split = SplitBackward([model(inputs)], [grad], [])
    with Count() as first:
        assert split.input_gradients() == []
    assert all(parameter.grad is None for parameter in model.parameters()), "I leaves every parameter alone"
    assert first.products() == products
    with Count() as second:
        split.weight_gradients()
    assert first.products() + second.products() == whole.products()
    assert split.unsplit == 0
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )


def test_between_the_halves_only_what_the_weights_need_is_kept() -> None:
    """The graph is freed by I, as a whole backward frees it: nothing of an exponential is left."""
    model = nn.Sequential(nn.Linear(8, 8), Exponential(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    output = model(x)
    split = SplitBackward([output], [torch.ones_like(output)], [x])
    assert Exponential.result is not None
    alive = Exponential.result
    assert alive() is not None
    del output
    split.input_gradients()
    gc.collect()
    assert alive() is None
    split.weight_gradients()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Exponential(nn.Module):
    """Keeps a weak reference to what autograd saves of it: its result, which the next operation multiplies by three."""

    result: Any = None

    def forward(self, x: Tensor) -> Tensor:
        value = torch.exp(x)
        Exponential.result = weakref.ref(value.untyped_storage())
        return value * 3


def test_a_plan_is_made_once_and_a_graph_of_another_form_gets_its_own() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    plans: list[Any] = []
    for turn, order in enumerate([(0, 1), (0, 1), (1, 0), (0, 2), (0, 1), (0,)]):
        x = torch.randn(3, 8, requires_grad=True)
        twin = copy.deepcopy(nn.ModuleList(layers))
        for layer in (*layers, *twin):
            layer.zero_grad()
        value, other = x, x
        for index in order:
            value, other = torch.tanh(layers[index](value)), torch.tanh(twin[index](other))
        grad = torch.randn(3, 8)
        torch.autograd.backward(other, grad)
        split = SplitBackward([value], [grad], [x], plans)
        (input_grad,) = split.input_gradients()
        split.weight_gradients()
        assert input_grad is not None
        assert torch.equal(input_grad, torch.as_tensor(x.grad))
        assert_same_bits(
            {key: parameter.grad for key, parameter in nn.ModuleList(layers).named_parameters()},
            {key: parameter.grad for key, parameter in twin.named_parameters()},
        )
        assert len(plans) == [1, 1, 2, 3, 3, 4][turn]


def test_a_leaf_that_every_forward_makes_anew_is_no_new_form_and_is_not_kept() -> None:
    linear = nn.Linear(8, 8)
    plans: list[Any] = []
    leaves: list[Any] = []
    for _ in range(3):
        x, leaf = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        leaves.append(weakref.ref(leaf))
        output = linear(x) * leaf
        split = SplitBackward([output], [torch.ones_like(output)], [x], plans)
        split.input_gradients()
        split.weight_gradients()
        assert torch.equal(torch.as_tensor(leaf.grad), linear(x).sum(0))
        del split, output, leaf
    gc.collect()
    assert len(plans) == 1
    assert all(reference() is None for reference in leaves)


@pytest.mark.parametrize("name", ["a custom function", "linear", "a layer used twice", "attention"])
def test_hooks_of_parameters_fire_once(name: str) -> None:
    counts: Counter[str] = Counter()
    model = MODULES[name][0]()
    named: list[tuple[str, Any]] = list(model.named_parameters())
    for key, parameter in named:
        parameter.register_hook(lambda grad, key=key: counts.update([f"{key} arrived"]))
        parameter.register_post_accumulate_grad_hook(lambda parameter, key=key: counts.update([f"{key} added"]))
    x = torch.randn(4, 5, 8, requires_grad=True)
    output = model(x)
    split = SplitBackward([output], [torch.ones_like(output)], [x])
    split.input_gradients()
    assert not counts
    split.weight_gradients()
    assert counts == Counter({f"{key} {what}": 1 for key, _ in named for what in ("arrived", "added")})


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpointing_recomputes_once_and_is_not_split(reentrant: bool) -> None:
    """In torch's zero-bubble schedules a checkpointed block runs once for every linear layer in it."""
    torch.manual_seed(0)
    runs = []
    inside = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    inside.register_forward_pre_hook(lambda *_: runs.append(1))
    before, after = nn.Linear(8, 8), nn.Linear(8, 8)
    everything = nn.ModuleList([inside, before, after])

    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(after(checkpoint(inside, before(x), use_reentrant=reentrant)))

    x, grad = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    torch.autograd.backward(forward(x), grad)
    expected = {key: parameter.grad for key, parameter in everything.named_parameters()}
    gradient, x.grad = x.grad, None
    everything.zero_grad()
    runs.clear()
    split = SplitBackward([forward(x)], [grad], [x])
    (input_grad,) = split.input_gradients()
    split.weight_gradients()
    assert len(runs) == 2
    assert input_grad is not None
    assert torch.equal(input_grad, torch.as_tensor(gradient))
    assert_same_bits({key: parameter.grad for key, parameter in everything.named_parameters()}, expected)
    inner = sum(parameter.numel() for parameter in inside.parameters())
    assert split.unsplit == (split.total if reentrant else inner)


@pytest.mark.parametrize("first", [False, True])
def test_a_compiled_region_comes_with_the_inputs_or_on_the_first_stage_with_the_weights(first: bool) -> None:
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    compiled: Any = torch.compile(inside, backend="aot_eager")
    after = nn.Linear(8, 8)
    everything = nn.ModuleList([inside, after])
    x, grad = torch.randn(4, 8, requires_grad=not first), torch.randn(4, 8)
    after(compiled(x)).backward(grad)
    expected = {key: parameter.grad for key, parameter in everything.named_parameters()}
    everything.zero_grad()
    split = SplitBackward([after(compiled(x))], [grad], [] if first else [x])
    split.input_gradients()
    split.weight_gradients()
    assert_same_bits({key: parameter.grad for key, parameter in everything.named_parameters()}, expected)
    assert split.unsplit == (0 if first else sum(parameter.numel() for parameter in inside.parameters()))


def test_mixed_precision_is_split() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    plain = copy.deepcopy(model)
    x, other = torch.randn(4, 8, requires_grad=True), torch.zeros(0)
    other = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = model(x), plain(other)
    grad = torch.randn(4, 8).to(mine.dtype)
    theirs.backward(grad)
    split = SplitBackward([mine], [grad], [x])
    (input_grad,) = split.input_gradients()
    assert all(parameter.grad is None for parameter in model.parameters())
    split.weight_gradients()
    assert input_grad is not None
    assert torch.equal(input_grad, torch.as_tensor(other.grad))
    assert split.unsplit == 0
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )


def test_outputs_of_several_kinds() -> None:
    """One output depends on input and weights, one on weights alone, one on the input alone, one gets no gradient."""
    torch.manual_seed(0)
    weight: Any = torch.randn(8, 8, requires_grad=True)
    other: Any = torch.randn(8, requires_grad=True)
    x = torch.randn(3, 8, requires_grad=True)

    def outputs() -> list[Tensor]:
        return [functional.linear(x, weight), other * 2, x * 3]

    grads = [torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)]
    expected = torch.autograd.grad(outputs(), [x, weight, other], grads)
    split = SplitBackward(outputs(), grads, [x])
    (input_grad,) = split.input_gradients()
    assert input_grad is not None
    assert torch.equal(input_grad, expected[0])
    assert weight.grad is None
    assert other.grad is None
    split.weight_gradients()
    assert_same_bits({"weight": weight.grad, "other": other.grad}, {"weight": expected[1], "other": expected[2]})


def test_a_graph_of_the_same_form_whose_input_stands_elsewhere_is_another_one() -> None:
    """A leaf of the model's own and the input change places: what leads to the input is then the other branch."""
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    plans: list[Any] = []
    for swapped in (False, True, False):
        grads = []
        for whole in (True, False):
            x, own = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
            one, other = (own, x) if swapped else (x, own)
            output = torch.tanh(one * first) + torch.tanh(other * second)
            first.grad = second.grad = None
            if whole:
                output.sum().backward()  # type: ignore[no-untyped-call]
                grad = x.grad
            else:
                split = SplitBackward([output], [torch.ones_like(output)], [x], plans)
                (grad,) = split.input_gradients()
                split.weight_gradients()
            grads.append((grad, first.grad, second.grad))
        for expected, got in zip(*grads, strict=True):
            assert expected is not None
            assert got is not None
            assert torch.equal(expected, got)


class Own(Tensor):
    """A tensor class that intercepts operations on it."""


def test_tensors_of_other_classes_are_run_backwards_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    usual, calls = torch.autograd.backward, 0

    def count(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        usual(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", count)
    engine.backward([x * 3], [torch.ones(3)])
    assert calls == 0
    engine.backward([(x * 2).as_subclass(Own)], [torch.ones(3)])
    assert calls > 0
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0, 5.0]

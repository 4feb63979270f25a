"""Forwards that modify their inputs in place, blocks that keep values as attributes: the bits of a plain loop."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)


class Activated(Block):
    """The activation is the first to use the input, but not the first module."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.relu(x))


class Functional(Block):
    def forward(self, x: Tensor) -> Any:
        return self.linear(functional.relu_(x))


class Augmented(Block):
    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.linear(x)


class Method(Block):
    def forward(self, x: Tensor) -> Any:
        doubled = x * 2
        x.add_(doubled.detach())
        return self.linear(x)


class Viewed(Block):
    def forward(self, x: Tensor) -> Any:
        x.view(-1).relu_()
        return self.linear(x)


class Residual(Block):
    """It reads its input again after the change."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.relu(x)) + x


BLOCKS = [Activated, Functional, Augmented, Method, Viewed, Residual]


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Module):
    """Activations in a Sequential, as VGG has them: each of its layers is a unit."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(4, 4), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).flatten(1))


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.relu, self.linear = nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, 4)

    def forward(self, features: list[Tensor]) -> Any:
        return self.linear(self.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({f"layer{index}": DenseLayer(4 + 4 * index) for index in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Dense(nn.Module):
    """Like DenseNet: norms and activations between the blocks, all in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        transition = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4))
        self.features = nn.Sequential(
            OrderedDict(
                stem=nn.Linear(4, 4), norm0=nn.BatchNorm1d(4), relu0=nn.ReLU(inplace=True), block1=DenseBlock(),
                transition=transition, block2=DenseBlock(), norm1=nn.BatchNorm1d(16),
            )
        )  # fmt: skip
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.classifier(functional.relu(self.features(x), inplace=True))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    how, _, kind = name.partition(" ")
    block = {block_class.__name__: block_class for block_class in BLOCKS}.get(kind, Block)
    if how == "sequential":
        return nn.Sequential(*(block() for _ in range(4)))
    return {"stack": lambda: Stack(block), "vgg": Plain, "densenet": Dense}[how]()


NAMES = [f"{how} {kind.__name__}" for how in ("sequential", "stack") for kind in BLOCKS] + ["vgg", "densenet"]


def same_as_a_loop(model: nn.Module, **options: Any) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    alone = copy.deepcopy(model)
    for inputs_part, wanted in zip(inputs.clone().tensor_split(4), targets.tensor_split(4), strict=True):
        (functional.mse_loss(alone(inputs_part), wanted) / 4).backward()  # type: ignore[no-untyped-call]
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=4, **options)
    pipe.step(inputs, targets)
    assert_same_bits(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in alone.named_parameters()},
    )
    assert_same_bits(dict(model.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.parametrize("name", NAMES)
def test_in_place_changes_equal_those_of_one_process(name: str) -> None:
    for family, recompute in (("1f1b", "none"), ("zb-h1", "none"), ("1f1b", "stage"), ("zb-v", "stage")):
        ranks = 2 if family == "zb-v" or name == "densenet" else 4
        same_as_a_loop(make(name), schedule=family, ranks=ranks, recompute=recompute)


def test_a_check_of_a_model_that_changes_its_inputs_compares_from_the_same_inputs() -> None:
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    assert sl.check(make("stack Augmented"), batch, ranks=2, loss_fn=functional.mse_loss).equal


class Sometimes(Block):
    def forward(self, x: Tensor) -> Any:
        return self.linear(self.relu(x) if x[0, 0] > 0 else x)


def test_an_in_place_change_in_a_later_step_is_refused() -> None:
    inputs = torch.tensor([[-1.0] * 4, [1.0] * 4])
    front = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        front.weight.copy_(torch.eye(4))
    model = nn.Sequential(front, Sometimes())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    with pytest.raises(sl.PipelineError, match="stage 1 changes its input in place in microbatch 1, but did not"):
        pipe.step(inputs, inputs)


# Blocks that keep values as attributes.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state: Tensor | None = None
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.linear(x)
        self.history = [self.state]
        return self.state.tanh()


class Keeps(nn.Module):
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent()
        self.last = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(x)
        return x + self.last


class Model(nn.Module):
    def __init__(self, read: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks if self.read else ():
            inner: Any = block.inner
            kept: Any = block.last if self.read == "last" else getattr(inner, self.read)
            x = x if not isinstance(kept, Tensor) else x + kept
        return x


def test_attributes_that_blocks_set_and_nobody_reads_are_allowed() -> None:
    for family in ("1f1b", "zb-h1"):
        torch.manual_seed(0)
        same_as_a_loop(Model(), schedule=family, ranks=2)


@pytest.mark.parametrize("read", ["last", "state", "history"])
def test_attributes_that_the_forward_reads_on_another_stage_are_refused(read: str) -> None:
    pipe = sl.Pipeline(Model(read), loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    with pytest.raises(sl.PipelineError, match=rf"the forward reads blocks\.\d\.[a-z.]*{read}, which blocks"):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


# Inputs that share memory.


class Twice(Block):
    """It returns one tensor twice, or with a view of it."""

    def __init__(self, part: int = 4) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        return (hidden, hidden) if self.part == 4 else (hidden, hidden[:, : self.part])


class PassesBoth(nn.Module):
    def forward(self, pair: Any) -> Any:
        return pair[0], pair[1]


class ChangesOne(Block):
    def __init__(self, which: int, copies: bool = False) -> None:
        super().__init__()
        self.which, self.copies = which, copies

    def forward(self, pair: Any) -> Any:
        tensors = list(pair)
        if self.copies:
            tensors[self.which] = tensors[self.which].clone()
        tensors[self.which].mul_(2)
        return self.linear(tensors[0]) + tensors[1].sum()


class Halves(Block):
    """Its outputs share a storage, but no element."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        return hidden[:, 0::2], hidden[:, 1::2]


class ChangesHalf(Block):
    def forward(self, pair: Any) -> Any:
        pair[0].mul_(2)
        return self.linear(torch.cat(pair, dim=1))


class TwiceInUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Twice(), ChangesOne(0), Twice(), ChangesOne(0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


SHARED = r"stage {} changes its input \d in place in microbatch 0, which shares memory with its input \d"


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("part", "which"), [(4, 0), (4, 1), (2, 0), (2, 1)])
def test_a_change_of_one_of_two_inputs_that_share_memory_is_refused(
    part: int, which: int, schedule: str, recompute: str
) -> None:
    model = nn.Sequential(Twice(part), ChangesOne(which))
    with pytest.raises(sl.StagelineError, match=SHARED.format(1)):
        same_as_a_loop(model, ranks=2, schedule=schedule, recompute=recompute)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_shared_memory_is_known_behind_a_stage_that_passes_it_on(recompute: str) -> None:
    model = nn.Sequential(Twice(), PassesBoth(), ChangesOne(0))
    with pytest.raises(sl.StagelineError, match=SHARED.format(2)):
        same_as_a_loop(model, ranks=3, schedule="1f1b", recompute=recompute)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_shared_memory_is_known_between_units(schedule: str) -> None:
    with pytest.raises(sl.StagelineError, match=SHARED.format(1)):
        same_as_a_loop(TwiceInUnits(), ranks=2, schedule=schedule)


def test_a_batch_whose_inputs_share_memory_is_refused_if_one_is_modified() -> None:
    model = nn.Sequential(ChangesOne(0), nn.Linear(4, 4))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    x = torch.ones(4, 4)
    with pytest.raises(sl.StagelineError, match=SHARED.format(0)):
        pipe.step((x, x), torch.ones(4, 4))


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_shared_memory_that_no_change_reaches_gives_the_bits_of_a_loop(schedule: str, recompute: str) -> None:
    for model in (nn.Sequential(Twice(), ChangesOne(0, copies=True)), nn.Sequential(Halves(), ChangesHalf())):
        same_as_a_loop(model, ranks=2, schedule=schedule, recompute=recompute)


def refused(rank: int) -> list[str]:
    messages = []
    for layers in ([Twice(2), PassesBoth(), ChangesOne(1)], [Halves(), PassesBoth(), ChangesHalf()]):
        torch.manual_seed(0)
        pipe = sl.Pipeline(nn.Sequential(*layers), loss_fn=functional.mse_loss, schedule="1f1b", microbatches=2)
        try:
            pipe.step(torch.ones(4, 4), torch.ones(4, 4))
            messages.append("")
        except sl.StagelineError as error:
            messages.append(str(error))
        pipe.zero_grad()
    return messages


def test_processes_refuse_a_change_of_shared_memory() -> None:
    for shared, apart in run_ranks(refused, 3):
        assert "stage 2 changes its input 1 in place in microbatch 0, which shares memory with its input 0" in shared
        assert apart == ""


# Frames that reuse a tensor that a unit has modified.


class Starts(nn.Sequential):
    """A pre-activation block."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(4, 4))


class Adds(Block):
    """Writes into a tensor of the forward."""

    def forward(self, x: Tensor, total: Tensor) -> Any:
        h = self.linear(x)
        total.add_(h.detach())
        return h


class Writes(Block):
    def forward(self, x: Tensor, total: Tensor) -> Any:
        h = self.linear(x)
        if h.sum().item() < 1e9:  # which needs contents
            total[:, 0] = h.detach().mean(1)
        return h


class Framed(nn.Module):
    """Uses the input of a block again."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        kinds: dict[str, type[nn.Module]] = {"functional": Functional, "sum": Adds, "column": Writes}
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(kinds.get(case, Starts)() for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h, total = self.stem(x), torch.zeros(x.shape)
        before = h + 2
        if self.case in ("sum", "column"):
            for block in self.blocks:
                h = block(h, total)
            return self.head(h) + total
        if self.case in ("before", "after"):
            y = h.view(-1, 4)
            for block in self.blocks:
                y = block(y)
            return self.head(y) + (before if self.case == "before" else h)
        h = h * 1
        first = h
        for block in self.blocks:
            h = block(h) if self.case in ("first", "unused") else block(h) + h
        return self.head(h + first if self.case == "first" else h)


@pytest.mark.parametrize("case", ["residual", "functional", "first", "before", "sum", "column"])
def test_a_tensor_that_a_unit_modifies_and_another_stage_uses_again_is_refused(case: str) -> None:
    for family in ("1f1b", "zb-v"):
        pipe = sl.Pipeline(Framed(case), loss_fn=functional.mse_loss, schedule=family, ranks=2, microbatches=4)
        with pytest.raises(sl.PipelineError, match=r"blocks\.\d modifies one of its inputs .* on another stage"):
            pipe.step(torch.randn(8, 4), torch.randn(8, 4))


@pytest.mark.parametrize("case", ["after", "unused"])
def test_a_modified_tensor_may_be_used_where_it_arrives_modified(case: str) -> None:
    for family in ("1f1b", "zb-v"):
        torch.manual_seed(0)
        same_as_a_loop(Framed(case), schedule=family, ranks=2)

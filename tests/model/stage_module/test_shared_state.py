"""State that layers of several stages share: refused by name, unless it is harmless."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, run_ranks

KEPT: Any = None


class Layer(nn.Module):
    box: Any
    kept: Any

    def __init__(self, box: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__["box"] = box

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


class IntoDict(Layer):
    def forward(self, x: Tensor) -> Any:
        self.box["h"] = super().forward(x)
        return self.box["h"]


class FromDict(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.box["h"]


class IntoList(Layer):
    def forward(self, x: Tensor) -> Any:
        self.box.append(super().forward(x))
        return self.box[-1]


class FromList(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.box.pop()


class IntoObject(Layer):
    def forward(self, x: Tensor) -> Any:
        self.box.kept = super().forward(x)
        return self.box.kept


class FromObject(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.box.kept


class IntoSelf(Layer):
    def forward(self, x: Tensor) -> Any:
        self.kept = super().forward(x)
        return self.kept


class IntoGlobal(Layer):
    def forward(self, x: Tensor) -> Any:
        global KEPT
        KEPT = super().forward(x)
        return KEPT


class FromGlobal(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + KEPT


class Common:
    kept: Any = None


class IntoClass(Layer):
    def forward(self, x: Tensor) -> Any:
        Common.kept = super().forward(x)
        return Common.kept


class FromClass(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + Common.kept


class IntoTensor(Layer):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        self.box.copy_(h.detach().mean(0))
        return h


class FromTensor(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.box


class Mask(Layer):
    def forward(self, x: Tensor) -> Any:
        self.box["h"] = (x > 0).float()
        return super().forward(x)


class Number(Layer):
    def forward(self, x: Tensor) -> Any:
        self.box["h"] = x.detach().abs().mean().item()
        return super().forward(x)


class Registered(Layer):
    def __init__(self, other: Layer) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.other.kept


def closures() -> tuple[nn.Module, nn.Module]:
    kept: dict[str, Tensor] = {}

    class Into(Layer):
        def forward(self, x: Tensor) -> Any:
            kept["h"] = super().forward(x)
            return kept["h"]

    class From(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + kept["h"]

    return Into(), From()


def pair(case: str) -> tuple[nn.Module, nn.Module]:
    box: Any = {"h": None} if case in ("mask", "number") else {}
    if case == "module in a list":
        into = IntoSelf()
        return into, FromObject(into)
    if case == "registered module":
        into = IntoSelf()
        return into, Registered(into)
    if case == "closure":
        return closures()
    kinds: dict[str, tuple[type[Layer], type[Layer], Any]] = {
        "dict": (IntoDict, FromDict, box),
        "nested dict": (IntoDict, FromDict, box),
        "list": (IntoList, FromList, []),
        "deque": (IntoList, FromList, deque()),
        "object": (IntoObject, FromObject, SimpleNamespace(kept=None)),
        "global": (IntoGlobal, FromGlobal, None),
        "class": (IntoClass, FromClass, None),
        "tensor": (IntoTensor, FromTensor, torch.zeros(4)),
        "mask": (Mask, FromDict, box),
        "number": (Number, FromDict, box),
    }
    writer, reader, box = kinds[case]
    return writer(box), reader(box)


CASES = [
    "dict", "list", "deque", "object", "module in a list", "registered module", "global", "class", "closure", "tensor",
    "mask", "number",
]  # fmt: skip


class Whole(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(8, 4), torch.randn(8, 4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("how", "family"),
    [("sequential", "1f1b"), ("sequential", "zb-h1"), ("sequential", "chimera"), ("list", "1f1b"), ("model", "1f1b")],
)
def test_a_value_that_a_layer_stores_for_another_stage_is_refused(how: str, case: str, family: str) -> None:
    global KEPT
    KEPT, Common.kept = None, None
    first, last = pair(case)
    layers = [first, Layer(), Layer(), last]
    model: Any = {"sequential": nn.Sequential(*layers), "list": layers, "model": Whole(layers)}[how]
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=family, ranks=4, microbatches=4)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    with pytest.raises(sl.PipelineError, match=r"can also reach.*sl\.skippable|as an attribute"):
        pipe.step(*batch())
    assert all(torch.equal(one, two) for one, two in zip(before, pipe.parameters(), strict=True))


class Late(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        h = super().forward(x)
        if self.calls > 30:
            self.box["h"] = h
        return h


def test_a_value_that_is_stored_in_a_later_step_is_refused() -> None:
    box = {"h": torch.zeros(4)}
    model = nn.Sequential(Layer(), Late(box), Layer(), FromDict(box))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    for _ in range(7):
        pipe.step(*batch())
    with pytest.raises(
        sl.PipelineError, match=r"of stage 0 stores a tensor .* in 1\.box\['h'\], which stage 1 can also reach"
    ):
        pipe.step(*batch())


def on_processes(rank: int) -> str:
    box: dict[str, Any] = {}
    pipe = sl.Pipeline([IntoDict(box), FromDict(box)], loss_fn=functional.mse_loss, microbatches=2)
    try:
        pipe.step(*batch())
    except sl.PipelineError as error:
        return str(error)
    return ""


def test_processes_refuse_shared_state() -> None:
    for error in run_ranks(on_processes, 2):
        assert "0 of stage 0 stores a tensor of shape (4, 4) in 0.box['h']" in error


def same_as_a_loop(model: nn.Module, schedule: str = "1f1b", ranks: int = 2, **options: Any) -> None:
    alone = copy.deepcopy(model)
    inputs, targets = batch()
    for _ in range(2):
        for part, wanted in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
            (functional.mse_loss(alone(part), wanted) / 4).backward()  # type: ignore[no-untyped-call]
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, ranks=ranks, microbatches=4, **options)
    for _ in range(2):
        pipe.step(inputs, targets)
    assert_same_bits(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in alone.named_parameters()},
    )
    assert_same_bits(dict(model.named_buffers()), dict(alone.named_buffers()))


def test_layers_of_one_stage_may_share_state() -> None:
    box: dict[str, Any] = {}
    same_as_a_loop(nn.Sequential(IntoDict(box), FromDict(box), Layer(), Layer()))


class Table(nn.Module):
    """Computes a table from the length of its input, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(self.length).float().cos()
        return x * self.table[: x.shape[1]]


class Counted(Layer):
    """Counts its calls and logs their names in a shared dict, and reads a table there."""

    def __init__(self, box: dict[str, Any], table: Table) -> None:
        super().__init__(box)
        self.table = table

    def forward(self, x: Tensor) -> Any:
        self.box["calls"] += 1
        self.box["names"].append(type(self).__name__)
        return super().forward(self.table(x))


def test_tables_counters_and_logs_may_be_shared() -> None:
    box: dict[str, Any] = {"calls": 0, "names": []}
    table = Table()
    same_as_a_loop(nn.Sequential(*(Counted(box, table) for _ in range(4))))


def test_hooks_may_collect_outputs() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    pipe.step(*batch())
    assert len(seen) == 16


# One module with buffers in two stages.


class Mean(nn.Module):
    """Keeps a running mean as a buffer, in place or as another tensor."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        now = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.in_place:
            self.mean.copy_(now)
        else:
            self.mean = now
        return x - self.mean


class Rotary(nn.Module):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4).float())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


@pytest.mark.parametrize("how", ["sequential", "list", "model"])
def test_a_norm_with_running_statistics_in_two_stages_is_refused_before_the_first_step(how: str) -> None:
    norm = nn.BatchNorm1d(4)
    layers: list[nn.Module] = [nn.Sequential(Layer(), norm), nn.Sequential(Layer(), norm)]
    model: Any = {"sequential": nn.Sequential(*layers), "list": layers, "model": Whole(layers)}[how]
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    with pytest.raises(sl.StagelineError, match=r"1, a BatchNorm1d, is used by stages 0 and 1"):
        pipe.step(*batch())
    assert norm.num_batches_tracked == 0
    pipe.eval()
    assert pipe.predict(batch()[0]).shape == (8, 4)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_module_whose_buffers_change_in_two_stages_is_refused(in_place: bool) -> None:
    mean = Mean(in_place)
    model = nn.Sequential(Layer(), mean, Layer(), mean)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    with pytest.raises(sl.PipelineError, match=r"1 of stage 0 stores a tensor .* in 1\.mean"):
        pipe.step(*batch())


def test_several_stages_may_use_a_module_whose_buffers_do_not_change() -> None:
    norm = nn.BatchNorm1d(4)
    same_as_a_loop(nn.Sequential(Layer(), norm, norm, Layer(), Layer()), ranks=2)  # both uses in one stage
    rotary = Rotary()
    same_as_a_loop(nn.Sequential(Layer(), rotary, Layer(), rotary))
    free = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    same_as_a_loop(nn.Sequential(Layer(), free, Layer(), free))
    frozen = nn.BatchNorm1d(4, affine=False).eval()
    same_as_a_loop(nn.Sequential(Layer(), frozen, Layer(), frozen))


# Objects that a forward creates and passes to its units.


class Notes:
    """State that blocks share."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: dict[str, Tensor] = {}
        self.total = torch.zeros(4)
        self.scale = 1.5

    def update(self, value: Tensor) -> None:
        self.kept["h"] = value


class Noting(Layer):
    def forward(self, x: Tensor, notes: Any = None) -> Any:
        if self.box == "number":
            notes.calls += 1
        elif self.box == "method":
            notes.update(x * 2)
        elif self.box == "bound":
            notes(x * 2)
        elif self.box == "tensor":
            notes.total.add_(x.detach().mean(0))
        elif self.box == "dict of objects":
            notes["first"].calls += 1
        elif self.box == "given back":
            notes.kept = super().forward(x if notes.kept is None else notes.kept)
            return notes
        scale = getattr(notes, "scale", 1.0)
        return super().forward(x) * scale


@dataclass
class State:
    kept: Any = None


class Told(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(Noting(case) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        notes: Any = Notes()
        if self.case == "given back":
            state: Any = State()
            for block in self.blocks:
                state = block(x, state)
            return state.kept
        notes = {"bound": notes.update, "dict of objects": {"first": notes}}.get(self.case, notes)
        for block in self.blocks:
            x = block(x, notes)
        return x


@pytest.mark.parametrize("case", ["number", "method", "bound", "tensor", "dict of objects"])
def test_a_unit_that_changes_an_object_among_its_inputs_is_refused(case: str) -> None:
    pipe = sl.Pipeline(Told(case), loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    with pytest.raises(sl.PipelineError, match=r"blocks\.0 changes .* of a \w+ among its inputs, which other stages"):
        pipe.step(*batch())


@pytest.mark.parametrize("case", ["read", "given back"])
def test_units_may_read_or_return_an_object(case: str) -> None:
    same_as_a_loop(Told(case))


# Numbers that the forward counts outside of its units.


class Counting(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.list, self.dict, self.object = [0], {"n": 0, "longest": 0}, SimpleNamespace(n=0)
        self.of_units = {"calls": 0, "names": []} if case == "in units" else None
        self.blocks = nn.ModuleList(
            Counted(self.of_units, Table()) if self.of_units is not None else Layer() for _ in range(4)
        )

    def forward(self, x: Tensor) -> Any:
        if self.case == "list":
            self.list[0] += 1
        elif self.case == "dict":
            self.dict["n"] += 1
        elif self.case == "object":
            self.object.n += 1
        elif self.case == "longest":
            self.dict["longest"] = max(self.dict["longest"], x.shape[1])
        for block in self.blocks:
            x = block(x)
        return x * (1 + self.list[0] + self.dict["n"] + self.object.n + self.dict["longest"])


@pytest.mark.parametrize("case", ["list", "dict", "object"])
def test_a_counter_of_the_forward_in_a_container_is_refused(case: str) -> None:
    pipe = sl.Pipeline(Counting(case), loss_fn=functional.mse_loss, ranks=2, microbatches=1)
    with pytest.raises(sl.PipelineError, match=rf"the forward changes {case}.* of Counting every time"):
        pipe.step(*batch())


@pytest.mark.parametrize("case", ["longest", "in units"])
def test_numbers_of_the_forward_that_settle_and_counters_of_units_are_fine(case: str) -> None:
    same_as_a_loop(Counting(case))


# Data other than tensors, and other places to store it.


def helper() -> None:
    """Has an attribute set from outside."""


class Leaves(Layer):
    """Stores what it computed, as its case says."""

    def forward(self, x: Tensor) -> Any:
        case, box = self.box
        h = super().forward(x)
        mean = h.detach().mean(0)
        if case == "array":
            box.kept = mean.numpy().copy()
        elif case == "array in place":
            box.kept[:] = mean.numpy()
        elif case == "list of floats":
            box.kept = mean.tolist()
        elif case == "tuple of floats":
            box.kept = tuple(mean.tolist())
        elif case == "text":
            box.kept = str(mean.sum().item())
        elif case == "function":
            helper.kept = mean  # type: ignore[attr-defined]
        elif case == "setattr":
            setattr(helper, case, mean)
        elif case == "library":
            functional._kept = mean  # type: ignore[attr-defined]
        elif case == "weak":
            box.strong = mean
            box.kept["h"] = mean
        elif case == "name":
            box.kept = type(self).__name__
        elif case == "sizes":
            box.kept = tuple(x.shape)
        elif case == "log":
            box.kept += f"{mean.sum().item()} "
        elif case == "history":
            box.kept = [*box.kept, mean.sum().item()]
        elif case == "counts":
            box.kept[0] += 1
        return h


class Takes(Layer):
    def forward(self, x: Tensor) -> Any:
        case, box = self.box
        if case == "function":
            return super().forward(x) + helper.kept  # type: ignore[attr-defined]
        if case == "setattr":
            return super().forward(x) + getattr(helper, case)
        if case == "library":
            return super().forward(x) + functional._kept  # type: ignore[attr-defined]
        return super().forward(x) + (0.0 if box.kept is None else float(len(str(type(box.kept)))))


def left(case: str) -> nn.Sequential:
    kept: Any = {
        "array in place": np.zeros(4, np.float32), "counts": np.zeros(1, np.int64),
        "weak": weakref.WeakValueDictionary(), "log": "", "history": [0.0],
    }.get(case)  # fmt: skip
    box = (case, SimpleNamespace(kept=kept))
    return nn.Sequential(Layer(), Leaves(box), Layer(), Takes(box))


@pytest.mark.parametrize(
    "case",
    [
        "array", "array in place", "list of floats", "tuple of floats", "text", "function", "setattr", "library",
        "weak",
    ],
)  # fmt: skip
def test_data_that_a_layer_stores_for_another_stage_is_refused(case: str) -> None:
    pipe = sl.Pipeline(left(case), loss_fn=functional.mse_loss, ranks=2, microbatches=2)
    try:
        with pytest.raises(sl.PipelineError, match=r"1 of stage 0 stores an? .* which stage 1 can also reach"):
            pipe.step(*batch())
    finally:
        vars(functional).pop("_kept", None)
        vars(helper).clear()


@pytest.mark.parametrize("case", ["name", "sizes", "log", "history", "counts"])
def test_names_sizes_logs_and_counts_may_be_stored(case: str) -> None:
    same_as_a_loop(left(case))

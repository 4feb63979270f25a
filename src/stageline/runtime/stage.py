"""One stage on one rank: its forward, its backward whole or in halves, and what it keeps between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.autograd import engine, hooks
from stageline.autograd.graph_plan import Plan, checkpointed
from stageline.autograd.recompute import Recompute, training
from stageline.autograd.split_backward import Arriving, SplitBackward
from stageline.common.errors import StagelineError, TransportError, shorten
from stageline.model.skips import SkipPart, carried
from stageline.model.stage_module.shared_state import SharedStateWatch
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.units import layers_of
from stageline.runtime.guards.foreign_reads import ForeignReads
from stageline.runtime.guards.inner_backward import Dropping
from stageline.runtime.guards.loss_graph import refuse_loss
from stageline.runtime.guards.loss_reads import LossReads
from stageline.runtime.guards.wrappers import wrapper_in
from stageline.runtime.stage_inputs import Takes
from stageline.tensors.aliases import Pairs, Shared
from stageline.tensors.buffers import Buffers, Snapshot
from stageline.tensors.pytree import Leaf, flatten, tensors_of, unflatten
from stageline.tensors.random_numbers import Generators, draws, generator_alone, random_numbers
from stageline.tensors.subclasses import cloned, detached
from stageline.tensors.thread_context import plain_precision

Loss = Callable[[Any, Any], Any]
"""Of output and target: one number as a tensor, or that and a dict of metrics."""

_NOTHING: AbstractContextManager[Any] = nullcontext()

LOSS = "loss_fn"
"""The name under which a loss function draws random numbers."""


@dataclass
class _Kept:
    """What a microbatch leaves between its forward and its backward."""

    inputs: list[Leaf]
    tree: str
    step: int
    keywords: Mapping[str, Any]
    shared: Pairs = ()
    """Places of inputs that share memory in one process."""
    outputs: list[Leaf] = field(default_factory=list)
    target: Any = None
    weight: float | None = None
    """Of the loss; None where there is no loss."""
    scale: float = 1.0
    """What its gradients are multiplied by."""
    loss: Tensor | None = None
    split: SplitBackward | None = None
    draws_again: bool = False
    """Whether its backward draws random numbers."""
    before: Snapshot = ()
    """Buffers as they were before the forward, where it is to be run once more."""
    versions: list[int] = field(default_factory=list)
    """Of the inputs: they grow with every change in place."""
    hooks: int = 0
    """How many hooks were registered before its forward."""
    direct: bool = True
    """Whether its weight gradients may be added without autograd."""


@dataclass(frozen=True)
class StageOptions:
    """How stages run."""

    loss_fn: Loss
    seed: int = 0
    recompute: Recompute = field(default_factory=Recompute)


class Stage:
    """A part of the model, run microbatch by microbatch.

    Tensors that arrive are leaves of this stage's own graph, so a backward stops at them, and their gradients are what
    the stage before waits for.
    """

    def __init__(
        self,
        index: int,
        part: nn.Sequential,
        options: StageOptions,
        *,
        spread: bool = True,
        loss_reads: LossReads | None = None,
        watch: SharedStateWatch | None = None,
        foreign: ForeignReads | None = None,
    ) -> None:
        """`part` holds the layers by their names in the whole model; `spread` as below.

        `loss_reads` calls loss_fn on the last stage, and watches what it reads. `watch` looks at what the layers share
        with those of other stages, `foreign` at what they read of others' parameters.
        """
        self.index = index
        self._name = f"stage {index}"
        self.part = part
        self.options = options
        self._layers = layers_of(part)
        self._takes = {name: Takes.of(layer) for name, layer in self._layers}
        self._random = {name for name, layer in units_of(part) if draws(layer)}
        self._watched: set[tuple[str, bool]] = set()
        # A stage that the user gave as such is called as that module is: a tuple is its arguments. The layers of an
        # nn.Sequential are chained as it chains them, wherever it is cut.
        self._spreads = spread and len(self._layers) == 1 and not self._takes[self._layers[0][0]].one
        self._changes_input = bool(self._layers) and _begins_in_place(self._layers[0][1])
        self._replay = part.replay if isinstance(part, StagePart) else None
        self._loss_reads = loss_reads
        self._watch = None if isinstance(part, StagePart) else watch  # there, units are looked at one by one
        self._changed: dict[Any, list[bool]] = {}
        """Which of its inputs the stage changes in place, by their form."""
        self._shared: Shared | None = None
        self._dropping = Dropping()
        self._skips = part if isinstance(part, SkipPart) else None
        if self._replay is not None:
            self._replay.watch, self._replay.foreign = watch, foreign
        self._foreign = None if self._replay is not None else foreign
        self._buffers = Buffers(part)
        self._kept: dict[int, _Kept] = {}
        self._refreshed: tuple[int, bool] | None = None
        self._plans: list[Plan] = []
        self._hooks: int | None = None
        self._held = self._wrapped = False
        self.changed: Sequence[bool] = ()
        """For each gradient that the last backward gave, whether a hook on the input changed it; empty for none."""
        self._unsplit = self._total = 0
        self._looked, self._checkpoints = -1, False

    def forward(
        self,
        microbatch: int,
        step: int,
        leaves: Sequence[Leaf],
        tree: str,
        wants: Sequence[bool],
        train: bool,
        keywords: Mapping[str, Any],
        shared: Pairs = (),
    ) -> tuple[list[Leaf], str]:
        """Run F; give back the output's leaves and the shape of its tree. `shared` are inputs that share memory."""
        inputs: list[Leaf] = [
            detached(leaf, want) if isinstance(leaf, Tensor) else leaf for leaf, want in zip(leaves, wants, strict=True)
        ]
        kept = _Kept(inputs, tree, step, keywords, shared)
        if train:
            self._count_hooks(kept)
        if isinstance(self.part, StagePart) and self._refreshed != (step, train):
            self.part.refresh()
            self._refreshed = (step, train)
        if train and self.options.recompute.stages:
            kept.before = self._buffers.before()
            kept.versions = [leaf._version for leaf in tensors_of(inputs)]
        with _graph_if(train), self._around(train, self._name):
            outputs, shape = flatten(self._guarded(kept, microbatch), self._name)
        if train:
            kept.outputs = outputs
            self._kept[microbatch] = kept
            if self.options.recompute.stages:
                self._buffers.after(kept.before)
                outputs = kept.outputs = [
                    detached(leaf, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in outputs
                ]
        return outputs, shape

    def _count_hooks(self, kept: _Kept) -> None:
        """Note how many hooks were registered; where there are more, see whether accumulators or wrappers have some."""
        kept.hooks = hooks.registered()
        if kept.hooks != self._hooks and not self._kept:
            self._hooks, self._held = kept.hooks, hooks.accumulators_held(self.part.parameters())
            self._wrapped = bool(wrapper_in(self.part))
        kept.direct = not self._held and kept.hooks == self._hooks

    def _around(self, train: bool, what: str) -> AbstractContextManager[Any]:
        """What a forward runs in."""
        if train and self.options.recompute.stages:
            # With a graph, so that kernels choose as they will when it runs again, and outputs say whether they want
            # a gradient; what the graph would keep is dropped.
            return self._dropping.around(what)
        if train and self.options.recompute.chosen is not None:
            return training(self.options.recompute)
        return _NOTHING

    def _guarded(self, kept: _Kept, microbatch: int) -> Any:
        try:
            return self._run(kept, microbatch)
        except RuntimeError as error:
            if "leaf Variable" in str(error) and "in-place" in str(error):
                raise StagelineError(
                    f"stage {self.index} changes what it is given in place in microbatch {microbatch}, and did not "
                    "when it was first given such; let it do so always, or work on a copy (x = x.clone())"
                ) from error
            raise

    def _run(self, kept: _Kept, microbatch: int) -> Any:
        """Run the layers; those that draw random numbers draw what step, microbatch and their name say."""
        form = (kept.tree, len(kept.inputs), self.part.training, torch.is_grad_enabled())
        changed = self._changed.get(form)
        given = self._copied(kept.inputs, changed)
        shared = Shared(kept.shared, kept.inputs, given) if kept.shared else None
        value = unflatten(given, kept.tree)
        if self._skips is not None:
            value = self._run_with_skips(self._skips, kept, microbatch, value)
        else:
            value = self._run_layers(kept, microbatch, value)
        if changed is None:
            self._changed[form] = [_was_changed(leaf) for leaf in given]
        if shared is not None:
            self._refuse_change(shared, microbatch)
            self._shared = shared
        return value

    def _refuse_change(self, shared: Shared, microbatch: int) -> None:
        places = shared.changed()
        if places is not None:
            raise StagelineError(
                f"stage {self.index} changes its input {places[0]} in place in microbatch {microbatch}, which shares "
                f"memory with its input {places[1]}; in one process that changes both, and between stages it cannot: "
                "let it work on a copy (x = x.clone()), or let it be given a copy of one of them"
            )

    def take_joined(self) -> dict[int, int]:
        """What of the memory of the last forward would be one in one process; asked once."""
        shared, self._shared = self._shared, None
        return {} if shared is None else shared.joined()

    def _copied(self, inputs: Sequence[Leaf], changed: Sequence[bool] | None) -> list[Leaf]:
        """What the layers are given: copies of what they change in place, as they may in one process.

        A tensor that arrived is a leaf of the stage's graph, and the stage before may still need it. The first time,
        all are copied, to see which of them are changed.
        """
        if changed is not None:
            return [
                cloned(leaf) if isinstance(leaf, Tensor) and (copies or self._changes_input) else leaf
                for leaf, copies in zip(inputs, changed, strict=True)
            ]
        everything = self._changes_input or self.options.recompute.stages
        return [
            cloned(leaf) if isinstance(leaf, Tensor) and (everything or leaf.requires_grad) else leaf for leaf in inputs
        ]

    def _run_with_skips(self, part: SkipPart, kept: _Kept, microbatch: int, value: Any) -> Any:
        """Run the layers with the skips that arrived beside their value, and pass on those that later stages pop."""
        skips: dict[str, Any] = {}
        if part.arrives:
            value, arrived = value
            skips = dict(zip(part.arrives, arrived, strict=True))
        with carried(skips):
            value = self._run_layers(kept, microbatch, value)
        return (value, tuple(skips.pop(name) for name in part.leaves)) if part.leaves else value

    def _run_layers(self, kept: _Kept, microbatch: int, value: Any) -> Any:
        if self._replay is not None:
            mode = self.part.training
            self._replay.draw = lambda name, call: self._drawing(name, mode, kept.step, microbatch, call)
        watch = self._watch
        closely = watch is not None and watch.closely()
        first, arrived = self._layers[0][0] if self._layers else "", value
        if watch is not None and not closely:
            watch.before(first)
        for number, (name, layer) in enumerate(self._layers):
            keywords = self._takes[name].chosen(kept.keywords) if kept.keywords else {}
            given = value
            if watch is not None and closely:
                watch.before(name)
            call = self._call if self._foreign is None else partial(self._foreign.call, name, self._call)
            value = self._drawing(
                name, layer.training, kept.step, microbatch, call, layer, value, number == 0, keywords
            )
            if watch is not None and closely:
                watch.after(name, given, value)
        if watch is not None and not closely:
            watch.after(first, arrived, value)
        return value

    def _drawing(self, name: str, mode: bool, step: int, microbatch: int, call: Callable[..., Any], *args: Any) -> Any:
        """Call something that may draw random numbers; the first time, see whether it does."""
        if name in self._random:
            with random_numbers(self.options.seed, step, microbatch, name):
                return call(*args)
        if (name, mode) in self._watched:
            return call(*args)
        with random_numbers(self.options.seed, step, microbatch, name):
            before = Generators.now()
            value = call(*args)
            if before.moved():
                self._random.add(name)
        self._watched.add((name, mode))
        return value

    def watch_again(self) -> None:
        """See again which layers draw random numbers."""
        self._watched.clear()

    def _call(self, layer: nn.Module, value: Any, first: bool, keywords: Mapping[str, Any]) -> Any:
        if first and self._spreads and isinstance(value, tuple):
            return layer(*value, **keywords)
        if first and self._spreads and isinstance(value, dict):
            return layer(**value, **keywords)
        return layer(value, **keywords)

    def check_keywords(self, names: Sequence[str]) -> None:
        """Refuse keyword inputs that no layer of the stage takes."""
        for name in names:
            if not any(takes.chosen({name: None}) for takes in self._takes.values()):
                known = sorted({each for takes in self._takes.values() for each in takes.names})
                raise StagelineError(
                    f"stage_kwargs has {name!r} for stage {self.index}, and no layer of that stage takes it; "
                    f"its layers take {', '.join(known)}"
                )

    def loss(
        self, microbatch: int, step: int, output: Any, target: Any, weight: float, train: bool, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of the last stage, and its metrics; the backward starts from loss × weight × scale."""
        dropped = train and self.options.recompute.stages
        with _graph_if(train), self._around(train, LOSS) if dropped else _NOTHING:
            weighed, metrics = self._drawing(
                LOSS, self.part.training, step, microbatch, self._loss, output, target, weight, step, microbatch
            )
            root = weighed if scale == 1.0 else weighed * scale
        if train and not weighed.requires_grad:
            refuse_loss(self.index, microbatch, self.part, self._kept[microbatch].inputs, output)
        if train:
            kept = self._kept[microbatch]
            kept.target, kept.weight, kept.scale = target, weight, scale
            kept.loss = None if self.options.recompute.stages else root
            kept.outputs = []  # the loss is all that its backward needs; logits are large
        return weighed.detach(), metrics

    def _loss(
        self, output: Any, target: Any, weight: float, step: int, microbatch: int
    ) -> tuple[Tensor, dict[str, Any]]:
        try:
            if self._loss_reads is None:
                loss = self.options.loss_fn(output, target)
            else:
                loss = self._loss_reads(output, target, step, microbatch)
        except Exception as error:
            if target is not None or isinstance(error, StagelineError):
                raise
            raise StagelineError(
                f"loss_fn failed with {type(error).__name__}: {error}; the targets are None, so it was given None; "
                "give targets, or a loss_fn that takes None"
            ) from error
        metrics: Any = {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], dict):
            loss, metrics = loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StagelineError(
                f"loss_fn must return one number as a tensor, or that and a dict of metrics; got one of {found}"
            )
        # A metric on a GPU stays there until the step is over: to ask for it now would stop the host.
        plain = {str(name): value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for name, value in plain.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)):
                raise StagelineError(f"the metric {name!r} is {shorten(value)}; a metric is one number")
        return loss * weight, plain

    def _recompute(self, kept: _Kept, microbatch: int) -> None:
        """Run the forward once more, with a graph and the buffers of then; they stay as the first run left them."""
        if kept.versions != [leaf._version for leaf in tensors_of(kept.inputs)]:
            raise StagelineError(
                f"stage {self.index} changed what it was given in place, so it cannot be run once more from it; let it "
                "work on a copy (x = x.clone()), or use another recompute="
            )
        # New leaves: hooks that the first run put on its inputs are not called beside those of this run.
        kept.inputs = [detached(leaf, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in kept.inputs]
        kept.hooks = hooks.registered()
        with self._buffers.as_before(kept.before), torch.enable_grad():
            kept.outputs, shape = flatten(self._run(kept, microbatch), f"stage {self.index}")
            if kept.weight is not None:
                output = unflatten(kept.outputs, shape)
                kept.loss, _ = self._drawing(
                    LOSS, self.part.training, kept.step, microbatch, self._loss,
                    output, kept.target, kept.weight, kept.step, microbatch,
                )  # fmt: skip
                kept.loss = kept.loss if kept.scale == 1.0 else kept.loss * kept.scale
        self._shared = None

    def backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, changed: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """Run B; give back the gradients of the inputs. `changed` says which of `grads` were changed by hooks."""
        kept = self._kept.pop(microbatch)
        if self.options.recompute.stages:
            self._recompute(kept, microbatch)
        outputs, given = self._roots(kept, grads, changed)
        arrived = tensors_of(kept.inputs)
        watch = hooks.Watch(arrived)
        kept.outputs, kept.loss = [], None
        with self._drawing_alone(self._draws_again(outputs, kept.step)), plain_precision(), Arriving(arrived) as found:
            if outputs:
                engine.backward(outputs, given)
        self.changed = watch.changed(found)
        return found

    def _draws_again(self, outputs: Sequence[Tensor], step: int) -> bool:
        """Whether a backward will draw: torch's checkpointing sets the generator that all threads share.

        Models that checkpoint do so in every microbatch of a step, so the first one tells of all where none ever did.
        """
        if not self._random or self.options.recompute.chosen is not None:
            return False
        if self._looked == step and not self._checkpoints:
            return False
        self._looked, found = step, checkpointed(outputs)
        self._checkpoints = self._checkpoints or found
        return found

    @staticmethod
    def _drawing_alone(draws_again: bool) -> AbstractContextManager[Any]:
        return generator_alone() if draws_again else _NOTHING

    def backward_input(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, changed: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """Run I; give back the gradients of the inputs. `changed` says which of `grads` were changed by hooks."""
        kept = self._kept[microbatch]
        if self.options.recompute.stages:
            self._recompute(kept, microbatch)
        outputs, given = self._roots(kept, grads, changed)
        arrived = tensors_of(kept.inputs)
        watch = hooks.Watch(arrived)
        wanted = [leaf for leaf in arrived if leaf.requires_grad]
        hooked = self._wrapped or hooks.registered() != kept.hooks
        kept.split = SplitBackward(outputs, given, wanted, self._plans, kept.direct, hooked, self._wrapped)
        kept.inputs, kept.outputs, kept.loss, kept.target, kept.keywords = [], [], None, None, {}
        kept.draws_again = self._draws_again(outputs, kept.step)
        with self._drawing_alone(kept.draws_again), plain_precision():
            found = iter(kept.split.input_gradients()) if outputs else iter([None] * len(wanted))
        gradients = [next(found) if leaf.requires_grad else None for leaf in arrived]
        self.changed = watch.changed(gradients)
        return gradients

    def backward_weight(self, microbatch: int) -> None:
        """Run W."""
        kept = self._kept.pop(microbatch)
        split = kept.split
        assert split is not None
        with self._drawing_alone(kept.draws_again), plain_precision():
            split.weight_gradients()
        self._unsplit += split.unsplit
        self._total += split.total

    def _roots(
        self, kept: _Kept, grads: Sequence[Tensor | None] | None, changed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where the backward starts: the loss, or the outputs that got a gradient."""
        if kept.loss is not None:
            return [kept.loss], [None]
        outputs = tensors_of(kept.outputs)
        if len(outputs) != len(grads or []):
            raise TransportError(
                f"stage {self.index} passed on {len(outputs)} tensors and got gradients for {len(grads or [])}"
            )
        if any(output._backward_hooks for output, by_hook in zip(outputs, changed, strict=False) if by_hook):
            raise StagelineError(
                f"stage {self.index} has a hook on its output, and stage {self.index + 1} has one on the same tensor, "
                "its input, that changes the gradient; in one process the first would run before the second, and "
                "between two stages it cannot: register both in one stage, or one of them on a copy (x.view_as(x))"
            )
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads or [], strict=True)
            if output.requires_grad and grad is not None
        ]
        for output, grad in pairs:
            if output.shape != grad.shape or output.dtype != grad.dtype:
                raise TransportError(
                    f"stage {self.index} passed on a tensor of shape {tuple(output.shape)} and {output.dtype}, and got "
                    f"a gradient of shape {tuple(grad.shape)} and {grad.dtype} for it"
                )
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    def take_counts(self) -> tuple[int, int]:
        """Of the elements of parameters that I and W gave gradients in this step: all, and those that came with I."""
        counts = (self._total, self._unsplit)
        self._total = self._unsplit = 0
        return counts

    def forget(self) -> None:
        """Drop everything kept, after a step that failed."""
        self._kept.clear()
        self._shared = None
        self._refreshed = None
        self.take_counts()


def _graph_if(train: bool) -> AbstractContextManager[Any]:
    """Record a graph or not; mostly that is so already."""
    return _NOTHING if torch.is_grad_enabled() == train else torch.set_grad_enabled(train)


def units_of(part: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """What draws random numbers by a name of its own: the layers, or the units of a model with its own forward."""
    return part.drawn() if isinstance(part, StagePart) else layers_of(part)


def _was_changed(leaf: Leaf) -> bool:
    """Whether a fresh copy was changed in place; tensors of inference mode do not say."""
    return isinstance(leaf, Tensor) and not leaf.is_inference() and leaf._version > 0


def watched_layers(part: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """What of a stage may share state with other stages: its layers, or its units as the model holds them."""
    if not isinstance(part, StagePart):
        return layers_of(part)
    return [(name, part.replay.modules[name].module) for name, _ in part.drawn() if name in part.replay.modules]


def _begins_in_place(layer: nn.Module) -> bool:
    """Whether the first thing that a layer does is to change its input, as `nn.ReLU(inplace=True)` does."""
    if isinstance(layer, StagePart):
        return False
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))

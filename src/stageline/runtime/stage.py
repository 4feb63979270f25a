"""One stage on one rank: its forward, its backward whole or in halves, and what it keeps between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.autograd import engine
from stageline.autograd.graph_plan import GraphPlan, checkpointed
from stageline.autograd.recompute import Recompute, training
from stageline.autograd.split_backward import SplitBackward
from stageline.common.errors import StagelineError, TransportError, shorten
from stageline.model.skips import SkipPart, carried
from stageline.model.stage_module.shared_state import SharedStateWatch
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.units import layers_of
from stageline.runtime._torch_private import called_as, has_gradient_hooks, version_of
from stageline.runtime.guards.backward import ActivationDropping, is_fully_sharded, refuse_loss, wrapper_in
from stageline.runtime.guards.foreign_reads import ForeignReads, LossReads
from stageline.runtime.sharding import ShardedStage
from stageline.tensors.buffers import Buffers, Snapshot
from stageline.tensors.copies import Joined, Pairs, Shared, cloned, detached
from stageline.tensors.pytree import TENSOR, Leaf, flatten, unflatten
from stageline.tensors.random_numbers import Generators, draws, dropout_rates, generator_alone, random_numbers
from stageline.tensors.sharded import is_sharded, whole
from stageline.tensors.thread_context import autocast_enabled, plain_precision

Loss = Callable[[Any, Any], Any]
"""Takes output and target; returns a scalar tensor, or that and a dict of metrics."""

Gradients = list[Tensor | None]

_NOTHING: AbstractContextManager[Any] = nullcontext()

LOSS = "loss_fn"
"""The name under which a loss function draws random numbers."""


@dataclass(frozen=True)
class StageOptions:
    """How stages run."""

    loss_fn: Loss
    seed: int = 0
    recompute: Recompute = field(default_factory=Recompute)


class ForwardSignature(NamedTuple):
    """The arguments of a module's forward."""

    single: bool
    """Whether it takes its whole input as one argument, as nn.Sequential does, rather than one per part."""
    names: frozenset[str] = frozenset()
    any_keyword: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> ForwardSignature:
        """Inspect a module.

        >>> ForwardSignature.of(nn.Linear(2, 2)).single
        True
        """
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):
            return cls(single=True)
        kinds, named = {parameter.kind for parameter in parameters}, inspect.Parameter
        several = named.VAR_KEYWORD in kinds or named.VAR_POSITIONAL in kinds or len(parameters) != 1
        by_name = (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)
        names = frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)
        return cls(not several, names, named.VAR_KEYWORD in kinds)

    def accepted(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword inputs that the module accepts."""
        return {name: value for name, value in keywords.items() if self.any_keyword or name in self.names}


class StageOutput(NamedTuple):
    """What a forward passes on."""

    leaves: list[Leaf]
    tree: str
    joined: Joined
    """Addresses of memory that would be the same in one process."""


@dataclass
class _Kept:
    """What a microbatch leaves between its forward and its backward."""

    inputs: list[Leaf]
    tree: str
    step: int
    keywords: Mapping[str, Any]
    shared: Pairs
    """Places of inputs that share memory in one process."""
    outputs: list[Leaf] = field(default_factory=list)
    target: Any = None
    weight: float | None = None
    """Of the loss; None if there is no loss."""
    scale: float = 1.0
    """What its gradients are multiplied by."""
    loss: Tensor | None = None
    split: SplitBackward | None = None
    draws_again: bool = False
    """Whether its backward draws random numbers."""
    buffers: Snapshot = ()
    """Buffers as they were before the forward, if it is to be recomputed."""
    versions: list[int] = field(default_factory=list)
    """Of the inputs: they grow with every in-place change."""
    hooks: int = 0
    """How many hooks were registered before its forward."""
    direct: bool = True
    """Whether its weight gradients may be added without autograd."""


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
        unpack_inputs: bool,
        loss_reads: LossReads | None,
        state_watch: SharedStateWatch | None,
        foreign_reads: ForeignReads | None,
    ) -> None:
        """`part` holds the layers by their names in the whole model; `unpack_inputs` as below.

        `loss_reads` calls loss_fn on the last stage and checks what it reads. `state_watch` checks what the layers
        share with those of other stages, `foreign_reads` what they read of the parameters of other stages.
        """
        self.index = index
        self._name = f"stage {index}"
        self.part = part
        self.options = options
        self.splits_backward = True
        """Whether its schedule has I and W; if not, hooks need not be counted."""
        self.shards: ShardedStage | None = None
        """Its shards, if the executor gathers its parameters and reduces its gradients."""
        self._layers = layers_of(part)
        self._signatures = {name: ForwardSignature.of(layer) for name, layer in self._layers}
        drawing = part.random_modules() if isinstance(part, StagePart) else self._layers
        self._random = {name for name, layer in drawing if draws(layer)}
        """The layers, or units of a model with its own forward, that draw random numbers under their own names."""
        self._dropout_rates = {name: rates for name, layer in drawing if (rates := dropout_rates(layer)) is not None}
        """Those of them that draw nothing while all of these attributes are 0."""
        self._watched: set[tuple[str, bool]] = set()
        # A stage that the user passed as such is called like that module: a tuple is its arguments. The layers of an
        # nn.Sequential are chained as it chains them, wherever it is cut.
        one_layer = unpack_inputs and len(self._layers) == 1
        self._unpacks_inputs = one_layer and not self._signatures[self._layers[0][0]].single
        self._changes_input = bool(self._layers) and _begins_in_place(self._layers[0][1])
        self._loss_reads = loss_reads
        self._changed: dict[Any, list[bool]] = {}
        """Which of its inputs the stage changes in place, by the form of the inputs."""
        self._shared: Shared | None = None
        self._dropping = ActivationDropping()
        self._skips = part if isinstance(part, SkipPart) else None
        self._replay = part.replay if isinstance(part, StagePart) else None
        self._state_watch, self._foreign_reads = state_watch, foreign_reads
        if self._replay is not None:  # it watches each unit on its own
            self._replay.watch, self._replay.foreign = state_watch, foreign_reads
            self._state_watch = self._foreign_reads = None
        self._through_part = self._replay is None and is_fully_sharded(part)
        self._buffers = Buffers(part)
        self._kept: dict[int, _Kept] = {}
        self._refreshed: tuple[int, bool] | None = None
        self._plans: list[GraphPlan] = []
        self._hooks: int | None = None
        self._accumulators_held = self._wrapped = False
        self._checked_step, self._checkpoints = -1, False

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a layer, or the loss, was seen to draw random numbers."""
        return bool(self._random)

    # Forward.

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
    ) -> StageOutput:
        """Run F. `wants` says which leaves require a gradient, `shared` which of them share memory."""
        inputs: list[Leaf] = [
            leaf.detach().requires_grad_(want) if type(leaf) is Tensor else _as_leaf(leaf, want)
            for leaf, want in zip(leaves, wants, strict=True)
        ]
        kept = _Kept(inputs, tree, step, keywords, shared)
        if train and self.splits_backward:
            self._count_hooks(kept)
        if isinstance(self.part, StagePart) and self._refreshed != (step, train):
            self.part.refresh()
            self._refreshed = (step, train)
        recomputes = train and self.options.recompute.stages
        if recomputes:
            kept.buffers = self._buffers.before()
            kept.versions = [version_of(leaf) for leaf in inputs if isinstance(leaf, Tensor)]
        with _graph_if(train), self._context(train, self._name):
            value = self._run_guarded(kept, microbatch)
            plain = type(value) is Tensor and not value.is_nested
            outputs, shape = ([value], TENSOR) if plain else flatten(value, self._name)
        if train:
            self._kept[microbatch] = kept
        if recomputes:  # the backward starts from the recomputed output; this one is only passed on
            self._buffers.after(kept.buffers)
            outputs = [_as_leaf(leaf, isinstance(leaf, Tensor) and leaf.requires_grad) for leaf in outputs]
        elif train:
            kept.outputs = outputs
        memory, self._shared = self._shared, None
        return StageOutput(outputs, shape, {} if memory is None else memory.joined())

    def _count_hooks(self, kept: _Kept) -> None:
        """Record how many hooks were registered; if some are new, check whether accumulators or wrappers have any."""
        kept.hooks = engine.registered_hooks()
        if kept.hooks != self._hooks and not self._kept:
            self._hooks, self._accumulators_held = kept.hooks, engine.accumulators_held(self.part.parameters())
            self._wrapped = bool(wrapper_in(self.part, shards=self.shards is None))
        kept.direct = not self._accumulators_held and kept.hooks == self._hooks

    def _context(self, train: bool, name: str) -> AbstractContextManager[Any]:
        """The context that a forward runs in."""
        if train and self.options.recompute.stages:
            # With a graph, so that kernels choose as they will in the second run, and outputs know whether they
            # require a gradient; what the graph would keep is dropped.
            return self._dropping.around(name)
        if train and self.options.recompute.chosen is not None:
            return training(self.options.recompute)
        return _NOTHING

    def _run_guarded(self, kept: _Kept, microbatch: int) -> Any:
        try:
            return self._run(kept, microbatch)
        except RuntimeError as error:
            if "leaf Variable" in str(error) and "in-place" in str(error):
                raise StagelineError(
                    f"stage {self.index} changes its input in place in microbatch {microbatch}, but did not do so "
                    "when it first got such an input; change it every time, or use a copy (x = x.clone())"
                ) from error
            raise

    def _run(self, kept: _Kept, microbatch: int) -> Any:
        """Run the layers; the first time, learn which inputs they change in place."""
        form = (kept.tree, len(kept.inputs), self.part.training, torch.is_grad_enabled())
        changed = self._changed.get(form)
        inputs = self._copied(kept.inputs, changed)
        shared = Shared(kept.shared, kept.inputs, inputs) if kept.shared else None
        value = inputs[0] if kept.tree == TENSOR else unflatten(inputs, kept.tree)
        if self._skips is not None:
            value = self._run_with_skips(self._skips, kept, microbatch, value)
        else:
            value = self._run_layers(kept, microbatch, value)
        if changed is None:
            self._changed[form] = [_was_changed(leaf) for leaf in inputs]
        if shared is not None:
            shared.refuse_changes(self.index, microbatch)
            self._shared = shared
        return value

    def _copied(self, inputs: Sequence[Leaf], changed: Sequence[bool] | None) -> list[Leaf]:
        """The inputs of the layers, with copies of those that they change in place, which one process allows.

        A tensor that arrived is a leaf of the stage's graph, and the stage before may still need it. The first time,
        all are copied, to learn which of them are changed.
        """
        if changed is not None:
            return [
                cloned(leaf) if (copy or self._changes_input) and isinstance(leaf, Tensor) else leaf
                for leaf, copy in zip(inputs, changed, strict=True)
            ]
        copy_all = self._changes_input or self.options.recompute.stages
        return [
            cloned(leaf) if isinstance(leaf, Tensor) and (copy_all or leaf.requires_grad) else leaf for leaf in inputs
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
            self._replay.draw = lambda name, call: self._draw(name, mode, kept.step, microbatch, call)
        if self._through_part:  # so that the hooks of FSDP2 on the stage itself run
            run = partial(self._run_each_layer, kept, microbatch)
            return called_as(self.part, run, value)
        return self._run_each_layer(kept, microbatch, value)

    def _run_each_layer(self, kept: _Kept, microbatch: int, value: Any) -> Any:
        watch = self._state_watch
        each_layer = watch is not None and watch.closely()
        first, arrived = self._layers[0][0] if self._layers else "", value
        if watch is not None and not each_layer:
            watch.before(first)
        for number, (name, layer) in enumerate(self._layers):
            keywords = self._signatures[name].accepted(kept.keywords) if kept.keywords else {}
            layer_input = value
            if watch is not None and each_layer:
                watch.before(name)
            call = self._call if self._foreign_reads is None else partial(self._foreign_reads.call, name, self._call)
            value = self._draw(name, layer.training, kept.step, microbatch, call, layer, value, number == 0, keywords)
            if watch is not None and each_layer:
                watch.after(name, layer_input, value)
        if watch is not None and not each_layer:
            watch.after(first, arrived, value)
        return value

    def _draw(self, name: str, mode: bool, step: int, microbatch: int, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may draw the random numbers of its step, microbatch and name; learn whether it does."""
        if name in self._random and not self._drops_nothing(name):
            with random_numbers(self.options.seed, step, microbatch, name):
                return call(*args)
        if (name, mode) in self._watched:
            return call(*args)
        with random_numbers(self.options.seed, step, microbatch, name):
            before = Generators.now()
            value = call(*args)
            if before.moved():
                self._random.add(name)
                self._dropout_rates.pop(name, None)
        self._watched.add((name, mode))
        return value

    def _drops_nothing(self, name: str) -> bool:
        """Whether all rates of dropout in a layer are 0, so that it does not need the generator for itself."""
        rates = self._dropout_rates.get(name)
        return rates is not None and not any(getattr(module, attribute) for module, attribute in rates)

    def watch_again(self) -> None:
        """Learn again which layers draw random numbers."""
        self._watched.clear()

    def _call(self, layer: nn.Module, value: Any, first: bool, keywords: Mapping[str, Any]) -> Any:
        if first and self._unpacks_inputs and isinstance(value, tuple):
            return layer(*value, **keywords)
        if first and self._unpacks_inputs and isinstance(value, dict):
            return layer(**value, **keywords)
        return layer(value, **keywords)

    def check_keywords(self, names: Sequence[str]) -> None:
        """Refuse keyword inputs that no layer of the stage accepts."""
        signatures = self._signatures.values()
        for name in names:
            if not any(signature.accepted({name: None}) for signature in signatures):
                known = sorted({known for signature in signatures for known in signature.names})
                raise StagelineError(
                    f"stage_kwargs has {name!r} for stage {self.index}, but no layer of that stage accepts it; its "
                    f"layers accept {', '.join(known)}"
                )

    # The loss.

    def loss(
        self, microbatch: int, step: int, output: Any, target: Any, weight: float, train: bool, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of the last stage, and its metrics; the backward starts from loss × weight × scale."""
        recomputes = train and self.options.recompute.stages
        with _graph_if(train), self._context(train, LOSS) if recomputes else _NOTHING:
            weighted, metrics = self._draw(
                LOSS, self.part.training, step, microbatch, self._loss, output, target, weight, step, microbatch
            )
            root = weighted if scale == 1.0 else weighted * scale
        if train and not weighted.requires_grad:
            refuse_loss(self.index, microbatch, self.part, self._kept[microbatch].inputs, output)
        if train:
            kept = self._kept[microbatch]
            kept.target, kept.weight, kept.scale = target, weight, scale
            kept.loss = None if recomputes else root
            kept.outputs = []  # the loss is all that the backward needs; logits are large
        return weighted.detach(), metrics

    def _loss(
        self, output: Any, target: Any, weight: float, step: int, microbatch: int
    ) -> tuple[Tensor, dict[str, Any]]:
        try:
            if self._loss_reads is None:
                loss = self.options.loss_fn(output, target)
            else:
                loss = self._loss_reads(output, target, step, microbatch)
        except Exception as error:
            if target is not None or isinstance(error, StagelineError | torch.OutOfMemoryError):
                raise
            raise StagelineError(
                f"loss_fn failed with {type(error).__name__}: {error}; the targets are None, so loss_fn got None; "
                "pass targets, or a loss_fn that accepts None"
            ) from error
        metrics: dict[str, Any] = {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], dict):
            loss, metrics = loss[0], _checked_metrics(loss[1])
        if type(loss) is not Tensor and is_sharded(loss):
            loss = whole(loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StagelineError(
                f"loss_fn must return one number as a tensor, or that and a dict of metrics; got one of {got}"
            )
        return loss * weight, metrics

    # Backward.

    def backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, changed: Sequence[bool] = ()
    ) -> tuple[Gradients, list[bool]]:
        """Run B; return the gradients of the inputs, and which of them hooks changed (empty for none).

        `changed` says which of `grads` were changed by hooks of the next stage.
        """
        kept = self._kept.pop(microbatch)
        if self.options.recompute.stages:
            self._recompute(kept, microbatch)
        roots, root_grads = self._roots(kept, grads, changed)
        inputs = [leaf for leaf in kept.inputs if isinstance(leaf, Tensor)]
        kept.outputs, kept.loss = [], None
        with self._generator_if(self._draws_again(roots, kept.step)), _without_autocast():
            return engine.backward_to(inputs, roots, root_grads)

    def backward_input(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, changed: Sequence[bool] = ()
    ) -> tuple[Gradients, list[bool]]:
        """Run I; arguments and results are those of `backward`."""
        kept = self._kept[microbatch]
        if self.options.recompute.stages:
            self._recompute(kept, microbatch)
        roots, root_grads = self._roots(kept, grads, changed)
        inputs = [leaf for leaf in kept.inputs if isinstance(leaf, Tensor)]
        versions = engine.watch_hooks(inputs)
        trained = [leaf for leaf in inputs if leaf.requires_grad]
        hooked = self._wrapped or engine.registered_hooks() != kept.hooks
        freed = None if self.shards is None else self.shards.memory
        kept.split = SplitBackward(roots, root_grads, trained, self._plans, kept.direct, hooked, self._wrapped, freed)
        kept.inputs, kept.outputs, kept.loss, kept.target, kept.keywords = [], [], None, None, {}
        kept.draws_again = self._draws_again(roots, kept.step)
        with self._generator_if(kept.draws_again), _without_autocast():
            arrived = iter(kept.split.input_gradients() if roots else [None] * len(trained))
        gradients = [next(arrived) if leaf.requires_grad else None for leaf in inputs]
        return gradients, engine.changed_by_hooks(gradients, versions)

    def backward_weight(self, microbatch: int) -> tuple[int, int]:
        """Run W; return how many elements of parameters got a gradient by I and W, and how many of them by I."""
        kept = self._kept.pop(microbatch)
        split = kept.split
        assert split is not None
        with self._generator_if(kept.draws_again), _without_autocast():
            split.weight_gradients()
        return split.total, split.unsplit

    def _recompute(self, kept: _Kept, microbatch: int) -> None:
        """Run the forward again, with a graph and the buffers as they were at the first run; then undo its changes to
        the buffers."""
        if kept.versions != [version_of(leaf) for leaf in kept.inputs if isinstance(leaf, Tensor)]:
            raise StagelineError(
                f"stage {self.index} changed its input in place, so its forward cannot be recomputed; use a copy (x "
                "= x.clone()), or a different recompute="
            )
        self._dropping.release()
        # New leaves: hooks that the first run put on its inputs must not be called beside those of this run.
        kept.inputs = [_as_leaf(leaf, isinstance(leaf, Tensor) and leaf.requires_grad) for leaf in kept.inputs]
        kept.hooks = engine.registered_hooks()
        with self._buffers.as_before(kept.buffers), torch.enable_grad():
            kept.outputs, shape = flatten(self._run(kept, microbatch), self._name)
            if kept.weight is not None:
                output = unflatten(kept.outputs, shape)
                kept.loss, _ = self._draw(
                    LOSS, self.part.training, kept.step, microbatch, self._loss,
                    output, kept.target, kept.weight, kept.step, microbatch,
                )  # fmt: skip
                kept.loss = kept.loss if kept.scale == 1.0 else kept.loss * kept.scale
        self._shared = None

    def _draws_again(self, roots: Sequence[Tensor], step: int) -> bool:
        """Whether a backward will draw: torch's checkpointing sets the generator that all threads share.

        Models that checkpoint do so in every microbatch of a step, so if none did before, the first one decides.
        """
        if not self._random or self.options.recompute.chosen is not None:
            return False
        if self._checked_step == step and not self._checkpoints:
            return False
        self._checked_step, checkpoints = step, checkpointed(roots)
        self._checkpoints = self._checkpoints or checkpoints
        return checkpoints

    @staticmethod
    def _generator_if(draws_again: bool) -> AbstractContextManager[Any]:
        return generator_alone() if draws_again else _NOTHING

    def _roots(
        self, kept: _Kept, grads: Sequence[Tensor | None] | None, changed: Sequence[bool]
    ) -> tuple[list[Tensor], Gradients]:
        """Where the backward starts: the loss, or the outputs that got a gradient."""
        if kept.loss is not None:
            return [kept.loss], [None]
        outputs = [leaf for leaf in kept.outputs if isinstance(leaf, Tensor)]
        grads = grads or []
        if len(outputs) != len(grads):
            raise TransportError(
                f"stage {self.index} returned {len(outputs)} tensors but got gradients for {len(grads)}"
            )
        if any(has_gradient_hooks(output) for output, by_hook in zip(outputs, changed, strict=False) if by_hook):
            raise StagelineError(
                f"stage {self.index} has a hook on its output, and stage {self.index + 1} has a hook on the same "
                "tensor, its input, that changes the gradient; in one process the first would run before the "
                "second, but between two stages it cannot; register both in one stage, or one of them on a copy "
                "(x.view_as(x))"
            )
        roots: list[Tensor] = []
        root_grads: Gradients = []
        for output, grad in zip(outputs, grads, strict=True):
            if output.requires_grad and grad is not None:
                if output.shape != grad.shape or output.dtype != grad.dtype:
                    raise TransportError(
                        f"stage {self.index} returned a tensor of shape {tuple(output.shape)} and dtype "
                        f"{output.dtype}, but got a gradient of shape {tuple(grad.shape)} and dtype {grad.dtype} for "
                        "it"
                    )
                roots.append(output)
                root_grads.append(grad)
        return roots, root_grads

    @property
    def in_flight(self) -> int:
        """How many microbatches it keeps something of."""
        return len(self._kept)

    def forget(self) -> None:
        """Drop everything kept, after a step that failed."""
        self._kept.clear()
        self._dropping.release()
        self._shared = None
        self._refreshed = None


def _graph_if(train: bool) -> AbstractContextManager[Any]:
    """Record a graph or not; the usual case needs no context."""
    return _NOTHING if torch.is_grad_enabled() == train else torch.set_grad_enabled(train)


def _without_autocast() -> AbstractContextManager[Any]:
    return plain_precision() if autocast_enabled() else _NOTHING


def _as_leaf(leaf: Leaf, wants: bool) -> Leaf:
    return detached(leaf, wants) if isinstance(leaf, Tensor) else leaf


def _checked_metrics(metrics: dict[Any, Any]) -> dict[str, Any]:
    """The metrics of a loss function, detached; those on a GPU stay there until the step ends."""
    plain = {
        str(name): whole(value.detach()) if isinstance(value, Tensor) else value for name, value in metrics.items()
    }
    for name, value in plain.items():
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)):
            raise StagelineError(f"the metric {name!r} is {shorten(value)}; a metric must be one number")
    return plain


def _was_changed(leaf: Leaf) -> bool:
    """Whether a fresh copy was changed in place; tensors of inference mode have no version counter."""
    return isinstance(leaf, Tensor) and not leaf.is_inference() and version_of(leaf) > 0


def _begins_in_place(layer: nn.Module) -> bool:
    """Whether the first thing that a layer does is to change its input, as `nn.ReLU(inplace=True)` does."""
    if isinstance(layer, StagePart):
        return False
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


class LossInputs(NamedTuple):
    """What the last stage needs for its loss, beside its output."""

    target: Any
    weight: float
    scale: float


class ForwardResult(NamedTuple):
    """What F returns; the loss and its metrics on the last stage."""

    output: StageOutput
    loss: Tensor | None = None
    metrics: dict[str, Any] | None = None


def run_forward(
    stage: Stage, microbatch: int, step: int, leaves: Sequence[Leaf], tree: str, wants: Sequence[bool],
    train: bool, keywords: Any, shared: Pairs, loss: LossInputs | None,
) -> ForwardResult:  # fmt: skip
    """Run F, and the loss on the last stage."""
    output = stage.forward(microbatch, step, leaves, tree, wants, train, keywords, shared)
    if loss is None:
        return ForwardResult(output)
    value = output.leaves[0] if output.tree == TENSOR else unflatten(output.leaves, output.tree)
    return ForwardResult(output, *stage.loss(microbatch, step, value, loss.target, loss.weight, train, loss.scale))

"""CUDA graphs: a rank's actions, captured once and then replayed, so that the host launches one graph per action.

Actions are captured in the order of the rank's program into one pool of memory, and replayed in that order, so an
action finds what an earlier one left there. Captured code reads and writes fixed addresses:

- Inputs that come from elsewhere are copied to where they were at the capture; outputs stay where they are until the
  same action of the next step.
- Gradients are added into tensors that are kept from step to step.

An action of a stage and a microbatch whose inputs have another form than at the capture runs without a graph, and so do
the backwards that belong to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import foreach_zero_, pytree
from stageline.runtime.stage import ForwardResult, Gradients, LossInputs, Stage, run_forward
from stageline.tensors.copies import Pairs
from stageline.tensors.pytree import Leaf

WARM_UP = 2
"""How many steps run without graphs first: kernels are compiled and chosen, and memory is allocated."""


class Recorder(Protocol):
    """Captures what a function does, and does it again."""

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return what a function returns, and a function that does the same again in the same memory.

        The function itself is called once; what it computes is there after the first call of the returned one.
        """

    def memory(self) -> int:
        """The bytes that captured code keeps."""


class CudaRecorder:
    """Captures into one pool, on the current stream, which must not be the default one."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture what a function launches."""
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads, such as those that receive messages, may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
        return result, graph.replay

    def memory(self) -> int:
        """The bytes of the pool: what captured actions hold in turn, and their outputs."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == self._pool)


@dataclass
class _Captured:
    """One action: the memory of its inputs, how to run it, and what it returned at the capture."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Any

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Replay it on these inputs."""
        pairs = [(own, new) for own, new in zip(self.inputs, tensors, strict=True) if own.data_ptr() != new.data_ptr()]
        for own, new in pairs:
            own.copy_(new)
        self.replay()
        return self.result


@dataclass
class _Microbatch:
    """The actions of one stage for one microbatch."""

    steps: int = 0
    """How many steps ran without graphs."""
    form: Any = None
    """Of the inputs of F, at the capture."""
    actions: dict[str, _Captured] = field(default_factory=dict)
    replays: bool = False
    """Whether the current step captures or replays its actions."""
    plain_metrics: bool = False
    """Whether the loss came with metrics that are numbers: a replay would not compute them."""


class ActionGraphs:
    """The captured actions of one rank."""

    def __init__(self, stages: Iterable[Stage], recorder: Recorder) -> None:
        """The stages of the rank; nothing is captured before the third step."""
        self._recorder = recorder
        self._stages = list(stages)
        self.microbatches: dict[tuple[int, int], _Microbatch] = {}
        self._own: set[int] = set()
        """The addresses of outputs, which stay where they are: actions that take them need no copy."""
        self._gradients: dict[Tensor, Tensor] = {}
        self._addresses: list[int] = []
        self._refused: set[str] = set()

    @property
    def memory(self) -> int:
        """The bytes that the captured actions keep from step to step, beside gradients."""
        return self._recorder.memory()

    def begin(self) -> None:
        """Begin a step: let parameters have the gradients that captured code adds to."""
        if not self._gradients and not any(microbatch.steps >= WARM_UP for microbatch in self.microbatches.values()):
            return
        parameters = [p for stage in self._stages for p in stage.part.parameters() if p.requires_grad]
        tensors = [*parameters, *(buffer for stage in self._stages for buffer in stage.part.buffers())]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:  # a parameter has other memory than at the capture: capture again
            self._addresses = addresses
            for state in self.microbatches.values():
                state.form, state.actions = None, {}
            self._own.clear()
        empty: list[Tensor] = []
        for parameter in parameters:
            own = self._gradients.get(parameter)
            if own is None:
                own = self._gradients[parameter] = torch.zeros_like(parameter)
            elif parameter.grad is None:
                empty.append(own)
            if parameter.grad is not None and parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
        if empty:
            foreach_zero_(empty)

    def forward(
        self, stage: Stage, microbatch: int, step: int, leaves: Sequence[Leaf], tree: str, wants: Sequence[bool],
        keywords: Any, shared: Pairs, loss: LossInputs | None, keep_output: bool,
    ) -> ForwardResult:  # fmt: skip
        """Run F; capture it in the third step, and replay it from then on.

        With a loss, a replay returns no output unless `keep_output`: logits are large.
        """
        state = self.microbatches.setdefault((stage.index, microbatch), _Microbatch())
        target, target_tree = pytree.tree_flatten(() if loss is None else loss.target)
        tensors = _tensors([*leaves, *target])
        constants = None if loss is None else (loss.weight, loss.scale, keep_output)
        form = (tree, target_tree, tuple(wants), shared, constants, *map(_form, (*leaves, *target)))

        def run(tensors: Sequence[Tensor]) -> ForwardResult:
            new = iter(tensors)
            values = [next(new) if isinstance(leaf, Tensor) else leaf for leaf in (*leaves, *target)]
            inputs, targets = values[: len(leaves)], values[len(leaves) :]
            own = None if loss is None else loss._replace(target=pytree.tree_unflatten(targets, target_tree))
            return run_forward(stage, microbatch, step, inputs, tree, wants, True, keywords, shared, own)

        state.replays = state.form == form
        if state.replays:
            return _copied(state.actions["F"].run(tensors))
        if state.form is not None or state.steps < WARM_UP or self._refuses(stage, state, keywords):
            state.steps += 1
            result = run(tensors)
            state.plain_metrics = not all(isinstance(metric, Tensor) for metric in (result.metrics or {}).values())
            return result
        try:
            result = self._capture(state, "F", tensors, run)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._refuse(f"stage {stage.index} cannot be captured ({str(error).splitlines()[0]})")
            state.steps = -(10**9)
            return run(tensors)
        state.form, state.replays = form, True
        state.actions["F"].result = self._settled(result, keep_output=keep_output or loss is None)
        return _copied(result)

    def backward(
        self, name: str, run: Callable[..., tuple[Gradients, list[bool]]], stage: Stage, microbatch: int,
        grads: Sequence[Any] | None, changed: Sequence[bool],
    ) -> tuple[Gradients, list[bool]]:  # fmt: skip
        """Run B or I, with `run` if not from a graph."""
        state = self.microbatches.get((stage.index, microbatch))
        if state is None or not state.replays:
            return run(microbatch, grads, changed)
        tensors = [grad for grad in grads or () if grad is not None]
        captured = state.actions.get(name)
        if captured is not None:
            if [_form(grad) for grad in tensors] != [_form(own) for own in captured.inputs]:
                raise StagelineError(
                    f"stage {stage.index} got gradients whose structure or shape differs from when its actions were "
                    "captured; pass cuda_graphs=False"
                )
            return captured.run(tensors)  # type: ignore[no-any-return]

        def again(tensors: Sequence[Tensor]) -> tuple[Gradients, list[bool]]:
            new = iter(tensors)
            own = None if grads is None else [None if grad is None else next(new) for grad in grads]
            return run(microbatch, own, changed)

        result = self._backward_captured(state, name, stage, tensors, again)
        self._own.update(gradient.data_ptr() for gradient in result[0] if gradient is not None)
        return result  # type: ignore[no-any-return]

    def backward_weight(self, stage: Stage, microbatch: int) -> tuple[int, int]:
        """Run W."""
        state = self.microbatches.get((stage.index, microbatch))
        if state is None or not state.replays:
            return stage.backward_weight(microbatch)
        if "W" in state.actions:
            return state.actions["W"].run(())  # type: ignore[no-any-return]
        return self._backward_captured(state, "W", stage, (), lambda _: stage.backward_weight(microbatch))  # type: ignore[no-any-return]

    def _backward_captured(
        self, state: _Microbatch, name: str, stage: Stage, tensors: Sequence[Tensor], run: Callable[..., Any]
    ) -> Any:
        try:
            return self._capture(state, name, tensors, run)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise StagelineError(
                f"{name} of stage {stage.index} cannot be captured as a CUDA graph: {str(error).splitlines()[0]}; pass "
                "cuda_graphs=False"
            ) from error

    def _capture(self, state: _Microbatch, name: str, tensors: Sequence[Tensor], run: Callable[..., Any]) -> Any:
        """Capture an action and run it once."""
        inputs = [tensor if tensor.data_ptr() in self._own else tensor.clone() for tensor in tensors]
        result, replay = self._recorder.capture(lambda: run(inputs))
        state.actions[name] = _Captured(inputs, replay, result)
        replay()
        return result

    def _settled(self, result: ForwardResult, *, keep_output: bool) -> ForwardResult:
        """What F returns from now on: its outputs without the graph of the capture, whose memory is reused."""
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in (result.output.leaves if keep_output else ())
        ]
        self._own.update(leaf.data_ptr() for leaf in _tensors(leaves))
        return ForwardResult(result.output._replace(leaves=leaves), result.loss, result.metrics)

    def _refuses(self, stage: Stage, state: _Microbatch, keywords: Any) -> bool:
        """Whether a stage cannot be captured; says why, once."""
        if stage.draws_random_numbers:
            self._refuse(f"stage {stage.index} draws random numbers")
        elif keywords:
            self._refuse(f"stage {stage.index} takes stage_kwargs")
        elif state.plain_metrics:
            self._refuse(f"the metrics of loss_fn are not tensors, so stage {stage.index} cannot be captured")
        else:
            return False
        return True

    def _refuse(self, reason: str) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            warnings.warn(f"{reason}: it runs without CUDA graphs", stacklevel=2)


def _copied(result: ForwardResult) -> ForwardResult:
    """The result of F with a loss and metrics that the next replay does not overwrite."""
    if result.loss is None:
        return result
    metrics = {name: metric.clone() for name, metric in (result.metrics or {}).items()}
    return ForwardResult(result.output, result.loss.clone(), metrics)


def _tensors(leaves: Iterable[Leaf]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _form(leaf: Leaf) -> Any:
    """What must not change for a replay."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device
    return leaf

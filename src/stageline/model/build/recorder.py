"""Run a constructor on meta tensors that report a CPU device, and record its operations on a tape."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stageline.common.errors import StagelineError, shorten
from stageline.model._torch_private import (
    TorchDispatchMode,
    disable_torch_function,
    patched_trunc_normal,
    schema_arguments,
    tensors_in,
    tree_flatten,
    tree_unflatten,
)
from stageline.model.build.tape import META, StorageView, Tape, storage_of

# Operations that only allocate, and operations that overwrite a tensor without reading it.
ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITES = {
    *("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_"),
}
_LIFTS = {"lift", "lift_fresh", "lift_fresh_copy"}

recording = threading.RLock()
M = TypeVar("M", bound=nn.Module)


def record(factory: Callable[[], M]) -> tuple[M, Tape]:
    """Call a constructor; return its model on the meta device, and the tape of its operations."""
    tape = Tape()
    recorder = _Recorder(tape)
    with recording, patched_trunc_normal(partial(_recorded_trunc_normal, recorder)), recorder, _HostDisguise(recorder):
        try:
            model = factory()
        except Exception as error:
            if recorder.error is not None and error is not recorder.error:
                raise recorder.error from error
            raise
    if recorder.error is not None:  # the constructor caught the error and continued differently
        raise recorder.error
    if not isinstance(model, nn.Module):
        raise StagelineError(f"the constructor returned {shorten(model)}; expected an nn.Module")
    return model, tape


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation on meta tensors, and records it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.error: StagelineError | None = None
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        with disable_torch_function():
            return self._run(func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations normally, without recording them."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in _LIFTS and not args[0].is_meta:
            return self.tape.constant(args[0])
        tensors = tensors_in((args, kwargs))
        written = _written_arguments(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not any(self.tape.contains(tensor) for tensor in tensors) and not (draws and not written):
            if draws:
                raise self.refuse(f"{name} draws random numbers into a tensor from outside the constructor", "")
            return func(*args, **kwargs)
        if any(not tensor.is_meta for tensor in written):
            return self._run_with_values(func, args, kwargs, name)
        return self._run_without_memory(func, args, kwargs, written, draws)

    def _run_without_memory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], draws: bool
    ) -> Any:
        name = func.overloadpacket.__name__
        flat, structure = tree_flatten((args, kwargs))
        flat = [self._on_meta(leaf) for leaf in flat]
        views: list[Any] = [self.tape.add(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        written_views = [StorageView.of(leaf) for leaf in written]
        meta_args, meta_kwargs = tree_unflatten(flat, structure)
        arguments, keywords = tree_unflatten(views, structure)
        if any(argument.name == "device" for argument in schema_arguments(func)):
            meta_kwargs = {**meta_kwargs, "device": META}
            keywords = {**keywords, "device": torch.device("cpu")}
        if "pin_memory" in meta_kwargs:
            meta_kwargs["pin_memory"] = keywords["pin_memory"] = None
        try:
            result = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            if written:
                raise self.refuse(f"torch cannot run {name} without memory", "") from None
            return self._run_with_values(func, args, kwargs, name)
        outputs = tensors_in(result)
        if name in ALLOCATES:
            for leaf in outputs:
                self.tape.add(leaf)
            return result
        if torch.Tag.inplace_view in func.tags and name != "resize_":
            return result
        if written_views or any(not self.tape.contains(leaf) for leaf in outputs):
            overwrites = name in _OVERWRITES or "out" in kwargs
            self.tape.record(func, arguments, keywords, result, written_views, draws=draws, overwrites=overwrites)
        return result

    def _on_meta(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, Tensor) and not value.is_meta:
            return self.tape.constant(value)
        return value

    def _run_with_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Run an operation that needs values, if they do not depend on random numbers."""
        flat, structure = tree_flatten((args, kwargs))
        flat = [self.value(leaf, name) if isinstance(leaf, Tensor) and leaf.is_meta else leaf for leaf in flat]
        real_args, real_kwargs = tree_unflatten(flat, structure)
        result = func(*real_args, **real_kwargs)
        inputs = {id(leaf) for leaf in flat}
        flat, structure = tree_flatten(result)
        is_new = [isinstance(leaf, Tensor) and id(leaf) not in inputs for leaf in flat]
        flat = [self.tape.constant(leaf) if new else leaf for leaf, new in zip(flat, is_new, strict=True)]
        return tree_unflatten(flat, structure)

    def value(self, tensor: Tensor, name: str) -> Tensor:
        """Return the value of a tensor at this point of the constructor."""
        view = self.tape.add(tensor)
        program = self.tape.program(view.storage)
        if any(self.tape.calls[index].draws for index in program):
            raise self.refuse(f"{name} reads a value that depends on the random numbers", _name_of(tensor, self.tape))
        if not self.tape.is_written(view):
            raise self.refuse(f"{name} reads uninitialised memory", _name_of(tensor, self.tape))
        return view.on(self.tape.replay(program, view.storage, lambda _, run: run()))

    def refuse(self, why: str, subject: str) -> StagelineError:
        """Return the error that ends the recording, with the line of the constructor that caused it."""
        why = why.replace("_local_scalar_dense", "item()")
        self.error = StagelineError(
            f"cannot record the constructor: {why}{subject}, {_where()}; change that line, or pass "
            "otherwise='construct' to build the whole model in host memory first"
        )
        return self.error


_TENSOR: Any = torch.Tensor
_READS = {_TENSOR.tolist, _TENSOR.numpy, _TENSOR.__array__}
_HOST_PROPERTIES = {
    _TENSOR.device.__get__: torch.device("cpu"),
    _TENSOR.is_meta.__get__: False,
    _TENSOR.is_cpu.__get__: True,
}


class _HostDisguise(TorchFunctionMode):
    """Makes meta tensors claim to be on the host, as the constructor expects."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not self.recorder.tape.contains(first):
            return func(*args, **kwargs)
        if func in _HOST_PROPERTIES:
            return _HOST_PROPERTIES[func]
        if func in _READS:
            with self.recorder.paused():
                return func(self.recorder.value(first, func.__name__), *args[1:], **kwargs)
        if func in (_TENSOR.cpu, _TENSOR.cuda):
            return first
        if func is _TENSOR.to:
            args = [first, *(META if isinstance(argument, str | torch.device) else argument for argument in args[1:])]
            kwargs = {**kwargs, "device": META} if kwargs.get("device") is not None else kwargs
        if func == _TENSOR.data.__set__ and not args[1].is_meta:
            with self.recorder.paused():
                args = [first, self.recorder.tape.constant(args[1])]
        return func(*args, **kwargs)


def _recorded_trunc_normal(recorder: _Recorder, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Record `trunc_normal_`, which draws until values are in range, as one call."""

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if not recorder.tape.contains(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        with disable_torch_function():
            view = StorageView.of(tensor)
        recorder.tape.record(original, (view, mean, std, a, b), {}, None, [view], draws=True, overwrites=True)
        return tensor

    return truncated


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation modifies."""
    tensors = []
    for position, argument in enumerate(schema_arguments(func)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += tensors_in(value)
    return tensors


def _modules() -> Iterator[nn.Module]:
    """Yield the modules under construction, innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        for module in frame.f_locals.values():
            if isinstance(module, nn.Module) and "_parameters" in vars(module):
                yield module


def _where() -> str:
    """Return the current line of the constructor, and the module it belongs to."""
    internal = ("torch.", "stageline.model.", "contextlib")
    frames = traceback.walk_stack(sys._getframe())
    outside = (frame for frame, _ in frames if not frame.f_globals.get("__name__", "").startswith(internal))
    line = next((f"at {frame.f_code.co_filename}:{frame.f_lineno}" for frame in outside), "")
    module = next(_modules(), None)
    return line if module is None else f"{line} in {type(module).__name__}"


def _name_of(tensor: Tensor, tape: Tape) -> str:
    """Return the name of a tensor, or of one it is computed from, in the modules under construction."""
    storage = storage_of(tensor)
    related = {storage, *(other for index in tape.program(storage) for other in tape.calls[index].writes)}
    for module in _modules():
        for name, candidate in [*module.named_parameters(), *module.named_buffers()]:
            if candidate.layout is torch.strided and storage_of(candidate) in related:
                return f" of {name!r} of {type(module).__name__}"
    return ""

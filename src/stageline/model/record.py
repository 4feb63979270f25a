"""Running a constructor without memory: its tensors have none, say that they lie on the host, and go on a tape."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from stageline.errors import StagelineError, shorten
from stageline.model.tape import META, Place, Tape, storage_of

# Operations that only allocate, and operations that write over a tensor whatever it held.
ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_WRITES_BLINDLY = {
    *("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_"),
}
_LIFTS = {"lift", "lift_fresh", "lift_fresh_copy"}

recording = threading.RLock()
M = TypeVar("M", bound=nn.Module)


def record(factory: Callable[[], M]) -> tuple[M, Tape]:
    """Call a constructor; give back its model without memory, and what became of every tensor."""
    tape = Tape()
    recorder = _Recorder(tape)
    with recording, _whole_functions(recorder), recorder, _Pretence(recorder):
        try:
            model = factory()
        except Exception as error:
            if recorder.refused is not None and error is not recorder.refused:
                raise recorder.refused from error
            raise
    if recorder.refused is not None:  # what the constructor did instead is not what it would have done
        raise recorder.refused
    if not isinstance(model, nn.Module):
        raise StagelineError(f"the constructor returned {shorten(model)}; expected an nn.Module")
    return model, tape


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operation make tensors without memory, and writes it down."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.refused: StagelineError | None = None
        self._resting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._resting:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    @contextmanager
    def rest(self) -> Iterator[None]:
        """While this lasts, operations run as they are and are not recorded."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in _LIFTS and not args[0].is_meta:
            return self.tape.constant(args[0])
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        written = _written(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not any(self.tape.holds(each) for each in tensors) and not (draws and not written):
            if draws:
                raise self.refuse(f"{name} draws random numbers into memory that exists already", "")
            return func(*args, **kwargs)
        if any(not each.is_meta for each in written):
            return self._run_for_real(func, args, kwargs, name)
        return self._run_without_memory(func, args, kwargs, written, draws)

    def _run_without_memory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], draws: bool
    ) -> Any:
        name = func.overloadpacket.__name__
        flat, form = tree_flatten((args, kwargs))
        flat = [self._stand_in(each) for each in flat]
        places: list[Any] = [self.tape.add(each) if isinstance(each, Tensor) else each for each in flat]
        targets = [Place.of(each) for each in written]
        own_args, own_kwargs = tree_unflatten(flat, form)
        arguments, keywords = tree_unflatten(places, form)
        if any(argument.name == "device" for argument in func._schema.arguments):
            own_kwargs = {**own_kwargs, "device": META}
            keywords = {**keywords, "device": torch.device("cpu")}
        if "pin_memory" in own_kwargs:
            own_kwargs["pin_memory"] = keywords["pin_memory"] = None
        try:
            result = func(*own_args, **own_kwargs)
        except (NotImplementedError, RuntimeError):
            if written:
                raise self.refuse(f"torch cannot run {name} without memory", "") from None
            return self._run_for_real(func, args, kwargs, name)
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        if name in ALLOCATES:
            for each in outputs:
                self.tape.add(each)
            return result
        if torch.Tag.inplace_view in func.tags and name != "resize_":
            return result
        if targets or any(not self.tape.holds(each) for each in outputs):
            blindly = name in _WRITES_BLINDLY or "out" in kwargs
            self.tape.record(func, arguments, keywords, result, targets, draws=draws, blindly=blindly)
        return result

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, Tensor) and not value.is_meta:
            return self.tape.constant(value)
        return value

    def _run_for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Run what asks for values with the values, if they do not depend on random numbers."""
        flat, form = tree_flatten((args, kwargs))
        flat = [self.value(each, name) if isinstance(each, Tensor) and each.is_meta else each for each in flat]
        real_args, real_kwargs = tree_unflatten(flat, form)
        result = func(*real_args, **real_kwargs)
        given = {id(each) for each in flat}
        flat, form = tree_flatten(result)
        flat = [
            self.tape.constant(each) if isinstance(each, Tensor) and id(each) not in given else each for each in flat
        ]
        return tree_unflatten(flat, form)

    def value(self, tensor: Tensor, name: str) -> Tensor:
        """The value of a tensor at this point of the constructor."""
        place = self.tape.add(tensor)
        program = self.tape.program(place.storage)
        if any(self.tape.calls[at].draws for at in program):
            raise self.refuse(f"{name} reads a value that depends on the random numbers", _name_of(tensor, self.tape))
        if not self.tape.is_written(place):
            raise self.refuse(f"{name} reads memory that was never written,", _name_of(tensor, self.tape))
        return place.on(self.tape.replay(program, place.storage, _no_draw))

    def refuse(self, why: str, what: str) -> StagelineError:
        """An error that ends the recording, with the line of the constructor that it is about."""
        why = why.replace("_local_scalar_dense", "item()")
        self.refused = StagelineError(
            f"cannot record the constructor: {why}{what}, {_where()}; change that line, or let the "
            "whole model be built in memory first: otherwise='construct'"
        )
        return self.refused


_TENSOR: Any = torch.Tensor
_READS = {_TENSOR.tolist, _TENSOR.numpy, _TENSOR.__array__}
_PRETENDED = {
    _TENSOR.device.__get__: torch.device("cpu"),
    _TENSOR.is_meta.__get__: False,
    _TENSOR.is_cpu.__get__: True,
}


class _Pretence(TorchFunctionMode):
    """Lets tensors without memory say that they lie on the host, as the constructor would find them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not self.recorder.tape.holds(first):
            return func(*args, **kwargs)
        if func in _PRETENDED:
            return _PRETENDED[func]
        if func in _READS:
            with self.recorder.rest():
                return func(self.recorder.value(first, func.__name__), *args[1:], **kwargs)
        if func in (_TENSOR.cpu, _TENSOR.cuda):
            return first
        if func is _TENSOR.to:
            args = [first, *(META if isinstance(each, str | torch.device) else each for each in args[1:])]
            kwargs = {**kwargs, "device": META} if kwargs.get("device") is not None else kwargs
        if func == _TENSOR.data.__set__ and not args[1].is_meta:
            with self.recorder.rest():
                args = [first, self.recorder.tape.constant(args[1])]
        return func(*args, **kwargs)


@contextmanager
def _whole_functions(recorder: _Recorder) -> Iterator[None]:
    """Write down as one call what draws until it likes what it drew."""
    original = nn.init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if not recorder.tape.holds(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        with torch._C.DisableTorchFunction():
            place = Place.of(tensor)
        recorder.tape.record(original, (place, mean, std, a, b), {}, None, [place], draws=True, blindly=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operation changes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return found


def _no_draw(at: int, call: Callable[[], Any]) -> Any:
    raise AssertionError(f"call {at} draws")


def _frames() -> Iterator[FrameType]:
    """What runs now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _modules() -> Iterator[nn.Module]:
    """The modules that are being made, innermost first."""
    for frame in _frames():
        for module in frame.f_locals.values():
            if isinstance(module, nn.Module) and "_parameters" in vars(module):
                yield module


def _where() -> str:
    """The line of the constructor that runs now, and the module it belongs to."""
    ours = ("torch.", "stageline.model.", "contextlib")
    frame = next((each for each in _frames() if not each.f_globals.get("__name__", "").startswith(ours)), None)
    line = "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
    module = next(_modules(), None)
    return line if module is None else f"{line} in {type(module).__name__}"


def _name_of(tensor: Tensor, tape: Tape) -> str:
    """The name of a tensor, or of one that it is made from, in the modules that are being made."""
    storage = storage_of(tensor)
    about = {storage, *(each for at in tape.program(storage) for each in tape.calls[at].writes)}
    for module in _modules():
        for name, each in [*module.named_parameters(), *module.named_buffers()]:
            if each.layout is torch.strided and storage_of(each) in about:
                return f" of {name!r} of {type(module).__name__}"
    return ""

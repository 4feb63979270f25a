"""Calls that run in other processes: two files of a folder hold the function with its arguments, and its answer."""

from __future__ import annotations

import atexit
import multiprocessing.spawn
import os
import pickle
import pickletools
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from stageline.common.errors import StagelineError, shorten
from stageline.common.files import atomic_file

CALL, ANSWER = "call", "answer"
"""The names of the files."""
_imports_main = False
"""Whether this process was started for a call, and imports the main program of its launcher."""


def check_call(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuse a function that processes cannot import, and arguments that cannot be sent to them."""
    if _imports_main:
        raise StagelineError(
            "ranks import the main program, and this one starts ranks when it is imported; put that call under "
            'if __name__ == "__main__":'
        )
    name = getattr(function, "__qualname__", None) or shorten(function)
    try:
        pickle.dumps(function)
    except Exception as error:
        raise StagelineError(
            f"ranks cannot import {name} ({error}); define it with def at the top level of a module, and pass what it "
            "needs as arguments"
        ) from error
    try:
        work = pickle.dumps((function, tuple(arguments)))
    except Exception as error:
        raise StagelineError(
            f"the arguments of {name} cannot be sent to the ranks ({error}); pass values that can be pickled"
        ) from error
    main = sys.modules["__main__"]
    if _in_main(work) and main.__spec__ is None and not Path(getattr(main, "__file__", None) or "").is_file():
        raise StagelineError(
            f"ranks cannot import {name} or its arguments from the main program, which is not a file but a session, "
            "standard input or python -c; save it as a file, or define them in a module"
        )


def _in_main(work: bytes) -> bool:
    """Whether the main module has to be imported to read a call; in a process that was started so, it has two names."""
    names = ("__main__", "__mp_main__")
    if not any(name.encode() in work for name in names):
        return False
    return any(argument in names for _, argument, _ in pickletools.genops(work))


def write_call(folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Write a call for the process that will run it."""
    # What `multiprocessing` sends to a process that it spawns: the module search path, and the main module.
    work = pickle.dumps((function, tuple(arguments)))
    main = ("init_main_from_name", "init_main_from_path") if _in_main(work) else ()
    everything = multiprocessing.spawn.get_preparation_data("stageline")
    preparation = {name: everything[name] for name in ("sys_path", "sys_argv", *main) if name in everything}
    with atomic_file(folder / CALL) as file:
        pickle.dump(preparation, file)
        file.write(work)


class Answer(NamedTuple):
    """How a call ended."""

    value: Any
    error: BaseException | None
    """Its exception, if it can be pickled."""
    failure: str
    """The traceback of its exception; empty if it returned."""
    moment: float
    """When, by the monotonic clock that all processes of a machine share."""


def read_answer(folder: Path) -> Answer | None:
    """The answer of a call; None if the process has not written one."""
    try:
        return Answer(*pickle.loads((folder / ANSWER).read_bytes()))
    except FileNotFoundError:
        return None


# In the other process.


def run_call(folder: Path, *, answers: bool) -> None:
    """Run the call of a folder, and write its answer there."""
    failed: Exception | None = None
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the function runs, Ctrl-C is not worth a traceback
        function, arguments = _read_call(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        value = function(*arguments)
        answer = _success(value if answers else None)
    except Exception as error:
        answer, failed = _failure(error), error
    with atomic_file(folder / ANSWER) as file:
        file.write(answer)
    if failed is not None and not answers:
        sys.last_value = failed  # as the interpreter does
        sys.excepthook(type(failed), failed.with_traceback(_users_traceback(failed)), failed.__traceback__)
        sys.exit(1)
    if answers:  # without tearing the interpreter down, which takes long with torch
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    global _imports_main
    with (folder / CALL).open("rb") as file:
        _imports_main = True
        multiprocessing.spawn.prepare(pickle.load(file))
        _imports_main = False
        function, arguments = pickle.load(file)
    return function, arguments


def _success(value: Any) -> bytes:
    now = time.monotonic()
    try:
        return pickle.dumps((value, None, "", now))
    except Exception as error:
        raise StagelineError(
            f"the result of the function, a {type(value).__name__}, cannot be sent back ({error}); return a value that "
            "can be pickled"
        ) from error


def _failure(error: Exception) -> bytes:
    text, now = traceback.format_exc(), time.monotonic()
    for sent in (error, ExceptionParts(error, vars(error)), ExceptionParts(error, {})):
        with suppress(Exception):  # whatever a user's exception does when it is pickled
            answer = pickle.dumps((None, sent, text, now))
            pickle.loads(answer)
            return answer
    return pickle.dumps((None, None, text, now))


class ExceptionParts:
    """An exception that arrives whole although its class cannot be called with `args`, as pickle would call it.

    >>> error = UnicodeError("text")
    >>> pickle.loads(pickle.dumps(ExceptionParts(error, vars(error))))
    UnicodeError('text')
    """

    def __init__(self, error: BaseException, attributes: Mapping[str, Any]) -> None:
        self._error, self._attributes = error, dict(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make the exception."""
        return _exception, (type(self._error), self._error.args, self._attributes)


def _exception(kind: type[BaseException], arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


def _users_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an exception without the frames that called the user's code."""
    ours = ("stageline.distributed.launchers.", "stageline.cli.", "runpy")
    at = error.__traceback__
    while at is not None and at.tb_next is not None and str(at.tb_frame.f_globals.get("__name__")).startswith(ours):
        at = at.tb_next
    return at

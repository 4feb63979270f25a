"""Data that a function of the user's own makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from stageline.errors import StagelineError, shorten
from stageline.model.named import find_function
from stageline.train.config import Config
from stageline.train.data.source import Indexed, Items, Tokens
from stageline.train.data.stream import Stream, say


class Again:
    """The iterators that a function makes, a new one each time.

    >>> again = Again(lambda: iter([1, 2]))
    >>> list(again), list(again)
    ([1, 2], [1, 2])
    """

    def __init__(self, make: Callable[[], Iterator[Any]], first: Iterator[Any] | None = None) -> None:
        """Take the function, and what it made already."""
        self.make, self.first = make, first

    def __iter__(self) -> Iterator[Any]:
        """A new one."""
        made, self.first = self.first, None
        return self.make() if made is None else made


def function_data(name: str, config: Config, *, note: Callable[[str], None] = say) -> Indexed | Stream:
    """What a function returns, as a source; a function that takes an argument is given the config.

    A row of integers is tokens; what has a length and numbered samples is shuffled; an iterator is made anew by
    calling the function again.

    >>> function_data("string:Template.delimiter", Config())
    Traceback (most recent call last):
    stageline.errors.StagelineError: string has no function 'Template.delimiter' (did you mean 'Template'?)
    """
    function = find_function(name)
    takes = bool(_required(function))
    made = function(config) if takes else function()
    again = Again(lambda: iter(function(config) if takes else function()), made) if _once(made) else made
    return source_of(again, name, config, note=note)


def source_of(made: Any, name: str, config: Config, *, note: Callable[[str], None] = say) -> Indexed | Stream:
    """Samples as a source: a row of integers is tokens, what has numbered samples is shuffled, all else is a stream.

    >>> source_of([(1, 2), (3, 4)], "pairs", Config()).length
    2
    """
    if isinstance(made, Tokens | Items | Stream):
        return made
    if isinstance(made, np.ndarray | torch.Tensor) and made.ndim == 1:
        array = made.numpy() if isinstance(made, torch.Tensor) else made
        if array.dtype.kind in "iu":
            return Tokens(array, config.training.seq_len, name=name)
    numbered = hasattr(made, "__len__") and hasattr(made, "__getitem__")
    if numbered and not isinstance(made, str | bytes | dict | torch.utils.data.IterableDataset):
        return Items(made, name=name)
    if not hasattr(made, "__iter__") or isinstance(made, str | bytes | dict):
        raise StagelineError(
            f"{name} is a {type(made).__name__}, {shorten(made)}; it must be an iterable of samples, a sequence of "
            "them, or one row of tokens"
        )
    return Stream(made, name=name, note=note)


def _once(made: Any) -> bool:
    """Whether it can be read through only once, and not be set to a place."""
    return isinstance(made, Iterator) and not any(hasattr(made, each) for each in ("seek", "load_state_dict"))


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]

"""Data returned by a function of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from stageline.common.errors import StagelineError, shorten
from stageline.model.imports import find_function
from stageline.train.config.config import Config
from stageline.train.data.source import Indexed, Items, Tokens
from stageline.train.data.stream import Stream, print_note


class Restartable:
    """An iterable that calls a function for a new iterator each time.

    >>> numbers = Restartable(lambda: iter([1, 2]))
    >>> list(numbers), list(numbers)
    ([1, 2], [1, 2])
    """

    def __init__(self, make: Callable[[], Iterator[Any]], first: Iterator[Any] | None = None) -> None:
        self.make, self.first = make, first

    def __iter__(self) -> Iterator[Any]:
        iterator, self.first = self.first, None
        return self.make() if iterator is None else iterator


def function_data(name: str, config: Config, *, note: Callable[[str], None] = print_note) -> Indexed | Stream:
    """Call a function and return its result as a source; it is passed the config if it takes an argument.

    See `source_of` for what it may return. If it returns an iterator, it is called again for every epoch.

    >>> function_data("string:Template.delimiter", Config())
    Traceback (most recent call last):
    stageline.StagelineError: string has no function 'Template.delimiter' (did you mean 'Template'?)
    """
    function = find_function(name)
    takes_config = bool(_required_parameters(function))
    samples = function(config) if takes_config else function()
    restartable = (
        Restartable(lambda: iter(function(config) if takes_config else function()), samples)
        if _is_one_shot(samples)
        else samples
    )
    return source_of(restartable, name, config, note=note)


def source_of(samples: Any, name: str, config: Config, *, note: Callable[[str], None] = print_note) -> Indexed | Stream:
    """Return samples as a source.

    A one-dimensional array of integers is tokens; a sequence of samples is shuffled; any other iterable is a stream.

    >>> source_of([(1, 2), (3, 4)], "pairs", Config()).length
    2
    """
    if isinstance(samples, Tokens | Items | Stream):
        return samples
    if isinstance(samples, np.ndarray | torch.Tensor) and samples.ndim == 1:
        array = samples.numpy() if isinstance(samples, torch.Tensor) else samples
        if array.dtype.kind in "iu":
            return Tokens(array, config.training.seq_len, name=name)
    is_sequence = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if is_sequence and not isinstance(samples, str | bytes | dict | torch.utils.data.IterableDataset):
        return Items(samples, name=name)
    if not hasattr(samples, "__iter__") or isinstance(samples, str | bytes | dict):
        raise StagelineError(
            f"{name} is a {type(samples).__name__}, {shorten(samples)}; it must be an iterable of samples, a sequence "
            "of them, or one row of tokens"
        )
    return Stream(samples, name=name, note=note)


def _is_one_shot(samples: Any) -> bool:
    """Whether it can be iterated only once and has no way to seek."""
    return isinstance(samples, Iterator) and not any(hasattr(samples, method) for method in ("seek", "load_state_dict"))


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]

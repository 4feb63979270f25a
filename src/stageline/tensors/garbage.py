"""Python's search for reference cycles, put off until a step is over: it stops every rank of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """While this lasts, Python does not look for reference cycles by itself.

    A step makes many small objects, and every few hundred of them would start a search; a search of the oldest ones
    takes a tenth of a second once torch is loaded.

    >>> with no_collections():
    ...     gc.isenabled()
    False
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()

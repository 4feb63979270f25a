"""What can be wrong with a checkpoint, as data and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stageline.common.errors import StagelineError


@dataclass(frozen=True)
class Damage:
    """One file of a checkpoint that is not as it was written.

    >>> print(Damage(Path("step-00000100"), "model-00001-of-00001.safetensors", "size", "has 10 bytes, expected 96"))
    step-00000100/model-00001-of-00001.safetensors: has 10 bytes, expected 96
    """

    checkpoint: Path
    file: str
    what: Literal["missing", "size", "checksum", "manifest", "refused", "unreadable"]
    text: str

    def __str__(self) -> str:
        """The file, then what is wrong with it."""
        return f"{self.checkpoint / self.file}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"checkpoint": str(self.checkpoint), "file": self.file, "what": self.what, "text": self.text}


def reason(error: BaseException) -> str:
    """Why, in the system's words.

    >>> reason(OSError(28, "No space left on device"))
    'No space left on device'
    >>> reason(KeyError("x"))
    "KeyError: 'x'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, StagelineError) else f"{type(error).__name__}: {error}"

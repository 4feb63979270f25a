"""An object store that several processes share: a folder without renaming, under the URL objects:///folder."""

from __future__ import annotations

import os
from typing import Any

import fsspec  # type: ignore[import-untyped, unused-ignore]
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped, unused-ignore]

import stageline as sl
from support.ray_rank import build, samples

torch.set_num_threads(1)


class ObjectStore(LocalFileSystem):  # type: ignore[misc, unused-ignore]
    """What an object store can do; `fail_at` is the number of the write or removal that fails, and all after it."""

    protocol = "objects"
    fail_at = -1
    writes = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("objects://")))

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("an object store cannot rename")

    def put_file(self, *arguments: Any, **options: Any) -> None:
        _count()
        super().put_file(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        _count()
        super().pipe_file(*arguments, **options)

    def rm_file(self, path: str) -> None:
        _count()
        super().rm_file(path)

    def rm(self, *arguments: Any, **options: Any) -> None:
        _count()
        super().rm(*arguments, **options)


def _count() -> None:
    ObjectStore.writes += 1
    if 0 <= ObjectStore.fail_at < ObjectStore.writes:
        raise PermissionError(13, "the store does not answer")


fsspec.register_implementation("objects", ObjectStore, clobber=True)


def train(settings: list[str], folder: str) -> tuple[int, float | None, str]:
    """Train as one rank, in a folder that no other rank has."""
    own = os.path.join(folder, os.environ.get("RANK", "0"))
    config = sl.Config.read(None, *settings, f"job.dump_folder={own}")
    result = sl.Trainer(config, model=build, loss_fn=torch.nn.functional.mse_loss, data=samples()).run()
    return result.step, result.loss, result.why

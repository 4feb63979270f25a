"""The folder of a run: whether it is new, goes on or belongs to something else, and who works in it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

from stageline._version import __version__
from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.train.config.config import Config
from stageline.train.config.io import FIXED, FREE, WARN, differences, read_config, write_toml

CONFIG, ENVIRONMENT, METRICS, LOCK = "config.toml", "environment.json", "metrics.jsonl", "lock"
FLIGHT = "flight"
"""Where ranks write what they did last when a step fails, which may be before there is a run."""


class RunFolder:
    """The folder of a run, which one job at a time works in."""

    def __init__(self, path: str | Path) -> None:
        """Name it; nothing is looked at or written yet."""
        self.path = Path(path)
        self._lock: IO[str] | None = None

    def look(self, config: Config) -> tuple[bool, list[str]]:
        """Whether there is a run to go on with, and what is different now; refuse what does not fit."""
        if self.path.exists() and not self.path.is_dir():
            raise StagelineError(f"job.dump_folder is {str(self.path)!r}, which is a file; give a folder")
        if not self.path.exists() or not any(each.name not in (LOCK, FLIGHT) for each in self.path.iterdir()):
            return False, []
        if not (self.path / CONFIG).is_file():
            raise StagelineError(
                f"job.dump_folder is {str(self.path)!r}, which holds other files and no run; nothing is overwritten: "
                "give another folder"
            )
        if not self._begun():  # a start that failed before it made anything
            return False, []
        earlier = read_config(self.path / CONFIG)
        apart = differences(config, earlier, ignore=WARN | FREE)
        if apart:
            raise StagelineError(
                f"{str(self.path)!r} holds a run of another configuration: {'; '.join(apart)}; nothing is overwritten: "
                "give another job.dump_folder, or the configuration of that run to go on with it"
            )
        return True, differences(config, earlier, ignore=FIXED | FREE)

    def _begun(self) -> bool:
        """Whether a job got as far as events, or left anything that only a job at work writes."""
        started = {CONFIG, LOCK, FLIGHT, ENVIRONMENT, "choice.json", "plan.json", "profile.json"}
        return any(each.name not in started and not each.name.startswith(".") for each in self.path.iterdir())

    def claim(self, config: Config) -> None:
        """Make the folder this job's own; refuse while another works in it. A config that is there stays as it was."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise StagelineError(
                f"job.dump_folder is {str(self.path)!r}, which cannot be written to: {error.strerror or error}"
            ) from None
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError:
            raise StagelineError(
                f"another job is at work in {str(self.path)!r}; wait for it, or give another job.dump_folder"
            ) from None
        if not (self.path / CONFIG).is_file():  # by which a later start knows whose folder it is
            self.keep(config)

    def keep(self, config: Config) -> None:
        """Write the config that is trained with, once nothing can refuse the job any more."""
        self.write(CONFIG, write_toml(config))

    def release(self) -> None:
        """Let others work in it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_aside(self, name: str) -> Path | None:
        """Keep a file of an earlier start under another name, and give that back; None if there is no such file."""
        path = self.path / name
        if not path.is_file() or not path.stat().st_size:
            return None
        number = 1
        while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        return path.rename(aside)

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically."""
        path = self.path / name
        write_text(path, text)
        return path


def environment(**more: Any) -> str:
    """Where a run runs, as JSON: versions, machine, command, and what else is known.

    >>> json.loads(environment(ranks=4))["ranks"]
    4
    """
    found = {
        "stageline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())],
        "command": " ".join(sys.argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        **more,
    }
    return json.dumps(found, indent=1) + "\n"

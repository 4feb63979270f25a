"""The folder of a run: the names of its files, whether a job can resume it, and the lock of the job that runs."""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.train.config.config import Config
from stageline.train.config.io import FIXED, FREE, WARN, differences, read_config, write_toml

if TYPE_CHECKING:
    from stageline.train.checkpoint.remote import Location

CONFIG, ENVIRONMENT, METRICS, LOCK = "config.toml", "environment.json", "metrics.jsonl", "lock"
PROFILE, PLAN, CHOICE = "profile.json", "plan.json", "choice.json"
TIMELINES, TIMELINE_PAGE = "timeline", "timeline.html"
SAMPLE, REPORT, ADAPTER = "sample.txt", "report.html", "adapter"
FLIGHT = "flight"
"""The folder of flight records, which a failure may write before there is a run."""


def timeline_file(step: int) -> str:
    """Return the name of the timeline of a step."""
    return f"{TIMELINES}/step-{step:08}.json"


def checkpoints_of(path: str) -> Location:
    """Return the folder of a run's checkpoints; a path that is not the folder of a run is returned as it is."""
    from stageline.train.checkpoint.remote import checkpoint_folder, location

    folder = location(path)
    if not isinstance(folder, Path) or not (folder / CONFIG).is_file():
        return folder
    return checkpoint_folder(folder, read_config(folder / CONFIG).checkpoint.folder)


def timeline_step(path: Path) -> int | None:
    """Return the step of a timeline file, or None for another file."""
    match = re.fullmatch(r"step-([0-9]{1,18})\.json", path.name)
    return int(match[1]) if match else None


class RunFolder:
    """The folder of a run; one job at a time writes to it."""

    def __init__(self, path: str | Path) -> None:
        """Nothing is read or written yet."""
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self.job_id = ""
        """A random number of the job that locked the folder, which is in the lock file, too; empty before that."""
        _FOLDERS.add(self)

    def find_run(self, config: Config) -> tuple[bool, list[str]]:
        """Return whether there is a run to resume, and which options differ; raise if it does not fit the config."""
        if self.path.exists() and not self.path.is_dir():
            raise StagelineError(f"job.dump_folder must be a folder, but {str(self.path)!r} is a file")
        if not self.path.exists() or all(child.name in (LOCK, FLIGHT) for child in self.path.iterdir()):
            return False, []
        if not (self.path / CONFIG).is_file():
            raise StagelineError(
                f"job.dump_folder is {str(self.path)!r}, which contains other files but no run; nothing was "
                "overwritten; use another folder"
            )
        if not self._has_started():
            return False, []
        earlier = read_config(self.path / CONFIG)
        conflicts = differences(config, earlier, ignore=WARN | FREE)
        if conflicts:
            raise StagelineError(
                f"{str(self.path)!r} contains a run with another configuration: {'; '.join(conflicts)}; nothing was "
                "overwritten; use another job.dump_folder, or restore that configuration to resume the run"
            )
        return True, differences(config, earlier, ignore=FIXED | FREE)

    def _has_started(self) -> bool:
        """Whether an earlier job got beyond its setup: it wrote events, or anything else that only training writes."""
        setup_files = {CONFIG, LOCK, FLIGHT, ENVIRONMENT, CHOICE, PLAN, PROFILE}
        return any(child.name not in setup_files and not child.name.startswith(".") for child in self.path.iterdir())

    def claim(self, config: Config, job_id: str = "") -> str:
        """Lock the folder for this job, and return its ID; raise while another job holds the lock.

        In a recovery, `job_id` is the ID of this job, as `claim` returned it before: then the lock is taken over from
        a process on a lost host, which may hold it for as long as that host is frozen or cut off from a file server.
        An existing config is kept.
        """
        self.release()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                self._lock = self._open_lock(job_id)
            self.job_id = job_id or os.urandom(8).hex()
            self._lock.truncate(0)
            self._lock.write(self.job_id)
            self._lock.flush()
        except OSError as error:
            raise StagelineError(
                f"job.dump_folder is {str(self.path)!r}, which is not writable: {error.strerror or error}"
            ) from None
        if not (self.path / CONFIG).is_file():  # tells a later start that this is the folder of a run
            self.write_config(config)
        return self.job_id

    def _open_lock(self, job_id: str) -> IO[str] | None:
        """The lock file, locked; None if it was replaced meanwhile."""
        path = self.path / LOCK
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
            file.close()
            if not job_id or holder != job_id:
                raise StagelineError(
                    f"another job is running in {str(self.path)!r}; wait for it, or use another job.dump_folder"
                ) from None
            path.unlink(missing_ok=True)
            return None
        except OSError as error:
            file.close()
            raise StagelineError(
                f"{str(path)!r} cannot be locked: {error.strerror or error}; mount its file system with locks (for "
                "Lustre: -o flock), or use a job.dump_folder on another file system"
            ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
        return None

    def write_config(self, config: Config) -> None:
        """Write the config of the run, once nothing can refuse the job any more."""
        self.write(CONFIG, write_toml(config))

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def move_aside(self, name: str) -> Path | None:
        """Rename a file of an earlier start, and return its new path; None if there is no such file."""
        path = self.path / name
        if not path.is_file() or not path.stat().st_size:
            return None
        number = 1
        while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        return path.rename(aside)

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_text(self.path / name, text)


_FOLDERS = weakref.WeakSet[RunFolder]()


def _close_in_child() -> None:
    """Leave the locks to the parent: a data loader's worker that outlives it must not keep them."""
    for folder in list(_FOLDERS):
        folder.release()


os.register_at_fork(after_in_child=_close_in_child)

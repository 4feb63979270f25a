"""Ranks as threads of this process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stageline.common.errors import StagelineError
from stageline.distributed.launchers.launcher import Job, Outcome

RANKS = "STAGELINE_RANKS"
"""The variable with the number of ranks of pipelines that have no `ranks=`."""


class ThreadLauncher:
    """Calls the function once; pipelines in it run their ranks as threads.

    >>> ThreadLauncher().run(Job(os.getenv, ("STAGELINE_RANKS",), processes=2))[0].value
    '2'
    """

    def run(self, job: Job) -> list[Outcome]:
        """Run the job in this thread."""
        if job.timeout is not None:
            raise StagelineError("the launcher threads runs the job in this process and cannot stop it; use processes")
        try:
            with _variables({**job.environment, RANKS: str(job.processes)}):
                return [Outcome(0, job.function(*job.arguments))]
        except Exception as error:
            if not job.returns:  # as a process that ends with the exception does
                traceback.print_exc()
            return [Outcome(0, error=error, failure=traceback.format_exc())]


def launched_ranks() -> int | None:
    """The number of ranks that the launcher set for pipelines of this process; None if it set none.

    >>> launched_ranks()
    """
    text = os.environ.get(RANKS, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise StagelineError(f"{RANKS} is {text!r}, expected an integer number of ranks above 0")
    return int(text) if text else None


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

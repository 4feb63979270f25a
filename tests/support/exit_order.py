"""A script that shuts down several things at exit: one of them with an error, and one that may hang."""

from __future__ import annotations

import os
import sys
import time

from stageline.distributed import process_exit


def fails() -> None:
    raise RuntimeError("planted")


def main() -> None:
    process_exit.SHUTDOWN = 0.5
    if "hang" in sys.argv:
        process_exit.shut_down_at_exit(lambda: time.sleep(1000))
    process_exit.shut_down_at_exit(lambda: os.write(1, b"first "))
    process_exit.shut_down_at_exit(fails)
    process_exit.shut_down_at_exit(lambda: os.write(1, b"second "))
    if "fork" in sys.argv:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
    sys.exit(3)


if __name__ == "__main__":
    main()

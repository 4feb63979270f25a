"""`python -m stageline` is the `stageline` command."""

from stageline.cli import main

main()

"""Which rank failed first, and what every rank was doing.

Read in order: `monitor/` (a process that watches the ranks), `flight_recorder` (the last actions and messages of a
rank, written to a file when a step fails), `diagnosis` (reads those files for `stageline doctor`). Nothing here imports
torch or knows a schedule.
"""

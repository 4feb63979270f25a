"""Which rank failed first, and what every rank was doing.

`monitor/` watches ranks while they run; `flight_recorder` keeps the last actions and messages of a rank and writes them
when a step fails; `diagnosis` reads those records for `stageline doctor`. Nothing here imports torch.
"""

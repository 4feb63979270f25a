"""Schedules made for given costs under a memory cap, with a proven gap to the optimum.

This package searches; it defines no rule about what a valid schedule is (see `schedules.rules`) and never imports torch.

Read in order: `problem`, `synthesize`, `search`, then what the search tries: `baselines`, `list_scheduling`, `turns`,
`periodic`, `local_search`, `mixed_backward`, `cp_sat`. `fast_simulate` evaluates candidates; `bounds` and `relaxation`
prove how far from the optimum a schedule can be.
"""

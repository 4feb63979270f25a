"""Schedules made for given costs under a memory cap, with a proven gap to the optimum.

This package searches; what makes a schedule valid is in `schedules.rules`. It never imports torch.

Read in order: `problem`, `synthesize`, `search`, then what the search tries: `baselines`, `zero_bubble`,
`list_scheduling` with `priority_rules`, `beam_search`, `periodic`, `local_search`, `windows`, `cp_sat`.
`fast_simulate` evaluates candidates; `bounds`, with `crossings` and `trips`, proves how far from the optimum a schedule
can be. `pareto` searches for many caps.
"""

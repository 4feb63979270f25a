"""Continuous steps: a rank starts the next step while others still run the current one.

Read in order: `run`, `rank_loop`, `rollback`, then `threads` and `processes` (where the ranks live).
Nothing here runs an action: within a step, a rank runs the same `runtime.executor` as in `Pipeline.step`.
"""

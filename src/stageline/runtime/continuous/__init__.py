"""Continuous steps: a rank begins the next step while others still run the last one.

Read in order: `run`, `rank_loop`, `step_record`, `rollback`, then `threads` and `processes` (where the ranks live).
"""

"""Where to cut a chain of units into stages.

Read in order: `partition` (the public function), `request` (checked input), `cuts` (one stage per rank, and the general
search), `v_cuts` and `v_heuristic` (V placement), `schedule_cuts` (cuts for a given schedule), `chart`.
"""

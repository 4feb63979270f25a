"""Where to cut a chain of units into stages.

Apart from `schedule_cuts`, this is arithmetic on lists of costs, without torch and without schedules.

Read in order: `partition` (the public function), `request` (its checked arguments), `cuts` (one stage per rank, and the
general search), `v_cuts` (V placement), `schedule_cuts` (cuts for a schedule).
"""

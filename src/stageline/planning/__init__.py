"""From a profile to a plan: cut, microbatches, recomputation and schedule, within the memory limit.

This package evaluates candidates by simulation. It never runs a pipeline.

Read in order: `plan` (the result), `planner` (`sl.plan` and its options), `request` (what a plan is for), `profiles`
(of several microbatch sizes), `search`, `candidates`, `costs` (time and memory of stages and ranks), `explain` (a plan,
or why nothing fits), `page`. For a larger mesh: `mesh` (its dimensions and network), `tensor_parallel`, `mesh_costs`
(what it adds to the costs of stages), `devices` (the search for a mesh).
"""

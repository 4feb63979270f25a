"""From a profile to a plan: cut, microbatches, recomputation and schedule, within the memory limit.

This package evaluates candidates by simulation. It never runs a pipeline.

Read in order: `plan`, `request` (its arguments), `search`, `candidates`, `costs` (of stages, for any microbatch size),
`explain` (a plan, or why nothing fits), `page`. For a larger mesh: `mesh` (its dimensions), `network` (between its
processes), `tensor_parallel`, `mesh_costs` (what it adds to the costs of stages), `devices` (the search for a mesh).
"""

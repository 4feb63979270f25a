"""From a profile to a plan: cut, microbatches, recomputation and schedule, within the memory limit.

This package evaluates candidates by simulation. It never runs a pipeline.

Read in order: `plan`, `request` (its arguments), `mesh` (how a larger mesh divides the memory), `search`,
`candidates`, `costs` (of stages, for any microbatch size), `explain` (a plan, or why nothing fits).
"""

"""From a profile to a plan: cut, microbatches, recomputation and schedule, within the memory limit.

This package evaluates candidates on paper. It never runs a pipeline.

Read in order: `plan`, `request`, `search`, `candidates`, `evaluate`, `stage_costs`, `memory`, `batch_sizes`, `advice`
(when nothing fits), `explain`, `io`, `reorder` (another schedule for the same stages).
"""

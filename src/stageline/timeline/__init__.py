"""When every action runs, or ran.

A simulated step and a measured step are the same type, `Timeline`. This package computes, compares, explains, draws and
stores timelines. It never imports torch.

Read in order: `costs`, `simulate`, `sharing` (ranks that share cores), `timeline`, then `idle` and `memory` (what a
timeline shows), `compare`, `explain` and `drift` (planned against measured), `io`, and `draw/`.
"""

"""Compiled units whose backward runs in two halves.

`torch.compile` turns a unit into a forward graph and a backward graph. Here the backward graph is cut into I (the
gradients of the inputs) and W (the gradients of the parameters), so that a compiled unit takes part in a zero-bubble
schedule. Nothing here knows stages, microbatches or ranks, and nothing here runs unless `compile` is used.

Read in order: `backward` (a backward that can run in two halves), `backend` (what `torch.compile` calls), `halves`
(where a backward graph is cut), `options` (the `compile` option).
"""

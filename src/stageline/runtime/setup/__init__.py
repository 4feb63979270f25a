"""Setting a pipeline up: from the arguments of `Pipeline` to stages that are placed on ranks.

Read in order: `options`, `stages` (from what a user passes to the stages of a schedule), `start` (the outline),
`model_stages` (the stages of this process), `handshake` (what must be the same on all processes), `automatic_plan` for
`schedule="auto"`, and `parallelize` and `tensor_parallel` for sharded stages. Nothing here runs a step.
"""

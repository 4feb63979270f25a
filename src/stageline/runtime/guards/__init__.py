"""Guards: checks that refuse, by name, what a pipeline cannot compute as one process would.

Each file covers one kind of mistake. Read them in the order in which they can refuse: `wrappers` (DDP and FSDP inside a
stage) when a pipeline is set up, `initial_weights` before the first step, `foreign_reads`, `inner_backward`,
`loss_reads` and `loss_graph` in an action, `changed_outputs` and `non_finite` when a step ends or fails. Nothing here
changes a result.
"""

"""Guards: checks that refuse, by name, what a pipeline cannot compute as one process would.

Each file covers one kind of mistake: `wrappers` (DDP and FSDP inside a stage), `loss_reads`, `foreign_reads`,
`inner_backward`, `initial_weights`, `loss_graph`, `changed_outputs`, `non_finite`. Nothing here changes a result.
"""

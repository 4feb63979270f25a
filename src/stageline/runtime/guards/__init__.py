"""Guards: checks that reject what a pipeline cannot compute as one process would, and name it.

Read them in the order in which they can refuse: `foreign_reads` (parameters of other stages), `cut_layers` (those of
tensor parallel), `uneven_parts` (activations that it cuts) and `backward` (a loss without a graph, a backward inside a
forward, DDP and FSDP) in an action; `changed_outputs` and `non_finite` when a step ends or fails. Nothing here changes
a result.
"""

"""Torch helpers that know no pipeline: trees, random numbers per layer, buffers, thread context.

Nothing here runs stages or schedules; a stage and a microbatch are only numbers that an error names.

Read in order: `pytree` (what stages pass to each other) and `copies` (of tensors, that a stage works on); then,
independent of each other, `random_numbers`, `buffers`, `sharded` (DTensor) and `thread_context`.
"""

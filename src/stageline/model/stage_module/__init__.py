"""One stage of a model: the model's own forward, in which only this stage's units compute.

Nothing here knows schedules or ranks.

Read in order: `stage_module`, `forward_replay`, `boundary` (what crosses a stage boundary), `placeholder` (tensors of
other stages), `dry_run` (which values a unit needs). Then the checks: `side_effects` and `shared_state`. `traced` is
the fallback through torch.export.
"""

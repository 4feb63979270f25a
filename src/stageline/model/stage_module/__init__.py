"""One stage of a model: the model's own forward, in which only this stage's units compute.

Read in order: `stage_module`, `forward_replay`, `boundary` (what crosses a cut), `placeholder` (tensors of other
stages), `side_effects` (what a unit may not do), `traced` (the fallback through torch.export).
"""

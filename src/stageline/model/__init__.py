"""From a model to stages.

This package finds the units of a model, decides where to cut it, measures it and builds only what a rank owns. It does
not run schedules.

Read in order: `units`, `split`, then `stage_module/` (one stage of a model), `partition/` (where to cut), `profile/`
(what units cost) and `build/` (materializing a rank's own tensors). `huggingface` holds what transformers' models need.
"""

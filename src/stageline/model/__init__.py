"""From a model to stages.

This package finds the units of a model, decides where to cut it, measures it and builds only what a rank owns. It does
not run schedules, and knows nothing of transports.

Read in order: `units` (and the order of their calls), `split` (the cut and its result, `Staged`), then `stage_module/`
(one stage of a model), `partition/` (where to cut), `profile` (the costs of units) with `profiler`, `observation` (of
one run), `measurement` (of each layer alone), `samples` (how sure they are) and `neighbours` (others that compute
meanwhile), and `build/` (allocating a rank's own tensors). Special cases: `skips` (skip connections), `compiled_models`
and `huggingface`. `tp_plan` reads how a model says that tensor parallel cuts it, and `reachability` finds what a layer
can reach through Python references.
"""

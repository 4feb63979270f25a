"""Running a schedule: from `Pipeline.step` to gradients.

Read in order: `pipeline` and its `options`, `step`, `batch`, `microbatches`, `executor`, `stage`, `step_report`; then
`stages` (from what a user passes to the stages of a schedule), `model_stages` (the stages of this process),
`rank_executors`, `replicas` and `grad_reduce`, `shared_parameters`, `grad_norm`, `state_dict`,
`replan`, `check`. `continuous/` holds steps that do not wait for each other.

No file here knows a schedule family by name.
"""

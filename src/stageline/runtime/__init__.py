"""Running a schedule: from `Pipeline.step` to gradients.

Read in order: `pipeline`, `step`, `microbatches`, `executor`, `stage`, `optimizer_step`, `step_report`; then
`rank_executors`, `replicas` and `grad_reduce`, `shared_parameters`, `grad_norm`, `state_dict`, `replan`, `check`.
`setup/` leads from the arguments of `Pipeline` to stages on ranks; `batches/` handles parts of a batch that are
not just cut along their first dimension; `guards/` refuses what a pipeline would compute wrongly; `continuous/` holds
steps that do not wait for each other.

No file here knows a schedule family by name.
"""

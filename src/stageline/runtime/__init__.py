"""Running a schedule: from `Pipeline.step` to gradients.

Read in order: `pipeline`, `step`, `microbatches`, `executor`, `stage`, `optimizer_step`, `step_report`; then
`rank_executors`, `replicas`, `grad_reduce` and `optimizer_shards` (ZeRO-1), `sharding` (FSDP2), `shared_parameters`,
`penalty`, `state_dict`, `replan`, `reference` (what one process computes), `check`, `cuda_graphs`, `action_ranges` (for
profilers) and `out_of_memory` (its error).
`setup/` leads from the arguments of `Pipeline` to stages on ranks; `batches/` handles parts of a batch that are not
just cut along their first dimension; `guards/` refuses what a pipeline would compute wrongly; `continuous/` holds steps
that do not wait for each other.

The executor knows no schedule family by name, and nothing here knows a training job.
"""

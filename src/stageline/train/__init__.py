"""The training job: from a configuration to a checkpoint you can resume from.

Read in order: `launch` (ranks as processes of this machine), `trainer`, `setup`, `schedule_choice` (the model,
measured, and a plan), `layout` (ranks, replicas, batches), `task` (model and loss), `gpt` (the built-in model), `step`,
`validation`, `optimizers`, `pipeline_state` (weights and optimizer in a checkpoint), `checkpoint_state`, `snapshots`
and `recovery` (states in host memory, for ranks that are lost), `run_folder`, `output`, `model_flops` (MFU),
`generation` (text from a trained model), `generation_job`, `callbacks`, `events`, `screen`, `preflight` (checks without
training) and `ray_trainer` (a job on a Ray cluster); then the subpackages `config/`, `data/`, `checkpoint/` and
`report/`. Nothing here knows how a pipeline step runs: that is `stageline.runtime`.
"""

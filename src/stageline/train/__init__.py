"""The training job: from a configuration to a checkpoint you can resume from.

Read in order: `trainer`, `setup`, `layout` (ranks and replicas), `task`, `gpt` (the built-in model), `losses`,
`schedule_choice`, `step`, `precision`, `optimizers`, `validation`, `checkpoint_state`, `run_folder`, `output`,
`sample`, `signals` and `preflight` (checks without training); then the subpackages `config/`, `data/`, `checkpoint/`,
`events/` and `report/`. Nothing here knows how a pipeline step runs: that is `stageline.runtime`.
"""

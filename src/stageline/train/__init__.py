"""The training job: from a configuration to a checkpoint you can resume from.

Read in order: `trainer`, `setup`, `task`, `step`, `optimizers`, `validation`, `checkpoint_state`, `run_folder`,
`output`; then the subpackages `config/`, `data/`, `checkpoint/`, `events/` and `report/`. Nothing here knows how a
pipeline step runs: that is `stageline.runtime`.
"""

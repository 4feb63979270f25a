"""The training job: configuration, data, optimizer, precision, checkpoints, and what it shows of itself."""

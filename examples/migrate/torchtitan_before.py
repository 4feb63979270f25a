"""Before: the parts of a torchtitan config (0.3, in Python) that say how a job trains and where it runs."""

from torchtitan.config import ParallelismConfig, TrainingConfig

training = TrainingConfig(local_batch_size=16, seq_len=64, steps=20, max_norm=1.0)
parallelism = ParallelismConfig(
    pipeline_parallel_degree=2,
    pipeline_parallel_schedule="Interleaved1F1B",
    pipeline_parallel_microbatch_size=2,
)

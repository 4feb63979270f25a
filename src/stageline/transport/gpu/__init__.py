"""GPU tensors: through pinned host memory, between streams, and over process groups such as NCCL."""

"""GPU tensors between processes: through pinned host memory, and over NCCL.

Read in order: `host_staging` (through host memory to a socket), `payloads` (beside the headers), `nccl`
(communicators). Nothing here knows a schedule, or in which order messages are sent.
"""

"""GPU tensors: through pinned host memory, between streams, and over process groups such as NCCL.

Read in order: `streams` (between ranks that are threads), `host_staging` (through host memory to a socket), `payloads`
(over process groups). Nothing here knows a schedule, or in which order messages are sent.
"""

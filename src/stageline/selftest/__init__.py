"""A self-test of a cluster: Stageline's guarantees, tested where a job will run.

Read in order: `selftest` (the checks, and their result), `bits` (every schedule family against a plain loop),
`planted_kill`, `page`. Bandwidth and latency are measured by `distributed/pairs.py`. Nothing here is needed to train.
"""

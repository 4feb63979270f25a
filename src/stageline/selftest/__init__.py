"""A test of a cluster: what we promise, tried where a user's job will run.

Read in order: `selftest` (the checks, and their result), `bits` (every schedule family against a plain loop), `pairs`
(bandwidth and latency), `planted_kill`, `environment` (versions and hosts), `page`. Nothing here is needed to train.
"""

"""Schedules synthesized for given costs under a memory cap, with a proven lower bound.

Reading order: `problem` states the instance, `search` runs the steps (`baselines`, `list_scheduling`, `turns`,
`mixed_backward`, `local_search`, `periodic`, `cp_sat`), `bounds` proves the lower bound, and `synthesize` is the public
entry point. Nothing here imports torch.
"""

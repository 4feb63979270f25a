"""Where ranks live: threads of this process, or processes of a job.

Layout and mesh, process groups, collectives, and the hosts that run one step of the ranks of this process. This package
runs programs that it is handed; it knows no stage and no autograd.

Read in order: `layout`, `rank_host` (the protocols), `failures` (errors of steps and jobs), `thread_host`; then
`meeting` (how ranks meet), `bootstrap` (joining a job), `process_groups`, `communicators` (NCCL), `collectives`,
`peer_connections` (collectives of layers), `process_host`, `pairs` (bandwidth and latency) and, for jobs that lose a
rank, `process_exit`, `recovery_policy`, `attempts`, `recovery` and `state_memory`.
`launchers/` starts the processes of a job.
"""

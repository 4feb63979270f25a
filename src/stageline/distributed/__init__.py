"""Where ranks live: threads of this process, or processes of a job.

Layout and mesh, process groups, collectives, and the hosts that run one step of the ranks of this process. This package
runs programs that it is handed; it knows no stage and no autograd.

Read in order: `layout`, `rank_host` (the protocols), `failures` (the error of a failed step), `thread_host`; then
`bootstrap` (joining a job) with `rendezvous`, `process_groups`, `collectives`, `decision` (rank 0 decides for all),
`process_host` and, for jobs that lose a rank, `job_failures` and `process_exit`.
"""

"""Where ranks live: threads of this process, or processes of a job.

Layout and mesh, process groups, collectives, and the hosts that run one step of the ranks of this process. This package
runs programs that it is handed; it knows no stage and no autograd.

Read in order: `layout`, `rank_host` (the protocols), `failures` (the error of a failed step), `thread_host`; then
`process_groups`, `rendezvous`, `job_failures`, `collectives`, `process_host`, `process_exit` (ranks as processes).
"""

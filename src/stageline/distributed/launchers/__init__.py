"""Starting ranks: a launcher places the ranks of a job, sets their environment, and collects how they ended.

One file a launcher; a launcher knows no pipeline. SLURM and torchrun start the processes themselves: there, a rank
only reads its place from the environment, under SLURM with `slurm`.

Read in order: `launcher` (the protocol, and `sl.launch`), `processes`, `replacements` (of lost ranks),
`fork_server`, `fork_server_process` and `remote_calls` (functions that run in other processes); for several hosts
`hosts` (their launchers) and `host_ranks`; `threads`, `ray`, `slurm`.
"""

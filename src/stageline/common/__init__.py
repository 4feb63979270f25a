"""What needs neither schedules nor torch: errors, files, checked JSON, human-readable units.

Nothing here imports another package of Stageline, numpy or torch. Read `errors` first: every error that a user can
catch is defined there. Then `files`, `temporary_folder`, `checked_json`, `units`, `imports` (functions by name),
`interrupts` (Ctrl-C, and signals that stop a job or a rank), `machine` (its cores, addresses and ports), `heap` (that
of the C library), `trust` (the shared secret of a job), `handshake` (opening and accepting authenticated connections)
and `tls` (encrypted ones).
"""

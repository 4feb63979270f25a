"""What runs where, in which order.

A schedule is data: this package makes, transforms, verifies, reads and writes it. It knows nothing about time (see
`timeline`), and never imports torch.

Read in order: `action`, `placement`, `schedule`, then `runs` and one file of `families/`, `v_scheduling` (for families
whose ranks choose among ready actions), `registry`, `dependencies`, `channels`, `rules`, `verify`, `transform` and
`io`.
"""

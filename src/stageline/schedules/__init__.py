"""What runs where, in which order.

A schedule is data: this package makes, transforms, verifies, reads and writes it. It knows nothing about time (see
`timeline`), and never imports torch.

Read in order: `action`, `placement`, `schedule`, then `runs` and one file of `families/`, `registry`, `dependencies`,
`channels`, `sharding`, `rules`, `verify` and `io`.
"""

"""Moving tensors between ranks.

Transports move typed messages: a small header that is checked on arrival, then the bytes. They know no schedule, and
nothing is pickled.

Read in order: `protocol`, `threads`, `wire` (a message as bytes), `tcp/` (ranks as processes), `clock_alignment` (the
clocks of several ranks on one scale), `gpu/`.
"""

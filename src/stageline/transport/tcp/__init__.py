"""Ranks as processes, on TCP connections of their own.

Read in order: `transport`, `channels` (the receiving end of a channel), `outbox` (the sending end), `links` (the
connections), `repair` (opening them again), `exchange` (collectives). Nothing here knows a schedule: a step
tells it only how many messages to expect.
"""

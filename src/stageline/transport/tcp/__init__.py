"""Ranks as processes, on TCP connections of their own.

Read in order: `transport`, `channels` (the two ends of a channel), `links` (the connections), `exchange` (rows of
numbers that ranks share before and after a step). Nothing here knows a schedule: a step tells it only how many messages
to expect.
"""

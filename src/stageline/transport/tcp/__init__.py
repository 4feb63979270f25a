"""Ranks as processes, on TCP connections of their own.

Read in order: `transport`, `links` (the connections), `outbox` (what the network did not accept at once), `exchange`
(rows of numbers that all ranks share at the end of a step).
"""

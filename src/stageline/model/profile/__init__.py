"""What the units of a model cost: time and bytes, measured.

Read in order: `profile` (the table and its file), `capture` (one observed run), `measure` (one unit alone).
"""

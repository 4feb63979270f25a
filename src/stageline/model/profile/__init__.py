"""The measured costs of a model's units: seconds and bytes.

Read in order: `profile` (the table and its file), `profiler` (how it is measured), `capture` (one observed run),
`measure` (one unit alone). Nothing here decides where to cut a model, or knows a schedule.
"""

"""The configuration of a training job: one dataclass per section, read from TOML, flags or Python.

Read in order: `config`, `options` (what each field accepts), `read`, `toml`, `validate` (rules across options).
"""

"""The configuration of a training job: one dataclass per section, read from TOML, flags or Python.

Read in order: `config`, `io` (what each option accepts; TOML files, settings, plain data), `ranks` (how many, if the
config leaves it open), `rules` (which options go together). Nothing here imports torch: the command checks a config
before it imports torch.
"""

from stageline.train.config.config import Config

__all__ = ["Config"]

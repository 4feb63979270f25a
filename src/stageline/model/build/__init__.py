"""Build a model of which this process allocates only its own part, with the same bits for every number of ranks.

Read in order: `build`, `recorder` (run a constructor without memory), `tape` (replay it for chosen tensors), `weights`
(load safetensors). Nothing here decides which tensors a rank owns: callers do.
"""

from stageline.model.build.build import build, describe

__all__ = ["build", "describe"]

"""Modules that version 0.1.0 documented under other names: importing one of them works, with a DeprecationWarning."""

import sys

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this file
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MOVED = {
    "model.load": "model.build.weights",
    "runtime.control": "faults.monitor",
    "runtime.diagnosis": "faults.diagnosis",
    "runtime.flight": "faults.flight_recorder",
    "schedules.build": "schedules.runs",
    "train.logs": "train.events",
    "train.options": "train.config.io",
    "train.settings": "train.config.io",
    "train.validate": "train.config.rules",
}
"""From the old name to the new one, both without `stageline.`."""

RENAMED = {"Flight": "FlightRecorder"}
"""Classes of these modules that have a new name, too."""


class MovedModules:
    """An importer that knows the old names."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name.removeprefix("stageline.") not in MOVED:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return None

    def exec_module(self, module: "ModuleType") -> None:
        import warnings
        from importlib import import_module

        old = module.__name__
        new = "stageline." + MOVED[old.removeprefix("stageline.")]
        warnings.warn(f"{old} has moved to {new}; the old name will be removed", DeprecationWarning, stacklevel=2)
        moved = import_module(new)
        module.__doc__ = moved.__doc__
        module.__getattr__ = lambda name: getattr(moved, RENAMED.get(name, name))  # type: ignore[method-assign]


def install() -> None:
    """Add the importer first: a leftover folder that holds only `__pycache__` would import as an empty package."""
    sys.meta_path.insert(0, MovedModules())

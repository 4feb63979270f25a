"""The version, and nothing else, so that the build can read it without importing numpy."""

__version__ = "0.1.0"

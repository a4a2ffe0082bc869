"""The version of this release, which peers tell each other."""

__version__ = "0.1.0"

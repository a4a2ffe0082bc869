"""Strict reading of dataclasses from JSON that others wrote."""

from __future__ import annotations

from pydantic import ConfigDict


class Strict:
    """Base of these dataclasses: unknown keys and wrong types are errors."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

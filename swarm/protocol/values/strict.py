"""How dataclasses are read from JSON that others wrote."""

from __future__ import annotations

from pydantic import ConfigDict


class Strict:
    """Base of such dataclasses: unknown keys and other types are errors."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

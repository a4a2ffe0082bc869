"""The one byte form of JSON that is hashed, signed and sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def canonical(
    value: object, *, plain: Callable[[Any], object] | None = None, ascii_only: bool = True
) -> bytes:
    """Canonical JSON: sorted keys, no blanks, finite numbers; raises ValueError for others.

    Args:
        value: of types that JSON has, or `plain` turns into such.
        plain: turns other values into such.
        ascii_only: escapes all other characters; else they are UTF-8, or a question mark.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=ascii_only,
        default=plain,
    ).encode(errors="replace")

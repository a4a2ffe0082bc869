"""The only byte form of JSON that is hashed, signed and sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def canonical(
    value: object, *, plain: Callable[[Any], object] | None = None, ascii_only: bool = True
) -> bytes:
    """Canonical JSON: sorted keys, no blanks, finite numbers. ValueError for other values.

    Args:
        value: value of JSON's types, or of types that `plain` converts.
        plain: converts a value of another type into one of JSON's types.
        ascii_only: escapes all characters beyond ASCII. Otherwise text is UTF-8, with a question
            mark for each character that UTF-8 cannot encode.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=ascii_only,
        default=plain,
    ).encode(errors="replace")

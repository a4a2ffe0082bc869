"""The one byte form of JSON that is hashed, signed and sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def canonical(
    value: object, *, plain: Callable[[Any], object] | None = None, ascii_only: bool = True
) -> bytes:
    """Canonical JSON: sorted keys, no blanks, finite numbers.

    Args:
        value: what JSON can hold, and what `plain` makes such of.
        plain: what stands for a value that JSON does not know.
        ascii_only: escapes all other characters. Else they are UTF-8, which has a third of the
            bytes, and what UTF-8 cannot hold becomes a question mark.

    Raises:
        ValueError: a number is infinite or none.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=ascii_only,
        default=plain,
    ).encode(errors="replace")

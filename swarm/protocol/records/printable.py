"""Makes text of other peers safe to show on terminals and in logs, always on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CHARACTERS = 4000
PEER_ID = re.compile(r"(\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b)")
"""A libp2p peer id in base58."""


def printable(text: str, limit: int = MAX_CHARACTERS) -> str:
    r"""The text without characters that would control a terminal or end a line.

    All characters that Unicode does not count as printable are shown as escapes, such as `\x1b` and
    `\u202e`. These are control characters, line and paragraph ends, marks that change the direction
    of writing or have no width, all spaces but the usual one, and lone surrogates. At most `limit`
    characters are shown, then the number of the others.
    """
    shown = text if len(text) <= limit else text[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else _escape(c) for c in shown)
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: `0-3,7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

"""Text of other peers, as it may be shown to people: on terminals and in logs, always one line."""

from __future__ import annotations

MAX_CHARACTERS = 4000


def printable(text: str, limit: int = MAX_CHARACTERS) -> str:
    r"""The text without what would act on a terminal or end a line.

    Shown as escapes, as `\x1b` and `\u202e`, is all that Unicode does not count as printable:
    control characters, line and paragraph ends, marks that turn the direction of writing or take
    no room, spaces but the usual one, and halves of surrogate pairs.

    Args:
        text: from anywhere.
        limit: characters of it that are shown; how many follow is said.
    """
    shown = text if len(text) <= limit else text[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else _escape(c) for c in shown)
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()

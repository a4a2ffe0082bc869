"""What is raised where an invariant does not hold."""

from __future__ import annotations

from swarm.protocol.manifest import Manifest


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def require(condition: bool, invariant: str, text: str) -> None:
    """Raises a `Violation` unless the condition holds."""
    if not condition:
        raise Violation(invariant, text)


def short(manifest: Manifest) -> str:
    """A manifest's name in traces and messages."""
    return (
        f"{manifest.kind.value}@{manifest.height}/r{manifest.round}"
        f"[{manifest.generation[:6]}:{manifest.digest[:6]}]"
    )

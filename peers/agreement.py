"""Whether the run that a peer found is the one that its person asked for."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.config import RunConfig
from swarm.errors import RunMismatch


def explain_difference(asked: RunConfig, running: RunConfig) -> str:
    """Settings in which a joiner's file differs from the run, for the person to see."""
    asked_flat, running_flat = _flat(asked.model_dump()), _flat(running.model_dump())
    return ", ".join(
        f"{key}: asked {asked_flat.get(key)!r}, the run has {running_flat.get(key)!r}"
        for key in sorted(asked_flat.keys() | running_flat.keys())
        if asked_flat.get(key) != running_flat.get(key)
    )


def require_settings(run: RunConfig, overrides: Mapping[str, object]) -> None:
    """Refuses `--rounds` and `--set` of a joiner unless they equal the run's settings.

    Raises:
        RunMismatch: names every difference.
    """
    have = _flat(run.model_dump())
    wrong = [
        f"{key}: asked {value!r}, the run has {have.get(key)!r}"
        for key, value in overrides.items()
        if have.get(key) != value
    ]
    if wrong:
        raise RunMismatch("; ".join(wrong), hint="leave the option out to join as it is")


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

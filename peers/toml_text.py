"""Configurations as TOML, for people who want to see or keep what is in effect."""

from __future__ import annotations

from typing import Any

from swarm.config import PeerConfig, RunConfig


def as_toml(*configs: RunConfig | PeerConfig) -> str:
    """Configurations as TOML that reads back as the same; defaults included."""
    lines: list[str] = []
    for config in configs:
        for name, section in config.model_dump().items():
            several = section if isinstance(section, tuple) else (section,)
            header = f"[[{name}]]" if isinstance(section, tuple) else f"[{name}]"
            for values in several:
                lines += ["", header]
                kept = {key: value for key, value in values.items() if value is not None}
                lines += [f"{key} = {toml_value(value)}" for key, value in kept.items()]
    return "\n".join(lines).strip()


def toml_value(value: Any) -> str:
    """One value as it stands behind the key."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{quoted}"'
    return repr(value)

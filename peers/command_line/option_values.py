"""Parses the values of flags, and writes configurations as TOML."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click

from swarm.config import PeerConfig, RunConfig
from swarm.config.amounts import rate_in_mbit, size_in_bytes
from swarm.errors import ConfigError
from swarm.run_files import Kind, find_file, read_text


def as_toml(*configs: RunConfig | PeerConfig) -> str:
    """Configurations as TOML with defaults. Reading the TOML gives the same configurations."""
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
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{quoted}"'
    return repr(value)


class Setting(click.types.StringParamType):
    """`section.field=value`. In SWARM_SET, semicolons separate several settings."""

    name = "section.field=value"
    envvar_list_splitter = ";"


def number_or_all(_: click.Context, __: click.Parameter, text: str | None) -> int | str | None:
    """A number of GPUs, or all."""
    if text is None or text == "all":
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise click.BadParameter(f"{text!r} is no number of GPUs; it is 2, for example, or all")
    return int(text)


def split_addresses(
    _: click.Context, __: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    """Addresses from texts: one address, several with commas or spaces between, or `@FILE`."""
    return tuple(address for value in values for address in _addresses_in(value))


def _addresses_in(text: str) -> list[str]:
    if text.startswith("@"):
        lines = read_text(Path(text[1:])).splitlines()
        text = " ".join(line.partition("#")[0] for line in lines)
        return text.replace(",", " ").split()
    words = text.replace(",", " ").split()
    return [one for word in words for one in (_addresses_in(word) if word[0] == "@" else [word])]


def head_digest(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """The digest of HEIGHT:DIGEST."""
    if text is None:
        return None
    found = re.fullmatch(r"[0-9]{1,15}:([0-9a-f]{64})", text)
    if not found:
        raise click.BadParameter("it is HEIGHT:DIGEST, as a member's log says it")
    return found[1]


def invitation_text(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """The text of an invitation, given directly, in a file, or on standard input."""
    if text == "-":
        return sys.stdin.readline().strip()
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text(errors="replace").strip()
    except OSError as error:
        raise click.BadParameter(f"{text[1:]}: {error.strerror}") from error


def ip_of(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """An IPv4 or IPv6 address in its usual form."""
    try:
        return None if text is None else str(ip_address(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no IP address such as 203.0.113.7") from None


def rate_of(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Mbit/s of a rate such as 20mbit."""
    return None if text is None else rate_in_mbit(text)


def gbit_of(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Gbit/s of a rate such as 25gbit."""
    return None if text is None else rate_in_mbit(text) / 1e3


def gigabytes_of(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """GB (10^9 bytes) of a size such as 200GB."""
    return None if text is None else size_in_bytes(text) / 1e9


def file_of(kind: Kind) -> Callable[[click.Context, click.Parameter, Path | None], Path | None]:
    """A callback that finds the file of this kind that a flag names, by path or by name alone."""

    def found(_: click.Context, __: click.Parameter, given: Path | None) -> Path | None:
        return find_file(given, kind) if given else None

    return found


def require_folder(out: Path) -> None:
    """Makes sure, before other work, that an export can be written.

    Raises:
        ConfigError: the folder is a file, or cannot be written to.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    why = f"{place} is a file" if not place.is_dir() else f"{place} is not writable"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(f"cannot export to {out}: {why}", hint="name another folder")

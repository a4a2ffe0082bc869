"""What may stand after a flag: settings, addresses, heads, files; each is parsed here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from swarm.errors import ConfigError


class Setting(click.types.StringParamType):
    """`section.field=value`; in SWARM_SET several are separated by semicolons."""

    name = "section.field=value"
    envvar_list_splitter = ";"


def split_addresses(
    _: click.Context, __: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    """Addresses from texts with one, with several separated by commas or spaces, or `@FILE`."""
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


def require_folder(out: Path) -> None:
    """Makes sure, before any work, that an export can be written.

    Raises:
        ConfigError: it is a file, or cannot be written to.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    why = f"{place} is a file" if not place.is_dir() else f"{place} is not writable"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(f"cannot export to {out}: {why}", hint="name another folder")


def read_text(path: Path) -> str:
    """The text of a file that a person named.

    Raises:
        ConfigError: it cannot be read; names it and what lies beside it under a similar name.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        beside = sorted(p.name for p in path.parent.glob(f"*{path.suffix}") if p.is_file())
        close = difflib.get_close_matches(path.name, beside, n=1)
        is_other = close and close[0] != path.name
        hint = f"did you mean {path.parent / close[0]}?" if is_other else ""
        raise ConfigError(f"{path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error

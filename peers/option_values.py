"""What may stand after a flag: settings, addresses, heads, files; each is parsed here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import click

from swarm.errors import ConfigError, InvitationError
from swarm.network.invitations import is_signed
from swarm.protocol.invitation import Invitation, from_text


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


def invitation_given(_: click.Context, __: click.Parameter, text: str | None) -> Invitation | None:
    """The invitation of a line that swarm-invite printed.

    Raises:
        InvitationError: it is none, or was damaged.
    """
    if text is None:
        return None
    invitation = from_text(text)
    if not is_signed(invitation):
        raise InvitationError(
            "the invitation is damaged: its signature does not hold",
            hint="pass on the whole line that swarm-invite printed",
        )
    return invitation


def read_text(path: Path) -> str:
    """The text of a file that a person named.

    Raises:
        ConfigError: it cannot be read; names it and what lies beside it under a similar name.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        beside = sorted(p.name for p in path.parent.glob(f"*{path.suffix}"))
        close = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {path.parent / close[0]}?" if close else ""
        raise ConfigError(f"{path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error

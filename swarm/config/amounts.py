"""Amounts as people write them: sizes, rates and links. An ambiguous text is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarm.errors import ConfigError

_SIZE = re.compile(r"^\s*([\d.]+)\s*(?:([KMGT])(i?)B?|B)?\s*$", re.IGNORECASE)
_NUMBER = r"(\d+(?:\.\d+)?)"
_RATE = re.compile(rf"{_NUMBER}\s*([kmg])bit(?:/s)?", re.IGNORECASE)
_BYTES = re.compile(rf"{_NUMBER}\s*([kmg])i?B(?:/s)?", re.IGNORECASE)
_PAIR = re.compile(rf"{_NUMBER}\s*([kmg]bit(?:/s)?)?/{_NUMBER}\s*([kmg]bit(?:/s)?)", re.IGNORECASE)
_DELAY = re.compile(rf"{_NUMBER}\s*ms")
_LOSS = re.compile(rf"{_NUMBER}\s*%")
_MBIT = {"k": 1e-3, "m": 1.0, "g": 1e3}
LINK_HINT = (
    "write it as 100/20mbit,100ms (down/up, round trip), as 50mbit where both are the same, or "
    "each by its name: down=100mbit,up=20mbit,rtt=100ms,loss=0.1%"
)
ASSUMED_RTT_MS = 50.0
"""Round trip of a link that names none: as between two homes of one continent."""


def size_in_bytes(text: str) -> float:
    """Bytes of a size such as "24GB", "1.5 TB" or "512MiB".

    Raises:
        ConfigError: the text is not a size.
    """
    match = _SIZE.match(text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise ConfigError(f"{text!r} is not a size", hint="write it as 24GB or 1.5TB")
    if match[1] == text.strip() and float(match[1]):
        raise ConfigError(f"{text!r} is a size without a unit", hint=f"write it as {match[1]}GB")
    thousands = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    return float(match[1]) * float((1024 if match[3] else 1000) ** thousands)


def rate_in_mbit(text: str) -> float:
    """Mbit/s of a rate such as "20mbit", "2.5 gbit" or "500kbit/s".

    Raises:
        ConfigError: the text is not a rate, has no unit, or is in bytes.
    """
    if match := _RATE.fullmatch(text.strip()):
        mbit = float(match[1]) * _MBIT[match[2].lower()]
        if mbit > 0:
            return mbit
    hint = "rates are in kbit, mbit or gbit a second: 20mbit"
    if match := _BYTES.fullmatch(text.strip()):
        mbit = 8 * float(match[1]) * _MBIT[match[2].lower()]
        hint = f"rates are in bits: if you mean bytes, write {mbit:g}mbit"
    elif re.fullmatch(_NUMBER, text.strip()):
        hint = f"it has no unit: write {text.strip()}mbit"
    raise ConfigError(f"{text!r} is not a rate", hint=hint)


@dataclass(frozen=True)
class LinkRates:
    """A link, as its peer sees it.

    Attributes:
        up_mbit: rate from the peer, Mbit/s.
        down_mbit: rate to the peer, Mbit/s.
        rtt_ms: round trip to the other peers.
        loss_pct: packets lost on the way to the other peers, percent.
    """

    up_mbit: float
    down_mbit: float
    rtt_ms: float = ASSUMED_RTT_MS
    loss_pct: float = 0.0


def link_rates(text: str) -> LinkRates:
    """A link written as `LINK_HINT` says: down before up, as providers write links.

    Raises:
        ConfigError: a part is missing, given twice, or could mean something else.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        for name, value in _named_amounts(part.strip(), text).items():
            if name in found:
                raise ConfigError(f"--link {text!r} says {name} twice", hint=LINK_HINT)
            found[name] = value
    for name in ("down", "up"):
        if name not in found:
            raise ConfigError(f"--link {text!r} does not say how fast {name} is", hint=LINK_HINT)
    return LinkRates(
        found["up"], found["down"], found.get("rtt", ASSUMED_RTT_MS), found.get("loss", 0.0)
    )


def _named_amounts(part: str, text: str) -> dict[str, float]:
    name, is_named, value = part.partition("=")
    if is_named and name in ("up", "down"):
        return {name: rate_in_mbit(value)}
    if is_named and name not in ("rtt", "loss"):
        raise ConfigError(f"--link {text!r}: a link has no {name!r}", hint=LINK_HINT)
    bare = value if is_named else part
    if name != "loss" and (match := _DELAY.fullmatch(bare)):
        return {"rtt": float(match[1])}
    if name != "rtt" and (match := _LOSS.fullmatch(bare)) and float(match[1]) < 100:
        return {"loss": float(match[1])}
    if is_named:
        raise ConfigError(f"--link {text!r}: {part!r} is not a valid {name}", hint=LINK_HINT)
    if match := _PAIR.fullmatch(part):
        return _down_and_up(match, part)
    if "/" in part.replace("bit/s", ""):
        raise ConfigError(f"--link {text!r}: {part!r} is not a pair of rates", hint=LINK_HINT)
    mbit = rate_in_mbit(part)
    return {"up": mbit, "down": mbit}


def _down_and_up(match: re.Match[str], part: str) -> dict[str, float]:
    down = rate_in_mbit(match[1] + (match[2] or match[4]))
    up = rate_in_mbit(match[3] + match[4])
    if up > down:
        raise ConfigError(
            f"--link {part!r} is read as {down:g} Mbit/s down and {up:g} up, which few links have",
            hint=f"write {up:g}/{down:g}mbit, or if it is meant, down={down:g}mbit,up={up:g}mbit",
        )
    return {"down": down, "up": up}

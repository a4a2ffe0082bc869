"""What a peer found out about its line, kept for its next start, which need not measure first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from swarm import durable

logger = logging.getLogger(__name__)

VALID_S = 3600.0
"""At home a line changes with the hour; a machine that is off for longer may be elsewhere."""


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class KeptLine:
    """What was known when.

    Attributes:
        up_mbit: what the line was seen to carry away from the peer.
        cap_mbit: what its uploads were held to; None: nothing held them.
        at: when the uplink was tested, in seconds since 1970.
    """

    up_mbit: Rate
    cap_mbit: Rate | None
    at: float


_SCHEMA = TypeAdapter(KeptLine)


def read_line(path: Path) -> KeptLine | None:
    """What is still good of it; None if there is nothing, or what is there is damaged."""
    try:
        line = _SCHEMA.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("%s is passed over, the line is measured: %s", path, error)
        return None
    return line if 0 <= time.time() - line.at < VALID_S else None


def write_line(path: Path, line: KeptLine) -> None:
    """Keeps what is known; a disk that refuses costs the next start a measurement."""
    try:
        durable.write_file(path, _SCHEMA.dump_json(line))
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)

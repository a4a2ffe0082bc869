"""The base of all settings: frozen groups of values, and the kinds of values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 2**62
"""Of steps, tokens and the like; counts in messages, records and manifests have the same bound."""
Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveReal = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(gt=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]
"""Up to 115 days."""
Share = Annotated[float, Field(ge=0, le=1)]
Codec = Literal["fp32", "bf16"]
Coding = Literal["none", "bf16", "b2", "b1"]
"""How an agreed value's move travels: `swarm.codings`."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Texts that people see on their terminals: no control characters."""
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""It begins a run id, and so the name of a folder on everybody's disk."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

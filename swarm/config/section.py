"""The bases of all settings and of all messages, and explanations of values that they refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_COUNT = 2**62
"""Limit of steps, tokens and other counts, also in messages, records and manifests."""
Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveReal = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(gt=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]
"""Up to 115 days."""
Share = Annotated[float, Field(ge=0, le=1)]
Codec = Literal["fp32", "bf16"]
Coding = Literal["none", "bf16", "b2", "b1"]
"""How changes of agreed values are sent: see `swarm.codings`."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Texts that people see on their terminals have no control characters."""
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""A run id begins with the run's name, and so does a folder on every peer's disk."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Strict:
    """The base of dataclasses that are read from the JSON of other peers, as strictly."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


Problem = Mapping[str, Any]
"""A problem in pydantic's form."""
MAX_PLACE_CHARACTERS = 120
MAX_PROBLEM_CHARACTERS = 300


def refusal(error: ValidationError) -> str:
    """Place and problem of the first wrong value in a stranger's input, without the value."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, problem["loc"]))[:MAX_PLACE_CHARACTERS]
    return f"{place}: {problem['msg'][:MAX_PROBLEM_CHARACTERS]}"


def first_problem(error: ValidationError) -> Problem:
    """An unknown key if any, as it usually explains a missing key. Else the first problem."""
    problems = error.errors(include_url=False)
    return min(problems, key=lambda found: found["type"] != "extra_forbidden")


def key_of(place: Iterable[int | str]) -> str:
    """A place in nested values as people write it: `round.local_steps`, `fault[2].at`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def explained(key: str, problem: Problem, allowed: str = "") -> str:
    """Text of the problem of a value that a person wrote, with key and value.

    Args:
        key: the value's key; empty for the whole configuration.
        problem: what is wrong.
        allowed: the allowed values, in place of the schema's own words.
    """
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error" and not isinstance(problem["input"], str):
        return f"{key}.{message}" if key else message
    return f"{key} = {problem['input']!r}: {allowed or message[0].lower() + message[1:]}"

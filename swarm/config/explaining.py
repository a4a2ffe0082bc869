"""What is wrong with values that a schema has refused, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

Problem = Mapping[str, Any]
"""As pydantic tells it."""
MAX_PLACE_CHARACTERS = 120
MAX_PROBLEM_CHARACTERS = 300


def refusal(error: ValidationError) -> str:
    """Place and problem of the first wrong value of a stranger: short, without the value."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, problem["loc"]))[:MAX_PLACE_CHARACTERS]
    return f"{place}: {problem['msg'][:MAX_PROBLEM_CHARACTERS]}"


def first_problem(error: ValidationError) -> Problem:
    """An unknown key, if there is one: it usually is why another one is missing."""
    problems = error.errors(include_url=False)
    return min(problems, key=lambda found: found["type"] != "extra_forbidden")


def key_of(place: Iterable[int | str]) -> str:
    """A place in nested values as people write it: `round.local_steps`, `fault[2].at`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def explained(key: str, problem: Problem, allowed: str = "") -> str:
    """A problem of a person's value, with key and value.

    Args:
        key: of the value; empty where it is all of them.
        problem: what is wrong.
        allowed: what may stand there, in place of the schema's own words.
    """
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error" and not isinstance(problem["input"], str):
        return f"{key}.{message}" if key else message
    return f"{key} = {problem['input']!r}: {allowed or message[0].lower() + message[1:]}"

"""What goes wrong in a local swarm, and when: reads a plan in TOML into frozen faults.

```toml seed = 7 # of everything random below max_down = 1 # random faults wait while this many
peers are away; default: a minority step_s = 0.5 # least seconds of a local step, filled with a wait

[[fault]] kind = "kill" # kill -9; with `for_s` the peer starts again after that time peer =
"convener" # a number, a role, or "random" at = { round = 5, phase = "propose" } for_s = 5.0

[[fault]]
kind = "pause"
peer = "random"
at = { every_s = 60.0 } # mean interval; `times` bounds how often
for_s = [5.0, 20.0]     # drawn between the two
```

Everything here is pure: reading, checking, and drawing of moments from a generator.
"""

from __future__ import annotations

import json
import random
import tomllib
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from swarm.config import section
from swarm.errors import ConfigError

FaultPhase = Literal[
    "local_steps",
    "save",
    "offer",
    "roster",
    "reduce",
    "propose",
    "fetch",
    "accept",
    "commit",
    "apply",
    "merge",
    "leave",
]
"""Where in a round a peer is. `peers/emulated.py` maps phases to places in the program."""
Role = Literal["convener", "reducer", "contributor", "owner", "joiner", "bootstrap"]
"""The role of a peer at the moment of a fault. `bootstrap` is the peer that founded the run."""
Victim = section.NonNegative | Role | Literal["random", "any"]
"""A peer's number, its role, a random peer, or the first peer that comes to the phase."""
Seconds = section.PositiveReal | tuple[section.PositiveReal, section.PositiveReal]
"""A duration, or two bounds between which a duration is drawn."""

ROLES: tuple[str, ...] = get_args(Role)


class At(section.Section):
    """When a fault happens: in a round, some seconds after the start, or again and again."""

    round: section.Positive | None = None
    """The round, counted from 1."""
    phase: FaultPhase | None = None
    """Phase of this round, or of the first later round that has the phase. Without a phase, the
    fault comes as soon as the round begins."""
    after_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds after all peers have started."""
    every_s: section.PositiveReal | None = None
    """Mean interval. The intervals are drawn from an exponential distribution."""
    times: section.Positive | None = None
    """Most repetitions. Only with `every_s`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [n for n in ("round", "after_s", "every_s") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"at: needs one of round, after_s, every_s; given: {', '.join(given) or 'none'}"
            )
        if self.phase and self.round is None:
            raise ValueError("at.phase: needs at.round")
        if self.times and self.every_s is None:
            raise ValueError("at.times: needs at.every_s")
        return self


class _OfOnePeer(section.Section):
    at: At
    peer: Victim

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.peer in (*ROLES, "any") and self.at.phase is None:
            raise ValueError(f"peer: {self.peer!r} needs at.round and at.phase")
        return self


class Kill(_OfOnePeer):
    """Kill -9."""

    kind: Literal["kill"]
    for_s: Seconds | None = None
    """Seconds until a restart on its state. Without it the peer stays dead."""


class Restart(_OfOnePeer):
    """Starts a peer that is down. A running peer is killed first."""

    kind: Literal["restart"]


class Pause(_OfOnePeer):
    """The peer's processes stand still, as on a laptop that sleeps."""

    kind: Literal["pause"]
    for_s: Seconds


class Slow(_OfOnePeer):
    """Local steps take longer."""

    kind: Literal["slow"]
    factor: Annotated[float, Field(gt=1)]
    for_s: Seconds | None = None


class Skew(_OfOnePeer):
    """The peer's wall clock jumps."""

    kind: Literal["skew"]
    by_s: float
    for_s: Seconds | None = None


class Leave(_OfOnePeer):
    """The first Ctrl+C."""

    kind: Literal["leave"]
    for_s: Seconds | None = None
    """Seconds from the request to leave until a restart, if the peer has ended by then."""


class Join(section.Section):
    """A newcomer joins through a living peer."""

    at: At
    kind: Literal["join"]


class Cut(section.Section):
    """Cuts the link between two peers, or between one peer and all others. Needs `--link`."""

    at: At
    kind: Literal["cut"]
    peer: Victim
    to: section.NonNegative | Literal["random"] | None = None
    """Number of the other peer. Without it the peer is cut off from all others."""
    one_way: bool = False
    """Whether only what `peer` sends is lost."""
    for_s: Seconds | None = None


class Partition(section.Section):
    """Only peers of the same group reach each other. Needs `--link`."""

    at: At
    kind: Literal["partition"]
    groups: tuple[tuple[section.NonNegative, ...], ...]
    for_s: Seconds | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        everybody = [peer for group in self.groups for peer in group]
        if len(self.groups) < 2 or len(set(everybody)) < len(everybody):
            raise ValueError("groups: needs two groups or more, and each peer in one of them")
        return self


class Heal(section.Section):
    """All cuts and partitions end."""

    at: At
    kind: Literal["heal"]


Fault = Kill | Restart | Pause | Slow | Skew | Leave | Join | Cut | Partition | Heal
NEEDS_LINKS = (Cut, Partition, Heal)
KINDS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(Fault)}


class FaultPlan(section.Section):
    """Everything that goes wrong."""

    seed: section.NonNegative = 0
    """Decides all that is drawn at random."""
    max_down: section.Positive | None = None
    """Random faults wait while this number of peers is away or not back. Default: a minority."""
    in_order: bool = False
    """Whether faults of rounds come in the plan's order, each when fewer than `max_down` are
    away."""
    step_s: Annotated[float, Field(ge=0)] = 0.0
    """Least seconds of a local step, filled with a wait, so that many peers fit one machine."""
    fault: tuple[Annotated[Fault, Field(discriminator="kind")], ...] = ()

    @property
    def needs_links(self) -> bool:
        """Whether a fault in it cuts links."""
        return any(isinstance(fault, NEEDS_LINKS) for fault in self.fault)


KEYS = frozenset(key for kind in (FaultPlan, At, *KINDS.values()) for key in kind.model_fields)


def parse_plan(text: str, *, source: str) -> FaultPlan:
    """Reads a plan.

    Args:
        text: TOML, as at the top of this file.
        source: name of the text in errors, usually its path.

    Raises:
        ConfigError: a value is wrong. The error names source, key, value and what is allowed.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    try:
        # As JSON, so that a list may stand for a tuple while everything else is strict.
        return FaultPlan.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    problem = section.first_problem(error)
    # The tag of the chosen kind is part of the location, but people did not write it as a key.
    is_kind = len(problem["loc"]) > 2 and problem["loc"][0] == "fault"
    kind = KINDS.get(str(problem["loc"][2])) if is_kind else None
    where = (*problem["loc"][:2], *problem["loc"][3:]) if is_kind else problem["loc"]
    # The location also names the tried types of a union.
    is_unknown = problem["type"] == "extra_forbidden"
    key = section.key_of(
        part for part in where if isinstance(part, int) or part in KEYS or is_unknown
    )
    if is_unknown:
        owner = At if "at" in where[2:-1] else kind or FaultPlan
        return f"unknown key {key}; allowed: {', '.join(owner.model_fields)}"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = problem.get("ctx", {}).get("tag")
        found = f"{key}.kind = {tag!r}" if tag else f"{key}.kind is missing"
        return f"{found}; allowed: {', '.join(KINDS)}"
    if problem["type"] == "value_error":
        key = key.removesuffix(".at")
    peers = f"a number of a peer, {', '.join(ROLES)}, random or any" if key.endswith("peer") else ""
    return section.explained(key, problem, peers)


def drawn_s(span: Seconds, draw: random.Random) -> float:
    """A duration as a plan gives it."""
    return draw.uniform(*span) if isinstance(span, tuple) else float(span)


def moments(at: At, draw: random.Random, until_s: float) -> list[float]:
    """Seconds, up to `until_s`, at which a timed fault is due. None for a fault of a round."""
    if at.after_s is not None:
        return [at.after_s] if at.after_s <= until_s else []
    if at.every_s is None:
        return []
    found: list[float] = []
    now_s = draw.expovariate(1 / at.every_s)
    while now_s <= until_s and len(found) < (at.times or 10**9):
        found.append(now_s)
        now_s += draw.expovariate(1 / at.every_s)
    return found

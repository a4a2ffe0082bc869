"""Which run a person wants to be in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.config import RunConfig
from swarm.errors import RunMismatch
from swarm.peer.agreement import explain_difference, require_settings
from swarm.protocol.invitation import PrivateInvitation
from swarm.protocol.manifest import Digest


@dataclass(frozen=True)
class Wanted:
    """Which run a person means.

    Attributes:
        run: what it must be configured as; None takes it as it is.
        run_id: its id, where several are announced or on disk.
        settings: `section.field` -> value that it must have, where `run` is not given.
        invitation: with what this peer asks to join.
        beside_others: whether `run` may be founded where those that it enters by are in another, or
            the state directory is, and that is not finished.
        vouched: the head that the person vouches for (`--tip`); manifest 0 where there is none.
        tokenizer: folder with the tokenizer.json that a founder gives its run, or that the run of a
            joiner must have; None where tokens are bytes, or a joiner takes what the run has.
        initialise_from: checkpoint folder with the weights that a founder gives its run; it is
            not looked at by who joins or resumes.
    """

    run: RunConfig | None = None
    run_id: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    invitation: PrivateInvitation | None = None
    vouched: Digest | None = None
    beside_others: bool = False
    tokenizer: Path | None = None
    initialise_from: Path | None = None

    def require(self, run: RunConfig) -> None:
        """Refuses a run that is not what was asked for.

        Raises:
            RunMismatch: names every difference.
        """
        if self.run is None:
            require_settings(run, self.settings)
        elif difference := explain_difference(self.run, run):
            raise RunMismatch(difference)

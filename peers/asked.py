"""What a person asked swarm-doctor about, with what the disk says of it. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from peers.options import Options
from swarm.config import NetworkSection, RunConfig
from swarm.errors import SwarmError
from swarm.network.address_book import Remembered
from swarm.network.identity import load_or_create_identity
from swarm.network.invitations import read_invitation, require_guest
from swarm.network.tips import Trust
from swarm.peer.kept_settings import credential_to
from swarm.peer.state_directory import RunDirectory, StateDirectory
from swarm.peer.wanted import Wanted
from swarm.peer.way_in import path_of_key, run_on_disk
from swarm.protocol.invitation import Credential
from swarm.protocol.manifest import PeerId

Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """What a person asked about, and what the state directory says of it.

    Attributes:
        wanted: which run is meant.
        trust: what is believed of it; None: what follows from its first manifest.
        invitation: with which this peer would come, as it was given now.
        state: what is on disk.
        others: peers of earlier starts.
        port: that was used first.
        peer_id: this peer's own; "" if it has none yet.
        here: the run on disk that it would resume, unless it is led elsewhere.
        is_led: whether addresses were given.
        founds: whether `wanted` is founded beside whatever is there.
    """

    wanted: Wanted
    trust: Trust | None
    invitation: str | None
    state: StateDirectory
    others: tuple[Remembered, ...]
    port: int | None
    peer_id: str
    here: str | None
    is_led: bool
    founds: bool

    @classmethod
    def of(
        cls, given: Options, network: NetworkSection, wanted: Wanted, state: StateDirectory
    ) -> Asked:
        """As the options, and those of earlier starts, say."""
        begun = unless_refused(partial(run_on_disk, wanted, state), None)
        is_led = bool(network.initial_peers)
        return cls(
            wanted,
            Trust(given.tip) if given.tip else None,
            given.invitation,
            state,
            unless_refused(lambda: state.known_peers, ()),
            unless_refused(lambda: state.port, None),
            unless_refused(partial(own_id, network, state), ""),
            begun if begun and begun in state.run_ids else None,
            is_led,
            wanted.run is not None and (wanted.beside_others or not (begun or is_led)),
        )

    @property
    def resumed(self) -> str | None:
        """The run on disk that is gone on with whatever others are in; None if there is none."""
        says_which = self.wanted.run or self.wanted.run_id or not self.is_led
        return self.here if says_which else None

    def credential_to(self, me: PeerId, run_id: str, run: RunConfig) -> Credential | None:
        """With which this peer would ask to be let in: given now, or before where it must be.

        Raises:
            InvitationError: what was given is none, or is for another peer.
        """
        private = read_invitation(self.invitation) if self.invitation else None
        if private:
            require_guest(private, me)
        given = Credential(private.invitation, "") if private else None
        return unless_refused(partial(credential_to, run, given, self.state.run(run_id)), given)


@dataclass(frozen=True)
class Entry:
    """How a peer would come into a run, as far as can be known before it starts.

    Attributes:
        run: that it would be in; None: not known.
        directory: what is on disk of it, if anything may be.
        founds: whether this peer would found it.
    """

    run: RunConfig | None = None
    directory: RunDirectory | None = None
    founds: bool = False


def entry_of(asked: Asked, run: RunConfig | None, run_id: str | None, *, is_silent: bool) -> Entry:
    """How a peer would come into its run, by what is on disk and what others say.

    Args:
        asked: by the person.
        run: that is announced, if it is the one that is meant.
        run_id: its id; None: it gathers peers.
        is_silent: whether nobody could be asked, although addresses are known.
    """
    wanted, here, directory_of = asked.wanted, asked.here, asked.state.run
    if here and (run is None or run_id == here):
        return Entry(
            unless_refused(directory_of(here).read_config, run or wanted.run), directory_of(here)
        )
    if run:
        return Entry(run, directory_of(run_id) if run_id else None)
    is_lost = asked.is_led and is_silent  # nothing is founded beside peers that do not answer
    return Entry(wanted.run, founds=wanted.run is not None and not is_lost)


def wanted_of(given: Options) -> Wanted:
    """Which run the options mean.

    Raises:
        ConfigError: one of them, or the run file, is wrong.
    """
    run = given.run_config() if given.run else None
    return Wanted(
        run=run,
        run_id=given.run_id,
        settings={} if run else given.asked_of_run(),
        beside_others=given.new_run,
    )


def own_id(network: NetworkSection, state: StateDirectory) -> str:
    """This peer's id; "" if it has none yet.

    Raises:
        StateError: its key cannot be read, or is missing beside its runs.
    """
    key = path_of_key(network.identity_path, state)
    return load_or_create_identity(key).peer_id if key.exists() else ""


def unless_refused(what: Callable[[], Result], instead: Result) -> Result:
    """What the disk says, or this where it cannot be read; a check or the directory says why."""
    try:
        return what()
    except (SwarmError, OSError):
        return instead

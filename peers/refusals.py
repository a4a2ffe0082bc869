"""What swarm-peer would refuse; swarm-doctor says it before a peer is started."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from peers.asked import Entry, own_id
from peers.options import Options, require_founder
from peers.tensorboard import writer_type
from swarm.config import CorpusSection, PeerConfig, RunConfig
from swarm.errors import SwarmError
from swarm.network.invitations import read_invitation
from swarm.peer.quota import require_quota
from swarm.peer.run_start import founders_tokenizer, founders_weights
from swarm.peer.run_text import corpus_of
from swarm.peer.state_directory import RunDirectory, StateDirectory
from swarm.peer.wanted import Wanted
from swarm.peer.way_in import require_finished, require_way_in


def refusals(
    given: Options, config: PeerConfig, state: StateDirectory, wanted: Wanted, entry: Entry
) -> tuple[str, ...]:
    """Why a peer would not begin, a sentence each.

    Args:
        given: the options.
        config: what they, and those of earlier starts, say of this machine.
        state: what is on disk.
        wanted: which run is meant.
        entry: how the peer would come into it.
    """
    run, network = entry.run, config.network
    checks: list[Callable[[], object]] = [
        partial(require_founder, given),
        partial(require_quota, network, state),
        partial(own_id, network, state),
        partial(_require_way_in, wanted, network.initial_peers, state),
    ]
    if given.invitation:
        checks.append(partial(read_invitation, given.invitation))
    if given.tensorboard:
        checks.append(writer_type)
    if entry.founds:
        checks.append(partial(require_finished, wanted, state))
    elif run:
        checks.append(partial(wanted.require, run))
    if run:
        checks.append(partial(_require_text, run, config.corpus, entry.directory))
    if run and (given.tokenizer or entry.founds):
        checks.append(partial(founders_tokenizer, run, given.tokenizer))
    if run and entry.founds:
        checks.append(partial(founders_weights, run, given.initialise_from))
    return tuple(dict.fromkeys(why for check in checks if (why := _refusal(check))))


def _require_way_in(wanted: Wanted, addresses: Collection[str], state: StateDirectory) -> None:
    if wanted.run_id or state.run_ids:  # else a machine is looked at for whatever run there may be
        require_way_in(wanted, addresses, state)


def _require_text(run: RunConfig, corpus: CorpusSection, directory: RunDirectory | None) -> None:
    remembered = directory.read_text_folder() if directory else None
    folder = remembered if corpus.folder is None else corpus.folder
    corpus_of(run, folder, follow_links=corpus.follow_links)


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except SwarmError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None

"""What swarm-peer would refuse of its options; swarm-doctor says it before a peer is started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from peers.options import Options
from peers.peer import require_founder
from peers.tensorboard import writer_type
from swarm.config import PeerConfig, RunConfig
from swarm.errors import SwarmError
from swarm.network.invitations import read_invitation
from swarm.peer.run_start import founders_tokenizer, founders_weights
from swarm.peer.run_text import corpus_of
from swarm.peer.wanted import Wanted


def refusals(
    given: Options, config: PeerConfig, run: RunConfig | None, *, joins: bool
) -> tuple[str, ...]:
    """Why a peer would not begin with these options, a sentence each.

    Args:
        given: the options.
        config: what they say of this machine.
        run: that the peer would be in; None: not known.
        joins: whether others are in that run; else the peer founds it.
    """
    checks: list[Callable[[], object]] = [partial(require_founder, given)]
    if given.invitation:
        checks.append(partial(read_invitation, given.invitation))
    if given.tensorboard:
        checks.append(writer_type)
    if run and joins:
        wanted = given.run_config() if given.run else None
        settings = {} if wanted else given.asked_of_run()
        checks.append(partial(Wanted(run=wanted, settings=settings).require, run))
    if run and (config.corpus.folder or not joins):
        checks.append(partial(corpus_of, run, config.corpus.folder))
    if run and (given.tokenizer or not joins):
        checks.append(partial(founders_tokenizer, run, given.tokenizer))
    if run and not joins:
        checks.append(partial(founders_weights, run, given.initialise_from))
    return tuple(why for check in checks if (why := _refusal(check)))


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except SwarmError as error:
        return str(error)
    return None
